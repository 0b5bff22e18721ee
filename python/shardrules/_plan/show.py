"""Tables of a plan: for people at a prompt, and static HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from shardrules._base.text import and_more, bytes_shown, counted, mesh_shown, printable
from shardrules._plan.memory import by_class
from shardrules._plan.table import (
    Columns,
    decided_shown,
    dtype_shown,
    placement_shown,
    problem_shown,
)
from shardrules._plan.tables import Column, Table

if TYPE_CHECKING:
    from shardrules._plan.fold import Folded

_MOST_ROWS: Final = 60
_MOST_HTML_ROWS: Final = 50
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
    """Return the plan in a line."""
    return printable(
        f"{counted(len(columns.paths), 'leaf')}, {bytes_shown(columns.total_bytes)} on "
        f"{mesh_shown(columns.axis_sizes)} ({counted(columns.devices, 'device')}): "
        f"{by_class(columns)}"
    )


def plan_text(columns: Columns) -> str:
    """Return the heading, and the first rows in aligned columns."""
    more = and_more(len(columns.folded), _MOST_ROWS, "row")
    rows = plan_table(columns, columns.folded[:_MOST_ROWS])
    return "\n".join([heading(columns), *rows.lines(), *more])


def plan_table(columns: Columns, folded: Iterable[Folded]) -> Table:
    """Return a row for each of these folded paths, as texts for people."""
    return Table(_COLUMNS, (_plan_cells(columns, row) for row in folded))


def _plan_cells(columns: Columns, folded: Folded) -> tuple[str, ...]:
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


def table_html(columns: Columns) -> str:
    """Return the rows with most bytes on each device as an HTML table; names are escaped."""
    rows = sorted(
        columns.folded, key=lambda row: -len(row.rows) * columns.kinds[row.group].device_bytes
    )
    mesh = mesh_shown(columns.axis_sizes)
    caption = (
        f"{counted(len(columns.paths), 'leaf')} on {mesh or 'one device'}: {by_class(columns)}"
    )
    more = "".join(
        f"{line}; Plan.to_html shows all" for line in and_more(len(rows), _MOST_HTML_ROWS, "row")
    )
    return plan_table(columns, rows[:_MOST_HTML_ROWS]).html(caption, more)
