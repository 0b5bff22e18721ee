"""The leaves of two plans side by side, matched by path.

Costs a look-up per leaf. Must not know what is asked of the pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._planning.columns import Columns
    from shardrules._planning.kinds import Kind

__all__ = ["Pair", "Pairs", "paired"]


class Pair(NamedTuple):
    """Leaves that are of one kind in a plan, and of one kind in another."""

    before: Kind | None
    """None for leaves that are new."""
    after: Kind | None
    """None for leaves that are gone."""


class Pairs(NamedTuple):
    """The leaves of two plans: those of the first, then those of the second alone."""

    paths: list[str]
    group_of: npt.NDArray[np.int32]
    """Per leaf an index of `groups`."""
    groups: list[Pair]


def paired(before: Columns, after: Columns) -> Pairs:
    """The leaves of both plans. Those of one path are paired in the order of the trees."""
    keys, other_keys = _keys(before.paths, after.paths)
    rows = {key: row for row, key in enumerate(other_keys)}
    matched = np.fromiter((rows.pop(key, -1) for key in keys), np.int64, len(keys))
    then = before.kind_of.astype(np.int64)
    # A kind of -1 stands for a leaf that is not there.
    now = np.where(matched < 0, -1, after.kind_of[matched] if len(after.paths) else -1)
    paths = before.paths + [after.paths[row] for row in rows.values()]
    then = np.concatenate([then, np.full(len(rows), -1)])
    now = np.concatenate([now, after.kind_of[np.fromiter(rows.values(), np.int64, len(rows))]])
    width = len(after.kinds) + 1
    numbers, group_of = np.unique((then + 1) * width + now + 1, return_inverse=True)
    groups = [
        Pair(_kind(before, number // width - 1), _kind(after, number % width - 1))
        for number in numbers.tolist()
    ]
    return Pairs(paths, group_of.astype(np.int32), groups)


def _keys(before: list[str], after: list[str]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Distinct keys of the leaves: the path; with a count beside it if two leaves share a path."""
    if all(len(set(paths)) == len(paths) for paths in (before, after)):
        return before, after
    seen: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    keys: tuple[list[Any], list[Any]] = ([], [])
    for paths, counts, mine in zip((before, after), seen, keys, strict=True):
        for path in paths:
            mine.append((path, counts[path]))
            counts[path] += 1
    return keys


def _kind(columns: Columns, number: int) -> Kind | None:
    return None if number < 0 else columns.kinds[number]
