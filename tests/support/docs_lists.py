"""Lists of which docs and type checkers have a copy: `python -m tests.support.docs_lists` writes them.

The kinds of findings, for docs/findings.md and `CheckKind`; and the commands, for docs/command-line.md.
"""

import re
from collections import Counter
from pathlib import Path
from textwrap import fill

import click

from shardrules._cli import APP
from shardrules._cli.project import command_named, names
from shardrules._plan.check_context import KINDS
from tests.support.folders import ROOT

LITERAL = ROOT / "python" / "shardrules" / "_plan" / "findings.py"
FINDINGS, COMMANDS = ROOT / "docs" / "findings.md", ROOT / "docs" / "command-line.md"
_IN_LITERAL = re.compile(r"(?<=^CheckKind = Literal\[\n).*?(?=^\]  # fmt)", re.M | re.S)
_IN_FINDINGS = re.compile(r"(?<= writes this list\.\n\n).*?(?=\n## )", re.S)
_IN_COMMANDS = re.compile(r"(?<=<!-- commands -->\n).*?(?=<!-- /commands -->)", re.S)


def texts() -> dict[Path, str]:
    """Each file's text, with its list as it is to be."""
    lists = [
        (LITERAL, _IN_LITERAL, _literal()),
        (FINDINGS, _IN_FINDINGS, _kinds()),
        (COMMANDS, _IN_COMMANDS, _commands()),
    ]
    return {
        file: place.sub(lambda _, text=text: text, file.read_text(encoding="utf-8"), 1) for file, place, text in lists
    }


def _literal() -> str:
    kinds = ", ".join(f'"{kind}"' for kind in KINDS) + ","
    return fill(kinds, 96, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False) + "\n"


def _kinds() -> str:
    return "\n".join(f"### {kind}\n**{levels.capitalize()}**: {about}.\n" for kind, (levels, about) in KINDS.items())


def _commands() -> str:
    """Of each command its help and options; those of several commands stand once, at the end."""
    commands = [*map(command_named, names())]
    counts = Counter(row for command in commands for row in map(_row, command.params))
    shared = [row for row, count in counts.items() if count > 1]
    parts = ["", *(_section(command, shared) for command in commands)]
    return "\n".join([*parts, "## Options of several commands", "", *_table(shared), "", ""])


def _section(command: click.Command, shared: list[str]) -> str:
    rows = [row for row in map(_row, command.params) if row not in shared]
    others = [_name(each) for each in command.params if _row(each) in shared]
    example = command.epilog.removeprefix("Example: ")
    about = f"{' '.join(command.help.split())} Options, beside {', '.join(others)}:"
    return "\n".join([f"## {command.name}", "", f"`{example}`", "", about, "", *_table(rows), ""])


def _table(rows: list[str]) -> list[str]:
    return ["| option | meaning |", "|---|---|", *rows] if rows else []


def _name(option: click.Parameter) -> str:
    return f"`{option.metavar if isinstance(option, click.Argument) else option.opts[-1]}`"


def _row(option: click.Parameter) -> str:
    """The help of click, on one line."""
    cells = option.get_help_record(click.Context(APP, show_default=True))
    usage, meaning = (cell.replace("|", "\\|") for cell in cells)
    return f"| `{usage}` | {meaning} |"


if __name__ == "__main__":
    for file, text in texts().items():
        file.write_text(text, encoding="utf-8")
