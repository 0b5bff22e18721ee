"""Findings as output: in colours, as JSON, or as annotations."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from shardrules._cli.process import hint, is_quiet
from shardrules._plan.findings import finding_lines, github_commands

if TYPE_CHECKING:
    from shardrules._plan.findings import Findings

_STYLES: Final[dict[str, dict[str, Any]]] = {
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "info": {"fg": "cyan"},
}
_DECLARED: Final = re.compile(r"\b(optional|data)_axes=\[([^]]*)\]")
"""Arguments in the fixes of findings that are options here."""


def print_text(text: str) -> None:
    """Print lines, with their colours where the stream has them."""
    click.echo(text, file=sys.stdout)


def show_findings(
    findings: Findings, format: str, file: str | None = None, lines: Sequence[int] = ()
) -> None:
    """Show findings in a format; annotations are at the lines of the rules in a file."""
    if format == "json":
        print(findings.to_json())
        return
    if format == "github":
        job = click.get_current_context().obj
        title = f"{job} shardrules" if isinstance(job, str) else "shardrules"
        commands = github_commands(findings, _from_root(file), lines, title)
        print(commands or findings.notes[0])
        return
    for finding in findings:
        label, message, *details = finding_lines(finding)
        print_text(f"{click.style(label, **_STYLES[finding.level])}: {message}")
        print_text(_DECLARED.sub(_as_option, "\n".join(details)))
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


def _from_root(file: str | None) -> str | None:
    """Return a file from the root of GitHub's checkout, where it looks for it."""
    path, root = Path(file or "").resolve(), os.environ.get("GITHUB_WORKSPACE")
    if file and root and path.is_relative_to(top := Path(root).resolve()):
        return path.relative_to(top).as_posix()
    return file


def write_report(html: str, page: str) -> None:
    """Write an HTML report, and tell of it."""
    from shardrules._base.atomic_write import write_text

    write_text(Path(html), page)
    hint(f"{html}: a report in one file, which works offline")
