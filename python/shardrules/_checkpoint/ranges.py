"""Bytes of boxes of stored arrays: ranges of a file, and the places in memory to which they go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from shardrules._checkpoint.boxes import Box, box_shape
from shardrules._plan.files.leaves import ArraySpec, StoredFile

if TYPE_CHECKING:
    import numpy.typing as npt

_T = TypeVar("_T")

# Bytes between two ranges that are read along: less than what a call of the system takes.
GAP: Final = 4 << 10
# Bytes that one thread reads, if there are more of them.
_LEAST_SHARE: Final = 1 << 20
MOST_SHARE: Final = 16 << 20
# Bytes of a range: shorter ones are copied from rows.
_LEAST_RANGE: Final = 64


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of this name in numpy or ml_dtypes."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


class Ranges(NamedTuple):
    """Ranges of bytes in a file, and where in memory they go."""

    begins: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    def part(self, index: Any) -> Ranges:
        """Return some of them."""
        return Ranges(*(column[index] for column in self))


class Copy(NamedTuple):
    """Ranges of equal size in a file, which go to other places in memory."""

    begins: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    size: int

    def at(self, begin: int, place: int) -> Copy:
        """Move it to this offset in the file, and in memory."""
        return Copy(self.begins + begin, self.places + place, self.size)


class Tiles(NamedTuple):
    """Items of an array that do not lie in memory as in the file.

    Attributes:
        begin: Where the first stands in the array.
        place: Where it goes in memory.
        dims: (size, bytes between neighbours in the file, in memory), in the order of the file; the
            first numbers the rows.
        item: The bytes of an item.
    """

    begin: int
    place: int
    dims: tuple[tuple[int, int, int], ...]
    item: int

    def at(self, place: int) -> Tiles:
        """Move it to this place in memory."""
        return self._replace(place=self.place + place)

    def rows(self, first: int, last: int) -> Tiles:
        """Return some of its rows, without moving its begin."""
        (_, by, to), *inner = self.dims
        return self._replace(place=self.place + first * to, dims=((last - first, by, to), *inner))

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row in the file, and of what stands between them."""
        return sum((size - 1) * by for size, by, _ in self.dims[1:]) + self.item


