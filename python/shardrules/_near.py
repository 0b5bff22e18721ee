"""Which of many paths were probably meant by one that is not there, for error messages.

Costs some 2 us for each path, since only those that have most pieces of it are compared in
full. Must not know what a path names.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Final

from shardrules._printable import printable

__all__ = ["near_paths", "near_shown"]

# Comparing takes the product of two lengths, and the ends of paths tell more than their beginnings.
_COMPARED: Final = 100
# Of 10^5 paths this many are compared in full, which takes some milliseconds.
_CANDIDATES: Final = 40
_PIECE: Final = 4
_NEAR: Final = 0.5
_MOST_SHOWN: Final = 3
_WIDEST: Final = 200


def near_paths(path: str, paths: Iterable[str], least: float = _NEAR) -> list[str]:
    """Up to three of these paths that are near this one, the nearest first.

    Args:
        path: The path that is not there.
        paths: Those that are.
        least: How near they must be, from 0 to 1.

    Example:
        >>> near_paths("layers/0/mlp/kernl", ["layers/0/mlp/kernel", "embed", "layers/0/mlp/bias"])
        ['layers/0/mlp/kernel', 'layers/0/mlp/bias']
    """
    from difflib import SequenceMatcher

    meant = path[-_COMPARED:]
    pieces = {meant[i : i + _PIECE] for i in range(0, len(meant), _PIECE)}
    likely = heapq.nlargest(
        _CANDIDATES, dict.fromkeys(paths), key=lambda one: sum(map(one.__contains__, pieces))
    )
    matcher = SequenceMatcher(b=meant, autojunk=False)

    def ratio(end: str) -> float:
        matcher.set_seq1(end)
        return matcher.ratio()

    # Only its end may have been given.
    rated = []
    for one in likely:
        whole = ratio(one[-_COMPARED:])
        rated.append((max(whole, ratio(one[-len(meant) :])), whole, one))
    nearest = heapq.nlargest(_MOST_SHOWN, rated, key=lambda rating: rating[:2])
    return [one for rating, _, one in nearest if rating >= least]


def near_shown(path: str, paths: Iterable[str], least: float = _NEAR) -> str:
    """The end of an error message about a path that is not there: "; near it: a, b", or ""."""
    near = [printable(one) for one in near_paths(path, paths, least)]
    listed = [one if len(one) <= _WIDEST else f"{one[:_WIDEST]}..." for one in near]
    return f"; near it: {', '.join(listed)}" if listed else ""
