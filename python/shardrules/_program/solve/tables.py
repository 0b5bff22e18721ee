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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from shardrules._program.solve.layout import Assignment, Axes
    from shardrules._program.solve.search import Search

Domains = Mapping[int, list["Axes"]]
Scope = tuple[int, ...]
# A larger table takes minutes to make.
_MOST_ROWS: Final = 50_000
# Seconds are integers: so many parts of the best.
_PARTS: Final = 10**9
# What is lost of a bound of rounded rows.
_ROUNDED: Final = 1e-6


class _Table(NamedTuple):
    scope: Scope
    rows: dict[tuple[int, ...], tuple[float, float]]
    """By the numbers of values, seconds of which the larger sum is the time."""


def has_solver() -> bool:
    """Say whether OR-tools is installed."""
    return find_spec("ortools") is not None


def search_tables(best: Search, domains: Domains) -> float:
    """Offer better assignments until there is none; return a lower bound of all of them.

    0 if nothing was proved: there is no assignment yet that says how many seconds are many, or a
    table would be too large.
    """
    if not all(domains.values()):
        return best.seconds
    scopes = _scopes(best, domains)
    sizes = (prod(len(domains[name]) for name in scope) for scope in scopes)
    if best.seconds == inf or max(sizes, default=0) > _MOST_ROWS:
        return 0.0
    tables = []
    for scope, places in scopes.items():
        if best.is_late():
            return 0.0
        tables.append(_table(best, domains, scope, places))
    model = _Model(best, domains, list(_pruned(tables, best.seconds)))
    return model.search()


def _scopes(best: Search, domains: Domains) -> dict[Scope, list[int]]:
    """Return the terms by their variables; those of a part of others' variables are with these."""
    scopes: dict[Scope, list[int]] = {}
    places = range(len(best.terms.terms))
    for place in sorted(places, key=lambda place: -len(best.terms.terms[place].scope)):
        scope = best.terms.terms[place].scope
        wider = next((other for other in scopes if set(scope) <= set(other)), scope)
        scopes.setdefault(wider, []).append(place)
    return scopes


def _assignments(domains: Domains, scope: Scope) -> Iterator[tuple[tuple[int, ...], Assignment]]:
    """Yield the numbers of values, and the values, of all combinations."""
    for row in product(*(range(len(domains[name])) for name in scope)):
        yield row, {name: domains[name][i] for name, i in zip(scope, row, strict=True)}


def _table(best: Search, domains: Domains, scope: Scope, places: Iterable[int]) -> _Table:
    rows = {}
    for row, values in _assignments(domains, scope):
        first, _, last = best.terms.total(values, places).bounds
        rows[row] = (first, last)
    return _Table(scope, rows)


def _pruned(tables: list[_Table], most: float) -> Iterator[_Table]:
    """Yield tables without rows that are too slow even if all other tables have their least."""
    least = [tuple(map(min, zip(*table.rows.values(), strict=True))) for table in tables]
    totals = [sum(column) for column in zip(*least, strict=True)]
    for table, own in zip(tables, least, strict=True):
        room = [most - total + first for total, first in zip(totals, own, strict=True)]
        kept = {
            row: cells
            for row, cells in table.rows.items()
            if cells[0] <= room[0] and cells[1] <= room[1]
        }
        yield table._replace(rows=kept)


class _Model:
    """The tables as a model of CP-SAT."""

    def __init__(self, best: Search, domains: Domains, tables: list[_Table]) -> None:
        from ortools.sat.python import cp_model

        self._best, self._domains, self._cp = best, domains, cp_model
        self._model = model = cp_model.CpModel()
        self._variables = {
            name: model.new_int_var(0, len(values) - 1, str(name))
            for name, values in domains.items()
        }
        self._unit = best.seconds / _PARTS
        self._total = model.new_int_var(0, _PARTS, "total")
        sums: tuple[list[Any], list[Any]] = ([], [])
        for table in tables:
            cells = {
                row: [floor(seconds / self._unit) for seconds in pair]
                for row, pair in table.rows.items()
            }
            for column, cost in zip(sums, self._costs(table.scope, cells), strict=True):
                column.append(cost)
        for column in sums:  # the longer of the two is the time
            model.add(self._total >= sum(column))
        for time in best.resident.times:
            model.add(sum(self._bytes(time)) <= best.space.hbm)
        model.minimize(self._total)
        for name, value in (best.assignment or {}).items():
            if value in domains[name]:
                model.add_hint(self._variables[name], domains[name].index(value))

    def _costs(self, scope: Scope, cells: Mapping[tuple[int, ...], list[int]]) -> list[Any]:
        """Return variables that are what the row costs which the values choose."""
        if not cells:
            self._model.add_bool_or([])
            return [0, 0]
        columns = list(zip(*cells.values(), strict=True))
        costs = [self._model.new_int_var(min(column), max(column), "") for column in columns]
        rows = [(*row, *cell) for row, cell in cells.items()]
        names = [self._variables[name] for name in scope]
        self._model.add_allowed_assignments([*names, *costs], rows)
        return costs

    def _bytes(self, time: Mapping[int, int]) -> Iterator[Any]:
        """Yield what arrays need that are alive together, by their variables."""
        by_scope: dict[Scope, list[int]] = {}
        for number in time:
            by_scope.setdefault(self._best.space.scope_of([number]), []).append(number)
        for scope, numbers in by_scope.items():
            cells = {
                row: [sum(self._best.resident.of(n, values) * time[n] for n in numbers)]
                for row, values in _assignments(self._domains, scope)
            }
            yield from self._costs(scope, cells)

    def search(self) -> float:
        """Offer the best assignment; return the bound."""
        best, solver = self._best, self._cp.CpSolver()
        left = best.seconds_left()
        if left != inf:
            solver.parameters.max_time_in_seconds = max(left, 0.01)
        status = solver.solve(self._model)
        if status == self._cp.INFEASIBLE:
            return best.seconds
        if status in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            values = {name: solver.value(variable) for name, variable in self._variables.items()}
            found = {name: self._domains[name][i] for name, i in values.items()}
            best.offer(found, best.terms.total(found).total)
        if status == self._cp.OPTIMAL:
            return best.seconds
        best.is_over = True  # the time is over, or the user has ended it
        return float(solver.best_objective_bound) * self._unit * (1 - _ROUNDED)
