"""Memory kinds of shardings and arrays, and moves between them inside jit."""

from __future__ import annotations

from collections.abc import Callable
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


def memory_apart(sharding: Sharding) -> str | None:
    """Return the sharding's memory kind; None if it is the default of its devices."""
    kind = sharding.memory_kind
    if kind in (None, "device"):
        return None
    return None if kind == sharding.with_memory_kind(None).memory_kind else kind  # type: ignore[arg-type]


def memory_keeper() -> Callable[[Any, NamedSharding], NamedSharding]:
    """Return a function from (leaf, sharding) to the sharding in the memory kind of the leaf.

    A spec says nothing about memory. The keeper is for the leaves of one call: it remembers
    shardings by their ids, and keeps them alive, so that no other object gets an id.
    """
    from jax import Array
    from jax.core import Tracer

    kinds: dict[int, tuple[Sharding, str | None]] = {}
    remembered: dict[tuple[int, str], tuple[NamedSharding, NamedSharding]] = {}

    def kept(leaf: Any, sharding: NamedSharding) -> NamedSharding:
        if not isinstance(leaf, Array) or isinstance(leaf, Tracer):
            return sharding
        current = leaf.sharding
        if id(current) not in kinds:
            kinds[id(current)] = current, memory_apart(current)
        kind = kinds[id(current)][1]
        if kind is None:
            return sharding
        key = id(sharding), kind
        if key not in remembered:
            remembered[key] = sharding, sharding.with_memory_kind(kind)
        return remembered[key][1]

    return kept


def moved_inside_jit(array: Any, sharding: NamedSharding) -> Any:
    """Return the array in the sharding's memory kind, unless that is the devices' default."""
    kind = memory_apart(sharding)
    if kind is None:
        return array
    import jax

    return jax.device_put(array, transfer_target(kind))
