"""What operations of a step send between devices, and the seconds of it, for a given layout.

Each operation computes with the axes that cost least to send: an operand that is cut by an axis
which another needs elsewhere is gathered, and terms of a sum are added over the axes that cut what
is summed. What it makes is brought to its layout at once. Constraints in the program are left out:
the layout stands in their place. So are collectives of code by device, which all layouts have.
Prices are the seconds of what operations compute, read, write and send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, partial
from itertools import pairwise, product
from math import gcd, prod
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from shardrules._program.work import KERNEL_EFFICIENCY

if TYPE_CHECKING:
    from shardrules._base.hardware import Hardware
    from shardrules._program.solve.space import Axes, Space
    from shardrules._program.step.equations import Cuts, Equations, TracedOperation
    from shardrules._program.step.factors import Factors, Rule
    from shardrules._program.topologies.topology import Topology
    from shardrules._program.topologies.tpu import Links

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
    value: int
    """The array that is gathered, or of whose terms the sum is."""


Need = tuple["Cuts", int]
"""Cuts to which an operation brings an array that it reads, and how often it runs."""


class Spread:
    """What operations of a step send, if arrays are cut as an assignment has them."""

    def __init__(self, space: Space, assignment: Mapping[int, Axes]) -> None:
        self.space, self.sizes = space, space.sizes
        self._equations, self._assignment = space.equations, assignment
        self.sent: list[SpreadCollective] = []
        self.needs: dict[int, list[Need]] = {}
        """By array, how it is read otherwise than it lies."""
        self.reads: dict[tuple[int, int], Cuts] = {}
        """Cuts with which an operation reads an array, by the operation's id and the number."""
        self.sums: set[int] = set()
        """Arrays of which devices add up what each has."""
        self._cuts: dict[int, Cuts] = {}
        """Of arrays that do not lie as the layout has them yet."""
        self._copies: set[tuple[int, Cuts]] = set()
        """Arrays with other cuts to which they were brought: such a copy is used again."""
        self._addends: dict[int, tuple[Axes, ...]] = {}
        """Sums that an addition adds up, and the axes over which."""
        self._axes: dict[int, Axes] = {}
        """Of the factors of an operation, by its id."""
        self._operation: TracedOperation
        """The one that is counted, which runs so many times."""
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
        return self.space.cuts(number, self._assignment)

    def cuts(self, number: int) -> Cuts:
        """Return the cuts of an array: those of the layout, but of what is not added up yet."""
        return self._cuts[number] if number in self._cuts else self.target(number)

    def share(self, operation: TracedOperation) -> int:
        """Return how many devices share the work of an operation."""
        return self.space.count(self._axes.get(id(operation), ()))

    def bytes(self, number: int) -> int:
        """Return the bytes of an array on a device."""
        return self.space.bytes(number, self.cuts(number))

    # Operations

    def run(self, operation: TracedOperation, trips: int) -> None:
        """Count one operation, and bring its results to their layout."""
        self._operation, self._trips = operation, trips
        if operation.bodies:
            self._run_inside(operation)
        elif operation.rule is not None:
            self._compute(operation, operation.rule)
        else:  # not modelled: each device has all that it reads
            for number in operation.inputs:
                if number is not None:
                    self._move(number, self.space.in_mesh(number, ()))
        for number in operation.outputs:
            if number not in self._addends:  # or an addition sends what devices have of a sum
                self._cuts.setdefault(number, self.space.in_mesh(number, ()))
                self._move(number, self.target(number))
                del self._cuts[number]

    def _run_inside(self, operation: TracedOperation) -> None:
        """Bring what a loop or branch reads to the layout of its inputs, and take its results.

        Of code by device these are its specs.
        """
        manual, in_mesh = self._equations.manual, self.space.in_mesh
        for body in operation.bodies:
            for outer, inner, is_slice in operation.arguments(body):
                if outer is not None and inner != outer:
                    cuts = in_mesh(outer, manual[inner]) if inner in manual else self.target(inner)
                    self._move(outer, ((), *cuts) if is_slice else cuts)
            for output, result, is_stack in operation.results(body):
                cuts = manual.get(output, () if result is None else self.cuts(result))
                self._cuts[output] = in_mesh(output, ((), *cuts) if is_stack else cuts)

    # Products, and all else that has factors

    def _compute(self, operation: TracedOperation, rule: Rule) -> None:
        """Choose the axes of an operation's factors, move its operands, and add up its terms."""
        if rule.is_identity:
            for before, after in zip(operation.inputs, operation.outputs, strict=False):
                cuts = () if before is None else self.cuts(before)
                self._cuts[after] = self.space.in_mesh(after, cuts)
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
        results = zip(operation.outputs, rule.results, strict=True)
        rows = [(dims, self.cuts(number), False) for number, dims in operation.operands()]
        rows += [(dims, self.target(number), True) for number, dims in results]
        for dims, cuts, is_result in rows:
            by_factor = _factor_cuts(rule, dims, cuts, self.sizes)
            closed = _closed_factors(rule, by_factor, self.sizes)
            for factor, name in ((f, name) for f, names in by_factor.items() for name in names):
                if not is_result:
                    places = options.setdefault(name, [])
                    if factor not in places and factor not in closed:
                        places.append(factor)
                elif factor not in closed:  # a device has the whole, and needs its part
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
        moves = [(n, self.cuts(n), _array_cuts(dims, choice)) for n, dims in operation.operands()]
        summed = tuple(axis for factor in rule.summed for axis in choice.get(factor, ()))
        sent: list[tuple[str, Axes, int]] = []
        for number, dims in zip(operation.outputs, rule.results, strict=True):
            cuts = _array_cuts(dims, choice)
            moves.append((number, cuts, self.target(number)))
            if summed:  # twice the bytes
                sent += [("all-reduce", summed, 2 * self.space.bytes(number, cuts))]
        sent += [row for move in moves for row in self._moves(*move)]
        counts = [self.space.count(axes) for _, axes, _ in sent]
        return sum(row[2] * (count - 1) / count for row, count in zip(sent, counts, strict=True))

    # Sums

    def _add_terms(self, operation: TracedOperation, cuts: Cuts) -> bool:
        """Add terms that devices have not added up yet; False if there are others among them."""
        numbers = [number for number in operation.inputs if number is not None]
        axes = {self._addends.get(number) for number in numbers}
        if len(numbers) == len(operation.inputs) and len(axes) == 1 and None not in axes:
            (result,) = operation.outputs
            self._cuts[result] = cuts
            self._add_up(result, self._addends[numbers[0]])
            return True
        for number in numbers:
            if number in self._addends:
                self._send_sum(number, self._addends.pop(number))
        return False

    def _add_up(self, number: int, rows: tuple[Axes, ...]) -> None:
        """Add the terms of a result over the axes of each row, or let an addition do so."""
        if not rows:
            return
        self.sums.add(number)
        if adder(self._equations, number) is not None:
            self._addends[number] = rows
        else:
            self._send_sum(number, rows)

    def _send_sum(self, number: int, rows: tuple[Axes, ...]) -> None:
        """Count the collectives that add the terms of a result over axes, a row after the other."""
        target = self.target(number)
        for axes in rows:
            before = self._cuts[number]
            used = {axis for row in before for axis in row}
            scatter_axes = tuple(a for row in target for a in row if a in axes and a not in used)
            rest = tuple(axis for axis in axes if axis not in scatter_axes)
            if scatter_axes:
                self._send("reduce-scatter", scatter_axes, self.bytes(number), number)
                self._cuts[number] = tuple(
                    (*row, *(axis for axis in goal if axis in scatter_axes))
                    for row, goal in zip(before, target, strict=True)
                )
            if rest:
                self._send("all-reduce", rest, self.bytes(number), number)

    # Moves

    def _move(self, number: int, cuts: Cuts) -> None:
        """Bring an array to other cuts: at once, if it does not lie as the layout has it."""
        self.reads[id(self._operation), number] = cuts
        if self.cuts(number) == cuts:
            return
        if number in self._cuts:
            self.send(number, [(cuts, self._trips)])
        else:
            self.needs.setdefault(number, []).append((cuts, self._trips))

    def send(self, number: int, needs: Iterable[Need]) -> None:
        """Count what brings an array to other cuts; a copy that is there already is used again."""
        for cuts, self._trips in needs:
            if (number, cuts) not in self._copies:
                self._copies.add((number, cuts))
                for kind, axes, payload in self._moves(number, self.cuts(number), cuts):
                    self._send(kind, axes, payload, number)

    def _send(self, kind: CollectiveKind, axes: Axes, payload: int, value: int) -> None:
        in_order = tuple(axis for axis in self.sizes if axis in axes)
        self.sent.append(SpreadCollective(kind, in_order, payload, self._trips, value))

    def _moves(
        self, number: int, before: Cuts, after: Cuts
    ) -> Iterator[tuple[CollectiveKind, Axes, int]]:
        """Yield (collective, axes, payload) that bring an array from some cuts to others."""
        if before == after:
            return
        place = {axis: dim for dim, row in enumerate(after) for axis in row}
        gather_axes = [a for row in before for a in row if a not in place]
        turn_axes = [a for dim, row in enumerate(before) for a in row if place.get(a, dim) != dim]
        if turn_axes:
            yield "all-to-all", tuple(turn_axes), self.space.bytes(number, before)
        if gather_axes:
            rows = tuple(
                tuple(a for a in row if a not in gather_axes and place.get(a) == dim)
                for dim, row in enumerate(before)
            )
            yield "all-gather", tuple(gather_axes), self.space.bytes(number, rows)


