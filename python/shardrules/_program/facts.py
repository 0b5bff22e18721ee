"""Four facts about the values of an HLO module, each a fixpoint over their graph.

Which argument a value is a copy of; which next state is made of it, element by element; along which
mesh axes it differs between devices; and along which of its dimensions the examples of a batch lie.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Final, NamedTuple

import numpy as np

from shardrules._program.computation import Instruction
from shardrules._program.values import Values

MOVES: Final = frozenset({"bitcast", "convert", "copy", "pad", "reshape", "transpose"})
SLICES: Final = frozenset({"dynamic-slice", "slice"})
# Move shards between devices: still a copy of the same array.
GATHERS: Final = frozenset({"all-gather", "collective-permute"})
REDUCTIONS: Final = ("all-reduce", "reduce-scatter")
JOINS: Final = frozenset({"conditional", "parameter", "while"})
"""Operations whose results are made of several alike: one of them, or one after another."""
PRODUCTS: Final = frozenset({"convolution", "custom-call", "dot"})
# With a broadcast or a constant, such as the scales and the zero points of quantized weights.
_SCALES: Final = frozenset({"add", "divide", "multiply", "subtract"})
_BROADCASTS: Final = frozenset({"broadcast", "constant"})
_MOST_MAKERS: Final = 40
_NOT_ELEMENTWISE: Final = PRODUCTS | {"gather", "reduce", "reduce-window", "sort"}
# Operands of which the result is made: the array that is updated, and what is written if all of it
# is as large as a part.
UPDATES: Final = {"dynamic-update-slice": 2, "scatter": 1}


class Origin(NamedTuple):
    """Parameter of the module that a value is a gathered, moved, converted or scaled copy of."""

    parameter: int
    layers: int = 1
    """Number of slices like the copied one; 1 for a copy of the whole array."""
    is_scaled: bool = False
    """True if the copy is times, or plus, something broadcast."""
    is_stacked: bool = False
    """True if slices of it are written into an array, as a loop keeps what it has used."""


_UNKNOWN: Final = Origin(-1)
_BROADCAST: Final = Origin(-2)
_COMPUTED: Final = Origin(-3)


def origins(values: Values) -> Sequence[Origin | None]:
    """Find the parameter that each value is a copy of; None if it is computed, or of several."""
    number_of = {node: number for number, node in enumerate(values.parameters)}

    def rule(node: int, facts: Sequence[Origin]) -> Origin:  # noqa: PLR0911
        if node in number_of:
            return Origin(number_of[node])
        opcode, sources = values.opcodes[node], [facts[one] for one in values.made_of[node]]
        if opcode in _BROADCASTS:
            return _BROADCAST
        if opcode in JOINS:
            return _met(sources)
        if opcode in MOVES or opcode in GATHERS:
            return sources[0]
        if opcode in SLICES:
            return _times(sources[0], layers_of(values, values.made_of[node][0], node))
        if opcode == "dynamic-update-slice":
            stack, part = sources[:2]
            layers = layers_of(values, node, values.made_of[node][1])
            part = _times(part, 1 / layers) if layers > 1 else _COMPUTED
            part = part if part.parameter < 0 else part._replace(is_stacked=True)
            return _met([stack, part])
        if opcode in _SCALES and _BROADCAST in sources:
            rest = [one for one in sources if one != _BROADCAST]
            if len(rest) == 1 and (rest[0].parameter >= 0 or rest[0] == _UNKNOWN):
                return rest[0]._replace(is_scaled=rest[0].parameter >= 0)
        return _COMPUTED

    facts = values.fixpoint(_UNKNOWN, rule)
    return [fact if fact.parameter >= 0 else None for fact in facts]


def layers_of(values: Values, whole: int, part: int) -> int:
    """Count the slices like a part; only dimensions cut to 1 select one."""
    dims = zip(values.shape(whole).dims, values.shape(part).dims, strict=False)
    return prod(size for size, cut in dims if cut == 1)


def _times(origin: Origin, layers: float) -> Origin:
    if origin.parameter < 0:
        return origin
    return origin._replace(layers=max(1, round(origin.layers * layers)))


def _met(sources: Iterable[Origin]) -> Origin:
    """Return the origin of what is one of several."""
    origins = set(sources) - {_UNKNOWN}
    if any(origin.is_stacked for origin in origins):
        origins.discard(_BROADCAST)  # of zeros, into which a loop writes
    return _UNKNOWN if not origins else origins.pop() if len(origins) == 1 else _COMPUTED


def updated_from(values: Values, node: int) -> Sequence[int]:
    """List what a value is made of element by element, or by an update of a part.

    A new state is made so from the old one and its gradient; the gradient, which comes of a
    product, is not made so from other arrays.
    """
    opcode, sources = values.opcodes[node], values.made_of[node]
    if opcode in JOINS or opcode.startswith(REDUCTIONS):
        return sources
    if opcode in MOVES or opcode in SLICES or opcode in GATHERS:
        return sources[:1]
    if opcode in UPDATES:
        return sources[: UPDATES[opcode]]
    if opcode in _NOT_ELEMENTWISE:
        return ()
    size = values.shape(node).elements
    return [one for one in sources if values.shape(one).elements == size]


def all_updated_from(values: Values, node: int, seen: Iterable[int] = ()) -> Iterator[int]:
    """Yield a value, and all that it is made of element by element, but for what is seen."""
    pending, mine = [node], set(seen)
    while pending:
        node = pending.pop()
        if node not in mine:
            mine.add(node)
            yield node
            pending += updated_from(values, node)


def source_of(values: Values, node: int) -> int:
    """Find the value that this is a moved or converted copy of."""
    while True:
        opcode, sources = values.opcodes[node], values.made_of[node]
        if opcode in JOINS:
            rest = [source for source in dict.fromkeys(sources) if source != node]
            if len(rest) != 1:
                return node
        elif opcode not in MOVES:
            return node
        node = sources[0]


def whole_source_of(values: Values, node: int) -> int:
    """Find the value that this is a copy of, also through what cuts padding off."""
    while True:
        node = source_of(values, node)
        sources = values.made_of[node]
        if values.opcodes[node] not in SLICES or layers_of(values, sources[0], node) > 1:
            return node
        node = sources[0]


def copies_of(values: Values, node: int) -> set[int]:
    """Find the moved, sliced and gathered copies of a value, and the value itself."""
    pending, copies = [node], {node}
    while pending:
        for user in values.used_by[pending.pop()]:
            opcode = values.opcodes[user]
            is_copy = opcode in MOVES or opcode in SLICES or opcode in GATHERS or opcode in JOINS
            if is_copy and user not in copies:
                copies.add(user)
                pending.append(user)
    return copies


def maker_of(values: Values, node: int, opcodes: Container[str]) -> int | None:
    """Find the operation of these of which a value is a moved, scaled or masked result."""
    for _ in range(_MOST_MAKERS):
        node = source_of(values, node)
        if values.opcodes[node] in opcodes:
            return node
        if values.opcodes[node] in SLICES:
            node = values.made_of[node][0]
            continue
        size = values.shape(node).elements
        arrays = [
            source
            for source in values.made_of[node]
            if values.shape(source).elements == size
            and values.shape(source).dtype != "pred"
            and values.opcodes[source] not in _BROADCASTS
        ]
        if len(arrays) != 1 or values.opcodes[node] in PRODUCTS:
            return None
        node = arrays[0]
    return None


def next_states(values: Values, pairs: Iterable[tuple[int, int]]) -> Mapping[int, int]:
    """Find the parameter whose next state is made of a value, element by element.

    Args:
        values: The graph.
        pairs: Each parameter, and the node of its next state; the first that is reached counts.
    """
    state_of: dict[int, int] = {}
    for parameter, output in pairs:
        pending = [output]
        while pending:
            node = pending.pop()
            if node not in state_of:
                state_of[node] = parameter
                pending += updated_from(values, node)
    return state_of


# Collectives after which values are equal along the axes of their groups, or differ along them.
_EQUALIZING: Final = ("all-gather", "all-reduce", "collective-broadcast")
_SCATTERING: Final = ("all-to-all", "collective-permute", "ragged-all-to-all", "reduce-scatter")
_NUMBER: Final = re.compile(r"-?\d+")


class _Along(NamedTuple):
    """Mesh axes along which a value differs between devices."""

    axes: frozenset[str]
    is_number: bool = False
    """True for the number of the device."""
    table: frozenset[str] | None = None
    """Axes along which the entries of a constant differ that has one for each device."""


_ALIKE: Final = _Along(frozenset())


class Variation:
    """Mesh axes along which values differ between devices.

    A value differs along an axis if it is computed from an argument that the axis shards, or from
    the device's number, and no collective has made it equal since.

    Args:
        values: The graph.
        axis_sizes: Devices along each mesh axis.
        parameters: Axes along which the module's parameters differ.
    """

    def __init__(
        self,
        values: Values,
        axis_sizes: Mapping[str, int],
        parameters: Mapping[int, frozenset[str]],
    ) -> None:
        self._values = values
        self._axis_sizes = axis_sizes
        self._axes_of = {values.parameters[number]: axes for number, axes in parameters.items()}

    def of(self, nodes: Iterable[int]) -> frozenset[str]:
        """Return the axes along which some of these values differ."""
        return frozenset().union(*(self._facts[node].axes for node in nodes))

    @cached_property
    def _facts(self) -> Sequence[_Along]:
        return self._values.fixpoint(_ALIKE, self._rule)

    def _rule(self, node: int, facts: Sequence[_Along]) -> _Along:  # noqa: PLR0911
        if node in self._axes_of:
            return _Along(self._axes_of[node])
        opcode = self._values.opcodes[node]
        sources = [facts[one] for one in self._values.made_of[node]]
        if opcode in MOVES:
            return sources[0]
        if opcode in ("partition-id", "replica-id"):
            return _Along(frozenset(self._axis_sizes), is_number=True)
        if opcode == "constant":
            return self._constant(self._values.lines[node])
        if opcode == "dynamic-slice" and sources[1].is_number and sources[0].table is not None:
            return _Along(sources[0].table)
        if opcode in JOINS and all(source == sources[0] for source in sources):
            return sources[0] if sources else _ALIKE
        axes = frozenset().union(*(source.axes for source in sources))
        if opcode in _EQUALIZING:
            axes -= self._group_axes(self._values.lines[node].attributes)
        elif opcode in _SCATTERING:
            axes |= self._group_axes(self._values.lines[node].attributes)
        return _Along(axes)

    def _constant(self, line: Instruction) -> _Along:
        """Read a constant, which may have an entry for each device."""
        sizes = tuple(self._axis_sizes.values())
        if line.results[0].dims != (prod(sizes),):
            return _ALIKE
        entries = _NUMBER.findall(line.literal)
        if len(entries) != prod(sizes):
            return _ALIKE
        table = np.array(entries).reshape(sizes)
        axes = enumerate(self._axis_sizes)
        differing = {axis for i, axis in axes if (table != table.take([0], i)).any()}
        return _Along(frozenset(), table=frozenset(differing))

    def _group_axes(self, attributes: str) -> frozenset[str]:
        """Return the axes whose devices are all in one group of a collective."""
        groups = self._values.hlo.groups(attributes)
        axes = groups.axes(self._axis_sizes)
        is_whole = len(groups[0]) == prod(self._axis_sizes[axis] for axis in axes)
        return frozenset(axes if is_whole else ())


class DimPart(NamedTuple):
    """Dimension of an array, or what is left of one that is joined with others.

    Where a batch of 8 and a sequence of 5 are joined to 40 indices, the sequence is those from 1 to
    5 in steps of 1, and the batch those from 5 to 40 in steps of 5.
    """

    dim: int
    step: int
    end: int


DimParts = frozenset[DimPart]


def batch_dims(values: Values, parameters: Mapping[int, Iterable[int]]) -> Sequence[DimParts]:
    """Find the dimensions of each value along which examples of the batch lie.

    Args:
        values: The graph.
        parameters: The dimensions of the module's parameters that are so.
    """
    nodes = {values.parameters[number]: dims for number, dims in parameters.items()}
    begin = {node: whole_dims(values, node, dims) for node, dims in nodes.items()}

    def rule(node: int, facts: Sequence[DimParts]) -> DimParts:
        parts = begin.get(node, facts[node])
        for place, source in enumerate(values.made_of[node]):
            if facts[source]:
                parts |= passed_dims(values, node, place, facts[source])
        return parts

    return values.fixpoint(frozenset(), rule)


def whole_dims(values: Values, node: int, dims: Iterable[int]) -> DimParts:
    """Return whole dimensions of an array as parts."""
    sizes = values.shape(node).dims
    return frozenset(DimPart(dim, 1, sizes[dim]) for dim in dims)


def passed_dims(values: Values, node: int, place: int, parts: DimParts) -> DimParts:
    """Return the dimensions of a result that are made of those of an operand."""
    source, opcode = values.made_of[node][place], values.opcodes[node]
    before, after = values.shape(source).dims, values.shape(node).dims
    if before == after and opcode in _ELEMENTWISE:
        return parts
    if opcode == "bitcast":  # it may stand for a transposition
        orders = values.order(source), values.order(node)
        return _regrouped(parts, _steps(before, orders[0]), _steps(after, orders[1]))
    if opcode == "reshape":
        return _regrouped(
            parts, _steps(before, range(len(before))), _steps(after, range(len(after)))
        )
    if opcode in _PASSED:
        places = _PASSED[opcode](values.lines[node], place, len(before), len(after))
    else:
        places = range(len(before)) if len(before) == len(after) else range(0)
    passed = (
        _resized(part, places[part.dim], before[part.dim], after[places[part.dim]])
        for part in parts
        if part.dim in places
    )
    return frozenset(part for part in passed if part is not None)


def summed_dims(line: Instruction, place: int) -> Sequence[int]:
    """List the dimensions of an operand over which a product sums."""
    if line.opcode == "dot" and place < _FACTORS:
        return _listed(line, ("lhs", "rhs")[place] + "_contracting_dims")
    if line.opcode == "convolution" and place < _FACTORS:
        return [i for i, label in enumerate(_labels(line)[place]) if label == "fi"[place]]
    return ()


_ELEMENTWISE: Final = frozenset(
    {"add", "convert", "copy", "divide", "multiply", "select", "subtract"}
)
_FACTORS: Final = 2
_Places = Mapping[int, int] | Sequence[int]
"""Dimension of a result by dimension of an operand."""
_Step = tuple[int, int]


def _resized(part: DimPart, dim: int, before: int, after: int) -> DimPart | None:
    """Return a part of a dimension of another size; None if a single index of it is left."""
    if before == after:
        return part._replace(dim=dim)
    if after == 1:
        return None
    return DimPart(dim, part.step, max(part.step, part.end * after // max(1, before)))


def _regrouped(parts: DimParts, before: Sequence[_Step], after: Sequence[_Step]) -> DimParts:
    """Find parts in an array of another shape, whose elements are in the same order."""
    regrouped = set()
    for part in parts:
        step = before[part.dim][0]
        begin, end = step * part.step, step * part.end
        for dim, (low, high) in enumerate(after):
            if begin < high and low < end:
                first, last = max(begin, low) // low, min(end, high) // low
                regrouped.add(DimPart(dim, first, max(first, last)))
    return frozenset(regrouped)


def _steps(dims: Sequence[int], order: Iterable[int]) -> Sequence[_Step]:
    """List the elements between neighbours of each dimension, and between those of the next one.

    Args:
        dims: Sizes.
        order: The dimensions, the outermost in memory first.
    """
    steps, after = [(1, 1)] * len(dims), prod(dims)
    for dim in order:
        steps[dim] = (max(1, after // max(1, dims[dim])), after)
        after = steps[dim][0]
    return steps


def _listed(line: Instruction, key: str) -> list[int]:
    """Read the numbers of an attribute such as dimensions={0,1}."""
    begin = line.attributes.find(f" {key}={{")
    if begin < 0:
        return []
    begin += len(key) + 3
    numbers = line.attributes[begin : line.attributes.find("}", begin)]
    return [int(number) for number in numbers.split(",") if number]


def _labels(line: Instruction) -> Sequence[str]:
    """Read the labels of a convolution's operands and of its result, such as b01f, 01io, b01f."""
    match = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.attributes)
    return match.groups() if match else ("", "", "")


