"""The time of a step as a sum of terms, each of few variables.

Operations start from arrays in their layout and leave them so, and so what one costs depends on the
classes of its own arrays alone. Operations are taken together where one adds what others have not
added up, and those that read an array share what is sent of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from shardrules._program.solve.spread import Seconds, Spread, is_apart

if TYPE_CHECKING:
    from shardrules._program.solve.layout import Axes
    from shardrules._program.solve.space import Space
    from shardrules._program.solve.spread import Need
    from shardrules._program.step.equations import Body, Equations, TracedOperation
    from shardrules._program.step.step import Step

_Group = list[tuple["TracedOperation", int]]


class Term(NamedTuple):
    """A part of the time of a step, and the variables on which it depends."""

    scope: tuple[int, ...]
    operations: tuple[tuple[TracedOperation, int], ...]
    """With how often each runs; () if it is of what is sent of an array that several read."""
    arrays: tuple[int, ...]
    """On whose cuts it depends: those that operations read and make; or the one that is sent."""
    readers: tuple[int, ...] = ()
    """Places of the terms that read the array."""


class Terms:
    """The terms of a step in a space, each evaluated when it is first asked for."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._probe = Spread(space.arrays, {})
        self._running = {id(operation) for operation, _ in space.step._equations.operations()}
        self._evaluated: dict[tuple[Any, ...], tuple[Seconds, dict[int, list[Need]]]] = {}
        groups = [
            group
            for group in _groups(self._probe, space.step._equations)
            if len(group) > 1 or not self._is_free(group[0][0])
        ]
        self.terms: list[Term] = []
        readers: dict[int, list[int]] = {}
        for place, group in enumerate(groups):
            numbers = dict.fromkeys(n for operation, _ in group for n in _numbers(operation))
            chosen = (n for n in numbers if n not in space.arrays.fixed)
            arrays = tuple(space.arrays.unlike(chosen))
            self.terms.append(Term(space.scope_of(numbers), tuple(group), arrays))
            made = {number for operation, _ in group for number in operation.outputs}
            read = {n for operation, _ in group for n in operation.inputs if n is not None}
            for number in read - made:
                readers.setdefault(number, []).append(place)
        self._shared = {number for number, places in readers.items() if len(places) > 1}
        for number in sorted(self._shared):
            names = {name for place in readers[number] for name in self.terms[place].scope}
            scope = tuple(name for name in space.values if name in names)
            self.terms.append(Term(scope, (), (number,), tuple(readers[number])))

    def _is_free(self, operation: TracedOperation) -> bool:
        """Say whether an operation costs nothing in any layout, as its arrays are cut alike."""
        arrays, rule = self.space.arrays, operation.rule
        if operation.name == "scan":  # whose dimension of loops is whole
            (body,) = operation.bodies
            return all(
                (arrays.classes[outer][is_slice:], arrays.is_weight(outer))
                == (arrays.classes[inner], arrays.is_weight(inner))
                for outer, inner, is_slice in operation.arguments(body) + operation.results(body)
                if outer is not None and inner is not None and outer != inner
            )
        if rule is None or rule.summed or is_apart(operation):
            return False
        alike = {arrays.first[n] for n in _numbers(operation) if any(arrays.classes[n])}
        is_turned = operation.name == "transpose"  # of a square array: the axes stay in their place
        is_alike = len(alike) < 2 and not rule.whole and not rule.minor and not is_turned
        return rule.is_identity or is_alike

    def seconds(self, place: int, assignment: Mapping[int, Axes]) -> Seconds:
        """Return the seconds of a term if its variables have these values."""
        term = self.terms[place]
        if term.operations:
            return self._evaluate(place, assignment)[0]
        # What is sent of an array that several read.
        (number,) = term.arrays
        rows = (self._evaluate(reader, assignment)[1] for reader in term.readers)
        needs = [need for row in rows for need in row.get(number, ())]
        if not needs:
            return Seconds()
        self._probe.begin(assignment)
        self._probe.send(number, needs)
        return self.space.machine.sending(self.space.arrays, self._probe.sent)

    def _evaluate(
        self, place: int, assignment: Mapping[int, Axes]
    ) -> tuple[Seconds, dict[int, list[Need]]]:
        """Return the seconds of operations, and how they read arrays that others read as well."""
        term, probe = self.terms[place], self._probe
        key = (place, *[self.space.arrays.cuts(number, assignment) for number in term.arrays])
        if key not in self._evaluated:
            probe.begin(assignment)
            for operation, trips in term.operations:
                probe.run(operation, trips)
            shared = {number: probe.needs[number] for number in self._shared & probe.needs.keys()}
            for number in probe.needs.keys() - shared:
                probe.send(number, probe.needs[number])
            running = (row for row in term.operations if id(row[0]) in self._running)
            machine = self.space.machine
            seconds = machine.computing(probe, running)
            seconds = seconds.plus(machine.sending(self.space.arrays, probe.sent))
            self._evaluated[key] = seconds, shared
        return self._evaluated[key]

    @property
    def least(self) -> float:
        """Seconds of the step if all devices shared all work, and sent nothing."""
        uncut: dict[int, Axes] = dict.fromkeys(self.space.values, ())
        rows = (self.seconds(place, uncut) for place, t in enumerate(self.terms) if t.operations)
        return sum(row.compute + row.memory for row in rows) / prod(self.space.sizes.values())

    def total(self, assignment: Mapping[int, Axes], places: Iterable[int] | None = None) -> Seconds:
        """Return the seconds of some terms if their variables have these values; or of the step."""
        total = Seconds()
        for place in range(len(self.terms)) if places is None else places:
            total = total.plus(self.seconds(place, assignment))
        return total


