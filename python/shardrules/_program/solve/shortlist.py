"""The layouts of a step that the compiler is asked about: the shortlist of a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.text import mesh_shown
from shardrules._program.solve.space import STORED

if TYPE_CHECKING:
    from shardrules._program.solve.meshes import Best, Case
    from shardrules._program.solve.space import Assignment

MOST: Final = 10
"""Layouts that are compiled."""
# Predicted seconds that are so many times those of the best are not mispredicted alone.
_FAR: Final = 1.5
_DIGITS: Final = 4


class Contender(NamedTuple):
    """A layout that may be the best."""

    what: str
    case: Case
    assignment: Assignment
    seconds: float
    """By prediction."""


def shortlist(best: Best) -> list[Contender]:
    """List the layouts of least predicted time that may fit, the best first.

    FSDP, the layout of the program and the best of each other mesh are tried before those that
    differ from the best in one choice. Of layouts that cost the same there is one, such as those
    along the one or the other of two axes.
    """
    first = _entry("the best by prediction", best.case, best.assignment)
    fsdp = [_entry("FSDP", case, case.search.fsdp()) for case in best.cases]
    own = _own_case(best)
    others = [*_fastest(list(_of_meshes(best))), *_fastest(list(_neighbours(best)))]
    entries = [
        first,
        *_fastest(fsdp)[:1],
        _entry("as in the program", own, own.search.space.traced()),
        *(entry for entry in others if entry.seconds <= first.seconds * _FAR),
    ]
    found: dict[Any, Contender] = {}
    for entry in entries:
        if entry is first or not entry.case.search.is_over_memory(entry.assignment):
            found.setdefault(_program(entry), entry)
    return list(found.values())[:MOST]


def _entry(what: str, case: Case, assignment: Assignment) -> Contender:
    return Contender(what, case, assignment, case.search.terms.total(assignment).total)


def _fastest(entries: Sequence[Contender]) -> list[Contender]:
    return sorted(entries, key=lambda entry: entry.seconds)


def _own_case(best: Best) -> Case:
    """Return the case of the mesh with which the step was traced, or else of the best one."""
    mesh = best.case.search.space.step.mesh
    sizes = {} if mesh is None else dict(mesh.shape)
    return next((case for case in best.cases if case.sizes == sizes), best.case)


def _of_meshes(best: Best) -> Iterator[Contender]:
    """Yield the best that is known of each other mesh."""
    for case in best.cases:
        if case is not best.case and case.search.tried:
            tried = [_entry("", case, assignment) for assignment in case.search.tried]
            fitting = [row for row in tried if not case.search.is_over_memory(row.assignment)]
            for entry in _fastest(fitting)[:1]:
                yield entry._replace(what=f"the best on {mesh_shown(case.sizes)}")


def _neighbours(best: Best) -> Iterator[Contender]:
    """Yield the layouts that differ from the best in one choice."""
    space = best.case.search.space
    for name, values in space.values.items():
        for value in values:
            if value != best.assignment[name]:
                role = space.step._roles.of.get(name, "") or "no role"
                size = space.step._equations.dims.sizes[name] if name != STORED else 0
                what = "storage" if name == STORED else f"{role} {size:,}"
                text = f"{what}: {','.join(value) or 'whole'}"
                yield _entry(text, best.case, {**best.assignment, name: value})


def _program(entry: Contender) -> Any:
    """Return what layouts share that cost the same: most are the same program.

    XLA tells meshes apart whose axes have changed places.
    """
    search = entry.case.search
    costs = entry.seconds, search.resident.least(entry.assignment)
    return tuple(search.space.sizes.values()), *(f"{cost:.{_DIGITS}g}" for cost in costs)
