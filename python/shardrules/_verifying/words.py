"""Findings about leaves of inputs and outputs: their folded paths, and which leaves are alike.

Costs two look-ups per leaf; folding costs only what is reported. Must not know what is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardrules._planning.asking.findings import Finding
from shardrules._planning.fold import fold

if TYPE_CHECKING:
    from shardrules._planning.asking.findings import FindingKind, Level
    from shardrules._verifying.executable import Side

__all__ = ["finding_of", "is_same", "together", "unlike"]


def finding_of(
    level: Level,
    kind: FindingKind,
    message: str,
    fix: str,
    *,
    side: Side | None = None,
    leaves: Sequence[int] = (),
    bytes: int = 0,
) -> Finding:
    """A finding about leaves of a side, with their paths folded."""
    paths = [] if side is None else [side.paths[leaf] for leaf in leaves]
    folded = fold(paths, np.zeros(len(paths), np.int32))
    patterns = tuple(one.pattern for one in folded)
    return Finding(level, kind, message, patterns, len(leaves), None, bytes, fix)


def unlike(
    firsts: Sequence[Any], seconds: Sequence[Any], alike: Callable[[Any, Any, int], bool]
) -> list[list[int]]:
    """The positions at which two lists have what is not alike, those of equal pairs together.

    Args:
        firsts: Objects, many of which are the same.
        seconds: As many objects.
        alike: Called with two objects and their position, once for each pair of objects.
    """
    keys = list(zip(map(id, firsts), map(id, seconds), strict=True))
    position_of = dict(zip(keys, range(len(keys)), strict=True))
    differ = {key for key, i in position_of.items() if not alike(firsts[i], seconds[i], i)}
    positions = defaultdict(list)
    for i, key in enumerate(keys) if differ else ():
        if key in differ:
            positions[key].append(i)
    return list(positions.values())


def is_same(one: Any, other: Any, rank: int) -> bool:
    """Whether two shardings cut arrays of this rank alike, in whatever memory."""
    if one is other or one == other:
        return True
    one, other = one.with_memory_kind(None), other.with_memory_kind(None)
    return bool(one == other or one.is_equivalent_to(other, rank))


def together(groups: Iterable[list[int]], key: Callable[[int], Any]) -> list[list[int]]:
    """Groups whose first members have equal keys, as one group each, ascending."""
    merged: dict[Any, list[int]] = defaultdict(list)
    for group in groups:
        merged[key(group[0])] += group
    return [sorted(group) for group in merged.values()]
