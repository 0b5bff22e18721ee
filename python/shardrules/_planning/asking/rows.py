"""Which row a path has, as people write it: that of a leaf, or a folded one.

Costs a look-up; folding, for a path that no leaf has. Must not know what is asked of the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardrules._format import brief

if TYPE_CHECKING:
    from shardrules._planning.columns import Columns

__all__ = ["row_of"]


def row_of(columns: Columns, path: str) -> int:
    """The row of this path; of a folded one, that of the first of its leaves.

    Raises:
        KeyError: No leaf has this path; the message has the nearest ones.
    """
    row = columns.leaves.rows.get(path)
    if row is not None:
        return row
    first_of = {one.pattern: int(one.rows[0]) for one in columns.folded}
    if path not in first_of:
        raise KeyError(_no_such_path(path, list(first_of)))
    return first_of[path]


def _no_such_path(path: str, patterns: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(path[:1000], patterns, n=3, cutoff=0.5)
    return f"no leaf has the path {brief(path)}" + (f"; near it: {', '.join(near)}" if near else "")
