"""A plan as a table of plain text, siblings folded: what `print(plan)` shows.

Costs per folded path. Must not know about terminals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._format import aligned, and_more, bytes_shown, counted, mesh_shown
from shardrules._planning.asking.budget import by_class
from shardrules._planning.kinds import decided_shown, dtype_shown, placement_shown, problem_shown
from shardrules._printable import printable

if TYPE_CHECKING:
    from shardrules._planning.columns import Columns
    from shardrules._planning.fold import Folded

__all__ = ["HEADS", "Row", "heading", "lines", "rows", "table"]

_MOST_ROWS: Final = 60
HEADS: Final = ("path", "leaves", "shape", "dtype", "rule", "spec", "bytes", "per device")
"""Heads of the columns of `rows`."""
_RIGHT: Final = frozenset({"leaves", "rule", "bytes", "per device"})


class Row(NamedTuple):
    """A row of a plan's table: texts for people."""

    path: str
    leaves: str
    shape: str
    dtype: str
    rule: str
    spec: str
    bytes: str
    device_bytes: str


def heading(columns: Columns) -> str:
    """The plan in a line."""
    return printable(
        f"{counted(len(columns.paths), 'leaf')}, {bytes_shown(columns.total_bytes)} on "
        f"{mesh_shown(columns.axis_sizes)} ({counted(columns.devices, 'device')}): "
        f"{by_class(columns)}"
    )


def rows(columns: Columns, most: int | None = None) -> list[Row]:
    """A row for each folded path, in the order of the tree; for the first `most` of them."""
    return [_row(columns, one) for one in columns.folded[:most]]


def table(columns: Columns) -> str:
    """Returns the heading, and the first rows in aligned columns."""
    more = and_more(len(columns.folded), _MOST_ROWS, "row")
    return "\n".join([heading(columns), *lines(columns, _MOST_ROWS), *more])


def lines(columns: Columns, most: int | None = None) -> list[str]:
    """Returns the heads, and a line for each folded path; for the first `most` of them."""
    return aligned(HEADS, rows(columns, most), _RIGHT)


def _row(columns: Columns, folded: Folded) -> Row:
    kind, leaves = columns.kinds[folded.group], len(folded.rows)
    return Row(
        path=printable(folded.pattern),
        leaves=f"{leaves:,}",
        shape="-" if kind.shape is None else str(list(kind.shape)),
        dtype=printable(dtype_shown(kind)),
        rule=printable(decided_shown(kind)),
        spec=printable(problem_shown(kind) or placement_shown(kind)),
        bytes=bytes_shown(kind.bytes * leaves),
        device_bytes=bytes_shown(kind.device_bytes * leaves),
    )
