"""Parses instructions and computations of an optimized HLO module.

A computation is parsed once one of its instructions is asked for: texts have many megabytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import Final, NamedTuple


def _within_parentheses(depth: int) -> str:
    """Write the pattern of a text with pairs of parentheses in it, at most so deep."""
    inner = rf"(?:\({_within_parentheses(depth - 1)}\)[^()\n]*)*" if depth else ""
    return rf"[^()\n]*{inner}"


# Layouts, as in {1,0:T(8,128)S(1)}, have no small letters before their parentheses.
OPCODE: Final = re.compile(r" ([a-z][a-z0-9-]*)\(")
_LINE: Final = re.compile(
    rf"^ *(?:ROOT )?%?(\S+) = (.*?) ([a-z][a-z0-9-]*)\(({_within_parentheses(3)})\)(.*)",
    re.MULTILINE,
)
_SHAPE: Final = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
NAME: Final = re.compile(r"%([^\s,(){}]+)")
_HEADER: Final = re.compile(r"(?:ENTRY )?%?([^\s(]+) \(")
# A fixed beginning makes it fast; the attribute's name stands before it.
_CALLED: Final = re.compile(r"=\{?(%[^\s,)}]+(?:, ?%[^\s,)}]+)*)")
_NO_CALLS: Final = ("control-predecessors", "control-successors")
_OP_NAME: Final = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_INDEX: Final = re.compile(r"\bindex=(\d+)")
_DIMENSION: Final = re.compile(r"\bdimensions=\{(\d+)\}")


class Shape(NamedTuple):
    """Dtype of an array by XLA's name, such as bf16, and its dimensions on a device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Bits of an element; 0 for tokens."""
        digits = re.search(r"\d+", self.dtype)
        return int(digits[0]) if digits else 8 * (self.dtype == "pred")

    @property
    def elements(self) -> int:
        return prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the array; elements of less than a byte are packed."""
        return -(-prod(self.dims) * self.bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


class Instruction(NamedTuple):
    """Fields of a line of a computation."""

    name: str
    type: str
    """Text of the shapes of the results, with their layouts."""
    opcode: str
    literal: str
    """Text of the operands: of a parameter its number, of a constant its value."""
    attributes: str
    """Text behind the operands."""
    operands: Sequence[str]

    @property
    def results(self) -> tuple[Shape, ...]:
        """Shape of the result; of a tuple, of its arrays in order."""
        return shapes_in(self.type)

    @property
    def op_name(self) -> str | None:
        """JAX's name of the operation, which names its place in the user's functions."""
        match = _OP_NAME.search(self.attributes)
        return match and match[1].replace("\\", "")

    @property
    def dimension(self) -> int | None:
        """Number in the attribute `dimensions`, if it has just one."""
        return number(_DIMENSION, self.attributes)

    @property
    def element(self) -> int | None:
        """Index that get-tuple-element reads."""
        return number(_INDEX, self.attributes)

    @property
    def parameter(self) -> int | None:
        """Number of the parameter; None for other opcodes."""
        return int(self.literal) if self.opcode == "parameter" else None

    @property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of called computations by attribute, such as "body" or "calls"."""
        called = {}
        for match in _CALLED.finditer(self.attributes):
            key = self.attributes[self.attributes.rfind(" ", 0, match.start()) + 1 : match.start()]
            if key not in _NO_CALLS:
                called[key] = tuple(NAME.findall(match[1]))
        return called

    @property
    def callees(self) -> list[str]:
        """Names of all called computations."""
        return [name for names in self.called.values() for name in names]


