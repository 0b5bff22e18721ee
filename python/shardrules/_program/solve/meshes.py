"""Solves a step on one mesh, or on that of several on which it takes least time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from shardrules._base.text import bytes_shown, mesh_shown, printable_lines, seconds_shown
from shardrules._place.mesh import as_mesh
from shardrules._program.solve.machine import Machine
from shardrules._program.solve.search import ROUNDING, Search
from shardrules._program.solve.space import Space, fixed_cuts, forbidden_pairs
from shardrules._program.topologies.topology import Topology, topology_shown

if TYPE_CHECKING:
    from shardrules._base.hardware import Hardware
    from shardrules._program.solve.layout import Assignment
    from shardrules._program.step.step import Step

_PROGRESS: ContextVar[Callable[[str], object]] = ContextVar("_PROGRESS", default=lambda text: None)
_MOST_DOUBLED = 10
_SHOWN = 3


class Task(NamedTuple):
    """What is solved, on whichever mesh."""

    step: Step
    hardware: Hardware
    hbm: int
    keep: tuple[Any, ...] = ()
    forbid: tuple[Any, ...] = ()
    until: float = inf

    def searches(self, meshes: Sequence[Any], on: Any) -> list[Search]:
        """Return the searches on meshes; `on` is the Topology that has these.

        Those of which less is known to be possible come first, as they end the others, and of
        those alike that with most devices along its first axes.
        """
        topology = on if isinstance(on, Topology) else None
        rows = [self._search(mesh, topology) for mesh in meshes]
        return sorted(
            rows,
            key=lambda row: (
                float(f"{row.bound:.2g}"),
                [-size for size in row.space.machine.sizes.values()],
            ),
        )

    def _search(self, mesh: Any, topology: Topology | None) -> Search:
        sizes = dict(as_mesh(mesh).shape)
        space = Space(
            self.step,
            Machine(self.hardware, sizes, topology),
            self.hbm,
            fixed=fixed_cuts(self.step, self.keep, sizes),
            forbidden=forbidden_pairs(self.step, self.forbid, sizes),
        )
        return Search(space, self.until, mesh)


class Best(NamedTuple):
    """The best assignment, on the best mesh, and how good any can be."""

    search: Search
    """That has found it."""
    assignment: Assignment
    bound: float
    """Seconds; no assignment takes less."""
    searches: tuple[Search, ...]
    """Of all meshes."""


@contextmanager
def progress_shown(show: Callable[[str], object]) -> Iterator[None]:
    """Give a function a line of progress after each mesh, while the body runs."""
    token = _PROGRESS.set(show)
    try:
        yield
    finally:
        _PROGRESS.reset(token)


def progress(text: str) -> None:
    """Show a line of progress, if somebody looks."""
    _PROGRESS.get()(text)


def best_of(task: Task, meshes: Sequence[Any], on: Any) -> Best:
    """Find the best assignment on any of these meshes."""
    searches = task.searches(meshes, on)
    best = _searched(searches)
    if best is None:
        raise _nothing(task, searches, on)
    best.simplify()
    assert best.assignment is not None
    bound = min(search.bound for search in searches)
    seconds = best.terms.total(best.assignment).total
    if bound >= best.found * (1 - ROUNDING):  # it is the optimum
        bound = seconds
    return Best(best, best.assignment, min(bound, seconds), tuple(searches))


def _searched(searches: Sequence[Search]) -> Search | None:
    """Search all, and return that of the best assignment; None if nothing fits."""
    best: Search | None = None
    # All are tried in short before one is searched to its end, as that may take all of the time.
    for run in (Search.begin, Search.run):
        for number, search in enumerate(searches, 1):
            search.most = inf if best is None else best.found
            run(search)
            if search.found < search.most:
                best = search
            if best is not None:
                seconds, bound = best.found, min(each.bound for each in searches)
                progress(
                    f"mesh {number} of {len(searches)}, {mesh_shown(search.space.machine.sizes)}: "
                    f"best {seconds_shown(seconds)}, bound {seconds_shown(bound)}, "
                    f"gap {1 - bound / seconds if seconds else 0:.1%}"
                )
            if search.is_over:
                return best
    return best


def _nothing(task: Task, searches: Sequence[Search], on: Any) -> Exception:
    """Return the error that nothing that fits was found: by how much, and where something fits."""
    search, assignment = _least_memory(searches)
    peak, sizes = search.resident.least(assignment), search.space.machine.sizes
    largest = search.resident.largest(assignment)
    is_known = not any(each.heap for each in searches)
    what = "nothing fits" if is_known else "nothing that fits was found in the time"
    lines = [
        f"{task.step.name}: {what}: with the least memory that was found it needs "
        f"{bytes_shown(peak)} on each device of {mesh_shown(sizes)}, "
        f"{bytes_shown(peak - task.hbm)} more than the {bytes_shown(task.hbm)} that there are",
        *(f"  {bytes_shown(size)} {_array(task.step, n)}" for size, n in largest[:_SHOWN]),
        *where_it_fits(task, search, on),
    ]
    return (ValueError if is_known else TimeoutError)(printable_lines(lines))


def _least_memory(searches: Sequence[Search]) -> tuple[Search, Assignment]:
    """Return the search on the mesh that needs least memory, with its assignment."""
    rows = [(search, search.least_memory()) for search in searches]
    return min(rows, key=lambda row: row[0].resident.least(row[1]))


def _array(step: Step, number: int) -> str:
    """Return dtype, shape and path of an array; without a path the operation that makes it."""
    value = step._equations.values[number]
    paths = dict(zip(step._equations.body.inputs, step._paths, strict=True))
    makers = (op.path for op, _ in step._equations.everything() if number in op.outputs)
    shape = f"{getattr(value.dtype, 'name', value.dtype)}[{','.join(map(str, value.shape))}]"
    return f"of {shape} {paths.get(number) or next(makers, 'constant')}"


def where_it_fits(task: Task, search: Search, on: Any) -> Iterator[str]:
    """Yield the line of the next slice that exists, or larger mesh, on which it fits."""
    for name, meshes in _larger(on, search.space.machine.sizes):
        larger, assignment = _least_memory(task.searches(meshes, None))
        if larger.resident.least(assignment) <= task.hbm:
            sizes = larger.space.machine.sizes
            where = name.format(mesh_shown(sizes))
            yield f"it fits on {where}: {prod(sizes.values()):,} devices"
            return


def _larger(on: Any, sizes: Mapping[str, int]) -> Iterator[tuple[str, list[dict[str, int]]]]:
    """Yield ever larger devices, with their meshes: slices that exist, or more along an axis."""
    for power in range(1, _MOST_DOUBLED):
        if isinstance(on, Topology):
            on = on._doubled()
            yield f"{topology_shown(on)} as {{}}", on.meshes(tuple(sizes))
        else:
            yield "{}", [{**sizes, axis: sizes[axis] * 2**power} for axis in sizes]
