"""Searches the assignment of least time that fits: layouts of experts, improved, and then CP-SAT.

Layouts as experts write them are improved choice by choice. Then the terms of the step go as tables
to CP-SAT of OR-tools, which finds what is better, and proves that nothing else is. Where OR-tools
is not installed the improved layouts are the answer, with the gap to a bound of the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from importlib.util import find_spec
from itertools import product
from math import floor, inf, prod
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.text import bytes_shown, mesh_shown, printable_lines, seconds_shown
from shardrules._program.solve.layout import STORED
from shardrules._program.solve.terms import Resident, Terms

if TYPE_CHECKING:
    from shardrules._program.solve.layout import Assignment
    from shardrules._program.solve.space import Space
    from shardrules._program.solve.spread import Bounds
    from shardrules._program.step.step import Step

_Scope = tuple[int, ...]
_Row = tuple[int, ...]
"""The numbers of the values of a table's variables."""
# Seconds that differ by less than this part are equal.
_ROUNDING: Final = 1e-9
# So many of the first assignments are improved.
_DESCENTS: Final = 3
# Memory by which a simpler assignment may need more.
_LITTLE: Final = 1e-3
# A larger table takes minutes to make; its terms are left out, which lowers the bound.
_MOST_ROWS: Final = 50_000
_MOST_SECONDS: Final = 120.0
"""Of CP-SAT on one mesh, after which a gap is left."""
# CP-SAT counts in integers: so many parts of the best time.
_PARTS: Final = 10**9
# What is lost of a bound of rounded rows.
_ROUNDED: Final = 1e-6
_SHOWN: Final = 3
PROGRESS: ContextVar[Callable[[str], object]] = ContextVar("PROGRESS", default=lambda text: None)
"""What is given a line of progress after each mesh and layout."""


