"""Layouts: a cut of each array of a step by the mesh axes of its classes of dimensions.

A layout is an assignment of few variables: the axes of each class, and those along which weights
are stored in parts beyond that. All arrays follow; what operations send between them is counted in
`spread.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.dtypes import bits_of

if TYPE_CHECKING:
    from shardrules._program.step.equations import Body, Cuts, Equations
    from shardrules._program.step.factors import Dims
    from shardrules._program.step.step import Roles

Axes = tuple[str, ...]
Assignment = dict[int, Axes]
"""Mesh axes that cut the dimensions of each class."""
STORED: Final = -1
"""What is no class, but has the mesh axes that cut weights, their gradients and state while no
operation uses them, as in FSDP."""
_LARGE_VECTOR: Final = 2**20
_STORED_FIRST: Final = ("model width", "hidden", "vocabulary", "")
# If two classes of an array have one axis, that of the first of these roles keeps it.
_RANKS: Final = (
    "experts", "KV heads", "heads", "query heads of a KV head", "hidden", "vocabulary", "",
    "batch", "sequence", "model width", "head size", "layers",
)  # fmt: skip


class StepArrays:
    """What a layout needs to know of the arrays of a step."""

    def __init__(self, equations: Equations, roles: Roles, sizes: Mapping[str, int]) -> None:
        self.equations, self.roles, self.sizes = equations, roles, sizes
        self.fixed: dict[int, Cuts] = {}
        """Cuts of arrays that are not chosen."""
        dims = equations.dims
        self.classes: list[tuple[Dims, ...]] = [
            tuple(map(dims.classes, value.dims)) for value in equations.values
        ]
        self.local = set(_inside(equations.body))
        """Arrays of code by device, or that an operation makes which is not modelled."""
        self._is_weight = [
            number not in self.local and roles.is_like_weights(number)
            for number in range(len(equations.values))
        ]
        self._ranks = {
            name: (_RANKS.index(roles.of.get(name, "")), name)
            for rows in self.classes
            for row in rows
            for name in row
        }
        alike: dict[Any, int] = {}
        kinds = zip(self.classes, self._is_weight, strict=True)
        self.first = [
            alike.setdefault((number if number in self.local else -1, kind), number)
            for number, kind in enumerate(kinds)
        ]
        """By array the first of those that have its cuts, in every layout."""
        self._names = [tuple(name for row in rows for name in row) for rows in self.classes]
        self._known: dict[tuple[Any, ...], Cuts] = {}
        self._stored_places = cache(self._places_to_store)
        self.count = cache(lambda axes: prod(sizes[axis] for axis in axes))
        """Devices along mesh axes."""
        self.bytes = cache(self._bytes)
        """Bytes of an array on a device, by its number and cuts."""

    def is_weight(self, number: int) -> bool:
        """Say whether an array is a weight, or of its dimensions, as gradients and state are."""
        return self._is_weight[number]

    def is_stored(self, number: int) -> bool:
        """Say whether what weights are stored over cuts an array: a weight that is no vector."""
        return self._is_weight[number] and len(self._stored_places(number)) > 1

    def cuts(self, number: int, axes: Mapping[int, Axes]) -> Cuts:
        """Return the cuts of an array in the layout that classes of these axes have."""
        if number in self.fixed:
            return self.fixed[number]
        if number in self.local or not self.classes[number]:
            return ((),) * len(self.classes[number])
        first = self.first[number]
        stored = axes.get(STORED, ()) if self._is_weight[number] else ()
        key = (first, stored, *[axes.get(name, ()) for name in self._names[first]])
        if key not in self._known:
            self._known[key] = self._cuts(first, axes, stored)
        return self._known[key]

    def known(self, number: int, cuts: Sequence[Sequence[str]]) -> Cuts:
        """Return the cuts of an array without axes of one device, or that are not in the mesh."""
        rank = len(self.equations.values[number].shape)
        rows = [tuple(axis for axis in axes if axis in self.sizes) for axes in cuts]
        return tuple(rows[:rank] + [()] * (rank - len(rows)))

    def unlike(self, numbers: Iterable[int]) -> list[int]:
        """Return arrays of which others of these numbers have the cuts, in every layout."""
        return list({self.first[number]: number for number in numbers}.values())

    def _cuts(self, number: int, axes: Mapping[int, Axes], stored: Axes) -> Cuts:
        rows, sizes = self.classes[number], self.equations.dims.sizes
        is_vector = self._is_weight[number] and not self.is_stored(number)
        if is_vector and all(sizes[n] < _LARGE_VECTOR for _, n in self._stored_places(number)):
            return ((),) * len(rows)
        axes_at: dict[tuple[int, int], Axes] = {}
        taken: set[str] = set()
        pairs = [(dim, place) for dim, row in enumerate(rows) for place in range(len(row))]
        # Those that keep axes first.
        for dim, place in sorted(
            pairs, key=lambda pair: (self._ranks[rows[pair[0]][pair[1]]], pair)
        ):
            free = [a for a in axes.get(rows[dim][place], ()) if a not in taken]
            if free:
                axes_at[dim, place] = tuple(free)
                taken.update(free)
        cuts = [self._contiguous(row, dim, axes_at) for dim, row in enumerate(rows)]
        if stored and self.is_stored(number):
            self._store(number, stored, cuts)
        return tuple(cuts)

    def _contiguous(self, row: Dims, dim: int, axes_at: Mapping[tuple[int, int], Axes]) -> Axes:
        """Return the axes of a dimension: what is behind a class that is not cut through is not."""
        axes: Axes = ()
        for place, name in enumerate(row):
            part = axes_at.get((dim, place), ())
            axes += part
            if self.count(part) != self.equations.dims.sizes[name]:
                break
        return axes

    def _store(self, number: int, stored: Axes, cuts: list[Axes]) -> None:
        """Cut a weight by what cuts it in no dimension yet: a dimension that is so divided."""
        sizes, rows = self.equations.dims.sizes, self.classes[number]
        for axis in stored:
            if any(axis in row for row in cuts):
                continue
            for dim, name in self._stored_places(number):
                count = self.count(cuts[dim])
                is_major = rows[dim][0] == name and count < sizes[name]
                if is_major and sizes[name] % (count * self.sizes[axis]) == 0:
                    cuts[dim] += (axis,)
                    break

    def _places_to_store(self, number: int) -> list[tuple[int, int]]:
        """Return (dimension, its major class) of a weight, in the order in which it is cut."""
        roles, sizes = self.roles.of, self.equations.dims.sizes
        first = {role: place for place, role in enumerate(_STORED_FIRST)}
        rows = enumerate(self.classes[number])
        places = [(dim, row[0]) for dim, row in rows if row and row[0] not in self.equations.looped]
        return sorted(places, key=lambda p: (first.get(roles.get(p[1], ""), 9), -sizes[p[1]], p[1]))

    def _bytes(self, number: int, cuts: Cuts) -> int:
        value = self.equations.values[number]
        parts = (-(-n // self.count(axes)) for n, axes in zip(value.shape, cuts, strict=True))
        bits = 0 if value.dtype is None else bits_of(value.dtype)  # of a token
        return -(-prod(parts) * bits // 8)


def _inside(body: Body, is_local: bool = False) -> Iterator[int]:
    """Yield the arrays of code by device, and results of what is not modelled."""
    if is_local:
        yield from body.inputs
    for operation in body.operations:
        if is_local:  # constants among them
            yield from (number for number in operation.inputs if number is not None)
        if is_local or (operation.rule is None and not operation.bodies):
            yield from operation.outputs
        for inner in operation.bodies:
            yield from _inside(inner, is_local or operation.name == "shard_map")
