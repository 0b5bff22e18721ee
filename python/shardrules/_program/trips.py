"""Counts the trips of loops: as XLA says, or from a loop's condition, first value and step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from shardrules._program.computation import Computation, Instruction

_KNOWN: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DIRECTION: Final = re.compile(r"direction=(\w+)")
_COPIES: Final = ("bitcast", "convert", "copy")
_MOST_COPIES: Final = 100
# Of `i < bound`: what is added to the bound, for the last trip.
_LAST: Final = {"LT": 0, "LE": 1, "NE": 0}


def trips(
    computations: Mapping[str, Computation], computation: Computation, loop: Instruction
) -> int | None:
    """Count the trips of a loop; None if its text does not tell."""
    if match := _KNOWN.search(loop.attributes):
        return int(match[1])
    condition, body = (computations[loop.called[key][0]] for key in ("condition", "body"))
    test = condition.root
    direction = _DIRECTION.search(test.attributes)
    last = _LAST.get(direction[1]) if direction else None
    if test.opcode != "compare" or last is None:
        return None
    index, bound = (
        _source(condition, test.operands[0]),
        _constant_value(condition, test.operands[1]),
    )
    if index.opcode != "get-tuple-element" or index.element is None or bound is None:
        return None
    first = _element(computation, loop.operands[0], index.element)
    step = _trip_step(body, index.element)
    if first is None or step is None or step <= 0:
        return None
    return max(0, -((first - bound - last) // step))


def _source(computation: Computation, name: str) -> Instruction:
    """Find the instruction whose result is copied."""
    instruction = computation[name]
    for _ in range(_MOST_COPIES):
        if instruction.opcode not in _COPIES:
            break
        instruction = computation[instruction.operands[0]]
    return instruction


def _constant_value(computation: Computation, name: str) -> int | None:
    source = _source(computation, name)
    is_number = source.opcode == "constant" and re.fullmatch(r"-?\d+", source.literal)
    return int(source.literal) if is_number else None


def _element(computation: Computation, name: str, element: int) -> int | None:
    """Return the constant that is an element of a tuple."""
    source = _source(computation, name)
    if source.opcode != "tuple" or element >= len(source.operands):
        return None
    return _constant_value(computation, source.operands[element])


def _trip_step(body: Computation, element: int) -> int | None:
    """Return what a trip adds to an element of the loop's state."""
    root = body.root
    if root.opcode != "tuple" or element >= len(root.operands):
        return None
    total = _source(body, root.operands[element])
    if total.opcode != "add":
        return None
    for value, step in (total.operands, total.operands[::-1]):
        source = _source(body, value)
        if source.opcode == "get-tuple-element" and source.element == element:
            return _constant_value(body, step)
    return None
