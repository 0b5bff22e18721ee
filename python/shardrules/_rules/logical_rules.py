"""`LogicalRules`, and the logical axis rules in force in a thread, which flax's functions share."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardrules._base.arguments import check_type
from shardrules._base.jax_names import flax_axis_rules
from shardrules._base.rule_specs import Correction, rule_with_axes
from shardrules._base.specs import (
    Entries,
    checked_parts,
    is_partition_spec,
    is_unconstrained,
    rules_shown,
    split_axes,
)
from shardrules._base.text import answer, shown
from shardrules._rules.dialects import (
    LINEN,
    LogicalDialect,
    dialect_of,
    optional_axes_of,
    policy_shown,
)
from shardrules._rules.resolver import Resolver, axes_in, check_rules, last_wins, resolver_for
from shardrules._rules.rules import Rules


@answer
@dataclass(frozen=True, slots=True, init=False, repr=False)
class LogicalRules:
    """Ordered list of (logical name, mesh axes) rules. Immutable, hashable.

    It is to the logical axis names of arrays what `Rules` is to their paths: `plan`,
    `named_shardings`, `shard`, `with_sharding_constraint` and rule files take it.

    Args:
        rules: (name, mesh axes) pairs, or a mapping. The mesh axes are one axis, a tuple or list of
            axes, or None for a dimension that is not sharded. Or `LogicalRules`, whose dialect and
            policy hold where no other is given here.
        dialect: How a rule is chosen for each name of an array. Default: linen's.
        correction: The policies for mesh axes that do not divide a dimension. Default: the
            dialect's.
        optional_axes: As in `Rules`.

    Raises:
        TypeError: A rule is not a pair, its axes are something else, or the dialect is not a
            LogicalDialect.
        ValueError: A rule has another length than two.

    Example:
        >>> import shardrules as sr
        >>> rules = sr.LogicalRules({"vocab": "tp", "embed": ["fsdp", "ep"]})
        >>> tuple(rules)
        (('vocab', 'tp'), ('embed', ('fsdp', 'ep')))
        >>> tuple(sr.logical_to_mesh(("vocab", "embed"), rules))
        ('tp', ('fsdp', 'ep'))
    """

    _pairs: tuple[tuple[Any, Any], ...]
    dialect: LogicalDialect
    """How a rule is chosen for each name of an array, with the rules' correction."""
    optional_axes: tuple[str, ...]
    """Mesh axes that a mesh may lack."""

    def __init__(
        self,
        rules: Iterable[tuple[Any, Any]] | Mapping[Any, Any],
        dialect: LogicalDialect | None = None,
        *,
        correction: Correction | None = None,
        optional_axes: Iterable[str] | None = None,
    ) -> None:
        check_type("dialect", dialect, LogicalDialect | None, "a LogicalDialect, such as MAXTEXT")
        check_not_for_paths(rules)
        items = rules.items() if isinstance(rules, Mapping) else rules
        is_listed = isinstance(items, Iterable) and not isinstance(items, str | bytes)
        if not is_listed or is_partition_spec(items):
            raise TypeError(
                f"rules must be (logical name, mesh axes) pairs, not {shown(rules)}; write "
                "[('embed', 'fsdp'), ...]"
            )
        pairs = tuple(items)
        check_rules(pairs)
        object.__setattr__(self, "_pairs", tuple(map(_checked_name_pair, range(len(pairs)), pairs)))
        source = rules_in_force(rules)
        has = source if isinstance(source, LogicalRules) else None
        in_force = dialect_of(dialect, correction, has.dialect if has is not None else None, LINEN)
        axes = optional_axes_of(optional_axes, has.optional_axes if has is not None else ())
        object.__setattr__(self, "dialect", in_force)
        object.__setattr__(self, "optional_axes", axes)

    @property
    def correction(self) -> Correction:
        """The policies for mesh axes that do not divide a dimension."""
        return self.dialect.correction

    def with_axes(self, axes: Mapping[str, str | Iterable[str]]) -> LogicalRules:
        """Return the rules for a mesh on which some axes are made of several; see `Rules`.

        Example:
            >>> tuple(LogicalRules({"kv_heads": "tp"}).with_axes({"tp": ("kv", "rep")}))
            (('kv_heads', ('kv', 'rep')),)
        """
        named = {axis for _, value in self for axis in axes_in(value)}
        parts = checked_parts(axes, named.union(self.optional_axes))
        pairs = [(name, rule_with_axes(Entries((value,)), parts)[0]) for name, value in self]
        optional = split_axes(self.optional_axes, parts)
        return LogicalRules(pairs, self.dialect, optional_axes=optional)

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter(self._pairs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._pairs[index]

    def __str__(self) -> str:
        return rules_shown(", ".join(policy_shown(self.dialect, self.optional_axes)), self)


def check_not_for_paths(rules: object) -> None:
    """Check that rules for logical axis names are not rules of paths, whose pairs look alike."""
    if isinstance(rules, Rules):
        raise TypeError(
            f"rules must be (logical name, mesh axes) pairs, not {shown(rules)}, which are for "
            "paths; give them to named_shardings, shard or plan"
        )


def _checked_name_pair(index: int, rule: Any) -> tuple[Any, Any]:
    name, value = rule
    axes = value if isinstance(value, tuple | list) else axes_in(value)
    if is_partition_spec(value) or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(
            f"logical axis rule {index} gives {name!r} the mesh axes {shown(value)}; give an axis, "
            "a tuple of axes, or None"
        )
    if isinstance(value, str) or is_unconstrained(value):
        return name, value
    return name, tuple(axes) or None


def resolver_of(
    rules: LogicalRules, axis_sizes: Mapping[str, int], may_lack: Iterable[str] = ()
) -> Resolver:
    """Return the rules on a mesh, compiled once for its axis sizes."""
    optional = frozenset(rules.optional_axes).union(may_lack)
    return resolver_for(tuple(rules), rules.dialect, axis_sizes, rules.correction, optional)


LogicalRulesLike = Sequence[tuple[str, Any]] | LogicalRules


class _PairsOfRules(tuple[tuple[Any, Any], ...]):
    """The pairs of `LogicalRules` in force: flax's functions take only a tuple or list."""

    rules: LogicalRules


def set_logical_axis_rules(rules: LogicalRulesLike) -> None:
    """Set the logical axis rules of this thread.

    Semantics of flax.core.spmd.set_logical_axis_rules, 0.12. If flax is loaded, flax's functions
    and ours use the same rules. Of `LogicalRules` flax's see the pairs, ours dialect and policy.

    Args:
        rules: `LogicalRules`, or (logical name, mesh axes) pairs.

    Raises:
        ValueError, TypeError: A rule is not a pair, or the rules can be read only once.

    Example:
        >>> set_logical_axis_rules([("embed", "fsdp")])
        >>> get_logical_axis_rules()
        [('embed', 'fsdp')]
        >>> set_logical_axis_rules(())
    """
    if isinstance(rules, LogicalRules):
        pairs = _PairsOfRules(rules)
        pairs.rules = rules
        rules = pairs
    else:
        _check_logical_rules(rules)
    _record().rules = rules


def get_logical_axis_rules() -> Sequence[tuple[str, Any]]:
    """Return the logical axis rules of this thread; of `LogicalRules` their pairs.

    Semantics of flax.core.spmd.get_logical_axis_rules, 0.12.

    Example:
        >>> get_logical_axis_rules()
        ()
    """
    return _record().rules  # type: ignore[no-any-return]


@contextmanager
def logical_axis_rules(rules: LogicalRulesLike) -> Generator[None, None, None]:
    """Return a context with these logical axis rules in force, instead of the outer ones.

    Semantics of flax.core.spmd.logical_axis_rules, 0.12. If flax is loaded, flax's functions and
    ours use the same rules. Of `LogicalRules` flax's see the pairs, ours dialect and policy.

    Args:
        rules: `LogicalRules`, or (logical name, mesh axes) pairs.

    Raises:
        ValueError, TypeError: A rule is not a pair, or the rules can be read only once.

    Example:
        >>> with logical_axis_rules([("embed", "fsdp")]):
        ...     get_logical_axis_rules()
        [('embed', 'fsdp')]
    """
    outer = get_logical_axis_rules()
    set_logical_axis_rules(rules)
    try:
        yield
    finally:
        _record().rules = outer


def rules_in_force(rules: Any) -> Any:
    """Return these rules, by default those of the context, as they were given there."""
    in_force = get_logical_axis_rules() if rules is None else rules
    return in_force.rules if isinstance(in_force, _PairsOfRules) else in_force


def resolver_in_force(
    rules: LogicalRulesLike | None, dialect: LogicalDialect | None = None
) -> Resolver:
    """Compile rules, by default those of the context, for the names of arrays of any shape."""
    check_type("dialect", dialect, LogicalDialect | None, "a LogicalDialect, such as FLAX_CORE")
    in_force = rules_in_force(rules)
    if isinstance(in_force, LogicalRules):
        dialect, in_force = dialect or in_force.dialect, tuple(in_force)
    return resolver_for(in_force, dialect or LINEN, {})


def _check_logical_rules(rules: Any) -> None:
    if isinstance(rules, Iterator):
        raise TypeError(
            f"the logical axis rules are {shown(rules)}, which can be read only once; give a tuple"
        )
    check_type("rules", rules, Iterable | None, "a tuple of (logical name, mesh axes) pairs")
    check_not_for_paths(rules)
    last_wins(rules or ())


class _AxisRules(threading.local):
    rules: Sequence[tuple[str, Any]] = ()


_own = _AxisRules()


def _record() -> Any:
    """Return the object with this thread's rules: flax's own object, if flax is loaded."""
    theirs = flax_axis_rules()
    if theirs is None:
        return _own
    if _own.rules:  # set before flax was loaded
        theirs.rules, _own.rules = theirs.rules or _own.rules, ()
    return theirs
