"""Logical rules on the kinds of leaves: the leaves that have each rule's name, and what it wins.

Costs a few look-ups per kind. Must not know what follows from a rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardrules._matching.coverage import Coverage

if TYPE_CHECKING:
    from shardrules._planning.kinds import Kind

__all__ = ["coverage_of_names"]


def coverage_of_names(
    rules: Iterable[tuple[Any, Any]], kinds: Iterable[Kind], counts: Iterable[int]
) -> Coverage:
    """Per rule, the leaves that have its name, and those of which it decides a dimension."""
    pairs = tuple(rules)
    of_name: dict[Any, list[int]] = defaultdict(list)
    for index, (name, _) in enumerate(pairs):
        of_name[name].append(index)
    matched, won = [0] * len(pairs), [0] * len(pairs)
    lost: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    unmatched = 0
    for kind, count in zip(kinds, counts, strict=True):
        names = kind.names or ()
        if not any(name in of_name for name in names):
            unmatched += count
        for name in dict.fromkeys(names):
            for rule in of_name.get(name, ()):
                matched[rule] += count
        for winner in set(kind.dim_rules) - {None}:
            won[winner] += count  # type: ignore[index]
        for one in kind.lost_rules:
            if one.why == "dim taken" and one.to is not None:
                lost[one.rule][one.to] += count
    return Coverage(
        tuple(matched), tuple(won), unmatched, {rule: dict(by) for rule, by in lost.items()}
    )
