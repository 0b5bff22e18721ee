"""Facts about the values of an HLO module, each read in one place from their graph.

Which argument a value is a copy of, which next state is made of it element by element, in which
operations it ends, and along which mesh axes it differs between devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from shardrules._program.computation import Instruction
from shardrules._program.hlo import CollectiveOpcode, ReplicaGroups
from shardrules._program.values import Values, reached

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
            opcode = values.opcodes[node]
            sources = [facts[source] for source in values.made_of[node]]
            if opcode in _BROADCASTS:
                return _BROADCAST
            if opcode in JOINS:
                return _met(sources)
            if opcode in MOVES or opcode in GATHERS:
                return sources[0]
            if opcode in SLICES:
                return _times_layers(sources[0], self.layers(values.made_of[node][0], node))
            if opcode == "dynamic-update-slice":
                layers = self.layers(node, values.made_of[node][1])
                part = _times_layers(sources[1], 1 / layers) if layers > 1 else _COMPUTED
                return _met([sources[0], part])
            if opcode in _SCALES and _BROADCAST in sources:
                others = [origin for origin in sources if origin != _BROADCAST]
                if len(others) == 1 and (others[0].parameter >= 0 or others[0] == _UNKNOWN):
                    return others[0]._replace(is_scaled=others[0].parameter >= 0)
            return _COMPUTED

        facts = values.fixpoint(_UNKNOWN, rule)
        return [fact if fact.parameter >= 0 else None for fact in facts]

    def layers(self, stack: int, part: int) -> int:
        """Count the slices like a part; only dimensions cut to 1 select one."""
        shapes = self._values.shapes
        dims = zip(shapes[stack].dims, shapes[part].dims, strict=False)
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
        return [source for source in sources if values.shapes[source].elements == size]

    def results(self, starts: Iterable[int]) -> frozenset[int]:
        """Return these values, and all that are made of them element by element."""
        return frozenset(reached(starts, self._updated_into.__getitem__))

    @cached_property
    def behind_updates(self) -> frozenset[int]:
        """Values of which a part is written anew, as of a cache."""
        opcodes = enumerate(self._values.opcodes)
        return self.results(node for node, opcode in opcodes if opcode in UPDATES)

    @cached_property
    def behind_sums(self) -> frozenset[int]:
        """Values that are made of sums over devices, element by element."""
        opcodes = enumerate(self._values.opcodes)
        return self.results(node for node, opcode in opcodes if opcode in REDUCTIONS)

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
            pending = [output]
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
                others = [source for source in dict.fromkeys(sources) if source != node]
                if len(others) != 1:
                    return node
                node = others[0]
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

        return next((x for x in reached([node], arrays) if values.opcodes[x] in opcodes), None)

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


def _times_layers(origin: Origin, layers: float) -> Origin:
    if origin.parameter < 0:
        return origin
    return origin._replace(layers=max(1, round(origin.layers * layers)))


def _met(sources: Iterable[Origin]) -> Origin:
    """Return the origin of what is one of several, or of one that is written into zeros."""
    origins = set(sources) - {_UNKNOWN}
    if len(origins) > 1:
        origins.discard(_BROADCAST)
    return _UNKNOWN if not origins else origins.pop() if len(origins) == 1 else _COMPUTED


_RESHAPES: Final = frozenset({"bitcast", "reshape", "transpose"})
_COLLECTIVES: Final = frozenset(get_args(CollectiveOpcode))
_ENDS: Final = PRODUCTS | _REDUCED | _COLLECTIVES | {"gather", "scatter"}


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


_Labels = npt.NDArray[np.int64]
"""A number for each device, the same on those whose values are alike."""

_COPIES: Final = frozenset({"bitcast", "convert", "copy"})
_NUMBER: Final = re.compile(r"-?\d+")
_DIRECTION: Final = re.compile(r"direction=(\w+)")
# Of the device's number, such as its place along an axis; the last are directions of "compare".
_OF_NUMBERS: Final[Mapping[str, Callable[..., Any]]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "minimum": np.minimum, "maximum": np.maximum,
    "divide": lambda a, b: np.trunc(a / np.where(b == 0, 1, b)).astype(np.int64),
    "remainder": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "shift-left": np.left_shift, "shift-right-logical": np.right_shift,
    "select": lambda is_first, a, b: np.where(is_first != 0, a, b),
    "clamp": lambda least, a, most: np.clip(a, least, most),
    "convert": lambda a: a, "copy": lambda a: a, "bitcast": lambda a: a, "reshape": lambda a: a,
    "broadcast": lambda a: a,
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater,
    "GE": np.greater_equal,
}  # fmt: skip


class _Fact(NamedTuple):
    """What is known of a value on all devices, as bytes, which compare fast."""

    labels: bytes
    """`_Labels` in the order of their first devices; b"" before anything is known."""
    number: bytes | None = None
    """The value itself on each device, of an integer that is computed of the device's number; or
    once, if it is the same on all."""
    table: bytes | None = None
    """The entries of a constant that has one for each device."""


_UNSEEN: Final = _Fact(b"")


class Variation:
    """Which devices have the same value, for each value of a module.

    Devices have the same if they have the same shards of the arguments that it is computed from,
    have computed it from the same number, or if a collective has made it equal.

    Args:
        values: The graph.
        axis_sizes: Devices along each mesh axis.
        parameters: Axes that shard each of the module's parameters.
    """

    def __init__(
        self,
        values: Values,
        axis_sizes: Mapping[str, int],
        parameters: Mapping[int, frozenset[str]],
    ) -> None:
        self._values = values
        self._sizes = dict(axis_sizes)
        self._count = prod(self._sizes.values())
        self._alike = np.zeros(self._count, np.int64).tobytes()
        self._met: dict[frozenset[bytes], bytes] = {}
        self._behind: dict[tuple[str, bytes, ReplicaGroups], bytes] = {}
        self._axes: dict[bytes, frozenset[str]] = {}
        along, after = {}, self._count
        for axis, size in self._sizes.items():
            after //= size
            along[axis] = _canonical(np.arange(self._count) // after % size)
        self._shards = {
            values.parameters[number]: self._together(map(along.__getitem__, axes))
            for number, axes in parameters.items()
        }

    def of(self, nodes: Iterable[int]) -> frozenset[str]:
        """Return the axes along which some of these values differ."""
        labels = self._together({self._facts[node].labels or self._alike for node in nodes})
        if labels not in self._axes:
            table = np.frombuffer(labels, np.int64).reshape(tuple(self._sizes.values()))
            axes = enumerate(self._sizes)
            self._axes[labels] = frozenset(
                axis for i, axis in axes if (table != table.take([0], i)).any()
            )
        return self._axes[labels]

    @cached_property
    def _facts(self) -> Sequence[_Fact]:
        return self._values.fixpoint(_UNSEEN, self._rule)

    def _rule(self, node: int, facts: Sequence[_Fact]) -> _Fact:
        if node in self._shards:
            return _Fact(self._shards[node])
        opcode = self._values.opcodes[node]
        sources = [facts[source] for source in self._values.made_of[node]]
        if opcode in JOINS:
            return self._joined({source for source in sources if source.labels})
        number = self._number(node, opcode, sources)
        if number is not None:
            labels = self._alike if number.size == 1 else _canonical(number)
            return _Fact(labels, number.tobytes())
        distinct = {source.labels or self._alike for source in sources}
        labels = distinct.pop() if len(distinct) == 1 else self._together(distinct)
        if opcode == "constant":
            return _Fact(labels, table=self._table(node))
        if opcode in _COLLECTIVES:
            return _Fact(self._behind_collective(node, labels))
        return _Fact(labels, table=sources[0].table if sources and opcode in _COPIES else None)

    def _behind_collective(self, node: int, labels: bytes) -> bytes:
        """Return the labels of a collective's result by those of its operand."""
        groups = self._values.hlo.groups(self._values.lines[node].attributes)
        key = (self._values.opcodes[node], labels, groups)
        if key not in self._behind:
            moved = _moved(key[0], np.frombuffer(labels, np.int64), groups)
            self._behind[key] = _canonical(moved)
        return self._behind[key]

    def _joined(self, distinct: set[_Fact]) -> _Fact:
        """Return what is known of one of several values, or of one after another."""
        if len(distinct) <= 1:
            return distinct.pop() if distinct else _UNSEEN
        return _Fact(self._together({source.labels for source in distinct}))

    def _number(self, node: int, opcode: str, sources: Sequence[_Fact]) -> _Labels | None:
        """Compute an integer on each device, if it is made of the device's number alone."""
        line, shape = self._values.lines[node], self._values.shapes[node]
        if opcode in ("partition-id", "replica-id"):
            return np.arange(self._count)
        if shape.dtype[0] not in "sup" or (shape.dims and shape.elements != 1):
            return None
        if opcode == "constant":
            digits = _NUMBER.findall(line.literal.replace("true", "1").replace("false", "0"))
            return np.array(digits, np.int64) if len(digits) == 1 else None
        numbers = [
            np.frombuffer(source.number, np.int64)
            for source in sources
            if source.number is not None
        ]
        if opcode == "dynamic-slice" and len(numbers) == 1 and sources[0].table is not None:
            places = np.clip(numbers[0], 0, self._count - 1)
            return np.frombuffer(sources[0].table, np.int64)[places]
        direction = _DIRECTION.search(line.attributes) if opcode == "compare" else None
        compute = _OF_NUMBERS.get(direction[1] if direction else opcode)
        is_known = compute is not None and sources and len(numbers) == len(sources)
        return np.asarray(compute(*numbers), np.int64) if compute and is_known else None

    def _table(self, node: int) -> bytes | None:
        """Read a constant that has an entry for each device."""
        line = self._values.lines[node]
        if self._values.shapes[node].dims != (self._count,):
            return None
        entries = _NUMBER.findall(line.literal)
        return np.array(entries, np.int64).tobytes() if len(entries) == self._count else None

    def _together(self, labels: Iterable[bytes]) -> bytes:
        """Return labels that are the same where all of these are."""
        distinct = frozenset(labels) - {self._alike}
        if len(distinct) < 2:
            return next(iter(distinct), self._alike)
        if distinct not in self._met:
            rows = np.stack([np.frombuffer(each, np.int64) for each in sorted(distinct)], 1)
            self._met[distinct] = _canonical(_numbered(rows))
        return self._met[distinct]


def _numbered(rows: npt.NDArray[np.int64]) -> _Labels:
    """Return a number for each row, the same for equal rows."""
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


def _canonical(labels: _Labels) -> bytes:
    """Number labels anew, in the order of the first devices that have them."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    order = np.empty(len(first), np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[inverse.reshape(-1)].tobytes()


_PARTS: Final = frozenset({"all-to-all", "ragged-all-to-all", "reduce-scatter"})
"""Collectives of which each device of a group gets another part."""


def _moved(opcode: str, labels: _Labels, groups: Sequence[Sequence[int]]) -> _Labels:
    """Label what devices have behind a collective."""
    moved, places = np.full_like(labels, -1), np.zeros_like(labels)
    if opcode == "collective-permute":
        for source, target in groups:
            moved[target] = labels[source]
        return moved  # those that get nothing have zeros
    number_of: dict[tuple[int, ...], int] = {}
    for group in groups:
        members = labels[list(group)].tolist()
        if opcode == "all-reduce":  # a sum is the same in any order
            members.sort()
        moved[list(group)] = number_of.setdefault(tuple(members), len(number_of))
        places[list(group)] = range(len(group))
    return _numbered(np.stack([moved, places], 1)) if opcode in _PARTS else moved
