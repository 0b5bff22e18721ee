"""What was chosen for each class of dimensions, what else it could be, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from shardrules._base.text import bytes_shown, record, seconds_shown
from shardrules._program.jax_names import user_line
from shardrules._program.solve.space import STORED

if TYPE_CHECKING:
    from shardrules._program.solve.meshes import Best
    from shardrules._program.step.dimension_roles import ClassRole

_ALTERNATIVES: Final = 2
_AS_GOOD: Final = 5e-4


@record
class Alternative(NamedTuple):
    """Other mesh axes for a class, with what the step costs if all else stays."""

    axes: tuple[str, ...]
    time: float
    """Seconds of a step."""
    memory: int
    """Bytes that a device needs."""

    def __str__(self) -> str:
        return f"{_shown(self.axes)} {seconds_shown(self.time)}, {bytes_shown(self.memory)}"


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
    """The next best, the best first."""


def choices(best: Best) -> Iterator[ClassChoice]:
    """Yield the choice of each variable that arguments have, or that is cut."""
    space = best.search.space
    step = space.step
    arrays: dict[int, list[tuple[str, int]]] = {}
    for path, number in zip(step._paths, step._equations.body.inputs, strict=True):
        for dim, classes in enumerate(space.arrays.classes[number]):
            for name in classes:
                arrays.setdefault(name, []).append((path, dim))
    for name in space.values:
        if name == STORED or name in arrays or best.assignment[name]:
            yield ClassChoice(
                "stored" if name == STORED else step._roles.of.get(name, ""),
                0 if name == STORED else step._equations.dims.sizes[name],
                tuple(arrays.get(name, ())),
                best.assignment[name],
                tuple(_alternatives(best, name)),
            )


def _alternatives(best: Best, name: int) -> Iterator[Alternative]:
    """Yield the next best values of a variable, those that fit first."""
    search, values = best.search, best.search.space.values[name]
    others = [{**best.assignment, name: v} for v in values if v != best.assignment[name]]
    order = [
        (search.is_over_memory(other), search.terms.total(other).total, i)
        for i, other in enumerate(others)
    ]
    for _, seconds, i in sorted(order)[:_ALTERNATIVES]:
        yield Alternative(others[i][name], seconds, search.resident.least(others[i]))


def reasons(best: Best, rows: Iterable[ClassChoice]) -> Iterator[str]:
    """Yield lines: what each choice saves, and what was left out."""
    space = best.search.space
    for row in rows:
        yield _reason(row, best.cost.time.total, space.hbm)
    for operation, _ in space.step._equations.operations():
        if operation.name == "sharding_constraint":
            line = user_line(operation.eqn)
            at = "" if line is None else f" at {line}"
            yield f"the constraint{at} is left out: the solution has one in its place"
    yield from (f"not modelled, and whole on each device: {t}" for t in space.step.unmodelled)
    if best.is_over:
        yield f"the search was ended: nothing takes less than {seconds_shown(best.bound)}"


def _reason(row: ClassChoice, seconds: float, hbm: int) -> str:
    name = "storage of weights" if row.role == "stored" else f"{row.role or 'no role'} {row.size:,}"
    text = f"{name}: {_shown(row.axes)}"
    if not row.alternatives:
        return text
    other, *_ = row.alternatives
    if other.memory > hbm:
        return f"{text}; with {_shown(other.axes)} a device would need {bytes_shown(other.memory)}"
    more = other.time / seconds - 1 if seconds else 0.0
    if more < _AS_GOOD:
        return f"{text}; {_shown(other.axes)} would take as long"
    return f"{text}; {_shown(other.axes)} would take {seconds_shown(other.time)}, {more:.1%} more"


def _shown(axes: tuple[str, ...]) -> str:
    return ",".join(axes) or "whole"
