"""A lower bound of the memory that a step needs: arguments, and what the backward pass reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardrules._program.solve.layout import Axes
    from shardrules._program.solve.space import Space


class Resident:
    """Arrays that are alive together, at several times, as terms of few variables each.

    Arguments are alive throughout, as `peak.py` has it, and what a loop stacks until another loop
    has read it.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        arguments = space.step._equations.body.inputs
        self.times = [self._alike(arguments)]
        for stacked in _stacked_until_read(space):
            self.times.append(self._alike([*arguments, *stacked]))
        self._least: dict[tuple[Any, ...], int] = {}
        self._scopes = {n: space.scope_of([n]) for time in self.times for n in time}

    def _alike(self, numbers: Iterable[int]) -> Counter[int]:
        """Return {an array: how many there are that have its dtype, shape and layout}."""
        values, arrays = self._space.step._equations.values, self._space.arrays
        first: dict[Any, int] = {}
        counts: Counter[int] = Counter()
        for number in numbers:
            value = values[number]
            fixed = self._space.fixed.get(number)
            kind = (value.shape, str(value.dtype), arrays.classes[number], fixed)
            key = (*kind, arrays.is_weight(number), number in arrays.local)
            counts[first.setdefault(key, number)] += 1
        return counts

    def least(self, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes that a device needs at least if some variables have these values."""
        return max(
            sum(self.of(number, assignment) * count for number, count in time.items())
            for time in self.times
        )

    def of(self, number: int, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes that an array needs at least."""
        scope = self._scopes[number]
        key = (number, *[assignment.get(name) for name in scope])
        if key not in self._least:
            value = self._space.step._equations.values[number]
            size = value.bits
            sizes = self._space.sizes
            if all(name in assignment for name in scope):
                cuts = self._space.arrays.cuts(number, self._space.layout(assignment))
                shard = prod(
                    -(-n // prod(sizes[axis] for axis in axes))
                    for n, axes in zip(value.shape, cuts, strict=True)
                )
                self._least[key] = shard * size // max(1, prod(value.shape)) // 8
            else:
                values = self._space.values
                axes = {
                    axis
                    for name in scope
                    for row in ([assignment[name]] if name in assignment else values[name])
                    for axis in row
                }
                self._least[key] = size // 8 // prod(sizes[axis] for axis in axes)
        return self._least[key]


def _stacked_until_read(space: Space) -> Iterator[list[int]]:
    """Yield for each loop of the step what earlier loops have stacked and it reads, or later ones.

    Weights and their gradients are left out: they may be results, which take the memory of
    arguments.
    """
    operations = space.step._equations.body.operations
    last: dict[int, int] = {}
    for time, operation in enumerate(operations):
        if operation.name == "scan":
            last.update(dict.fromkeys((n for n in operation.inputs if n is not None), time))
    stacks: dict[int, int] = {}
    for time, operation in enumerate(operations):
        if operation.name == "scan":
            alive = [n for n in stacks if last.get(n, -1) >= time]
            if alive:
                yield alive
            for number in operation.outputs[operation.carries :]:
                if not space.arrays.is_weight(number):
                    stacks[number] = time
