"""What the values of a compiled step are: copies of arguments, next states; what axes are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from math import prod
from typing import Final

from shardrules._base.specs import entry_axes
from shardrules._plan.path_words import is_gathered, use_of
from shardrules._plan.roles import experts_dim
from shardrules._program.executable import Executable, State
from shardrules._program.facts import SLICES, Facts
from shardrules._program.values import Values, reached

_BATCH_SHARE: Final = 0.1
"""Share of the elements of all states whose gradients an axis of the batch sums."""


class Context:
    """Answers what concerns all values of a program.

    Args:
        executable: The compiled function; it has an HLO text and a mesh.
        states: States, which come back changed.
        batches: Leaves of the inputs that are no states and no planned parameters.
    """

    def __init__(
        self, executable: Executable, states: Sequence[State], batches: Sequence[int]
    ) -> None:
        assert executable.mesh is not None
        self.executable = executable
        self.axis_sizes: dict[str, int] = dict(executable.mesh.shape)
        self._states = states
        self._batches = batches
        self.sums: Sequence[tuple[int, int, frozenset[str]]] = ()
        """Sums of gradients: the result, the leaf of the state, and the axes; `rows` sets them."""
        self._next_of: dict[int, frozenset[int]] = {}

    @property
    def values(self) -> Values:
        return self.executable.values

    @property
    def facts(self) -> Facts:
        return self.executable.facts

    @cached_property
    def leaf_of_copy(self) -> Sequence[int | None]:
        """Leaf of the inputs that each value is a copy of; -1 of a constant of the program."""
        parameters = (origin and origin.parameter for origin in self.facts.origins)
        leaf_of = self.executable.leaf_of
        return [None if number is None else leaf_of.get(number, -1) for number in parameters]

    @cached_property
    def next_state_of(self) -> Mapping[int, int]:
        """Leaf of the inputs whose next state is made of a value, element by element."""
        pairs = [pair for state in self._states for pair in zip(*state[:2], strict=True)]
        # A gradient is that of the parameter, which more is made of than of its moments.
        number_of, used_by = self.executable.parameter_of, self.values.used_by
        node_of = {leaf: self.values.parameters[number] for leaf, number in number_of.items()}
        pairs.sort(key=lambda pair: -len(used_by[node_of[pair[0]]]) if pair[0] in node_of else 0)
        results = self.executable.results
        return self.facts.next_states((before, results[after]) for before, after in pairs)

    def leaves_of_product(self, node: int) -> frozenset[int]:
        """Return the leaves of the inputs that a product multiplies, or whose gradient it is."""
        leaves = {self.leaf_of_copy[factor] for factor in self.values.made_of[node]}
        leaves.add(self.next_state_of.get(node))
        return frozenset(leaf for leaf in leaves if leaf is not None and leaf >= 0)

    @cached_property
    def batch_axes(self) -> frozenset[str]:
        """Mesh axes that shard the batch: those of its leaves, or else those that sum gradients.

        If the whole batch is on each device, it is those that are for it by their names.
        """
        axes = frozenset().union(*map(self.executable.axes_of, self._batches))
        axes = axes or self._gradient_axes()
        return axes or frozenset(axis for axis in self.axis_sizes if is_gathered(axis))

    def _gradient_axes(self) -> frozenset[str]:
        """Return the axes over which gradients are summed, but for those of a few."""
        leaves_of: dict[str, set[int]] = {}
        for _, leaf, axes in self.sums:
            for axis in axes:
                leaves_of.setdefault(axis, set()).add(leaf)
        least = _BATCH_SHARE * self.size(chain(*(state.inputs for state in self._states)))
        return frozenset(axis for axis, leaves in leaves_of.items() if self.size(leaves) > least)

    @cached_property
    def behind_gradients(self) -> frozenset[int]:
        """Values that are made of summed gradients, as those of an optimizer are."""
        sums = [result for result, _, _ in self.sums]
        return frozenset(reached(sums, lambda node: self.values.used_by[node]))

    def next_of(self, leaf: int) -> frozenset[int]:
        """Return the values that are made of a leaf element by element."""
        if leaf not in self._next_of:
            node = self.values.parameters[self.executable.parameter_of[leaf]]
            self._next_of[leaf] = self.facts.results([node])
        return self._next_of[leaf]

    def size(self, leaves: Iterable[int]) -> int:
        """Count the elements of leaves of the inputs."""
        return sum(prod(self.executable.inputs.shapes[leaf]) for leaf in leaves)

    def count(self, axes: Iterable[str]) -> int:
        """Count the devices along mesh axes."""
        return prod(self.axis_sizes[axis] for axis in axes)

    @cached_property
    def looped_stacks(self) -> set[int]:
        """Stacks that a loop keeps whole while each of its trips takes a slice."""
        looped, sliced, values = set(), set(), self.values
        for node, opcode in enumerate(values.opcodes):
            if opcode == "while":
                looped.add(self.facts.source_of(values.made_of[node][0]))
            elif opcode in SLICES and self.facts.layers(values.made_of[node][0], node) > 1:
                sliced.add(self.facts.source_of(values.made_of[node][0]))
        return looped & sliced

    def expert_axes_of(self, leaf: int) -> frozenset[str]:
        """Return the mesh axes that shard the experts of a leaf, if it has a dimension of them."""
        side = self.executable.inputs
        dim = experts_dim(side.paths[leaf], side.shapes[leaf])
        spec = getattr(side.shardings[leaf], "spec", None)
        entries = () if dim is None or spec is None else spec[dim : dim + 1]
        return frozenset(chain(*map(entry_axes, entries)))

    @cached_property
    def expert_axes(self) -> frozenset[str]:
        """Mesh axes that shard the experts of arguments, or have a name for experts."""
        cuts = map(self.expert_axes_of, range(len(self.executable.inputs.shardings)))
        return self._axes_named_for_experts.union(*cuts)

    @cached_property
    def axes_for_experts(self) -> frozenset[str]:
        """Mesh axes that have a name for experts, or shard nothing but experts and the batch."""
        leaves = set(range(len(self.executable.inputs.shardings))).difference(self._batches)
        others = (self.executable.axes_of(leaf) - self.expert_axes_of(leaf) for leaf in leaves)
        return frozenset(self.axis_sizes).difference(*others) | self._axes_named_for_experts

    @property
    def _axes_named_for_experts(self) -> frozenset[str]:
        return frozenset(axis for axis in self.axis_sizes if use_of(axis) == "experts")
