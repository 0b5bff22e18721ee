"""Searches the assignment of least time that fits, by branch and bound.

Variables that most terms share are decided first. Without them the others fall into parts of which
no term has variables of two: what each of a part's assignments costs is known then, and the parts
are combined. What is left out is shown to cost more than the best, or to need more memory.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import combinations, count, product
from math import inf, prod
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._program.solve.resident import Resident
from shardrules._program.solve.space import STORED
from shardrules._program.solve.terms import Seconds, Terms, connected

if TYPE_CHECKING:
    from shardrules._program.solve.cuts import Cuts
    from shardrules._program.solve.layout import Axes
    from shardrules._program.solve.space import Assignment, Space
    from shardrules._program.solve.terms import Weighed

# A part has at most so many assignments.
_MOST_OF_PART: Final = 16
# Seconds that differ by less than this part are equal.
ROUNDING: Final = 1e-9
# So many of the first assignments are improved.
_DESCENTS: Final = 3
# Memory by which a simpler assignment may need more.
_LITTLE: Final = 1e-3


class _LateError(Exception):
    """The time is over amid the assignments of a node."""


class _Entry(NamedTuple):
    """An assignment of a part, and what its terms cost."""

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
    """One search in a space."""

    def __init__(self, space: Space, until: float = inf) -> None:
        self.space, self._until = space, until
        self.terms, self.resident = Terms(space), Resident(space)
        self.seconds = inf
        """Of the best assignment, or of a better one in another space."""
        self.assignment: Assignment | None = None
        self.is_over = False
        """Whether the user, or the time, has ended it."""
        self._fits: dict[tuple[Cuts, ...], bool] = {}
        numbers = range(len(space.arrays.classes))
        self._arrays = space.arrays.unlike(n for n in numbers if n not in space.fixed)
        self._order, self._parts = self._structure()
        self._of_part = self._terms_of_parts()
        self._numbers = count()
        self._of: dict[int, list[int]] = {name: [] for name in space.values}
        for place in self.terms.largest:
            for name in self.terms.terms[place].scope:
                self._of[name].append(place)
        self.heap = [] if self.is_over_memory({}) else [self._root()]

    # Parts.

    def _structure(self) -> tuple[list[int], list[list[int]]]:
        """Return the variables that are decided first, and the parts that are left."""
        values = self.space.values
        scopes = [set(term.scope) for term in self.terms.terms]
        degree = Counter(name for scope in scopes for name in scope)
        order: list[int] = []
        while True:
            free = [name for name in values if name not in order]
            parts = connected(free, [sorted(scope.difference(order)) for scope in scopes])
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
        if self.is_over_memory(assignment):
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
        sums = _sum_of(terms.values())
        return _Node(max(sums), next(self._numbers), {}, terms, sums)

    def _is_worse(self, seconds: float) -> bool:
        return seconds >= self.seconds * (1 - ROUNDING)

    def is_over_memory(self, assignment: Mapping[int, Axes]) -> bool:
        """Say whether what is resident alone does not fit if variables have these values."""
        return self._over(assignment) > 0

    def fits(self, assignment: Assignment) -> bool:
        """Say whether the step fits by its own estimate."""
        if self.is_over_memory(assignment):
            return False
        layout = self.space.layout(assignment)
        key = tuple(self.space.arrays.cuts(number, layout) for number in self._arrays)
        if key not in self._fits:
            self._fits[key] = self.space.peak(assignment) <= self.space.hbm
        return self._fits[key]

    def offer(self, assignment: Assignment, seconds: float) -> None:
        """Keep an assignment if it is better than the best, and fits."""
        if not self._is_worse(seconds) and self.fits(assignment):
            self.seconds, self.assignment = seconds, dict(assignment)

    # Search.

    def begin(self) -> None:
        """Find an assignment that fits, if that is soon found: layouts as experts have them."""
        self._until_over(self._descend_all)

    def run(self) -> None:
        """Search all of the space, or until the time is over or the user interrupts."""
        self._until_over(self._branch)

    def _until_over(self, search: Callable[[], None]) -> None:
        try:
            search()
        except (KeyboardInterrupt, _LateError):
            self.is_over = True

    def _branch(self) -> None:
        while self.heap and not self._is_worse(self.heap[0].least):
            if self._is_late():
                return
            children = self._children(self.heap[0])
            heapq.heappop(self.heap)  # not before: what ends the search leaves it in the bound
            for child in children:
                heapq.heappush(self.heap, child)

    def _is_late(self) -> bool:
        self.is_over |= monotonic() > self._until
        return self.is_over

    @property
    def bound(self) -> float:
        """Seconds: no assignment takes less."""
        return min(self.seconds, self.heap[0].least) if self.heap else self.seconds

    def _children(self, node: _Node) -> list[_Node]:
        """Return the nodes of the next variable's values; if there is none, try what is left."""
        if len(node.assignment) == len(self._order):
            self._combine(node)
            return []
        name = self._order[len(node.assignment)]
        nodes = (self._tightened(node, name, value) for value in self.space.values[name])
        return [child for child in nodes if child is not None]

    def _combine(self, node: _Node) -> None:
        """Try all assignments of the parts, each with those of all others."""
        assignment = node.assignment
        base = self.terms.total(assignment, self._of_part[-1])
        least = [
            _sum_of(self.terms.least(place, assignment) for place in places)
            for places in self._of_part[:-1]
        ]
        entries: list[list[_Entry]] = []
        for i, part in enumerate(self._parts):
            rows = list(self._entries(part, self._of_part[i], assignment))
            if not rows:
                return
            least[i] = tuple(map(min, zip(*(row.seconds.weighed for row in rows), strict=True)))
            entries.append(sorted(rows, key=lambda row: max(row.seconds.weighed)))
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
            if self._is_late():
                raise _LateError
            sums = seconds.plus(entry.seconds)
            least = max(a + b for a, b in zip(sums.weighed, after[1], strict=True))
            if not self._is_worse(least):
                joined = {**assignment, **entry.values}
                if not self.is_over_memory(joined):
                    self._join(joined, sums, entries[1:], after[1:])

    def _entries(
        self, part: list[int], places: list[int], assignment: Assignment
    ) -> Iterator[_Entry]:
        """Yield the assignments of a part that fit, each with what its terms cost."""
        for row in product(*(self.space.values[name] for name in part)):
            if self._is_late():
                raise _LateError
            values = dict(zip(part, row, strict=True))
            whole = {**assignment, **values}
            if not self.is_over_memory(whole):
                yield _Entry(self.terms.total(whole, places), values)

    # A first solution.

    def _descend_all(self) -> None:
        """Improve the best of the layouts that experts write; if nothing fits, what needs least."""
        if not self.heap or self._is_worse(self.bound):
            return
        rows: list[tuple[int, float, int, Assignment]] = []
        for start in self._starts():
            rows.append((self._over(start), self.terms.total(start).total, len(rows), start))
            self.offer(start, rows[-1][1])
            if self._is_late():
                return
        rows.sort(key=lambda row: row[:3])
        ends = [self._descend(start) for *_, start in rows[:_DESCENTS]]
        if self.assignment is None and not self.is_over:
            _, least = self.least_memory()
            self.offer(least, self.terms.total(least).total)
            if self.assignment is not None:
                self._approach(ends[0])

    def _starts(self) -> list[Assignment]:
        """Return layouts as experts have them: FSDP, with axes for weights and for experts."""
        axes = (None, *self.space.sizes)
        rows = [self._start(i, j) for i in axes for j in axes if i is None or i != j]
        return list({tuple(row.values()): row for row in rows}.values())

    def _start(self, tensor: str | None = None, expert: str | None = None) -> Assignment:
        """Return the layout with an axis on weights, one on experts, and all others on the batch.

        The axis of experts is that of the batch as well, outside of experts; all cut storage.
        Sequences have the axis of weights, and what does not divide the batch.
        """
        sizes, roles = self.space.sizes, self.space.step._roles
        data = [axis for axis in sizes if axis != tensor]
        of_weights = [tensor] if tensor else []
        wishes: dict[str, list[str]] = {
            "batch": data,
            "experts": [expert] if expert else [],
            "model width": [],
        }
        now: Assignment = {}
        for name, values in self.space.values.items():
            role = roles.of.get(name, "")
            wish = wishes.get(role, of_weights if name in roles.of_weights else [])
            now[name] = self._largest(values, sizes if name == STORED else wish)
        cut = {axis for n in now if roles.of.get(n) == "batch" for axis in now[n]}
        for name in (name for name in now if roles.of.get(name) == "sequence"):
            rest = [axis for axis in sizes if axis not in cut]
            now[name] = self._largest(self.space.values[name], rest)
        return now

    def _largest(self, values: Iterable[Axes], wish: Collection[str]) -> Axes:
        """Return the value of most devices among those of axes that are wished."""
        sizes = self.space.sizes
        fitting = (value for value in values if set(value) <= set(wish))
        return max(fitting, key=lambda value: prod(sizes[axis] for axis in value), default=())

    def _descend(self, start: Assignment) -> Assignment:
        """Improve an assignment variable by variable until none gets better."""
        space, terms = self.space, self.terms
        now = dict(start)
        seconds = terms.total(now)
        over = self._over(now)
        is_better = True
        while is_better:
            is_better = False
            for name, values in space.values.items():
                if self._is_late():
                    is_better = False
                    break
                for value in values:
                    other = {**now, name: value}
                    after, excess = seconds, self._over(other)
                    if excess > over:
                        continue
                    for place in self._of[name]:
                        after = after.less(terms.seconds(place, now))
                        after = after.plus(terms.seconds(place, other))
                    if (excess, after.total) < (over, seconds.total * (1 - ROUNDING)):
                        now, seconds, over, is_better = other, after, excess, True
        self.offer(now, terms.total(now).total)
        return now

    def _approach(self, goal: Assignment) -> None:
        """Give the best assignment the values of one that does not fit, as long as it fits."""
        for name, value in goal.items():
            assert self.assignment is not None
            if self._is_late():
                return
            other = {**self.assignment, name: value}
            self.offer(other, self.terms.total(other).total)

    def least_memory(self) -> tuple[int, Assignment]:
        """Return the least resident memory to which variables, each by itself, lead."""
        rows = []
        for now in self._starts():
            for name, values in self.space.values.items():
                now[name] = min(values, key=lambda v: self.resident.least({**now, name: v}))
            rows.append((self.resident.least(now), now))
        return min(rows, key=lambda row: row[0])

    def simplify(self) -> None:
        """Leave out axes without which the best assignment is as good; the first are on data."""
        assert self.assignment is not None
        for name, values in self.space.values.items():
            for value in values:
                if name == STORED or len(value) >= len(self.assignment[name]):
                    break
                self._take({**self.assignment, name: value})
        sizes, roles = self.space.sizes, self.space.step._roles.of
        order = list(sizes)
        data = [name for name in self.space.values if roles.get(name) == "batch"]
        for pair in combinations(sizes, 2):
            if sizes[pair[0]] == sizes[pair[1]]:
                other_of = {pair[0]: pair[1], pair[1]: pair[0]}
                other = {
                    name: tuple(sorted((other_of.get(a, a) for a in axes), key=order.index))
                    for name, axes in self.assignment.items()
                }
                first, now = (
                    [[order.index(a) for a in row[name]] for name in (*data, STORED) if name in row]
                    for row in (other, self.assignment)
                )
                if first < now and all(other[n] in v for n, v in self.space.values.items()):
                    self._take(other)

    def _take(self, other: Assignment) -> None:
        """Have another assignment as the best if it is as good."""
        assert self.assignment is not None
        least = self.resident.least
        if (
            self.terms.total(other).total <= self.seconds * (1 + ROUNDING)
            and least(other) <= least(self.assignment) * (1 + _LITTLE)
            and self.fits(other)
        ):
            self.assignment = other

    def _over(self, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes by which what is resident does not fit."""
        return max(0, self.resident.least(assignment) - self.space.hbm)


def _sum_of(rows: Iterable[Weighed]) -> Weighed:
    return tuple(map(sum, zip(Seconds().weighed, *rows, strict=True)))
