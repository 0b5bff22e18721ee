"""Roles of classes of dimensions, by what a step does with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from shardrules._program.step.dimensions import Dims
    from shardrules._program.step.equations import Equations, TracedOperation

ClassRole = Literal[
    "layers", "experts", "vocabulary", "KV heads", "heads", "query heads of a KV head", "head size",
    "model width", "hidden", "batch", "sequence", "",
]  # fmt: skip
# What only changes the dtype, the shape or the order of one array.
_SHAPED: Final = frozenset((
    "convert_element_type", "reshape", "transpose", "squeeze", "slice", "dynamic_slice",
    "copy", "optimization_barrier", "sharding_constraint", "reshard", "broadcast_in_dim",
    "rev", "name", "copy_p", "pvary", "all_gather", "all_gather_invariant",
))  # fmt: skip
# A gradient is added to zeros, and never written into a weight.
_WRITES: Final = frozenset(["dynamic_update_slice", "scatter"])


def weight_arrays(equations: Equations, weights: Iterable[int]) -> dict[int, int]:
    """Return {array that is a weight, or a slice, cast or other shape of it: the weight}."""
    sources = {number: number for number in weights}
    for operation, _ in equations.everything():
        rows = (row for inner in operation.bodies for row in operation.arguments(inner))
        pairs = [(outer, inner) for outer, inner, _ in rows]
        if operation.name in _SHAPED or (operation.rule and operation.rule.is_identity):
            pairs += zip(operation.inputs, operation.outputs, strict=False)
        for before, after in pairs:
            if before in sources:
                sources[after] = sources[before]
    return sources


def written_arrays(equations: Equations, arrays: Iterable[int]) -> set[int]:
    """Return which of these arrays the step writes into, as caches: they are state, no weights."""
    sources = weight_arrays(equations, arrays)
    written = (
        row.inputs[0] for row, _ in equations.everything() if row.name in _WRITES and row.inputs
    )
    return {sources[number] for number in written if number in sources}


def _alike(equations: Equations) -> dict[int, int]:
    """Return {class that code by device has a part of, or the part: the first class of these}."""
    first: dict[int, int] = {}
    for pair in equations.local:
        for whole, part in zip(*map(equations.dims.classes, pair), strict=False):
            if whole != part:
                first.setdefault(whole, whole)
                first[whole] = first.setdefault(part, first[whole])
    return first


class Roles:
    """Roles by class of dimensions.

    `weights` are the arguments that are the model's parameters, `data` those that are neither
    these nor state of the optimizer.
    """

    def __init__(self, equations: Equations, weights: Iterable[int], data: Iterable[int]) -> None:
        self._equations = equations
        self._first = _alike(equations)
        weights = tuple(weights)
        self.weights = weight_arrays(equations, weights)
        self.of_weights = Counter(self._classes_of(weights))
        self._of_data = [list(self._dims_of(number)) for number in data]
        self.of: dict[int, ClassRole] = {}
        self.contracted: dict[int, list[TracedOperation]] = {}
        self._name_stacks()
        for operation, _ in equations.everything():
            self._see(operation)
        self._name_data()
        self._name_rest()
        for name, first in self._first.items():
            if first in self.of:
                self.of[name] = self.of[first]
            self.of_weights[name] = self.of_weights[first]

    def lines_that_contract(self, name: int) -> list[str]:
        """Return the lines of the products that sum over a class."""
        return list(dict.fromkeys(operation.line for operation in self.contracted.get(name, ())))

    def is_like_weights(self, number: int) -> bool:
        """Say whether weights have all dimensions of an array, as their gradients do."""
        return self._are_of_weights(list(self._classes_of([number])))

    def _are_of_weights(self, classes: Collection[int]) -> bool:
        return bool(classes) and all(name in self.of_weights for name in classes)

    def _classes_of(self, numbers: Iterable[int]) -> Iterator[int]:
        for number in numbers:
            yield from dict.fromkeys(c for dims in self._dims_of(number) for c in dims)

    def _dims_of(self, number: int) -> Iterator[Dims]:
        for dim in self._equations.values[number].dims:
            yield tuple([self._first.get(c, c) for c in self._equations.dims.classes(dim)])

    def _name(self, classes: Iterable[int], role: ClassRole) -> None:
        for name in classes:
            self.of.setdefault(name, role)

    def _name_stacks(self) -> None:
        for operation, _ in self._equations.everything():
            for body in operation.bodies:
                for outer, _, is_slice in operation.arguments(body):
                    if is_slice and outer in self.weights:
                        self._name(next(self._dims_of(outer)), "layers")

    def _see(self, operation: TracedOperation) -> None:
        """Name the classes that one operation tells of."""
        rule = operation.rule
        if rule is None or not operation.inputs:
            return
        if operation.name == "dot_general":
            self._see_dot(operation)
        elif operation.name.startswith("ragged_dot"):
            sizes = operation.inputs[2]
            if sizes is not None:
                self._name((c for dims in self._dims_of(sizes) for c in dims), "experts")
        elif operation.name == "top_k" and operation.inputs[0] is not None:
            *_, last = self._dims_of(operation.inputs[0])
            self._name(self._of_weights_in(last), "experts")
        if not rule.looked_up:
            return
        for number, dims in operation.operands():
            for classes, factors in zip(self._dims_of(number), dims, strict=True):
                if rule.looked_up.intersection(factors):
                    self._name(self._of_weights_in(classes), "vocabulary")

    def _see_dot(self, operation: TracedOperation) -> None:
        (left, _), (left_batch, _) = operation.eqn.params["dimension_numbers"]
        first, second = operation.inputs
        if first is None or second is None:
            return
        rows, others = list(self._dims_of(first)), list(self._dims_of(second))
        summed = [c for dim in left for c in rows[dim]]
        batch = [c for dim in left_batch for c in rows[dim]]
        free = [c for row in (*rows, *others) for c in row if c not in (*summed, *batch)]
        for name in summed:
            self.contracted.setdefault(name, []).append(operation)
        if first in self.weights or second in self.weights:
            self._name(self._of_weights_in(batch), "experts")
            return
        # A batch of one row has no class: then attention sums over the size of heads, and has
        # positions that no weight has.
        is_of_one_row = self._are_of_weights(summed) and not self._are_of_weights(summed + free)
        if batch and (not self._are_of_weights(batch) or is_of_one_row):
            self._see_attention(summed, batch, free)

    def _see_attention(self, summed: list[int], batch: list[int], free: list[int]) -> None:
        """Name the classes of a product of two activations, one for each sequence and head."""
        sizes, grouped = self._of_weights_in(summed), self._of_weights_in(free)
        self._name(sizes, "head size")
        if sizes or not grouped:
            self._name(self._of_weights_in(batch), "KV heads" if grouped else "heads")
        if sizes:
            self._name(grouped, "query heads of a KV head")
            self._name(free, "sequence")
            self._name(batch, "batch")

    def _of_weights_in(self, classes: Iterable[int]) -> list[int]:
        return [name for name in classes if name in self.of_weights]

    def _name_data(self) -> None:
        for array in self._of_data:
            for place, classes in enumerate(array):
                for name in classes:
                    if name not in self.of_weights:
                        self._name([name], "sequence" if place else "batch")

    def _name_rest(self) -> None:
        """Name what is left of the classes that weights have."""
        of_data = Counter(c for array in self._of_data for classes in array for c in classes)
        rest = [c for c in self.of_weights if c not in self.of]
        rest.sort(key=lambda c: (self.of_weights[c], of_data[c]), reverse=True)
        if rest and self.of_weights[rest[0]] > 1 and rest[0] in self.contracted:
            self._name([rest.pop(0)], "model width")
        self._name((c for c in rest if c in self.contracted), "hidden")
