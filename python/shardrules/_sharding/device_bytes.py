"""Bytes of one sharded array on each device, uneven shards included.

Costs a small array with a number for each device that differs. Must not know about trees or rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardrules._specs import Entries, entries_of, entry_axes

if TYPE_CHECKING:
    import numpy.typing as npt
    from jax.sharding import PartitionSpec

__all__ = ["check_countable", "device_bytes"]

_MOST_DEVICES: Final = 2**24
_MOST_BITS: Final = 2**63 - 1


def check_countable(axis_sizes: Mapping[str, int]) -> None:
    """That a number for each device fits into memory.

    Raises:
        ValueError: There are more than 16 million devices.
    """
    devices = prod(axis_sizes.values())
    if devices > _MOST_DEVICES:
        raise ValueError(
            f"a mesh of {devices:,} devices; bytes are counted for at most {_MOST_DEVICES:,}"
        )


def device_bytes(
    shape: Sequence[int], bits: int, spec: PartitionSpec | Entries, axis_sizes: Mapping[str, int]
) -> npt.NDArray[Any]:
    """What each device of the mesh holds of the array.

    A dimension that its axes do not divide is cut as XLA cuts it: into parts of the size rounded
    up, the last ones smaller or empty.

    Args:
        shape: Of the whole array.
        bits: Of one element; 8 for each byte. Fewer are packed, as in int4.
        spec: At most as long as the shape.
        axis_sizes: Devices along each mesh axis, in the mesh's order.

    Returns:
        Bytes, an array with one dimension for each mesh axis: int64, or Python's ints for an array
        of 2**60 bytes and more.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> device_bytes((10, 4), 16, P("dp"), {"dp": 4, "tp": 1}).ravel()
        array([24, 24, 24,  8])
    """
    entries = entries_of(spec)
    names = list(axis_sizes)
    exact = np.int64 if prod(max(size, 1) for size in shape) * bits <= _MOST_BITS else object
    held: npt.NDArray[Any] = np.full((1,) * len(names), bits, exact)
    for dim, size in enumerate(shape):
        named = entry_axes(entries[dim]) if dim < len(entries) else ()
        axes = [axis for axis in named if axis in axis_sizes]
        parts = prod(axis_sizes[axis] for axis in axes)
        part = -(-size // parts)
        if size % parts == 0:
            held = held * part
            continue
        position: npt.NDArray[Any] = np.zeros((1,) * len(names), exact)
        for axis in axes:
            along = [1] * len(names)
            along[names.index(axis)] = axis_sizes[axis]
            position = position * axis_sizes[axis] + np.arange(axis_sizes[axis]).reshape(along)
        held = held * np.clip(size - position * part, 0, part)
    return np.broadcast_to(-(-held // 8), tuple(axis_sizes.values()))
