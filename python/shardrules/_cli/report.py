"""The HTML report of `shardrules plan --html`: the plan, its findings, meshes and rules to compare.

Costs a check, a sweep and a suggestion. Must not write a file.
"""

from __future__ import annotations

from typing import Any, Final

from shardrules._cli.inputs import Planned
from shardrules._cli.process import note
from shardrules._cli.show import working
from shardrules._estimate.sweep import Sweep
from shardrules._plan.memory import Room
from shardrules._rules.logical_rules import LogicalRules
from shardrules._suggest.suggest import suggest
from shardrules._suggest.suggestion import Suggestion
from shardrules._text import printable

__all__ = ["report_page"]

_MOST_BARS: Final = 40


def report_page(planned: Planned, room: Room, counted: dict[str, Any], step: dict[str, Any]) -> str:
    """The HTML report; its numbers include the gradients and moments in `counted`."""
    plan = planned.plan
    findings = plan.check(**planned.rules.declared)
    given = {"hbm": room.hbm, "host_memory": room.host, **counted}
    ones = {axis: size for axis, size in plan.axis_sizes.items() if size == 1}
    with working("trying meshes"):
        found = plan.sweep(fixed=ones, **step, **given) if plan.devices > 1 else None
        suggestion = _suggestion(planned)
    chart = found and Sweep(found[:_MOST_BARS])
    return plan.to_html(
        findings=findings, sweep=chart, title=planned.model, suggestion=suggestion, **given
    )


def _suggestion(planned: Planned) -> Suggestion | None:
    """Rules that `suggest` writes for the same arrays and mesh; None, with a note, if it cannot."""
    rules = planned.rules.rules
    if isinstance(rules, LogicalRules):
        return None
    try:
        return suggest(planned.plan, dialect=rules.dialect)
    except ValueError as error:
        note(printable(f"note: the report has no suggested rules: {error}"))
        return None
