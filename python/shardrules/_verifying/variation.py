"""Along which mesh axes the values of an HLO module differ between devices.

A value differs along an axis if it is computed from an argument that the axis cuts, or from the
device's number, and no collective has made it the same since. Costs some ten microseconds per
instruction of the module, once. Must not know about plans.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, reduce
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardrules._verifying.dataflow import MOVES
from shardrules._verifying.hlo import axes_of_groups

if TYPE_CHECKING:
    from shardrules._verifying.hlo import Hlo, Instruction

__all__ = ["Variation"]

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
