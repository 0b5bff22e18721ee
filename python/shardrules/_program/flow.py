"""Walks from a value of an HLO module to its uses, and back to what it is computed from.

Fusions are one step. A walk goes on through operations that keep the number of elements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Final, Literal, NamedTuple

from shardrules._program.computation import Instruction, Shape
from shardrules._program.dataflow import PRODUCTS, Value, source_of
from shardrules._program.hlo import Hlo

_MOST_STEPS: Final = 20_000
"""Values that a walk visits at most; what lies behind is not known."""
_MOST_MAKERS: Final = 20
_PADDED: Final = 8
"""Fraction of an array that padding may add to it, or a slice take away."""
_PRODUCT: Final = re.compile(r" (?:dot|convolution|custom-call)\(")
_LOOKUP: Final = re.compile(r" gather\(")
_SLICES: Final = re.compile(r" slice\(")
WRITTEN: Final = re.compile(r" (?:dynamic-update-slice|scatter)\(")
_SLICED: Final = re.compile(r" dynamic-slice\(")
_ADDED_ROWS: Final = re.compile(r" scatter\(")
_COLLECTIVES: Final = (
    "all-", "reduce-scatter", "collective-", "ragged-all-to-all", "async-",
)  # fmt: skip
_REDUCTIONS: Final = frozenset({"reduce", "reduce-window", "sort", "scatter", "gather"})

UseKind = Literal["product", "collective", "output", "rows", "other"]


class Consumer(NamedTuple):
    """Instruction at which a walk ends."""

    kind: UseKind
    value: Value
    """What is used: an operand of the instruction."""
    instruction: Instruction
    output: int | None = None
    """Index of the module's output."""


def is_product(hlo: Hlo, instruction: Instruction) -> bool:
    """Say whether an instruction is a matrix product or a convolution, or a fusion with one."""
    return instruction.opcode in PRODUCTS or _has(hlo, instruction, "", _PRODUCT)


def is_lookup(hlo: Hlo, instruction: Instruction) -> bool:
    """Say whether an instruction reads rows of a table by their numbers."""
    return _has(hlo, instruction, "gather", _LOOKUP)


def lookup_of(hlo: Hlo, value: Value) -> Instruction | None:
    """Find the instruction that reads rows of a table, of which a value is made.

    Between them rows are moved, scaled or masked, and not added to others.
    """
    return _maker(hlo, value, partial(is_lookup, hlo))


def product_of(hlo: Hlo, value: Value) -> Instruction | None:
    """Find the product of which a value is a moved, scaled or masked result."""
    return _maker(hlo, value, partial(is_product, hlo))


def is_slice_of_whole(hlo: Hlo, value: Value, count: int, differs: Callable[[Value], bool]) -> bool:
    """Say whether each device takes its part of an array that it has whole."""
    value = source_of(hlo, value)
    line = hlo[value.computation][value.name]
    if not _has(hlo, line, "dynamic-slice", _SLICED):
        return False
    size = count * elements(hlo, value)
    wholes = (Value(value.computation, name) for name in line.operands)
    return any(elements(hlo, whole) == size and not differs(whole) for whole in wholes)


def is_summed(hlo: Hlo, use: Consumer, begin: int, end: int) -> bool:
    """Say whether a product sums over a dimension of what it uses.

    Args:
        hlo: The module.
        use: The use of an array by the product.
        begin: Elements from one index of the dimension to the next, in row-major order.
        end: The same, from the first index of the next outer dimension to its second.
    """
    computation, product = hlo[use.value.computation], use.instruction
    names = {use.value.name}
    if product.opcode == "fusion":
        place = product.operands.index(use.value.name)
        computation = hlo[product.callees[0]]
        inner = next((line for line in computation.executed if line.opcode == "dot"), None)
        if inner is None:
            return False  # a convolution, of which this is not known
        product = inner
        sources = {
            name: computation[source_of(hlo, Value(computation.name, name)).name].parameter
            for name in product.operands
        }
        names = {name for name, parameter in sources.items() if parameter == place}
    for side, name in zip(("lhs", "rhs"), product.operands, strict=False):
        match = re.search(rf"{side}_contracting_dims={{([\d,]*)}}", product.attributes)
        if name in names and match:
            dims = computation[name].results[0].dims
            strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
            numbers = [int(number) for number in match[1].split(",") if number]
            if any(strides[i] <= begin < end <= strides[i] * dims[i] for i in numbers):
                return True
    return False


def is_written_in_part(hlo: Hlo, line: Instruction) -> bool:
    """Say whether an instruction writes a part of an array, and keeps the rest."""
    return line.opcode == "scatter" or _has(hlo, line, "dynamic-update-slice", WRITTEN)


def whole_of_piece(hlo: Hlo, piece: Value) -> Value:
    """Return the array that a piece is sliced from, or else the piece."""
    line = hlo[piece.computation][piece.name]
    if _has(hlo, line, "slice", _SLICES):
        for name in line.operands:
            whole = source_of(hlo, Value(piece.computation, name))
            if elements(hlo, whole) > elements(hlo, piece):
                return whole
    return piece


