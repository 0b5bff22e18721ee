"""Along which mesh axes the values of a module differ between devices: `Variation`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardrules._program.facts import JOINS
from shardrules._program.values import Values

_Labels = npt.NDArray[np.int64]
"""A number for each device, the same on those whose values are alike."""

_COPIES: Final = frozenset({"bitcast", "convert", "copy"})
_NUMBER: Final = re.compile(r"-?\d+")
_DIRECTION: Final = re.compile(r"direction=(\w+)")
# Of the device's number, such as its place along an axis; the last are directions of "compare".
_COMPUTED: Final[Mapping[str, Callable[..., Any]]] = {
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


_UNKNOWN: Final = _Fact(b"")


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
        table = np.frombuffer(labels, np.int64).reshape(tuple(self._sizes.values()))
        axes = enumerate(self._sizes)
        return frozenset(axis for i, axis in axes if (table != table.take([0], i)).any())

    @cached_property
    def _facts(self) -> Sequence[_Fact]:
        return self._values.fixpoint(_UNKNOWN, self._rule)

    def _rule(self, node: int, facts: Sequence[_Fact]) -> _Fact:
        if node in self._shards:
            return _Fact(self._shards[node])
        opcode = self._values.opcodes[node]
        sources = [facts[one] for one in self._values.made_of[node]]
        if opcode in JOINS:
            return self._joined({source for source in sources if source.labels})
        number = self._number(node, opcode, sources)
        if number is not None:
            labels = self._alike if number.size == 1 else _canonical(number)
            return _Fact(labels, number.tobytes())
        labels = self._together({source.labels or self._alike for source in sources})
        if opcode == "constant":
            return _Fact(labels, table=self._table(node))
        if (moved := _COLLECTIVES.get(opcode)) is not None:
            groups = self._values.hlo.groups(self._values.lines[node].attributes)
            return _Fact(_canonical(moved(np.frombuffer(labels, np.int64), groups)))
        return _Fact(labels, table=sources[0].table if sources and opcode in _COPIES else None)

    def _joined(self, known: set[_Fact]) -> _Fact:
        """Return what is known of one of several values, or of one after another."""
        if len(known) <= 1:
            return known.pop() if known else _UNKNOWN
        return _Fact(self._together({source.labels for source in known}))

    def _number(self, node: int, opcode: str, sources: Sequence[_Fact]) -> _Labels | None:
        """Compute an integer on each device, if it is made of the device's number alone."""
        line, shape = self._values.lines[node], self._values.shapes[node]
        if opcode in ("partition-id", "replica-id"):
            return np.arange(self._count)
        if shape.elements != 1 or shape.dtype[0] not in "sup":
            return None
        if opcode == "constant":
            found = _NUMBER.findall(line.literal.replace("true", "1").replace("false", "0"))
            return np.array(found, np.int64) if len(found) == 1 else None
        numbers = [np.frombuffer(one.number, np.int64) for one in sources if one.number is not None]
        if opcode == "dynamic-slice" and len(numbers) == 1 and sources[0].table is not None:
            places = np.clip(numbers[0], 0, self._count - 1)
            return np.frombuffer(sources[0].table, np.int64)[places]
        direction = _DIRECTION.search(line.attributes) if opcode == "compare" else None
        compute = _COMPUTED.get(direction[1] if direction else opcode)
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
            rows = np.stack([np.frombuffer(one, np.int64) for one in sorted(distinct)], 1)
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


_Groups = Sequence[Sequence[int]]


def _reduced(labels: _Labels, groups: _Groups) -> _Labels:
    """Label what is the same on all of a group, whatever the order of its members."""
    return _by_group(labels, groups, is_ordered=False)


def _gathered(labels: _Labels, groups: _Groups) -> _Labels:
    return _by_group(labels, groups, is_ordered=True)


def _scattered(labels: _Labels, groups: _Groups) -> _Labels:
    """Label the parts of what a group sums or exchanges, by the place in the group."""
    places = np.zeros_like(labels)
    for group in groups:
        places[list(group)] = range(len(group))
    return _numbered(np.stack([_by_group(labels, groups, is_ordered=True), places], 1))


def _permuted(labels: _Labels, pairs: _Groups) -> _Labels:
    """Label what devices get of others; those that get nothing have zeros."""
    moved = np.full_like(labels, -1)
    for source, target in pairs:
        moved[target] = labels[source]
    return moved


def _by_group(labels: _Labels, groups: _Groups, *, is_ordered: bool) -> _Labels:
    number_of: dict[tuple[int, ...], int] = {}
    found = np.full_like(labels, -1)
    for group in groups:
        members = labels[list(group)].tolist()
        key = tuple(members if is_ordered else sorted(members))
        found[list(group)] = number_of.setdefault(key, len(number_of))
    return found


_COLLECTIVES: Final[Mapping[str, Callable[[_Labels, _Groups], _Labels]]] = {
    "all-gather": _gathered,
    "all-reduce": _reduced,
    "all-to-all": _scattered,
    "collective-broadcast": _gathered,
    "collective-permute": _permuted,
    "ragged-all-to-all": _scattered,
    "reduce-scatter": _scattered,
}
"""How collectives move values between devices; reduce-scatter sums in each part."""
