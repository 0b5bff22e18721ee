"""Estimates which arrays of a step are alive when a device needs most memory.

Operations run in the order of the jaxpr, but for the gradients of weights, which end a turn of a
loop. What XLA computes within the operation that reads it, such as elementwise arithmetic, takes no
memory of its own, and keeps alive what it is computed from; where it is smaller than that, it is
computed before, in the place of an operand that nothing else reads. So is what a loop carries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardrules._program.jax_names import user_line
from shardrules._program.solve.spread import ADDS

if TYPE_CHECKING:
    from shardrules._program.solve.spread import LaidSpread, SpreadCollective
    from shardrules._program.step.equations import Body, Equations, TracedOperation

PRODUCTS: Final = frozenset(
    ["dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"]
)
# What XLA makes an operation of its own; all else it computes where it is read.
_MADE: Final = frozenset((
    "dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "gather",
    "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter_max",
    "scatter_min", "sort", "top_k", "concatenate", "fft", "cholesky", "triangular_solve",
    "eigh", "qr", "lu", "svd", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
    "reduce_window_sum", "reduce_window_max", "dynamic_update_slice", "rng_bit_generator",
    "random_bits", "psum", "psum2", "all_gather", "psum_invariant", "all_to_all",
    "ppermute", "reduce_scatter", "psum_scatter", "all_gather_invariant",
))  # fmt: skip
_REDUCED: Final = frozenset((
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
    "argmax", "argmin",
))  # fmt: skip
_IN_PLACE: Final = frozenset(
    ["dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul"]
)
# A loop over so few parts is written out.
_FEW_PARTS: Final = 4
_MOST_ROOTS: Final = 64


class AliveArray(NamedTuple):
    """Array of a step that is alive at the peak."""

    bytes: int
    number: int
    operation: TracedOperation | None
    """What makes it; None for an argument."""
    is_gathered: bool
    """True for the copy that a collective makes."""


def alive_arrays(
    equations: Equations, spread: LaidSpread, donated: Iterable[int]
) -> tuple[list[AliveArray], dict[str, int]]:
    """Return what is alive at the peak, the largest first, and bytes of arguments and results."""
    return _StepRun(equations, spread).peak(set(donated))


def is_apart(operation: TracedOperation) -> bool:
    """Say whether XLA computes an operation by itself, and not where its result is read."""
    return operation.name in _MADE or operation.name in _REDUCED or operation.rule is None


class _StepRun:
    """One run of a step, with each loop run once."""

    def __init__(self, equations: Equations, spread: LaidSpread) -> None:
        self._equations, self._spread = equations, spread
        self._time = 0
        self._same: list[int] = []
        self._size: list[int] = []
        self._begin: list[int] = []
        self._end: list[int] = []
        self._number: list[tuple[int, TracedOperation | None, bool]] = []
        self._roots: dict[int | None, tuple[int, ...]] = {}
        self._makers: dict[int, TracedOperation] = {}
        self._copies: dict[int, int] = {}
        self._in_place: list[tuple[int, Sequence[int]]] = []
        self._carried: list[tuple[int, int]] = []
        self._wide: dict[int, int] = {}
        self._readers: dict[int, set[int]] = {}
        self._users: Counter[int | None] = Counter()
        self._fusible: dict[int, int] = {}
        self._turn_begin = 0
        self._gathered: dict[int, list[SpreadCollective]] = {}
        for sent in spread.sent:
            if sent.kind == "all-gather" and sent.value is not None:
                self._gathered.setdefault(id(sent.operation), []).append(sent)

    # Buffers.

    def _buffer(
        self, number: int, size: int, maker: TracedOperation | None, is_copy: bool = False
    ) -> int:
        self._same.append(len(self._same))
        self._size.append(size)
        self._begin.append(self._time)
        self._end.append(self._time)
        self._number.append((number, maker, is_copy))
        return len(self._same) - 1

    def _new(self, number: int, maker: TracedOperation | None) -> int:
        return self._buffer(number, self._spread.bytes(number), maker)

    def _first(self, buffer: int) -> int:
        while self._same[buffer] != buffer:
            buffer = self._same[buffer]
        return buffer

    def _unite(self, buffer: int, other: int) -> None:
        buffer, other = self._first(buffer), self._first(other)
        if buffer != other:
            self._same[other] = buffer
            self._size[buffer] = max(self._size[buffer], self._size[other])
            self._begin[buffer] = min(self._begin[buffer], self._begin[other])
            self._end[buffer] = max(self._end[buffer], self._end[other])

    def _is_free(self, buffer: int, time: int, size: int) -> bool:
        """Say whether nothing reads a buffer of this size after some time."""
        first = self._first(buffer)
        return self._end[first] <= time and self._size[first] == size

    def _roots_of(self, *numbers: int | None) -> tuple[int, ...]:
        """Return the buffers that arrays live in, or are computed from."""
        roots = (root for number in numbers for root in self._roots.get(number, ()))
        return tuple(dict.fromkeys(map(self._first, roots)))

    def _use(self, number: int | None) -> None:
        for root in self._roots_of(number):
            self._end[root] = self._time

    def _is_apart(self, number: int) -> bool:
        """Say whether an array takes less memory than what it is computed from."""
        roots = self._roots_of(number)
        total = sum(self._size[root] for root in roots)
        return len(roots) > 1 and 2 * self._spread.bytes(number) <= total

    def _put(self, number: int) -> None:
        """Give an array that was computed where it is read a buffer."""
        roots = self._roots_of(number)
        self._use(number)
        makers = [self._makers[number], *(self._number[root][1] for root in roots)]
        # What JAX itself adds, to sum up gradients, has no line.
        lined = (row for row in makers if row is not None and user_line(row.eqn) is not None)
        buffer = self._new(number, next(lined, makers[0]))
        self._in_place.append((buffer, roots))
        self._roots[number] = (buffer,)

    # The peak.

    def peak(self, donated: set[int]) -> tuple[list[AliveArray], dict[str, int]]:
        body = self._equations.body
        size = self._spread.bytes
        read = (i for i in self._equations.constants if i in self._equations.users)
        arguments = {i: self._new(i, None) for i in (*body.inputs, *read)}
        for i, buffer in arguments.items():
            self._roots[i] = (buffer,)
        self._run(body)
        self._time += 1
        self._reuse(set(arguments.values()) - {arguments[i] for i in donated})
        numbers = {"arguments": sum(map(size, body.inputs)), "outputs": 0, "aliased": 0}
        free = {i for i in donated if i in arguments}
        for number in dict.fromkeys(body.outputs):
            if number is None or number in arguments:
                continue
            numbers["outputs"] += size(number)
            donor = next((i for i in free if self._is_alike(i, number)), None)
            if donor is not None:
                free.discard(donor)
                numbers["aliased"] += size(number)
            self._keep(number, None if donor is None else arguments[donor])
        for buffer in arguments.values():
            self._begin[self._first(buffer)] = 0
            self._end[self._first(buffer)] = self._time
        return self._largest(), numbers

    def _reuse(self, kept: set[int]) -> None:
        """Put what a loop carries, and what is computed element by element, where it comes from."""
        for buffer, size in self._wide.items():
            number, maker, _ = self._number[buffer]
            is_one = len(self._readers.get(buffer, ())) == 1
            if is_one and maker is not None and self._batches(maker, number) > 1:
                self._size[buffer] = max(self._size[buffer], size)
        for buffer, before in self._carried:
            if before not in kept and self._is_free(
                before, self._begin[buffer], self._size[buffer]
            ):
                self._unite(before, buffer)
        for buffer, roots in self._in_place:
            time = self._begin[buffer]
            for root in roots:
                if root not in kept and self._is_free(root, time, self._size[buffer]):
                    self._end[self._first(root)] = time - 1
                    break

    def _is_alike(self, number: int, other: int) -> bool:
        values, size = self._equations.values, self._spread.bytes
        return values[number][:2] == values[other][:2] and size(number) == size(other)

    def _keep(self, number: int, buffer: int | None) -> None:
        """Let a result have a buffer of its own, or that of a donated argument."""
        roots = self._roots_of(number)
        self._use(number)
        target = self._new(number, None) if buffer is None else self._first(buffer)
        if len(roots) != 1 or self._size[roots[0]] != self._size[target]:
            return
        if buffer is None or self._is_free(target, self._begin[roots[0]], self._size[target]):
            self._unite(target, roots[0])

    def _largest(self) -> list[AliveArray]:
        """List what is alive when the sum is largest."""
        firsts = np.array([b for b in range(len(self._same)) if self._same[b] == b])
        begin, end = (np.array(times)[firsts] for times in (self._begin, self._end))
        end = np.maximum(end, begin - 1)
        sizes = np.array(self._size, np.int64)[firsts]
        change = np.zeros(self._time + 3, np.int64)
        np.add.at(change, begin, sizes)
        np.subtract.at(change, end + 1, sizes)
        time = int(change.cumsum().argmax())
        rows = [
            AliveArray(self._size[b], *self._number[b])
            for b in firsts[(begin <= time) & (end >= time)].tolist()
        ]
        return sorted(rows, key=lambda row: -row.bytes)

    # Operations.

    def _run(self, body: Body, carries: int = 0, *, is_scan: bool = False) -> None:
        stacked = set(body.outputs[carries:]) if is_scan else set()
        late: set[int] = set()
        if is_scan:
            late = _late(body, body.outputs[:carries])
        elif self._is_postponed(body):
            late = _late(body, [i for row in body.operations if row.bodies for i in row.inputs])
        self._users.update(i for row in body.operations for i in row.inputs)
        self._users.update(body.outputs)
        for operation in sorted(body.operations, key=lambda row: id(row) in late):
            self._time += 1
            self._step(operation)
            for number in stacked.intersection(operation.outputs):
                self._use(number)

    def _is_postponed(self, body: Body) -> bool:
        """Say whether products that no loop waits for are computed after the last one.

        So they are if operands of products are gathered there, such as those of Newton-Schulz
        steps: XLA computes the gradient of the head meanwhile.
        """
        loops = [place for place, row in enumerate(body.operations) if row.bodies]
        after = body.operations[loops[-1] + 1 :] if loops else []
        return any(row.name in PRODUCTS and id(row) in self._gathered for row in after)

    def _step(self, operation: TracedOperation) -> None:
        is_read = operation.bodies or is_apart(operation)
        if is_read:
            for number in operation.inputs:
                if number is not None and operation.name not in _REDUCED and self._is_apart(number):
                    self._put(number)
                if number in self._copies:
                    self._end[self._copies[number]] = self._time
            self._time += 1
        for sent in self._gathered.get(id(operation), ()):
            if sent.value is not None:
                self._use(sent.value)
                copy = self._buffer(sent.value, sent.payload, operation, is_copy=True)
                self._copies[sent.value] = copy
        if operation.bodies:
            self._loop(operation)
        elif is_read:
            self._make(operation)
        else:
            self._read(operation)

    def _make(self, operation: TracedOperation) -> None:
        for number in operation.inputs:
            self._use(number)
            for root in self._roots_of(number):
                if number is not None and operation.name in _REDUCED:
                    self._wide[root] = max(self._spread.bytes(number), self._wide.get(root, 0))
                else:
                    self._readers.setdefault(root, set()).add(id(operation))
        before = self._roots_of(operation.inputs[0] if operation.inputs else None)
        for place, number in enumerate(operation.outputs):
            buffer = self._new(number, operation)
            self._roots[number] = (buffer,)
            if self._is_in_parts(operation):
                self._begin[buffer] = self._turn_begin
            elif operation.name in PRODUCTS:
                self._fusible[number] = buffer
            if operation.name in _IN_PLACE and place == 0 and len(before) == 1:
                self._carried.append((buffer, before[0]))

    def _batches(self, operation: TracedOperation, number: int) -> int:
        """Count the batch dimensions of a product that are not one on a device; 0 of others."""
        if operation.name not in PRODUCTS or operation.rule is None:
            return 0
        rows = [{f for dim in dims for f in dim} for dims in operation.rule.operands]
        shape, cuts = self._equations.values[number].shape, self._spread.cuts.get(number, ())
        return sum(
            size > self._spread.count(axes) and set(dim) <= rows[0] & rows[1]
            for size, axes, dim in zip(shape, cuts, operation.rule.results[0], strict=False)
        )

    def _is_in_parts(self, operation: TracedOperation) -> bool:
        """Say whether a product is a loop over the parts of a weight that it sums over.

        XLA does not gather such a weight, and has the memory of the result from the beginning of
        a turn on.
        """
        rule = operation.rule
        if operation.name not in PRODUCTS or rule is None or not self._turn_begin:
            return False
        for sent in self._gathered.get(id(operation), ()):
            if sent.value not in operation.inputs:  # a result that is brought to other cuts
                continue
            cuts = self._spread.cuts.get(sent.value or 0, ())
            dims = rule.operands[operation.inputs.index(sent.value)]
            is_summed = any(
                not rule.summed.isdisjoint(factors) and set(axes) & set(sent.axes)
                for factors, axes in zip(dims, cuts, strict=False)
            )
            is_large = self._spread.count(sent.axes) > _FEW_PARTS
            if is_summed and is_large and self._users[sent.value] == 1:
                return True
        return False

    def _read(self, operation: TracedOperation) -> None:
        """Let results live in what they are computed from."""
        roots = self._roots_of(*operation.inputs)
        is_identity = operation.rule is not None and operation.rule.is_identity
        if (product := self._fused_into(operation, roots)) is not None:
            others = [root for root in roots if root != product]
            for root in others:
                self._end[root] = max(self._end[root], self._begin[product])
            self._in_place.append((product, others))
            roots = (product,)
            self._fusible.update(dict.fromkeys(operation.outputs, product))
        self._makers.update(dict.fromkeys(operation.outputs, operation))
        for place, number in enumerate(operation.outputs):
            self._roots[number] = self._roots_of(operation.inputs[place]) if is_identity else roots
            if len(roots) > _MOST_ROOTS or (operation.name in ADDS and self._is_apart(number)):
                self._put(number)

    def _fused_into(self, operation: TracedOperation, roots: Sequence[int]) -> int | None:
        """Return the buffer of the product that XLA computes an elementwise operation in.

        It is the only one that reads the product, and its other operands are there before. So the
        gradient of relu takes the place of relu's operand.
        """
        if operation.rule is None or len(operation.outputs) != 1 or len(roots) < 2:
            return None
        size = self._spread.bytes(operation.outputs[0])
        last = max(roots, key=self._begin.__getitem__)
        for number, dims in zip(operation.inputs, operation.rule.operands, strict=True):
            if (
                number is not None
                and self._users[number] == 1
                and self._fusible.get(number) == last
                and dims == operation.rule.results[0]
                and self._size[last] == size
            ):
                return last
        return None

    def _loop(self, operation: TracedOperation) -> None:
        is_scan = operation.name == "scan"
        for number in operation.inputs:
            self._use(number)
        stop = operation.first + operation.carries
        stacked = operation.outputs[operation.carries :] if is_scan else []
        for number in stacked:
            self._roots[number] = (self._new(number, operation),)
        for body in operation.bodies:
            arguments = operation.arguments(body)
            for place, (outer, inner) in enumerate(arguments):
                if inner == outer:
                    continue
                self._roots[inner] = self._roots_of(outer)
                if is_scan and place >= stop:
                    self._roots[inner] = (self._new(inner, operation),)
            carried = self._carry(operation, body)
            self._turn_begin = self._time if is_scan else 0
            self._run(body, operation.carries, is_scan=is_scan)
            self._time += 1
            self._turn_begin = 0
            for place, (outer, _) in enumerate(arguments):
                if place not in range(operation.first, stop):
                    self._use(outer)
            for place, (number, result) in enumerate(
                zip(operation.outputs, body.outputs, strict=True)
            ):
                if number in stacked:
                    self._use(number)
                    continue
                if place in carried:
                    self._turn(carried[place], result)
                    self._roots[number] = (carried[place],)
                else:
                    self._use(result)
                    self._roots[number] = self._roots_of(result) or (self._new(number, operation),)

    def _turn(self, carried: int, result: int | None) -> None:
        """End a turn: what comes next is in the place of what was carried, if that is free."""
        roots = self._roots_of(result)
        if len(roots) == 1 and self._is_free(carried, self._begin[roots[0]], self._size[roots[0]]):
            self._unite(carried, roots[0])
        self._use(result)
        self._end[self._first(carried)] = self._time

    def _carry(self, operation: TracedOperation, body: Body) -> dict[int, int]:
        """Give each array that a loop carries a buffer, which is changed in place."""
        if operation.name not in ("scan", "while"):
            return {}
        carried = {}
        pairs = operation.arguments(body)[operation.first : operation.first + operation.carries]
        for place, (outer, inner) in enumerate(pairs):
            carried[place] = buffer = self._new(operation.outputs[place], operation)
            before = self._roots_of(outer)
            if len(before) == 1:
                self._carried.append((buffer, before[0]))
            self._roots[inner] = (buffer,)
        return carried


def _late(body: Body, awaited: Iterable[int | None]) -> set[int]:
    """Return the products that nothing which is awaited needs, and what they lead to.

    XLA computes them last: the gradients of weights, for which the next turn of a loop does not
    wait.
    """
    needed = {number for number in awaited if number is not None}
    for operation in reversed(body.operations):
        if not needed.isdisjoint(operation.outputs):
            needed.update(number for number in operation.inputs if number is not None)
    late: set[int] = set()
    outputs: set[int | None] = set()
    for operation in body.operations:
        if needed.isdisjoint(operation.outputs) and (
            operation.name in PRODUCTS or not outputs.isdisjoint(operation.inputs)
        ):
            late.add(id(operation))
            outputs.update(operation.outputs)
    return late
