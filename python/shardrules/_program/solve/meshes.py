"""Solves a step on one mesh, or on that of several on which it takes least time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from shardrules._base.text import bytes_shown, mesh_shown, printable_lines, seconds_shown
from shardrules._place.mesh import as_mesh
from shardrules._program.solve.candidates import ROUNDING
from shardrules._program.solve.search import Search
from shardrules._program.solve.space import Space, fixed_cuts, forbidden_pairs
from shardrules._program.topologies.topology import Topology, topology_shown

if TYPE_CHECKING:
    from shardrules._program.solve.machine import Machine
    from shardrules._program.solve.space import Assignment, Cost
    from shardrules._program.step.step import Step

_PROGRESS: ContextVar[Callable[[str], object]] = ContextVar("_PROGRESS", default=lambda text: None)
_MOST_DOUBLED = 10
_SHOWN = 3


class Task(NamedTuple):
    """What is solved, on whichever mesh."""

    step: Step
    machine: Machine
    hbm: int
    keep: tuple[Any, ...] = ()
    forbid: tuple[Any, ...] = ()
    until: float = inf

    def cases(self, meshes: Sequence[Any], on: Any) -> list[Case]:
        """Return the searches on meshes; `on` is the Topology that has these."""
        rows = [(mesh, dict(as_mesh(mesh).shape)) for mesh in meshes]
        return [Case(mesh, sizes, self._search(sizes, on)) for mesh, sizes in rows]

    def _search(self, sizes: Mapping[str, int], on: Any) -> Search:
        step = self.step
        machine = self.machine
        if isinstance(on, Topology):
            machine = machine.on_slice(on, sizes)
        space = Space(
            step,
            sizes,
            machine,
            self.hbm,
            fixed=fixed_cuts(step, self.keep, sizes),
            forbidden=forbidden_pairs(step, self.forbid, sizes),
        )
        return Search(space, self.until)


class Case(NamedTuple):
    """A search on a mesh."""

    mesh: Any
    sizes: dict[str, int]
    search: Search

    @property
    def rank(self) -> tuple[Any, ...]:
        """Those of which less is known to be possible come first, as they end the others.

        Of those alike that with most devices along its first axes.
        """
        return float(f"{self.search.bound:.2g}"), [-size for size in self.sizes.values()]


class Best(NamedTuple):
    """The best assignment, on the best mesh, and how good any can be."""

    case: Case
    assignment: Assignment
    cost: Cost
    bound: float
    """Seconds; no assignment takes less."""
    is_over: bool
    """Whether the user, or the time, has ended the search."""
    cases: tuple[Case, ...]
    """Of all meshes."""

    @property
    def search(self) -> Search:
        """The search that has found it."""
        return self.case.search


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
    cases = sorted(task.cases(meshes, on), key=lambda case: case.rank)
    best = _searched(cases)
    if best is None:
        raise _nothing(task, cases, on)
    search = best.search
    bound = min(case.search.bound for case in cases)
    search.simplify()
    assert search.assignment is not None
    cost = search.space.cost(search.assignment)
    # The price rounds bytes up, and adds terms in another order.
    is_optimum = bound >= search.seconds * (1 - ROUNDING)
    bound = cost.time.total if is_optimum else min(bound, cost.time.total)
    is_over = any(case.search.is_over for case in cases)
    return Best(best, search.assignment, cost, bound, is_over, tuple(cases))


def _searched(cases: Sequence[Case]) -> Case | None:
    """Search all cases, and return that of the best assignment; None if nothing fits."""
    best: Case | None = None
    # All are tried in short before one is searched to its end, as that may take all of the time.
    for run in (Search.begin, Search.run):
        for number, case in enumerate(cases, 1):
            least = case.search.seconds = inf if best is None else best.search.seconds
            run(case.search)
            if case.search.seconds < least:
                best = case
            if best is not None:
                seconds, bound = best.search.seconds, min(each.search.bound for each in cases)
                progress(
                    f"mesh {number} of {len(cases)}, {mesh_shown(case.sizes)}: best "
                    f"{seconds_shown(seconds)}, bound {seconds_shown(bound)}, "
                    f"gap {1 - bound / seconds if seconds else 0:.1%}"
                )
            if case.search.is_over:
                return best
    return best


def _nothing(task: Task, cases: Sequence[Case], on: Any) -> Exception:
    """Return the error that nothing that fits was found: by how much, and where something fits."""
    case, peak, assignment = _least_memory(cases)
    largest = case.search.resident.largest(assignment)
    is_known = not any(each.search.heap for each in cases)
    what = "nothing fits" if is_known else "nothing that fits was found in the time"
    lines = [
        f"{task.step.name}: {what}: with the least memory that was found it needs "
        f"{bytes_shown(peak)} on each device of {mesh_shown(case.sizes)}, "
        f"{bytes_shown(peak - task.hbm)} more than the {bytes_shown(task.hbm)} that there are",
        *(f"  {bytes_shown(size)} {_array(task.step, n)}" for size, n in largest[:_SHOWN]),
        *where_it_fits(task, case, on),
    ]
    return (ValueError if is_known else TimeoutError)(printable_lines(lines))


def _least_memory(cases: Sequence[Case]) -> tuple[Case, int, Assignment]:
    """Return the case that needs least memory, with its assignment."""
    rows = [(*case.search.least_memory(), i) for i, case in enumerate(cases)]
    peak, assignment, i = min(rows, key=lambda row: (row[0], row[2]))
    return cases[i], peak, assignment


def _array(step: Step, number: int) -> str:
    """Return dtype, shape and path of an array; without a path the operation that makes it."""
    value = step._equations.values[number]
    paths = dict(zip(step._equations.body.inputs, step._paths, strict=True))
    makers = (op.path for op, _ in step._equations.everything() if number in op.outputs)
    shape = f"{getattr(value.dtype, 'name', value.dtype)}[{','.join(map(str, value.shape))}]"
    return f"of {shape} {paths.get(number) or next(makers, 'constant')}"


def where_it_fits(task: Task, case: Case, on: Any) -> Iterator[str]:
    """Yield the line of the next slice that exists, or larger mesh, on which it fits."""
    axes = tuple(case.sizes)
    for name, meshes in _larger(on, axes, case.sizes):
        larger, peak, _ = _least_memory(task.cases(meshes, None))
        if peak <= task.hbm:
            where = mesh_shown(larger.sizes)
            yield f"it fits on {name.format(where)}: {prod(larger.sizes.values()):,} devices"
            return


def _larger(
    on: Any, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> Iterator[tuple[str, list[dict[str, int]]]]:
    """Yield ever larger devices, with their meshes: slices that exist, or more along an axis."""
    for power in range(1, _MOST_DOUBLED):
        if isinstance(on, Topology):
            on = on._doubled()
            yield f"{topology_shown(on)} as {{}}", on.meshes(axes)
        else:
            count = 2**power
            yield "{}", [{**sizes, axis: sizes[axis] * count} for axis in axes]
