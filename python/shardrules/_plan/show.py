"""Tables of a plan: for people at a prompt, static HTML for notebooks, and JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.specs import spec_shown
from shardrules._base.text import (
    and_more,
    bytes_shown,
    counted,
    mesh_shown,
    printable,
    printable_json,
)
from shardrules._plan.kinds import decided_shown, dtype_shown, placement_shown, problem_shown
from shardrules._plan.memory import by_class
from shardrules._plan.tables import Column, Table

if TYPE_CHECKING:
    from shardrules._plan.fold import Folded
    from shardrules._plan.memory import DeviceBytes, Room
    from shardrules._plan.plan import Plan

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


def heading(plan: Plan) -> str:
    """Return the plan in a line."""
    return printable(
        f"{counted(len(plan.paths), 'leaf')}, {bytes_shown(plan.total_bytes)} on "
        f"{mesh_shown(plan.axis_sizes)} ({counted(plan.devices, 'device')}): "
        f"{by_class(plan)}"
    )


def plan_text(plan: Plan) -> str:
    """Return the heading, and the first rows in aligned columns."""
    more = and_more(len(plan.folded), _MOST_ROWS, "row")
    rows = plan_table(plan, plan.folded[:_MOST_ROWS])
    return "\n".join([heading(plan), *rows.lines(), *more])


def plan_table(plan: Plan, folded: Iterable[Folded]) -> Table:
    """Return a row for each of these folded paths, as texts for people."""
    return Table(_COLUMNS, (_plan_cells(plan, row) for row in folded))


def _plan_cells(plan: Plan, folded: Folded) -> tuple[str, ...]:
    kind, leaves = plan.kinds[folded.group], len(folded.rows)
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


def table_html(plan: Plan) -> str:
    """Return the rows with most bytes on each device as an HTML table; names are escaped."""
    rows = sorted(plan.folded, key=lambda row: -len(row.rows) * plan.kinds[row.group].device_bytes)
    mesh = mesh_shown(plan.axis_sizes)
    caption = f"{counted(len(plan.paths), 'leaf')} on {mesh or 'one device'}: {by_class(plan)}"
    more = "".join(
        f"{line}; Plan.to_html shows all" for line in and_more(len(rows), _MOST_HTML_ROWS, "row")
    )
    return plan_table(plan, rows[:_MOST_HTML_ROWS]).html(caption, more)


def plan_json(plan: Plan, memory: DeviceBytes, room: Room) -> str:
    """Return the plan as a JSON object, with a row for each folded path."""
    from shardrules._plan.fingerprint import plan_fingerprint

    leaves = [
        {
            "path": row.pattern,
            "leaves": len(row.rows),
            "shape": kind.shape,
            "dtype": dtype_shown(kind),
            "rule": kind.rule,
            **({} if kind.names is None else {"names": kind.names, "rules": kind.dim_rules}),
            "spec": spec_shown(kind.spec),
            "memory_kind": kind.memory_kind,
            "problem": problem_shown(kind),
            "bytes": kind.bytes * len(row.rows),
            "device_bytes": kind.device_bytes * len(row.rows),
            "lost": [loss.message for loss in kind.losses],
        }
        for row in plan.folded
        for kind in (plan.kinds[row.group],)
    ]
    content: dict[str, Any] = {
        "version": 1,
        "mesh": plan.axis_sizes,
        "leaves": len(plan.paths),
        "bytes": plan.total_bytes,
        "device_bytes": {"total": memory.max, **memory._fullest()},
        "fingerprint": plan_fingerprint(plan),
        "folded": leaves,
    }
    if (fits := room.fits(memory)) is not None:
        content["fits"] = fits
    return printable_json(content)
