"""`shardrules check`: the findings of a plan, or a patch of its rules."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from typing import Annotated, Final

from shardrules._cli import values
from shardrules._cli.arguments import Option
from shardrules._cli.findings import check_findings_options, code_for, report_findings
from shardrules._cli.inputs import Planned, load_patch
from shardrules._cli.loading import load
from shardrules._cli.options import (
    MAX_MEMORY,
    Companions,
    DialectName,
    FailOn,
    FindingsFormat,
    Hbm,
    HeadDim,
    MaxMemory,
    Mesh,
    MinSize,
    NoFallbacks,
    RulesFile,
    Source,
    Stacked,
)
from shardrules._cli.process import note
from shardrules._files.modules import is_module_form
from shardrules._files.rule_places import NOWHERE, rule_places
from shardrules._plan.findings import Declared, Findings
from shardrules._rules.rules import Rules
from shardrules._text import brief, byte_count, is_command

__all__ = ["command"]

_FIXED: Final = frozenset({"unmatched", "catch-all", "dead"})
"""The kinds of findings that --fix can mend."""
# Set by the runners of GitHub, Azure and TeamCity, which take commands from a job's output.
_RUNNERS: Final = ("GITHUB_ACTIONS", "TF_BUILD", "TEAMCITY_VERSION")


def command(
    source: Source,
    rules: RulesFile | None = None,
    mesh: Mesh | None = None,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = MAX_MEMORY,
    no_fallbacks: NoFallbacks = False,
    stacked: Stacked = None,
    companions: Companions = None,
    format_: FindingsFormat = "text",
    fail_on: FailOn = "error",
    large: Annotated[
        str, Option(help="Minimum bytes per device for a replicated leaf to be a warning.")
    ] = "16MiB",
    replicated: Annotated[
        list[str] | None,
        Option(help="Pattern of paths that are replicated on purpose; repeatable."),
    ] = None,
    optional_axes: Annotated[
        str | None, Option(help="Axes of the rules that a mesh may lack, such as sp,ep.")
    ] = None,
    data_axes: Annotated[
        str | None, Option(help="Mesh axes that shard only batches, and no leaf, such as dp.")
    ] = None,
    head_dim: HeadDim = None,
    hbm: Hbm = None,
    level: Annotated[
        list[str] | None,
        Option(help="Level for a kind of finding: dead=off, siblings=error; repeatable."),
    ] = None,
    fix: Annotated[
        bool,
        Option(
            "--fix",
            help="Print a patch of the rule file instead: rules that decide nothing and the "
            "catch-all go, missing rules come. Exits with 1 if there is one.",
        ),
    ] = False,
) -> int:
    """Find mistakes in the rules. Exits with 1 for findings of at least the level --fail-on."""
    check_findings_options(format_, fail_on)
    if fix and format_ != "text":
        raise ValueError("--fix prints a patch, so leave out --format")
    if fix and rules is None:
        raise ValueError("--fix patches a rule file, so give a model, and --rules")
    size, levels = byte_count(large), values.levels(level or ())
    declared = Declared(
        replicated=tuple(replicated or ()),
        optional_axes=tuple(values.names(optional_axes)),
        data_axes=tuple(values.names(data_axes)),
    )
    planned = load(
        source, rules, mesh, dialect, min_size,
        max_memory=max_memory, no_fallbacks=no_fallbacks,
        stacked=stacked, companions=companions, declared=declared,
    )  # fmt: skip
    findings = planned.plan.check(
        **planned.rules.declared,
        large=size,
        head_dim=head_dim,
        hbm=values.memory("--hbm", "a device", hbm),
        levels=levels,
    )
    if not fix or rules is None:
        places = NOWHERE
        if format_ == "github" and rules is not None:
            places = rule_places(rules, len(planned.plan.rules))
        code = report_findings(findings, format_, fail_on, places)
        if format_ == "text" and rules is not None and _can_fix(rules, planned, findings):
            print("--fix prints a patch of the rules")
        return code
    if patch := load_patch(rules, planned, dialect, head_dim):
        _check_obeyed(patch)
        # As bytes: a file's line ends and characters, whatever those of standard output are.
        sys.stdout.buffer.write(patch.encode())
        return 0 if fail_on == "never" else 1
    if not findings.at_least("warning"):
        return 0
    note(f"no rule is to be removed or added; check without --fix: {findings.summary}")
    return code_for(findings, fail_on)


def _check_obeyed(patch: str) -> None:
    """Checks that a CI runner, which reads the output, obeys no line of a patch: it must be exact.

    Raises:
        ValueError: It would.
    """
    if not any(name in os.environ for name in _RUNNERS):
        return
    with suppress(OSError):  # a stream without a number
        if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
            return
    if line := next(filter(is_command, patch.splitlines()), ""):
        raise ValueError(
            f"--fix: the CI's runner would obey a line of the patch, {brief(line)}; write the "
            "patch to a file: shardrules check ... --fix > fix.patch"
        )


def _can_fix(source: str, planned: Planned, findings: Findings) -> bool:
    """Whether --fix has a patch of these rules, probably."""
    is_patched = isinstance(planned.plan.rules, Rules) and not planned.rules.companions
    found = (finding.kind for finding in findings.at_least("warning"))
    return is_patched and not is_module_form(source) and not _FIXED.isdisjoint(found)
