"""First solutions of a space: layouts as experts write them, improved choice by choice."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

from shardrules._program.solve.resident import Resident
from shardrules._program.solve.space import STORED
from shardrules._program.solve.terms import Terms

if TYPE_CHECKING:
    from shardrules._program.solve.layout import Axes
    from shardrules._program.solve.space import Assignment, Space

# Seconds that differ by less than this part are equal.
ROUNDING: Final = 1e-9
# So many of the first assignments are improved.
_DESCENTS: Final = 3
# Memory by which a simpler assignment may need more.
_LITTLE: Final = 1e-3


class Candidates:
    """The best assignment that is known of a space, and how first ones are found."""

    def __init__(self, space: Space, until: float = inf) -> None:
        self.space, self._until = space, until
        self.terms, self.resident = Terms(space), Resident(space)
        self.seconds = inf
        """Of the best assignment, or of a better one in another space."""
        self.assignment: Assignment | None = None
        self.is_over = False
        """Whether the user, or the time, has ended the search."""
        self.tried: list[Assignment] = []
        """First assignments, and what they became by changes of single choices."""
        self._of: dict[int, list[int]] = {name: [] for name in space.values}
        for place in self.terms.largest:
            for name in self.terms.terms[place].scope:
                self._of[name].append(place)

    def is_worse(self, seconds: float) -> bool:
        """Say whether something of so many seconds is no better than the best."""
        return seconds >= self.seconds * (1 - ROUNDING)

    def seconds_left(self) -> float:
        """Return the seconds after which the search is to end."""
        return self._until - monotonic()

    def is_late(self) -> bool:
        """Say whether the search is to end."""
        self.is_over |= self.seconds_left() < 0
        return self.is_over

    def is_over_memory(self, assignment: Mapping[int, Axes]) -> bool:
        """Say whether it does not fit if variables have these values, whatever others have."""
        return self._over(assignment) > 0

    def offer(self, assignment: Assignment, seconds: float) -> None:
        """Keep an assignment if it is better than the best, and fits."""
        if not self.is_worse(seconds) and not self.is_over_memory(assignment):
            self.seconds, self.assignment = seconds, dict(assignment)

    def find_first(self) -> None:
        """Improve the best of the layouts that experts write; if nothing fits, what needs least."""
        rows: list[tuple[int, float, int, Assignment]] = []
        for start in self._starts():
            rows.append((self._over(start), self.terms.total(start).total, len(rows), start))
            self.tried.append(start)
            self.offer(start, rows[-1][1])
            if self.is_late():
                return
        rows.sort(key=lambda row: row[:3])
        ends = [self._descend(start) for *_, start in rows[:_DESCENTS]]
        self.tried += ends
        if self.assignment is None and not self.is_over:
            _, least = self.least_memory()
            self.offer(least, self.terms.total(least).total)
            if self.assignment is not None:
                self._approach(ends[0])

    def _starts(self) -> list[Assignment]:
        """Return layouts as experts have them, FSDP among them, and that of the program."""
        axes = (None, *self.space.sizes)
        rows = [self._start(i, j) for i in axes for j in axes if i is None or i != j]
        rows.append(self.space.traced())
        return list({tuple(row.values()): row for row in rows}.values())

    def fsdp(self) -> Assignment:
        """Return the layout in which all axes cut the batch, and store weights in parts."""
        return self._start()

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
        for name in self.space.values:
            role = roles.of.get(name, "")
            wish = wishes.get(role, of_weights if name in roles.of_weights else [])
            now[name] = self.space.largest(name, sizes if name == STORED else wish)
        cut = {axis for n in now if roles.of.get(n) == "batch" for axis in now[n]}
        for name in (name for name in now if roles.of.get(name) == "sequence"):
            rest = [axis for axis in sizes if axis not in cut]
            now[name] = self.space.largest(name, rest)
        return now

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
                if self.is_late():
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
            if self.is_late():
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
            and not self.is_over_memory(other)
        ):
            self.assignment = other

    def _over(self, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes by which what is resident does not fit."""
        return max(0, self.resident.least(assignment) - self.space.hbm)
