"""Estimates which arrays of a step are alive when a device needs most memory.

Operations run in the order of the jaxpr. What XLA computes within the operation that reads it, such
as elementwise arithmetic, takes no memory of its own, and keeps alive what it is computed from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from shardrules._step.equations import Body, Equations, TracedOperation
    from shardrules._step.spread import Spread

# What XLA makes an operation of its own; all else it computes where it is read.
_MADE: Final = frozenset(
    [
        "dot_general",
        "ragged_dot",
        "ragged_dot_general",
        "conv_general_dilated",
        "gather",
        "scatter",
        "scatter-add",
        "scatter_add",
        "scatter-mul",
        "scatter_mul",
        "scatter_max",
        "scatter_min",
        "sort",
        "top_k",
        "concatenate",
        "fft",
        "cholesky",
        "triangular_solve",
        "eigh",
        "qr",
        "lu",
        "svd",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "cumlogsumexp",
        "reduce_window_sum",
        "reduce_window_max",
        "dynamic_update_slice",
        "rng_bit_generator",
        "random_bits",
        "psum",
        "psum2",
        "all_gather",
        "psum_invariant",
        "all_to_all",
        "ppermute",
        "reduce_scatter",
        "psum_scatter",
        "all_gather_invariant",
    ]
)
_REDUCED: Final = frozenset(
    [
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_and",
        "reduce_or",
        "argmax",
        "argmin",
    ]
)
_IN_PLACE: Final = frozenset(
    ["dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul"]
)
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
    equations: Equations, spread: Spread, donated: Iterable[int]
) -> tuple[list[AliveArray], dict[str, int]]:
    """Return what is alive at the peak, the largest first, and bytes of arguments and results."""
    run = _Run(equations, spread)
    return run.peak(set(donated))


def is_apart(operation: TracedOperation) -> bool:
    """Say whether XLA computes an operation by itself, and not where its result is read."""
    return operation.name in _MADE or operation.name in _REDUCED or operation.rule is None


class _Run:
    """One run of a step, with each loop run once."""

    def __init__(self, equations: Equations, spread: Spread) -> None:
        self._equations, self._spread = equations, spread
        self._time = 0
        self._same: list[int] = []
        self._size: list[int] = []
        self._begin: list[int] = []
        self._end: list[int] = []
        self._number: list[tuple[int, TracedOperation | None, bool]] = []
        self._roots: dict[int, tuple[int, ...]] = {}
        self._users: dict[int, int] = {}
        self._gathered: dict[int, list[tuple[int, int]]] = {}
        for sent in spread.sent:
            if sent.kind == "all-gather" and sent.value is not None:
                rows = self._gathered.setdefault(id(sent.operation), [])
                rows.append((sent.value, sent.payload))

    def _buffer(
        self, number: int, size: int, maker: TracedOperation | None, is_copy: bool = False
    ) -> int:
        self._same.append(len(self._same))
        self._size.append(size)
        self._begin.append(self._time)
        self._end.append(self._time)
        self._number.append((number, maker, is_copy))
        return len(self._same) - 1

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

    def _use(self, number: int | None) -> None:
        for root in self._roots.get(number, ()) if number is not None else ():
            self._end[root] = self._time

    def peak(self, donated: set[int]) -> tuple[list[AliveArray], dict[str, int]]:
        body = self._equations.body
        size = self._spread.bytes
        arguments = {i: self._buffer(i, size(i), None) for i in body.inputs}
        for i, buffer in arguments.items():
            self._roots[i] = (buffer,)
        self._count_users(body)
        self._run(body)
        self._time += 1
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
        return self._largest(set(arguments.values())), numbers

    def _is_alike(self, number: int, other: int) -> bool:
        one, two = (self._equations.values[i] for i in (number, other))
        return (one.shape, one.dtype) == (two.shape, two.dtype) and (
            self._spread.bytes(number) == self._spread.bytes(other)
        )

    def _keep(self, number: int, buffer: int | None) -> None:
        """Let a result have a buffer of its own, or that of a donated argument."""
        roots = self._roots.get(number, ())
        self._use(number)
        if buffer is None:
            made = self._buffer(number, self._spread.bytes(number), None)
            if len(roots) == 1 and self._size[self._first(roots[0])] == self._size[made]:
                self._unite(roots[0], made)
        elif len(roots) == 1 and self._size[self._first(roots[0])] == self._size[buffer]:
            self._unite(buffer, roots[0])

    def _largest(self, arguments: set[int]) -> list[AliveArray]:
        """List what is alive when the sum is largest."""
        firsts = np.array([b for b in range(len(self._same)) if self._same[b] == b])
        begin, end = (np.array(times)[firsts] for times in (self._begin, self._end))
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

    def _count_users(self, body: Body) -> None:
        """Count by array the operations that read it and are computed by themselves."""
        for operation in body.operations:
            if operation.name in _MADE or operation.bodies or operation.rule is None:
                for number in set(operation.inputs):
                    if number is not None:
                        self._users[number] = self._users.get(number, 0) + 1
            for inner in operation.bodies:
                self._count_users(inner)

    def _run(self, body: Body) -> None:
        for operation in body.operations:
            self._time += 1
            for number, payload in self._gathered.get(id(operation), ()):
                self._use(number)
                self._buffer(number, payload, operation, is_copy=True)
            if operation.bodies:
                self._loop(operation)
            elif self._is_made(operation):
                self._make(operation)
            else:
                self._read(operation)

    def _is_made(self, operation: TracedOperation) -> bool:
        return is_apart(operation) or any(
            self._users.get(number, 0) > 1 for number in operation.outputs
        )

    def _make(self, operation: TracedOperation) -> None:
        for number in operation.inputs:
            self._use(number)
        before = operation.inputs[0] if operation.inputs else None
        for place, number in enumerate(operation.outputs):
            buffer = self._buffer(number, self._spread.bytes(number), operation)
            self._roots[number] = (buffer,)
            if operation.name in _IN_PLACE and place == 0 and before is not None:
                roots = self._roots.get(before, ())
                if len(roots) == 1 and self._size[self._first(roots[0])] == self._size[buffer]:
                    self._unite(roots[0], buffer)

    def _read(self, operation: TracedOperation) -> None:
        """Let results live in what they are computed from."""
        if operation.rule is not None and operation.rule.is_identity:
            for before, after in zip(operation.inputs, operation.outputs, strict=False):
                self._roots[after] = self._roots.get(before, ()) if before is not None else ()
            return
        roots = dict.fromkeys(
            root
            for number in operation.inputs
            if number is not None
            for root in self._roots.get(number, ())
        )
        for number in operation.outputs:
            size = self._spread.bytes(number)
            total = sum({self._first(r): self._size[self._first(r)] for r in roots}.values())
            if len(roots) > _MOST_ROOTS or (len(roots) > 1 and size * 2 <= total):
                self._roots[number] = (self._buffer(number, size, operation),)
                for root in roots:
                    self._end[root] = self._time
            else:
                self._roots[number] = tuple(roots)

    def _loop(self, operation: TracedOperation) -> None:
        for number in operation.inputs:
            self._use(number)
        stacked = (
            {
                number: self._buffer(number, self._spread.bytes(number), operation)
                for number in operation.outputs[operation.carries :]
            }
            if operation.name == "scan"
            else {}
        )
        for body in operation.bodies:
            for outer, inner in operation.arguments(body):
                if inner != outer:
                    self._roots[inner] = self._roots.get(outer, ()) if outer is not None else ()
            carried = self._carry(operation, body)
            self._run(body)
            self._time += 1
            for number in operation.inputs:
                self._use(number)
            for place, (number, made) in enumerate(
                zip(operation.outputs, body.outputs, strict=True)
            ):
                self._use(made)
                if number in stacked:
                    self._roots[number] = (stacked[number],)
                    self._end[stacked[number]] = self._time
                elif place in carried:
                    self._roots[number] = (carried[place],)
                    self._end[carried[place]] = self._time
                else:
                    roots = self._roots.get(made, ()) if made is not None else ()
                    self._roots[number] = roots or (
                        self._buffer(number, self._spread.bytes(number), operation),
                    )

    def _carry(self, operation: TracedOperation, body: Body) -> dict[int, int]:
        """Give each array that a loop carries a buffer, which is changed in place."""
        if operation.name not in ("scan", "while"):
            return {}
        carried = {}
        pairs = operation.arguments(body)[operation.first : operation.first + operation.carries]
        for place, (_, inner) in enumerate(pairs):
            number = operation.outputs[place]
            buffer = self._buffer(number, self._spread.bytes(number), operation)
            carried[place] = buffer
            self._roots[inner] = (buffer,)
        return carried
