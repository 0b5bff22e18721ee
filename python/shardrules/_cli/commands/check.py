"""`shardrules check`: mistakes in the rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from shardrules._cli import options
from shardrules._cli.options import option
from shardrules._cli.project import command

if TYPE_CHECKING:
    from shardrules._plan.findings import Finding
    from shardrules._plan.plan import Plan

_ADDED: Final = frozenset({"unmatched", "catch-all"})
"""Kinds of findings that --fix writes rules for."""


@command("model.json -r rules.toml -m fsdp=8,tp=4 --fail-on warning", has_jobs=True)
@options.of_model
@options.how_to_plan()
@options.of_mesh
@options.memory("hbm", "budget")
@option("--budget", type=options.PLANNED_BUDGET, help="Maximum bytes of all that is counted in a "
    "device's memory, device=1.2GB.")  # fmt: skip
@options.fail_on
@option("--large", type=options.BYTES, default="16MiB",
    help="Minimum bytes per device for a replicated leaf to be a warning.")  # fmt: skip
@options.head_dim
@option("--replicated", metavar="PATTERN", multiple=True,
    help="Pattern of paths that are replicated on purpose; repeatable.")  # fmt: skip
@option("--optional-axes", type=options.AXES, default="", show_default=False,
    help="Axes of the rules that a mesh may lack, such as sp,ep.")  # fmt: skip
@option("--data-axes", type=options.AXES, default="", show_default=False,
    help="Mesh axes that shard only batches, and no leaf, such as dp.")  # fmt: skip
@option("--level", type=options.LEVELS,
    help="Level for a kind of finding: dead=off, uncut=error; repeatable.")  # fmt: skip
@option("--fix", is_flag=True, in_job=False, excludes=("format",),
    help="Print the rules that are missing, to paste, instead of findings. Exits with 1 if there "
    "are some.")  # fmt: skip
@options.formats("text", "json", "github")
def check(
    *, model: str, how: options.HowToPlan, mesh: options.Sizes, memory: options.ToCount,
    budget: dict[str, int], fail_on: str, large: int, head_dim: int | None, level: dict[Any, Any],
    fix: bool, format: str, replicated: tuple[str, ...], optional_axes: tuple[str, ...],
    data_axes: tuple[str, ...],
) -> int:  # fmt: skip
    """Find mistakes in the rules; without SOURCE, in all jobs of the project file.

    Exits with 1 for findings of at least the level --fail-on. It is an error if the parameters,
    and the gradients and optimizer that are given, need more than --hbm, or than --budget.
    """
    from shardrules._cli import planning, process
    from shardrules._plan.files.rules import rule_places
    from shardrules._plan.findings import Declared, Findings

    declared = Declared(replicated=replicated, data_axes=data_axes)
    plan, _, rules = planning.plan_model(model, how, mesh, declared, optional_axes)
    findings = plan.check(**rules.declared, large=large, head_dim=head_dim, levels=level)
    over = [*_over_budget(plan, memory, budget, level.get("memory", "error"))]
    if over:
        findings = Findings([*over, *findings], findings.scope)
    file, lines = rule_places(how.rules[-1], len(plan.rules))
    if fix:
        from shardrules._plan.suggest.suggest import missing_text, suggest

        if rules.companions:
            raise ValueError("--fix: some leaves follow others: leave out companions, and fix that")
        suggestion = suggest(plan, head_dim=head_dim)
        if text := missing_text(how.rules[-1], plan, suggestion, is_of_tables=bool(lines)):
            print(text, end="")
            return 0 if fail_on == "never" else 1
        process.hint(f"no rule is to be added; check without --fix: {findings.summary}")
        return process.exit_code(findings, fail_on)
    code = process.show_findings(findings, format, fail_on, file, lines)
    kinds = {finding.kind for finding in findings if finding.level != "info"}
    if not rules.companions and kinds & _ADDED:
        process.print_hint(format, "--fix prints the missing rules")
    return code


def _over_budget(
    plan: Plan, memory: options.ToCount, budget: dict[str, int], level: Any
) -> Iterator[Finding]:
    """Yield a finding for the memory, and for the budget, that is less than what is planned."""
    from shardrules._base.text import bytes_shown
    from shardrules._plan.check_leaves import no_room

    if memory.hbm is None and not budget:
        return
    needed = plan.bytes_per_device(**memory.training)
    largest = sorted(
        plan.folded, key=lambda part: -plan.kinds[part.group].device_bytes * len(part.rows)
    )
    bounds: Any = (
        ("memory", memory.hbm, level, "a device has"),
        ("budget", budget.get("device"), "error", "the budget is"),
    )
    for kind, most, level_of, has in bounds:
        if most is not None and needed.max > most and level_of != "off":
            message = f"{needed}; {has} {bytes_shown(most)}"
            finding = no_room(needed, most, largest)
            yield finding._replace(kind=kind, level=level_of, message=message)
