"""A command of the command line in this process, with what it wrote."""

import contextlib
import io
import sys
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from shardrules._cli import APP, run
from shardrules._cli.process import code_of


class Result(NamedTuple):
    """How a command ended, and what it wrote."""

    exit_code: int
    stdout_bytes: bytes
    stderr_bytes: bytes

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode()

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode()

    @property
    def output(self) -> str:
        """Both streams, one after the other."""
        return self.stdout + self.stderr


class _Screen(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def invoke(*words: object, is_terminal: bool = False) -> Result:
    """Runs `shardrules` with these words; its streams are a terminal, or files."""
    kind = _Screen if is_terminal else io.TextIOWrapper
    streams = [kind(io.BytesIO(), encoding="utf-8", write_through=True) for _ in "oe"]
    with (
        mock.patch.object(sys, "argv", ["shardrules", *map(str, words)]),
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
        code = _exit_code()
    return Result(code, *(stream.buffer.getvalue() for stream in streams))


def _exit_code() -> int:
    try:
        return run()
    except BaseException as error:
        return code_of(error)


def options_of(command: str, *words: object) -> SimpleNamespace:
    """The options of a command, as its function gets them."""
    with APP.make_context("shardrules", [command, *map(str, words)]) as ctx:
        name, own, rest = APP.resolve_command(ctx, [command, *map(str, words)])
        return SimpleNamespace(**own.make_context(name, rest, parent=ctx).params)