class Search:
    """The search on one mesh."""

    def __init__(self, space: Space, mesh: Any = None) -> None:
        self.space, self.mesh = space, mesh
        self.terms, self.resident = Terms(space), Resident(space)
        self.seconds = inf
        """Of the best assignment."""
        self.assignment: Assignment | None = None
        self.bound = self.terms.least
        """Seconds: no assignment that fits takes less."""
        self._terms_of: dict[int, list[int]] = {name: [] for name in space.values}
        for place, term in enumerate(self.terms.terms):
            for name in term.scope:
                self._terms_of[name].append(place)

    def is_over_memory(self, assignment: Assignment) -> bool:
        """Say whether it does not fit."""
        return self._missing_bytes(assignment) > 0

    def _missing_bytes(self, assignment: Assignment) -> int:
        return max(0, self.resident.bytes(assignment) - self.space.hbm)

    def _offer(self, assignment: Assignment) -> None:
        """Keep an assignment if it is better than the best, and fits."""
        seconds = self.terms.total(assignment).total
        if seconds < self.seconds * (1 - _ROUNDING) and not self.is_over_memory(assignment):
            self.seconds, self.assignment = seconds, dict(assignment)

    # Layouts of experts, improved.

    def begin(self) -> None:
        """Improve the best of the layouts that experts write; if nothing fits, what needs least."""
        self.seconds, self.assignment = inf, None
        starts = self.space.starts()
        for start in starts:
            self._offer(start)
        starts.sort(key=lambda row: (self._missing_bytes(row), self.terms.total(row).total))
        for start in starts[:_DESCENTS]:
            self._improve(start)
        if self.assignment is None:
            self._improve(self.least_memory())

    def _improve(self, start: Assignment) -> None:
        """Change an assignment variable by variable until none gets better."""
        now, seconds, missing = start, self.terms.total(start), self._missing_bytes(start)
        before = None
        while before != now:
            before = now
            for name, values in self.space.values.items():
                places = self._terms_of[name]
                for value in values:
                    changed = {**now, name: value}
                    still_missing = self._missing_bytes(changed)
                    if still_missing > missing:
                        continue
                    after = seconds.less(self.terms.total(now, places))
                    after = after.plus(self.terms.total(changed, places))
                    if (still_missing, after.total) < (missing, seconds.total * (1 - _ROUNDING)):
                        now, seconds, missing = changed, after, still_missing
        self._offer(now)

    def least_memory(self) -> Assignment:
        """Return the assignment of least memory to which variables, each by itself, lead."""
        rows = self.space.starts()
        for row in rows:
            for name, values in self.space.values.items():
                row[name] = min(values, key=lambda v: self.resident.bytes({**row, name: v}))
        return min(rows, key=self.resident.bytes)

    # All others, as tables.

    def prove(self, most: float) -> None:
        """Find the best of all assignments, or show that none takes less than so many seconds."""
        if self.bound >= most * (1 - _ROUNDING):
            return
        tables = self._tables(most)
        if not all(tables.values()):
            self.bound = most
        elif has_solver():
            self._solve(tables, most)
        else:
            sums = map(sum, zip(*map(_least, tables.values()), strict=True))
            self.bound = max(self.bound, min(most, max(sums, default=0.0)))

    def _assignments(self, scope: _Scope) -> Iterator[tuple[_Row, Assignment]]:
        """Yield the numbers of values, and the values, of all combinations."""
        values = [self.space.values[name] for name in scope]
        for row in product(*(range(len(each)) for each in values)):
            yield (
                row,
                {name: values[i][n] for i, (name, n) in enumerate(zip(scope, row, strict=True))},
            )

    def _scopes(self) -> dict[_Scope, list[int]]:
        """Return the terms by their variables; those of a part of others' are with these."""
        scopes: dict[_Scope, list[int]] = {}
        terms = enumerate(self.terms.terms)
        for place, term in sorted(terms, key=lambda row: -len(row[1].scope)):
            wider = next((scope for scope in scopes if set(term.scope) <= set(scope)), term.scope)
            scopes.setdefault(wider, []).append(place)
        return scopes

    def _tables(self, most: float) -> dict[_Scope, dict[_Row, Bounds]]:
        """Return by variables what terms cost together for each combination of values.

        Without rows that take more than so many seconds if all other tables have their least.
        """
        tables = {
            scope: {
                row: self.terms.total(values, places).bounds
                for row, values in self._assignments(scope)
            }
            for scope, places in self._scopes().items()
            if prod(len(self.space.values[name]) for name in scope) <= _MOST_ROWS
        }
        least = [_least(rows) for rows in tables.values()]
        room = [most - sum(column) for column in zip(*least, strict=True)]
        return {
            scope: {
                row: bounds
                for row, bounds in rows.items()
                if all(b - a <= r for a, b, r in zip(first, bounds, room, strict=True))
            }
            for (scope, rows), first in zip(tables.items(), least, strict=True)
        }

    def _solve(self, tables: dict[_Scope, dict[_Row, Bounds]], most: float) -> None:
        """Have CP-SAT choose a row of each table."""
        from ortools.sat.python import cp_model

        model = cp_model.CpModel()
        variables = {
            name: model.new_int_var(0, len(values) - 1, str(name))
            for name, values in self.space.values.items()
        }

        def costs(scope: _Scope, cells: Iterable[tuple[_Row, Iterable[int]]]) -> list[Any]:
            """Return variables that are what the row costs which the values choose."""
            rows = [(*row, *numbers) for row, numbers in cells]
            columns = [*zip(*rows, strict=True)][len(scope) :]
            cells_of_row = [model.new_int_var(min(column), max(column), "") for column in columns]
            model.add_allowed_assignments(
                [*(variables[name] for name in scope), *cells_of_row], rows
            )
            return cells_of_row

        limit = most  # or if nothing is known that fits, what all of the worst take
        if most == inf:
            limit = sum(max(map(max, rows.values())) for rows in tables.values())
        unit = limit / _PARTS or 1.0
        total, times = model.new_int_var(0, _PARTS, "total"), []
        for scope, rows in tables.items():
            cells = ((row, [floor(b / unit) for b in bounds]) for row, bounds in rows.items())
            times.append(costs(scope, cells))
        for column in zip(*times, strict=True):  # the longer of the two is the time
            model.add(total >= sum(column))
        for groups in self.resident.times:
            alive = []
            for group in groups:
                scope = self.resident.groups[group][0]
                sizes = ((row, [self.resident.of(group, v)]) for row, v in self._assignments(scope))
                alive += costs(scope, sizes)
            model.add(sum(alive) <= self.space.hbm)
        model.minimize(total)
        for name, value in (self.assignment or {}).items():
            model.add_hint(variables[name], self.space.values[name].index(value))
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = _MOST_SECONDS
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            self.bound = most
            return
        bound = float(solver.best_objective_bound) * unit * (1 - _ROUNDED)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            numbers = {name: solver.value(variable) for name, variable in variables.items()}
            self._improve({name: self.space.values[name][i] for name, i in numbers.items()})
            if status == cp_model.OPTIMAL and len(tables) == len(self._scopes()):
                bound = self.seconds
        self.bound = max(self.bound, min(bound, most))

    def simplify(self) -> None:
        """Leave out axes without which the best assignment is as good."""
        assert self.assignment is not None
        for name, values in self.space.values.items():
            for value in values:
                if name == STORED or len(value) >= len(self.assignment[name]):
                    break
                simpler = {**self.assignment, name: value}
                needed = self.resident.bytes(simpler)
                if (
                    self.terms.total(simpler).total <= self.seconds * (1 + _ROUNDING)
                    and needed <= self.resident.bytes(self.assignment) * (1 + _LITTLE)
                    and needed <= self.space.hbm
                ):
                    self.assignment = simpler


