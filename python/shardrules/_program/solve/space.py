"""The space of choices for a step on a mesh: what can be chosen, and layouts to begin with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.specs import entries_of, entry_axes
from shardrules._program.solve.layout import STORED, Assignment, Axes, StepArrays
from shardrules._program.solve.spread import Spread
from shardrules._program.step.equations import constrains, inputs_of

if TYPE_CHECKING:
    from shardrules._program.solve.spread import Machine
    from shardrules._program.step.equations import Cuts
    from shardrules._program.step.step import Step

# Classes of which no array is so large a part of the largest one are whole.
_SMALL: Final = 1e-4


class Space:
    """Variables with their values: mesh axes of classes of dimensions, and of storage.

    Args:
        step: What is solved for.
        machine: The devices of the mesh.
        hbm: Bytes of memory of a device.
    """

    def __init__(self, step: Step, machine: Machine, hbm: int) -> None:
        self.step, self.machine, self.hbm = step, machine, hbm
        self.sizes = {axis: size for axis, size in machine.sizes.items() if size > 1}
        self.arrays = StepArrays(step._equations, step._roles, self.sizes)
        self.arrays.fixed = self._facts()
        self.values: dict[int, list[Axes]] = {STORED: list(_subsets(self.sizes))}
        for name in self._large_classes():
            size = step._equations.dims.sizes[name]
            self.values[name] = [
                axes
                for axes in _subsets(self.sizes)
                if size % prod(self.sizes[axis] for axis in axes) == 0
            ]
        self.values = {name: values for name, values in self.values.items() if len(values) > 1}

    def _large_classes(self) -> list[int]:
        """Return the classes that may be cut: of large arrays, without loops and heads."""
        equations = self.step._equations
        most: dict[int, int] = {}
        read = {*equations.users, *equations.body.inputs} - self.arrays.local
        for number in read - self.arrays.fixed.keys():
            for name in {name for row in self.arrays.classes[number] for name in row}:
                most[name] = max(most.get(name, 0), equations.values[number].bits)
        least = _SMALL * max((equations.values[number].bits for number in read), default=0)
        excluded = equations.looped | self._parts_of_heads()
        largest = sorted(most.items(), key=lambda row: (-row[1], row[0]))
        return [name for name, size in largest if size > least and name not in excluded]

    def _facts(self) -> dict[int, Cuts]:
        """Return the cuts of constants, and of what only code by device makes and reads."""
        equations = self.step._equations
        constants = {number: self.arrays.known(number, ()) for number in equations.constants}
        return constants | {
            number: self.arrays.known(number, equations.manual[number])
            for operation, _ in equations.everything()
            for number in operation.outputs
            if operation.name == "shard_map"
            and {reader.name for reader in equations.users.get(number, ())} <= {"shard_map"}
        }

    def _parts_of_heads(self) -> set[int]:
        """Return the classes within a dimension of a weight, such as the size of a head.

        Devices have contiguous parts of a dimension: whole heads. What is cut out of such a class,
        as rotary embeddings are, is one as well, and so is what is put together of such parts.
        """
        equations, roles = self.step._equations, self.step._roles
        weights = [self.arrays.classes[number] for number in roles.weights.values()]
        parts = {
            name
            for rows in weights
            for row in rows
            for name in row[1:]
            if roles.of.get(name, "") != "query heads of a KV head"
        }
        parts.update(name for name, role in roles.of.items() if role == "head size")
        pairs = [tuple(map(equations.dims.classes, pair)) for pair in equations.dims.parts]
        before: set[int] = set()
        while before != parts:
            before = set(parts)
            for pair in pairs:
                if any(row and before.issuperset(row) for row in pair):
                    parts.update(*pair)
        return parts

    def traced(self) -> Assignment:
        """Return the values that are nearest to the layout with which the step was traced.

        Axes of the batch that cut weights store them; all others are those of their class.
        """
        equations, roles = self.step._equations, self.step._roles
        cuts_of = dict(zip(equations.body.inputs, argument_cuts(self.step), strict=True))
        written = (row for row, _ in equations.everything() if constrains(row.eqn))
        cuts_of |= {row.outputs[0]: constraint_cuts(row.eqn) for row in written}
        wishes: dict[int, list[str]] = {name: [] for name in self.values}
        stored = wishes.setdefault(STORED, [])
        for number in sorted(cuts_of, key=self.arrays.is_weight):
            for classes, axes in zip(
                self.arrays.classes[number], cuts_of[number] or (), strict=False
            ):
                batch = {
                    a for name, row in wishes.items() if roles.of.get(name) == "batch" for a in row
                }
                for axis in axes:
                    is_stored = self.arrays.is_weight(number) and axis in batch
                    wish = stored if is_stored else wishes.get(classes[0] if classes else 0, [])
                    wish.append(axis)
        return {
            name: self._largest(name, wish) for name, wish in wishes.items() if name in self.values
        }

    def starts(self) -> list[Assignment]:
        """Return layouts as experts have them, FSDP among them, and that of the program.

        Of those alike the first has the last axis on weights.
        """
        rows = [self._start(tensor) for tensor in (None, *reversed(self.sizes))]
        rows.append(self.traced())
        return list({tuple(row.values()): row for row in rows}.values())

    def fsdp(self) -> Assignment:
        """Return the layout in which all axes cut the batch, and store weights in parts."""
        return self._start(None)

    def _start(self, tensor: str | None) -> Assignment:
        """Return the layout with an axis on weights, all others on the batch, and all on storage.

        Sequences have what does not divide the batch, and the axis of weights.
        """
        roles = self.step._roles
        layout: Assignment = {}
        for name in self.values:
            role = roles.of.get(name, "")
            if name == STORED:
                wish = list(self.sizes)
            elif role == "batch":
                wish = [axis for axis in self.sizes if axis != tensor]
            else:
                is_cut = name in roles.of_weights and role != "model width"
                wish = [tensor] if tensor and is_cut else []
            layout[name] = self._largest(name, wish)
        cut = {axis for n in layout if roles.of.get(n) == "batch" for axis in layout[n]}
        for name in (name for name in layout if roles.of.get(name) == "sequence"):
            layout[name] = self._largest(name, self.sizes.keys() - cut)
        return layout

    def _largest(self, name: int, wish: Iterable[str]) -> Axes:
        """Return the value of a variable of most devices among those of axes that are wished."""
        fitting = (value for value in self.values[name] if set(value) <= set(wish))
        return max(fitting, key=lambda value: prod(self.sizes[axis] for axis in value), default=())

    def spread(self, assignment: Mapping[int, Axes]) -> Spread:
        """Return what the step sends; what has no value is whole."""
        return Spread(self.arrays, assignment).of_step()

    def shown(self, name: int) -> str:
        """Return role and size of a class."""
        role = self.step._roles.of.get(name, "") or "no role"
        return f"{role} {self.step._equations.dims.sizes[name]:,}"

    def scope_of(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return the variables on which the layout of arrays depends."""
        names: set[int] = set()
        for number in numbers:
            names.update(name for row in self.arrays.classes[number] for name in row)
            if self.arrays.is_stored(number):
                names.add(STORED)
        return tuple(name for name in self.values if name in names)


