"""`shardrules`: its commands, of which it imports the one that runs, and its exit code.

`shardrules --help` costs typer and rich, and nothing of what the commands do. Must not know what
they do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, ParamSpec

import typer
from typer.core import TyperGroup

from shardrules._cli.process import FAILED, code_of, note
from shardrules._printable import printable

__all__ = ["COMMANDS", "app", "run"]

COMMANDS: Final = {
    "plan": "Show the spec of every array, its bytes on each device, and the time of a step.",
    "check": "Find mistakes in the rules. Exits with 1 for findings of at least the level "
    "--fail-on.",
    "verify": "Compare a compiled function with its plan. Exits as check does.",
    "explain": "Explain the spec of one array: the rules that match it, and each correction.",
    "sweep": "Compare meshes for one set of rules, the best first: by the time of a step, or by "
    "bytes.",
    "load": "Tell what shardrules.load would read: bytes per process and device, in flight, time.",
    "suggest": "Write rules for a model. On standard output: shardrules suggest MODEL ... > "
    "rules.toml.",
    "diff": "Show the differences between two plans. Exits with 1 if there are any.",
    "demo": "Plan DeepSeek-V3 with real rules: the finding, the fix, the bytes, the report.",
}
"""What each module of `commands` does, as its docstring says it: `--help` imports none of them."""

_P = ParamSpec("_P")
# The class of the click that typer is built on.
_UsageError: Any = typer.BadParameter.__mro__[1]


class _Commands(TyperGroup):
    """Commands that are names and lines of help until one of them is to run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As of any group, after the command's own module is imported."""
        if args[0] in COMMANDS:
            self.commands[args[0]] = _command(args[0])
        return super().resolve_command(ctx, args)


def _command(name: str) -> Any:
    """The command of this name, with its options."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(_ended(import_module(f"shardrules._cli.commands.{name}").command))
    return typer.main.get_command(alone)


def _ended(command: Callable[_P, None]) -> Callable[_P, None]:
    """The command; whatever it raises becomes its exit code, which typer would not choose."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except BaseException as error:
            raise typer.Exit(code_of(error)) from None

    return run


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plan, check and budget the sharding of a JAX model's arrays, without a device.",
)
for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


def run() -> int:
    """Runs the command that the process's arguments name, and returns the exit code."""
    try:
        return app(standalone_mode=False) or 0
    except _UsageError as error:
        # Without arguments typer has shown the help already.
        if len(sys.argv) > 1:
            note(f"error: {printable(error.format_message())}; see --help")
        return FAILED
