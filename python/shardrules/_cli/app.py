"""`shardrules`: its commands, of which it imports the one that runs, and its exit code.

`shardrules --help` costs argparse, and nothing of what the commands do. Must not know what they do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Final

from shardrules import __version__
from shardrules._cli.arguments import Parser, UsageError, meant, parser_of
from shardrules._cli.process import FAILED, note
from shardrules._io import FileError
from shardrules._text import printable

__all__ = ["COMMANDS", "run"]

COMMANDS: Final = {
    "plan": "Show the spec of every array, its bytes on each device, and the time of a step.",
    "check": "Find mistakes in the rules. Exits with 1 for findings of at least the level "
    "--fail-on.",
    "verify": "Compare a compiled function with its plan. Exits as check does.",
    "explain": "Explain the spec of one array: the rules that match it, and each correction.",
    "sweep": "Compare meshes for one set of rules, the best first: by the time of a step, or by "
    "bytes.",
    "load": "Tell what shardrules.load would read: bytes per process and device, in flight, time.",
    "suggest": "Write rules for a model on standard output. Exits with 1 if check warns of them.",
    "diff": "Show the differences between two plans. Exits with 1 if there are any.",
    "demo": "Plan DeepSeek-V3 with real rules: the finding, the fix, the bytes, the report.",
}
"""What each module of `commands` does, as its docstring says it: `--help` imports none of them."""


def run() -> int:
    """Runs the command that the process's arguments name, and returns the exit code.

    What the command raises is for `exit_with`.
    """
    try:
        return _run(*sys.argv[1:])
    except UsageError as error:
        note(f"error: {printable(str(error))}; see --help")
        return FAILED


def _run(name: str = "", *words: str) -> int:
    if name in COMMANDS:
        command = import_module(f"shardrules._cli.commands.{name}").command
        given = parser_of(name, command).parse(words)
        try:
            return 0 if given is None else command(**given) or 0
        except (TypeError, ValueError) as error:
            if not isinstance(error, FileError):  # whose words are those of a file
                error.args = tuple(_with_options(one, given or ()) for one in error.args)
            raise
    if name == "--version":
        print(f"shardrules {__version__}")
        return 0
    if name and not name.startswith("-"):
        near = meant(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise UsageError(f"there is no command {name!r}{near}")
    _overview().parse([name or "--help", *words])
    return 0 if name else FAILED


def _with_options(text: object, parameters: Iterable[str]) -> object:
    """A message of the library with options in the place of parameters, as people write them."""
    for name in parameters:
        if "_" in name.strip("_") and isinstance(text, str):
            option = "--" + name.replace("_", "-")
            text = re.sub(rf"\b{name}\b", option, re.sub(rf"\b{name}=", f"{option} ", text))
    return text


def _overview() -> Parser:
    """The parser that knows commands by their names and lines of help alone."""
    about = "Plan, check and budget the sharding of a JAX model's arrays, without a device."
    parser = Parser(prog="shardrules", description=about)
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        commands.add_parser(name, help=line, add_help=False)
    return parser
