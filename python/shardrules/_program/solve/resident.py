"""The memory that a step is predicted to need: what is alive together at several times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardrules._program.solve.price import is_apart

if TYPE_CHECKING:
    from shardrules._program.solve.layout import Axes
    from shardrules._program.solve.space import Space
    from shardrules._program.step.equations import Body, Equations
    from shardrules._program.step.step import Step


class Resident:
    """Arrays that are alive together, at several times, as terms of few variables each.

    Arguments are alive throughout, and results at the end, but for those in donated memory. When
    most is alive is decided once, by whole sizes. What is gathered, and what XLA adds, is left out:
    the compiler says what a layout needs.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self.groups: list[tuple[tuple[int, ...], Counter[int]]] = []
        """Variables, and the arrays of one time that depend on them, with how many are alike."""
        self.times: list[list[int]] = []
        """Numbers of the groups that are alive together."""
        for time in _times(space.step):
            groups: dict[tuple[int, ...], Counter[int]] = {}
            for number, count in self._alike(time).items():
                groups.setdefault(space.scope_of([number]), Counter())[number] = count
            self.times.append(list(range(len(self.groups), len(self.groups) + len(groups))))
            self.groups += groups.items()
        self._least: dict[tuple[Any, ...], int] = {}

    def _alike(self, numbers: Iterable[int]) -> Counter[int]:
        """Return {an array: how many there are that have its dtype, shape and layout}."""
        values, arrays = self._space.step._equations.values, self._space.arrays
        first: dict[Any, int] = {}
        counts: Counter[int] = Counter()
        for number in numbers:
            key = (*values[number][:2], arrays.first[number], arrays.fixed.get(number))
            counts[first.setdefault(key, number)] += 1
        return counts

    def least(self, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes that a device needs at least if some variables have these values."""
        return max(sum(self.of(group, assignment) for group in time) for time in self.times)

    def of(self, group: int, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes that a group needs at least."""
        scope, numbers = self.groups[group]
        key = (group, *[assignment.get(name) for name in scope])
        if key not in self._least:
            rows = numbers.items()
            self._least[key] = sum(self._array(n, scope, assignment) * count for n, count in rows)
        return self._least[key]

    def largest(self, assignment: Mapping[int, Axes]) -> list[tuple[int, int]]:
        """List (bytes, array) of what is alive when most is, the largest first; alike ones once."""
        most = max(self.times, key=lambda time: sum(self.of(group, assignment) for group in time))
        rows = [
            (*row, self.groups[group][0]) for group in most for row in self.groups[group][1].items()
        ]
        return sorted(
            ((self._array(n, scope, assignment) * count, n) for n, count, scope in rows),
            reverse=True,
        )

    def _array(self, number: int, scope: tuple[int, ...], assignment: Mapping[int, Axes]) -> int:
        """Return the bytes that an array needs at least."""
        arrays, values = self._space.arrays, self._space.values
        if all(name in assignment for name in scope):
            return arrays.bytes(number, arrays.cuts(number, assignment))
        rows = [[assignment[name]] if name in assignment else values[name] for name in scope]
        axes = {axis for row in rows for value in row for axis in value}
        return arrays.equations.values[number].bits // 8 // arrays.count(tuple(axes))


def _times(step: Step) -> Iterator[list[int]]:
    """Yield the arrays that are alive together: at the end, and when they are most."""
    equations = step._equations
    body, values = equations.body, equations.values
    arguments = [*body.inputs, *(n for n in equations.constants if n in equations.users)]
    free = Counter(values[n][:2] for n in step._donated)
    results = []
    for number in dict.fromkeys(n for n in body.outputs if n is not None and n not in arguments):
        free[values[number][:2]] -= 1
        if free[values[number][:2]] < 0:
            results.append(number)
    yield [*arguments, *results]
    for alive in _alive(equations, body):
        yield [*arguments, *alive]


def _alive(equations: Equations, body: Body, around: Iterable[int] = ()) -> Iterator[set[int]]:
    """Yield what is alive when it is most, in a body and in each of its loops and branches.

    Arrays that XLA computes where they are read keep alive what they are computed from, unless that
    is twice as large.
    """
    bits = {n: equations.values[n].bits for op in body.operations for n in op.outputs}
    held: dict[int | None, set[int]] = {}
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for time, operation in enumerate(body.operations):
        read = {root for number in operation.inputs for root in held.get(number, ())}
        is_own = bool(operation.bodies) or is_apart(operation)
        for number in operation.outputs:
            is_less = len(read) > 1 and 2 * bits[number] <= sum(bits[root] for root in read)
            if is_own or is_less:
                made[number], held[number] = time, {number}
            else:
                held[number] = read
            if is_own or is_less or number in body.outputs:
                last |= dict.fromkeys({*read, *held[number]}, time)
    total = [0] * (len(body.operations) + 1)
    for root, begin in made.items():
        for time in range(begin, last[root] + 1):
            total[time] += bits[root]
    most = max(range(len(total)), key=total.__getitem__)
    for time in {most, *(i for i, op in enumerate(body.operations) if op.bodies)}:
        alive = {*around, *(root for root in made if made[root] <= time <= last[root])}
        yield alive
        for inner in body.operations[time].bodies if time < len(body.operations) else ():
            yield from _alive(equations, inner, alive)
