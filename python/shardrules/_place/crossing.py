"""Crossings: arrays to devices of other processes, by programs that both sides run.

`jax.device_put` moves an array of several processes only on its own devices, and so does jit. Here
the senders cut it into equal blocks, a collective permute over the devices of both sides sends each
block once, the receivers copy blocks among themselves, and then cut it as asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules._base.jax_names import weakly_typed

_DEVICE: Final = "device"


def crossed(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Move an array; all processes call this alike."""
    is_key = is_extended(leaf)
    key = jax.random.key_impl(leaf) if is_key else None
    is_weak = not is_key and leaf.weak_type
    if leaf.size == 0 and not is_key and not is_weak:  # JAX 0.10 does not cut what is empty
        return _empty(leaf, sharding)
    way = _crossing(leaf.shape, key, is_weak, leaf.sharding, sharding)
    blocks = way.cut(leaf)
    data = {shard.device: shard.data for shard in blocks.addressable_shards}
    lanes: Any = way.lanes.mesh
    devices = list(lanes.devices.flat)
    block = (1, *blocks.sharding.shard_shape(blocks.shape)[1:])
    ours = [
        data[device] if device in data else jax.numpy.zeros(block, blocks.dtype, device=device)
        for device in devices
        if device.process_index == jax.process_index()
    ]
    received = way.send(array_of_shards((len(devices), *block[1:]), way.lanes, ours, blocks.dtype))
    there = way.arrived.device_set
    ours = [shard.data for shard in received.addressable_shards if shard.device in there]
    result: jax.Array = way.join(array_of_shards(blocks.shape, way.arrived, ours, blocks.dtype))
    return result


def _empty(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    shape = sharding.shard_shape(leaf.shape)
    devices = sharding.addressable_devices
    shards = [jax.numpy.zeros(shape, leaf.dtype, device=device) for device in devices]
    return array_of_shards(leaf.shape, sharding, shards, leaf.dtype)


def is_extended(leaf: Any) -> bool:
    """Return whether it has random keys."""
    return bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended))


def array_of_shards(
    shape: tuple[int, ...], sharding: NamedSharding, shards: list[Any], dtype: Any
) -> jax.Array:
    """Return the array of this process's shards: none, if it has none of the devices."""
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)


class _Crossing(NamedTuple):
    """The programs of a crossing."""

    cut: Callable[[Any], Any]
    """On the senders: the array, with a first dimension of 1, in blocks."""
    send: Callable[[Any], Any]
    """On both: of rows with the senders' blocks, or anything, rows with the receivers' blocks."""
    join: Callable[[Any], Any]
    """On the receivers: the array, as asked."""
    lanes: NamedSharding
    """The rows of both."""
    arrived: NamedSharding
    """The blocks on the receivers."""


@lru_cache(maxsize=1024)
def _crossing(
    shape: tuple[int, ...], key: Any, is_weak: bool, before: Sharding, after: NamedSharding
) -> _Crossing:
    def cut(array: Any) -> Any:
        return (array if key is None else jax.random.key_data(array))[None]

    def join(blocks: Any) -> Any:
        array = blocks[0]
        if key is not None:
            return jax.random.wrap_key_data(array, impl=key)
        return weakly_typed(array) if is_weak else array

    senders = list(before.devices_indices_map(shape))
    target: Any = after.mesh
    receivers = list(target.devices.flat)
    grid = _grid(shape, gcd(len(senders), len(receivers)), after)
    of_senders, of_receivers = (_in_blocks(devices, grid) for devices in (senders, receivers))
    devices = list(dict.fromkeys([*senders, *receivers]))
    place = {device: i for i, device in enumerate(devices)}
    copies = len(receivers) // prod(grid)
    to = [place[device] for device in receivers]
    first = [place[device] for device in senders[:: len(senders) // prod(grid)]]
    pairs = list(zip(first, to[::copies], strict=True))
    mesh = Mesh(np.array(devices), (_DEVICE,))
    lanes = NamedSharding(mesh, PartitionSpec(_DEVICE))
    return _Crossing(
        jax.jit(cut, out_shardings=of_senders),
        jax.jit(_sending_program(mesh, pairs, to, copies), donate_argnums=0),
        jax.jit(join, out_shardings=after),
        lanes,
        of_receivers,
    )


def _sending_program(
    mesh: Mesh, pairs: Sequence[tuple[int, int]], receivers: Sequence[int], copies: int
) -> Callable[[Any], Any]:
    """Return the program that sends blocks by pairs of places, and copies them at the receivers."""

    def send(block: Any) -> Any:
        block = jax.lax.ppermute(block, _DEVICE, pairs)
        done = 1
        while done < copies:  # twice as many have it after each round
            new = range(done, min(2 * done, copies))
            steps = [
                (receivers[first + i - done], receivers[first + i])
                for first in range(0, len(receivers), copies)
                for i in new
            ]
            is_new = np.zeros(mesh.size, np.bool_)
            is_new[[there for _, there in steps]] = True
            mine = jax.numpy.asarray(is_new)[jax.lax.axis_index(_DEVICE)]
            block = jax.numpy.where(mine, jax.lax.ppermute(block, _DEVICE, steps), block)
            done *= 2
        return block

    spec = PartitionSpec(_DEVICE)
    program: Callable[[Any], Any] = jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec)
    return program


def _grid(shape: tuple[int, ...], lanes: int, after: NamedSharding) -> list[int]:
    """Return into how many parts each dimension is cut: as asked, and as many more as there are.

    More than asked is for replicas: a part crosses once, and the receivers gather it.
    """
    sizes = after.shard_shape(shape)
    grid = [max(1, n // max(1, size)) for n, size in zip(shape, sizes, strict=True)]
    if lanes % prod(grid):
        grid = [1] * len(shape)
    lanes //= prod(grid)
    for dim, size in enumerate(shape):
        more = gcd(size // grid[dim], lanes) if size else 1
        grid[dim] *= more
        lanes //= more
    return grid


def _in_blocks(devices: Sequence[Any], grid: Sequence[int]) -> NamedSharding:
    """Return the sharding of blocks, with a first dimension of 1; neighbours have copies."""
    names = [f"dim{i}" for i in range(len(grid))]
    mesh = Mesh(np.array(devices).reshape(*grid, -1), (*names, "copy"))
    return NamedSharding(mesh, PartitionSpec(None, *names))
