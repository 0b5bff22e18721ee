"""`LogicalRules`, a list of rules for logical axis names as a value.

Checks what a rule list is made of. Costs nothing until it is asked for a mesh. Must not know how a
rule is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardrules._arguments import check_type
from shardrules._correction import Correction
from shardrules._display import answer
from shardrules._format import shown
from shardrules._logical.dialects import LINEN, LogicalDialect
from shardrules._logical.names import check_rules
from shardrules._logical.resolver import Resolver, axes_in, resolver_for
from shardrules._matching.rules import Rules
from shardrules._specs import is_partition_spec, is_unconstrained, rules_shown

__all__ = ["LogicalRules", "check_not_for_paths", "resolver_of"]


@answer
@dataclass(frozen=True, slots=True, init=False, repr=False)
class LogicalRules:
    """An ordered list of (logical name, mesh axes) rules. Immutable, hashable.

    It is to the logical axis names of arrays what `Rules` is to their paths: `plan`,
    `named_shardings`, `shard`, `with_sharding_constraint` and rule files take it.

    Args:
        rules: (name, mesh axes) pairs, or a mapping. The mesh axes are one axis, a tuple or list of
            axes, or None for a dimension that is not sharded.
        dialect: How a rule is chosen for each name of an array.

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
    """How a rule is chosen for each name of an array."""

    def __init__(
        self,
        rules: Iterable[tuple[Any, Any]] | Mapping[Any, Any],
        dialect: LogicalDialect = LINEN,
    ) -> None:
        check_type("dialect", dialect, LogicalDialect, "a LogicalDialect, such as MAXTEXT")
        check_not_for_paths(rules)
        given = rules.items() if isinstance(rules, Mapping) else rules
        is_listed = isinstance(given, Iterable) and not isinstance(given, str | bytes)
        if not is_listed or is_partition_spec(given):
            raise TypeError(
                f"rules must be (logical name, mesh axes) pairs, not {shown(rules)}; write "
                "[('embed', 'fsdp'), ...]"
            )
        pairs = tuple(given)
        check_rules(pairs)
        object.__setattr__(self, "_pairs", tuple(map(_checked_pair, range(len(pairs)), pairs)))
        object.__setattr__(self, "dialect", dialect)

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter(self._pairs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._pairs[index]

    def __str__(self) -> str:
        return rules_shown(self.dialect.name, self)


def check_not_for_paths(rules: object) -> None:
    """Checks that rules for logical axis names are not rules of paths, whose pairs look alike.

    Raises:
        TypeError: They are.
    """
    if isinstance(rules, Rules):
        raise TypeError(
            f"rules must be (logical name, mesh axes) pairs, not {shown(rules)}, which are for "
            "paths; give them to named_shardings, shard or plan"
        )


def _checked_pair(index: int, rule: Any) -> tuple[Any, Any]:
    name, value = rule
    axes = value if isinstance(value, tuple | list) else axes_in(value)
    # In old versions of JAX a PartitionSpec is a tuple.
    if is_partition_spec(value) or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(
            f"logical axis rule {index} gives {name!r} the mesh axes {shown(value)}; give an axis, "
            "a tuple of axes, or None"
        )
    if isinstance(value, str) or is_unconstrained(value):
        return name, value
    return name, tuple(axes) or None


def resolver_of(
    rules: LogicalRules,
    axis_sizes: Mapping[str, int],
    correction: Correction | None = None,
    optional_axes: frozenset[str] = frozenset(),
) -> Resolver:
    """The rules on a mesh, compiled once for its axis sizes."""
    return resolver_for(tuple(rules), rules.dialect, axis_sizes, correction, optional_axes)
