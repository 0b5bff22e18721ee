"""Rules of a solution: from the cuts of each leaf to rules in the words of paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shardrules._base.rule_specs import RuleSpec
from shardrules._base.specs import (
    entries_of,
    entries_of_cuts,
    entry_axes,
    spec_shown,
    trimmed,
)
from shardrules._base.text import brief
from shardrules._plan.plan import Plan
from shardrules._plan.planning import plan as plan_of
from shardrules._plan.suggest.draft import draft_of_specs
from shardrules._plan.suggest.patterns import TIGHTEST
from shardrules._plan.suggest.units import units_of
from shardrules._rules.dialects import EFORMER
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._base.specs import Entries
    from shardrules._plan.suggest.choose import Cuts


def with_cuts(
    plan: Plan, cuts: Mapping[str, Cuts], heads: Mapping[str, tuple[int, ...]] | None = None
) -> Plan:
    """Plan the leaves of a plan by rules that give each of them its cuts.

    Args:
        plan: Leaves and mesh; of rules of paths the dialect counts.
        cuts: Mesh axes of each dimension, by path.
        heads: Units of dimensions that other meshes must not cut inside, by path, as those of a
            `RuleSpec`. Default: none.

    Raises:
        ValueError: No rules of the dialect can say it; the message names a leaf.
    """
    if isinstance(plan.rules, Rules):
        dialect = plan.rules.dialect
    else:
        plan, dialect = plan_of(plan.abstract(), Rules(()), plan.mesh), EFORMER
    bare = plan.with_rules(Rules((), replace(dialect, unmatched="error")))
    specs: dict[str, Entries | RuleSpec] = {
        path: RuleSpec(entries_of_cuts(cuts[path]), units=heads[path])
        if heads and path in heads
        else entries_of_cuts(cuts[path])
        for path in bare.paths
    }
    units = units_of(bare)
    wrong: list[str] = []
    for tightness in (0, TIGHTEST):
        result = bare.with_rules(draft_of_specs(units, specs, dialect, tightness).rules)
        if not (wrong := _wrong(result, cuts)):
            return result
    raise ValueError(
        f"{brief(wrong[0])}: rules of the dialect {dialect.name} cannot give it "
        f"{spec_shown(entries_of_cuts(cuts[wrong[0]]))}: rename it, or choose another dialect"
    )


def _wrong(plan: Plan, cuts: Mapping[str, Cuts]) -> list[str]:
    """List the paths whose spec is another than that of their cuts."""
    wrong = []
    for path, number in zip(plan.paths, plan.kind_of.tolist(), strict=True):
        spec = plan.kinds[number].spec
        entries = () if spec is None else trimmed(entries_of(spec))
        if tuple(map(entry_axes, entries)) != tuple(map(entry_axes, entries_of_cuts(cuts[path]))):
            wrong.append(path)
    return wrong
