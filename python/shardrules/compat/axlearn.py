"""`TensorSpec` and the sharding hints of AXLearn's `common.utils`, as of 2026, without AXLearn.

A tree of `TensorSpec`s is a tree of abstract arrays, so that `shardrules.plan` takes it. The mesh
is that of the context.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from shardrules._correction import Correction
from shardrules._mesh.mesh import axes_of_type, context_mesh, current_view, resolve_mesh
from shardrules._place.constraint import with_sharding_constraint as constrain
from shardrules._rules.dialects import EFORMER
from shardrules._rules.rules import remembered_rules
from shardrules._specs import (
    entries_of,
    entry_axes,
    is_partition_spec,
    partition_spec,
    without_axes,
)

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, PartitionSpec

__all__ = [
    "TensorSpec",
    "copy_partition",
    "manual_axes_to_none",
    "maybe_shard",
    "with_sharding_constraint",
]

# What JAX would refuse is an error that names the leaf.
_AS_WRITTEN = Correction(absent="error", indivisible="error", rank="error", pad=False)
_WHOLE_PATHS: Final = dataclasses.replace(
    EFORMER, match=("fullmatch",), scalars="none", unmatched="replicate"
)
# In the place of a spec: the path matches.
_MOVED: Final = object()


@dataclasses.dataclass
class TensorSpec:
    """A parameter, or an array of an optimizer's state: what it is, and how it is sharded.

    Args:
        shape: The array's shape.
        dtype: Its dtype. Default: none.
        mesh_axes: Its PartitionSpec. Default: none, which stands for replicated.
        memory_kind: "device" or "pinned_host". Default: the device's own.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("fsdp",))
        >>> spec = TensorSpec((8, 4), "float32", jax.sharding.PartitionSpec("fsdp"))
        >>> with mesh:
        ...     tuple(spec.sharding.spec)
        ('fsdp',)
    """

    shape: Sequence[int]
    dtype: Any = None
    mesh_axes: PartitionSpec | None = None
    memory_kind: Literal["device", "pinned_host"] | None = None

    @property
    def sharding(self) -> NamedSharding:
        """The NamedSharding on the mesh of the context.

        Raises:
            ValueError: There is no mesh, or it has no such memory.
        """
        from jax.sharding import NamedSharding

        spec = partition_spec() if self.mesh_axes is None else self.mesh_axes
        return NamedSharding(resolve_mesh(), spec, memory_kind=self.memory_kind)


def copy_partition(
    specs: Any,
    *,
    pattern: str | re.Pattern[str] | None = None,
    memory_kind: Literal["device", "pinned_host"] | None = None,
) -> Any:
    """Copy a tree of TensorSpecs, those of matching paths with another memory kind.

    Semantics of axlearn.common.optimizers.copy_partition, which optimizers derive their state's
    specs by.

    Args:
        specs: A tree of TensorSpecs.
        pattern: A regex for whole paths, whose keys "/" joins. Default: none matches.
        memory_kind: The memory kind of arrays whose path matches. Default: the device's own.

    Returns:
        A tree of the same structure.

    Example:
        >>> specs = {"mu": {"w": TensorSpec((8,))}, "nu": {"w": TensorSpec((8,))}}
        >>> moved = copy_partition(specs, pattern="mu/.*", memory_kind="pinned_host")
        >>> moved["mu"]["w"].memory_kind, moved["nu"]["w"].memory_kind
        ('pinned_host', None)
    """
    import jax

    rules = remembered_rules([] if pattern is None else [(pattern, _MOVED)], _WHOLE_PATHS)

    def copied(spec: Any, found: Any) -> TensorSpec:
        kind = memory_kind if found is _MOVED else spec.memory_kind
        return TensorSpec(spec.shape, spec.dtype, spec.mesh_axes, kind)

    return jax.tree_util.tree_map(copied, specs, rules.match(specs))


def with_sharding_constraint(x: Any, partition_spec: PartitionSpec | None) -> Any:
    """Constrain arrays to a spec, all axes of which must be there and not Manual.

    Semantics of axlearn.common.utils.with_sharding_constraint, for parameters and state. Without a
    spec, without a mesh in the context, and on one device the arrays stay as they are.

    Raises:
        ValueError: The spec names Manual axes, or does not fit.

    Example:
        >>> with_sharding_constraint(3, None)
        3
    """
    mesh = context_mesh()
    if partition_spec is None or mesh is None or mesh.size == 1:
        return x
    named = {axis for entry in entries_of(partition_spec) for axis in entry_axes(entry)}
    manual = sorted(named & axes_of_type(current_view(mesh), "Manual"))
    if manual:
        raise ValueError(
            f"{partition_spec} names {', '.join(map(repr, manual))}, over which a shard_map runs: "
            "leave the axis out, or take maybe_shard"
        )
    return constrain(x, partition_spec, correction=_AS_WRITTEN)


def maybe_shard(x: Any, partition_spec: PartitionSpec | Sequence[Any] | None) -> Any:
    """Constrain activations to a spec; a dimension that Manual axes alone cut is unconstrained.

    Semantics of axlearn.common.utils.maybe_shard. Without a spec, without a mesh in the context, on
    one device, and where all axes are Manual the arrays stay as they are.

    Args:
        x: Any pytree of arrays.
        partition_spec: A PartitionSpec, or its entries.

    Raises:
        ValueError: The spec does not fit.

    Example:
        >>> maybe_shard(3, ("data", None))
        3
    """
    mesh = context_mesh()
    if partition_spec is None or mesh is None or mesh.size == 1:
        return x
    if axes_of_type(current_view(mesh), "Manual") == frozenset(mesh.axis_names):
        return x
    return constrain(x, _spec(partition_spec), correction=_AS_WRITTEN)


def manual_axes_to_none(spec: PartitionSpec) -> PartitionSpec:
    """Return the spec without the axes over which a shard_map runs, for the specs of a nested one.

    Semantics of axlearn.common.utils.manual_axes_to_none: axes that the mesh of the context lacks
    go as well. Without a mesh the spec stays as it is.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> tuple(manual_axes_to_none(P("data", None)))
        ('data', None)
    """
    mesh = context_mesh()
    if mesh is None:
        return spec
    named = {axis for entry in entries_of(spec) for axis in entry_axes(entry)}
    return without_axes(spec, frozenset(named - axes_of_type(current_view(mesh), "Auto")))


def _spec(given: PartitionSpec | Sequence[Any]) -> PartitionSpec:
    return given if is_partition_spec(given) else partition_spec(*given)
