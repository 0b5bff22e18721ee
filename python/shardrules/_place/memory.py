"""Memory kinds of shardings and arrays, and moves between them inside jit."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardrules._base.jax_names import transfer_target

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, PartitionSpec, Sharding

    from shardrules._place.mesh import AnyMesh


def sharding_in_memory(mesh: AnyMesh, spec: PartitionSpec, kind: str | None) -> NamedSharding:
    """Return the NamedSharding of this memory kind. None leaves the kind to the mesh's devices.

    Raises:
        ValueError: The devices do not have the kind; or JAX forgets it, as for described GPUs.
    """
    from jax.sharding import NamedSharding

    if kind is None:
        return NamedSharding(mesh, spec)
    sharding = NamedSharding(mesh, spec, memory_kind=kind)
    if sharding.memory_kind != kind:
        raise ValueError(
            f"JAX describes GPUs without kinds of memory, and would count {kind!r} as their "
            "own; leave the kind out to count it so, or compile for GPUs that are there"
        )
    return sharding


@lru_cache(maxsize=4096)
def memory_apart(sharding: Sharding) -> str | None:
    """Return the sharding's memory kind; None if it is the default of its devices."""
    kind = sharding.memory_kind
    if kind in (None, "device"):
        return None
    return None if kind == sharding.with_memory_kind(None).memory_kind else kind  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def in_memory(sharding: NamedSharding, kind: str) -> NamedSharding:
    """Return the sharding in this memory kind; of equal ones, the same object."""
    return sharding.with_memory_kind(kind)


def moved_inside_jit(array: Any, sharding: NamedSharding) -> Any:
    """Return the array in the sharding's memory kind, unless that is the devices' default."""
    kind = memory_apart(sharding)
    if kind is None:
        return array
    import jax

    return jax.device_put(array, transfer_target(kind))