def _of_broadcast(line: Instruction, _: int, __: int, ___: int) -> _Places:
    return _listed(line, "dimensions")


def _of_transpose(line: Instruction, _: int, __: int, ___: int) -> _Places:
    return {dim: i for i, dim in enumerate(_listed(line, "dimensions"))}


def _of_reduce(line: Instruction, _: int, rank: int, __: int) -> _Places:
    reduced = _listed(line, "dimensions")
    return {dim: i for i, dim in enumerate(_without(rank, reduced))}


def _of_dot(line: Instruction, place: int, rank: int, result: int) -> _Places:
    batch = _listed(line, ("lhs", "rhs")[place] + "_batch_dims")
    free = _without(rank, [*batch, *summed_dims(line, place)])
    first = result - len(free) if place else len(batch)
    return {dim: i for i, dim in enumerate(batch)} | {dim: first + i for i, dim in enumerate(free)}


def _of_convolution(line: Instruction, place: int, _: int, __: int) -> _Places:
    labels = _labels(line)
    if place >= _FACTORS:
        return {}
    # The kernel's outputs are the result's features; windows may be batches, as on TPU.
    kept = labels[place].replace("f" if place == 0 else "i", " ").replace("o", "f")
    places = {label: i for i, label in enumerate(labels[2])}
    return {dim: places[label] for dim, label in enumerate(kept) if label in places}


