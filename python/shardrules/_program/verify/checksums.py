"""Finds copies of shards that differ, by checksums that the devices make of what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._base.dtypes import bits_of
from shardrules._base.specs import tags_of
from shardrules._place.mesh import has_devices, memory_apart
from shardrules._plan.kinds import axes_used

_PROGRAMS: Final = 256
"""One for each sharding; jit has those of its shapes and dtypes."""
_WORD_BITS: Final = 32


class Unlike(NamedTuple):
    """Copies that differ from the first of their shard."""

    devices: tuple[int, ...]
    """Numbers of the devices that have them, in the mesh's order."""
    firsts: tuple[int, ...]
    """Numbers of the first devices that have these shards."""
    axes: tuple[str, ...]
    """Mesh axes along which they differ."""


def has_copies(leaf: Any) -> TypeGuard[jax.Array]:
    """Return True for an array of which several devices have a shard, in their own memory."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(leaf, jax.Array) or not isinstance(sharding, NamedSharding):
        return False
    # Of what is yet to be summed, each device has a part of its own.
    is_whole = has_devices(sharding.mesh) and "unreduced" not in tags_of(sharding.spec)
    is_near = memory_apart(sharding) is None
    return is_whole and is_near and leaf.size > 0 and bool(_copied_axes(sharding))


def unlike_copies(arrays: Iterable[jax.Array]) -> list[Unlike | None]:
    """Compare the copies of each array, for which `has_copies`, bit by bit.

    In several processes, all call it with the same arrays in the same order.
    """
    shardings: list[NamedSharding] = []
    rows = []
    for array in arrays:
        sharding: Any = array.sharding
        shardings.append(sharding)
        with jax.set_mesh(sharding.mesh):  # shard_map takes no other mesh than that in force
            rows.append(_checksums_of(sharding)(array))
    return list(map(_unlike_by_checksums, shardings, jax.device_get(rows)))


def _copied_axes(sharding: NamedSharding) -> list[str]:
    sizes = sharding.mesh.shape
    used = axes_used(sharding.spec, sizes)
    return [axis for axis, size in sizes.items() if size > 1 and axis not in used]


def _unlike_by_checksums(sharding: NamedSharding, rows: Any) -> Unlike | None:
    """Find the copies with other checksums, of which there is a row for each device."""
    mesh = sharding.mesh
    placed: Any = mesh.devices
    sums = np.reshape(rows, (*placed.shape, -1))
    copied = [mesh.axis_names.index(axis) for axis in _copied_axes(sharding)]
    # Whatever their place on the axes that cut the array, copies are along the others.
    first = tuple(slice(0, 1) if i in copied else slice(None) for i in range(placed.ndim))
    is_unlike = (sums != sums[first]).any(-1)
    if not is_unlike.any():
        return None
    has_unlike = is_unlike.any(tuple(copied), keepdims=True)
    along = [i for i in copied if (sums != sums.take([0], i)).any()]
    devices, firsts = placed[is_unlike], placed[first][has_unlike]
    return Unlike(
        tuple(device.id for device in devices),
        tuple(device.id for device in firsts),
        tuple(mesh.axis_names[i] for i in along),
    )


@lru_cache(maxsize=_PROGRAMS)
def _checksums_of(sharding: Any) -> Callable[[jax.Array], jax.Array]:
    """Make the program that gives all devices the checksums of each, in the mesh's order."""
    mesh = sharding.mesh
    of_shards = jax.shard_map(
        lambda shard: _checksums(shard)[None],
        mesh=mesh,
        in_specs=sharding.spec,
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(of_shards, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _checksums(shard: jax.Array) -> jax.Array:
    """Compute two checksums of the bits of a shard and where they are.

    Words are mixed before they are summed: those of floats often end in zeros, and so many of them
    sum up to nothing. A single word that differs always tells, as mixing is one to one.
    """
    words = _words(shard)
    place = jnp.zeros(words.shape, "uint32")
    for dim, size in enumerate(words.shape):
        place = place * np.uint32(size % 2**_WORD_BITS) + jax.lax.broadcasted_iota(
            "uint32", words.shape, dim
        )
    mixed = _mixed(words + place * np.uint32(0x9E3779B9))
    return jnp.stack([jnp.sum(each, dtype="uint32") for each in (mixed, _mixed(mixed))])


def _words(shard: jax.Array) -> jax.Array:
    """Return the bits of the elements as unsigned integers."""
    if jnp.issubdtype(shard.dtype, jax.dtypes.prng_key):
        shard = jax.random.key_data(shard)
    if jnp.issubdtype(shard.dtype, jnp.complexfloating):
        shard = jnp.stack([shard.real, shard.imag])
    if shard.dtype != bool:
        bits = min(bits_of(shard.dtype), _WORD_BITS)  # of 64, two words
        shard = jax.lax.bitcast_convert_type(shard, f"uint{bits}")
    return shard.astype("uint32")


def _mixed(words: jax.Array) -> jax.Array:
    """Spread each bit of a word over all of it, as the end of MurmurHash3 does."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
    return words ^ (words >> np.uint32(16))
