"""`StepSweep`: what the compiler makes of a step on several meshes, with several choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from shardrules._base.text import (
    brief,
    bytes_shown,
    mesh_shown,
    printable,
    record,
    seconds_shown,
)
from shardrules._plan.answers import Answer
from shardrules._plan.tables import Column, Table
from shardrules._program.step_seconds import Roofline

_COLUMNS: Final = (
    Column("time / batch", is_right=True),
    Column("roofline", is_right=True),
    Column("sent", is_right=True),
    Column("over"),
    Column("HBM", is_right=True),
    Column("memory"),
    Column("why", is_elided=True),
)


@record
class StepSweepRow(NamedTuple):
    """What the compiler makes of a step on one mesh, with one value of each choice."""

    mesh: dict[str, int]
    choices: dict[str, Any]
    peak: int | None
    """Bytes that a device needs, as `Proof.memory` has them; None if it could not be compiled."""
    fits: bool | None
    """Whether a device has them; None if that is not known."""
    sent: dict[str, int]
    """Bytes that a device sends in a step, by mesh axes, such as {"fsdp": 10, "fsdp,tp": 4}."""
    time: Roofline | None
    """Bounds of a step's seconds; None without described TPUs, or if it was refused."""
    why: str = ""
    """The largest array of what does not fit; or the error of what could not be compiled."""

    @property
    def seconds(self) -> float | None:
        """`time.longest`, where nothing that is sent is hidden; by the choice `batch`, if any."""
        return None if self.time is None else self.time.longest / self.choices.get("batch", 1)


class StepSweep(Answer[StepSweepRow]):
    """A row for each mesh and choice, the best first; `sweep` says which that is."""

    summary: str = ""
    """The devices, and how many rows fit; whether all of them have been tried."""
    is_whole: bool = True
    """False if an interrupt came before all were tried."""

    @property
    def heading(self) -> str:
        """The summary."""
        return self.summary

    def _json(self) -> dict[str, Any]:
        return {"summary": self.summary, "is_whole": self.is_whole}

    def _row_json(self, row: StepSweepRow) -> dict[str, Any]:
        return (
            row._asdict()
            | {"choices": {name: _plain(value) for name, value in row.choices.items()}}
            | {"time": row.time and row.time.to_json(), "seconds": row.seconds}
        )

    def _body(self) -> list[Table | str]:
        return [step_sweep_table(self)]


def step_sweep_table(rows: Sequence[StepSweepRow]) -> Table:
    """Return a row for each mesh and choice, without the columns that no row has."""
    names = list(dict.fromkeys(name for row in rows for name in row.choices))
    columns = [Column("mesh"), *map(Column, names), *_COLUMNS]
    cells: list[list[Any]] = [
        [
            mesh_shown(row.mesh),
            *(brief(row.choices.get(name)) for name in names),
            row.seconds and "batch" in row.choices and seconds_shown(row.seconds),
            row.time and f"{seconds_shown(row.time.shortest)} to {seconds_shown(row.time.longest)}",
            row.sent and bytes_shown(sum(row.sent.values())),
            ", ".join(f"{axes} {bytes_shown(size)}" for axes, size in row.sent.items()),
            row.peak and bytes_shown(row.peak),
            verdict_of(row),
            row.why,
        ]
        for row in rows
    ]
    kept = [i for i, _ in enumerate(columns) if any(line[i] for line in cells)]
    texts = ([printable(line[i] or "") for i in kept] for line in cells)
    return Table([columns[i] for i in kept], texts)


def verdict_of(row: StepSweepRow) -> str:
    """Say in words whether it fits; "" if that is not known."""
    if row.peak is None:
        return "not compiled"
    return {None: "", True: "fits", False: "does not fit"}[row.fits]


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else brief(value)
