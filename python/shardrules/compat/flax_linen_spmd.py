"""`flax.linen.spmd` of flax 0.12: logical axis names to mesh axes by the order of rules.

The same signatures and results, without flax. What differs:

- Rules may be `LogicalRules`, whose dialect counts then, and in constraints their correction.
  Strings in the place of rules or of tuples of names are errors; flax takes their letters.
- Equal shardings of a tree are one object. An axis that the mesh lacks is an error with the rule.
- `with_logical_constraint` also reshards over Explicit and mixed axes, and leaves out axes that are
  manual inside shard_map.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules._base.specs import is_partition_spec
from shardrules._core import resolve_all
from shardrules._place import logical
from shardrules._place.logical import RulesFallback, check_mesh_axes, is_logical_spec
from shardrules._rules.logical_rules import (
    LogicalRulesLike,
    get_logical_axis_rules,
    logical_axis_rules,
    resolver_in_force,
    set_logical_axis_rules,
)
from shardrules.compat.flax_core_meta import Partitioned

if TYPE_CHECKING:
    LogicalNames = tuple[str | None, ...]

__all__ = [
    "LogicallyPartitioned",
    "RulesFallback",
    "get_logical_axis_rules",
    "logical_axis_rules",
    "logical_to_mesh",
    "logical_to_mesh_axes",
    "logical_to_mesh_sharding",
    "set_logical_axis_rules",
    "with_logical_constraint",
    "with_logical_partitioning",
]


def logical_to_mesh_axes(
    array_dim_names: Any, rules: LogicalRulesLike | None = None
) -> PartitionSpec | None:
    """Return the PartitionSpec of one array, or None for None.

    Semantics of flax.linen.logical_to_mesh_axes, 0.12.

    Example:
        >>> names = ("batch", "length", "heads", "features")
        >>> rules = [("batch", "X"), ("features", "X"), ("heads", "Y"), ("batch", "Z")]
        >>> tuple(logical_to_mesh_axes(names, rules))
        ('X', None, 'Y', None)
    """
    return None if array_dim_names is None else resolver_in_force(rules).spec(array_dim_names)


def logical_to_mesh(tree: Any, rules: LogicalRulesLike | None = None) -> Any:
    """Replace each PartitionSpec of a tree by its `logical_to_mesh_axes`.

    Semantics of flax.linen.logical_to_mesh, 0.12.
    """
    resolver = resolver_in_force(rules)
    return _map_specs(tree, lambda names, _: resolver.spec(names))


def logical_to_mesh_sharding(tree: Any, mesh: Mesh, rules: LogicalRulesLike | None = None) -> Any:
    """Replace each PartitionSpec of logical names in a tree by a NamedSharding.

    Semantics of flax.linen.logical_to_mesh_sharding, 0.12.
    """
    resolver = resolver_in_force(rules)
    of_spec: dict[PartitionSpec, NamedSharding] = {}

    def sharding(names: Any, _: None) -> NamedSharding:
        spec = resolver.spec(names)
        try:
            return of_spec.setdefault(spec, NamedSharding(mesh, spec))
        except ValueError:
            check_mesh_axes(resolver.resolve(names), mesh)
            raise

    return _map_specs(tree, sharding)


def _map_specs(tree: Any, make: Callable[[Any, None], Any]) -> Any:
    """Replace each PartitionSpec of a tree by make(it, None), called once for equal ones."""
    leaves: list[Any]
    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_partition_spec)
    return treedef.unflatten(resolve_all(leaves, None, {}, make))


def with_logical_constraint(
    x: Any,
    logical_axis_resources: Any,
    rules: LogicalRulesLike | None = None,
    mesh: Mesh | None = None,
    fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
) -> Any:
    """Constrain arrays to the mesh axes of their logical names.

    Semantics of flax.linen.with_logical_constraint, 0.12: in a tree of names None replicates; in
    `shardrules.with_logical_constraint` it leaves the array as it is.
    """
    if logical_axis_resources is None:
        return x
    names = jax.tree_util.tree_map(
        lambda entries: () if entries is None else entries,
        logical_axis_resources,
        is_leaf=is_logical_spec,
    )
    return logical.with_logical_constraint(x, names, rules, mesh, fallback)


class LogicallyPartitioned(Partitioned[Any]):  # noqa: PLW1641 a dataclass has __hash__
    """A `Partitioned` of logical names. Semantics of flax.linen.LogicallyPartitioned, 0.12."""

    _in_flax = ("flax.linen.spmd", "LogicallyPartitioned")

    rules: Any = dataclasses.field(default=None, metadata={"pytree_node": False})

    def __eq__(self, value: object) -> bool:
        """Return whether the values are equal. As in flax, names and rules do not count."""
        if self is value:
            return True
        if isinstance(value, LogicallyPartitioned) and type(value) is type(self):
            return (self.value,) == (value.value,)
        return NotImplemented

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Return the value, constrained to the axes of its logical names if there is a mesh."""
        if not (apply_constraint and self._has_mesh()):
            return self.value
        return with_logical_constraint(
            self.value, self.get_partition_spec(), rules=self.rules, mesh=self.mesh
        )

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Return the fields as metadata of an nnx.Variable."""
        metadata = super().to_nnx_metadata()
        metadata["sharding_rules"] = metadata.pop("rules")
        return metadata

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> Any:
        """Return the box with this metadata of `to_nnx_metadata`; other keys are ignored."""
        return super().from_nnx_metadata({**metadata, "rules": metadata["sharding_rules"]})


def with_logical_partitioning(
    fn: Callable[..., Any],
    names: LogicalNames,
    mesh: Mesh | None = None,
    rules: LogicalRulesLike | None = None,
) -> Callable[..., LogicallyPartitioned]:
    """Wrap a function so that its result is in a `LogicallyPartitioned`.

    Semantics of flax.linen.with_logical_partitioning, 0.12.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> LogicallyPartitioned:
        return LogicallyPartitioned(fn(*args, **kwargs), names, mesh=mesh, rules=rules)

    return wrapper