def _maker(hlo: Hlo, value: Value, is_maker: Callable[[Instruction], bool]) -> Instruction | None:
    computation = hlo[value.computation]
    for _ in range(_MOST_MAKERS):
        value = source_of(hlo, value)
        instruction = computation[value.name]
        if is_maker(instruction):
            return instruction
        size = elements(hlo, value)
        arrays = [
            name
            for name in instruction.operands
            if computation[name].results
            and computation[name].results[0].dtype != "pred"
            and elements(hlo, Value(value.computation, name)) == size
            and computation[name].opcode not in ("broadcast", "constant")
        ]
        if len(arrays) != 1 or instruction.opcode in PRODUCTS:
            return None
        value = Value(value.computation, arrays[0])
    return None


def _has(hlo: Hlo, instruction: Instruction, opcode: str, pattern: re.Pattern[str]) -> bool:
    """Say whether an instruction is of an opcode, or a fusion with one of a pattern."""
    if instruction.opcode == "fusion":
        return hlo.contains(instruction.callees[0], pattern)
    return instruction.opcode == opcode


def whole_of_pieces(hlo: Hlo, pieces: Value, count: int) -> Value:
    """Return the array that the pieces of an all-to-all are concatenated to; else the first one."""
    computation = hlo[pieces.computation]
    elements_of = [computation[name] for name in computation.users(pieces.name)]
    users = [set(computation.users(piece.name)) for piece in elements_of]
    whole = count * elements(hlo, pieces._replace(element=0))
    for name in set.intersection(*users) if users else ():
        if computation[name].results[0].elements == whole:
            return pieces._replace(name=name)
    return pieces._replace(element=0)


def uses(hlo: Hlo, value: Value, is_end: Callable[[Value], bool]) -> Iterator[Consumer]:
    """Yield the instructions in which a value, or what is made of it by element, ends."""
    size = elements(hlo, value)
    pending, seen = [value], {value}
    while pending and len(seen) < _MOST_STEPS:
        for step in _steps(hlo, pending.pop(), size):
            if isinstance(step, Consumer):
                yield step
            elif step not in seen:
                seen.add(step)
                if not is_end(step):
                    pending.append(step)


def elements(hlo: Hlo, value: Value) -> int:
    return shape_at(hlo, value).elements


def shape_at(hlo: Hlo, value: Value) -> Shape:
    return hlo[value.computation][value.name].results[value.element or 0]


def _steps(hlo: Hlo, value: Value, size: int) -> Iterator[Value | Consumer]:
    computation = hlo[value.computation]
    if value.name == computation.root.name:
        yield from _out_of(hlo, value, computation.root)
    for name in computation.users(value.name):
        user = computation[name]
        yield from _through(hlo, value, user, size)


def _out_of(hlo: Hlo, value: Value, root: Instruction) -> Iterator[Value | Consumer]:
    """Yield where the result of a computation goes: to its caller, and around a loop."""
    if value.computation == hlo.entry:
        yield Consumer("output", value, root, value.element or 0)
        return
    for name, caller in hlo.callers(value.computation):
        if caller.opcode == "while" and value.computation in caller.called.get("body", ()):
            yield from _parameters(hlo, value.computation, 0, value.element)
        if caller.opcode in ("while", "call", "conditional", "async-start"):
            yield Value(name, caller.name, value.element)


def _through(hlo: Hlo, value: Value, user: Instruction, size: int) -> Iterator[Value | Consumer]:
    opcode = user.opcode
    after = Value(value.computation, user.name)
    places = [i for i, operand in enumerate(user.operands) if operand == value.name]
    if opcode == "tuple":
        yield from (after._replace(element=i) for i in places)
    elif opcode == "get-tuple-element":
        if value.element in (None, user.element):
            yield after
    elif opcode in ("while", "call", "conditional"):
        for computation, number in _bodies(user, places):
            yield from _parameters(hlo, computation, number, value.element)
    elif opcode.endswith("-done"):
        # A copy's start has its source beside the result; its end has the result alone.
        yield after._replace(element=value.element if len(user.results) > 1 else None)
    elif opcode.startswith(_COLLECTIVES):
        yield Consumer("collective", value, user)
    elif is_product(hlo, user):
        yield Consumer("product", value, user)
    elif _has(hlo, user, "scatter", _ADDED_ROWS):
        yield Consumer("rows", value, user)
    else:
        yield from _elementwise_uses(value, user, size)


def _bodies(caller: Instruction, places: list[int]) -> Iterator[tuple[str, int]]:
    """Yield the computations, and the numbers of their parameters, that get these operands."""
    if caller.opcode == "while":
        yield caller.called["body"][0], 0
    elif caller.opcode == "call":
        yield from ((caller.callees[0], place) for place in places)
    else:
        yield from ((caller.callees[place - 1], 0) for place in places if place)


def _elementwise_uses(value: Value, user: Instruction, size: int) -> Iterator[Value | Consumer]:
    is_tuple = len(user.results) > 1
    alike = [
        i for i, shape in enumerate(user.results) if abs(shape.elements - size) <= size // _PADDED
    ]
    if user.opcode in _REDUCTIONS or not alike:
        yield Consumer("other", value, user)
    for i in alike:
        yield Value(value.computation, user.name, i if is_tuple else None)


def _parameters(hlo: Hlo, computation: str, number: int, element: int | None) -> Iterator[Value]:
    for inner in hlo[computation].parameters:
        if inner.parameter == number:
            yield Value(computation, inner.name, element)
