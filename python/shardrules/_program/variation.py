"""Finds along which mesh axes the values of an HLO module differ between devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, reduce
from math import prod
from typing import Final, NamedTuple

import numpy as np

from shardrules._program.computation import Instruction
from shardrules._program.dataflow import MOVES
from shardrules._program.hlo import Hlo

# Collectives after which values are equal along the axes of their groups, or differ along them.
_EQUALIZING: Final = ("all-gather", "all-reduce")
_SCATTERING: Final = ("all-to-all", "collective-permute", "ragged-all-to-all", "reduce-scatter")
_COMMUNICATES: Final = re.compile(r" (?:all-|reduce-scatter|collective-permute|partition-id)")
_NUMBER: Final = re.compile(r"-?\d+")


class _Along(NamedTuple):
    """Mesh axes along which a value differs between devices."""

    axes: frozenset[str]
    is_number: bool = False
    """True for the number of the device."""
    table: frozenset[str] | None = None
    """Axes along which the entries of a constant differ that has one for each device."""


_Elements = tuple[_Along, ...]


class Variation:
    """Mesh axes along which values differ between devices.

    A value differs along an axis if it is computed from an argument that the axis shards, or from
    the device's number, and no collective has made it equal since.
    """

    def __init__(
        self, hlo: Hlo, axis_sizes: Mapping[str, int], parameters: Mapping[int, frozenset[str]]
    ) -> None:
        self._hlo = hlo
        self._axis_sizes = axis_sizes
        self._parameters = parameters
        self._values: dict[str, dict[str, _Elements]] = {}
        self._visits = 0

    def of(self, computation: str, names: Iterable[str]) -> frozenset[str]:
        """Return the axes along which some of these values differ."""
        values = self._of_module.get(computation, {})
        return frozenset().union(*(_union(values.get(name, ())).axes for name in names))

    @cached_property
    def _of_module(self) -> Mapping[str, Mapping[str, _Elements]]:
        numbers = range(self._hlo[self._hlo.entry].counts[0])
        arguments = [(_Along(self._parameters.get(i, frozenset())),) for i in numbers]
        self._run(self._hlo.entry, arguments)
        return self._values

    def _run(self, computation: str, arguments: Sequence[_Elements]) -> _Elements:
        """Compute the result of a computation; earlier calls of it count as well."""
        self._visits += len(self._hlo[computation].lines)
        if self._visits > self._hlo.most_visits:
            raise LookupError(f"computations call each other too often: {computation}")
        values: dict[str, _Elements] = {}
        earlier = self._values.get(computation, {})
        for instruction in self._hlo[computation]:
            if instruction.parameter is not None:
                result = arguments[instruction.parameter]
            else:
                result = self._result(instruction, [values[name] for name in instruction.operands])
            values[instruction.name] = _either(result, earlier.get(instruction.name, result))
        self._values[computation] = values
        return values[self._hlo[computation].root.name]

    def _result(self, instruction: Instruction, operands: list[_Elements]) -> _Elements:
        opcode = instruction.opcode
        if opcode in MOVES:
            return operands[0]
        if opcode == "get-tuple-element":
            element = instruction.element or 0
            return operands[0][element : element + 1] or (_union(operands[0]),)
        if opcode == "tuple":
            return tuple(map(_union, operands))
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode in ("call", "conditional", "fusion", "fusion-start"):
            return self._call(instruction, operands)
        return (self._array(instruction, operands),) * max(1, len(instruction.results))

    def _array(self, instruction: Instruction, operands: list[_Elements]) -> _Along:
        """Compute the result of an instruction that makes no tuple, and calls nothing."""
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
        if opcode in _EQUALIZING:
            axes -= self._group_axes(instruction)
        elif opcode in _SCATTERING:
            axes |= self._group_axes(instruction)
        return _Along(axes)

    def _constant(self, instruction: Instruction) -> _Along:
        """Read a constant, which may have an entry for each device."""
        sizes = tuple(self._axis_sizes.values())
        if instruction.results[0].dims != (prod(sizes),):
            return _Along(frozenset())
        entries = _NUMBER.findall(instruction.literal)
        if len(entries) != prod(sizes):
            return _Along(frozenset())
        table = np.array(entries).reshape(sizes)
        axes = enumerate(self._axis_sizes)
        differing = {axis for i, axis in axes if (table != table.take([0], i)).any()}
        return _Along(frozenset(), table=frozenset(differing))

    def _loop(self, instruction: Instruction, before: _Elements) -> _Elements:
        """Run a loop until what goes in again differs no more."""
        (body,) = instruction.called["body"]
        while (after := _either(before, self._run(body, [before]))) != before:
            before = after
        return after

    def _call(self, instruction: Instruction, operands: list[_Elements]) -> _Elements:
        elements = [element for operand in operands for element in operand]
        bodies = instruction.callees
        if instruction.opcode.startswith("fusion") and not (
            any(element.is_number for element in elements)
            or self._hlo.contains(bodies[0], _COMMUNICATES)
        ):
            return (_Along(_union(elements).axes),) * max(1, len(instruction.results))
        if instruction.opcode != "conditional":
            return self._run(bodies[0], operands)
        branches = zip(bodies, operands[1:], strict=True)
        return reduce(_either, [self._run(body, [operand]) for body, operand in branches])

    def _group_axes(self, instruction: Instruction) -> frozenset[str]:
        """Return the axes whose devices are all in one group of a collective."""
        groups = self._hlo.groups(instruction.attributes)
        axes = groups.axes(self._axis_sizes)
        is_whole = len(groups[0]) == prod(self._axis_sizes[axis] for axis in axes)
        return frozenset(axes if is_whole else ())


def _union(elements: Sequence[_Along]) -> _Along:
    if len(elements) == 1:
        return elements[0]
    return _Along(frozenset().union(*(element.axes for element in elements)))


def _either(some: _Elements, others: _Elements) -> _Elements:
    """Join elements: they differ along the axes of both."""
    if some == others:
        return some
    if len(some) != len(others):  # of tuples in tuples
        return (_union([*some, *others]),)
    return tuple(
        first if first == second else _Along(first.axes | second.axes)
        for first, second in zip(some, others, strict=True)
    )
