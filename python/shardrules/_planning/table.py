"""A plan as a table of plain text, siblings folded: what `print(plan)` shows.

Costs per folded path. Must not know about terminals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._planning.budget import by_class
from shardrules._planning.kinds import spec_shown
from shardrules._printable import printable
from shardrules._words import and_more, bytes_shown, counted, mesh_shown

if TYPE_CHECKING:
    from shardrules._planning.fold import Folded
    from shardrules._planning.plan import Plan

__all__ = ["COLUMNS", "RIGHT", "Row", "heading", "rows", "table"]

_MOST_ROWS: Final = 60
# Wider cells, such as names of a megabyte, stand out of their column: all others are not padded.
_WIDEST: Final = 200
COLUMNS: Final = ("path", "leaves", "shape", "dtype", "rule", "spec", "bytes", "per device")
"""Heads of the columns of `rows`."""
RIGHT: Final = frozenset({"leaves", "rule", "bytes", "per device"})


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


def heading(plan: Plan) -> str:
    """The plan in a line."""
    return printable(
        f"{counted(len(plan), 'leaf')}, {bytes_shown(plan.total_bytes)} on "
        f"{mesh_shown(plan.axis_sizes)} ({counted(plan.devices, 'device')}): "
        f"{by_class(plan)}"
    )


def rows(plan: Plan, most: int | None = None) -> list[Row]:
    """A row for each folded path, in the order of the tree; for the first `most` of them."""
    return [_row(plan, one) for one in plan.folded[:most]]


def table(plan: Plan) -> str:
    """The heading, and the first rows in aligned columns."""
    lines = [COLUMNS, *rows(plan, _MOST_ROWS)]
    widths = [min(_WIDEST, max(map(len, column))) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(
            text.rjust(width) if head in RIGHT else text.ljust(width)
            for head, text, width in zip(COLUMNS, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
    more = and_more(len(plan.folded), _MOST_ROWS, "row")
    return "\n".join([heading(plan), *shown, *more])


def _row(plan: Plan, folded: Folded) -> Row:
    kind, leaves = plan.kinds[folded.group], len(folded.rows)
    return Row(
        path=printable(folded.pattern),
        leaves=f"{leaves:,}",
        shape="-" if kind.shape is None else str(list(kind.shape)),
        dtype=printable(kind.dtype_shown),
        rule="-" if kind.rule is None else str(kind.rule),
        spec=printable(kind.problem or spec_shown(kind.spec)),
        bytes=bytes_shown(kind.bytes * leaves),
        device_bytes=bytes_shown(kind.largest_bytes * leaves),
    )
