"""Finds which arrays are alive when a scheduled HLO module needs most memory.

The order of lines is the order of execution. An array lives from the instruction that makes it to
the last that reads it, or a view of it. What a loop carries, and what is updated in place, stays in
one buffer. XLA shares and pads buffers in its own way, so sums are estimates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from shardrules._program.computation import Computation, Instruction, Shape
from shardrules._program.hlo import Hlo

_MOST_DEPTH: Final = 100
_NOTHING: Final = 0
"""Buffer of what takes no memory of the device, such as tokens and arrays on the host."""
_VIEWS: Final = frozenset({
    "add-dependency", "bitcast", "domain", "get-tuple-element", "optimization-barrier", "recv-done",
    "set-dimension-size",
})  # fmt: skip
# The result may be in the memory of an operand of the same size that nothing reads later.
_ELEMENTWISE: Final = frozenset({
    "abs", "add", "and", "clamp", "compare", "convert", "copy", "cosine", "divide", "exponential",
    "log", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "power", "rsqrt",
    "select", "sine", "sort", "sqrt", "subtract", "tanh", "xor",
})  # fmt: skip
_UPDATES: Final = frozenset({"dynamic-update-slice", "scatter"})
_UNCOUNTED: Final = frozenset({"after-all", "outfeed", "partition-id", "replica-id"})
# Of a loop fusion these read an operand elsewhere than at the place of the result.
_MOVING: Final = re.compile(
    r" (?:concatenate|convolution|dot|dynamic-slice|gather|pad|reduce|reduce-window|reverse|slice"
    r"|transpose)\("
)
WRITTEN: Final = re.compile(r" (?:dynamic-update-slice|scatter)\(")
_ALIAS: Final = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_LAYOUT: Final = re.compile(r"\b[a-z][a-z0-9]*\[[0-9,<=]*\](\{[^}]*\})?")
# The host's memory is 5; on a TPU, 1 to 4 are memories of a core.
_ON_HOST: Final = re.compile(r"S\(5\)")
_ELSEWHERE_ON_TPU: Final = re.compile(r"S\([1-5]\)")


class Alive(NamedTuple):
    """Array that is alive at the peak."""

    shape: Shape
    bytes: int
    """Of its memory, with the padding that is known."""
    computation: str
    name: str
    """Instruction that makes it."""
    parameter: int | None
    """Number of the module's parameter that it is."""
    is_output: bool
    last_use: tuple[str, str] | None
    """Computation and name of the last instruction that reads it."""


def alive_at_peak(hlo: Hlo) -> list[Alive]:
    """List the arrays that are alive when their sum is largest, the largest first."""
    return _Run(hlo).peak()


