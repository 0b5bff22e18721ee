"""Transfers of arrays to shardings: one batched `jax.device_put`, and what it cannot move."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shardrules._jax import weakly_typed
from shardrules._place.processes import canonical_dtype, is_spread
from shardrules._text import counted

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding

_T = TypeVar("_T")


def put(
    leaves: list[Any],
    shardings: list[NamedSharding],
    *,
    may_alias: bool = True,
    donate: bool = False,
) -> list[Any]:
    """Return `jax.device_put` in one batch, without its costs per leaf.

    In several processes each process places its own devices' part of host arrays; JAX would compare
    the data between all processes. An array on other devices where it is cut otherwise, such as a
    new one on a single device, goes through the host; JAX would compile a program to cut it.

    Args:
        leaves: Arrays and numbers.
        shardings: The sharding of each leaf.
        may_alias: Whether a result may be a given jax.Array, or share its memory.
        donate: Whether jax.Arrays may be given up. They are deleted, unless a device keeps a part.
    """
    import jax

    to_devices = partial(jax.device_put, may_alias=None if may_alias else False, donate=donate)
    result: list[Any]
    if not any(map(is_array, of_each_type(leaves))) and _are_for_here(shardings):
        result = to_devices(leaves, shardings)
        return result
    ready, moved = _prepared(leaves, shardings, may_stay=may_alias and not donate)
    arrays = to_devices([ready[i] for i in moved], [shardings[i] for i in moved])
    result = replace_at(ready, moved, arrays)
    if donate:
        jax.block_until_ready(result)
        for leaf, array in zip(leaves, result, strict=True):
            if isinstance(leaf, jax.Array) and leaf is not array and not stays_in_part(leaf, array):
                leaf.delete()
    return result


def check_reachable(
    path: Callable[[], str],
    leaf: Any,
    sharding: NamedSharding,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Check that JAX can move an array that several processes hold.

    Args:
        path: Gives the array's path, for the error.
        leaf: The array, or anything else, which can be moved.
        sharding: Where it is to be.
        shape: The shape that is moved, if that is not the array's.

    Raises:
        ValueError: JAX cannot.
    """
    import jax

    if not is_spread(leaf) or leaf.sharding.device_set == sharding.device_set:
        return
    if leaf.is_fully_replicated and sharding.is_fully_addressable:
        return  # through the host
    groups = ({d.process_index for d in each.device_set} for each in (leaf.sharding, sharding))
    before, after = map(sorted, groups)
    client: Any = next(iter(sharding.device_set)).client  # type: ignore[attr-defined]
    sends = getattr(client, "supports_cross_host_transfers", False) or getattr(
        jax.config, "jax_cross_host_transfer_socket_address", ""
    )
    is_same = shape in (None, leaf.shape) and _are_cut_alike(leaf.sharding, sharding, leaf.shape)
    if not (is_same and before != after and sends):
        raise ValueError(
            f"{path()} is on {counted(len(leaf.sharding.device_set), 'device')} of processes "
            f"{before}, and is to be on {len(sharding.device_set):,} of processes {after}, not the "
            "same ones, which JAX cannot do: what several processes hold, it moves to other "
            "shardings on the same devices; and to other processes, with the same cuts, on TPUs "
            "and GPUs, or with jax_cross_host_transfer_socket_address. Move within these devices, "
            "or save the tree and load it there"
        )


def has_spread(tree: Any) -> bool:
    """Return whether other processes hold parts of an array that this one does not hold."""
    import jax

    leaves = jax.tree_util.tree_leaves(tree)
    return any(is_spread(leaf) and not leaf.is_fully_replicated for leaf in leaves)


def stays_in_part(leaf: Any, array: jax.Array) -> bool:
    """Return whether a device has the same part of both, which may then be the same memory."""
    if getattr(leaf, "sharding", None) is None or leaf.shape != array.shape:
        return False
    was = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    is_now = array.sharding.addressable_devices_indices_map(array.shape)
    return any(was.get(device) == index for device, index in is_now.items())


