"""`logical_to_physical` and `logical_to_sharding` of jax-llm-examples, as of 2026, without them.

There, rules are a dataclass: a field for each logical axis name, with the mesh axes that shard it.
`logical_rules` makes `LogicalRules` of it, for plans. The models themselves are not needed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Final

from shardrules._correction import Correction
from shardrules._rules.dialects import LogicalDialect
from shardrules._rules.logical_rules import LogicalRules
from shardrules._specs import partition_spec
from shardrules._text import shown

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, PartitionSpec

__all__ = ["DIALECT", "logical_rules", "logical_to_physical", "logical_to_sharding"]

DIALECT: Final = LogicalDialect(
    "jax-llm-examples",
    last_wins=True,
    keeps_unknown=True,
    correction=Correction(absent="error", indivisible="error", rank="error"),
    tries_next=False,
)
"""Names choose their mesh axes alone; a mesh axis that two dimensions get is an error."""


def logical_to_physical(logical: tuple[Any, ...], rules: Any) -> PartitionSpec:
    """Return the PartitionSpec of an array with these logical axis names.

    Args:
        logical: A name, or None, for each dimension.
        rules: An object with an attribute for each name: a mesh axis, a tuple of them, or None.

    Raises:
        AttributeError: The rules have no such name.
        ValueError: A mesh axis would shard two dimensions.

    Example:
        >>> from types import SimpleNamespace
        >>> rules = SimpleNamespace(vocab=("y", "z"), embed=None)
        >>> tuple(logical_to_physical(("vocab", "embed", None), rules))
        (('y', 'z'), None, None)
    """
    return _remembered(_spec, _entries(logical, rules), logical)  # type: ignore[no-any-return]


def logical_to_sharding(logical: tuple[Any, ...], mesh: Any, rules: Any) -> NamedSharding:
    """Return the NamedSharding of an array with these logical axis names on a mesh.

    Raises:
        AttributeError, ValueError: As `logical_to_physical`.

    Example:
        >>> import jax
        >>> from types import SimpleNamespace
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("y",))
        >>> tuple(logical_to_sharding(("vocab",), mesh, SimpleNamespace(vocab="y")).spec)
        ('y',)
    """
    return _remembered(_sharding, _entries(logical, rules), logical, mesh)  # type: ignore[no-any-return]


def _remembered(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except TypeError:  # such as a list, which cannot be hashed
        return function.__wrapped__(*args)


def _entries(logical: tuple[Any, ...], rules: Any) -> tuple[Any, ...]:
    return tuple([None if name is None else getattr(rules, name) for name in logical])


@functools.lru_cache(maxsize=4096)  # JAX's constructors take longer than all else here
def _sharding(entries: tuple[Any, ...], logical: tuple[Any, ...], mesh: Any) -> NamedSharding:
    from jax.sharding import NamedSharding

    return NamedSharding(mesh, _remembered(_spec, entries, logical))


@functools.lru_cache(maxsize=4096)
def _spec(entries: tuple[Any, ...], logical: tuple[Any, ...]) -> PartitionSpec:
    from jax import tree_util

    axes = tree_util.tree_leaves(entries)
    if len(set(axes)) < len(axes):
        raise ValueError(
            f"Colliding physical axes from translating logical spec {logical} -> {entries}: a mesh "
            "axis can shard only one dimension; let the rules give these names other axes"
        )
    return partition_spec(*entries)


def logical_rules(rules: Any) -> LogicalRules:
    """Return a dataclass of rules as `LogicalRules`, for `shardrules.plan` and others.

    Raises:
        TypeError: It is no dataclass, or a field is not a mesh axis, a tuple of them, or None.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class ShardingRules:
        ...     batch: str = "x"
        ...     q_heads: tuple[str, ...] = ("y", "z")
        >>> tuple(logical_rules(ShardingRules()))
        (('batch', 'x'), ('q_heads', ('y', 'z')))
    """
    if not dataclasses.is_dataclass(rules) or isinstance(rules, type):
        raise TypeError(f"rules is {shown(rules)}; it must be a dataclass with a field per name")
    names = [one.name for one in dataclasses.fields(rules)]
    return LogicalRules([(name, getattr(rules, name)) for name in names], DIALECT)
