"""Layouts: which mesh axes cut each array of a step, and the space of those that are searched.

A layout is an assignment of few variables: the axes of each class of dimensions, and those along
which weights are stored in parts beyond that. All arrays follow; what operations send between them
is counted in `spread.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.dtypes import bits_of
from shardrules._base.specs import entries_of, entry_axes
from shardrules._program.step.equations import constrains, inputs_of

if TYPE_CHECKING:
    from shardrules._program.step.equations import Body, Cuts
    from shardrules._program.step.factors import Dims
    from shardrules._program.step.step import Step

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
# Classes of which no array is so large a part of the largest one are whole.
_SMALL: Final = 1e-4


class Space:
    """Layouts of a step on a mesh: how arrays are cut in one, what is chosen, those to begin with.

    Variables are the mesh axes of classes of dimensions, and those of storage.
    """

    def __init__(self, step: Step, sizes: Mapping[str, int]) -> None:
        self.step, self.sizes = step, {axis: size for axis, size in sizes.items() if size > 1}
        self.equations, self.roles = step._equations, step._roles
        equations, roles, dims = self.equations, self.roles, self.equations.dims
        self.classes: list[tuple[Dims, ...]] = [
            tuple(map(dims.classes, value.dims)) for value in equations.values
        ]
        self.local = set(_inside(equations.body))
        """Arrays of code by device, or that an operation makes which is not modelled."""
        self._is_weight = [
            number not in self.local and roles.is_like_weights(number)
            for number in range(len(equations.values))
        ]
        first_of_kind: dict[Any, int] = {}
        kinds = zip(self.classes, self._is_weight, strict=True)
        self.first = [
            first_of_kind.setdefault((number if number in self.local else -1, kind), number)
            for number, kind in enumerate(kinds)
        ]
        """By array the first of those that have its cuts, in every layout."""
        self._cuts_by_key: dict[tuple[Any, ...], Cuts] = {}
        self._stored_places = cache(self._places_to_store)
        self.count = cache(lambda axes: prod(self.sizes[axis] for axis in axes))
        """Devices along mesh axes."""
        self.bytes = cache(self._bytes)
        """Bytes of an array on a device, by its number and cuts."""
        self.fixed = self._facts()
        """Cuts of arrays that are not chosen."""
        counts = range(len(self.sizes) + 1)
        subsets = [axes for n in counts for axes in combinations(self.sizes, n)]
        self.values = {STORED: subsets} | {
            name: [axes for axes in subsets if dims.sizes[name] % self.count(axes) == 0]
            for name in self._large_classes()
        }
        """The sets of axes from which each variable is chosen."""
        self.values = {name: values for name, values in self.values.items() if len(values) > 1}

    # The arrays in a layout

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
        names = (name for row in self.classes[first] for name in row)
        key = (first, stored, *[axes.get(name, ()) for name in names])
        if key not in self._cuts_by_key:
            self._cuts_by_key[key] = self._cuts(first, axes, stored)
        return self._cuts_by_key[key]

    def in_mesh(self, number: int, cuts: Sequence[Sequence[str]]) -> Cuts:
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
        used: set[str] = set()
        ranked = sorted(  # those that keep axes first
            (_RANKS.index(self.roles.of.get(name, "")), name, dim, place)
            for dim, row in enumerate(rows)
            for place, name in enumerate(row)
        )
        for _, name, dim, place in ranked:
            free = [a for a in axes.get(name, ()) if a not in used]
            if free:
                axes_at[dim, place] = tuple(free)
                used.update(free)
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

    # What is chosen, and layouts to begin with

    def _large_classes(self) -> list[int]:
        """Return the classes that may be cut: of large arrays, without loops and heads."""
        equations = self.equations
        most: dict[int, int] = {}
        read = {*equations.users, *equations.body.inputs} - self.local
        for number in read - self.fixed.keys():
            for name in {name for row in self.classes[number] for name in row}:
                most[name] = max(most.get(name, 0), equations.values[number].bits)
        least = _SMALL * max((equations.values[number].bits for number in read), default=0)
        excluded = equations.looped | self._parts_of_heads()
        largest = sorted(most.items(), key=lambda row: (-row[1], row[0]))
        return [name for name, size in largest if size > least and name not in excluded]

    def _facts(self) -> dict[int, Cuts]:
        """Return the cuts of constants, and of what only code by device makes and reads."""
        equations = self.equations
        constants = {number: self.in_mesh(number, ()) for number in equations.constants}
        return constants | {
            number: self.in_mesh(number, equations.manual[number])
            for operation, _ in equations.everything()
            for number in operation.outputs
            if operation.name == "shard_map"
            and all(user and user.name == "shard_map" for user in equations.users.get(number, ()))
        }

    def _parts_of_heads(self) -> set[int]:
        """Return the classes within a dimension of a weight, such as the size of a head.

        Devices have contiguous parts of a dimension: whole heads. What is cut out of such a class,
        as rotary embeddings are, is one as well, and so is what is put together of such parts.
        """
        roles = self.roles
        rows = [row for number in roles.weights.values() for row in self.classes[number]]
        minor = {name for row in rows for name in row[1:]}
        parts = [n for n in minor if roles.of.get(n, "") != "query heads of a KV head"]
        parts += [name for name, role in roles.of.items() if role == "head size"]
        return set(roles.with_parts(parts))

    def of_program(self) -> Assignment:
        """Return the values that are nearest to the layout that the program has.

        Axes of the batch that cut weights store them; all others are those of their class.
        """
        roles, cuts_of = self.roles, self._program_cuts()
        axes_of: dict[int, list[str]] = {name: [] for name in self.values}
        batch = [axes_of[name] for name in axes_of if roles.of.get(name) == "batch"]
        stored = axes_of.setdefault(STORED, [])
        for number in sorted(cuts_of, key=self.is_weight):  # the batch has its axes first
            for classes, axes in zip(self.classes[number], cuts_of[number], strict=False):
                for axis in axes:
                    is_stored = self.is_weight(number) and any(axis in row for row in batch)
                    row = stored if is_stored else axes_of.get(classes[0] if classes else 0, [])
                    row.append(axis)
        return {name: self._largest(name, axes_of[name]) for name in self.values}

    def _program_cuts(self) -> dict[int, Cuts]:
        """Return the cuts that arguments, the jitted step or constraints give arrays."""
        step, inputs = self.step, self.equations.body.inputs
        leaves = [leaf for tree in step._trees for leaf in inputs_of(tree, step._function)]
        of_leaves = [getattr(leaf, "sharding", None) for leaf in leaves]
        by_call = () if step._call is None else step._call.params.get("in_shardings", ())
        shardings = [*zip(inputs, of_leaves, strict=True)]
        shardings += zip(inputs, by_call, strict=True) if len(by_call) == len(inputs) else ()
        constraints = (row for row, _ in self.equations.everything() if constrains(row.eqn))
        for row in constraints:
            sharding = row.eqn.params.get("sharding") or row.eqn.params.get("dst_sharding")
            shardings.append((row.outputs[0], sharding))
        specs = ((number, getattr(sharding, "spec", None)) for number, sharding in shardings)
        return {
            number: tuple(map(entry_axes, entries_of(spec)))
            for number, spec in specs
            if spec is not None
        }

    def starts(self) -> list[Assignment]:
        """Return layouts as experts have them, FSDP among them, and that of the program.

        Of those alike the first has the last axis on weights.
        """
        rows = [self._start(tensor) for tensor in (None, *reversed(self.sizes))]
        rows.append(self.of_program())
        return list({tuple(row.values()): row for row in rows}.values())

    def fsdp(self) -> Assignment:
        """Return the layout in which all axes cut the batch, and store weights in parts."""
        return self._start(None)

    def _start(self, tensor: str | None) -> Assignment:
        """Return the layout with an axis on weights, all others on the batch, and all on storage.

        Sequences have what does not divide the batch, and the axis of weights.
        """
        roles = self.roles
        layout: Assignment = {}
        for name in self.values:
            role = roles.of.get(name, "")
            if name == STORED:
                axes = list(self.sizes)
            elif role == "batch":
                axes = [axis for axis in self.sizes if axis != tensor]
            else:
                is_cut = name in roles.of_weights and role != "model width"
                axes = [tensor] if tensor and is_cut else []
            layout[name] = self._largest(name, axes)
        cut = {axis for n in layout if roles.of.get(n) == "batch" for axis in layout[n]}
        for name in (name for name in layout if roles.of.get(name) == "sequence"):
            layout[name] = self._largest(name, self.sizes.keys() - cut)
        return layout

    def _largest(self, name: int, axes: Iterable[str]) -> Axes:
        """Return the value of a variable of most devices that has no axes but these."""
        fitting = (value for value in self.values[name] if set(value) <= set(axes))
        return max(fitting, key=self.count, default=())

    def shown(self, name: int) -> str:
        """Return role and size of a class."""
        role = self.roles.of.get(name, "") or "no role"
        return f"{role} {self.equations.dims.sizes[name]:,}"

    def scope_of(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return the variables on which the layout of arrays depends."""
        names: set[int] = set()
        for number in numbers:
            names.update(name for row in self.classes[number] for name in row)
            if self.is_stored(number):
                names.add(STORED)
        return tuple(name for name in self.values if name in names)


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
