"""The commands of docs/command-line.md, made of them: `python -m tests.support.command_page` writes them."""

import re
from collections import Counter

import click

from shardrules._cli import APP
from shardrules._cli.project import command_named, names
from tests.support.folders import ROOT

PAGE = ROOT / "docs" / "command-line.md"
_COMMANDS = re.compile(r"(?<=<!-- commands -->\n).*?(?=<!-- /commands -->)", re.S)


def written(text: str) -> str:
    """The page with the commands as they are; what is of several commands is said once."""
    commands = [*map(command_named, names())]
    counts = Counter(row for command in commands for row in map(_row, command.params))
    shared = [row for row, count in counts.items() if count > 1]
    parts = ["", *(_section(command, shared) for command in commands)]
    parts += ["## Options of several commands", "", *_table(shared), ""]
    return _COMMANDS.sub(lambda _: "\n".join([*parts, ""]), text)


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
    PAGE.write_text(written(PAGE.read_text()))
