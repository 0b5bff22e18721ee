"""`kd.sharding` of Kauldron, as of 2026: `FSDPSharding`, `ShardingStrategy` and what applies them.

`from shardrules.compat import kauldron as sharding` has its names. Kauldron is not needed. The mesh
is made of all devices when a name of it is first used.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardrules._place.named_shardings import named_shardings
from shardrules._rules.dialects import EFORMER
from shardrules._rules.rules import Rules, remembered_rules
from shardrules._specs import fsdp

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

    # Made by __getattr__.
    DEVICES_MESH: Mesh
    """All devices along one axis, "devices"."""
    REPLICATED: NamedSharding
    """Each device holds the array whole."""
    FIRST_DIM: NamedSharding
    """All devices share the first dimension."""

__all__ = [
    "DEVICES_MESH",
    "FIRST_DIM",
    "REPLICATED",
    "FSDPSharding",
    "ShardingStrategy",
    "with_sharding_constraint",
]

_AXIS = "devices"


def __getattr__(name: str) -> Any:
    from jax.sharding import NamedSharding, PartitionSpec

    specs = {"REPLICATED": PartitionSpec(), "FIRST_DIM": PartitionSpec(_AXIS)}
    if name == "DEVICES_MESH":
        return _devices_mesh()
    if name in specs:
        return NamedSharding(_devices_mesh(), specs[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _devices_mesh() -> Mesh:
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.asarray(jax.devices()), (_AXIS,))


@dataclass(frozen=True, kw_only=True)
class FSDPSharding:
    """A rule for the arrays of a tree: the largest dimension that all devices divide is sharded.

    Semantics of kd.sharding.FSDPSharding.

    Args:
        min_size_to_shard_mb: Arrays of at most so many MiB are replicated. Default: 4.

    Example:
        >>> import jax
        >>> tree = {"kernel": jax.ShapeDtypeStruct((1024, 4096), "float32")}
        >>> tuple(FSDPSharding()(tree)["kernel"].spec)
        (None, 'devices')
    """

    min_size_to_shard_mb: float = 4

    @property
    def rules(self) -> Rules:
        """The rule, for `shardrules.plan` on a mesh with the axis "devices"."""
        least = int(self.min_size_to_shard_mb * 2**20) + 1
        return remembered_rules([("", fsdp(_AXIS, min_bytes=least))], EFORMER)

    def __call__(self, tree: Any) -> Any:
        """Replace each leaf of a tree of arrays by its NamedSharding on all devices."""
        return named_shardings(tree, self.rules, _devices_mesh())


def _first_dim() -> NamedSharding:
    return __getattr__("FIRST_DIM")  # type: ignore[no-any-return]


def _replicated() -> NamedSharding:
    return __getattr__("REPLICATED")  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class ShardingStrategy:
    """What each part of a training step is sharded as.

    A part is a tree, or a prefix of one, with at each leaf a sharding; None, for what JAX chooses;
    or a function from the arrays there to such a tree, as `FSDPSharding` is.

    Example:
        >>> strategy = ShardingStrategy(params=FSDPSharding())
        >>> strategy.opt_state is None
        True
    """

    batch: Any = field(default_factory=_first_dim)
    params: Any = field(default_factory=_replicated)
    collections: Any = None
    opt_state: Any = None
    aux: Any = field(default_factory=_replicated)


def with_sharding_constraint(x: Any, shardings: Any) -> Any:
    """Constrain the arrays of a tree; semantics of kd.sharding.with_sharding_constraint.

    Args:
        x: Any pytree. In a part of jax.ShapeDtypeStructs alone, these get the sharding.
        shardings: As a part of `ShardingStrategy`.

    Example:
        >>> import jax
        >>> x = {"w": jax.ShapeDtypeStruct((8,), "float32"), "b": 1}
        >>> shardings = {"w": FSDPSharding(), "b": None}
        >>> tuple(with_sharding_constraint(x, shardings)["w"].sharding.spec)
        ()
    """
    import jax

    def constrained(sharding: Any, part: Any) -> Any:
        if sharding is None:
            return part
        if callable(sharding):
            return with_sharding_constraint(part, sharding(part))
        if all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree_util.tree_leaves(part)):
            return jax.tree_util.tree_map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part
            )
        return jax.lax.with_sharding_constraint(part, sharding)

    return jax.tree_util.tree_map(constrained, shardings, x, is_leaf=lambda one: one is None)
