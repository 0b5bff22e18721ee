"""A plan as a value: what each leaf of a tree gets on a mesh, as columns.

What checks, budgets, explanations, diffs, locks, sweeps, tables and reports take. A column has a
row for each leaf, in the order of the walk; what leaves have in common is in `kinds`. A column
costs one look-up per leaf, when it is first asked for. Must not know how rules decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardrules._correction import plain_spec
from shardrules._planning.name_rules import coverage_of_names
from shardrules._planning.path_rules import coverage_of
from shardrules._specs import Entries

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._logical.rules import LogicalRules
    from shardrules._matching.coverage import Coverage
    from shardrules._matching.rules import Rules
    from shardrules._planning.fold import Folded
    from shardrules._planning.kinds import Kind, Spec
    from shardrules._planning.leaves import Leaves
    from shardrules._sharding.device_bytes import Held

__all__ = ["Columns"]


@dataclass(frozen=True, eq=False)
class Columns:
    """The sharding of each leaf of a tree on a mesh."""

    leaves: Leaves
    kinds: list[Kind]
    """Per kind of `leaves`, what it gets."""
    axis_sizes: dict[str, int]
    """Devices along each mesh axis, in the mesh's order."""
    explicit_axes: frozenset[str] = frozenset()
    """The mesh axes of type Explicit; those of a dict are of type Auto."""

    @property
    def rules(self) -> Rules | LogicalRules:
        """The rules that decide the leaves."""
        return self.leaves.rules

    @property
    def paths(self) -> list[str]:
        """Column: the leaves' paths."""
        return self.leaves.paths

    @property
    def sources(self) -> list[str]:
        """Column: the paths that the rules meet."""
        return self.leaves.sources

    @property
    def kind_of(self) -> npt.NDArray[np.int32]:
        """Column, int32: index of the leaf's kind in `kinds`."""
        return self.leaves.kind_of

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Per kind, int64: how many leaves are of it."""
        return self.leaves.counts

    @property
    def folded(self) -> list[Folded]:
        """The leaves with siblings folded, a kind each."""
        return self.leaves.folded

    @cached_property
    def rule(self) -> npt.NDArray[np.int32]:
        """Column, int32: index of the rule that decides the leaf; -1 if none does."""
        rules = [-1 if kind.rule is None else kind.rule for kind in self.kinds]
        return np.array(rules, np.int32)[self.kind_of]

    @cached_property
    def bytes(self) -> npt.NDArray[np.int64]:
        """Column, int64: bytes of the whole leaf."""
        return np.array([kind.bytes for kind in self.kinds], np.int64)[self.kind_of]

    @cached_property
    def device_bytes(self) -> npt.NDArray[np.int64]:
        """Column, int64: bytes of the leaf on the device that holds most of it."""
        return np.array([kind.device_bytes for kind in self.kinds], np.int64)[self.kind_of]

    @property
    def total_bytes(self) -> int:
        """Bytes of all leaves together, exact where int64 is too small for the sum."""
        counted = zip(self.kinds, self.counts.tolist(), strict=True)
        return sum(kind.bytes * count for kind, count in counted)

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return prod(self.axis_sizes.values())

    @property
    def held(self) -> list[Held]:
        """Per kind, what the devices hold of one leaf."""
        return [kind._held for kind in self.kinds]

    @cached_property
    def coverage(self) -> Coverage:
        """Per rule, the leaves that it matches and wins, among those that need a rule."""
        rules = self.leaves.path_rules
        if rules is None:
            return coverage_of_names(self.rules, self.kinds, self.counts.tolist())
        needed = [kind.rule is not None or kind.status != "placed" for kind in self.kinds]
        if all(needed):
            return coverage_of(rules, self.sources)
        rows = np.flatnonzero(np.array(needed, bool)[self.kind_of])
        return coverage_of(rules, map(self.sources.__getitem__, rows.tolist()))

    def spec_of_rule(self, index: int) -> Spec:
        """The spec that a rule asks for; that of one dimension for a logical rule."""
        value = self.rules[index][1]
        is_for_paths = self.leaves.path_rules is not None
        return plain_spec(value) if is_for_paths else Entries((value,))

    def is_on(self, axis_sizes: Mapping[str, int]) -> bool:
        """Whether the mesh has these axes, in this order."""
        return list(self.axis_sizes.items()) == list(axis_sizes.items())
