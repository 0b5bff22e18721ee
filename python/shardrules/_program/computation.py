"""Parses instructions and computations of an optimized HLO module.

Lines are parsed only when they are asked for: texts have many megabytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import Final, NamedTuple

# Layouts, as in {1,0:T(8,128)S(1)}, have no small letters before their parentheses.
OPCODE: Final = re.compile(r" ([a-z][a-z0-9-]*)\(")
_NAMED: Final = re.compile(r"^ +(?:ROOT )?%?(\S+) = .*", re.MULTILINE)
_SHAPE: Final = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
NAME: Final = re.compile(r"%([^\s,(){}]+)")
_PARENTHESES: Final = re.compile(r"[()]")
HEADER: Final = re.compile(r"(?:ENTRY )?%?([^\s(]+) \(")
# A fixed beginning makes it fast; the attribute's name stands before it.
_CALLED: Final = re.compile(r"=\{?(%[^\s,)}]+(?:, ?%[^\s,)}]+)*)")
_NO_CALLS: Final = ("control-predecessors", "control-successors")
MULTIPLIES: Final = (" dot(", " convolution(", " custom-call(")
_OP_NAME: Final = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_INDEX: Final = re.compile(r"\bindex=(\d+)")
_DIMENSION: Final = re.compile(r"\bdimensions=\{(\d+)\}")
# The metadata of a Pallas kernel is on lines of its own.
_BROKEN: Final = re.compile(r'\n(?="|\}\})')


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
    opcode: str
    results: tuple[Shape, ...]
    """Shape of the result; of a tuple, of its arrays in order."""
    operands: tuple[str, ...]
    literal: str
    """Text of the operands: of a parameter its number, of a constant its value."""
    attributes: str
    """Text behind the operands."""

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
        header = HEADER.match(text, begin)
        self.name = header[1] if header else ""
        self.end = end
        self._text = text
        self.begin = begin
        self._parsed: dict[str, Instruction] = {}

    @cached_property
    def lines(self) -> Mapping[str, str]:
        """Lines by instruction name, as they are scheduled."""
        named = _NAMED.finditer(self._text, self._text.find("\n", self.begin), self.end)
        return {line[1]: line[0] for line in named}

    def __getitem__(self, name: str) -> Instruction:
        if name not in self._parsed:
            self._parsed[name] = parsed(self.lines[name])
        return self._parsed[name]

    def __iter__(self) -> Iterator[Instruction]:
        return map(self.__getitem__, self.lines)

    @cached_property
    def root(self) -> Instruction:
        """Instruction whose result is the computation's."""
        line = line_at(self._text, self._text.rfind("\n  ROOT ", self.begin, self.end) + 1)
        return self[name_of(line)]

    @cached_property
    def parameters(self) -> Sequence[Instruction]:
        """Parameters, in the order of the text."""
        return list(self.of_opcode("parameter"))

    def of_opcode(self, opcode: str) -> Iterator[Instruction]:
        """Yield the instructions of an opcode, in the order of the text."""
        position = self.begin
        while (position := self._text.find(f" {opcode}(", position + 1, self.end)) >= 0:
            line = self[name_of(line_at(self._text, position))]
            if line.opcode == opcode:  # and it is not within some text
                yield line

    def contains(self, pattern: re.Pattern[str]) -> bool:
        """Say whether a pattern is found in the text of the computation."""
        return pattern.search(self._text, self.begin, self.end) is not None

    def matches(self, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        return pattern.finditer(self._text, self.begin, self.end)

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of parameters and of results."""
        header = self._text[self.begin : self._text.find(" {\n", self.begin)]
        parameters, _, results = header.partition(") -> ")
        return parameters.count("["), results.count("[")


def parsed(line: str) -> Instruction:
    name, _, rest = line.partition(" = ")
    opcode = OPCODE.search(f" {rest}")
    if opcode is None:
        raise ValueError(f"not an instruction of HLO: {line[:80]}")
    begin = opcode.end() - 1
    end = rest.find(")", begin)
    if "(" in rest[begin:end]:  # most operands are names alone
        end, depth = begin, 1
        for parenthesis in _PARENTHESES.finditer(rest, begin):
            end, depth = parenthesis.start(), depth + (1 if parenthesis[0] == "(" else -1)
            if not depth:
                break
    literal, results = rest[begin:end], shapes_in(rest[: opcode.start()])
    operands = tuple(NAME.findall(literal))
    return Instruction(name_of(name), opcode[1], results, operands, literal, rest[end + 1 :])


def with_whole_lines(text: str) -> str:
    """Put each instruction on one line."""
    return _BROKEN.sub("", text) if "={\n" in text else text


def line_at(text: str, position: int) -> str:
    end = text.find("\n", position)
    return text[text.rfind("\n", 0, position) + 1 : end if end >= 0 else None]


def name_of(line: str) -> str:
    return line.partition(" = ")[0].strip().removeprefix("ROOT ").removeprefix("%")


def number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return int(match[1]) if match else None


@lru_cache(maxsize=2**12)
def shapes_in(text: str) -> tuple[Shape, ...]:
    """Read the shapes that are written in a text, in order."""
    return tuple(
        Shape(dtype, tuple(int(size.removeprefix("<=")) for size in dims.split(",") if size))
        for dtype, dims in _SHAPE.findall(text)
    )
