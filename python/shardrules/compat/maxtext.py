"""MaxText's ZeRO-1 for optimizer states, as a record for `Plan.for_optimizer` and as its function.

MaxText's rules are `LogicalRules` in the dialect `sr.dialects.MAXTEXT`; rule files may be its YAML.
`add_data_to_sharding` is that of `maxtext.utils.sharding` of 2026, and differs in nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardrules._base.specs import entry_axes
from shardrules._base.text import shown
from shardrules._plan.state import Zero1

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

__all__ = ["ZERO1", "add_data_to_sharding"]

ZERO1: Final = Zero1("data", dim="first", place="outer", not_with=("tensor",))
"""MaxText's `shard_optimizer_over_data`, for `Plan.for_optimizer`: as `add_data_to_sharding`."""


def add_data_to_sharding(mesh: Mesh, path: Any, aval: Any, sharding: Any) -> NamedSharding:
    """Add the mesh axis "data" to a sharding: ZeRO-1 for a leaf of an optimizer's state.

    The first dimension gets it whose part on a device "data" divides, unless "tensor" cuts it.
    Semantics of `maxtext.utils.sharding.add_data_to_sharding` of 2026. `Plan.for_optimizer` does so
    with `zero1=ZERO1`; with `zero1="data"` it takes the dimension of which each device holds most.

    Args:
        mesh: The mesh, with an axis "data".
        path: The leaf's path, of JAX's keys.
        aval: The leaf; its `.shape` is read.
        sharding: Its NamedSharding.

    Raises:
        AssertionError: It is not a NamedSharding, or the leaf cannot be sharded so.

    Example:
        >>> import jax
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> from shardrules import resolve_mesh
        >>> mesh = resolve_mesh({"data": 2, "fsdp": 4})
        >>> leaf = jax.ShapeDtypeStruct((6, 8), "float32")
        >>> add_data_to_sharding(mesh, (), leaf, NamedSharding(mesh, P(None, "fsdp"))).shard_shape(
        ...     leaf.shape)
        (3, 2)
    """
    from jax import tree_util
    from jax.sharding import NamedSharding, PartitionSpec

    where = tree_util.keystr(path)
    if not isinstance(sharding, NamedSharding):
        raise AssertionError(  # noqa: TRY004 MaxText's type
            f"{where}: expected a NamedSharding, not {shown(sharding)}"
        )
    rank, spec = len(aval.shape), tuple(sharding.spec)
    if len(spec) == rank + 1 and "local_layers" in spec:
        spec = tuple(entry for entry in spec if entry != "local_layers")
    spec = (*spec, *[None] * (rank - len(spec)))[:rank]
    padded = sharding
    if len(sharding.spec) != rank:
        padded = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    try:
        dims = padded.shard_shape(tuple(aval.shape))
    except Exception as error:
        raise AssertionError(f"{where}: a shape of {aval.shape} cannot have {padded}") from error
    named = [entry_axes(entry) for entry in spec]
    if any("data" in axes for axes in named):
        return padded
    for dim, (size, axes) in enumerate(zip(dims, named, strict=True)):
        if size % mesh.shape["data"] == 0 and "tensor" not in axes:
            entries = (*spec[:dim], ("data", *axes), *spec[dim + 1 :])
            return NamedSharding(sharding.mesh, PartitionSpec(*entries))
    return padded
