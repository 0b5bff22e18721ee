"""Which leaves a path means, as people write it: a leaf's, a folded one, a glob or an end of paths.

Costs a look-up for the path of a leaf; for others folding, and a match of each path. Must not know
what is asked of the leaves.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardrules._format import brief
from shardrules._matching.rules import Rules
from shardrules._near import near_shown
from shardrules._planning.fold import parts_of, runs_of
from shardrules._printable import printable

if TYPE_CHECKING:
    from shardrules._planning.columns import Columns

__all__ = ["Meant", "meant_by", "row_of"]

_MOST_CANDIDATES: Final = 10
_WILDCARDS: Final = {"*": ".*", "?": "."}
# Components of a path begin or end with one of these, in all dialects.
_SEPARATORS: Final = "/.[]"
# As paths are folded: without a zero before it, and of at most 18 digits.
_NUMBERS: Final = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")


class Meant(NamedTuple):
    """The leaves that a path means, which are alike: all of one folded path."""

    row: int
    """The first of them."""
    leaves: int
    """How many they are."""


def row_of(columns: Columns, path: str) -> int:
    """The row of this path; of a folded one, that of the first of its leaves.

    Raises:
        KeyError: No leaf has this path; the message has the nearest ones.
    """
    found = _exactly(columns, path)
    if found is None:
        raise KeyError(_no_such_path(columns, path))
    return found.row


def meant_by(columns: Columns, path: str) -> Meant:
    """The leaves of this path; it may also be folded, a glob, or the end of paths.

    Raises:
        KeyError: No leaf has this path, or leaves of several folded paths have it; the message has
            the nearest ones, or all of them.
    """
    found = _exactly(columns, path)
    if found is not None:
        return found
    rows = _rows_like(path, columns.paths) if path else []
    if not rows:
        raise KeyError(_no_such_path(columns, path))
    folded = columns.folded
    of_row = np.zeros(len(columns.paths), np.intp)
    for i, one in enumerate(folded):
        of_row[one.rows] = i
    candidates = np.unique(of_row[rows]).tolist()
    if len(candidates) > 1:
        more = len(candidates) - _MOST_CANDIDATES
        listed = ", ".join(printable(folded[i].pattern) for i in candidates[:_MOST_CANDIDATES])
        raise KeyError(
            f"{brief(path)} is ambiguous: it may be any of {len(candidates)} folded paths: {listed}"
            f"{f' and {more} more' if more > 0 else ''}; give more of the path"
        )
    return Meant(rows[0], len(rows))


def _exactly(columns: Columns, path: str) -> Meant | None:
    row = columns.leaves.rows.get(path)
    if row is not None:
        return Meant(row, 1)
    one = next((one for one in columns.folded if one.pattern == path), None)
    return None if one is None else Meant(int(one.rows[0]), len(one.rows))


def _rows_like(path: str, paths: list[str]) -> list[int]:
    """The rows of the paths that this one fits as a whole, or else of those whose end it fits."""
    try:
        regex = "".join(
            _of_wildcards(text) if numbers is None else _of_set(runs_of(numbers), paths)
            for text, numbers in parts_of(path)
        )
    except ValueError:  # a brace that is one of the path itself
        regex = _of_wildcards(path)
    # An end begins with a component: before a separator, or after one.
    begin = "" if path[0] in _SEPARATORS else f"[{re.escape(_SEPARATORS)}]"
    rules = Rules([(rf"(?s)\A(?:{regex})\Z", ()), (rf"(?s){begin}(?:{regex})\Z", ())])
    found = list(map(rules.first_match, paths))
    return [row for row, rule in enumerate(found) if rule == (0 if 0 in found else 1)]


def _of_wildcards(text: str) -> str:
    return "".join(_WILDCARDS.get(char) or re.escape(char) for char in text)


def _of_set(runs: list[range], paths: list[str]) -> str:
    """A regex for those numbers of the set that paths have."""
    there = {number for path in paths for number in _NUMBERS.findall(path)}
    chosen = (number for number in there if any(int(number) in run for run in runs))
    return f"(?:{'|'.join(chosen) or '(?!)'})"


def _no_such_path(columns: Columns, path: str) -> str:
    patterns = (one.pattern for one in columns.folded)
    return f"no leaf has the path {brief(path)}{near_shown(path, patterns)}"
