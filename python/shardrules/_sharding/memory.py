"""Kinds of memory: which one an array stays in, and what moves it inside jit.

A sharding has the kind that its devices use by default, unless told. Inside jit JAX has two kinds,
and its constraints pass over them. Costs an attribute per array. Must not know about specs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, Sharding

__all__ = ["in_its_memory", "memory_apart", "moved_inside_jit"]

# The kinds that there are inside jit, by their names in jax.memory.Space.
_SPACES: Final = {"device": "Device", "pinned_host": "Host"}


def memory_apart(sharding: Sharding) -> str | None:
    """The sharding's kind of memory, if it is not the one that its devices use by default."""
    kind = sharding.memory_kind
    if kind in (None, "device"):
        return None
    return None if kind == sharding.with_memory_kind(None).memory_kind else kind  # type: ignore[arg-type]


def in_its_memory(leaf: Any, sharding: NamedSharding) -> NamedSharding:
    """The sharding in the kind of memory that the leaf is in: a spec says nothing about memory."""
    from jax import Array
    from jax.core import Tracer

    if not isinstance(leaf, Array) or isinstance(leaf, Tracer):
        return sharding
    kind = memory_apart(leaf.sharding)
    return sharding if kind is None else sharding.with_memory_kind(kind)


def moved_inside_jit(array: Any, sharding: NamedSharding) -> Any:
    """The array in the sharding's kind of memory, if that is not its devices' default one.

    Raises:
        ValueError: JAX does not have this kind inside jit.
    """
    kind = memory_apart(sharding)
    if kind is None:
        return array
    import jax

    if kind not in _SPACES:
        raise ValueError(
            f"an array cannot be moved to {kind!r} memory inside jit, where JAX has "
            f"{' and '.join(map(repr, _SPACES))}; move it outside of jit"
        )
    if hasattr(jax, "memory"):
        return jax.device_put(array, getattr(jax.memory.Space, _SPACES[kind]))
    from jax._src import sharding_impls  # before there was jax.memory

    transfer: Any = sharding_impls
    return jax.device_put(array, transfer.TransferToMemoryKind(kind))
