"""`Resolver`: logical axis rules compiled for a mesh, and the rules that names get.

The names of an array come in several forms, which `logical_names` brings into one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar, cast

from shardrules._base.rule_specs import Correction, LibraryCorrection, absent_policy
from shardrules._base.specs import (
    Entries,
    axes_present,
    entries_of,
    is_partition_spec,
    is_unconstrained,
    partition_spec,
    with_entries,
    without_axes,
)
from shardrules._base.text import shown
from shardrules._core import LogicalRuleSet
from shardrules._rules.dialects import FLAX_CORE, LogicalDialect

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec


def last_wins(rules: Iterable[tuple[str, Any]]) -> dict[Any, Any]:
    """Return rules as a dict from logical name to mesh axes.

    Raises:
        ValueError: A rule is a string, or its length is not two.
        TypeError: A rule is not a tuple or list, or its name is not hashable.

    Example:
        >>> last_wins([("embed", "tp"), ("embed", None)])
        {'embed': None}
    """
    pairs = rules if isinstance(rules, (tuple, list)) else tuple(rules)
    if _PAIRS.issuperset(map(type, pairs)):
        try:
            return dict(pairs)
        except (TypeError, ValueError):
            pass  # the error below names the rule
    check_rules(pairs, ".items()" if isinstance(rules, dict) else "")
    return dict(pairs)


def check_rules(rules: Iterable[Any], instead: str = "") -> None:
    """Check that each rule is a pair with a hashable name."""
    hint = f"; of a dict, give {instead}" if instead else ""
    for index, rule in enumerate(rules):
        if isinstance(rule, str) or (isinstance(rule, (tuple, list)) and len(rule) != 2):
            raise ValueError(f"logical axis rule {index} is {shown(rule)}; {_A_RULE}{hint}")
        if not isinstance(rule, (tuple, list)):
            raise TypeError(f"logical axis rule {index} is {shown(rule)}; {_A_RULE}")
        try:
            hash(rule[0])
        except TypeError as error:
            raise TypeError(
                f"logical axis rule {index} is for the name {shown(rule[0])}: {error}; {_A_RULE}"
            ) from None


_PAIRS = frozenset((tuple, list))
_A_RULE = "a rule is a pair (logical name, mesh axes), such as ('embed', 'fsdp')"


def logical_names(names: Any) -> tuple[Any, ...]:
    """Return the entries of a tuple, list or PartitionSpec of logical axis names.

    Raises:
        TypeError: It is something else, such as a string, whose letters would count as names.
    """
    if type(names) is tuple:  # most are
        return names
    if is_partition_spec(names):
        return entries_of(names)
    if not isinstance(names, (tuple, list)):
        raise TypeError(
            f"the logical axis names are {shown(names)}; give a tuple with a name or None for each "
            "dimension, such as ('embed', None)"
        )
    return tuple(names)


def checked_names(names: Any) -> tuple[Any, ...]:
    """Return the entries of logical axis names: names, None, UNCONSTRAINED, tuples of names."""
    entries = logical_names(names)
    for entry in entries:
        if not is_name(entry) and not (isinstance(entry, tuple) and all(map(is_name, entry))):
            raise TypeError(
                f"an entry of the logical axis names {shown(names)} is {shown(entry)}; an entry is "
                "a name, None, or a tuple of names"
            )
    return entries


def is_name(entry: Any) -> bool:
    """Return whether it is an entry of logical axis names."""
    return entry is None or isinstance(entry, str) or is_unconstrained(entry)


def spec_of_names(names: Any, entries: Iterable[Any]) -> PartitionSpec:
    """Return the PartitionSpec of these entries, with the unreduced and reduced axes of `names`."""
    return with_entries(names, entries) if is_partition_spec(names) else partition_spec(*entries)


_Spec = TypeVar("_Spec", "PartitionSpec", Entries, "PartitionSpec | Entries")

UNASSIGNED: Final = object()
_KEEP: Final = LibraryCorrection(absent="keep", indivisible="keep")


Reason = Literal["dim taken", "axis taken", "indivisible", "absent"]


class LostRule(NamedTuple):
    """Rule for the name of a dimension that does not decide it."""

    rule: int
    dim: int
    why: Reason
    """The dimension has the mesh axes of another rule, another dimension has one of its mesh axes,
    or its mesh axes do not divide the dimension or are absent from the mesh."""
    to: int | None
    """The rule or the dimension that it lost to."""


class Resolver:
    """List of (logical name, mesh axes) rules on a mesh. Immutable.

    Args:
        rules: Pairs. The mesh axes are a name, a tuple or list of names, or None.
        dialect: How names are resolved.
        axis_sizes: Devices along each mesh axis, for arrays with a known shape. A missing axis
            counts as one device.
        correction: The axes that a rule keeps if the mesh lacks one of them, or if they do not
            divide the dimension. A rule that keeps none loses, if the dialect tries the next one.
            Default: rules do not lose so.
        optional_axes: Axes that a rule loses alone where the mesh lacks them and the correction
            makes that an error.

    Raises:
        ValueError: A rule is not a pair, or `rules` is not a tuple or list.
    """

    __slots__ = ("_absent", "_axis_ids", "_core", "_name_ids", "_numbers", "dialect", "rules")

    def __init__(
        self,
        rules: Any,
        dialect: LogicalDialect,
        axis_sizes: Mapping[str, int],
        correction: Correction | None = None,
        optional_axes: frozenset[str] = frozenset(),
    ) -> None:
        if not isinstance(rules, (tuple, list)):
            raise ValueError(  # noqa: TRY004 flax's type
                f"Unknown axis rule specification type: {shown(rules)}; give a tuple or list of "
                "pairs such as ('embed', 'fsdp')"
            )
        check_rules(rules)
        self.rules = tuple(rules)
        self.dialect = dialect
        policy = correction if correction is not None and dialect.tries_next else _KEEP
        absent = absent_policy(policy)
        self._name_ids: dict[Any, int] = {}
        self._axis_ids: dict[str, int] = {}
        self._absent: dict[Any, list[int]] = {}
        """Per name the rules of which the mesh leaves no axes."""
        self._numbers: list[int] = []
        """The index of each rule that the core has."""
        numbered = []
        for index, (name, value) in enumerate(self.rules):
            number = self._name_ids.setdefault(name, len(self._name_ids))
            axes = axes_in(value)
            kept = axes_present(axes, axis_sizes, absent)
            if absent == "error":
                kept = [a for a in axes if a in axis_sizes or a not in optional_axes]
            if axes and not kept:
                self._absent.setdefault(name, []).append(index)
                continue
            self._numbers.append(index)
            ids = [self._axis_ids.setdefault(axis, len(self._axis_ids)) for axis in kept]
            numbered.append((number, ids))
        self._core = LogicalRuleSet(
            numbered,
            [axis_sizes.get(axis, 1) for axis in self._axis_ids],
            dialect.last_wins,
            # The correction reports the error later.
            "keep" if policy.indivisible == "error" else policy.indivisible,
        )

    def spec(self, names: Any) -> PartitionSpec:
        """Return the PartitionSpec of an array with these names and any shape; cached."""
        try:
            return _spec_of_axes(self, tuple(names) if isinstance(names, list) else names)
        except TypeError:  # not hashable, or not names: this raises the error
            return self.resolve(names).spec(names)

    def resolve(self, names: Any, shape: tuple[int, ...] | None = None) -> Resolution:
        """Return the rule of each dimension of an array with these names.

        Args:
            names: A name for each dimension. None, a tuple of mesh axes and UNCONSTRAINED stay
                unchanged.
            shape: The shape of the array, if rules that do not divide it shall lose.
        """
        free = logical_names(names)
        if twice := repeated(free, self.dialect):
            raise ValueError(
                f"Unsupported: Dimensions {twice} occur more than once in array names {names}; "
                "give each dimension a name of its own, or None"
            )
        try:
            winners, lost = self._core.resolve(
                [
                    (self._name_id(entry), self._known_axes(entry), size)
                    for entry, size in zip_longest(free, (shape or ())[: len(free)])
                ]
            )
        except TypeError as error:
            raise TypeError(
                f"an entry of the logical axis names {shown(names)} cannot be looked up: {error}; "
                "an entry is a name, None, or a tuple of names"
            ) from None
        numbers = self._numbers
        return Resolution(
            self,
            free,
            [None if winner is None else numbers[winner] for winner in winners],
            sorted([*self._lost_to_absent(free), *self._lost(lost)]),
        )

    def without_ones(self, spec: _Spec, axis_sizes: Mapping[str, int]) -> _Spec:
        """Return the spec, without axes of one device if the dialect leaves them out."""
        if self.dialect.keeps_size_one:
            return spec
        return without_axes(spec, frozenset(a for a, size in axis_sizes.items() if size == 1))

    def _lost(self, losses: Iterable[tuple[int, int, str, int | None]]) -> Iterator[LostRule]:
        """Return the rules that lost, by their numbers in the core."""
        numbers = self._numbers
        for rule, dim, why, to in losses:
            rival = numbers[to] if why == "dim taken" and to is not None else to
            yield LostRule(numbers[rule], dim, cast(Reason, why), rival)

    def _lost_to_absent(self, names: tuple[Any, ...]) -> Iterator[LostRule]:
        if self._absent:
            for dim, name in enumerate(names):
                for rule in self._absent.get(name, ()):
                    yield LostRule(rule, dim, "absent", None)

    def _name_id(self, entry: Any) -> int | None:
        if isinstance(entry, str) or self.dialect.last_wins:
            return self._name_ids.get(entry)
        return None

    def _known_axes(self, entry: Any) -> list[int]:
        if isinstance(entry, str):
            return []
        return [self._axis_ids[axis] for axis in axes_in(entry) if axis in self._axis_ids]


class Resolution(NamedTuple):
    """Rules that the names of one array got, and the rules that lost."""

    rules: Resolver
    names: tuple[Any, ...]
    winners: list[int | None]
    """For each dimension, the index of its rule, or None."""
    lost: list[LostRule]
    """The rules that lost, in order."""

    def entries(self) -> list[Any]:
        """Return the entry of each dimension; UNASSIGNED for a name without mesh axes."""
        unknown_stays = self.rules.dialect.keeps_unknown
        return [
            _as_tuple(self.rules.rules[winner][1])
            if winner is not None
            else (UNASSIGNED if isinstance(name, str) and not unknown_stays else name)
            for name, winner in zip(self.names, self.winners, strict=True)
        ]

    def spec(self, names: Any) -> PartitionSpec:
        """Return the PartitionSpec; names without a rule are None, unreduced axes stay."""
        entries = [None if entry is UNASSIGNED else entry for entry in self.entries()]
        return spec_of_names(names, entries)

    def explained(self) -> list[str]:
        """Return the lines of `rule_lines` for the rules that were tried."""
        winners = [(rule, dim) for dim, rule in enumerate(self.winners) if rule is not None]
        tried: list[tuple[int, int, str, int | None]] = [*self.lost]
        tried += [(*winner, "wins", None) for winner in winners]
        pairs = self.rules.rules
        rows = [(rule, dim, pairs[rule][1], why, to) for rule, dim, why, to in sorted(tried)]
        return rule_lines(self.names, rows)


def rule_lines(
    names: tuple[Any, ...], tried: Iterable[tuple[int, int, Any, str, int | None]]
) -> list[str]:
    """Return a line for each rule that was tried on a dimension: it wins, or to what it loses.

    Args:
        names: The names of an array.
        tried: (rule, dimension, mesh axes of the rule, "wins" or why it loses, to what it loses).
    """
    lines: list[list[str]] = [[] for _ in names]
    for rule, dim, axes, outcome, to in tried:
        words = {
            "wins": "wins",
            "dim taken": f"loses to rule {to}",
            "axis taken": f"loses: a mesh axis of it cuts dim {to}",
            "indivisible": "loses: its mesh axes do not divide the dimension",
            "absent": "loses: the mesh lacks its mesh axes",
        }[outcome]
        if outcome == "axis taken" and to is not None:
            words += f" {names[to]!r}"
        lines[dim].append(f"dim {dim} {names[dim]!r}: rule {rule} -> {axes!r} {words}")
    for dim, name in enumerate(names):
        no_rule = "" if name is None else ": no rule is for it"
        lines[dim] = lines[dim] or [f"dim {dim} {name!r}{no_rule}"]
    return list(chain.from_iterable(lines))


def resolver_for(
    rules: Any,
    dialect: LogicalDialect,
    axis_sizes: Mapping[str, int],
    correction: Correction | None = None,
    optional_axes: frozenset[str] = frozenset(),
) -> Resolver:
    """Return the rules, compiled once for these axis sizes."""
    axes = tuple(axis_sizes.items())
    for as_key in (_as_tuple, _as_tuples):  # most rules have no lists in them
        try:
            return _compiled_table(as_key(rules), dialect, axes, correction, optional_axes)
        except TypeError:  # something in it cannot be hashed
            pass
    # Raises the error that names the rule, if one is invalid.
    return Resolver(rules, dialect, axis_sizes, correction, optional_axes)


@functools.lru_cache(maxsize=64)
def _compiled_table(
    rules: Any,
    dialect: LogicalDialect,
    axis_sizes: tuple[tuple[str, int], ...],
    correction: Correction | None,
    optional_axes: frozenset[str],
) -> Resolver:
    return Resolver(rules, dialect, dict(axis_sizes), correction, optional_axes)


def resolve_core(names: Any, rules: Iterable[tuple[str, Any]]) -> PartitionSpec:
    """Return the PartitionSpec of an array with these logical names, in the dialect of flax.core.

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
    return resolver_for(pairs, FLAX_CORE, {}).spec(names)


@functools.lru_cache(maxsize=4096, typed=True)
def _spec_of_axes(rules: Resolver, names: Any) -> PartitionSpec:
    return rules.resolve(names).spec(names)


def repeated(names: tuple[Any, ...], dialect: LogicalDialect) -> tuple[str, ...]:
    """Return the names of an array that it has twice, where the dialect does not allow that."""
    if dialect.last_wins:
        return ()
    counts = Counter(name for name in names if isinstance(name, str))
    return tuple(name for name, count in counts.items() if count > 1)


def axes_in(value: Any) -> list[str]:
    """Return the mesh axes of a rule's value."""
    if value is None or is_unconstrained(value):
        return []
    if isinstance(value, (tuple, list)):
        return [axis for inner in value for axis in axes_in(inner)]
    return [value]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_tuples(rules: Any) -> Any:
    """Return a list of pairs, as JSON and YAML have it, as a tuple of pairs with tuples."""
    if not isinstance(rules, (tuple, list)):
        return rules
    pairs = (tuple, list)
    return tuple(
        (rule[0], _as_tuple(rule[1])) if isinstance(rule, pairs) and len(rule) == 2 else rule
        for rule in rules
    )
