"""Findings and tables as output, in the colours and width of a terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from shardrules._cli.process import is_quiet
from shardrules._plan.findings import finding_lines, github_commands

if TYPE_CHECKING:
    from shardrules._plan.answers import Table
    from shardrules._plan.findings import Findings

_STYLES: Final[dict[str, dict[str, Any]]] = {
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "info": {"fg": "cyan"},
}
_DECLARED: Final = re.compile(r"\b(optional|data)_axes=\[([^]]*)\]")
"""Arguments in the fixes of findings that are options here."""


def print_text(text: str) -> None:
    """Print lines, with their colours where the stream or --color has them."""
    click.echo(text, file=sys.stdout)


def print_table(table: Table, alarming: Sequence[bool]) -> None:
    """Print a table, on a terminal within its width; the head is bold and some rows are red."""
    heads = [column.head for column in table.columns]
    width = shutil.get_terminal_size().columns
    if sys.stdout.isatty():
        table = table.narrow(width)
    head, *rows = table.lines()
    lines = [click.style(head, bold=True)]
    lines += (
        click.style(row, fg="red") if is_red else row
        for row, is_red in zip(rows, alarming, strict=True)
    )
    if gone := [head for head in heads if head not in {column.head for column in table.columns}]:
        lines.append(click.style(f"... without {', '.join(gone)}, in {width} columns", dim=True))
    print_text("\n".join(lines))


def show_findings(
    findings: Findings, format: str, file: str | None = None, lines: Sequence[int] = ()
) -> None:
    """Show findings in a format; annotations are at the lines of the rules in a file."""
    if format == "json":
        print(findings.to_json())
        return
    if format == "github":
        commands = github_commands(findings, from_root(file), lines, page_title())
        print(commands or findings.notes[0])
        return
    for finding in findings:
        label, message, *more = finding_lines(finding)
        print_text(f"{click.style(label, **_STYLES[finding.level])}: {message}")
        text = _DECLARED.sub(_as_option, "\n".join(more))
        print_text(click.style(text, dim=True) if finding.level == "info" else text)
    print_hint("text", click.style(findings.notes[0], bold=True))


def print_hint(format: str, *lines: object) -> None:
    """Print lines beside the result, unless it is for programs or --quiet is given."""
    if format == "text" and not is_quiet():
        print_text("\n".join(map(str, lines)))


def _as_option(match: re.Match[str]) -> str:
    axes = match[2].replace("'", "").replace(" ", "")
    return f"--{match[1]}-axes {axes}"


def exit_code(findings: Findings, fail_on: Any) -> int:
    """Return 1 if there are findings of at least the level --fail-on."""
    return 1 if fail_on != "never" and findings.at_least(fail_on) else 0


def page_title() -> str:
    """Return the title of annotations, which begins with the job."""
    job = click.get_current_context().obj
    return f"{job} shardrules" if isinstance(job, str) else "shardrules"


def from_root(file: str | None) -> str | None:
    """Return a file from the root of GitHub's checkout, or of the repository."""
    if file:
        path = Path(file).resolve()
        root = os.environ.get("GITHUB_WORKSPACE") or next(
            (folder for folder in path.parents if (folder / ".git").exists()), None
        )
        if root and path.is_relative_to(top := Path(root).resolve()):
            file = path.relative_to(top).as_posix()
    return file


def write_report(html: str, page: str) -> None:
    """Write an HTML report, and tell of it."""
    from shardrules._base.atomic_write import write_text
    from shardrules._cli.process import hint

    write_text(Path(html), page)
    hint(f"{html}: a report in one file, which works offline")
