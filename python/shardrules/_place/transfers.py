"""Transfers of arrays to shardings: one batched `jax.device_put`, and what it cannot move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from shardrules._base.jax_names import weakly_typed
from shardrules._base.text import counted

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
        donate: Whether JAX may use the memory of jax.Arrays anew, of which no two are the same.
    """
    inputs = list(leaves)
    if jax.process_count() > 1:
        inputs = list(map(_of_this_process, leaves, shardings))
    moved, cut_on_host, are_arrays = [], [], array_types(inputs)
    for index, (leaf, target) in enumerate(zip(inputs, shardings, strict=True)):
        if type(leaf) in are_arrays:
            was = leaf.sharding  # asked once: that of random keys takes long
            is_there = (was is target or was == target) and getattr(leaf, "committed", False)
            if is_there and (may_alias or not target.addressable_devices):
                continue
            if _takes_a_program(was, target, leaf.shape) and not (
                # A numpy array has neither weak types nor random keys.
                getattr(leaf, "weak_type", False) or is_extended(leaf.dtype)
            ):
                cut_on_host.append(index)
        moved.append(index)
    replace_at(inputs, cut_on_host, jax.device_get([inputs[i] for i in cut_on_host]))
    arrays = jax.device_put(
        [inputs[i] for i in moved],
        [shardings[i] for i in moved],
        may_alias=None if may_alias else False,
        donate=donate,
    )
    return replace_at(inputs, moved, arrays)


@lru_cache(maxsize=4096)
def _takes_a_program(was: Any, target: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Return whether JAX compiles a program to move an array: to other cuts on other devices."""
    return (
        was.is_fully_addressable
        and target.is_fully_addressable
        and was.device_set != target.device_set
        and not _are_cut_alike(was, target, shape)
    )


class Donated:
    """Arrays that may be given up: each is deleted once nothing else has a part of its memory.

    One array may stand under several paths, and several arrays may share memory.
    """

    def __init__(self, arrays: Iterable[Any]) -> None:
        self._users: Counter[tuple[Any, int]] = Counter()
        self.keep(arrays)

    def keep(self, arrays: Iterable[Any]) -> None:
        """Add arrays that use their memory until they are given up."""
        for array in arrays:
            self._users.update(_parts_in_memory(array))

    def are_apart(self) -> bool:
        """Return whether each part is that of one array alone."""
        return max(self._users.values(), default=1) == 1

    def give_up(self, arrays: Iterable[Any]) -> None:
        """Delete the arrays whose memory nobody uses after that."""
        parts_of = [(array, _parts_in_memory(array)) for array in arrays]
        for _, parts in parts_of:
            self._users.subtract(parts)
        for array, parts in parts_of:
            if parts and not any(self._users[part] for part in parts):
                array.delete()


def _parts_in_memory(array: Any) -> list[tuple[Any, int]]:
    """Return (device, address) of each part that is here; none of what is no array, or deleted."""
    if not isinstance(array, jax.Array) or array.is_deleted():
        return []
    data: Any = jax.random.key_data(array) if is_extended(array.dtype) else array
    return [(part.device, part.data.unsafe_buffer_pointer()) for part in data.addressable_shards]


def check_reachable(
    path: str, leaf: Any, sharding: NamedSharding, shape: tuple[int, ...] | None = None
) -> None:
    """Check that `jax.device_put` moves an array, or what is made of it in this shape.

    It moves one to other cuts on the same devices, and, on some platforms, in the same cuts to
    other devices. It aborts processes that have none of the devices if only their order changes.
    """
    if not isinstance(leaf, jax.Array):
        return
    was, shape = leaf.sharding, leaf.shape if shape is None else shape
    if crosses(leaf, sharding):
        if shape != leaf.shape or not _are_cut_alike(was, sharding, shape):
            why = "JAX moves it there only in the same cuts, to as many devices: shard it so first"
        elif not _can_cross(sharding):
            why = "this platform needs JAX's jax_cross_host_transfer_socket_address for that"
        else:
            return
    elif not _stays_on(leaf, sharding) or (
        [*was.devices_indices_map(leaf.shape)] == [*sharding.devices_indices_map(shape)]
    ):
        return
    elif is_extended(leaf.dtype):
        why = "JAX moves random keys only in the same order of the devices"
    elif len(holders_of(was)) < jax.process_count():
        why = "JAX does not change their order in a job of other processes too"
    else:
        return
    raise ValueError(
        f"{path} is on {counted(len(was.device_set), 'device')} of processes "
        f"{sorted(holders_of(was))}, and is to be on {len(sharding.device_set):,} of processes "
        f"{sorted(holders_of(sharding))}; {why}; or save the tree and load it there"
    )


def _can_cross(sharding: NamedSharding) -> bool:
    device: Any = next(iter(sharding.device_set))
    if getattr(device.client, "supports_cross_host_transfers", False):
        return True
    return bool(getattr(jax.config, "jax_cross_host_transfer_socket_address", ""))


def _stays_on(leaf: Any, sharding: NamedSharding) -> bool:
    """Return whether an array of several processes stays on its devices."""
    return (
        is_spread(leaf)
        and leaf.sharding.device_set == sharding.device_set
        and len(holders_of(leaf.sharding)) > 1
    )


def crosses(leaf: Any, sharding: NamedSharding) -> bool:
    """Return whether an array goes to devices of processes that do not have all of it."""
    if not isinstance(leaf, jax.Array) or leaf.sharding.device_set == sharding.device_set:
        return False
    return _is_held_elsewhere(leaf, holders_of(sharding))


def is_spread(leaf: Any) -> bool:
    """Return whether other processes hold parts of this array."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _is_held_elsewhere(leaf: Any, takers: frozenset[int]) -> bool:
    """Return whether one of these processes needs a part of the array that only another holds.

    The process that holds all of it takes it for data that each has, unless it is committed there
    and the process is no taker.
    """
    holders = holders_of(leaf.sharding)
    if not is_spread(leaf):
        return bool(getattr(leaf, "committed", False)) and takers.isdisjoint(holders)
    if leaf.is_fully_replicated:
        return not takers <= holders
    return len(holders) > 1 or takers != holders


@lru_cache(maxsize=4096)
def holders_of(sharding: Sharding) -> frozenset[int]:
    """Return the processes of its devices."""
    devices: set[Any] = sharding.device_set
    return frozenset(device.process_index for device in devices)


def canonical_dtype(leaf: Any) -> Any:
    """Return the dtype of a numpy array or a number on devices, which depends on jax_enable_x64."""
    return jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", None) or np.asarray(leaf).dtype)


@lru_cache(maxsize=256)
def is_extended(dtype: Any) -> bool:
    """Return whether it is that of random keys."""
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.extended))


