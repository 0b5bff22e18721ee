"""Messages about leaves: one form for those without a sharding, and lists of leaves or paths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from shardrules._base.text import and_more, counted, mesh_shown, printable_lines

_MOST_LISTED: Final = 20
_FEW: Final = 10


class LeafError(NamedTuple):
    """Leaf, or several that are alike, without a sharding."""

    path: str
    shape: Sequence[int] | None
    decided_by: str
    """The rule, spec or names, as people write them."""
    reasons: list[str]
    """Message and fix, a line each."""
    leaves: int = 1


def leaf_errors(
    rows: Sequence[LeafError],
    axis_sizes: Mapping[str, int] | None,
    *,
    said_by: str = "rules",
    count: int | None = None,
) -> str:
    """Return a message: how many leaves; path, shape, what decides, why, the fix of the first.

    Args:
        rows: The leaves, or the first of them.
        axis_sizes: The mesh's; None if there are several meshes.
        said_by: What decides the leaves.
        count: How many leaves there are. Default: those of the rows.
    """
    rows_shown = rows[:_MOST_LISTED]
    total = sum(row.leaves for row in rows) if count is None else count
    mesh = "their meshes" if axis_sizes is None else f"the mesh {mesh_shown(axis_sizes)}"
    lines = [f"{counted(total, 'leaf')} cannot be sharded as the {said_by} say, on {mesh}:"]
    for path, shape, decided_by, reasons, _ in rows_shown:
        size = "" if shape is None else f"  shape {tuple(shape)}"
        lines.append(f"    {path or '(the tree)'}{size}  {decided_by}")
        lines += [f"        {reason}" for reason in reasons]
    count_shown = sum(row.leaves for row in rows_shown)
    lines += [f"    {line}" for line in and_more(total, count_shown, "leaf")]
    return printable_lines(lines)


def listing(heading: str, lines: Iterable[str], count: int, noun: str) -> str:
    """Return a message with the first lines of so many, one for each leaf or path."""
    rows = [*islice(lines, _FEW), *and_more(count, _FEW, noun)]
    return printable_lines([f"{heading}:", *(f"    {row}" for row in rows)])