def _numbers(operation: TracedOperation) -> Iterator[int]:
    """Yield the arrays that an operation reads and makes, and those that a loop begins with."""
    yield from (n for n in (*operation.inputs, *operation.outputs) if n is not None)
    for body in operation.bodies:
        yield from body.inputs
        yield from (n for n in body.outputs if n is not None)


def _groups(probe: Spread, equations: Equations) -> Iterable[_Group]:
    """Return operations by what must be priced together: those whose sums an addition merges."""
    groups: dict[int, _Group] = {}
    adding: set[int] = set()
    for row in equations.everything():
        operation, _ = row
        group = groups.setdefault(id(operation), [])
        group.append(row)
        is_sum = operation.rule is not None and bool(operation.rule.summed)
        for number in operation.outputs if is_sum or id(operation) in adding else ():
            reader = probe.adder(number)
            if reader is not None:
                adding.add(id(reader))
                merged = groups.setdefault(id(reader), group)
                if merged is not group:  # of another term of the sum
                    merged += group
                    groups |= {key: merged for key, value in groups.items() if value is group}
                    group = merged
    return {id(group): group for group in groups.values()}.values()


class Resident:
    """Arrays that are alive together, at several times, as terms of few variables each.

    Arguments are alive throughout, and results at the end, but for those in donated memory. When
    most is alive is decided once, by whole sizes. What is gathered, and what XLA adds, is left out:
    the compiler says what a layout needs.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self.groups: list[tuple[tuple[int, ...], list[int]]] = []
        """Variables, and the arrays of one time that depend on them."""
        self.times: list[list[int]] = []
        """Numbers of the groups that are alive together."""
        for time in _alive_together(space.step):
            groups: dict[tuple[int, ...], list[int]] = {}
            for number in time:
                groups.setdefault(space.scope_of([number]), []).append(number)
            self.times.append(list(range(len(self.groups), len(self.groups) + len(groups))))
            self.groups += groups.items()
        self._bytes: dict[tuple[Any, ...], int] = {}

    def bytes(self, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes that a device needs."""
        return max(sum(self.of(group, assignment) for group in time) for time in self.times)

    def of(self, group: int, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes of a group."""
        scope, numbers = self.groups[group]
        key = (group, *[assignment[name] for name in scope])
        if key not in self._bytes:
            self._bytes[key] = sum(self._array(number, assignment) for number in numbers)
        return self._bytes[key]

    def largest(self, assignment: Mapping[int, Axes]) -> list[tuple[int, int]]:
        """List (bytes, array) of what is alive when most is, the largest first."""
        most = max(self.times, key=lambda time: sum(self.of(group, assignment) for group in time))
        numbers = (number for group in most for number in self.groups[group][1])
        return sorted(((self._array(n, assignment), n) for n in numbers), reverse=True)

    def _array(self, number: int, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes of an array on a device."""
        arrays = self._space.arrays
        return arrays.bytes(number, arrays.cuts(number, assignment))


def _alive_together(step: Step) -> Iterator[list[int]]:
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
    roots_of: dict[int | None, set[int]] = {}
    made_at: dict[int, int] = {}
    last: dict[int, int] = {}
    for time, operation in enumerate(body.operations):
        read = {root for number in operation.inputs for root in roots_of.get(number, ())}
        is_own = bool(operation.bodies) or is_apart(operation)
        for number in operation.outputs:
            is_less = len(read) > 1 and 2 * bits[number] <= sum(bits[root] for root in read)
            if is_own or is_less:
                made_at[number], roots_of[number] = time, {number}
            else:
                roots_of[number] = read
            if is_own or is_less or number in body.outputs:
                last |= dict.fromkeys({*read, *roots_of[number]}, time)
    total = [0] * (len(body.operations) + 1)
    for root, begin in made_at.items():
        for time in range(begin, last[root] + 1):
            total[time] += bits[root]
    most = max(range(len(total)), key=total.__getitem__)
    for time in {most, *(i for i, op in enumerate(body.operations) if op.bodies)}:
        alive = {*around, *(root for root in made_at if made_at[root] <= time <= last[root])}
        yield alive
        for inner in body.operations[time].bodies if time < len(body.operations) else ():
            yield from _alive(equations, inner, alive)
