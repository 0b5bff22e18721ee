"""The search by CP-SAT of OR-tools: a table for each set of variables that terms share.

A table has a row for each combination of values, with what all terms of these variables cost
together; those of arrays that are alive together have bytes. A row that is worse than the best
known assignment, whatever all others are, is left out before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import product
from math import floor, inf, prod
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from shardrules._program.solve.layout import Assignment, Axes
    from shardrules._program.solve.resident import Resident
    from shardrules._program.solve.terms import Terms

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
