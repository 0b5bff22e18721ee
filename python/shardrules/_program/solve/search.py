"""Searches the assignment of least time that fits: first ones, branch and bound, and CP-SAT.

First are layouts as experts write them, improved choice by choice. Branch and bound decides the
variables first that most terms share; what it leaves out is shown to cost more than the best, or to
need more memory. After some thousand nodes CP-SAT of OR-tools goes on, where it is installed: it
proves more, and sooner.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from itertools import combinations, count, product
from math import floor, inf, prod
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.text import bytes_shown, mesh_shown, printable_lines, seconds_shown
from shardrules._place.mesh import as_mesh
from shardrules._program.solve.layout import STORED
from shardrules._program.solve.price import Machine, Seconds
from shardrules._program.solve.space import Space, fixed_cuts, forbidden_pairs
from shardrules._program.solve.terms import Resident, Terms
from shardrules._program.topologies.topology import Topology, topology_shown

if TYPE_CHECKING:
    from shardrules._base.hardware import Hardware
    from shardrules._program.solve.layout import Assignment, Axes
    from shardrules._program.solve.price import Bounds
    from shardrules._program.step.step import Step

# Steps of few choices are solved in so many nodes, sooner than tables are made of their terms.
_FEW_NODES: Final = 2000
# Seconds that differ by less than this part are equal.
ROUNDING: Final = 1e-9
# So many of the first assignments are improved.
_DESCENTS: Final = 3
# Memory by which a simpler assignment may need more.
_LITTLE: Final = 1e-3


class _Node(NamedTuple):
    """Values of the first variables."""

    least: float
    """Lower bound of every completion."""
    number: int
    assignment: Assignment
    terms: dict[int, Bounds]
    sums: Bounds


class Search:
    """One search in a space."""

    def __init__(self, space: Space, until: float = inf, mesh: Any = None) -> None:
        self.space, self.mesh, self._until = space, mesh, until
        self.terms, self.resident = Terms(space), Resident(space)
        self.most = inf
        """Seconds that are known of another space: what takes as long is no answer."""
        self.found = inf
        """Seconds of the best assignment."""
        self.assignment: Assignment | None = None
        self.is_over = False
        """Whether the user, or the time, has ended the search."""
        self._of: dict[int, list[int]] = {name: [] for name in space.values}
        for place in self.terms.largest:
            for name in self.terms.terms[place].scope:
                self._of[name].append(place)
        degree = Counter(name for term in self.terms.terms for name in term.scope)
        self._order = sorted(
            space.values, key=lambda name: (-degree[name], -len(space.values[name]))
        )
        self._numbers = count()
        self._proved = 0.0
        self.heap = [] if self.is_over_memory({}) else [self._root()]

    @property
    def seconds(self) -> float:
        """Seconds of the best that is known, here or in another space."""
        return min(self.found, self.most)

    @property
    def bound(self) -> float:
        """Seconds: no assignment takes less."""
        least = self.heap[0].least if self.heap else inf
        return min(self.seconds, max(least, self._proved))

    def begin(self) -> None:
        """Find an assignment that fits, if that is soon found."""
        if self.heap and not self.is_worse(self.bound):
            self._until_over(self._find_first)

    def run(self) -> None:
        """Search all of the space, or until the time is over or the user interrupts."""
        self._until_over(self._run)

    def _until_over(self, search: Callable[[], None]) -> None:
        try:
            search()
        except KeyboardInterrupt:
            self.is_over = True

    def is_worse(self, seconds: float) -> bool:
        """Say whether something of so many seconds is no better than the best."""
        return seconds >= self.seconds * (1 - ROUNDING)

    def is_late(self) -> bool:
        """Say whether the search is to end."""
        self.is_over |= monotonic() > self._until
        return self.is_over

    def is_over_memory(self, assignment: Mapping[int, Axes]) -> bool:
        """Say whether it does not fit if variables have these values, whatever others have."""
        return self._over(assignment) > 0

    def _over(self, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes by which what is resident does not fit."""
        return max(0, self.resident.least(assignment) - self.space.hbm)

    def offer(self, assignment: Assignment, seconds: float) -> None:
        """Keep an assignment if it is better than the best here, and fits."""
        if seconds < self.found * (1 - ROUNDING) and not self.is_over_memory(assignment):
            self.found, self.assignment = seconds, dict(assignment)

    # First assignments.

    def _find_first(self) -> None:
        """Improve the best of the layouts that experts write; if nothing fits, what needs least."""
        starts = self.space.starts()
        for start in starts:
            self.offer(start, self.terms.total(start).total)
            if self.is_late():
                return
        starts.sort(key=lambda start: (self._over(start), self.terms.total(start).total))
        for start in starts[:_DESCENTS]:
            self._descend(start)
        if self.assignment is None:
            self._descend(self.least_memory())

    def _descend(self, start: Assignment) -> None:
        """Improve an assignment variable by variable until none gets better."""
        now, seconds, over = dict(start), self.terms.total(start), self._over(start)
        is_better = True
        while is_better and not self.is_late():
            is_better = False
            for name, values in self.space.values.items():
                if self.is_late():
                    break
                for value in values:
                    other = {**now, name: value}
                    after, excess = seconds, self._over(other)
                    if excess > over:
                        continue
                    for place in self._of[name]:
                        after = after.less(self.terms.seconds(place, now))
                        after = after.plus(self.terms.seconds(place, other))
                    if (excess, after.total) < (over, seconds.total * (1 - ROUNDING)):
                        now, seconds, over, is_better = other, after, excess, True
        self.offer(now, self.terms.total(now).total)

    def least_memory(self) -> Assignment:
        """Return the assignment of least memory to which variables, each by itself, lead."""
        rows = self.space.starts()
        for now in rows:
            for name, values in self.space.values.items():
                now[name] = min(values, key=lambda v: self.resident.least({**now, name: v}))
        return min(rows, key=self.resident.least)

    # Branch and bound.

    def _run(self) -> None:
        self._branch(_FEW_NODES if has_solver() else inf)
        if self.heap and not self.is_worse(self.bound) and not self.is_over:
            tables = Tables(self.terms, self.resident, self._domains(), self.seconds, self._until)
            found = tables.search(self.assignment)
            self._proved, self.is_over = found.bound, found.is_over
            if found.assignment is not None:
                self.offer(found.assignment, self.terms.total(found.assignment).total)
            self._branch(inf)

    def _branch(self, most: float) -> None:
        """Open nodes, those of the least bound first, but so many at most."""
        done = 0
        while self.heap and not self.is_worse(self.bound):
            if done >= most or self.is_late():
                return
            children = self._children(self.heap[0])
            heapq.heappop(self.heap)  # not before: what ends the search leaves it in the bound
            for child in children:
                heapq.heappush(self.heap, child)
            done += 1

    def _children(self, node: _Node) -> list[_Node]:
        """Return the nodes of the next variable's values; if there is none, offer the node."""
        if len(node.assignment) == len(self._order):
            self.offer(node.assignment, self.terms.total(node.assignment).total)
            return []
        name = self._order[len(node.assignment)]
        nodes = (self._tightened(node, name, value) for value in self.space.values[name])
        return [child for child in nodes if child is not None]

    def _domains(self) -> dict[int, list[Axes]]:
        """Return the values of each variable that alone are not shown to be worse."""
        root = self._root()
        return {
            name: [value for value in values if self._tightened(root, name, value) is not None]
            for name, values in self.space.values.items()
        }

    def _tightened(self, node: _Node, name: int, value: Axes) -> _Node | None:
        """Return the node in which a variable has a value; None if it is shown to be worse."""
        assignment = {**node.assignment, name: value}
        if self.is_over_memory(assignment):
            return None
        terms, sums = dict(node.terms), node.sums
        for place in self._of[name]:
            least = self.terms.least(place, assignment)
            sums = tuple(a - b + c for a, b, c in zip(sums, terms[place], least, strict=True))
            terms[place] = least
            if self.is_worse(max(sums)):
                return None
        return _Node(max(sums), next(self._numbers), assignment, terms, sums)

    def _root(self) -> _Node:
        terms = {place: self.terms.least(place, {}) for place in range(len(self.terms.terms))}
        sums = _sum_of(terms.values())
        return _Node(max(sums), next(self._numbers), {}, terms, sums)

    # Of assignments that are as good, the simplest.

    def simplify(self) -> None:
        """Leave out axes without which the best assignment is as good; the first are on data."""
        assert self.assignment is not None
        for name, values in self.space.values.items():
            for value in values:
                if name == STORED or len(value) >= len(self.assignment[name]):
                    break
                self._take({**self.assignment, name: value})
        order = list(self.space.sizes)
        for first, second in combinations(order, 2):
            other_of = {first: second, second: first}
            other = {
                name: tuple(sorted((other_of.get(a, a) for a in axes), key=order.index))
                for name, axes in self.assignment.items()
            }
            if self._axes_of_data(other) < self._axes_of_data(self.assignment):
                self._take(other)

    def _axes_of_data(self, assignment: Assignment) -> list[list[int]]:
        """Return the places of the axes that cut the batch, and of those that weights have."""
        roles, order = self.space.step._roles.of, list(self.space.sizes)
        data = [name for name in self.space.values if roles.get(name) == "batch"]
        return [
            [order.index(axis) for axis in assignment[name]]
            for name in (*data, STORED)
            if name in assignment
        ]

    def _take(self, other: Assignment) -> None:
        """Have another assignment as the best if it is as good."""
        assert self.assignment is not None
        least = self.resident.least
        if (
            all(other[name] in values for name, values in self.space.values.items())
            and self.terms.total(other).total <= self.found * (1 + ROUNDING)
            and least(other) <= least(self.assignment) * (1 + _LITTLE)
            and not self.is_over_memory(other)
        ):
            self.assignment = other