def _of_gather(line: Instruction, place: int, rank: int, result: int) -> _Places:
    offsets = _listed(line, "offset_dims")
    if place == 0:
        keys = ("collapsed_slice_dims", "operand_batching_dims")
        kept = _without(rank, [dim for key in keys for dim in _listed(line, key)])
        return dict(zip(kept, offsets, strict=False))
    match = re.search(r"index_vector_dim=(\d+)", line.attributes)
    kept = _without(rank, [int(match[1])] if match else [])
    return dict(zip(kept, _without(result, offsets), strict=False))


def _of_scatter(line: Instruction, place: int, rank: int, result: int) -> _Places:
    if place == 0:
        return range(rank)
    keys = ("inserted_window_dims", "input_batching_dims")
    kept = _without(result, [dim for key in keys for dim in _listed(line, key)])
    return {} if place == 1 else dict(zip(_listed(line, "update_window_dims"), kept, strict=False))


def _without(rank: int, dims: Sequence[int]) -> list[int]:
    return [dim for dim in range(rank) if dim not in dims]


_PASSED: Final[Mapping[str, Callable[[Instruction, int, int, int], _Places]]] = {
    "broadcast": _of_broadcast,
    "convolution": _of_convolution,
    "dot": _of_dot,
    "gather": _of_gather,
    "reduce": _of_reduce,
    "scatter": _of_scatter,
    "transpose": _of_transpose,
}
"""For other operations, dimensions are as they were."""
