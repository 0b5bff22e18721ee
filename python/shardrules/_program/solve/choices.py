"""What was chosen for each class of dimensions, and what else it could be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from shardrules._base.text import bytes_shown, record, seconds_shown
from shardrules._program.solve.layout import STORED

if TYPE_CHECKING:
    from shardrules._program.solve.candidates import Contender
    from shardrules._program.step.dimension_roles import ClassRole

_ALTERNATIVES: Final = 2


@record
class Alternative(NamedTuple):
    """Other mesh axes for a class, with what the step is predicted to cost if all else stays."""

    axes: tuple[str, ...]
    time: float
    """Seconds of a step."""
    memory: int
    """Bytes that a device needs."""

    def __str__(self) -> str:
        axes = ",".join(self.axes) or "whole"
        return f"{axes} {seconds_shown(self.time)}, {bytes_shown(self.memory)}"


@record
class ClassChoice(NamedTuple):
    """Mesh axes of a class of dimensions; a row of `Solution.choices`."""

    role: ClassRole | Literal["stored"]
    """What the step does with them; "" if nothing tells. "stored" is no class: the mesh axes that
    cut weights while no operation uses them, as in FSDP."""
    size: int
    arrays: tuple[tuple[str, int], ...]
    """(path, dimension) of each argument that has them."""
    axes: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    """The next best, the best first; last those that do not fit."""

    def __str__(self) -> str:
        axes = ",".join(self.axes)
        if self.role == "stored" and axes:
            return f"parameters are stored over {axes} and gathered where used"
        if self.role == "stored":
            return "parameters are stored as they are used"
        return f"{self.role or 'no role'} {self.size:,}: {axes or 'whole'}"


def choices(chosen: Contender) -> Iterator[ClassChoice]:
    """Yield the choice of each variable that arguments have, or that is cut."""
    space, assignment = chosen.search.space, chosen.assignment
    step = space.step
    for name in space.values:
        if name == STORED or name in step._places or assignment[name]:
            yield ClassChoice(
                "stored" if name == STORED else step._roles.of.get(name, ""),
                0 if name == STORED else step._equations.dims.sizes[name],
                tuple(step._places.get(name, ())),
                assignment[name],
                _alternatives(chosen, name),
            )


def _alternatives(chosen: Contender, name: int) -> tuple[Alternative, ...]:
    """Return the next best values of a variable, those that fit first."""
    search, assignment = chosen.search, chosen.assignment
    rows = []
    for value in search.space.values[name]:
        if value != assignment[name]:
            other = {**assignment, name: value}
            seconds, memory = search.terms.total(other).total, search.resident.least(other)
            rows.append((memory > search.space.hbm, seconds, Alternative(value, seconds, memory)))
    rows.sort(key=lambda row: row[:2])
    return tuple(alternative for *_, alternative in rows[:_ALTERNATIVES])
