"""Replicas over processes: each reads a part of what several hold, and their devices gather it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._base.dtypes import bits_of
from shardrules._base.specs import entries_of, entry_axes, entry_of
from shardrules._place.transfers import put
from shardrules._plan.files.models import Arrays
from shardrules._plan.files.remote import RemotePath

# Smaller arrays are read by each process: a request takes as long as a program.
_LEAST_BYTES: Final = 1 << 20


def reading_of(arrays: Arrays, leaf: Any, sharding: NamedSharding) -> NamedSharding:
    """Return the sharding by which an array is read.

    It is cut over the axes that would make several processes read the same bytes of a store on the
    network. From local files each process reads its replicas itself, which takes less time.
    """
    first = next((each.file.path for each in arrays.leaves.values() if each.file), None)
    is_small = prod(leaf.shape) * bits_of(leaf.dtype) // 8 < _LEAST_BYTES
    if is_small or not isinstance(first, RemotePath):
        return sharding
    return _apart(sharding, tuple(leaf.shape))


def put_in_place(
    values: list[Any], targets: Sequence[tuple[str, Any]], shardings: Sequence[Any]
) -> Any:
    """Give the arrays that were read their shardings, one after the other."""
    for i, (value, (_, target), sharding) in enumerate(
        zip(values, targets, shardings, strict=True)
    ):
        if target is not None and value.sharding != sharding:
            (values[i],) = put([value], [sharding])
    return values


@lru_cache(maxsize=4096)
def _apart(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Cut over the axes without a use that span processes, where they divide a dimension."""
    mesh: Any = sharding.mesh
    if sharding.memory_kind not in (None, mesh.devices.flat[0].default_memory().kind):
        return sharding
    entries = [entry_axes(entry) for entry in entries_of(sharding.spec)]
    entries += [()] * (len(shape) - len(entries))
    left = list(sharding.shard_shape(shape))
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    for place, axis in enumerate(mesh.axis_names):
        spans = (processes != processes.take([0], place)).any()
        if not spans or axis in {name for entry in entries for name in entry}:
            continue
        size = mesh.shape[axis]
        dim = next((d for d, length in enumerate(left) if length and length % size == 0), None)
        if dim is not None:
            entries[dim] = (*entries[dim], axis)
            left[dim] //= size
    return NamedSharding(mesh, PartitionSpec(*map(entry_of, entries)))
