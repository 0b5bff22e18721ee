"""The commands of docs/command-line.md, made of them: `python -m tests.support.command_page` writes them."""

from __future__ import annotations

import re

import click

from shardrules._cli.app import APP
from shardrules._cli.command import commands
from tests.support.folders import ROOT

PAGE = ROOT / "docs" / "command-line.md"
_COMMANDS = re.compile(r"(?<=<!-- commands -->\n).*?(?=<!-- /commands -->)", re.S)
_OF_ALL = ("quiet", "color")


def written(text: str) -> str:
    """The page with the commands as they are."""
    made = [*commands()]
    general = [each for each in made[0].params if each.name in _OF_ALL]
    parts = ["", *map(_section, made), "## All commands", "", *_table(general), ""]
    return _COMMANDS.sub(lambda _: "\n".join([*parts, ""]), text)


def _section(command: click.Command) -> str:
    options = [option for option in command.params if option.name not in _OF_ALL]
    example = command.epilog.replace(": ", ": `") + "`"
    return "\n".join(
        [f"## {command.name}", "", command.help, "", example, "", *_table(options), ""]
    )


def _table(options: list[click.Parameter]) -> list[str]:
    return ["| option | meaning |", "|---|---|", *map(_row, options)]


def _row(option: click.Parameter) -> str:
    """The help of click, on one line."""
    cells = option.get_help_record(click.Context(APP, show_default=True))
    usage, meaning = (cell.replace("|", "\\|") for cell in cells)
    return f"| `{usage}` | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
