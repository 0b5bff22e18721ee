"""`shardrules plan`: the spec of every array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardrules._cli import options
from shardrules._cli.command import command, option
from shardrules._cli.types import FILE

if TYPE_CHECKING:
    from shardrules._cli.planning import Planned
    from shardrules._plan.plan import Plan

_MOST_MESHES: Final = 40


@command("model.json -r rules.toml -m fsdp=8,tp=4 --optimizer adam --hbm 96GB")
@options.of_model_or_lock
@options.how_to_plan
@options.of_model_on
@options.memory()
@options.formats("text", "json")
@option("--lock", type=FILE, help="Write a lockfile to this path.")
@options.html
def plan(
    *, model: str, how: options.HowToPlan, mesh: options.Sizes | None, memory: options.ToCount,
    format: str, lock: str | None, html: str | None,
) -> None:  # fmt: skip
    """Show the spec of every array, and its bytes on each device."""
    from shardrules._base.text import bytes_shown
    from shardrules._cli import planning, show
    from shardrules._plan.report import plan_json

    planning.check_targets({"--lock": lock, "--html": html}, (model, *how.rules))
    planned = planning.plan_model(model, how, mesh)
    needed = planned.plan.bytes_per_device(**memory.training)
    # Made before anything is written: a failure leaves no file behind.
    page = html and _page(planned, memory)
    if lock:
        planned.plan.lock(lock)
    if html and page:
        show.write_report(html, page)
    if format == "json":
        print(plan_json(planned.plan, needed, memory.hbm))
        return
    _print(planned.plan)
    print(needed)
    if memory.hbm is not None:
        fits = needed.max <= memory.hbm
        print(f"{'fits' if fits else 'DOES NOT FIT'} into {bytes_shown(memory.hbm)}")


def _print(plan: Plan) -> None:
    """Print the heading and all folded paths, those in red that are not as a rule says."""
    from shardrules._cli.show import print_table
    from shardrules._plan.kinds import DEFAULT_LARGE, is_replicated
    from shardrules._plan.report import heading, plan_table

    kinds = [plan.kinds[row.group] for row in plan.folded]
    alarming = [
        kind.status != "placed"
        or (kind.bytes >= DEFAULT_LARGE and is_replicated(kind, plan.axis_sizes))
        for kind in kinds
    ]
    print(heading(plan))
    print_table(plan_table(plan, plan.folded), alarming)


def _page(planned: Planned, memory: options.ToCount) -> str:
    """Return the HTML report: the plan, its findings, meshes and suggested rules to compare."""
    from shardrules._cli.process import hint, working
    from shardrules._plan.suggest.suggest import suggest
    from shardrules._rules.logical_rules import LogicalRules

    plan, rules = planned.plan, planned.rules.rules
    sections: list[Any] = [plan.check(**planned.rules.declared)]
    counted = {"hbm": memory.hbm, **memory.training}
    axes = [axis for axis, size in plan.axis_sizes.items() if size > 1]
    with working("trying meshes"):
        if plan.devices > 1:
            sections.append(plan.sweep(axes=axes, **counted)[:_MOST_MESHES])
        if not isinstance(rules, LogicalRules):
            try:
                sections.append(suggest(plan, dialect=rules.dialect))
            except ValueError as error:
                hint(f"note: the report has no suggested rules: {error}")
    return plan.to_html(sections=sections, title=planned.model, **counted)
