"""A plan as a table of plain text, siblings folded: what `print(plan)` shows.

Costs per folded path. Must not know about terminals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardrules._format import Column, Table, and_more, bytes_shown, counted, mesh_shown
from shardrules._planning.asking.budget import by_class
from shardrules._planning.kinds import decided_shown, dtype_shown, placement_shown, problem_shown
from shardrules._printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardrules._planning.columns import Columns
    from shardrules._planning.fold import Folded

__all__ = ["heading", "plan_table", "table"]

_MOST_ROWS: Final = 60
_COLUMNS: Final = (
    Column("path", is_elided=True),
    Column("leaves", is_right=True, is_optional=True),
    Column("shape"),
    Column("dtype", is_optional=True),
    Column("rule", is_right=True, is_optional=True),
    Column("spec"),
    Column("bytes", is_right=True, is_optional=True),
    Column("per device", is_right=True),
)


def heading(columns: Columns) -> str:
    """Returns the plan in a line."""
    return printable(
        f"{counted(len(columns.paths), 'leaf')}, {bytes_shown(columns.total_bytes)} on "
        f"{mesh_shown(columns.axis_sizes)} ({counted(columns.devices, 'device')}): "
        f"{by_class(columns)}"
    )


def table(columns: Columns) -> str:
    """Returns the heading, and the first rows in aligned columns."""
    more = and_more(len(columns.folded), _MOST_ROWS, "row")
    rows = plan_table(columns, columns.folded[:_MOST_ROWS])
    return "\n".join([heading(columns), *rows.lines(), *more])


def plan_table(columns: Columns, folded: Iterable[Folded]) -> Table:
    """Returns a row for each of these folded paths, as texts for people."""
    return Table(_COLUMNS, (_row(columns, row) for row in folded))


def _row(columns: Columns, folded: Folded) -> tuple[str, ...]:
    kind, leaves = columns.kinds[folded.group], len(folded.rows)
    return (
        printable(folded.pattern),
        f"{leaves:,}",
        "-" if kind.shape is None else str(list(kind.shape)),
        printable(dtype_shown(kind)),
        printable(decided_shown(kind)),
        printable(problem_shown(kind) or placement_shown(kind)),
        bytes_shown(kind.bytes * leaves),
        bytes_shown(kind.device_bytes * leaves),
    )
