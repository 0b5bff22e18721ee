"""`shardrules check`: mistakes in the rules."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from shardrules._cli import options, types
from shardrules._cli.command import command, option

if TYPE_CHECKING:
    from shardrules._cli.planning import Planned
    from shardrules._plan.findings import Finding, Findings
    from shardrules._plan.plan import Plan

_ADDED: Final = frozenset({"unmatched", "catch-all"})
"""Kinds of findings that --fix writes rules for."""
# Set by the runners of GitHub, Azure and TeamCity, which take commands from a job's output.
_RUNNERS: Final = ("GITHUB_ACTIONS", "TF_BUILD", "TEAMCITY_VERSION")


@command("model.json -r rules.toml -m fsdp=8,tp=4 --fail-on warning", has_jobs=True)
@options.of_model_or_lock
@options.how_to_plan
@options.of_model_on
@options.memory("hbm", "budget")
@option("--budget", type=types.PLANNED_BUDGET, help="Maximum bytes of all that is counted in a "
    "device's memory, device=1.2GB.")  # fmt: skip
@options.fail_on
@option("--large", type=types.BYTES, default="16MiB",
    help="Minimum bytes per device for a replicated leaf to be a warning.")  # fmt: skip
@options.head_dim
@option("--replicated", metavar="PATTERN", multiple=True,
    help="Pattern of paths that are replicated on purpose; repeatable.")  # fmt: skip
@option("--optional-axes", type=types.AXES, default="", show_default=False,
    help="Axes of the rules that a mesh may lack, such as sp,ep.")  # fmt: skip
@option("--data-axes", type=types.AXES, default="", show_default=False,
    help="Mesh axes that shard only batches, and no leaf, such as dp.")  # fmt: skip
@option("--level", type=types.LEVELS,
    help="Level for a kind of finding: dead=off, uncut=error; repeatable.")  # fmt: skip
@option("--fix", is_flag=True, in_job=False, of_one_job=True, excludes=("format",),
    help="Print the rules that are missing, instead of findings: as a patch of a TOML file, or to "
    "paste into another. Exits with 1 if there are some.")  # fmt: skip
@options.formats("text", "json", "github")
def check(
    *, model: str, how: options.HowToPlan, mesh: options.Sizes | None, memory: options.ToCount,
    budget: dict[str, int], fail_on: str, large: int, head_dim: int | None, level: dict[Any, Any],
    fix: bool, format: str, replicated: tuple[str, ...], optional_axes: tuple[str, ...],
    data_axes: tuple[str, ...],
) -> int:  # fmt: skip
    """Find mistakes in the rules; without SOURCE, in all jobs of the project file.

    Exits with 1 for findings of at least the level --fail-on. It is an error if the parameters,
    and the gradients and optimizer that are given, need more than --hbm, or than --budget.
    """
    from shardrules._cli import planning, show
    from shardrules._plan.files.rules import rule_places
    from shardrules._plan.findings import Declared, Findings

    if fix and len(how.rules) != 1:
        raise ValueError("--fix adds to a rule file, so give a model, and --rules of one file")
    declared = Declared(replicated=replicated, optional_axes=optional_axes, data_axes=data_axes)
    planned = planning.plan_model(model, how, mesh, declared)
    plan = planned.plan
    findings = plan.check(**planned.rules.declared, large=large, head_dim=head_dim, levels=level)
    over = _over(plan, memory, budget, level.get("memory", "error"))
    findings = Findings([*over, *findings], findings.scope)
    if fix:
        return _fix(planned, how, head_dim, findings, fail_on)
    places = rule_places(how.rules[-1], len(plan.rules)) if how.rules else (None, ())
    show.show_findings(findings, format, *places)
    kinds = {finding.kind for finding in findings.at_least("warning")}
    if how.rules and not planned.rules.companions and kinds & _ADDED:
        show.print_hint(format, "--fix prints the missing rules")
    return show.exit_code(findings, fail_on)


def _over(
    plan: Plan, memory: options.ToCount, budget: dict[str, int], level: Any
) -> Iterator[Finding]:
    """Yield a finding for the memory, and for the budget, that is less than what is planned."""
    from shardrules._base.text import bytes_shown
    from shardrules._plan.check_leaves import no_room

    hbm, allowed = memory.hbm, budget.get("device")
    if hbm is None and allowed is None:
        return
    needed = plan.bytes_per_device(**memory.training)
    sizes = [plan.kinds[part.group].device_bytes * len(part.rows) for part in plan.folded]
    largest = [plan.folded[place] for place in sorted(range(len(sizes)), key=sizes.__getitem__)]
    if hbm is not None and needed.max > hbm and level != "off":
        yield no_room(needed, hbm, largest[::-1])._replace(level=level)
    if allowed is not None and needed.max > allowed:
        finding = no_room(needed, allowed, largest[::-1])
        yield finding._replace(
            kind="budget", message=f"{needed}; the budget is {bytes_shown(allowed)}"
        )


def _fix(
    planned: Planned, how: options.HowToPlan, head_dim: int | None, findings: Findings, fail_on: str
) -> int:
    """Print the rules that a rule file lacks, and return the exit code."""
    from shardrules._cli import process, show
    from shardrules._plan.suggest.fix import fix

    text = fix(how.rules[0], planned.rules, planned.plan, dialect=how.dialect, head_dim=head_dim)
    if not text:
        if findings.at_least("warning"):
            process.hint(f"no rule is to be added; check without --fix: {findings.summary}")
        return show.exit_code(findings, fail_on)
    _check_obeyed(text)
    # As bytes: a file's line ends and characters, whatever those of standard output are.
    sys.stdout.buffer.write(text.encode())
    return 0 if fail_on == "never" else 1


def _check_obeyed(patch: str) -> None:
    """Check that a CI runner, which reads the output, obeys no line of a patch."""
    from shardrules._base.text import brief, is_command

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
