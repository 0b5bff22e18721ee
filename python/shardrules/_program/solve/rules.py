"""Rules of a solution: from the cuts of each leaf to rules in the words of paths, or to names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from shardrules._base.rule_specs import RuleSpec
from shardrules._base.specs import (
    entries_of,
    entries_of_cuts,
    entry_axes,
    entry_of,
    spec_shown,
    trimmed,
)
from shardrules._base.text import brief
from shardrules._plan.plan import Plan
from shardrules._plan.plan import plan as plan_of
from shardrules._rules.dialects import EFORMER
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import Rules
from shardrules._writer.dims import units_of
from shardrules._writer.draft import draft_of_specs
from shardrules._writer.patterns import TIGHTEST

if TYPE_CHECKING:
    from shardrules._base.specs import Entries
    from shardrules._rules.dialects import LogicalDialect
    from shardrules._writer.choose import Axes, Cuts


class RuledPlan(NamedTuple):
    """A plan under rules that were written for it."""

    plan: Plan
    note: str
    """Why the rules are for paths, although arrays have names; "" otherwise."""


def with_cuts(
    plan: Plan, cuts: Mapping[str, Cuts], heads: Mapping[str, tuple[int, ...]] | None = None
) -> RuledPlan:
    """Plan the leaves of a plan by rules that give each of them its cuts.

    Args:
        plan: Leaves and mesh; of its rules the dialect counts. With logical axis names, the rules
            are a table of these, if that can say it.
        cuts: Mesh axes of each dimension, by path.
        heads: Units of dimensions that other meshes must not cut inside, by path, as those of a
            `RuleSpec`. Default: none.

    Raises:
        ValueError: No rules of the dialect can say it; the message names a leaf.
    """
    if not isinstance(plan.rules, LogicalRules):
        return RuledPlan(_by_paths(plan, cuts, heads or {}), "")
    table = _table(plan, cuts)
    result = None if table is None else plan.with_rules(table)
    if result is not None and not _wrong(result, cuts):
        return RuledPlan(result, "")
    at = plan.paths[0] if result is None else _wrong(result, cuts)[0]
    of_paths = plan_of(plan.abstract(), Rules(()), plan.mesh)
    note = (
        f"rules are for paths: no table of logical axis names gives {brief(at)} "
        f"{spec_shown(entries_of_cuts(cuts[at]))} and all others theirs"
    )
    return RuledPlan(_by_paths(of_paths, cuts, heads or {}), note)


def _by_paths(plan: Plan, cuts: Mapping[str, Cuts], heads: Mapping[str, tuple[int, ...]]) -> Plan:
    planned = plan.rules
    dialect = planned.dialect if isinstance(planned, Rules) else EFORMER
    bare = plan.with_rules(Rules((), replace(dialect, unmatched="error")))
    specs: dict[str, Entries | RuleSpec] = {
        path: RuleSpec(entries_of_cuts(cuts[path]), units=heads[path])
        if path in heads
        else entries_of_cuts(cuts[path])
        for path in bare.paths
    }
    units = units_of(bare, {})
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


def _table(plan: Plan, cuts: Mapping[str, Cuts]) -> LogicalRules | None:
    """Write a table of names; None if its rules would have to come before each other.

    A name with several axes has several rules: one loses where another name has its axes.
    """
    rules: dict[tuple[str, Axes], None] = {}
    rows: list[list[tuple[str, Axes]]] = []
    for path, number in zip(plan.paths, plan.kind_of.tolist(), strict=True):
        names = plan.kinds[number].names or ()
        pairs = zip(names, cuts[path], strict=False)
        rows.append([(name, axes) for name, axes in pairs if isinstance(name, str)])
        rules |= dict.fromkeys(rows[-1])
    axes_of: dict[str, list[Axes]] = defaultdict(list)
    for name, axes in sorted(rules, key=lambda rule: -len(rule[1])):
        if axes or not axes_of[name]:
            axes_of[name].append(axes)
    before: dict[tuple[str, Axes], set[tuple[str, Axes]]] = {
        (name, axes): set() for name, of in axes_of.items() for axes in of
    }
    for row in rows:
        for name, own in row:
            for wider in axes_of[name][: axes_of[name].index(own) if own else None]:
                before[name, wider].update(
                    rule for rule in row if rule[0] != name and set(rule[1]) & set(wider)
                )
    for name, of in axes_of.items():
        for wide, narrow in pairwise(of):
            before[name, narrow].add((name, wide))
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError:
        return None
    dialect: LogicalDialect = plan.rules.dialect  # type: ignore[assignment]
    pairs_of: list[tuple[str, Any]] = [(name, entry_of(axes)) for name, axes in order]
    return LogicalRules(pairs_of, dialect)