def _least(rows: dict[_Row, Bounds]) -> Bounds:
    """Return the least of each column of a table."""
    return tuple(map(min, zip(*rows.values(), strict=True)))


def has_solver() -> bool:
    """Say whether OR-tools is installed."""
    return find_spec("ortools") is not None


def best_of(searches: Sequence[Search], others: Iterable[Search] = ()) -> tuple[Search, float]:
    """Search each mesh; return the search on the best one, and seconds that none takes less than.

    An interrupt ends all, with what is known by then. If nothing fits, `others` are further meshes,
    of which one that has room is named.
    """

    def best() -> Search:  # of those alike the first, with most devices along the first axes
        least = min(search.seconds for search in searches)
        return next(search for search in searches if search.seconds <= least * (1 + _ROUNDED))

    with suppress(KeyboardInterrupt):
        # All are tried in short before one is searched to its end, which may take all of the time.
        for search in searches:
            search.begin()
        for number, search in enumerate(sorted(searches, key=lambda row: row.seconds), 1):
            search.prove(best().seconds)
            seconds, bound = best().seconds, min(each.bound for each in searches)
            if seconds < inf:
                gap = max(0.0, 1 - bound / seconds) if seconds else 0.0
                PROGRESS.get()(
                    f"mesh {number} of {len(searches)}, {mesh_shown(search.space.machine.sizes)}: "
                    f"best {seconds_shown(seconds)}, bound {seconds_shown(bound)}, gap {gap:.1%}"
                )
    winner = best()
    bound = min(search.bound for search in searches)
    if winner.assignment is None:
        raise _nothing(searches, others)
    winner.simplify()
    seconds = winner.terms.total(winner.assignment).total
    return winner, seconds if bound >= seconds * (1 - 2 * _ROUNDED) else bound


def _nothing(searches: Sequence[Search], others: Iterable[Search]) -> ValueError:
    """Return the error that nothing that fits was found: by how much, and for which arrays."""

    def least(rows: Iterable[Search]) -> tuple[int, Search] | None:
        sizes = ((row.resident.bytes(row.least_memory()), row) for row in rows)
        return min(sizes, key=lambda pair: pair[0], default=None)

    tried, other = least(searches), least(others)
    assert tried is not None
    needed, search = tried
    space, largest = search.space, search.resident.largest(search.least_memory())[:_SHOWN]
    lines = [
        f"{space.step.name}: nothing fits of what was tried: with the least memory that was found "
        f"it needs {bytes_shown(needed)} on each device of "
        f"{mesh_shown(space.machine.sizes)}, {bytes_shown(needed - space.hbm)} more than the "
        f"{bytes_shown(space.hbm)} that there are",
        *(f"  {bytes_shown(size)} {_array(space.step, n)}" for size, n in largest),
    ]
    if other is not None and other[0] <= space.hbm:
        there = mesh_shown(other[1].space.machine.sizes)
        lines.append(
            f"there is room on {there}, where it needs {bytes_shown(other[0])}: solve there"
        )
    return ValueError(printable_lines(lines))


def _array(step: Step, number: int) -> str:
    """Return dtype, shape and path of an array; without a path the operation that makes it."""
    value = step._equations.values[number]
    paths = dict(zip(step._equations.body.inputs, step._paths, strict=True))
    makers = (op.path for op, _ in step._equations.everything() if number in op.outputs)
    shape = f"{getattr(value.dtype, 'name', value.dtype)}[{','.join(map(str, value.shape))}]"
    return f"of {shape} {paths.get(number) or next(makers, 'constant')}"