def adder(equations: Equations, number: int) -> TracedOperation | None:
    """Return the addition to which an array that is a sum may be left; None without one."""
    users = equations.users.get(number, ())
    user = users[0] if len(users) == 1 else None
    return user if user and user.name in ADDS else None


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
) -> Set[int]:
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
    return closed


PRODUCTS: Final = frozenset(["dot_general", "ragged_dot_general", "conv_general_dilated"])
# What XLA makes an operation of its own; all else it computes where it is read.
_MADE: Final = PRODUCTS | frozenset((
    "gather", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter_max",
    "scatter_min", "sort", "top_k", "concatenate", "fft", "cholesky", "triangular_solve",
    "eigh", "qr", "lu", "svd", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
    "reduce_window_sum", "reduce_window_max", "dynamic_update_slice", "rng_bit_generator",
    "random_bits", "psum", "all_gather", "psum_invariant", "all_to_all",
    "ppermute", "reduce_scatter", "all_gather_invariant", "reduce_sum",
    "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin",
))  # fmt: skip
# Of what could be sent while devices compute, the part that is: the middle of all and nothing.
_HIDDEN: Final = 0.5

Bounds = tuple[float, ...]


class Seconds(NamedTuple):
    """Parts of the time of a step."""

    compute: float = 0.0
    """Of products."""
    memory: float = 0.0
    """Of reading and writing."""
    meanwhile: float = 0.0
    """Of what is sent while devices compute."""
    alone: float = 0.0
    """Of what is sent while they wait."""

    @property
    def bounds(self) -> Bounds:
        """Sums of which the larger is the total, and which add up term by term."""
        compute, memory, meanwhile, alone = self
        busy, waited = compute + memory, 1 - _HIDDEN
        return busy + waited * meanwhile + alone, meanwhile + waited * busy + alone

    @property
    def total(self) -> float:
        return max(self.bounds)

    def plus(self, term: Seconds) -> Seconds:
        a, b, c, d = term
        return Seconds(self[0] + a, self[1] + b, self[2] + c, self[3] + d)

    def less(self, term: Seconds) -> Seconds:
        a, b, c, d = term
        return Seconds(self[0] - a, self[1] - b, self[2] - c, self[3] - d)