def argument_cuts(step: Step) -> list[Cuts | None]:
    """Return the cuts of each argument's leaf: its own, or those that the jitted step gives."""
    leaves = [leaf for tree in step._trees for leaf in inputs_of(tree, step._function)]
    cuts_of = [_sharding_cuts(getattr(leaf, "sharding", None)) for leaf in leaves]
    shardings = () if step._call is None else step._call.params.get("in_shardings", ())
    if len(shardings) != len(cuts_of):
        return cuts_of
    by_call = map(_sharding_cuts, shardings)
    return [default if row is None else row for row, default in zip(cuts_of, by_call, strict=True)]


def constraint_cuts(eqn: Any) -> Cuts | None:
    """Return the cuts that a constraint in the program gives its array; None if nothing says."""
    return _sharding_cuts(eqn.params.get("sharding") or eqn.params.get("dst_sharding"))


def _sharding_cuts(sharding: Any) -> Cuts | None:
    spec = getattr(sharding, "spec", None)
    return None if spec is None else tuple(map(entry_axes, entries_of(spec)))


def _subsets(axes: Iterable[str]) -> Iterable[Axes]:
    """Yield all subsets of axes in their order, the smallest first."""
    names = tuple(axes)
    for count in range(len(names) + 1):
        yield from combinations(names, count)
