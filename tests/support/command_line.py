"""A command of the command line in this process, with what it wrote."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import NamedTuple
from unittest import mock

from shardrules._cli.app import run
from shardrules._cli.process import code_of


class Done(NamedTuple):
    """A command that ended."""

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


def invoke(*words: object) -> Done:
    """Runs `shardrules` with these words; no stream is a terminal."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in "oe"]
    with (
        mock.patch.object(sys, "argv", ["shardrules", *map(str, words)]),
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
        code = ended()
    return Done(code, *(stream.buffer.getvalue() for stream in streams))


def ended() -> int:
    """The exit code of the command that `sys.argv` names."""
    try:
        return run()
    except BaseException as error:
        return code_of(error)