class Computation:
    """Instructions of a computation by name, and the root."""

    def __init__(self, text: str, begin: int, end: int) -> None:
        header = _HEADER.match(text, begin)
        self.name = header[1] if header else ""
        self.end = end
        self._text = text
        self.begin = begin

    @cached_property
    def _instructions(self) -> Mapping[str, Instruction]:
        """Instructions by name, as they are scheduled."""
        matches = _LINE.finditer(self._text, self._text.find("\n", self.begin) + 1, self.end)
        return {line[1]: _instruction(line) for line in matches}

    def __getitem__(self, name: str) -> Instruction:
        return self._instructions[name]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self._instructions.values())

    @cached_property
    def root(self) -> Instruction:
        """Instruction whose result is the computation's."""
        return instruction_at(self._text, self._text.rfind("\n  ROOT ", self.begin, self.end) + 1)

    @cached_property
    def parameters(self) -> Sequence[Instruction]:
        """Parameters, by number."""
        return sorted(self.of_opcode("parameter"), key=lambda line: line.parameter or 0)

    def of_opcode(self, opcode: str) -> Iterator[Instruction]:
        """Yield the instructions of an opcode, the last first."""
        position = self.end
        while (position := self._text.rfind(f" {opcode}(", self.begin, position)) >= 0:
            line = instruction_at(self._text, position)
            if line.opcode == opcode:  # and it is not within some text
                yield line

    def matches(self, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """Yield what a pattern finds in the text of the computation."""
        return pattern.finditer(self._text, self.begin, self.end)

    @property
    def parameter_count(self) -> int:
        """Number of parameters that are arrays, by the header alone."""
        return self._text.count("[", self.begin, self._text.find(") -> ", self.begin))


def instruction_at(text: str, position: int) -> Instruction:
    """Parse the line at a position of a module's text."""
    begin, end = text.rfind("\n", 0, position) + 1, text.find("\n", position)
    line = _LINE.match(text, begin, end if end >= 0 else len(text))
    if line is None:
        raise ValueError(f"not an instruction of HLO: {text[begin : begin + 80]}")
    return _instruction(line)


def _instruction(line: re.Match[str]) -> Instruction:
    name, type_, opcode, literal, attributes = line.groups()
    operands = NAME.findall(literal) if "%" in literal else ()
    return Instruction(name, type_, opcode, literal, attributes, operands)


def number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return int(match[1]) if match else None


@lru_cache(maxsize=2**14)
def shapes_in(text: str) -> tuple[Shape, ...]:
    """Read the shapes that are written in a text, in order."""
    return tuple(
        Shape(dtype, tuple(int(size.removeprefix("<=")) for size in dims.split(",") if size))
        for dtype, dims in _SHAPE.findall(text)
    )


_KNOWN: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COPIES: Final = ("bitcast", "convert", "copy")
_MOST_COPIES: Final = 100


def trips(
    computations: Mapping[str, Computation], computation: Computation, loop: Instruction
) -> int | None:
    """Count the trips of a loop; None if its text does not tell.

    XLA for TPUs writes no count: there it is read of a loop that adds a constant to an index, which
    begins with one, until the index is no less than a constant.
    """
    if match := _KNOWN.search(loop.attributes):
        return int(match[1])
    condition, body = (computations[loop.called[key][0]] for key in ("condition", "body"))
    test = condition.root
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    index, bound = (_source(condition, name) for name in test.operands)
    first = _part(computation, _source(computation, loop.operands[0]), index.element)
    after = _part(body, body.root, index.element)
    if after is None or after.opcode != "add":
        return None
    steps = [_source(body, name) for name in after.operands]
    numbers = [
        _constant(line) for line in (bound, first, *steps) if line and line.element != index.element
    ]
    last, begin, step = numbers if len(numbers) == len(steps) + 1 else (None, None, None)
    if last is None or begin is None or not step or step < 0:
        return None
    return max(0, -((begin - last) // step))


def _source(computation: Computation, name: str) -> Instruction:
    """Find the instruction whose result is copied."""
    instruction = computation[name]
    for _ in range(_MOST_COPIES):
        if instruction.opcode not in _COPIES:
            break
        instruction = computation[instruction.operands[0]]
    return instruction


def _part(computation: Computation, line: Instruction, element: int | None) -> Instruction | None:
    """Find what makes an element of a tuple."""
    if line.opcode != "tuple" or element is None or element >= len(line.operands):
        return None
    return _source(computation, line.operands[element])


def _constant(line: Instruction) -> int | None:
    is_number = line.opcode == "constant" and re.fullmatch(r"-?\d+", line.literal)
    return int(line.literal) if is_number else None