class _Run:
    """One run of a module, with each loop run once."""

    def __init__(self, hlo: Hlo) -> None:
        self._hlo = hlo
        self._elsewhere = _ELSEWHERE_ON_TPU if ":T(" in hlo.text[:100_000] else _ON_HOST
        self._time = 0
        self._shapes: list[Shape | None] = [None]
        self._same, self._begin, self._end = [_NOTHING], [0], [0]
        self._makers: list[tuple[str, str]] = [("", "")]
        self._users: dict[int, tuple[str, str]] = {}
        self._in_place: list[tuple[int, list[int], list[int]]] = []

    def peak(self) -> list[Alive]:
        hlo = self._hlo
        entry = hlo[hlo.entry]
        arguments = {line.parameter or 0: self._made(entry, line) for line in entry.parameters}
        outputs = self._run(entry, [arguments[i] for i in range(len(arguments))], 0)
        for output, parameter in hlo.aliases.items():
            if output < len(outputs):
                self._unite([outputs[output]], arguments[parameter])
        for output in outputs:
            self._end[output] = self._time
        for values in arguments.values():
            for buffer in values:
                self._begin[buffer], self._end[buffer] = 0, self._time
        parameter_of = {
            self._first(buffer): number for number, values in arguments.items() for buffer in values
        }
        self._reuse_operands()
        results = set(map(self._first, outputs))
        rows = [
            Alive(
                shape,
                shape.bytes,
                *self._makers[buffer],
                parameter_of.get(buffer),
                buffer in results,
                self._users.get(buffer),
            )
            for buffer in self._largest()
            if (shape := self._shapes[buffer]) is not None
        ]
        return sorted(rows, key=lambda row: -row.shape.bytes)

    def _largest(self) -> list[int]:
        """List the buffers that are alive when their sum is largest."""
        same = np.array([self._first(buffer) for buffer in range(len(self._same))])
        begin = np.full(len(same), self._time + 1)
        end = np.full(len(same), -1)
        np.minimum.at(begin, same, self._begin)
        np.maximum.at(end, same, self._end)
        firsts = np.flatnonzero((same == np.arange(len(same))) & (same != _NOTHING))
        begin, end = begin[firsts], np.maximum(end, begin)[firsts]
        sizes = np.array([shape.bytes if shape else 0 for shape in self._shapes])[firsts]
        change = np.zeros(self._time + 3, np.int64)
        np.add.at(change, begin, sizes)
        np.subtract.at(change, end + 1, sizes)
        time = int(change.cumsum().argmax())
        buffers: list[int] = firsts[(begin <= time) & (end >= time)].tolist()
        return buffers

    # Execution.

    def _run(
        self, computation: Computation, arguments: Sequence[list[int]], depth: int
    ) -> list[int]:
        """Run a computation, and return the buffers of its result."""
        if depth > _MOST_DEPTH or self._time > self._hlo.most_visits:
            raise LookupError(f"computations call each other too often: {computation.name}")
        values: dict[str, list[int]] = {}
        for line in computation:
            self._time += 1
            if line.parameter is not None:
                values[line.name] = arguments[line.parameter]
                continue
            operands = [values[name] for name in line.operands]
            if line.opcode not in ("get-tuple-element", "tuple"):
                for buffer in (buffer for operand in operands for buffer in operand):
                    self._end[buffer] = self._time
                    self._users[self._first(buffer)] = (computation.name, line.name)
            values[line.name] = self._value(computation, line, operands, depth)
        return values[computation.root.name]

    def _value(
        self, computation: Computation, line: Instruction, operands: list[list[int]], depth: int
    ) -> list[int]:
        opcode = line.opcode
        if opcode == "tuple":
            return [buffer for operand in operands for buffer in operand]
        if opcode in _VIEWS:
            first = line.element or 0
            return operands[0][first : first + len(line.results)]
        if opcode == "while":
            return self._loop(line, operands[0], depth)
        if opcode in ("call", "conditional"):
            return self._called(line, operands, depth)
        return self._computed(computation, line, operands)

    def _computed(
        self, computation: Computation, line: Instruction, operands: list[list[int]]
    ) -> list[int]:
        opcode = line.opcode
        if opcode.endswith("-done"):
            return self._done(line, operands[0])
        value = [_NOTHING] if opcode in _UNCOUNTED else self._made(computation, line)
        if opcode.endswith("-start"):
            return self._started(line, value, operands)
        self._place(line, value, operands)
        return value

    def _place(self, line: Instruction, value: list[int], operands: list[list[int]]) -> None:
        """Say in which operands' memory a value is, or may be."""
        hlo, arrays = self._hlo, [operand[0] for operand in operands if len(operand) == 1]
        if line.opcode in _UPDATES:
            self._update(value[0], operands[0][0])
        elif line.opcode == "custom-call" and "output_to_operand_aliasing" in line.attributes:
            for place, number in _ALIAS.findall(line.attributes):
                if int(place or 0) < len(value):
                    self._unite([value[int(place or 0)]], operands[int(number)])
        elif line.opcode.startswith("fusion"):
            (body,) = line.callees[:1]
            if hlo.contains(body, WRITTEN):
                for result in value:
                    shape = self._shapes[result]
                    alike = (array for array in arrays if self._shapes[array] == shape)
                    self._update(result, next(alike, result))
            elif not hlo.contains(body, _MOVING):
                self._in_place.append((self._time, value, arrays))
        elif line.opcode in _ELEMENTWISE:
            self._in_place.append((self._time, value, arrays))

    def _loop(self, line: Instruction, carried: list[int], depth: int) -> list[int]:
        for attribute in ("condition", "body"):
            (name,) = line.called[attribute]
            result = self._run(self._hlo[name], [carried], depth + 1)
        self._unite(result, carried)
        for buffer in carried:
            self._end[buffer] = self._time
        return carried

    def _called(self, line: Instruction, operands: list[list[int]], depth: int) -> list[int]:
        """Run what is called; the results of branches are in one buffer."""
        if line.opcode == "call":
            return self._run(self._hlo[line.callees[0]], operands, depth + 1)
        branches = zip(line.callees, operands[1:], strict=False)
        results = [self._run(self._hlo[name], [value], depth + 1) for name, value in branches]
        for result in results[1:]:
            self._unite(result, results[0])
        return results[0]

    def _started(self, line: Instruction, made: list[int], operands: list[list[int]]) -> list[int]:
        """Begin an asynchronous operation; its value has operands, then results.

        Of a copy the result comes first, and an all-reduce has only results.
        """
        before = [buffer for operand in operands for buffer in operand]
        if line.opcode == "copy-start":
            return [made[0], *before]
        if len(made) <= len(before):
            return made
        for buffer in made[: len(before)]:
            self._same[buffer] = _NOTHING
        results = made[len(before) :]
        if line.opcode == "fusion-start":
            results = results[: len(self._hlo[line.callees[0]].root.results)]
            self._place(line, results, operands)
        return [*before, *results]

    def _done(self, line: Instruction, value: list[int]) -> list[int]:
        count = len(line.results)
        if line.opcode == "fusion-done":
            return value[-count:]
        if line.opcode in ("copy-done", "all-reduce-done") or len(value) == count:
            return value[:count]
        return value[1 : count + 1] if len(value) <= count + 3 else value[count : 2 * count]

    # Buffers.

    def _made(self, computation: Computation, line: Instruction) -> list[int]:
        """Make a buffer for each array of a result."""
        layouts = _LAYOUT.findall(line.type)
        return [
            _NOTHING
            if self._elsewhere.search(layout)
            else self._add(shape, (computation.name, line.name))
            for shape, layout in zip(line.results, layouts, strict=True)
        ] or [_NOTHING]

    def _add(self, shape: Shape, maker: tuple[str, str]) -> int:
        self._same.append(len(self._same))
        self._begin.append(self._time)
        self._end.append(self._time)
        self._shapes.append(shape)
        self._makers.append(maker)
        return len(self._same) - 1

    def _first(self, buffer: int) -> int:
        same = self._same
        while same[buffer] != buffer:
            same[buffer] = buffer = same[same[buffer]]
        return buffer

    def _unite(self, values: Sequence[int], others: Sequence[int]) -> None:
        for value, other in zip(values, others, strict=False):
            first, last = sorted((self._first(value), self._first(other)))
            if first != _NOTHING:
                self._same[last] = first

    def _update(self, result: int, operand: int) -> None:
        """Put a result into the memory of an operand; the update tells more than what it was."""
        maker = self._makers[result]
        self._unite([result], [operand])
        self._makers[self._first(result)] = maker

    def _reuse_operands(self) -> None:
        """End the lives of operands in whose memory a result is."""
        for time, values, operands in self._in_place:
            for value in values:
                for operand in operands:
                    shape, other = self._shapes[value], self._shapes[operand]
                    if shape is None or other is None or self._end[operand] != time:
                        continue
                    if shape.bytes == other.bytes:
                        self._end[operand] = time - 1
                        break
