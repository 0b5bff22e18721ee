"""What operations of a step send between devices, if a layout says how each array is cut.

Each operation computes with the axes that cost least to send: an operand that is cut by an axis
which another needs elsewhere is gathered, and terms of a sum are added over the axes that cut what
is summed. What it makes is brought to its layout at once. Constraints in the program are left out:
the layout stands in their place. So are collectives of code by device, which all layouts have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import gcd, prod
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from shardrules._program.step.equations import CONSTRAINTS

if TYPE_CHECKING:
    from shardrules._program.solve.layout import Axes, StepArrays
    from shardrules._program.step.equations import Cuts, TracedOperation
    from shardrules._program.step.factors import Factors, Rule

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
_MOST_CHOICES: Final = 256
ADDS: Final = frozenset({"add", "add_any"})
"""Operations that can add what devices have of sums."""


class SpreadCollective(NamedTuple):
    """A collective of one operation."""

    kind: CollectiveKind
    axes: Axes
    payload: int
    """Bytes on a device: the result of an all-gather, the operand of all others."""
    trips: int
    operation: TracedOperation
    value: int
    """The array that is gathered, or of whose terms the sum is."""


class Need(NamedTuple):
    """Cuts to which an operation brings an array that it reads."""

    cuts: Cuts
    trips: int
    operation: TracedOperation


class Spread:
    """What operations of a step send, if arrays are cut as an assignment has them."""

    def __init__(self, arrays: StepArrays, assignment: Mapping[int, Axes]) -> None:
        self.arrays, self.sizes = arrays, arrays.sizes
        self._equations = arrays.equations
        self.begin(assignment)

    def begin(self, assignment: Mapping[int, Axes]) -> None:
        """Forget all operations, and go on with another assignment."""
        self._assignment = assignment
        self.sent: list[SpreadCollective] = []
        self.needs: dict[int, list[Need]] = {}
        """By array, how it is read otherwise than it lies."""
        self.reads: dict[tuple[int, int], Cuts] = {}
        """Cuts with which an operation reads an array, by the operation's id and the number."""
        self.sums: set[int] = set()
        """Arrays of which devices add up what each has."""
        self._cuts: dict[int, Cuts] = {}
        self._copies: set[tuple[int, Cuts]] = set()
        self._terms: dict[int, tuple[Axes, ...]] = {}
        self._axes: dict[int, Axes] = {}
        self._now: TracedOperation
        self._trips: int

    def of_step(self) -> Spread:
        """Count what the whole step sends."""
        for operation, trips in self._equations.everything():
            self.run(operation, trips)
        for number in self.needs:
            self.send(number, self.needs[number])
        return self

    def target(self, number: int) -> Cuts:
        """Return the cuts that the layout has for an array."""
        return self.arrays.cuts(number, self._assignment)

    def cuts(self, number: int) -> Cuts:
        """Return the cuts of an array: those of the layout, but of what is not added up yet."""
        return self._cuts[number] if number in self._cuts else self.target(number)

    def share(self, operation: TracedOperation) -> int:
        """Return how many devices share the work of an operation."""
        return self.arrays.count(self._axes.get(id(operation), ()))

    def bytes(self, number: int) -> int:
        """Return the bytes of an array on a device."""
        return self.arrays.bytes(number, self.cuts(number))

    # Operations

    def run(self, operation: TracedOperation, trips: int) -> None:
        """Count one operation, and bring its results to their layout."""
        self._now, self._trips = operation, trips
        if operation.name in CONSTRAINTS and operation.inputs[0] is not None:
            cuts = self._cuts[operation.outputs[0]] = self.target(operation.outputs[0])
            self._move(operation.inputs[0], cuts)
        elif operation.name == "shard_map":
            self._run_manual(operation)
        elif operation.bodies:
            self._run_inside(operation)
        elif operation.rule is not None:
            self._compute(operation, operation.rule)
        else:  # not modelled: each device has all that it reads
            for number in operation.inputs:
                if number is not None:
                    self._move(number, self.arrays.known(number, ()))
        for number in operation.outputs:
            if number not in self._terms:  # or an addition sends what devices have of a sum
                self._cuts.setdefault(number, self.arrays.known(number, ()))
                self._move(number, self.target(number))
                del self._cuts[number]

    def _run_inside(self, operation: TracedOperation) -> None:
        """Bring what a loop or branch reads to the layout of its inputs, and take its results."""
        for body in operation.bodies:
            for outer, inner, is_slice in operation.arguments(body):
                if outer is not None and inner != outer:
                    cuts = self.target(inner)
                    self._move(outer, ((), *cuts) if is_slice else cuts)
            for made, result, is_stack in operation.results(body):
                cuts = () if result is None else self.cuts(result)
                self._cuts[made] = self.arrays.known(made, ((), *cuts) if is_stack else cuts)

    def _run_manual(self, operation: TracedOperation) -> None:
        """Bring arguments to the specs of code by device."""
        manual = self._equations.manual
        for outer, inner, _ in operation.arguments(operation.bodies[0]):
            if outer is not None:
                self._move(outer, self.arrays.known(outer, manual[inner]))
        for number in operation.outputs:
            self._cuts[number] = self.arrays.known(number, manual[number])

    # Products, and all else that has factors

    def _compute(self, operation: TracedOperation, rule: Rule) -> None:
        """Choose the axes of an operation's factors, move its operands, and add up its terms."""
        if rule.is_identity:
            for before, after in zip(operation.inputs, operation.outputs, strict=False):
                cuts = () if before is None else self.cuts(before)
                self._cuts[after] = self.arrays.known(after, cuts)
            return
        choice = self._cheapest(operation, rule, self._options(operation, rule))
        self._axes[id(operation)] = tuple(axis for axes in choice.values() for axis in axes)
        if operation.name in ADDS and self._add_terms(
            operation, _array_cuts(rule.results[0], choice)
        ):
            return
        for number, dims in operation.operands():
            self._move(number, _array_cuts(dims, choice))
        for number, dims in zip(operation.outputs, rule.results, strict=True):
            self._cuts[number] = _array_cuts(dims, choice)
            rows = [choice[factor] for factor in sorted(rule.summed) if factor in choice]
            self._add_up(number, tuple(rows))

    def _options(self, operation: TracedOperation, rule: Rule) -> dict[str, list[int]]:
        """Return by axis the factors of an operation that it may cut."""
        options: dict[str, list[int]] = {}
        for number, dims in operation.operands():
            by_factor = _factor_cuts(rule, dims, self.cuts(number), self.sizes)
            closed = _closed_factors(rule, by_factor, self.sizes)
            for factor, names in by_factor.items():
                for name in names:
                    places = options.setdefault(name, [])
                    if factor not in places and factor not in closed:
                        places.append(factor)
        for result, dims in zip(operation.outputs, rule.results, strict=True):
            by_factor = _factor_cuts(rule, dims, self.target(result), self.sizes)
            closed = _closed_factors(rule, by_factor, self.sizes)
            for factor, names in by_factor.items():
                if factor not in closed:  # a device has the whole, and needs its part
                    for name in names:
                        options.setdefault(name, [factor])
        return options

    def _cheapest(
        self, operation: TracedOperation, rule: Rule, options: Mapping[str, list[int]]
    ) -> dict[int, Axes]:
        """Return the axes by factor for which least is sent."""
        axes = list(options)
        choices: list[list[int | None]] = [[*options[axis]] or [None] for axis in axes]
        if prod(map(len, choices)) > _MOST_CHOICES:
            choices = [places[:1] for places in choices]
        rows = [_fitting_cuts(axes, places, rule, self.sizes) for places in product(*choices)]
        if len(rows) == 1:
            return rows[0]
        return min(rows, key=lambda row: self._cost(operation, rule, row))

    def _cost(self, operation: TracedOperation, rule: Rule, choice: dict[int, Axes]) -> float:
        """Return the bytes that a device sends if an operation computes with these axes."""
        total = sum(
            self._sent(number, self.cuts(number), _array_cuts(dims, choice))
            for number, dims in operation.operands()
        )
        summed = [axis for factor in rule.summed for axis in choice.get(factor, ())]
        for number, dims in zip(operation.outputs, rule.results, strict=True):
            cuts = _array_cuts(dims, choice)
            if summed:
                total += self._ring("all-reduce", summed, self.arrays.bytes(number, cuts))
            total += self._sent(number, cuts, self.target(number))
        return total

    def _sent(self, number: int, before: Cuts, after: Cuts) -> float:
        """Return the bytes that a device sends to bring an array from some cuts to others."""
        return sum(
            self._ring(kind, axes, payload)
            for kind, axes, payload in self._moves(number, before, after)
        )

    def _ring(self, kind: str, axes: Iterable[str], payload: int) -> float:
        count = self.arrays.count(tuple(axes))
        return (2 if kind == "all-reduce" else 1) * payload * (count - 1) / count

    # Sums

    def _add_terms(self, operation: TracedOperation, cuts: Cuts) -> bool:
        """Add terms that devices have not added up yet; False if there are others among them."""
        numbers = [number for number in operation.inputs if number is not None]
        axes = {self._terms.get(number) for number in numbers}
        if len(numbers) == len(operation.inputs) and len(axes) == 1 and None not in axes:
            (result,) = operation.outputs
            self._cuts[result] = cuts
            self._add_up(result, self._terms[numbers[0]])
            return True
        for number in numbers:
            if number in self._terms:
                self._send_sum(number, self._terms.pop(number))
        return False

    def _add_up(self, number: int, rows: tuple[Axes, ...]) -> None:
        """Add the terms of a result over the axes of each row, or let an addition do so."""
        if not rows:
            return
        self.sums.add(number)
        if self.adder(number) is not None:
            self._terms[number] = rows
        else:
            self._send_sum(number, rows)

    def adder(self, number: int) -> TracedOperation | None:
        """Return the addition to which an array that is a sum may be left; None without one."""
        users = self._equations.users.get(number, [])
        return users[0] if len(users) == 1 and users[0].name in ADDS else None

    def _send_sum(self, number: int, rows: tuple[Axes, ...]) -> None:
        """Count the collectives that add the terms of a result over axes, a row after the other."""
        target = self.target(number)
        for axes in rows:
            before = self._cuts[number]
            taken = {axis for row in before for axis in row}
            scattered = tuple(a for row in target for a in row if a in axes and a not in taken)
            rest = tuple(axis for axis in axes if axis not in scattered)
            if scattered:
                self._send("reduce-scatter", scattered, self.bytes(number), number)
                self._cuts[number] = tuple(
                    (*row, *(axis for axis in goal if axis in scattered))
                    for row, goal in zip(before, target, strict=True)
                )
            if rest:
                self._send("all-reduce", rest, self.bytes(number), number)

    # Moves

    def _move(self, number: int, cuts: Cuts) -> None:
        """Bring an array to other cuts: at once, if it does not lie as the layout has it."""
        self.reads[id(self._now), number] = cuts
        if self.cuts(number) == cuts:
            return
        need = Need(cuts, self._trips, self._now)
        if number in self._cuts:
            self.send(number, [need])
        else:
            self.needs.setdefault(number, []).append(need)

    def send(self, number: int, needs: Iterable[Need]) -> None:
        """Count what brings an array to other cuts; a copy that is there already is used again."""
        for cuts, self._trips, self._now in needs:
            if (number, cuts) not in self._copies:
                self._copies.add((number, cuts))
                for kind, axes, payload in self._moves(number, self.cuts(number), cuts):
                    self._send(kind, axes, payload, number)

    def _send(self, kind: CollectiveKind, axes: Axes, payload: int, value: int) -> None:
        in_order = tuple(axis for axis in self.sizes if axis in axes)
        row = SpreadCollective(kind, in_order, payload, self._trips, self._now, value)
        self.sent.append(row)

    def _moves(
        self, number: int, before: Cuts, after: Cuts
    ) -> Iterator[tuple[CollectiveKind, Axes, int]]:
        """Yield (collective, axes, payload) that bring an array from some cuts to others."""
        if before == after:
            return
        place = {axis: dim for dim, row in enumerate(after) for axis in row}
        gathered = [a for row in before for a in row if a not in place]
        turned = [a for dim, row in enumerate(before) for a in row if place.get(a, dim) != dim]
        if turned:
            yield "all-to-all", tuple(turned), self.arrays.bytes(number, before)
        if gathered:
            rows = tuple(
                tuple(a for a in row if a not in gathered and place.get(a) == dim)
                for dim, row in enumerate(before)
            )
            yield "all-gather", tuple(gathered), self.arrays.bytes(number, rows)