def is_apart(operation: TracedOperation) -> bool:
    """Say whether XLA computes an operation by itself, and not where its result is read."""
    return operation.name in _MADE or operation.rule is None


class Machine:
    """Hardware, the networks under the axes of a mesh, and the seconds that operations take on it.

    Without a topology devices stand side by side along the last axis, as `jax.make_mesh` has them,
    so that the last axes are those inside a slice or node, as far as its devices go; there axes
    share the links of a torus evenly.
    """

    def __init__(
        self, hardware: Hardware, sizes: Mapping[str, int], topology: Topology | None = None
    ) -> None:
        self.hardware, self.sizes = hardware, dict(sizes)
        self._links: Callable[[Sequence[str]], Links] | None = None
        if topology is not None:
            self._links = cache(partial(topology._links, topology.mesh(sizes)))
        self._inside: dict[str, int] = {}
        remaining = hardware.link_devices
        for axis, size in reversed(self.sizes.items()):
            most = min(remaining, size)
            self._inside[axis] = next(n for n in range(most, 0, -1) if size % n == 0)
            remaining //= self._inside[axis]
        near = [axis for axis, count in self._inside.items() if count > 1]
        self._sharing = near if hardware.torus_dimensions > 1 else []
        """Axes that share the links of a torus."""
        self._rate = cache(lambda kind, axes: self.seconds(kind, axes, self.sent(kind, axes, 1)))

    @property
    def shares_links(self) -> bool:
        """True if axes share links evenly, since no topology says which has how many."""
        return self._links is None and len(self._sharing) > 1

    def computing(
        self, spread: Spread, operations: Iterable[tuple[TracedOperation, int]]
    ) -> Seconds:
        """Return the seconds of operations, each of its products or of reading and writing."""
        compute = memory = 0.0
        for operation, trips in operations:
            if is_apart(operation) and not operation.bodies:
                products, moved = self._operation(spread, operation)
                if products >= moved:
                    compute += products * trips
                else:
                    memory += moved * trips
        return Seconds(compute, memory)

    def _operation(self, spread: Spread, operation: TracedOperation) -> tuple[float, float]:
        """Return the seconds of an operation's products, and those of reading and writing."""
        reads = [number for number in operation.inputs if number is not None]
        dtype = spread.space.equations.values[reads[0]].dtype if reads else None
        rates = self.hardware.flops_per_second  # those without a figure have that of bfloat16
        peak = rates.get(getattr(dtype, "name", "bfloat16"), rates.get("bfloat16"))
        share = KERNEL_EFFICIENCY if operation.rule is None else self.hardware.efficiency
        speed = (peak or min(rates.values())) * share
        moved = sum(map(spread.bytes, {*reads, *operation.outputs}))
        flops = operation.flops / spread.share(operation)
        return flops / speed, moved / self.hardware.memory_bytes_per_second

    def sending(self, space: Space, rows: Iterable[SpreadCollective]) -> Seconds:
        """Return the seconds of collectives: products wait for activations alone."""
        meanwhile = alone = 0.0
        for row in rows:
            seconds = row.payload * row.trips * self._rate(row.kind, row.axes)
            is_gradient = "reduce" in row.kind and space.is_weight(row.value)
            if is_gradient or row.value in space.roles.weights:
                meanwhile += seconds
            else:
                alone += seconds
        return Seconds(0.0, 0.0, meanwhile, alone)

    def sent(self, kind: str, axes: Sequence[str], payload: int) -> float:
        """Return the bytes that a device sends by rings, as the compiler writes a collective."""
        rounds = 2 if kind == "all-reduce" else 1
        if self._links is not None and kind in self._links(axes).summed:
            rounds *= 2
        devices = prod(self.sizes[axis] for axis in axes)
        return payload * rounds * (devices - 1) / devices

    def seconds(self, kind: str, axes: Sequence[str], size: float) -> float:
        """Return how long it takes to send so many bytes."""
        if self._links is not None:
            return size / self._links(axes).rate
        devices = prod(self.sizes[axis] for axis in axes)
        inside = prod(self._inside[axis] for axis in axes)
        # First between slices, each device with its part; then inside of them.
        share = (devices // inside - 1) / (devices - 1)
        if kind == "all-to-all":
            share *= inside
        rate = self.hardware.link_bytes_per_second
        if self._sharing:
            rate *= len({*axes}.intersection(self._sharing)) / len(self._sharing)
        within = size * (1 - share) / rate if inside > 1 else 0.0
        return max(size * share / self.hardware.dcn_bytes_per_second, within)