def stays_within(tree: Any, process: int | None) -> bool:
    """Return whether this process alone has what goes to its own devices; None is no process."""
    if process is None:
        return False
    takers = frozenset((process,))
    leaves = jax.tree_util.tree_leaves(tree)
    return not any(isinstance(x, jax.Array) and _is_held_elsewhere(x, takers) for x in leaves)


def _of_this_process(leaf: Any, target: NamedSharding) -> Any:
    """Return what `jax.device_put` takes for the leaf in a job of several processes."""
    if isinstance(leaf, jax.Array) and leaf.sharding == target:
        return leaf
    if _stays_on(leaf, target):
        return jax.jit(_itself, out_shardings=target)(leaf) if is_extended(leaf.dtype) else leaf
    if crosses(leaf, target):
        return leaf
    if is_spread(leaf) and target.addressable_devices:  # each of these processes has a replica
        leaf = leaf.addressable_data(0)
    return leaf if target.is_fully_addressable else _from_own_parts(leaf, target)


def _itself(array: Any) -> Any:
    return array


def _are_cut_alike(before: Any, after: Any, shape: tuple[int, ...]) -> bool:
    """Return whether the devices, in their order, have the same parts."""
    if len(before.device_set) != len(after.device_set):
        return False
    maps = (each.devices_indices_map(shape).values() for each in (before, after))
    return all(a == b for a, b in zip(*maps, strict=True))


def _from_own_parts(leaf: Any, sharding: NamedSharding) -> Any:
    """Return the global array, made from the shards of host data on local devices."""
    array: jax.Array
    if sharding.addressable_devices:
        host, weak = _on_host(leaf)
        array = jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
    else:
        dtype = leaf.dtype if isinstance(leaf, jax.Array) else canonical_dtype(leaf)
        array = jax.make_array_from_single_device_arrays(np.shape(leaf), sharding, [], dtype=dtype)
        weak = _is_weak(leaf)
    # Else type promotion of a number would be different in several processes and in one.
    return jax.jit(weakly_typed, out_shardings=sharding)(array) if weak else array


def _on_host(leaf: Any) -> tuple[Any, bool]:
    """Return (the leaf with its dtype on devices, whether its type is weak)."""
    if isinstance(leaf, jax.Array) and is_extended(leaf.dtype):
        return leaf, False
    host = np.asarray(leaf)
    host = host.astype(canonical_dtype(host), copy=False)
    return host, _is_weak(leaf)


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", type(leaf) in (int, float, complex)))


def distinct(objects: list[_T]) -> Iterable[_T]:
    """Return each object once, told apart by identity."""
    return dict(zip(map(id, objects), objects, strict=True)).values()


def array_types(leaves: list[Any]) -> set[type]:
    """Return the types of leaves that are arrays with data; JAX asks each array in Python."""
    one_of_type = dict(zip(map(type, leaves), leaves, strict=True))
    return {
        kind
        for kind, leaf in one_of_type.items()
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    }


def of_each_type(leaves: list[Any]) -> Iterable[Any]:
    return dict(zip(map(type, leaves), leaves, strict=True)).values()


def replace_at(items: list[Any], places: Iterable[int], others: Iterable[Any]) -> list[Any]:
    """Return the list, with other objects in these places."""
    for place, item in zip(places, others, strict=True):
        items[place] = item
    return items
