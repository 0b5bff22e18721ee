"""The commands of docs/command-line.md, made of their tables: `python -m tests.support.command_page` writes them."""

from __future__ import annotations

import re

import click

from shardrules._cli.app import APP
from shardrules._cli.commands import COMMANDS
from shardrules._cli.options import GROUP_OF
from tests.support.folders import ROOT

PAGE = ROOT / "docs" / "command-line.md"
_COMMANDS = re.compile(r"(?<=<!-- commands -->\n).*?(?=<!-- /commands -->)", re.S)
_OF_ALL = ("quiet", "color")


def written(text: str) -> str:
    """The page with the commands as they are."""
    general = [_option(option) for option in _parameters("plan") if option.name in _OF_ALL]
    parts = ["", *map(_section, COMMANDS), "## All commands", "", *_table("option", general), ""]
    return _COMMANDS.sub(lambda _: "\n".join([*parts, ""]), text)


def _parameters(name: str) -> list[click.Parameter]:
    return APP.get_command(click.Context(APP), name).params


def _section(name: str) -> str:
    entry = COMMANDS[name]
    lines = [f"## {name}", "", *map(str.strip, entry.function.__doc__.strip().splitlines()), ""]
    lines += [f"Example: `shardrules {name} {entry.example}".rstrip() + "`", ""]
    options = [option for option in _parameters(name) if option.name not in _OF_ALL]
    groups = dict.fromkeys(GROUP_OF[option.name] for option in options)
    for group in groups:
        rows = [_option(option) for option in options if GROUP_OF[option.name] == group]
        lines += [*_table(group.lower(), rows), ""]
    return "\n".join(lines)


def _table(head: str, rows: list[tuple[str, str]]) -> list[str]:
    return [
        f"| {head} | meaning |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in rows),
    ]


def _option(option: click.Parameter) -> tuple[str, str]:
    if isinstance(option, click.Argument):
        return option.metavar, option.line
    flags = " ".join([", ".join(option.opts), *([] if option.is_flag else [option.metavar])])
    has_default = isinstance(option.default, str | int) and not option.is_flag
    default = f" Default: {option.default}." if has_default else ""
    required = " Required." if option.required else ""
    return flags, option.help + default + required


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
