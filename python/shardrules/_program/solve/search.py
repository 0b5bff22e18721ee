"""Searches the assignment of least time that fits: first ones, branch and bound, and CP-SAT.

First are layouts as experts write them, improved choice by choice. Branch and bound decides the
variables first that most terms share; what it leaves out is shown to cost more than the best, or to
need more memory. After some thousand nodes CP-SAT of OR-tools goes on, where it is installed: it
proves more, and sooner.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, count
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._program.solve.layout import STORED
from shardrules._program.solve.price import Seconds
from shardrules._program.solve.resident import Resident
from shardrules._program.solve.tables import Tables, has_solver
from shardrules._program.solve.terms import Terms

if TYPE_CHECKING:
    from shardrules._program.solve.layout import Assignment, Axes
    from shardrules._program.solve.price import Bounds
    from shardrules._program.solve.space import Space

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
