"""The process around a command: its streams, its signals and its exit code.

0 is success, 1 findings or differences, 2 whatever else went wrong, and 128 + N the signal N, as
shells have it; a reader that has left is SIGPIPE. Costs a few system calls. Must not know what
commands do.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Final, NoReturn

from shardrules._file_error import FileError
from shardrules._printable import printable

__all__ = ["FAILED", "code_of", "exit_with", "note"]

FAILED: Final = 2
"""The exit code of whatever has no result."""
_OF_SIGNALS: Final = 128
_SIGPIPE: Final = 13
# Windows has no SIGHUP.
_ENDING: Final = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_BAD_INPUT: Final = (ValueError, TypeError, KeyError, OSError, ImportError, RecursionError)


class _EndedError(BaseException):
    """A signal that ends the process; as an exception it lets `finally` clauses run.

    No SystemExit: that of a module of the user's is a mistake there.
    """


def exit_with(command: Callable[[], int]) -> NoReturn:
    """Runs the command line and exits with the code that it returns, or that its end has."""
    _open_streams()
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup's ignoring stays
            signal.signal(number, _end)
    try:
        code = command()
        sys.stdout.flush()
    except BaseException as error:
        code = code_of(error)
    for number in (signal.SIGINT, *_ENDING):
        signal.signal(number, signal.SIG_DFL)  # from here on there is nothing to tidy
    _drop_what_is_not_taken()
    sys.exit(code)


def code_of(error: BaseException) -> int:
    """The exit code of what has ended a command, of which a line on stderr tells.

    In Python's development mode (PYTHONDEVMODE=1) the traceback stands above it.
    """
    if isinstance(error, BrokenPipeError | SystemExit):  # rich and typer make the one the other
        return _OF_SIGNALS + _SIGPIPE
    if isinstance(error, KeyboardInterrupt):
        return _OF_SIGNALS + signal.SIGINT
    if isinstance(error, _EndedError):
        return _OF_SIGNALS + int(error.args[0])
    if sys.flags.dev_mode:
        sys.excepthook(type(error), error, error.__traceback__)
    note(f"error: {_told(error)}")
    return FAILED


def note(text: str) -> None:
    """Writes a line to stderr, which may be full: that is no reason to fail."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def _told(error: BaseException) -> str:
    if isinstance(error, FileError | re.error):  # printable, and perhaps with lines of their own
        return str(error)
    if isinstance(error, MemoryError):
        return printable(f"there is not enough memory for this: {error}".removesuffix(": "))
    if isinstance(error, _BAD_INPUT):
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        return printable(str(text))
    return printable(
        f"{type(error).__name__}: {error}: this is a bug of shardrules; please report it, with "
        "the traceback that PYTHONDEVMODE=1 shows"
    )


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise _EndedError(number)


def _open_streams() -> None:
    """What is closed becomes the null device, lest the next file that is opened takes its place.

    And what a stream's encoding lacks is written as an escape.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_what_is_not_taken() -> None:
    """Text that a stream does not take would be an error once more when Python ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
