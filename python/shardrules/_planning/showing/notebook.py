"""A plan in a notebook: a static table of its largest folded rows, without scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardrules._format import and_more, counted, mesh_shown
from shardrules._planning.asking.budget import by_class
from shardrules._planning.showing.table import plan_table

if TYPE_CHECKING:
    from shardrules._planning.columns import Columns


def table_html(columns: Columns, limit: int = 50) -> str:
    """Returns the rows with most bytes on each device as an HTML table; names are escaped."""
    rows = sorted(
        columns.folded,
        key=lambda row: -len(row.rows) * columns.kinds[row.group].device_bytes,
    )
    mesh = mesh_shown(columns.axis_sizes)
    caption = (
        f"{counted(len(columns.paths), 'leaf')} on {mesh or 'one device'}: {by_class(columns)}"
    )
    more = "".join(f"{line}; Plan.to_html shows all" for line in and_more(len(rows), limit, "row"))
    return plan_table(columns, rows[:limit]).html(caption, more)
