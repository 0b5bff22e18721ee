"""Process around a command: its exit code, signals and streams, and what it shows of findings.

Exit codes: 0 is success; 1 findings or differences; 2 any error; 128 + N an end by signal N, as in
shells. A closed pipe counts as SIGPIPE.
"""

from __future__ import annotations

import gc
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from shardrules._base.io import FileError
from shardrules._base.text import printable, printable_lines

if TYPE_CHECKING:
    from shardrules._plan.findings import Findings

FAILED: Final = 2
"""The exit code of a command that has no result."""
QUIET: Final = "shardrules.quiet"
"""Key of `click.Context.meta`: whether notes, hints and progress are left out."""
_OF_SIGNALS: Final = 128
_SIGPIPE: Final = 13
# Windows has no SIGHUP.
_ENDING: Final = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_OF_STEP: Final = ("shardrules called ", "shardrules compiled ")
"""Beginnings of the note beside an error of the user's step, which is none of shardrules."""
_BAD_INPUT: Final = (ValueError, TypeError, KeyError, OSError, ImportError, RecursionError)
_STYLES: Final[dict[str, dict[str, Any]]] = {
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "info": {"fg": "cyan"},
}
_AXES_IN_FIXES: Final = re.compile(r"\b(optional|data)_axes=\[([^]]*)\]")
"""Arguments in the fixes of findings that are options here."""


class _EndedError(BaseException):
    """Signal that ends the process, as an exception, so that `finally` clauses run.

    It is not a SystemExit, because a user's module that raises SystemExit is reported as an error.
    """


def exit_with(command: Callable[[], int]) -> NoReturn:
    """Run the command and exit with the code that it returns, or that of its exception."""
    _open_streams()
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup it stays ignored
            signal.signal(number, _end_process)
    try:
        code = command()
        sys.stdout.flush()
    except BaseException as error:
        code = code_of(error)
    for number in (signal.SIGINT, *_ENDING):
        signal.signal(number, signal.SIG_DFL)  # nothing is left to clean up
    _drop_unwritten()
    gc.freeze()  # else the interpreter would visit all leaves before it ends
    sys.exit(code)


def code_of(error: BaseException, where: str = "") -> int:
    """Return the exit code for an exception, and print a line about an error to stderr.

    The message begins with `where`. In Python's development mode (PYTHONDEVMODE=1) the traceback
    stands above that line.
    """
    if isinstance(error, SystemExit) and not error.code:  # of words for a shell, completed
        return 0
    if isinstance(error, BrokenPipeError | SystemExit):  # which click makes of it
        return _OF_SIGNALS + _SIGPIPE
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return _OF_SIGNALS + signal.SIGINT
    if isinstance(error, _EndedError):
        return _OF_SIGNALS + int(error.args[0])
    if sys.flags.dev_mode:
        sys.excepthook(type(error), error, error.__traceback__)
    # All but JAX's about its own frames.
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("-----")]
    print_stderr(f"error: {where}{_message(error, notes)}")
    for note in notes:
        print_stderr(note)
    return FAILED


def _message(error: BaseException, notes: list[str]) -> str:
    if isinstance(error, FileError | re.error):  # printable already, perhaps several lines
        return str(error)
    if isinstance(error, click.UsageError):
        is_missing = isinstance(error, click.MissingParameter)
        example = f"\n{error.ctx.command.epilog}" if is_missing and error.ctx else ""
        return f"{printable(error.format_message()).rstrip('.')}{example}; see --help"
    if any(note.startswith(_OF_STEP) for note in notes):
        return printable_lines(f"the step fails: {type(error).__name__}: {error}".splitlines())
    if isinstance(error, OSError) and error.filename is not None:
        return printable(f"{error.filename}: {error.strerror}; check the name and the permissions")
    if isinstance(error, _BAD_INPUT):
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        return printable(str(text))
    report = ": this is a bug in shardrules; please report it with its traceback: PYTHONDEVMODE=1"
    return printable(
        f"{type(error).__name__}: {error}{'' if isinstance(error, MemoryError) else report}"
    )


def _open_streams() -> None:
    """Replace closed streams by the null device, and escape what a stream's encoding lacks.

    Else the next file that is opened would get the number of the closed stream.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end_process(number: int, _: FrameType | None) -> NoReturn:
    raise _EndedError(number)


def _drop_unwritten() -> None:
    """Drop text that a stream does not take: Python would report it once more at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def let_signals_end() -> None:
    """Let signals end the process at once: while a compiler is at work, none would be heard."""
    for number in (signal.SIGINT, *_ENDING):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def print_stderr(text: str) -> None:
    """Write a line to stderr. A stderr that takes no text is ignored."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def is_quiet() -> bool:
    """Say whether --quiet is given."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(QUIET))


def hint(text: str) -> None:
    """Write a line to stderr, unless --quiet is given."""
    if not is_quiet():
        print_stderr(printable(text))


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show this text on a terminal while the body runs, which gets what shows another line."""
    if is_quiet() or not sys.stderr.isatty():
        yield lambda _: None
        return

    def show(text: str) -> None:
        print(f"\x1b[K{printable(text)} ...", end="\r", file=sys.stderr, flush=True)

    show(what)
    try:
        yield show
    finally:
        print(end="\x1b[K", file=sys.stderr, flush=True)


def show_findings(
    findings: Findings, format: str, fail_on: Any, file: str | None = None,
    lines: Sequence[int] = (),
) -> int:  # fmt: skip
    """Show findings in a format, and return the exit code: 1 for some of the level --fail-on.

    Annotations are at the lines of the rules in a file.
    """
    from shardrules._plan.findings import finding_lines, github_commands

    if format == "json":
        print(findings.to_json())
    elif format == "github":
        title = " ".join(filter(None, (click.get_current_context().obj, "shardrules")))
        print(github_commands(findings, _from_root(file), lines, title) or findings.notes[0])
    for finding in findings if format == "text" else ():
        label, message, *details = finding_lines(finding)
        print_text(f"{click.style(label, **_STYLES[finding.level])}: {message}")
        print_text(_AXES_IN_FIXES.sub(_axes_option, "\n".join(details)))
    print_beside(format, click.style(findings.notes[0], bold=True))
    return exit_code(findings, fail_on)


def print_text(text: str) -> None:
    """Print lines, with their colours where the stream has them."""
    click.echo(text, file=sys.stdout)


def print_beside(format: str, *lines: object) -> None:
    """Print lines beside the result, unless it is for programs or --quiet is given."""
    if format == "text" and not is_quiet():
        print_text("\n".join(map(str, lines)))


def _axes_option(match: re.Match[str]) -> str:
    axes = match[2].replace("'", "").replace(" ", "")
    return f"--{match[1]}-axes {axes}"


def exit_code(findings: Findings, fail_on: Any) -> int:
    """Return 1 if there are findings of at least the level --fail-on."""
    return 1 if fail_on != "never" and findings.at_least(fail_on) else 0


def _from_root(file: str | None) -> str | None:
    """Return a file from the root of GitHub's checkout, where it looks for it."""
    path, root = Path(file or "").resolve(), os.environ.get("GITHUB_WORKSPACE")
    if file and root and path.is_relative_to(top := Path(root).resolve()):
        return path.relative_to(top).as_posix()
    return file
