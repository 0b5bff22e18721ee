"""Tables of a plan: for people at a prompt, and static HTML for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._plan.memory import by_class
from shardrules._plan.table import decided_shown, dtype_shown, placement_shown, problem_shown
from shardrules._text import aligned, and_more, bytes_shown, counted, mesh_shown, printable

if TYPE_CHECKING:
    from shardrules._plan.fold import Folded
    from shardrules._plan.table import Columns

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
    """Return the plan in a line."""
    return printable(
        f"{counted(len(columns.paths), 'leaf')}, {bytes_shown(columns.total_bytes)} on "
        f"{mesh_shown(columns.axis_sizes)} ({counted(columns.devices, 'device')}): "
        f"{by_class(columns)}"
    )


def rows(columns: Columns, most: int | None = None) -> list[Row]:
    """Return a row for each folded path, in the order of the tree; for the first `most` of them."""
    return [_row(columns, part) for part in columns.folded[:most]]


def table(columns: Columns) -> str:
    """Return the heading, and the first rows in aligned columns."""
    rest = and_more(len(columns.folded), _MOST_ROWS, "row")
    return "\n".join([heading(columns), *lines(columns, _MOST_ROWS), *rest])


def lines(columns: Columns, most: int | None = None) -> list[str]:
    """Return the heads, and a line for each folded path; for the first `most` of them."""
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


_HEADINGS: Final = ("path", "leaves", "shape", "dtype", "spec", "rule", "bytes per device")


def table_html(columns: Columns, limit: int = 50) -> str:
    """Return the rows with most bytes on each device as an HTML table; names are escaped."""
    device_bytes = {
        id(row): len(row.rows) * columns.kinds[row.group].device_bytes for row in columns.folded
    }
    rows = sorted(columns.folded, key=lambda row: -device_bytes[id(row)])
    mesh = mesh_shown(columns.axis_sizes)
    caption = (
        f"{counted(len(columns.paths), 'leaf')} on {mesh or 'one device'}: {by_class(columns)}"
    )
    lines = [_line(_cells(columns, row, device_bytes[id(row)]), "td") for row in rows[:limit]]
    lines += [
        f'<tr><td colspan="{len(_HEADINGS)}">{rest}; Plan.to_html shows all</td></tr>'
        for rest in and_more(len(rows), limit, "row")
    ]
    return (
        f"<table><caption>{escape(printable(caption))}</caption>"
        f"<thead>{_line(_HEADINGS, 'th')}</thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _cells(columns: Columns, row: Folded, device_bytes: int) -> tuple[str, ...]:
    kind = columns.kinds[row.group]
    spec = problem_shown(kind) or placement_shown(kind)
    shape = "-" if kind.shape is None else str(kind.shape)
    return (row.pattern, f"{len(row.rows):,}", shape, dtype_shown(kind), spec, decided_shown(kind),
            bytes_shown(device_bytes))  # fmt: skip


def _line(cells: tuple[str, ...], tag: str) -> str:
    marked = (f"<{tag}>{escape(printable(cell))}</{tag}>" for cell in cells)
    return f"<tr>{''.join(marked)}</tr>"
