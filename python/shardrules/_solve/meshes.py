"""Solves a step on one mesh, or on that of several on which it takes least time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from shardrules._mesh.mesh import as_mesh
from shardrules._solve.search import ROUNDING, Search
from shardrules._solve.space import Space, fixed_cuts, forbidden_pairs
from shardrules._text import bytes_shown, mesh_shown, printable_lines

if TYPE_CHECKING:
    from shardrules._estimate.step_time import Machine
    from shardrules._solve.space import Assignment, Cost
    from shardrules._step.step import Step

_MOST_DOUBLED = 10
_SHOWN = 3


class Task(NamedTuple):
    """What is solved, on whichever mesh."""

    step: Step
    machine: Machine
    hbm: int | None
    keep: tuple[Any, ...] = ()
    forbid: tuple[Any, ...] = ()
    until: float = inf

    def search(self, sizes: Mapping[str, int]) -> Search:
        """Return the search on a mesh of these sizes."""
        space = Space(
            self.step,
            sizes,
            self.machine,
            self.hbm,
            fixed=fixed_cuts(self.step, self.keep, sizes),
            forbidden=forbidden_pairs(self.step, self.forbid, sizes),
        )
        return Search(space, self.until)


class Best(NamedTuple):
    """The best assignment, on the best mesh, and how good any can be."""

    mesh: Any
    search: Search
    assignment: Assignment
    cost: Cost
    bound: float
    """Seconds; no assignment takes less."""
    is_over: bool
    """Whether the user, or the time, has ended the search."""


def best_of(task: Task, meshes: Sequence[Any]) -> Best:
    """Find the best assignment on any of these meshes.

    Raises:
        ValueError: Nothing fits, on any of them; the message says by how much.
        TimeoutError: The search was ended before it had found anything that fits.
    """
    sizes = [dict(as_mesh(mesh).shape) for mesh in meshes]
    searches = [task.search(each) for each in sizes]
    # Those of which less is known to be possible come first, as they end the others; of those alike
    # that with most devices along its first axes.
    order = sorted(
        range(len(meshes)),
        key=lambda i: (float(f"{searches[i].bound:.2g}"), [-n for n in sizes[i].values()]),
    )
    best: int | None = None
    for i in order:
        search = searches[i]
        search.seconds = inf if best is None else searches[best].seconds
        search.run()
        if search.assignment is not None:
            best = i
        if search.is_over:
            break
    is_over = any(search.is_over for search in searches)
    if best is None:
        if is_over:
            raise TimeoutError(f"{task.step.name}: nothing that fits was found in the time")
        raise ValueError(_why_nothing_fits(task, searches, sizes))
    search = searches[best]
    bound = min(each.bound for each in searches)
    search.simplify()
    assert search.assignment is not None
    cost = search.space.cost(search.assignment)
    # The price rounds bytes up, and adds terms in another order.
    is_optimum = bound >= search.seconds * (1 - ROUNDING)
    bound = cost.time.total if is_optimum else min(bound, cost.time.total)
    return Best(meshes[best], search, search.assignment, cost, bound, is_over)


def _why_nothing_fits(
    task: Task, searches: Sequence[Search], sizes: Sequence[Mapping[str, int]]
) -> str:
    rows = [(search.least_memory(), i) for i, search in enumerate(searches)]
    (peak, assignment), i = min(rows, key=lambda row: row[0][0])
    hbm, mesh = task.hbm or 0, sizes[i]
    memory = searches[i].space.cost(assignment).memory
    lines = [
        f"{task.step.name}: nothing fits: with the least memory that was found it needs "
        f"{bytes_shown(peak)} on each device of {mesh_shown(mesh)}, {bytes_shown(peak - hbm)} more "
        f"than the {bytes_shown(hbm)} that there are",
        *(f"  {bytes_shown(b.bytes)} {b.shape} {b.what}" for b in memory.buffers[:_SHOWN]),
    ]
    larger = _mesh_that_fits(task, mesh)
    if larger is not None:
        lines.append(f"it fits on {mesh_shown(larger)}: {prod(larger.values()):,} devices")
    return printable_lines(lines)


def _mesh_that_fits(task: Task, mesh: Mapping[str, int]) -> dict[str, int] | None:
    """Return the first mesh with more devices along its first axis on which the step fits."""
    first, *_ = mesh
    for power in range(1, _MOST_DOUBLED):
        larger = {**mesh, first: mesh[first] * 2**power}
        if task.search(larger).least_memory()[0] <= (task.hbm or 0):
            return larger
    return None
