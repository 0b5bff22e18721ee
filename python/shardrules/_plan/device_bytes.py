"""Bytes of arrays on the devices of a mesh, and bytes that move to another sharding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.arguments import MOST
from shardrules._base.specs import Entries, entries_of, entry_axes

if TYPE_CHECKING:
    import numpy.typing as npt
    from jax.sharding import PartitionSpec

    _Ints = npt.NDArray[Any]

# A million classes of a thousand arrays take some ten seconds. Four million Python ints, for counts
# beyond int64, take 200 MB.
_MOST_CLASSES: Final = 2**22
_MOST_WORK: Final = 2**30


class _Cut(NamedTuple):
    """Dimension that its mesh axes do not divide."""

    axes: tuple[str, ...]
    size: int
    part: int
    """Size of a full shard. After the full shards one device has the rest, and others nothing."""


class Held(NamedTuple):
    """Bits of one array on each device."""

    bits: int
    """Bits of an element, times each device's share of the evenly cut dimensions."""
    cuts: tuple[_Cut, ...]
    """The dimensions that are cut unevenly."""

    @property
    def most(self) -> int:
        """Return bytes on the fullest device, which is the first one."""
        return -(-self.bits * prod([cut.part for cut in self.cuts]) // 8)

    @property
    def most_bits(self) -> int:
        """Return bits on the fullest device."""
        return self.bits * prod([cut.part for cut in self.cuts])


def held_of(
    shape: Sequence[int], bits: int, spec: PartitionSpec | Entries, axis_sizes: Mapping[str, int]
) -> Held:
    """Return the bits of an array on each device; arguments as in `device_bytes`."""
    entries = entries_of(spec)
    cuts = []
    for dim, size in enumerate(shape):
        named = entry_axes(entries[dim]) if dim < len(entries) else ()
        axes = tuple([axis for axis in named if axis_sizes.get(axis, 1) > 1])
        parts = prod([axis_sizes[axis] for axis in axes])
        part = -(-size // parts)
        if size % parts == 0:
            bits *= part
        else:
            cuts.append(_Cut(axes, size, part))
    return Held(bits, tuple(cuts) if bits else ())


def device_bytes(
    shape: Sequence[int], bits: int, spec: PartitionSpec | Entries, axis_sizes: Mapping[str, int]
) -> npt.NDArray[Any]:
    """Return bytes of an array on each device of a mesh.

    A dimension that its axes do not divide is cut as in XLA: the shard size is rounded up, and the
    last shards are smaller or empty.

    Args:
        shape: Shape of the whole array.
        bits: Bits of one element, such as 16 for bfloat16. Less than 8 are packed, as in int4.
        spec: At most as long as the shape.
        axis_sizes: Devices along each mesh axis, in the mesh's order.

    Returns:
        A read-only array of bytes with one dimension for each mesh axis. Its dtype is int64, or
        object (Python ints) for an array of 2**60 bytes or more.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> device_bytes((10, 4), 16, P("dp"), {"dp": 4, "tp": 1}).ravel()
        array([24, 24, 24,  8])
    """
    share = held_of(shape, bits, spec, axis_sizes)
    classes = DeviceClasses([share], axis_sizes)
    return classes.each(classes.total([(1, share)]))


class DeviceClasses:
    """Classes of devices: all devices of a class hold the same bytes of each given array.

    Along a mesh axis the bytes change at a few coordinates. The classes are the boxes between these
    coordinates. An array of numbers per class has a dimension for each mesh axis, of size 1 if
    nothing changes along it.

    Args:
        arrays: All arrays that will be counted.
        axis_sizes: Devices along each mesh axis, in the mesh's order.

    Raises:
        ValueError: There are too many classes, or too many ways to cut arrays.
    """

    def __init__(self, arrays: Iterable[Held], axis_sizes: Mapping[str, int]) -> None:
        self._axis_sizes = axis_sizes
        uneven = {array for array in arrays if array.cuts}
        starts = {axis: {0} for axis in axis_sizes}
        for cut in {cut for array in uneven for cut in array.cuts}:
            full = cut.size // cut.part
            # A box for the shard behind the full ones, and one for all after it, along each axis.
            for position in (full, full + 1):
                rest = position
                for axis in reversed(cut.axes):
                    rest, coordinate = divmod(rest, axis_sizes[axis])
                    starts[axis] |= {coordinate, coordinate + 1}
        self._starts = {
            axis: np.array(sorted(start for start in starts[axis] if start < size), np.int64)
            for axis, size in axis_sizes.items()
        }
        classes = prod(map(len, self._starts.values()))
        if classes > _MOST_CLASSES or classes * len(uneven) > _MOST_WORK:
            raise ValueError(
                f"{len(uneven):,} shapes and specs that do not divide give the devices "
                f"{classes:,} different numbers of bytes, too many to count: let the mesh divide "
                "the shapes, or name fewer axes in the specs"
            )

    def total(self, counted: Iterable[tuple[int, Held]]) -> npt.NDArray[Any]:
        """Return bytes per class of all arrays."""
        counts: Counter[Held] = Counter()
        for count, array in counted:
            counts[array] += count
        most = max((array.most_bits for array in counts), default=0)
        most = max(most, sum(count * array.most for array, count in counts.items()))
        exact = np.dtype(np.int64 if most <= MOST else object)
        base = sum(count * array.most for array, count in counts.items() if not array.cuts)
        total: npt.NDArray[Any] = np.full((1,) * len(self._axis_sizes), base, exact)
        for array, count in counts.items():
            if array.cuts:
                total = total + count * self._bytes_of(array, exact)
        return total

    def _bytes_of(self, array: Held, exact: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return the bytes per class of one array that is cut unevenly."""
        bits: npt.NDArray[Any] = np.array(array.bits, exact)
        for cut in array.cuts:
            position = _positions(cut.axes, self._axis_sizes, self._starts).astype(exact)
            bits = bits * np.minimum(np.maximum(cut.size - position * cut.part, 0), cut.part)
        return -(-bits // 8)

    def each(self, of_classes: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return numbers per class as numbers per device, with a dimension for each mesh axis.

        The result is read-only, because equal numbers along an axis are stored once.
        """
        sizes = tuple(self._axis_sizes.values())
        if not of_classes.any():
            return np.broadcast_to(of_classes.dtype.type(0), sizes)
        for dim, (starts, size) in enumerate(zip(self._starts.values(), sizes, strict=True)):
            if of_classes.shape[dim] > 1:
                of_classes = np.repeat(of_classes, np.diff(starts, append=size), axis=dim)
        return np.broadcast_to(of_classes, sizes)


def _positions(
    axes: tuple[str, ...],
    axis_sizes: Mapping[str, int],
    coordinates: Mapping[str, npt.NDArray[np.int64]],
) -> npt.NDArray[np.int64]:
    """Return positions among the shards of some axes, from coordinates along each of them.

    The result has a dimension for each mesh axis, of size 1 for the other axes.
    """
    names = list(axis_sizes)
    position = np.zeros((1,) * len(names), np.int64)
    for axis in axes:
        along = [1] * len(names)
        along[names.index(axis)] = -1
        position = position * axis_sizes[axis] + coordinates[axis].reshape(along)
    return position


class Grid:
    """Devices of a mesh in row-major order, and which of them are in another mesh too.

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
        """Return a new array with this number, or these, for the devices."""
        return np.full(self.devices, value, self._exact)

    def cuts(self, rank: int, spec: PartitionSpec | Entries) -> list[tuple[str, ...]]:
        """Return for each of so many dimensions, the axes of more than one device that cut it."""
        named = [*map(entry_axes, entries_of(spec)), *[()] * (rank - len(spec))]
        return [tuple(a for a in axes if self._axis_sizes[a] > 1) for axes in named[:rank]]

    def interval(self, size: int, axes: tuple[str, ...]) -> tuple[Any, Any]:
        """Return by device the (start, stop) of its shard of a dimension, as in XLA.

        Parts are rounded up; the last ones are smaller, or empty.
        """
        if not axes:
            return 0, size
        part = -(-size // prod(self._axis_sizes[axis] for axis in axes))
        start = np.minimum(self._position(axes) * part, size)
        return start, np.minimum(start + part, size)

    def _position(self, axes: tuple[str, ...]) -> _Ints:
        """Return per device its position among the parts that these axes make."""
        if axes not in self._positions:
            coordinates = {axis: np.arange(self._axis_sizes[axis]) for axis in axes}
            position = _positions(axes, self._axis_sizes, coordinates)
            self._positions[axes] = self.full(np.broadcast_to(position, self.sizes).ravel())
        return self._positions[axes]

    def on_shared(self, value: Any) -> Any:
        """Return a number for each device, or one for all, for the shared devices alone."""
        return value[self.shared] if isinstance(value, np.ndarray) else value

    def of_shared(self, value: _Ints) -> _Ints:
        """Return numbers of the shared devices as numbers of all devices, 0 for the others."""
        each = self.full(0)
        each[self.shared] = value
        return each

    def copies(self, used: frozenset[str]) -> int:
        """Return how many devices hold the same part of an array that these axes cut."""
        return prod(size for axis, size in self._axis_sizes.items() if axis not in used)

    def of_groups(self, value: _Ints, used: frozenset[str]) -> _Ints:
        """Return by group a number that is equal on all devices of the group.

        A group is the devices that hold the same part. The result has a dimension for each axis, of
        size 1 for those that tell no groups apart.
        """
        first = tuple(slice(None if axis in used else 1) for axis in self._axis_sizes)
        return value.reshape(self.sizes)[first]

    def group_sums(self, value: _Ints, used: frozenset[str]) -> _Ints:
        """Return the sums over the devices of each group, with the dimensions of `of_groups`."""
        dims = tuple(dim for dim, axis in enumerate(self._axis_sizes) if axis not in used)
        sums: _Ints = value.reshape(self.sizes).sum(axis=dims, keepdims=True)
        return sums

    def shares(self, of_group: _Ints, used: frozenset[str]) -> _Ints:
        """Return numbers of groups, shared equally among their devices; the first get the rest."""
        copies = [size if axis not in used else 1 for axis, size in self._axis_sizes.items()]
        each = of_group // prod(copies)
        rank = np.arange(prod(copies)).reshape(copies)
        extra = rank < of_group - each * prod(copies)
        return np.broadcast_to(each + extra, self.sizes).ravel()


class Moved(NamedTuple):
    """Bytes that move of equal arrays. Bytes of a device are rounded up for each array."""

    received: _Ints
    """Per device of the new mesh, bytes of one array."""
    kept: _Ints
    """Per device of the new mesh, bytes of its part of one array that it holds already."""
    sent: _Ints
    """Per device of the old mesh, bytes of all arrays, if all that hold a part send equally much of
    it."""


def moved_bytes(
    shape: Sequence[int],
    bits: int,
    specs: tuple[PartitionSpec | Entries, PartitionSpec | Entries],
    grids: tuple[Grid, Grid],
    count: int,
) -> Moved:
    """Return what moves of so many arrays, from the first of the specs and grids to the second."""
    old, new = grids
    cuts, new_cuts = (grid.cuts(len(shape), spec) for grid, spec in zip(grids, specs, strict=True))
    before, after, kept = old.full(bits), new.full(bits), new.full(bits)[new.shared]
    for size, axes, new_axes in zip(shape, cuts, new_cuts, strict=True):
        start, stop = old.interval(size, axes)
        new_start, new_stop = new.interval(size, new_axes)
        before *= stop - start
        after *= new_stop - new_start
        first = np.maximum(old.on_shared(start), new.on_shared(new_start))
        last = np.minimum(old.on_shared(stop), new.on_shared(new_stop))
        kept *= np.maximum(last - first, 0)
    used, new_used = (
        frozenset(axis for axes in dims for axis in axes) for dims in (cuts, new_cuts)
    )
    # The new shards cover each element of an old one once for each copy of the array. Who holds the
    # old one takes what it needs of it for nothing.
    asked = old.of_groups(before, used) * new.copies(new_used)
    asked -= old.group_sums(old.of_shared(kept), used)
    kept_of_all = new.of_shared(kept)
    return Moved(
        received=_whole_bytes(after - kept_of_all),
        kept=_whole_bytes(kept_of_all),
        sent=old.shares(_whole_bytes(asked) * count, used),
    )


def _whole_bytes(bits: _Ints) -> _Ints:
    return (bits + 7) >> 3  # ten times as fast as a division
