"""`flax.linen.spmd` of flax 0.12: logical axis names to mesh axes by the order of rules.

The same signatures and results, without flax. A rule list is compiled once, and distinct names are
resolved once for each list.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules._base.specs import is_partition_spec
from shardrules._place.logical import (
    RulesFallback,
    compiled,
    constraint_spec,
    is_logical_spec,
    resolved,
    sharding_maker,
)
from shardrules._rules.logical_rules import (
    LogicalRulesLike,
    get_logical_axis_rules,
    logical_axis_rules,
    set_logical_axis_rules,
)
from shardrules.compat.flax_core_meta import Partitioned, global_mesh_defined

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
    """Return the PartitionSpec of one array; see `shardrules.logical_to_mesh`.

    Semantics of flax.linen.logical_to_mesh_axes, 0.12.

    Args:
        array_dim_names: A name, None or UNCONSTRAINED for each dimension. If it is None, the result
            is None.
        rules: (name, mesh axes) pairs. Default: the rules in force.

    Raises:
        ValueError: A name occurs twice, a rule is not a pair, or `rules` is not a tuple or list.

    Example:
        >>> names = ("batch", "length", "heads", "features")
        >>> rules = [("batch", "X"), ("features", "X"), ("heads", "Y"), ("batch", "Z")]
        >>> tuple(logical_to_mesh_axes(names, rules))
        ('X', None, 'Y', None)
    """
    if array_dim_names is None:
        return None
    return compiled(rules, None).spec(array_dim_names)


def logical_to_mesh(tree: Any, rules: LogicalRulesLike | None = None) -> Any:
    """Replace each PartitionSpec of a tree by its `logical_to_mesh_axes`.

    Semantics of flax.linen.logical_to_mesh, 0.12.

    Example:
        >>> specs = logical_to_mesh({"w": PartitionSpec("embed")}, [("embed", "tp")])
        >>> specs["w"] == PartitionSpec("tp")
        True
    """
    priority = compiled(rules, None)
    return resolved(tree, None, lambda names, _: priority.spec(names), is_partition_spec)


def logical_to_mesh_sharding(tree: Any, mesh: Mesh, rules: LogicalRulesLike | None = None) -> Any:
    """Replace each PartitionSpec of logical names in a tree by a NamedSharding.

    Semantics of flax.linen.logical_to_mesh_sharding, 0.12, except that equal shardings are one
    object.

    Raises:
        ValueError: As `logical_to_mesh_axes`; or the mesh does not have an axis. The message has
            the number of such leaves and lists the first 20, each with its rules.

    Example:
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("tp",))
        >>> tree = {"w": PartitionSpec("embed")}
        >>> tuple(logical_to_mesh_sharding(tree, mesh, [("embed", "tp")])["w"].spec)
        ('tp',)
    """
    return resolved(tree, None, sharding_maker(compiled(rules, None), mesh), is_partition_spec)


def with_logical_constraint(
    x: Any,
    logical_axis_resources: Any,
    rules: LogicalRulesLike | None = None,
    mesh: Mesh | None = None,
    fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
) -> Any:
    """Constrain arrays to the mesh axes of their logical names.

    Semantics of flax.linen.with_logical_constraint, 0.12: it applies JAX's sharding constraint.
    `shardrules.with_logical_constraint` also works on Explicit and mixed axes.

    Args:
        x: An array or a tree of arrays.
        logical_axis_resources: Names for all arrays, or a tree of names. None for no constraint.
        rules: As in `logical_to_mesh_axes`. Without rules `x` is returned unchanged.
        mesh: The mesh. Default: the context's. Without a mesh `x` is returned unchanged.
        fallback: What happens if a name gets no mesh axes.

    Raises:
        ValueError: As `logical_to_mesh_axes`; or a name gets no mesh axes and the fallback is
            RAISE_ERROR.

    Example:
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("dp",))
        >>> with_logical_constraint(jax.numpy.ones(2), ("batch",), [("batch", "dp")], mesh).shape
        (2,)
    """
    on_mesh = get_logical_axis_rules() if rules is None else rules
    if not on_mesh or logical_axis_resources is None:
        return x
    priority = compiled(on_mesh, None)

    def constrained(names: Any, part: Any) -> Any:
        spec = None if names is None else constraint_spec(priority.resolve(names), fallback)
        if mesh is None and not global_mesh_defined():
            return part
        if spec is None and names is not None:
            return part
        leaf_spec = spec if mesh is None or spec is None else NamedSharding(mesh, spec)
        return jax.lax.with_sharding_constraint(part, leaf_spec)

    return jax.tree_util.tree_map(constrained, logical_axis_resources, x, is_leaf=is_logical_spec)


class LogicallyPartitioned(Partitioned[Any]):  # noqa: PLW1641 a dataclass has __hash__
    """A `Partitioned` whose names are logical. Semantics of flax.linen.LogicallyPartitioned, 0.12.

    Args:
        value: An array or an abstract array.
        names: A logical name or None for each axis.
        mesh: The mesh for `unbox`. Default: the context's.
        rules: (name, mesh axes) pairs for `unbox`. Default: the rules in force.

    Example:
        >>> LogicallyPartitioned(1, ("embed",)).get_partition_spec() == PartitionSpec("embed")
        True
    """

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

    Args:
        fn: The function, usually an initializer.
        names: As in `LogicallyPartitioned`.
        mesh: As in `LogicallyPartitioned`.
        rules: As in `LogicallyPartitioned`.

    Example:
        >>> init = with_logical_partitioning(jax.nn.initializers.ones, (None, "embed"))
        >>> init(jax.random.key(0), (2, 4)).names
        (None, 'embed')
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> LogicallyPartitioned:
        return LogicallyPartitioned(fn(*args, **kwargs), names, mesh=mesh, rules=rules)

    return wrapper
