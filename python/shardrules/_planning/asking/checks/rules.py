"""Checks of the rules: those that match nothing or win nothing, and leaves that they tell apart.

Costs per rule, and a regex for each folded path that has siblings. Must not know how findings are
shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from shardrules._format import counted
from shardrules._planning.asking.checks.queries import Queries, finding, leaves_in, rules_listed
from shardrules._planning.asking.findings import Finding
from shardrules._planning.fold import Folded
from shardrules._planning.kinds import dtype_shown, placement_shown

__all__ = ["dead_rules", "shadowed_rules", "siblings"]

# A number that ends a name, as in w1 and w2, is a part of the name.
_NUMBERS_OF_SIBLINGS: Final = re.compile(r"(?<![A-Za-z0-9])[0-9]+")


def dead_rules(queries: Queries) -> Iterator[Finding]:
    """Rules that match no leaf."""
    if queries.columns.leaves.path_rules is None:  # such rules are often for other trees as well
        return
    for rule in queries.columns.coverage.dead:
        yield finding(
            "warning",
            "dead",
            f"{queries.rule(rule)} matches no leaf",
            "correct the pattern, or remove the rule",
            rule=rule,
        )


def shadowed_rules(queries: Queries) -> Iterator[Finding]:
    """Rules that match leaves, all of which earlier rules win."""
    columns = queries.columns
    rules = columns.leaves.path_rules
    if rules is None:  # later rules for a name are for where the first does not fit
        return
    for rule, winners in columns.coverage.shadowed.items():
        if rule in queries.catch_alls:  # it is to win nothing
            continue
        leaves = columns.coverage.matched[rule]
        yield finding(
            "warning",
            "shadowed",
            f"{queries.rule(rule)} matches {counted(leaves, 'leaf')}, but wins none: "
            f"{rules_listed(winners)} came first",
            f"move it before {rules_listed(winners)}, or remove it"
            if rules.dialect.precedence == "first"
            else "make the patterns exclude each other, or remove it",
            rule=rule,
            leaves=leaves,
        )


def siblings(queries: Queries) -> Iterator[Finding]:
    """Leaves that differ only in numbers, with different specs."""
    columns = queries.columns
    spec_of = ["none" if kind.spec is None else placement_shown(kind) for kind in columns.kinds]
    arrays = [(kind.shape, dtype_shown(kind)) for kind in columns.kinds]
    specs_of: dict[Any, set[str]] = defaultdict(set)
    for array, spec in zip(arrays, spec_of, strict=True):
        specs_of[array].add(spec)
    alike: dict[Any, list[Folded]] = defaultdict(list)
    for one in columns.folded:
        array = arrays[one.group]
        if len(specs_of[array]) > 1:
            template = _NUMBERS_OF_SIBLINGS.sub("#", columns.paths[one.rows[0]])
            alike[template, array].append(one)
    for folded in alike.values():
        specs = dict.fromkeys(spec_of[one.group] for one in folded)
        if len(specs) > 1:
            rules = queries.rules_of(folded)
            yield finding(
                "warning",
                "siblings",
                f"{counted(leaves_in(folded), 'leaf')} that differ only in "
                f"numbers get {len(specs)} specs, {' and '.join(specs)}"
                + (f", by {rules_listed(rules)}" if rules else ""),
                "let one rule match them all, or see why the patterns tell them apart",
                folded=folded,
            )