class Band(NamedTuple):
    """Rows of a file, at equal distances, and what goes to memory of each."""

    begin: int
    """Where the bytes of the first row begin in the file."""
    rows: int
    stride: int
    size: int
    """Bytes of a row."""
    tiles: tuple[Tiles, ...]
    """The items, which begin at their offset in a row."""

    @property
    def bytes(self) -> int:
        """Return the bytes that are needed of all rows."""
        return self.rows * self.size

    def shares(self, most: int) -> Iterator[Band]:
        """Yield the band in parts of at most so many bytes, if rows are not longer."""
        step = max(1, most // self.size)
        for first in range(0, self.rows, step):
            last = min(first + step, self.rows)
            begin, tiles = self.begin + first * self.stride, self.tiles
            yield Band(begin, last - first, self.stride, self.size,
                       tuple(each.rows(first, last) for each in tiles))  # fmt: skip


def bands_of(begin: int, tiles: Sequence[Tiles]) -> Iterator[Band]:
    """Yield the rows by which tiles of an array that begins here in a file are read.

    Tiles of the same rows are read together, if what is between them is short.
    """
    of_rows: dict[tuple[int, ...], list[Tiles]] = defaultdict(list)
    for each in tiles:
        rows, stride, _ = each.dims[0]
        of_rows[rows, stride, each.begin // stride].append(each)
    for (rows, stride, row), together in of_rows.items():
        band: list[Tiles] = []
        start = end = 0
        for each in sorted(together, key=lambda each: each.begin):
            offset = each.begin % stride
            if band and offset - end > GAP:
                yield Band(begin + row * stride + start, rows, stride, end - start, tuple(band))
                band = []
            start = start if band else offset
            end = max(end, offset + each.row_bytes)
            band.append(each._replace(begin=offset - start))
        yield Band(begin + row * stride + start, rows, stride, end - start, tuple(band))


def band_tables(bands: Sequence[Band]) -> tuple[npt.NDArray[np.int64], ...]:
    """Return bands, their tiles, and the dims of these, as `_core.read_bands` takes them."""
    tiles = [each for band in bands for each in band.tiles]
    rows = (
        [(*band[:4], len(band.tiles)) for band in bands],
        [(each.begin, each.place, len(each.dims)) for each in tiles],
        [dim for each in tiles for dim in each.dims],
    )
    return tuple(np.array(table, np.int64).reshape(-1) for table in rows)


class StoredLayout:
    """Places of the elements of a stored array, in row-major order."""

    def __init__(self, array: ArraySpec) -> None:
        self._file = array.file
        self.dtype = numpy_dtype(array.dtype)
        self._array = array

    @property
    def file(self) -> StoredFile:
        """Return the file that has the array."""
        assert self._file is not None
        return self._file

    @property
    def strides(self) -> list[int]:
        """Return the bytes between neighbours along each dimension."""
        return [self._stride(dim) for dim in range(len(self._array.shape))]

    def range_bytes(self, box: Box) -> int:
        """Return the bytes of each contiguous range of the box."""
        last = self._last_cut(box)
        return prod(box_shape(box[last : last + 1])) * self._stride(last)

    def ranges(self, box: Box) -> npt.NDArray[np.int64]:
        """Return the offset in the file of each contiguous range of the box, in order."""
        if not prod(box_shape(box)):
            return np.empty(0, np.int64)
        last = self._last_cut(box)
        offsets = np.array([self._array.begin], np.int64)
        for dim, (begin, end) in enumerate(box[:last]):
            offsets = (offsets[:, None] + np.arange(begin, end) * self._stride(dim)).reshape(-1)
        return offsets + box[last][0] * self._stride(last) if box else offsets

    def _last_cut(self, box: Box) -> int:
        """Return the last dimension of which the box has a part only."""
        shape = self._array.shape
        return max((dim for dim, size in enumerate(shape) if box[dim] != (0, size)), default=0)

    def _stride(self, dim: int) -> int:
        return prod(self._array.shape[dim + 1 :]) * self.dtype.itemsize


def copy_of(
    layout: StoredLayout, source: Box, lengths: Sequence[int], strides: Sequence[int]
) -> Copy | list[Tiles]:
    """Work out the ranges of a box in the file, and their places in memory; tiles of short ones.

    Args:
        layout: The array's.
        source: The box.
        lengths: The lengths of the axes of which its dimensions consist.
        strides: The bytes between neighbours along each axis in memory.
    """
    item_bytes = layout.dtype.itemsize
    in_file = axis_strides(box_shape(source), layout.strides, lengths)
    axes = [axis for axis in zip(lengths, in_file, strides, strict=True) if axis[0] != 1]
    size = item_bytes
    while axes and axes[-1][1] == axes[-1][2] == size:
        size *= axes.pop()[0]
    begin = sum(at * by for (at, _), by in zip(source, layout.strides, strict=True))
    if axes and size < _LEAST_RANGE:
        axes += [(size // item_bytes, item_bytes, item_bytes)] if size > item_bytes else []
        return list(_tiles(Tiles(begin, 0, tuple(_merged_axes(axes)), item_bytes)))
    begins = places = np.zeros(1, np.int64)
    for length, by, to in axes:
        steps = np.arange(length)
        begins = (begins[:, None] + steps * by).reshape(-1)
        places = (places[:, None] + steps * to).reshape(-1)
    return Copy(begins + begin, places, size)


def _merged_axes(axes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join axes that go on in each other, in the file and in memory."""
    merged: list[tuple[int, int, int]] = []
    for size, by, to in axes:
        goes_on = bool(merged) and merged[-1][1:] == (size * by, size * to)
        merged.append((size * merged.pop()[0] if goes_on else size, by, to))
    return merged


def _tiles(tiles: Tiles) -> Iterator[Tiles]:
    """Yield tiles whose rows are short, and have no long gaps in them."""
    (count, by, to), *inner = tiles.dims
    size = tiles.row_bytes
    if len(inner) > 1 and (
        size > _LEAST_SHARE or size - tiles.item * prod(dim[0] for dim in inner) > GAP
    ):
        for i in range(count):
            yield from _tiles(
                Tiles(tiles.begin + i * by, tiles.place + i * to, tuple(inner), tiles.item)
            )
    else:
        yield tiles


def axis_strides(shape: Sequence[int], strides: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return the stride of each axis of a box whose dimensions consist of axes."""
    result = [0] * len(lengths)
    axis = 0
    for size, stride in zip(shape, strides, strict=True):
        inner = size
        while inner > 1:
            if lengths[axis] > 1:
                inner //= lengths[axis]
                result[axis] = inner * stride
            axis += 1
    return result


def in_file_order(copies: Sequence[Copy]) -> tuple[Ranges, tuple[Any, Any, Any]]:
    """Return (the ranges, those there twice as columns: place, size, other place)."""
    counts = [len(copy.begins) for copy in copies]
    ranges = Ranges(
        np.concatenate([copy.begins for copy in copies]),
        np.repeat([copy.size for copy in copies], counts),
        np.concatenate([copy.places for copy in copies]),
    )
    if (np.diff(ranges.begins) < 0).any():
        ranges = ranges.part(np.argsort(ranges.begins, kind="stable"))
    is_again = np.zeros(len(ranges.begins), np.bool_)
    is_again[1:] = (np.diff(ranges.begins) == 0) & (np.diff(ranges.sizes) == 0)
    if not is_again.any():
        empty = is_again[:0]
        return ranges, (empty, empty, empty)
    first = np.maximum.accumulate(np.where(is_again, 0, np.arange(len(is_again))))
    again = ranges.part(is_again)
    return ranges.part(~is_again), (ranges.places[first[is_again]], again.sizes, again.places)


def share_bytes(total: int, threads: int) -> int:
    """Return the bytes that one of so many threads reads at once."""
    return min(max(total // threads, _LEAST_SHARE), MOST_SHARE)


def shares_of(ranges: Ranges, most: int) -> Iterator[Ranges]:
    """Yield the ranges in parts of about so many bytes; long ones are cut."""
    if not ranges.sizes.any():
        return
    if int(ranges.sizes.max()) > most:
        cuts = -(-ranges.sizes // most)
        ranges = ranges.part(np.repeat(np.arange(len(cuts)), cuts))
        at = (np.arange(len(ranges.begins)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * most
        sizes = np.minimum(ranges.sizes - at, most)
        ranges = Ranges(ranges.begins + at, sizes, ranges.places + at)
    share = (np.cumsum(ranges.sizes) - 1) // most
    ends = np.flatnonzero(np.diff(share)) + 1
    for begin, end in pairwise([0, *ends.tolist(), len(share)]):
        yield ranges.part(slice(begin, end))


def band_shares(bands: Iterable[Band], most: int) -> Iterator[list[Band]]:
    """Yield bands, or parts of them, that together have about so many bytes."""
    parts = (part for band in bands for part in band.shares(most))
    return in_batches(parts, most, lambda part: part.bytes)


def in_batches(items: Iterable[_T], most: int, bytes_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield neighbours that together have so many bytes at most, or one that alone has more."""
    batch: list[_T] = []
    size = 0
    for item in items:
        of_item = bytes_of(item)
        if batch and size + of_item > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += of_item
    if batch:
        yield batch
