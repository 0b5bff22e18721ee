"""Logical axis rules, compiled once per rule list, in the dialects of flax.linen and flax.core.

Gives numbers to names and mesh axes. The C++ core decides which rule each dimension gets, and why
other rules lose. Must not know about trees, contexts or arrays beyond shapes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._arguments import boolean, check_type
from shardrules._core import LogicalRules
from shardrules._format import shown
from shardrules._logical.names import check_rules, last_wins, logical_names, spec_of_names
from shardrules._printable import printable_lines
from shardrules._specs import is_unconstrained

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

__all__ = [
    "FLAX_CORE",
    "LINEN",
    "UNASSIGNED",
    "CompiledLogicalRules",
    "LogicalDialect",
    "Resolution",
    "axes_in",
    "compiled_rules",
    "resolve_core",
]

UNASSIGNED: Final = object()


@dataclass(frozen=True, slots=True)
class LogicalDialect:
    """A way in which logical axis rules apply to the names of an array.

    Args:
        name: The name of the dialect.
        last_wins: Whether the last rule for a name wins, even if other dimensions use its mesh
            axes. Names may then repeat, and a tuple of names can have a rule. Otherwise the first
            rule wins whose mesh axes are free.
        keeps_unknown: Whether a name without a rule stays in the spec. Otherwise its dimension is
            unsharded.
    """

    name: str
    last_wins: bool
    keeps_unknown: bool

    def __post_init__(self) -> None:
        check_type("name", self.name, str, "a string")
        object.__setattr__(self, "last_wins", boolean("last_wins", self.last_wins))
        object.__setattr__(self, "keeps_unknown", boolean("keeps_unknown", self.keeps_unknown))


LINEN: Final = LogicalDialect("linen", last_wins=False, keeps_unknown=False)
"""The dialect of `flax.linen.logical_to_mesh_axes` of flax 0.12, T5X and MaxText."""
FLAX_CORE: Final = LogicalDialect("flax.core", last_wins=True, keeps_unknown=True)
"""The dialect of `flax.core.spmd.get_pspec` of flax 0.12 and nnx."""


class CompiledLogicalRules:
    """A list of (logical name, mesh axes) rules. Immutable.

    Args:
        rules: Pairs. The mesh axes are a name, a tuple or list of names, or None.
        dialect: How names are resolved.
        axis_sizes: Devices along each mesh axis, for arrays with a known shape. A missing axis
            counts as one device.
        indivisible: As in `Correction`: the axes that a rule keeps if its axes do not divide the
            dimension. A rule that keeps none loses. With "keep" and "error" it keeps all.

    Raises:
        ValueError: A rule is not a pair, or `rules` is not a tuple or list.
    """

    __slots__ = ("_axis_ids", "_core", "_name_ids", "dialect", "rules")

    def __init__(
        self,
        rules: Any,
        dialect: LogicalDialect,
        axis_sizes: Mapping[str, int],
        indivisible: str = "drop",
    ) -> None:
        if not isinstance(rules, (tuple, list)):
            raise ValueError(  # noqa: TRY004 flax's type
                f"Unknown axis rule specification type: {shown(rules)}; give a tuple or list of "
                "pairs such as ('embed', 'fsdp')"
            )
        check_rules(rules)
        self.rules = tuple(rules)
        self.dialect = dialect
        self._name_ids: dict[Any, int] = {}
        self._axis_ids: dict[str, int] = {}
        numbered = [
            (self._name_ids.setdefault(name, len(self._name_ids)), self._axis_numbers(value))
            for name, value in self.rules
        ]
        self._core = LogicalRules(
            numbered,
            [axis_sizes.get(axis, 1) for axis in self._axis_ids],
            last_wins=dialect.last_wins,
            # The correction reports the error later.
            indivisible="keep" if indivisible == "error" else indivisible,
        )

    @property
    def names(self) -> list[str]:
        """The logical names that have rules."""
        return [name for name in self._name_ids if isinstance(name, str)]

    def spec(self, names: Any) -> PartitionSpec:
        """The PartitionSpec of an array with these names and any shape; cached.

        Raises:
            ValueError, TypeError: As `resolve`.
        """
        try:
            return _remembered_spec(self, tuple(names) if isinstance(names, list) else names)
        except TypeError:  # not hashable, or not names: this raises the error
            return self.resolve(names).spec(names)

    def resolve(self, names: Any, shape: tuple[int, ...] | None = None) -> Resolution:
        """The rule of each dimension of an array with these names.

        Args:
            names: A name for each dimension. None, a tuple of mesh axes and UNCONSTRAINED stay
                unchanged.
            shape: The shape of the array, if rules that do not divide it shall lose.

        Raises:
            ValueError: A name occurs twice.
            TypeError: `names` is not a tuple, list or PartitionSpec.
        """
        wanted = logical_names(names)
        twice = tuple(n for n, k in Counter(map(_text, wanted)).items() if n is not None and k > 1)
        if twice and not self.dialect.last_wins:
            raise ValueError(
                f"Unsupported: Dimensions {twice} occur more than once in array names {names}; "
                "give each dimension a name of its own, or None"
            )
        try:
            winners, lost = self._core.resolve(
                [
                    (self._name_id(entry), self._known_axes(entry), _at(shape, dim))
                    for dim, entry in enumerate(wanted)
                ]
            )
        except TypeError as error:
            raise TypeError(
                f"an entry of the logical axis names {shown(names)} cannot be looked up: {error}; "
                "an entry is a name, None, or a tuple of names"
            ) from None
        return Resolution(self, wanted, winners, lost)

    def _name_id(self, entry: Any) -> int | None:
        if isinstance(entry, str) or self.dialect.last_wins:
            return self._name_ids.get(entry)
        return None

    def _axis_numbers(self, value: Any) -> list[int]:
        return [self._axis_ids.setdefault(a, len(self._axis_ids)) for a in axes_in(value)]

    def _known_axes(self, entry: Any) -> list[int]:
        if isinstance(entry, str):
            return []
        return [self._axis_ids[axis] for axis in axes_in(entry) if axis in self._axis_ids]


class Resolution(NamedTuple):
    """The rules that the names of one array got, and the rules that lost."""

    rules: CompiledLogicalRules
    names: tuple[Any, ...]
    winners: list[int | None]
    """For each dimension, the index of its rule, or None."""
    lost: list[tuple[int, int, str, int | None]]
    """The rules that lost: see `_core.LogicalRules.resolve`."""

    def entries(self) -> list[Any]:
        """The entry of each dimension; UNASSIGNED for a name without mesh axes."""
        unknown_stays = self.rules.dialect.keeps_unknown
        return [
            _tuple_if_list(self.rules.rules[winner][1])
            if winner is not None
            else (UNASSIGNED if isinstance(name, str) and not unknown_stays else name)
            for name, winner in zip(self.names, self.winners, strict=True)
        ]

    def spec(self, names: Any) -> PartitionSpec:
        """The PartitionSpec, with None for unassigned names and the unreduced axes of `names`."""
        entries = [None if entry is UNASSIGNED else entry for entry in self.entries()]
        return spec_of_names(names, entries)

    def explained(self) -> str:
        """A line for each dimension, followed by a line for each rule that lost it, and why."""
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
        return printable_lines(lines)

    def _reason(self, why: str, to: int | None) -> str:
        if why == "dim taken":
            return f"the dimension has the mesh axes of rule {to}"
        if why == "axis taken" and to is not None:
            return f"a mesh axis of it is used by dim {to} {self.names[to]!r}"
        return "its mesh axes do not divide the dimension"


def compiled_rules(
    rules: Any, dialect: LogicalDialect, axis_sizes: Mapping[str, int], indivisible: str = "drop"
) -> CompiledLogicalRules:
    """The rules, compiled once for these axis sizes."""
    axes = tuple(axis_sizes.items())
    # Most rules have no lists in them.
    for as_key in (_as_tuple, _hashable):
        try:
            return _compiled(as_key(rules), dialect, axes, indivisible)
        except TypeError:  # something in it cannot be hashed
            pass
    # Raises the error that names the rule, if one is invalid.
    return CompiledLogicalRules(rules, dialect, axis_sizes, indivisible)


@functools.lru_cache(maxsize=64)
def _compiled(
    rules: Any, dialect: LogicalDialect, axis_sizes: tuple[tuple[str, int], ...], indivisible: str
) -> CompiledLogicalRules:
    return CompiledLogicalRules(rules, dialect, dict(axis_sizes), indivisible)


def resolve_core(names: Any, rules: Iterable[tuple[str, Any]]) -> PartitionSpec:
    """The PartitionSpec of an array with these logical names, in the dialect of flax.core.

    Each entry of `names` is looked up as a whole, also a tuple of names. The last rule for an entry
    wins. An entry without a rule stays unchanged. Semantics of flax.core.spmd.apply_rules, 0.12.

    Args:
        names: A tuple or list of entries, or a PartitionSpec. The unreduced and reduced axes of a
            PartitionSpec are kept.
        rules: (logical name, mesh axes) pairs. The mesh axes are one axis, a tuple or list of axes,
            or None.

    Raises:
        TypeError: `names` is not a tuple, list or PartitionSpec, or an entry is not hashable.
        ValueError, TypeError: A rule is not a pair.

    Example:
        >>> rules = [("embed", "tp"), ("batch", "dp"), ("embed", "fsdp")]
        >>> tuple(resolve_core(("batch", "embed", "heads", None), rules))
        ('dp', 'fsdp', 'heads', None)
    """
    if isinstance(rules, dict):
        rules = tuple(last_wins(rules).items())
    pairs = rules if type(rules) is tuple else tuple(rules)
    return compiled_rules(pairs, FLAX_CORE, {}).spec(names)


@functools.lru_cache(maxsize=4096, typed=True)
def _remembered_spec(rules: CompiledLogicalRules, names: Any) -> PartitionSpec:
    return rules.resolve(names).spec(names)


def axes_in(value: Any) -> list[str]:
    if value is None or is_unconstrained(value):
        return []
    if isinstance(value, (tuple, list)):
        return [axis for inner in value for axis in axes_in(inner)]
    return [value]


def _text(entry: Any) -> str | None:
    return entry if isinstance(entry, str) else None


def _at(shape: tuple[int, ...] | None, dim: int) -> int | None:
    return None if shape is None or dim >= len(shape) else shape[dim]


def _tuple_if_list(mesh_axes: Any) -> Any:
    # Rules read from JSON or YAML have lists.
    return tuple(mesh_axes) if isinstance(mesh_axes, list) else mesh_axes


def _hashable(rules: Any) -> Any:
    """A list of pairs as a tuple of tuples; anything else unchanged."""
    if not isinstance(rules, (tuple, list)):
        return rules
    return tuple(
        (rule[0], _tuple_if_list(rule[1]))
        if isinstance(rule, (tuple, list)) and len(rule) == 2
        else rule
        for rule in rules
    )


def _as_tuple(rules: Any) -> Any:
    return tuple(rules) if isinstance(rules, list) else rules
