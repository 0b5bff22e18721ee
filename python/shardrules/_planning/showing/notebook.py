"""A plan in a notebook: a static table of its largest folded rows, without scripts.

Costs per row that is shown. Must not know the HTML report.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from shardrules._format import and_more, bytes_shown, counted, mesh_shown
from shardrules._planning.asking.budget import by_class
from shardrules._planning.kinds import decided_shown, dtype_shown, placement_shown, problem_shown
from shardrules._printable import printable

if TYPE_CHECKING:
    from shardrules._planning.columns import Columns
    from shardrules._planning.fold import Folded

__all__ = ["table_html"]

_HEADINGS: Final = ("path", "leaves", "shape", "dtype", "spec", "rule", "bytes per device")


def table_html(columns: Columns, limit: int = 50) -> str:
    """The rows with most bytes on each device as an HTML table; names are escaped."""
    held = {
        id(row): len(row.rows) * columns.kinds[row.group].device_bytes for row in columns.folded
    }
    rows = sorted(columns.folded, key=lambda row: -held[id(row)])
    mesh = mesh_shown(columns.axis_sizes)
    caption = (
        f"{counted(len(columns.paths), 'leaf')} on {mesh or 'one device'}: {by_class(columns)}"
    )
    lines = [_line(_cells(columns, row, held[id(row)]), "td") for row in rows[:limit]]
    lines += [
        f'<tr><td colspan="{len(_HEADINGS)}">{more}; Plan.to_html shows all</td></tr>'
        for more in and_more(len(rows), limit, "row")
    ]
    return (
        f"<table><caption>{escape(printable(caption))}</caption>"
        f"<thead>{_line(_HEADINGS, 'th')}</thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _cells(columns: Columns, row: Folded, held: int) -> tuple[str, ...]:
    kind = columns.kinds[row.group]
    spec = problem_shown(kind) or placement_shown(kind)
    shape = "-" if kind.shape is None else str(kind.shape)
    return (row.pattern, f"{len(row.rows):,}", shape, dtype_shown(kind), spec, decided_shown(kind),
            bytes_shown(held))  # fmt: skip


def _line(cells: tuple[str, ...], tag: str) -> str:
    marked = (f"<{tag}>{escape(printable(cell))}</{tag}>" for cell in cells)
    return f"<tr>{''.join(marked)}</tr>"