def _sum_of(rows: Iterable[Bounds]) -> Bounds:
    return tuple(map(sum, zip(Seconds().bounds, *rows, strict=True)))


Scope = tuple[int, ...]
Rows = dict[tuple[int, ...], tuple[float, ...]]
"""What combinations cost, by the numbers of their values."""
# A larger table takes minutes to make.
_MOST_ROWS: Final = 50_000
# Seconds are integers: so many parts of the best.
_PARTS: Final = 10**9
# What is lost of a bound of rounded rows.
_ROUNDED: Final = 1e-6


class Found(NamedTuple):
    """What CP-SAT says."""

    bound: float
    """Seconds; no assignment takes less."""
    assignment: Assignment | None = None
    """One that is better; None if none is known."""
    is_over: bool = False
    """Whether the time was over, or the user has ended it."""


def has_solver() -> bool:
    """Say whether OR-tools is installed."""
    return find_spec("ortools") is not None


class Tables:
    """Tables of the terms of a step.

    Args:
        terms: Of the time.
        resident: What is alive together.
        domains: The values of each variable that are tried.
        most: Seconds of the best assignment that is known.
        until: When the search is to end.
    """

    def __init__(
        self,
        terms: Terms,
        resident: Resident,
        domains: Mapping[int, list[Axes]],
        most: float,
        until: float = inf,
    ) -> None:
        self._terms, self._resident, self._domains = terms, resident, domains
        self._most, self._until = most, until

    def search(self, hint: Assignment | None = None) -> Found:
        """Search a better assignment, beginning near one that is known.

        Nothing is proved if there is none yet that says how many seconds are many, or if a table
        would be too large.
        """
        if not all(self._domains.values()):
            return Found(self._most)
        scopes = self._scopes()
        sizes = (prod(len(self._domains[name]) for name in scope) for scope in scopes)
        if self._most == inf or max(sizes, default=0) > _MOST_ROWS:
            return Found(0.0)
        tables: dict[Scope, Rows] = {}
        for scope, places in scopes.items():
            if monotonic() > self._until:
                return Found(0.0, is_over=True)
            tables[scope] = {
                row: self._terms.total(values, places).bounds[::2]
                for row, values in self._assignments(scope)
            }
        return self._solved(self._pruned(tables), hint or {})

    def _scopes(self) -> dict[Scope, list[int]]:
        """Return the terms by their variables; those of a part of others' are with these."""
        scopes: dict[Scope, list[int]] = {}
        places = range(len(self._terms.terms))
        for place in sorted(places, key=lambda place: -len(self._terms.terms[place].scope)):
            scope = self._terms.terms[place].scope
            wider = next((other for other in scopes if set(scope) <= set(other)), scope)
            scopes.setdefault(wider, []).append(place)
        return scopes

    def _assignments(self, scope: Scope) -> Iterator[tuple[tuple[int, ...], Assignment]]:
        """Yield the numbers of values, and the values, of all combinations."""
        for row in product(*(range(len(self._domains[name])) for name in scope)):
            yield row, {name: self._domains[name][i] for name, i in zip(scope, row, strict=True)}

    def _pruned(self, tables: dict[Scope, Rows]) -> Iterator[tuple[Scope, Rows]]:
        """Yield tables without rows that are too slow even if all others have their least."""
        least = [tuple(map(min, zip(*rows.values(), strict=True))) for rows in tables.values()]
        totals = [sum(column) for column in zip(*least, strict=True)]
        for (scope, rows), own in zip(tables.items(), least, strict=True):
            room = [self._most - total + first for total, first in zip(totals, own, strict=True)]
            yield (
                scope,
                {
                    row: cells
                    for row, cells in rows.items()
                    if all(cell <= most for cell, most in zip(cells, room, strict=True))
                },
            )

    def _solved(self, tables: Iterable[tuple[Scope, Rows]], hint: Assignment) -> Found:
        """Return the best assignment by the tables."""
        from ortools.sat.python import cp_model

        model, unit = cp_model.CpModel(), self._most / _PARTS
        variables = {
            name: model.new_int_var(0, len(values) - 1, str(name))
            for name, values in self._domains.items()
        }

        def costs(scope: Scope, cells: Mapping[tuple[int, ...], Iterable[int]]) -> list[Any]:
            """Return variables that are what the row costs which the values choose."""
            rows = [(*row, *cell) for row, cell in cells.items()]
            columns = [*zip(*rows, strict=True)][len(scope) :]
            made = [model.new_int_var(min(column), max(column), "") for column in columns]
            model.add_allowed_assignments([*(variables[name] for name in scope), *made], rows)
            return made

        total, times = model.new_int_var(0, _PARTS, "total"), []
        for scope, rows in tables:
            if not rows:
                return Found(self._most)
            cells = {row: [floor(cell / unit) for cell in pair] for row, pair in rows.items()}
            times.append(costs(scope, cells))
        for column in zip(*times, strict=True):  # the longer of the two is the time
            model.add(total >= sum(column))
        for time in self._resident.times:
            alive = []
            for group in time:
                scope, _ = self._resident.groups[group]
                rows_of = self._assignments(scope)
                cells = {row: [self._resident.of(group, values)] for row, values in rows_of}
                alive += costs(scope, cells)
            model.add(sum(alive) <= self._terms.space.hbm)
        model.minimize(total)
        for name, value in hint.items():
            if value in self._domains[name]:
                model.add_hint(variables[name], self._domains[name].index(value))
        solver = cp_model.CpSolver()
        if self._until != inf:
            solver.parameters.max_time_in_seconds = max(self._until - monotonic(), 0.01)
        status, found = solver.solve(model), None
        if status == cp_model.INFEASIBLE:
            return Found(self._most)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            numbers = {name: solver.value(variable) for name, variable in variables.items()}
            found = {name: self._domains[name][i] for name, i in numbers.items()}
        if found is not None and status == cp_model.OPTIMAL:
            return Found(self._terms.total(found).total, found)
        bound = float(solver.best_objective_bound) * unit * (1 - _ROUNDED)
        return Found(bound, found, is_over=True)


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
