"""Searches the assignment of least time that fits, by branch and bound.

Variables that most terms share are decided first. Without them the others fall into parts of which
no term has variables of two: what each of a part's assignments costs is known then, and the parts
are combined. What is left out is shown to cost more than the best, or to need more memory.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, product
from math import inf, prod
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._solve.resident import Resident
from shardrules._solve.terms import Seconds, Terms

if TYPE_CHECKING:
    from shardrules._solve.layout import Axes
    from shardrules._solve.space import Assignment, Cost, Space
    from shardrules._solve.terms import Weighed

# A part has at most so many assignments.
_MOST_OF_PART: Final = 8
# Seconds that differ by less than this part are equal.
_ROUNDING: Final = 1e-9


class Best(NamedTuple):
    """The best assignment, and how good any can be."""

    assignment: Assignment
    cost: Cost
    bound: float
    """Seconds; no assignment takes less."""


class _Entry(NamedTuple):
    """An assignment of a part, and what its terms cost."""

    weighed: Weighed
    seconds: Seconds
    values: Assignment


class _Node(NamedTuple):
    """Values of the first variables."""

    least: float
    """Seconds of all assignments with them."""
    number: int
    assignment: Assignment
    terms: dict[int, Weighed]
    sums: Weighed


class Search:
    """One search in a space.

    Args:
        space: What can be chosen.
        least_known: Seconds of a solution in another space; those that take more are of no use.
        until: The time at which it ends, as `monotonic` has it.
    """

    def __init__(self, space: Space, least_known: float = inf, until: float = inf) -> None:
        self.space, self._until = space, until
        self.terms, self.resident = Terms(space), Resident(space)
        self.seconds = least_known
        """Of the best assignment."""
        self.assignment: Assignment | None = None
        self.bound = 0.0
        self.refused: Counter[str] = Counter()
        self._fits: dict[tuple[Axes, ...], bool] = {}
        self._order, self._parts = self._structure()
        self._of_part = self._terms_of_parts()
        self._numbers = count()
        self._of: dict[int, list[int]] = {name: [] for name in space.values}
        for place in self.terms.largest:
            for name in self.terms.terms[place].scope:
                self._of[name].append(place)

    # Parts.

    def _structure(self) -> tuple[list[int], list[list[int]]]:
        """Return the variables that are decided first, and the parts that are left."""
        values = self.space.values
        scopes = [set(term.scope) for term in self.terms.terms]
        degree = Counter(name for scope in scopes for name in scope)
        order: list[int] = []
        while True:
            parts = _connected([n for n in values if n not in order], scopes, set(order))
            large = [p for p in parts if prod(len(values[n]) for n in p) > _MOST_OF_PART]
            if not large:
                return order, parts
            order += [max(part, key=lambda n: (degree[n], len(values[n]))) for part in large]

    def _terms_of_parts(self) -> list[list[int]]:
        """Return the terms of each part, and those of none as the last."""
        of = {name: i for i, part in enumerate(self._parts) for name in part}
        rows: list[list[int]] = [[] for _ in range(len(self._parts) + 1)]
        for place, term in enumerate(self.terms.terms):
            rows[next((of[name] for name in term.scope if name in of), -1)].append(place)
        return rows

    # Bounds.

    def _tightened(self, node: _Node, name: int, value: Axes) -> _Node | None:
        """Return the node in which a variable has a value; None if it is shown to be worse."""
        assignment = {**node.assignment, name: value}
        if self._is_over(assignment):
            return None
        terms, sums = dict(node.terms), node.sums
        for place in self._of[name]:
            least = self.terms.least(place, assignment)
            sums = tuple(a - b + c for a, b, c in zip(sums, terms[place], least, strict=True))
            terms[place] = least
            if self._is_worse(max(sums)):
                return None
        return _Node(max(sums), next(self._numbers), assignment, terms, sums)

    def _root(self) -> _Node:
        terms = {place: self.terms.least(place, {}) for place in range(len(self.terms.terms))}
        sums = tuple(map(sum, zip(*terms.values(), strict=True)))
        return _Node(max(sums), next(self._numbers), {}, terms, sums)

    def _is_worse(self, seconds: float) -> bool:
        return seconds >= self.seconds * (1 - _ROUNDING)

    def _is_over(self, assignment: Mapping[int, Axes]) -> bool:
        hbm = self.space.hbm
        return hbm is not None and self.resident.least(assignment) > hbm

    def fits(self, assignment: Assignment) -> bool:
        """Say whether the step fits by its own estimate."""
        if self.space.hbm is None:
            return True
        if self._is_over(assignment):
            return False
        key = tuple(assignment[name] for name in self.space.values)
        if key not in self._fits:
            self._fits[key] = self.space.peak(assignment) <= self.space.hbm
        return self._fits[key]

    def offer(self, assignment: Assignment, seconds: float) -> None:
        """Keep an assignment if it is better than the best, and fits."""
        if not self._is_worse(seconds) and self.fits(assignment):
            self.seconds, self.assignment = seconds, dict(assignment)

    # Search.

    def run(self) -> None:
        """Search all of the space, or until the time is over or the user interrupts."""
        heap = [self._root()]
        self.bound = heap[0].least
        try:
            while heap and not self._is_worse(heap[0].least):
                node = heap[0]
                self.bound = node.least
                if monotonic() > self._until:
                    return
                children: list[_Node] = []
                if len(node.assignment) == len(self._order):
                    self._combine(node)
                else:
                    name = self._order[len(node.assignment)]
                    nodes = (self._tightened(node, name, v) for v in self.space.values[name])
                    children += filter(None, nodes)
                heapq.heappop(heap)  # now, so that an interrupt leaves it in the bound
                for child in children:
                    heapq.heappush(heap, child)
        except KeyboardInterrupt:
            return
        self.bound = self.seconds

    def _combine(self, node: _Node) -> None:
        """Try all assignments of the parts, each with those of all others."""
        assignment = node.assignment
        base = Seconds()
        for place in self._of_part[-1]:
            base = base.plus(self.terms.seconds(place, assignment))
        least = [self._least_of(places, assignment) for places in self._of_part[:-1]]
        entries: list[list[_Entry]] = []
        for i, part in enumerate(self._parts):
            rows = list(self._entries(part, self._of_part[i], assignment))
            if not rows:
                return
            least[i] = _least_of_all(row.weighed for row in rows)
            entries.append(sorted(rows, key=lambda row: max(row.weighed)))
            if self._is_worse(max(map(sum, zip(base.weighed, *least, strict=True)))):
                return
        after: list[Weighed] = [(0.0,) * len(base.weighed)]
        for row in reversed(least):
            after.append(tuple(a + b for a, b in zip(after[-1], row, strict=True)))
        self._join(assignment, base, entries, after[::-1])

    def _join(
        self,
        assignment: Assignment,
        seconds: Seconds,
        entries: list[list[_Entry]],
        after: list[Weighed],
    ) -> None:
        if not entries:
            self.offer(assignment, seconds.total)
            return
        for entry in entries[0]:
            sums = seconds.plus(entry.seconds)
            least = max(a + b for a, b in zip(sums.weighed, after[1], strict=True))
            if not self._is_worse(least):
                joined = {**assignment, **entry.values}
                if not self._is_over(joined):
                    self._join(joined, sums, entries[1:], after[1:])

    def _least_of(self, places: Iterable[int], assignment: Assignment) -> Weighed:
        rows = [self.terms.least(place, assignment) for place in places]
        return tuple(map(sum, zip(Seconds().weighed, *rows, strict=True)))

    def _entries(
        self, part: list[int], places: list[int], assignment: Assignment
    ) -> Iterator[_Entry]:
        """Yield the assignments of a part that fit, each with what its terms cost."""
        for row in product(*(self.space.values[name] for name in part)):
            values = dict(zip(part, row, strict=True))
            whole = {**assignment, **values}
            if not self._is_over(whole):
                seconds = Seconds()
                for place in places:
                    seconds = seconds.plus(self.terms.seconds(place, whole))
                yield _Entry(seconds.weighed, seconds, values)

    # A first solution.

    def descend(self, start: Assignment) -> None:
        """Improve an assignment variable by variable until none gets better."""
        space, terms = self.space, self.terms
        now = dict(start)
        seconds = terms.total(now)
        over = self._over(now)
        is_better = True
        while is_better:
            is_better = False
            for name, values in space.values.items():
                for value in values:
                    other = {**now, name: value}
                    after, excess = seconds, self._over(other)
                    if excess > over:
                        continue
                    for place in self._of[name]:
                        after = after.less(terms.seconds(place, now))
                        after = after.plus(terms.seconds(place, other))
                    if (excess, after.total) < (over, seconds.total * (1 - _ROUNDING)):
                        now, seconds, over, is_better = other, after, excess, True
        self.offer(now, terms.total(now).total)

    def _over(self, assignment: Assignment) -> int:
        hbm = self.space.hbm
        return 0 if hbm is None else max(0, self.resident.least(assignment) - hbm)


def _least_of_all(rows: Iterable[Weighed]) -> Weighed:
    return tuple(map(min, zip(*rows, strict=True)))


def _connected(names: list[int], scopes: list[set[int]], decided: set[int]) -> list[list[int]]:
    """Return the parts into which variables fall: none has a term with a variable of another."""
    first = {name: name for name in names}

    def root(name: int) -> int:
        while first[name] != name:
            name = first[name]
        return name

    for scope in scopes:
        free = sorted(scope - decided)
        for name in free[1:]:
            first[root(name)] = root(free[0])
    parts: dict[int, list[int]] = {}
    for name in names:
        parts.setdefault(root(name), []).append(name)
    return list(parts.values())


def search(space: Space, *, least_known: float = inf, until: float = inf) -> Best | None:
    """Find the best assignment; None if none fits, or is better than the least known."""
    found = Search(space, least_known, until)
    for start in starts(space):
        found.descend(start)
    found.run()
    if found.assignment is None:
        return None
    return Best(found.assignment, space.cost(found.assignment), found.bound)


def starts(space: Space) -> Iterator[Assignment]:
    """Yield assignments from which to improve: whole, and each set of axes on data or weights."""
    roles = space.step._roles
    for axes in space.values[-1] if -1 in space.values else [()]:
        rest = tuple(axis for axis in space.sizes if axis not in axes)
        yield {
            name: next(
                (
                    wish
                    for wish in (
                        (axes if name not in roles.of_weights else rest),
                        (),
                    )
                    if wish in values
                ),
                values[0],
            )
            if name != -1
            else tuple(space.sizes)
            for name, values in space.values.items()
        }
