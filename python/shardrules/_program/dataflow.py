"""Follows values through an HLO module, from definitions to uses and back."""

from __future__ import annotations

from collections.abc import Container, Iterator
from math import prod
from typing import Final, NamedTuple

from shardrules._program.computation import Instruction
from shardrules._program.hlo import Hlo

MOVES: Final = frozenset({
    "bitcast", "convert", "copy", "copy-done", "copy-start", "fusion-done", "optimization-barrier",
    "pad", "reshape", "transpose",
})  # fmt: skip
_SLICES: Final = frozenset({"dynamic-slice", "slice"})
# Move shards between devices: still a copy of the same array.
_GATHERS: Final = frozenset({
    "all-gather", "all-gather-done", "all-gather-start",
    "collective-permute", "collective-permute-done", "collective-permute-start",
})  # fmt: skip
# With a broadcast or a constant, such as the scales and the zero points of quantized weights.
_SCALES: Final = frozenset({"add", "divide", "multiply", "subtract"})
# An asynchronous fusion has the elements of its results, as its end has them.
_CALLS: Final = frozenset({"call", "fusion", "fusion-start"})
# Of several arrays at once, each its own.
REDUCTIONS: Final = ("all-reduce", "reduce-scatter")
PRODUCTS: Final = frozenset({"convolution", "custom-call", "dot"})
_NOT_ELEMENTWISE: Final = PRODUCTS | {"gather", "reduce", "reduce-window", "sort"}
# The array that is updated, and what is written, if all of it is as large as a part.
_UPDATES: Final = {"dynamic-update-slice": 2, "scatter": 1}
_PASSING: Final = MOVES | _GATHERS | _CALLS | {"get-tuple-element", "tuple", "while"}


class Value(NamedTuple):
    """Result of an instruction, or an element of it."""

    computation: str
    name: str
    element: int | None = None
    """Index into a tuple."""
    layers: int = 1
    """Number of slices like the one traced back: the product of dimensions cut to 1."""
    is_scaled: bool = False
    """True if the value traced back is this times, or plus, something broadcast."""


class _Site(NamedTuple):
    """Operand of an instruction."""

    computation: str
    name: str
    operand: str


class ValueUse(NamedTuple):
    """Instruction that uses a value, or a moved, sliced or gathered copy of it."""

    opcode: str
    site: _Site
    """Operand of the instruction, or of the fusion that it is in."""
    is_layer: bool
    """True for a slice such as a layer of a stack."""


class Origin(NamedTuple):
    """Parameter of the module that a value is a copy of."""

    parameter: int
    layers: int
    """Number of slices like the copied one; 1 for a copy of the whole array."""
    is_scaled: bool = False


def origin_of(hlo: Hlo, value: Value) -> Origin | None:
    """Find the parameter that the value is a gathered, moved, converted or scaled copy of.

    None if it is computed, or has several origins in different calls or trips of a loop.
    """
    for _ in range(len(hlo.computations) + 1):
        value = _local_source(hlo, value, through=_GATHERS | _SCALES)
        number = _definition(hlo, value).parameter
        if number is None:
            return None
        if value.computation == hlo.entry:
            return Origin(number, value.layers, value.is_scaled)
        callers = list(hlo.callers(value.computation))
        if len(callers) != 1:
            return None
        computation, caller = callers[0]
        is_varied = caller.opcode == "while" and (
            value.element is None or not _is_invariant(hlo, caller, value.element)
        )
        operand = None if is_varied else _argument(value, number, caller)
        if operand is None:
            return None
        value = value._replace(computation=computation, name=operand)
    raise LookupError(f"{value.computation} calls itself")


def source_of(hlo: Hlo, value: Value) -> Value:
    """Find the value of the same computation that this is a moved or converted copy of.

    An asynchronous gather stands for its start.
    """
    source = _local_source(hlo, value, through=frozenset())
    definition = _definition(hlo, source)
    is_done = definition.opcode == "all-gather-done"
    return source._replace(name=definition.operands[0]) if is_done else source


def output_values(hlo: Hlo) -> Iterator[Value]:
    """Yield for each output of the module the value that it is a copy of."""
    root = hlo[hlo.entry].root
    names = root.operands if root.opcode == "tuple" else (root.name,)
    return (source_of(hlo, Value(hlo.entry, name)) for name in names)


