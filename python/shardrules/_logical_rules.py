"""Logical axis rules by priority, as flax.linen resolves them, compiled once per rule list.

Gives names and mesh axes numbers, and lets the C++ core decide which rule each dimension gets and
why others lost. Must not know about trees, contexts or arrays beyond shapes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._core import LogicalRules
from shardrules._logical import check_rules, logical_names
from shardrules._specs import (
    is_partition_spec,
    is_unconstrained,
    partition_spec,
    shown,
    with_entries,
)

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

UNASSIGNED: Final = object()


class PriorityRules:
    """A list of (logical name, mesh axes) rules, by falling priority. Immutable.

    Args:
        rules: Pairs; the mesh axes are a name, a tuple or list of names, or None.
        axis_sizes: Devices along each mesh axis, for arrays whose shape is known: a rule whose axes
            do not divide the dimension loses, too. An axis that is not there counts as one device.

    Raises:
        ValueError: A rule is not a pair, or the rules are no tuple or list.
    """

    __slots__ = ("_axis_ids", "_core", "_name_ids", "rules")

    def __init__(self, rules: Any, axis_sizes: Mapping[str, int]) -> None:
        if not isinstance(rules, (tuple, list)):
            raise ValueError(  # noqa: TRY004 flax's type
                f"Unknown axis rule specification type: {shown(rules)}; give a tuple or list of "
                "pairs such as ('embed', 'fsdp')"
            )
        check_rules(rules)
        self.rules = tuple(rules)
        self._name_ids: dict[Any, int] = {}
        self._axis_ids: dict[str, int] = {}
        numbered = [
            (self._name_ids.setdefault(name, len(self._name_ids)), self._axis_numbers(value))
            for name, value in self.rules
        ]
        self._core = LogicalRules(numbered, [axis_sizes.get(axis, 1) for axis in self._axis_ids])

    def resolve(self, names: Any, shape: tuple[int, ...] | None = None) -> Outcome:
        """What each dimension of an array with these names gets.

        Args:
            names: Per dimension a name; or None, mesh axes as a tuple, or UNCONSTRAINED, which
                stay.
            shape: Of the array, if rules shall lose that do not divide it.

        Raises:
            ValueError: A name is there twice.
            TypeError: `names` is no tuple, list or PartitionSpec.
        """
        wanted = logical_names(names)
        twice = tuple(n for n, k in Counter(wanted).items() if k > 1 and isinstance(n, str))
        if twice:
            raise ValueError(
                f"Unsupported: Dimensions {twice} occur more than once in array names {names}; "
                "give each dimension a name of its own, or None"
            )
        winners, lost = self._core.resolve(
            [
                (
                    self._name_ids.get(entry) if isinstance(entry, str) else None,
                    () if isinstance(entry, str) else self._known_axes(entry),
                    None if shape is None or dim >= len(shape) else shape[dim],
                )
                for dim, entry in enumerate(wanted)
            ]
        )
        return Outcome(self, wanted, winners, lost)

    def _axis_numbers(self, value: Any) -> list[int]:
        return [self._axis_ids.setdefault(a, len(self._axis_ids)) for a in _axes_in(value)]

    def _known_axes(self, entry: Any) -> list[int]:
        return [self._axis_ids[axis] for axis in _axes_in(entry) if axis in self._axis_ids]


class Outcome(NamedTuple):
    """How the names of one array fared."""

    rules: PriorityRules
    names: tuple[Any, ...]
    winners: list[int | None]
    """Per dimension, the index of the rule that gave it its mesh axes."""
    lost: list[tuple[int, int, str, int | None]]
    """Rules that were tried and lost: see `_core.LogicalRules.resolve`."""

    def entries(self) -> list[Any]:
        """Per dimension its entry; UNASSIGNED for a name that got none."""
        return [
            self.rules.rules[winner][1]
            if winner is not None
            else (UNASSIGNED if isinstance(name, str) else name)
            for name, winner in zip(self.names, self.winners, strict=True)
        ]

    def spec(self, names: Any) -> PartitionSpec:
        """The PartitionSpec, unassigned names unsharded, with the unreduced axes of `names`."""
        entries = [None if entry is UNASSIGNED else entry for entry in self.entries()]
        return (
            with_entries(names, entries) if is_partition_spec(names) else partition_spec(*entries)
        )

    def explained(self) -> str:
        """A line for each dimension, below it one for each rule that lost it, and to whom."""
        lines = []
        for dim, (name, entry) in enumerate(zip(self.names, self.entries(), strict=True)):
            winner = self.winners[dim]
            got = "no rule's mesh axes" if entry is UNASSIGNED else repr(entry)
            by = "" if winner is None else f"  (rule {winner})"
            lines.append(f"dim {dim} {name!r} -> {got}{by}")
            lines += [
                f"    rule {rule} {self.rules.rules[rule]!r} lost: {self._reason(why, to)}"
                for rule, at, why, to in self.lost
                if at == dim
            ]
        return "\n".join(lines)

    def _reason(self, why: str, to: int | None) -> str:
        if why == "dim taken":
            return f"the dimension has the mesh axes of rule {to}"
        if why == "axis taken" and to is not None:
            return f"a mesh axis of it is used by dim {to} {self.names[to]!r}"
        return "its mesh axes do not divide the dimension"


@functools.lru_cache(maxsize=64)
def compiled_rules(rules: tuple[Any, ...], axes: tuple[tuple[str, int], ...]) -> PriorityRules:
    """The rules, compiled once for each mesh's axis sizes."""
    return PriorityRules(rules, dict(axes))


def hashable(rules: Any) -> Any:
    """The rules as a tuple of pairs with tuples in them, as `compiled_rules` wants them."""
    if not isinstance(rules, (tuple, list)):
        return rules
    return tuple(map(hashable, rules))


def _axes_in(value: Any) -> list[str]:
    if value is None or is_unconstrained(value):
        return []
    if isinstance(value, (tuple, list)):
        return [axis for inner in value for axis in _axes_in(inner)]
    return [value]
