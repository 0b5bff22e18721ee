"""Along which mesh axes the values of an HLO module differ between devices.

A value differs along an axis if it is computed from an argument that the axis cuts, or from the
device's number, and no collective has made it the same since. Costs some ten microseconds per
instruction of the module, once. Must not know about plans.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardrules._verify.hlo import axes_of_groups

if TYPE_CHECKING:
    from shardrules._verify.hlo import Hlo, Instruction

MOVES: Final = frozenset({
    "bitcast", "convert", "copy", "copy-done", "copy-start", "optimization-barrier", "pad",
    "reshape", "transpose",
})  # fmt: skip
_SLICES: Final = frozenset({"dynamic-slice", "slice"})
# What a device gets so is of the same array, wherever it was.
_GATHERS: Final = frozenset({
    "all-gather", "all-gather-done", "all-gather-start",
    "collective-permute", "collective-permute-done", "collective-permute-start",
})  # fmt: skip
# With a broadcast or a constant, such as the scales and the zero points of quantized weights.
_SCALES: Final = frozenset({"add", "divide", "multiply", "subtract"})
_CALLS: Final = frozenset({"call", "fusion"})
PRODUCTS: Final = frozenset({"convolution", "custom-call", "dot"})
# What hands a value on, and makes nothing of it.
_PASSING: Final = MOVES | _GATHERS | _CALLS | {"get-tuple-element", "tuple", "while"}


class Value(NamedTuple):
    """The result of an instruction, or an element of it."""

    computation: str
    name: str
    element: int | None = None
    """Of a tuple, which one."""
    layers: int = 1
    """How many slices it has such as what was traced back: the sizes of dimensions cut to 1."""
    is_scaled: bool = False
    """Whether what was traced back is this times, or plus, something that is broadcast."""


class _Site(NamedTuple):
    """An instruction that has a value as an operand."""

    computation: str
    name: str
    operand: str


class ValueUse(NamedTuple):
    """What is made of a value, or of what is moved, sliced or gathered of it."""

    opcode: str
    site: _Site
    """Where that is; of what a fusion makes, the fusion."""
    is_layer: bool
    """Whether it is a slice, such as a layer of a stack."""


class Origin(NamedTuple):
    """The parameter of the module that a value is a copy of."""

    parameter: int
    layers: int
    """How many slices there are such as the one that it is a copy of; 1 for all of it."""
    is_scaled: bool = False
    """Whether it is not only a copy, but scaled."""


def origin_of(hlo: Hlo, value: Value) -> Origin | None:
    """The parameter of the module that the value is a gathered, moved, converted or scaled copy of.

    None if it is computed, or is of different origin in different calls or trips of a loop.
    """
    while True:
        value = _local_source(hlo, value, through=_GATHERS | _SCALES)
        number = _parameter_number(hlo, value)
        if number is None:
            return None
        if value.computation == hlo.entry:
            return Origin(number, value.layers, value.is_scaled)
        callers = list(hlo.callers(value.computation))
        lifted = _lifted(hlo, value, number, *callers[0]) if len(callers) == 1 else None
        if lifted is None:
            return None
        value = lifted


def source_of(hlo: Hlo, value: Value) -> Value:
    """The value within the same computation that this is a moved or converted copy of.

    What an asynchronous gather ends with is the result of its start.
    """
    source = _local_source(hlo, value, through=frozenset())
    found = hlo.instruction(source.computation, source.name)
    is_done = found.opcode == "all-gather-done"
    return source._replace(name=found.operands[0]) if is_done else source


def returned(hlo: Hlo) -> Iterator[Value]:
    """For each output of the module, the value that it is a copy of."""
    root = hlo.root(hlo.entry)
    if root.opcode == "tuple":
        yield from (source_of(hlo, Value(hlo.entry, name)) for name in root.operands)
    else:
        yield source_of(hlo, Value(hlo.entry, root.name))


def held_by_loops(hlo: Hlo, computation: str) -> set[Value]:
    """What the loops of a computation hold while they run."""
    held = set()
    for name, line in hlo.instructions(computation).items():
        if " while(" not in line:
            continue
        loop = hlo.instruction(computation, name)
        if loop.opcode == "while":
            for element in range(len(loop.results)):
                held.add(source_of(hlo, Value(computation, loop.operands[0], element)))
    return held


def is_made_from(hlo: Hlo, value: Value, parameter: int) -> bool:
    """Whether a value is a parameter of the module that is updated: element by element, or in part.

    A new state is; a gradient, which comes of a product, is not made so from its parameter.
    """
    pending, seen = [value], set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.computation == hlo.entry and _parameter_number(hlo, value) == parameter:
            return True
        pending += _updated(hlo, value)
    return False


def uses_of(hlo: Hlo, value: Value) -> Iterator[ValueUse]:
    """What is made of a value, in loops and fusions too; slices of it are uses of their own."""
    pending: list[tuple[Value, tuple[_Site, ...]]] = [(value, ())]
    seen = set()
    while pending:
        place = pending.pop()
        if place in seen:
            continue
        seen.add(place)
        value, calls = place
        if calls and value.name == hlo.root(value.computation).name:
            *outer, call = calls
            pending.append((Value(call.computation, call.name, value.element), tuple(outer)))
        for user in hlo.users(value.computation, value.name):
            instruction = hlo.instruction(value.computation, user)
            inner = (*calls, _Site(value.computation, user, value.name))
            if instruction.opcode in _SLICES or instruction.opcode not in _PASSING:
                is_layer = instruction.opcode in _SLICES and _is_layer(hlo, value, instruction)
                yield ValueUse(instruction.opcode, inner[0], is_layer)
            if instruction.opcode in _CALLS:
                after = inner
            else:
                after = () if instruction.opcode == "while" else calls
            pending += ((passed, after) for passed in _passed_on(hlo, value, instruction))


def _is_layer(hlo: Hlo, value: Value, instruction: Instruction) -> bool:
    return _of_layers(hlo, value._replace(layers=1), instruction).layers > 1


def _passed_on(hlo: Hlo, value: Value, instruction: Instruction) -> Iterator[Value]:
    """Where an instruction hands a value on: as its result, or into what it calls."""
    after = value._replace(name=instruction.name)
    if instruction.opcode in MOVES | _SLICES | _GATHERS:
        yield after
    elif instruction.opcode == "get-tuple-element":
        if value.element in (None, instruction.element):
            yield after._replace(element=None)
    elif instruction.opcode == "tuple":
        for element, operand in enumerate(instruction.operands):
            if operand == value.name:
                yield after._replace(element=element)
    elif instruction.opcode == "while":
        yield from _parameters(hlo, instruction.called["body"][0], 0, value.element)
    elif instruction.opcode in _CALLS:
        (body,) = next(iter(instruction.called.values()))
        for number, operand in enumerate(instruction.operands):
            if operand == value.name:
                yield from _parameters(hlo, body, number, value.element)


def _parameters(hlo: Hlo, body: str, number: int, element: int | None) -> Iterator[Value]:
    for name in hlo.instructions(body):
        if hlo.instruction(body, name).parameter == number:
            yield Value(body, name, element)


def _updated(hlo: Hlo, value: Value) -> Iterator[Value]:
    """What a value is, before its instruction has updated it."""
    instruction = hlo.instruction(value.computation, value.name)
    if (number := _parameter_number(hlo, value)) is not None:
        for computation, caller in hlo.callers(value.computation):
            if (operand := _operand_for(value, number, caller)) is not None:
                yield Value(computation, operand, value.element)
    elif instruction.opcode in _CALLS or instruction.opcode in ("conditional", "while"):
        if instruction.opcode == "while":
            yield value._replace(name=instruction.operands[0])
        called = instruction.called.get("body") or [
            name for names in instruction.called.values() for name in names
        ]
        for body in called:
            yield Value(body, hlo.root(body).name, value.element)
    elif (moved := _moved(hlo, instruction, value.element, _GATHERS)) is not None:
        yield Value(value.computation, instruction.operands[moved[0]], moved[1])
    elif instruction.opcode == "dynamic-update-slice":
        yield from (Value(value.computation, name) for name in instruction.operands[:2])
    elif instruction.opcode not in PRODUCTS and instruction.results:
        size = prod(instruction.results[0].dims)
        for name in instruction.operands:
            results = hlo.instruction(value.computation, name).results
            if len(results) == 1 and prod(results[0].dims) == size:
                yield Value(value.computation, name)


def _local_source(hlo: Hlo, value: Value, through: frozenset[str]) -> Value:
    """Traced back within a computation, as far as it goes."""
    while (before := _step(hlo, value, through)) is not None:
        value = before
    return value


def _step(hlo: Hlo, value: Value, through: frozenset[str]) -> Value | None:
    """One instruction back; None if the value is computed there, or is a parameter."""
    found = hlo.instruction(value.computation, value.name)
    if found.opcode in _CALLS:
        return _into_call(hlo, value, found, through)
    if found.opcode in _SCALES:
        scaled = _scaled(hlo, value.computation, found) if found.opcode in through else None
        return None if scaled is None else value._replace(name=scaled, is_scaled=True)
    moved = _moved(hlo, found, value.element, through)
    if moved is None:
        return None
    operand, element = moved
    before = value._replace(name=found.operands[operand], element=element)
    return _of_layers(hlo, before, found) if found.opcode in _SLICES else before


def _moved(
    hlo: Hlo, found: Instruction, element: int | None, through: frozenset[str]
) -> tuple[int, int | None] | None:
    """The operand that an instruction only moves, or slices, and which element of it."""
    opcode = found.opcode
    if opcode in through and not opcode.endswith("-done"):
        return element or 0, None  # it may gather several arrays at once
    if opcode in MOVES or opcode in _SLICES or opcode in through:
        # An asynchronous copy begins with a tuple of what goes in and what comes out.
        return 0, None if opcode == "copy-start" else element
    if opcode == "get-tuple-element":
        return 0, found.element
    if opcode == "tuple" and element is not None:
        return element, None
    if opcode == "while" and element is not None and _is_invariant(hlo, found, element):
        return 0, element
    return None


def _scaled(hlo: Hlo, computation: str, found: Instruction) -> str | None:
    """The operand that an instruction scales by what is broadcast to it."""
    sources = (source_of(hlo, Value(computation, name)).name for name in found.operands)
    opcodes = [hlo.instruction(computation, source).opcode for source in sources]
    own = [
        operand
        for operand, opcode in zip(found.operands, opcodes, strict=True)
        if opcode not in ("broadcast", "constant")
    ]
    return own[0] if len(own) == 1 else None


def _of_layers(hlo: Hlo, whole: Value, found: Instruction) -> Value:
    """The array that a slice is of. What does not cut to 1 is a part for a device to go on with."""
    dims = hlo.instruction(whole.computation, whole.name).results[0].dims
    cut = zip(dims, found.results[0].dims, strict=True)
    return whole._replace(layers=whole.layers * prod(size for size, part in cut if part == 1))


def _into_call(hlo: Hlo, value: Value, call: Instruction, through: frozenset[str]) -> Value | None:
    """The operand that a called computation only moves."""
    bodies = [name for names in call.called.values() for name in names]
    if len(bodies) != 1:
        return None
    root = Value(bodies[0], hlo.root(bodies[0]).name, value.element)
    inner = _local_source(hlo, root, through)
    number = _parameter_number(hlo, inner)
    if number is None:
        return None
    layers = value.layers * inner.layers
    is_scaled = value.is_scaled or inner.is_scaled
    return Value(value.computation, call.operands[number], inner.element, layers, is_scaled)


def _lifted(
    hlo: Hlo, value: Value, number: int, computation: str, caller: Instruction
) -> Value | None:
    """What the caller gives for a parameter of the computation that it calls."""
    if caller.opcode == "while" and (
        value.element is None or not _is_invariant(hlo, caller, value.element)
    ):
        return None
    operand = _operand_for(value, number, caller)
    return None if operand is None else value._replace(computation=computation, name=operand)


def _operand_for(value: Value, number: int, caller: Instruction) -> str | None:
    """The operand that a caller gives for a parameter; None where it is not of the same form."""
    if caller.opcode == "while":
        return caller.operands[0]
    if caller.opcode == "conditional":
        branches = [name for names in caller.called.values() for name in names]
        return caller.operands[1 + branches.index(value.computation)]
    if caller.opcode in _CALLS or caller.opcode == "async-start":
        return caller.operands[number]
    return None


def _is_invariant(hlo: Hlo, loop: Instruction, element: int) -> bool:
    """Whether each trip of a loop hands on this element as it is."""
    (body,) = loop.called["body"]
    root = hlo.root(body)
    source = source_of(hlo, Value(body, root.name, element))
    is_parameter = _parameter_number(hlo, source) is not None
    return is_parameter and source.element == element and source.layers == 1


def _parameter_number(hlo: Hlo, value: Value) -> int | None:
    return hlo.instruction(value.computation, value.name).parameter


_ALIKE_AFTER: Final = ("all-gather", "all-reduce")
_APART_AFTER: Final = ("all-to-all", "collective-permute", "ragged-all-to-all", "reduce-scatter")
_NUMBER: Final = re.compile(r"-?\d+")


class _Along(NamedTuple):
    """How a value differs between devices."""

    axes: frozenset[str]
    is_number: bool = False
    """Whether it is the number of the device."""
    table: frozenset[str] | None = None
    """Of a constant with an entry for each device, the axes along which the entries differ."""


_ALIKE: Final = _Along(frozenset())
_Elements = tuple[_Along, ...]


class Variation:
    """The axes along which values differ.

    Args:
        hlo: The module.
        axis_sizes: Devices along each mesh axis, in the mesh's order.
        parameters: By number of a parameter of the module, the axes that cut it.
    """

    def __init__(
        self, hlo: Hlo, axis_sizes: Mapping[str, int], parameters: Mapping[int, frozenset[str]]
    ) -> None:
        self._hlo = hlo
        self._axis_sizes = axis_sizes
        self._parameters = parameters
        self._values: dict[str, dict[str, _Elements]] = {}

    def of(self, computation: str, names: Iterable[str]) -> frozenset[str]:
        """The axes along which some of these values differ."""
        values = self._of_module.get(computation, {})
        return frozenset().union(*(_union(values.get(name, ())).axes for name in names))

    @cached_property
    def _of_module(self) -> Mapping[str, Mapping[str, _Elements]]:
        count = self._hlo.counts[0]
        self._run(
            self._hlo.entry,
            [(_Along(self._parameters.get(number, frozenset())),) for number in range(count)],
        )
        return self._values

    def _run(self, computation: str, arguments: Sequence[_Elements]) -> _Elements:
        """What a computation makes of its arguments; earlier calls of it count as well."""
        values: dict[str, _Elements] = {}
        earlier = self._values.get(computation, {})
        for name in self._hlo.instructions(computation):
            instruction = self._hlo.instruction(computation, name)
            if instruction.parameter is not None:
                made = arguments[instruction.parameter]
            else:
                made = self._made(
                    instruction, [values[operand] for operand in instruction.operands]
                )
            values[name] = _both(made, earlier.get(name, made))
        self._values[computation] = values
        return values[self._hlo.root(computation).name]

    def _made(self, instruction: Instruction, operands: list[_Elements]) -> _Elements:
        """What an instruction makes."""
        if instruction.opcode in MOVES:
            return operands[0]
        if instruction.opcode == "get-tuple-element":
            element = instruction.element or 0
            return operands[0][element : element + 1] or (_union(operands[0]),)
        if instruction.opcode == "tuple":
            return tuple(map(_union, operands))
        if instruction.opcode == "while":
            return self._looped(instruction, operands[0])
        if instruction.opcode in ("call", "conditional", "fusion"):
            return self._called(instruction, operands)
        return (self._array(instruction, operands),) * max(1, len(instruction.results))

    def _array(self, instruction: Instruction, operands: list[_Elements]) -> _Along:
        """What an instruction makes that is not of a tuple, nor calls anything."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in ("partition-id", "replica-id"):
            return _Along(frozenset(self._axis_sizes), is_number=True)
        if opcode == "constant":
            return self._constant(instruction)
        if opcode == "dynamic-slice" and operands[1][0].is_number:
            table = operands[0][0].table
            if table is not None:
                return _Along(table)
        axes = _union([element for elements in operands for element in elements]).axes
        if opcode in _ALIKE_AFTER:
            axes -= self._group_axes(instruction)
        elif opcode in _APART_AFTER:
            axes |= self._group_axes(instruction)
        return _Along(axes)

    def _constant(self, instruction: Instruction) -> _Along:
        """A constant, which may have an entry for each device."""
        sizes = tuple(self._axis_sizes.values())
        entries = _NUMBER.findall(instruction.literal)
        if instruction.results[0].dims != (prod(sizes),) or len(entries) != prod(sizes):
            return _ALIKE
        table = np.array(entries).reshape(sizes)
        differ = (
            axis for i, axis in enumerate(self._axis_sizes) if (table != table.take([0], i)).any()
        )
        return _Along(frozenset(), table=frozenset(differ))

    def _looped(self, instruction: Instruction, before: _Elements) -> _Elements:
        """What a loop hands on, which goes in again."""
        (body,) = instruction.called["body"]
        while (after := _both(before, self._run(body, [before]))) != before:
            before = after
        return after

    def _called(self, instruction: Instruction, operands: list[_Elements]) -> _Elements:
        every = [element for elements in operands for element in elements]
        if instruction.opcode == "fusion" and not any(element.is_number for element in every):
            return (_Along(_union(every).axes),) * max(1, len(instruction.results))
        bodies = [name for names in instruction.called.values() for name in names]
        if instruction.opcode != "conditional":
            return self._run(bodies[0], operands)
        branches = [
            self._run(body, [operand]) for body, operand in zip(bodies, operands[1:], strict=True)
        ]
        return reduce(_both, branches)

    def _group_axes(self, instruction: Instruction) -> frozenset[str]:
        """The axes whose devices are all in one group of a collective."""
        groups = self._hlo.groups(instruction.attributes)
        axes = axes_of_groups(groups, self._axis_sizes)
        is_whole = len(groups[0]) == prod(self._axis_sizes[axis] for axis in axes)
        return frozenset(axes if is_whole else ())


def _union(elements: Sequence[_Along]) -> _Along:
    if len(elements) == 1:
        return elements[0]
    return _Along(frozenset().union(*(element.axes for element in elements)))


def _both(some: _Elements, others: _Elements) -> _Elements:
    """Elements that differ wherever one of two does."""
    if some == others:
        return some
    if len(some) != len(others):  # of tuples in tuples
        return (_union([*some, *others]),)
    return tuple(
        first if first == second else _Along(first.axes | second.axes)
        for first, second in zip(some, others, strict=True)
    )