def held_by_loops(hlo: Hlo, computation: str) -> set[Value]:
    """Find the values that loops of a computation keep in memory while they run."""
    names = [name for name, line in hlo[computation].lines.items() if " while(" in line]
    loops = [loop for loop in map(hlo[computation].__getitem__, names) if loop.opcode == "while"]
    return {
        source_of(hlo, Value(computation, loop.operands[0], element))
        for loop in loops
        for element in range(len(loop.results))
    }


def updated_values(hlo: Hlo, value: Value, seen: Container[Value]) -> Iterator[Value]:
    """Yield a value, and what it is made of element by element, or by an update of a part.

    A new state is made so from the old one and its gradient; the gradient, which comes of a
    product, is not made so from other arrays.
    """
    pending, mine = [value], set()
    while pending:
        value = pending.pop()
        if value in mine or value in seen:
            continue
        mine.add(value)
        yield value
        pending += _before_update(hlo, value)


def is_made_from(hlo: Hlo, value: Value, parameter: int) -> bool:
    """Say whether a value is a parameter of the module, updated by element or in part."""
    return any(
        source.computation == hlo.entry and _definition(hlo, source).parameter == parameter
        for source in updated_values(hlo, value, ())
    )


def value_uses(hlo: Hlo, value: Value) -> Iterator[ValueUse]:
    """Yield the uses of a value, in loops and fusions too; slices of it are uses as well."""
    pending: list[tuple[Value, tuple[_Site, ...]]] = [(value, ())]
    seen = set()
    while pending:
        place = pending.pop()
        if place in seen:
            continue
        seen.add(place)
        value, calls = place
        computation = hlo[value.computation]
        if calls and value.name == computation.root.name:
            *outer, call = calls
            pending.append((Value(call.computation, call.name, value.element), tuple(outer)))
        for user in computation.users(value.name):
            instruction = computation[user]
            opcode = instruction.opcode
            inner = (*calls, _Site(value.computation, user, value.name))
            if opcode in _SLICES:
                layers = _sliced(hlo, value._replace(layers=1), instruction).layers
                yield ValueUse(opcode, inner[0], is_layer=layers > 1)
            elif opcode not in _PASSING:
                yield ValueUse(opcode, inner[0], is_layer=False)
            after = inner if opcode in _CALLS else () if opcode == "while" else calls
            pending += ((passed, after) for passed in _passed_on(hlo, value, instruction))


def _passed_on(hlo: Hlo, value: Value, instruction: Instruction) -> Iterator[Value]:
    """Yield the value behind an instruction that moves it, or inside what it calls."""
    opcode = instruction.opcode
    after = value._replace(name=instruction.name)
    places = [i for i, operand in enumerate(instruction.operands) if operand == value.name]
    if opcode in MOVES | _SLICES | _GATHERS:
        yield after
    elif opcode == "get-tuple-element":
        if value.element in (None, instruction.element):
            yield after._replace(element=None)
    elif opcode == "tuple":
        yield from (after._replace(element=element) for element in places)
    elif opcode in _CALLS or opcode == "while":
        body = instruction.called["body"][0] if opcode == "while" else instruction.callees[0]
        numbers = [0] if opcode == "while" else places
        for inner in hlo[body]:
            if inner.parameter in numbers:
                yield Value(body, inner.name, value.element)


def _before_update(hlo: Hlo, value: Value) -> Iterator[Value]:
    """Yield the values that the definition of a value updates."""
    computation = hlo[value.computation]
    definition = computation[value.name]
    if (number := definition.parameter) is not None:
        for name, caller in hlo.callers(value.computation):
            if (operand := _argument(value, number, caller)) is not None:
                yield Value(name, operand, value.element)
    elif definition.opcode in _CALLS or definition.opcode in ("conditional", "while"):
        if definition.opcode == "while":
            yield value._replace(name=definition.operands[0])
        for body in definition.called.get("body") or definition.callees:
            yield Value(body, hlo[body].root.name, value.element)
    elif (moved := _moved_value(hlo, definition, value.element, _GATHERS)) is not None:
        yield Value(value.computation, definition.operands[moved[0]], moved[1])
    elif definition.opcode.startswith(REDUCTIONS):
        # The end of an asynchronous sum has the elements of its start, which has those of operands.
        is_done = definition.opcode.endswith("-done")
        number, element = (0, value.element) if is_done else (value.element or 0, None)
        yield Value(value.computation, definition.operands[number], element)
    elif definition.opcode in _UPDATES:
        names = definition.operands[: _UPDATES[definition.opcode]]
        yield from (Value(value.computation, name) for name in names)
    elif definition.opcode not in _NOT_ELEMENTWISE and definition.results:
        size = prod(definition.results[0].dims)
        for name in definition.operands:
            results = computation[name].results
            if len(results) == 1 and prod(results[0].dims) == size:
                yield Value(value.computation, name)


