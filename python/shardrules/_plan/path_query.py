"""Resolve a path as users write it: a leaf's, a folded one, a glob, or an end of paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardrules._base.text import brief, near_shown, printable
from shardrules._plan.fold import parts_of, runs_of

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan

_MOST_CANDIDATES: Final = 10
_WILDCARDS: Final = {"*": ".*", "?": "."}
# Components of a path begin or end with one of these, in all dialects.
_SEPARATORS: Final = "/.[]"
_COMPONENT: Final = re.compile(r"[^/.\[\]'\"]+")
_MOST_DIGITS: Final = 18


class _PathError(KeyError):
    """A path that means no leaf, or several; `str` of a KeyError would show the message quoted."""

    def __str__(self) -> str:
        return str(self.args[0])


class PathMatch(NamedTuple):
    """The leaves that a path means, which are alike: all of one folded path."""

    row: int
    """The first of them."""
    leaves: int
    """How many they are."""


def row_of(plan: Plan, path: str) -> int:
    """Return the row of this path; of a folded one, that of the first of its leaves."""
    match = _exact_match(plan, path)
    if match is None:
        raise _PathError(_no_such_path(plan, path))
    return match.row


def find(plan: Plan, path: str) -> PathMatch:
    """Return the leaves of this path, which may be folded, a glob, the end of paths or inside them.

    Raises:
        KeyError: No leaf has this path, or leaves of several folded paths have it; the message has
            the nearest ones, or all of them.
    """
    match = _exact_match(plan, path)
    if match is not None:
        return match
    rows = _rows_like(path, plan.paths) if path else []
    if not rows:
        raise _PathError(_no_such_path(plan, path))
    folded = plan.folded
    of_row = np.zeros(len(plan.paths), np.intp)
    for i, siblings in enumerate(folded):
        of_row[siblings.rows] = i
    candidates = np.unique(of_row[rows]).tolist()
    if len(candidates) > 1:
        rest = len(candidates) - _MOST_CANDIDATES
        texts = ", ".join(printable(folded[i].pattern) for i in candidates[:_MOST_CANDIDATES])
        raise _PathError(
            f"{brief(path)} is ambiguous: it may be any of {len(candidates)} folded paths: {texts}"
            f"{f' and {rest} more' if rest > 0 else ''}; give more of the path"
        )
    return PathMatch(rows[0], len(rows))


def _exact_match(plan: Plan, path: str) -> PathMatch | None:
    row = plan._leaves.rows.get(path)
    if row is not None:
        return PathMatch(row, 1)
    folded = next((folded for folded in plan.folded if folded.pattern == path), None)
    return None if folded is None else PathMatch(int(folded.rows[0]), len(folded.rows))


def _rows_like(path: str, paths: list[str]) -> list[int]:
    """Return the rows of the paths that this one fits as a whole, or else at their end, or inside.

    Inside components count alone, as another dialect may have written the path.
    """
    try:
        regex = "".join(
            _wildcards_regex(text) if numbers is None else _set_regex(runs_of(numbers))
            for text, numbers in parts_of(path)
        )
    except ValueError:  # a brace that is one of the path itself
        regex = _wildcards_regex(path)
    # An end begins with a component: before a separator, or after one.
    begin = "" if path[0] in _SEPARATORS else f"[{re.escape(_SEPARATORS)}]"
    searches = [rf"\A(?:{regex})\Z", rf"{begin}(?:{regex})\Z"]
    if (components := _COMPONENT.findall(path)) and not re.search(r"[*?{}]", path):
        between = r"[/.\[\]'\"]+"
        inside = between.join(map(re.escape, components))
        searches.append(rf"(?:\A|{between})(?:{inside})(?:\Z|{between})")
    for searched in searches:
        fits = re.compile(searched, re.DOTALL).search
        if rows := [row for row, other in enumerate(paths) if fits(other)]:
            return rows
    return []


def _wildcards_regex(text: str) -> str:
    runs = re.sub(r"\*+", "*", text)
    return "".join(_WILDCARDS.get(char) or re.escape(char) for char in runs)


def _set_regex(runs: list[range]) -> str:
    """Return a regex for the numbers of a set, as they are folded: of at most 18 digits."""
    regexes = [
        item
        for run in runs
        for length in range(len(str(run.start)), min(len(str(run.stop - 1)), _MOST_DIGITS) + 1)
        for item in _digits_regex(
            str(max(run.start, 10 ** (length - 1) if length > 1 else 0)),
            str(min(run.stop - 1, 10**length - 1)),
        )
    ]
    return f"(?:{'|'.join(regexes) or '(?!)'})"


def _digits_regex(first: str, last: str) -> Iterator[str]:
    """Yield regexes for the numbers between these two, which have as many digits."""
    if not first:
        yield ""
        return
    low, high, longer = first[0], last[0], len(first) - 1
    if low == high:
        yield from (low + rest for rest in _digits_regex(first[1:], last[1:]))
        return
    begin, end = int(low), int(high)
    if int(first[1:] or 0) > 0:
        yield from (low + rest for rest in _digits_regex(first[1:], "9" * longer))
        begin += 1
    if last[1:] != "9" * longer:
        yield from (high + rest for rest in _digits_regex("0" * longer, last[1:]))
        end -= 1
    if begin <= end:
        yield f"[{begin}-{end}]" + (f"[0-9]{{{longer}}}" if longer else "")


def _no_such_path(plan: Plan, path: str) -> str:
    patterns = [folded.pattern for folded in plan.folded]
    components = set(_COMPONENT.findall(path))
    sharing = [other for other in patterns if components & set(_COMPONENT.findall(other))]
    near = near_shown(path, patterns) or near_shown(path, sharing, least=0)
    return f"no leaf has the path {brief(path)}{near or '; plan.paths lists them'}"
