"""Facts about the values of an HLO module, each read in one place from their graph.

Which argument a value is a copy of; which next state is made of it, element by element; and in
which operations it ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Final, NamedTuple, get_args

from shardrules._program.computation import Instruction
from shardrules._program.hlo import CollectiveOpcode
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
_REDUCED: Final = frozenset({"reduce", "reduce-window", "sort"})
_NOT_ELEMENTWISE: Final = PRODUCTS | _REDUCED | {"gather"}
# Operands of which the result is made: the array that is updated, and what is written if all of it
# is as large as a part.
UPDATES: Final = {"dynamic-update-slice": 2, "scatter": 1}
_MOST_STEPS: Final = 20_000
"""Values that a walk to uses visits at most; what lies behind is not known."""
_PADDED: Final = 8
"""Fraction of an array that padding may add to it, or a slice take away."""


class Origin(NamedTuple):
    """Parameter of the module that a value is a gathered, moved, converted or scaled copy of."""

    parameter: int
    layers: int = 1
    """Number of slices like the copied one; 1 for a copy of the whole array."""
    is_scaled: bool = False
    """True if the copy is times, or plus, something broadcast."""


_UNKNOWN: Final = Origin(-1)
_BROADCAST: Final = Origin(-2)
_COMPUTED: Final = Origin(-3)


class Use(NamedTuple):
    """Operation at which a walk from a value ends."""

    opcode: str
    """"output" of what the module returns."""
    value: int
    """The operand."""
    user: int
    """The result; of an output the operand itself."""
    dim: int | None
    """Where the dimension that the walk began with is in the operand; None if it is not known."""


class Facts:
    """Facts about the values of a module, each computed when it is asked for."""

    def __init__(self, values: Values) -> None:
        self._values = values

    @cached_property
    def origins(self) -> Sequence[Origin | None]:
        """Parameter that each value is a copy of; None if it is computed, or of several."""
        values = self._values
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
                return _times(sources[0], self.layers(values.made_of[node][0], node))
            if opcode == "dynamic-update-slice":
                layers = self.layers(node, values.made_of[node][1])
                part = _times(sources[1], 1 / layers) if layers > 1 else _COMPUTED
                return _met([sources[0], part])
            if opcode in _SCALES and _BROADCAST in sources:
                rest = [one for one in sources if one != _BROADCAST]
                if len(rest) == 1 and (rest[0].parameter >= 0 or rest[0] == _UNKNOWN):
                    return rest[0]._replace(is_scaled=rest[0].parameter >= 0)
            return _COMPUTED

        facts = values.fixpoint(_UNKNOWN, rule)
        return [fact if fact.parameter >= 0 else None for fact in facts]

    def layers(self, whole: int, part: int) -> int:
        """Count the slices like a part; only dimensions cut to 1 select one."""
        shapes = self._values.shapes
        dims = zip(shapes[whole].dims, shapes[part].dims, strict=False)
        return prod(size for size, cut in dims if cut == 1)

    @cached_property
    def updated_from(self) -> Sequence[Sequence[int]]:
        """What each value is made of element by element, or by an update of a part.

        A new state is made so from the old one and its gradient; the gradient, which comes of a
        product, is not made so from other arrays.
        """
        return list(map(self._updated_from, range(len(self._values))))

    def _updated_from(self, node: int) -> Sequence[int]:
        values = self._values
        opcode, sources = values.opcodes[node], values.made_of[node]
        if opcode in JOINS or opcode.startswith(REDUCTIONS):
            return sources
        if opcode in MOVES or opcode in SLICES or opcode in GATHERS:
            return sources[:1]
        if opcode in UPDATES:
            return sources[: UPDATES[opcode]]
        if opcode in _NOT_ELEMENTWISE:
            return ()
        size = values.shapes[node].elements
        return [one for one in sources if values.shapes[one].elements == size]

    def sources(self, node: int) -> Iterator[int]:
        """Yield a value, and all that it is made of element by element."""
        return self._values.reached([node], self.updated_from.__getitem__)

    def results(self, starts: Iterable[int]) -> frozenset[int]:
        """Return these values, and all that are made of them element by element."""
        return frozenset(self._values.reached(starts, self._updated_into.__getitem__))

    @cached_property
    def behind_updates(self) -> frozenset[int]:
        """Values of which a part is written anew, as of a cache."""
        found = enumerate(self._values.opcodes)
        return self.results(node for node, opcode in found if opcode in UPDATES)

    @cached_property
    def behind_sums(self) -> frozenset[int]:
        """Values that are made of sums over devices, element by element."""
        found = enumerate(self._values.opcodes)
        return self.results(node for node, opcode in found if opcode in REDUCTIONS)

    @cached_property
    def _updated_into(self) -> Sequence[Sequence[int]]:
        users: list[list[int]] = [[] for _ in self.updated_from]
        for node, sources in enumerate(self.updated_from):
            for source in sources:
                users[source].append(node)
        return users

    def next_states(self, pairs: Iterable[tuple[int, int]]) -> Mapping[int, int]:
        """Find the parameter whose next state is made of a value, element by element.

        Args:
            pairs: Each parameter, and the node of its next state; the first that is reached counts.
        """
        state_of: dict[int, int] = {}
        for parameter, output in pairs:
            pending = [] if output in state_of else [output]
            while pending:
                node = pending.pop()
                if node not in state_of:
                    state_of[node] = parameter
                    pending += self.updated_from[node]
        return state_of

    def source_of(self, node: int) -> int:
        """Find the value that this is a moved or converted copy of."""
        values = self._values
        while True:
            opcode, sources = values.opcodes[node], values.made_of[node]
            if opcode in JOINS:
                rest = [source for source in dict.fromkeys(sources) if source != node]
                if len(rest) != 1:
                    return node
                node = rest[0]
            elif opcode in MOVES:
                node = sources[0]
            else:
                return node

    def maker_of(self, node: int, opcodes: Container[str]) -> int | None:
        """Find the operation of these of which a value is a moved, scaled or masked result."""
        values = self._values

        def arrays(node: int) -> Sequence[int]:
            sources = {
                source
                for source in self.updated_from[node]
                if values.shapes[source].dtype != "pred"
                and values.opcodes[source] not in _BROADCASTS
                and source != node
            }
            return list(sources) if len(sources) == 1 else ()

        return next(
            (x for x in values.reached([node], arrays) if values.opcodes[x] in opcodes), None
        )

    def uses(self, node: int, dim: int | None, is_end: Callable[[int], bool]) -> Iterator[Use]:
        """Yield the operations in which a value, or what is made of it by element, ends.

        Args:
            node: The value.
            dim: A dimension of it to follow.
            is_end: Says whether a value is none of those that are looked for.
        """
        values = self._values
        size = values.shapes[node].elements
        pending, seen = [(node, dim)], {node}
        while pending and len(seen) < _MOST_STEPS:
            value, dim = pending.pop()
            if value in values.returned:
                yield Use("output", value, value, dim)
            for user in values.used_by[value]:
                opcode = values.opcodes[user]
                is_alike = abs(values.shapes[user].elements - size) <= size // _PADDED
                if opcode in _ENDS or not is_alike:
                    yield Use(opcode, value, user, dim)
                    if opcode not in _REDUCED or not is_alike:
                        continue
                if user not in seen:
                    seen.add(user)
                    if not is_end(user):
                        pending.append((user, _followed(values, value, user, dim)))


def _times(origin: Origin, layers: float) -> Origin:
    if origin.parameter < 0:
        return origin
    return origin._replace(layers=max(1, round(origin.layers * layers)))


def _met(sources: Iterable[Origin]) -> Origin:
    """Return the origin of what is one of several, or of one that is written into zeros."""
    found = set(sources) - {_UNKNOWN}
    if len(found) > 1:
        found.discard(_BROADCAST)
    return _UNKNOWN if not found else found.pop() if len(found) == 1 else _COMPUTED


_RESHAPES: Final = frozenset({"bitcast", "reshape", "transpose"})
_ENDS: Final = PRODUCTS | _REDUCED | {*get_args(CollectiveOpcode), "gather", "scatter"}


def _followed(values: Values, value: int, user: int, dim: int | None) -> int | None:
    """Find a dimension of a value in what is made of it; of one that is split the outer part."""
    opcode, before, after = (
        values.opcodes[user],
        values.shapes[value].dims,
        values.shapes[user].dims,
    )
    if dim is None or (opcode not in _RESHAPES and len(before) == len(after)):
        return dim
    if opcode == "transpose":
        return listed(values.lines[user], "dimensions").index(dim)
    if opcode == "bitcast":  # it may stand for a transposition
        orders = values.order(value), values.order(user)
    else:
        orders = range(len(before)), range(len(after))
    end = before[dim] * _steps(before, orders[0])[dim]
    steps = _steps(after, orders[1]).items()
    return next((place for place, step in steps if step < end <= step * after[place]), None)


def _steps(dims: Sequence[int], order: Iterable[int]) -> Mapping[int, int]:
    """Return the elements between neighbours of each dimension."""
    steps, after = {}, prod(dims)
    for dim in order:
        steps[dim] = after = after // max(1, dims[dim])
    return steps


def summed_dims(line: Instruction, place: int) -> Sequence[int]:
    """List the dimensions of an operand, of the first two, over which a product sums."""
    if line.opcode == "dot":
        return listed(line, ("lhs", "rhs")[place] + "_contracting_dims")
    labels = re.search(r"dim_labels=(\w+)_(\w+)->", line.attributes)
    return (
        [i for i, label in enumerate(labels[place + 1]) if label == "fi"[place]] if labels else ()
    )


def listed(line: Instruction, key: str) -> list[int]:
    """Read the numbers of an attribute such as dimensions={0,1}."""
    _, _, behind = line.attributes.partition(f" {key}={{")
    return [int(number) for number in behind.partition("}")[0].split(",") if number]
