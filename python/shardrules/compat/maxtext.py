"""MaxText's ZeRO-1 for optimizer states, as its function.

`add_data_to_sharding` is that of `maxtext.utils.sharding` of 2026, and differs in its messages
alone. MaxText's rules are `LogicalRules` in the dialect `MAXTEXT`; its YAML is a rule file.

Example:
    >>> import jax
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> from shardrules import resolve_mesh
    >>> leaf, mesh = jax.ShapeDtypeStruct((6, 8), "float32"), resolve_mesh({"data": 2, "fsdp": 4})
    >>> zero1 = add_data_to_sharding(mesh, (), leaf, NamedSharding(mesh, P(None, "fsdp")))
    >>> zero1.shard_shape(leaf.shape)
    (3, 2)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardrules._base.specs import entry_axes
from shardrules._base.text import shown

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

__all__ = ["add_data_to_sharding"]


def add_data_to_sharding(mesh: Mesh, path: Any, aval: Any, sharding: Any) -> NamedSharding:
    """Semantics of maxtext.utils.sharding.add_data_to_sharding: `aval` needs a shape alone.

    Raises:
        AssertionError: It is not a NamedSharding, or the leaf cannot be sharded so.
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
