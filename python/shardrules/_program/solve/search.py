"""Searches the assignment of least time that fits, by branch and bound.

Variables that most terms share are decided first. What is left out is shown to cost more than the
best, or to need more memory. After some thousand nodes CP-SAT of OR-tools goes on, where it is
installed: it proves more, and sooner.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._program.solve.candidates import Candidates
from shardrules._program.solve.tables import has_solver, search_tables
from shardrules._program.solve.terms import Seconds

if TYPE_CHECKING:
    from shardrules._program.solve.layout import Axes
    from shardrules._program.solve.space import Assignment, Space
    from shardrules._program.solve.terms import Weighed

# Steps of few choices are solved in so many nodes, sooner than tables are made of their terms.
_FEW_NODES: Final = 2000


class _Node(NamedTuple):
    """Values of the first variables."""

    least: float
    """Lower bound of every completion."""
    number: int
    assignment: Assignment
    terms: dict[int, Weighed]
    sums: Weighed


class Search(Candidates):
    """One search in a space."""

    def __init__(self, space: Space, until: float = inf) -> None:
        super().__init__(space, until)
        degree = Counter(name for term in self.terms.terms for name in term.scope)
        self._order = sorted(
            space.values, key=lambda name: (-degree[name], -len(space.values[name]))
        )
        self._numbers = count()
        self._proved = 0.0
        self.heap = [] if self.is_over_memory({}) else [self._root()]

    @property
    def bound(self) -> float:
        """Seconds: no assignment takes less."""
        least = self.heap[0].least if self.heap else inf
        return min(self.seconds, max(least, self._proved))

    def begin(self) -> None:
        """Find an assignment that fits, if that is soon found: layouts as experts have them."""
        if self.heap and not self.is_worse(self.bound):
            self._until_over(self.find_first)

    def run(self) -> None:
        """Search all of the space, or until the time is over or the user interrupts."""
        self._until_over(self._run)

    def _run(self) -> None:
        self._branch(_FEW_NODES if has_solver() else inf)
        if self.heap and not self.is_worse(self.bound) and not self.is_over:
            self._proved = search_tables(self, self._domains())
            self._branch(inf)

    def _until_over(self, search: Callable[[], None]) -> None:
        try:
            search()
        except KeyboardInterrupt:
            self.is_over = True

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

    # Bounds.

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


def _sum_of(rows: Iterable[Weighed]) -> Weighed:
    return tuple(map(sum, zip(Seconds().weighed, *rows, strict=True)))
