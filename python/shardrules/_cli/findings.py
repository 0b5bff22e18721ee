"""Findings as a command's result: the options about them, their output and its exit code.

Must not know who found them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from shardrules._cli.show import show_findings
from shardrules._cli.values import one_of
from shardrules._files.rule_places import NOWHERE, RulePlaces
from shardrules._plan.findings import LEVELS, Findings, Level, conclusion

__all__ = ["check_findings_options", "code_for", "report_findings"]


def check_findings_options(format_: str, fail_on: str) -> None:
    """Checks --format and --fail-on."""
    one_of("--format", format_, ("text", "json", "github"))
    one_of("--fail-on", fail_on, (*LEVELS, "never"))


def report_findings(
    findings: Findings, format_: str, fail_on: str, places: RulePlaces = NOWHERE
) -> int:
    """Shows findings, and returns the exit code."""
    if format_ == "json":
        print(findings.to_json())
    elif format_ == "github":
        file, lines = places
        print(findings.to_github(_in_repository(file), lines) or conclusion(findings))
    else:
        show_findings(findings)
    return code_for(findings, fail_on)


def _in_repository(file: str | None) -> str | None:
    """The file from the root of GitHub's checkout, from which annotations name it."""
    root = os.environ.get("GITHUB_WORKSPACE")
    if file is None or not root:
        return file
    path, top = Path(file).resolve(), Path(root).resolve()
    return path.relative_to(top).as_posix() if path.is_relative_to(top) else file


def code_for(findings: Findings, fail_on: str) -> int:
    """The exit code: 1 if there are findings of at least the level."""
    return 1 if fail_on != "never" and findings.at_least(cast(Level, fail_on)) else 0