def _prepared(
    leaves: list[Any], shardings: list[NamedSharding], *, may_stay: bool
) -> tuple[list[Any], list[int]]:
    """Return (the leaves as `jax.device_put` is to get them, the places of those that it gets)."""
    import jax

    is_local = {id(target): target.is_fully_addressable for target in distinct(shardings)}
    ready, moved, elsewhere = list(leaves), [], []
    for index, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        # Asked once: that of random keys takes long.
        was = leaf.sharding if isinstance(leaf, jax.Array) else None
        if was is not None and may_stay and _is_in_place(leaf, was, sharding):
            continue
        moved.append(index)
        if is_local[id(sharding)]:
            if was is not None and _is_cut_otherwise_elsewhere(leaf, was, sharding):
                elsewhere.append(index)
        elif not is_spread(leaf):
            ready[index] = _from_own_parts(leaf, sharding)
    return replace_at(ready, elsewhere, jax.device_get([leaves[i] for i in elsewhere])), moved


def _are_for_here(shardings: list[NamedSharding]) -> bool:
    """Return whether all their devices are of this process."""
    return all(sharding.is_fully_addressable for sharding in distinct(shardings))


def _is_in_place(leaf: jax.Array, was: Any, sharding: NamedSharding) -> bool:
    """Return whether `jax.device_put` would return the array itself; it takes microseconds."""
    is_there = was is sharding or was == sharding
    return is_there and getattr(leaf, "committed", False)


@lru_cache(maxsize=4096)
def _are_cut_alike(before: Any, after: Any, shape: tuple[int, ...]) -> bool:
    """Return whether the devices, in their order, have the same parts."""
    if len(before.device_set) != len(after.device_set):
        return False
    maps = (each.devices_indices_map(shape).values() for each in (before, after))
    return all(a == b for a, b in zip(*maps, strict=True))


def _is_cut_otherwise_elsewhere(leaf: jax.Array, was: Any, sharding: NamedSharding) -> bool:
    import jax
    import jax.numpy as jnp

    is_here = was.is_fully_addressable
    return (
        was.device_set != sharding.device_set
        and not (is_here and _are_cut_alike(was, sharding, leaf.shape))
        and (is_here or was.is_fully_replicated)
        # A numpy array has neither weak types nor random keys.
        and not getattr(leaf, "weak_type", False)
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


def _from_own_parts(leaf: Any, sharding: NamedSharding) -> Any:
    """Return the global array, made from the shards of host data on local devices."""
    import jax

    host, weak = _on_host(leaf)
    array = jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
    # Else type promotion of a number would be different in several processes and in one.
    return jax.jit(weakly_typed, out_shardings=sharding)(array) if weak else array


def _on_host(leaf: Any) -> tuple[Any, bool]:
    """Return (the leaf with its dtype on devices, whether its type is weak)."""
    import jax
    import jax.numpy as jnp

    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf, False  # random keys
    host = np.asarray(leaf)
    host = host.astype(canonical_dtype(host), copy=False)
    return host, getattr(leaf, "weak_type", type(leaf) in (int, float, complex))


def distinct(objects: list[_T]) -> Iterable[_T]:
    """Return each object once, told apart by identity."""
    return dict(zip(map(id, objects), objects, strict=True)).values()


def of_each_type(leaves: list[Any]) -> Iterable[Any]:
    """Return a leaf of each type."""
    return dict(zip(map(type, leaves), leaves, strict=True)).values()


def is_array(leaf: Any) -> bool:
    import jax

    return isinstance(leaf, jax.Array)


def replace_at(items: list[Any], places: Iterable[int], others: Iterable[Any]) -> list[Any]:
    """Return the list, with other objects in these places."""
    for place, item in zip(places, others, strict=True):
        items[place] = item
    return items
