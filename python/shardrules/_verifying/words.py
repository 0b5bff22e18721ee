"""Findings about leaves of inputs and outputs: their folded paths, and which leaves are alike.

Costs two look-ups per leaf; folding costs only what is reported. Must not know what is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._planning.asking.findings import Finding
from shardrules._planning.fold import fold

if TYPE_CHECKING:
    from shardrules._planning.asking.findings import FindingKind, Level
    from shardrules._verifying.calls import Library
    from shardrules._verifying.executable import Side

__all__ = ["PLACING", "ObjectPairs", "finding_of", "is_same", "together"]


class _Placing(NamedTuple):
    """What places arrays as planned, in words."""

    arguments: str
    results: str
    states: str


PLACING: Final[dict[Library, _Placing]] = {
    "jax": _Placing(
        "lower the function with arrays or shapes that are sharded as planned (plan.abstract()), "
        "or give jit in_shardings=plan.shardings()",
        "give jit out_shardings=plan.shardings(), or constrain the result inside the function",
        "give jit out_shardings that are the shardings of the arguments, or constrain the new "
        "state to them inside the function",
    ),
    "nnx": _Placing(
        "lower the function with modules that are sharded as planned, or give nnx.jit "
        "in_shardings=nnx.StateSharding(plan.shardings())",
        "give nnx.jit in_shardings=nnx.StateSharding(plan.shardings()) for what is updated, and "
        "out_shardings for what is returned, or constrain it inside the function",
        "give nnx.jit in_shardings=nnx.StateSharding(plan.shardings()), which count for the "
        "updated module too, or constrain the new state inside the function",
    ),
    "equinox": _Placing(
        "lower the function with arrays that are sharded as planned",
        "constrain the result inside the function, as by "
        "jax.lax.with_sharding_constraint(arrays, plan.shardings())",
        "constrain the arrays of the new state inside the function, as by "
        "jax.lax.with_sharding_constraint(arrays, plan.shardings())",
    ),
}
"""By whose function compiles."""


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


class ObjectPairs:
    """Two lists of as many objects, many of which are the same; None is like anything."""

    def __init__(self, firsts: Sequence[Any], seconds: Sequence[Any]) -> None:
        self._firsts = firsts
        self._seconds = seconds
        # A list of None says that nothing is planned.
        is_planned = firsts.count(None) < len(firsts)
        count = len(firsts) if is_planned else 0
        self._position_of = dict(zip(self._ids(), range(count), strict=False))

    def unlike(self, alike: Callable[[Any, Any, int], bool]) -> list[list[int]]:
        """The positions of what is not alike, those of the same two objects together.

        Args:
            alike: Called once for each pair of the same objects, with them and one of its
                positions.
        """
        differ = {key for key, i in self._position_of.items() if not self._is_like(i, alike)}
        positions = defaultdict(list)
        for i, key in enumerate(self._ids()) if differ else ():
            if key in differ:
                positions[key].append(i)
        return list(positions.values())

    def _is_like(self, position: int, alike: Callable[[Any, Any, int], bool]) -> bool:
        first, second = self._firsts[position], self._seconds[position]
        if first is None or second is None:
            return True
        return alike(first, second, position)

    def _ids(self) -> Iterator[tuple[int, int]]:
        return zip(map(id, self._firsts), map(id, self._seconds), strict=True)


def is_same(one: Any, other: Any, rank: int) -> bool:
    """Whether two shardings cut arrays of this rank alike, in whatever memory."""
    if one == other:
        return True
    one, other = one.with_memory_kind(None), other.with_memory_kind(None)
    return bool(one == other or one.is_equivalent_to(other, rank))


def together(groups: Iterable[list[int]], key: Callable[[int], Any]) -> list[list[int]]:
    """Groups whose first members have equal keys, as one group each, ascending."""
    merged: dict[Any, list[int]] = defaultdict(list)
    for group in groups:
        merged[key(group[0])] += group
    return [sorted(group) for group in merged.values()]