def _factor_cuts(
    rule: Rule, dims: Sequence[Factors], cuts: Cuts, sizes: Mapping[str, int]
) -> dict[int, tuple[str, ...]]:
    """Return by factor the axes that cut an array of these dimensions."""
    of_factors: dict[int, tuple[str, ...]] = {}
    for factors, names in zip(dims, cuts, strict=bool(cuts)):
        if not names or not factors:
            continue
        rows: dict[int, tuple[str, ...]] = {}
        place, rest = 0, rule.sizes[factors[0]]
        for name in names:
            if rest == 1 and place < len(factors) - 1:
                place, rest = place + 1, rule.sizes[factors[place + 1]]
            size = sizes[name]
            if place < len(factors) - 1:  # parts of the minor factors are in one of the major
                if gcd(rest, size) < size:
                    break
                rest //= size
            rows[factors[place]] = (*rows.get(factors[place], ()), name)
        of_factors = rows | of_factors
    return of_factors


def _array_cuts(dims: Iterable[Factors], axes: Mapping[int, tuple[str, ...]]) -> Cuts:
    """Return the cuts of an array by those of its factors."""
    return tuple(
        axes.get(factors[0], ())
        if len(factors) == 1
        else tuple(a for f in factors for a in axes.get(f, ()))
        for factors in dims
    )


def _fitting_cuts(
    axes: Iterable[str], places: Iterable[int | None], rule: Rule, sizes: Mapping[str, int]
) -> dict[int, tuple[str, ...]]:
    """Return by factor the axes that are put there, without those of more devices than it has."""
    by_factor: dict[int, tuple[str, ...]] = {}
    for axis, factor in zip(axes, places, strict=True):
        if factor is not None:
            row = (*by_factor.get(factor, ()), axis)
            if prod(sizes[name] for name in row) <= rule.sizes[factor]:
                by_factor[factor] = row
    return by_factor


def _closed_factors(
    rule: Rule, axes: Mapping[int, tuple[str, ...]], sizes: Mapping[str, int]
) -> frozenset[int]:
    """Return the factors that devices cannot share if these axes cut the others.

    They need all of it; or parts of a minor one are not contiguous in a dimension, since its major
    is not cut into single elements.
    """
    if not rule.minor.intersection(axes):
        return rule.whole
    closed = set(rule.whole)
    for dims in (*rule.operands, *rule.results):
        for row in dims:
            for before, factor in pairwise(row):
                count = prod(sizes[axis] for axis in axes.get(before, ()))
                if before in closed or count != rule.sizes[before]:
                    closed.add(factor)
    return frozenset(closed)