def _definition(hlo: Hlo, value: Value) -> Instruction:
    return hlo[value.computation][value.name]


def _local_source(hlo: Hlo, value: Value, through: frozenset[str]) -> Value:
    """Trace a value back within its computation, as far as it goes."""
    for _ in range(len(hlo[value.computation].lines) + 1):
        before = _step_back(hlo, value, through)
        if before is None:
            return value
        value = before
    raise LookupError(f"{value.name} is made of itself")


def _step_back(hlo: Hlo, value: Value, through: frozenset[str]) -> Value | None:
    """Go one instruction back; None from a parameter, or where the value is computed."""
    definition = _definition(hlo, value)
    if definition.opcode in _CALLS:
        return _through_call(hlo, value, definition, through)
    if definition.opcode in _SCALES:
        is_through = definition.opcode in through
        scaled = _scaled_value(hlo, value.computation, definition) if is_through else None
        return None if scaled is None else value._replace(name=scaled, is_scaled=True)
    moved = _moved_value(hlo, definition, value.element, through)
    if moved is None:
        return None
    operand, element = moved
    before = value._replace(name=definition.operands[operand], element=element)
    return _sliced(hlo, before, definition) if definition.opcode in _SLICES else before


def _moved_value(
    hlo: Hlo, definition: Instruction, element: int | None, through: frozenset[str]
) -> tuple[int, int | None] | None:
    """Find the operand that an instruction only moves, or slices, and the element of it."""
    opcode = definition.opcode
    if opcode in through and not opcode.endswith("-done"):
        return element or 0, None  # it may gather several arrays at once
    if opcode in MOVES or opcode in _SLICES or opcode in through:
        # An asynchronous copy begins with a tuple of its operand and its result.
        return 0, None if opcode == "copy-start" else element
    if opcode == "get-tuple-element":
        return 0, definition.element
    if opcode == "tuple" and element is not None:
        return element, None
    if opcode == "while" and element is not None and _is_invariant(hlo, definition, element):
        return 0, element
    return None


def _scaled_value(hlo: Hlo, computation: str, definition: Instruction) -> str | None:
    """Find the operand that an instruction scales by a broadcast or a constant."""
    operands = [
        name
        for name in definition.operands
        if _definition(hlo, source_of(hlo, Value(computation, name))).opcode
        not in ("broadcast", "constant")
    ]
    return operands[0] if len(operands) == 1 else None


def _sliced(hlo: Hlo, array: Value, piece: Instruction) -> Value:
    """Count in the layers of an array that is sliced; only dimensions cut to 1 select one."""
    dims = _definition(hlo, array).results[0].dims
    pairs = zip(dims, piece.results[0].dims, strict=True)
    return array._replace(layers=array.layers * prod(size for size, part in pairs if part == 1))


def _through_call(
    hlo: Hlo, value: Value, call: Instruction, through: frozenset[str]
) -> Value | None:
    """Find the operand that a called computation only moves."""
    if len(call.callees) != 1:
        return None
    (body,) = call.callees
    inner = _local_source(hlo, Value(body, hlo[body].root.name, value.element), through)
    number = _definition(hlo, inner).parameter
    if number is None:
        return None
    layers = value.layers * inner.layers
    is_scaled = value.is_scaled or inner.is_scaled
    return Value(value.computation, call.operands[number], inner.element, layers, is_scaled)


def _argument(value: Value, number: int, caller: Instruction) -> str | None:
    """Find the operand that a caller passes as a parameter; None if forms differ."""
    if caller.opcode == "while":
        return caller.operands[0]
    if caller.opcode == "conditional":
        return caller.operands[1 + caller.callees.index(value.computation)]
    if caller.opcode in _CALLS or caller.opcode == "async-start":
        return caller.operands[number]
    return None


def _is_invariant(hlo: Hlo, loop: Instruction, element: int) -> bool:
    """Say whether each trip of a loop returns this element as it is."""
    (body,) = loop.called["body"]
    source = source_of(hlo, Value(body, hlo[body].root.name, element))
    is_parameter = _definition(hlo, source).parameter is not None
    return is_parameter and source.element == element and source.layers == 1
