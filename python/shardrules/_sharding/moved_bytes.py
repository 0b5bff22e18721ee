"""Bytes that devices receive and send when an array gets another sharding, on the same mesh or not.

A device keeps the part of its new shard that it holds already, and receives the rest. Shards are
boxes of a grid, so that part is a product of overlaps along the dimensions. Costs some passes over
the devices per array. Must not know about trees, rules or JAX's devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardrules._specs import Entries, entries_of, entry_axes

if TYPE_CHECKING:
    import numpy.typing as npt
    from jax.sharding import PartitionSpec

    _Ints = npt.NDArray[Any]

__all__ = ["Grid", "Moved", "moved_bytes"]


class Grid:
    """The devices of a mesh in row-major order, and which of them are in another mesh too.

    Args:
        axis_sizes: Devices along each mesh axis, in the mesh's order.
        shared: Numbers of the devices that are in both meshes, in the same order in both grids.
        exact: The dtype of all counts: int64, or object (Python ints) where that is too small.
    """

    def __init__(
        self, axis_sizes: Mapping[str, int], shared: npt.NDArray[np.int64], exact: np.dtype[Any]
    ) -> None:
        self.sizes = tuple(axis_sizes.values())
        self.devices = prod(self.sizes)
        self.shared = shared
        self._exact = exact
        self._axis_sizes = axis_sizes
        self._positions: dict[tuple[str, ...], _Ints] = {}

    def full(self, value: Any) -> _Ints:
        """A new array with this number, or these, for the devices."""
        return np.full(self.devices, value, self._exact)

    def cuts(self, rank: int, spec: PartitionSpec | Entries) -> list[tuple[str, ...]]:
        """For each of so many dimensions, the axes of more than one device that cut it."""
        named = [*map(entry_axes, entries_of(spec)), *[()] * (rank - len(spec))]
        return [tuple(a for a in axes if self._axis_sizes[a] > 1) for axes in named[:rank]]

    def interval(self, size: int, axes: tuple[str, ...]) -> tuple[Any, Any]:
        """Per device the (start, stop) of its part of a dimension that these axes cut, as in XLA.

        Parts are rounded up; the last ones are smaller, or empty.
        """
        if not axes:
            return 0, size
        part = -(-size // prod(self._axis_sizes[axis] for axis in axes))
        start = np.minimum(self._position(axes) * part, size)
        return start, np.minimum(start + part, size)

    def _position(self, axes: tuple[str, ...]) -> _Ints:
        """Per device its position among the parts that these axes make."""
        if axes not in self._positions:
            names, position = list(self._axis_sizes), np.zeros((1,) * len(self.sizes), np.int64)
            for axis in axes:
                along = [1] * len(names)
                along[names.index(axis)] = -1
                size = self._axis_sizes[axis]
                position = position * size + np.arange(size).reshape(along)
            self._positions[axes] = self.full(np.broadcast_to(position, self.sizes).ravel())
        return self._positions[axes]

    def on_shared(self, value: Any) -> Any:
        """A number for each device, or one for all, for the shared devices alone."""
        return value[self.shared] if isinstance(value, np.ndarray) else value

    def of_shared(self, value: _Ints) -> _Ints:
        """A number for each of the shared devices as one for each device, 0 for the others."""
        each = self.full(0)
        each[self.shared] = value
        return each

    def copies(self, used: frozenset[str]) -> int:
        """How many devices hold the same part of an array that these axes cut."""
        return prod(size for axis, size in self._axis_sizes.items() if axis not in used)

    def of_groups(self, value: _Ints, used: frozenset[str]) -> _Ints:
        """A number for each device, which is the same for those of a group, as one for each group.

        A group is the devices that hold the same part. The result has a dimension for each axis, of
        size 1 for those that tell no groups apart.
        """
        first = tuple(slice(None if axis in used else 1) for axis in self._axis_sizes)
        return value.reshape(self.sizes)[first]

    def group_sums(self, value: _Ints, used: frozenset[str]) -> _Ints:
        """The sums over the devices of each group, with the dimensions of `of_groups`."""
        alike = tuple(dim for dim, axis in enumerate(self._axis_sizes) if axis not in used)
        sums: _Ints = value.reshape(self.sizes).sum(axis=alike, keepdims=True)
        return sums

    def shares(self, of_group: _Ints, used: frozenset[str]) -> _Ints:
        """Numbers of groups, shared out equally among their devices; the first ones get the rest.

        Args:
            of_group: With the dimensions of `of_groups`.
            used: As there.
        """
        alike = [size if axis not in used else 1 for axis, size in self._axis_sizes.items()]
        each = of_group // prod(alike)
        rank = np.arange(prod(alike)).reshape(alike)
        more = rank < of_group - each * prod(alike)
        return np.broadcast_to(each + more, self.sizes).ravel()


class Moved(NamedTuple):
    """What moves of arrays that are alike. Bytes of a device are rounded up for each array."""

    received: _Ints
    """Per device of the new mesh, bytes of one array."""
    kept: _Ints
    """Per device of the new mesh, bytes of its part of one array that it holds already."""
    sent: _Ints
    """Per device of the old mesh, bytes of all arrays, if all that hold a part send equally much of
    it."""
    used: frozenset[str]
    """The axes of the old mesh that cut the arrays."""


def moved_bytes(
    shape: Sequence[int],
    bits: int,
    specs: tuple[PartitionSpec | Entries, PartitionSpec | Entries],
    grids: tuple[Grid, Grid],
    count: int = 1,
) -> Moved:
    """What moves of so many arrays.

    Args:
        shape: Shape of the whole array.
        bits: Bits of one element. Less than 8 are packed.
        specs: Before and after.
        grids: The old mesh and the new one.
        count: Number of arrays.
    """
    old, new = grids
    cuts, new_cuts = (grid.cuts(len(shape), spec) for grid, spec in zip(grids, specs, strict=True))
    held, wanted, kept = old.full(bits), new.full(bits), new.full(bits)[new.shared]
    for size, axes, new_axes in zip(shape, cuts, new_cuts, strict=True):
        start, stop = old.interval(size, axes)
        new_start, new_stop = new.interval(size, new_axes)
        held *= stop - start
        wanted *= new_stop - new_start
        first = np.maximum(old.on_shared(start), new.on_shared(new_start))
        last = np.minimum(old.on_shared(stop), new.on_shared(new_stop))
        kept *= np.maximum(last - first, 0)
    used, new_used = (frozenset(axis for axes in of for axis in axes) for of in (cuts, new_cuts))
    # The new shards cover each element of an old one once for each copy of the array. Who holds the
    # old one takes what it needs of it for nothing.
    asked = old.of_groups(held, used) * new.copies(new_used)
    asked -= old.group_sums(old.of_shared(kept), used)
    kept_of_all = new.of_shared(kept)
    return Moved(
        received=_bytes(wanted - kept_of_all),
        kept=_bytes(kept_of_all),
        sent=old.shares(_bytes(asked) * count, used),
        used=used,
    )


def _bytes(bits: _Ints) -> _Ints:
    return (bits + 7) >> 3  # ten times as fast as a division
