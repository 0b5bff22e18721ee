"""Arrays from files: neighbours of a file are read into one buffer, whose views go onto devices."""

from __future__ import annotations

import io
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Final, NamedTuple, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, SingleDeviceSharding

from shardrules import _core
from shardrules._base.dtypes import bits_of
from shardrules._base.io import FileError, opened
from shardrules._base.text import bytes_shown
from shardrules._checkpoint.conversion import cast, check_kept, numpy_dtype
from shardrules._checkpoint.layouts import (
    Block,
    Box,
    Shape,
    block_of,
    box_of,
    box_shape,
    hull_of,
    joined,
    row_major,
    slices_in,
    whole_box,
)
from shardrules._checkpoint.targets import Part, Target
from shardrules._plan.files.leaves import ArraySpec, StoredFile, state_of
from shardrules._plan.files.remote import RemoteFile

DEFAULT_IN_FLIGHT: Final = 2 << 30
"""Bytes that are on their way at once, unless more or less is asked for."""
# Reads at once: a store on a network takes milliseconds to answer each.
_THREADS: Final = 16
_UNITS: Final = 4 * _THREADS
# Bytes of an array by which processes see that they have the same files.
_SAMPLE: Final = 64
_AT_ONCE: Final = np.zeros(1, np.int64)
# What lets the CPU backend use a buffer as it is.
_ALIGNED: Final = 64
# JAX cuts smaller arrays, which is faster than to do it here.
_SMALL: Final = 2 << 20
_UNIT_BYTES: Final = 32 << 20
_UNIT_ARRAYS: Final = 1024
# Units of at most this part of what is in flight keep all threads busy.
_SHARE: Final = 4
# Bytes of shorter runs, which the boxes of all devices are read with, if JAX can cut these.
_SHORT: Final = 512

# Bytes between two ranges that are read along: less than what a call of the system takes.
GAP: Final = 4 << 10
# The gap of files of other machines, where a request takes milliseconds.
_REMOTE_GAP: Final = 256 << 10
# Bytes that are read at once.
_READ: Final = 16 << 20

_T = TypeVar("_T")


class Ranges(NamedTuple):
    """Ranges of bytes in a file, and where in memory they go."""

    begins: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    def part(self, index: Any) -> Ranges:
        """Return some of them."""
        return Ranges(*(column[index] for column in self))

    def shares(self) -> Iterator[Ranges]:
        """Yield them in the order of the file, in parts of about `_READ` bytes; long ones cut."""
        ranges = self.part(np.argsort(self.begins, kind="stable"))
        cuts = -(-ranges.sizes // _READ)
        ranges = ranges.part(np.repeat(np.arange(len(cuts)), cuts))
        at = (np.arange(len(ranges.begins)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * _READ
        sizes = np.minimum(ranges.sizes - at, _READ)
        ranges = Ranges(ranges.begins + at, sizes, ranges.places + at)
        share = (np.cumsum(ranges.sizes) - 1) // _READ
        ends = np.flatnonzero(np.diff(share)) + 1
        for begin, end in pairwise([0, *ends.tolist(), len(share)]):
            yield ranges.part(slice(begin, end))


class Reader:
    """Files of arrays, opened as they are needed; for several threads.

    Attributes:
        arrays: The arrays of the files.
        bytes_read: How many bytes have been read so far.
    """

    def __init__(self, arrays: Mapping[str, ArraySpec]) -> None:
        self.arrays = arrays
        self.bytes_read = 0
        self._files: dict[StoredFile, io.BufferedReader] = {}
        self._closing = ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._closing:
            for stored, file in self._files.items() if kind is None else ():
                _check_unchanged(stored, file)

    def sample(self, name: str) -> bytes:
        """Read some bytes in the middle of an array."""
        array = self.arrays[name]
        size = numpy_dtype(array.dtype).itemsize * prod(array.shape)
        data = np.empty(min(size, _SAMPLE), np.uint8)
        begin = array.begin + (size - len(data)) // 2
        if len(data) and array.file is not None:
            self.read(array.file, Ranges(*np.array([[begin], [len(data)], [0]])), data)
        return data.tobytes()

    def read(self, stored: StoredFile, ranges: Ranges, memory: npt.NDArray[np.uint8]) -> None:
        """Read ranges, which are in the order of the file."""
        at = int(ranges.begins[0])
        try:
            at, code = _read_ranges(self._opened(stored), ranges, memory)
        except OSError as error:
            code = error.errno or -1
        if code < 0:
            raise _changed(stored)
        if code:
            raise FileError(
                f"{stored.path}: byte {at:,}: {os.strerror(code)}; "
                "check the disk, and copy or download the file again"
            )
        with self._lock:
            self.bytes_read += int(ranges.sizes.sum())

    def _opened(self, stored: StoredFile) -> io.BufferedReader:
        with self._lock:
            if stored not in self._files:
                file = self._closing.enter_context(opened(stored.path))
                _check_unchanged(stored, file)
                self._files[stored] = file
            return self._files[stored]


def _check_unchanged(stored: StoredFile, file: io.BufferedReader) -> None:
    if state_of(file) != stored.state:
        raise _changed(stored)


def _changed(stored: StoredFile) -> FileError:
    return FileError(
        f"{stored.path}: the file has changed since its header was read; wait until it is written, "
        "and load again"
    )


# Not on Windows.
_native: Callable[..., tuple[int, int]] | None = getattr(_core, "read_ranges", None)
_seeking: Final = threading.Lock()


def _read_ranges(
    file: io.BufferedReader, ranges: Ranges, memory: npt.NDArray[np.uint8]
) -> tuple[int, int]:
    """Read ranges; returns (where it stopped, 0, or the system's error there, or -1 at the end)."""
    if isinstance(file.raw, RemoteFile):
        _read_remote(file.raw, ranges, memory)
        return 0, 0
    if _native is not None:
        return _native(file.fileno(), *ranges, memory, GAP)
    view, at = memoryview(memory.data), 0
    for begin, size, place in zip(*(column.tolist() for column in ranges), strict=True):
        at, end = begin, begin + size
        while at < end:
            count = _read_at(file, at, view[place + at - begin : place + size])
            if not count:
                return at, -1
            at += count
    return at, 0


def _read_at(file: io.BufferedReader, begin: int, into: memoryview) -> int:
    """Read some bytes, where the core does not: on Windows."""
    with _seeking:
        file.raw.seek(begin, 0)
        return file.raw.readinto(into) or 0


def _read_remote(file: RemoteFile, ranges: Ranges, memory: npt.NDArray[np.uint8]) -> None:
    """Read ranges of another machine at once, those that are near one another as one."""
    begins, ends = ranges.begins, ranges.begins + ranges.sizes
    is_far = (begins[1:] - ends[:-1] > _REMOTE_GAP) | (np.diff(begins // _READ) > 0)
    first = np.flatnonzero(np.concatenate([[True], is_far]))
    starts = begins[first]
    parts = file.ranges(starts.tolist(), np.maximum.reduceat(ends, first).tolist())
    data = [np.frombuffer(part, np.uint8) for part in parts]
    number = np.concatenate([[0], np.cumsum(is_far)])
    columns = (number, begins - starts[number], ranges.sizes, ranges.places)
    for i, at, size, place in zip(*(column.tolist() for column in columns), strict=True):
        memory[place : place + size] = data[i][at : at + size]


class Job(NamedTuple):
    """Array to make."""

    path: str
    target: Target
    dtype: np.dtype[Any]
    """The dtype on the devices."""
    sharding: NamedSharding

    @property
    def local_boxes(self) -> Mapping[Box, Sequence[Any]]:
        """Return the distinct boxes of this process's devices, each with its devices."""
        return _local_boxes(self.sharding, self.target.shape)

    def place(self, arrays: Mapping[str, ArraySpec]) -> tuple[str, int]:
        """Return where its first bytes stand: the file, and the offset there."""
        first = arrays[self.target.parts[0].source]
        return "" if first.file is None else str(first.file.path), first.begin

    def boxes(self, arrays: Mapping[str, ArraySpec], most: int) -> Sequence[Box]:
        """Return the boxes to read: those of devices, or one for all that JAX cuts.

        It copies what is turned in any case; and of short rows, calls for each would take longer.
        """
        size = prod(self.target.shape) * self.dtype.itemsize
        if size <= min(_SMALL, most) and self.sharding.is_fully_addressable:
            return [whole_box(self.target.shape)]
        boxes = list(self.local_boxes)
        if len(boxes) > 1 and not _is_read_in_place(self, boxes[0], arrays):
            hull = hull_of(boxes)
            is_tiled = prod(box_shape(hull)) == sum(prod(box_shape(box)) for box in boxes)
            if is_tiled and prod(box_shape(hull)) * self.dtype.itemsize <= most:
                return [hull]
        return boxes


@lru_cache(maxsize=4096)
def _local_boxes(sharding: NamedSharding, shape: Shape) -> dict[Box, list[Any]]:
    devices_of: dict[Box, list[Any]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices_of[box_of(index or (), shape)].append(device)
    return dict(sorted(devices_of.items()))


def _is_read_in_place(job: Job, box: Box, arrays: Mapping[str, ArraySpec]) -> bool:
    """Return whether runs of a box that are not short lie in the file as in memory."""
    return all(
        part.form.keeps_order and block.size >= _SHORT
        for part, block, _ in _blocks(job.target, box, arrays)
    )


def _blocks(
    target: Target, box: Box, arrays: Mapping[str, ArraySpec]
) -> Iterator[tuple[Part, Block, Box]]:
    """Yield (part, what is read of it, the box of the target that it fills) for a box."""
    for part in target.parts:
        inside = tuple(
            (max(begin - at, 0), min(end - at, size))
            for (begin, end), at, size in zip(box, part.at, part.form.target, strict=True)
        )
        if all(begin < end for begin, end in inside):
            filled = tuple(
                (begin + at, end + at) for (begin, end), at in zip(inside, part.at, strict=True)
            )
            item = numpy_dtype(arrays[part.source].dtype).itemsize
            yield part, block_of(part.form, inside, item), filled


class _View(NamedTuple):
    """Values in memory, and what of them fills which box."""

    place: slice
    dtype: np.dtype[Any]
    block: Block
    filled: Box

    def of(self, memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Return those that fill the box."""
        values = self.block.form.arranged(np, _typed(memory, self.place, self.dtype))
        return values[self.block.inside]  # type: ignore[no-any-return]


def _typed(memory: npt.NDArray[np.uint8], place: slice, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    values = memory[place]
    # A file may have any bytes for flags.
    return np.not_equal(values, 0) if dtype == np.bool_ else values.view(dtype)


class _Unit:
    """Boxes that are read together: the memory, the ranges that fill it, and what is made of it."""

    def __init__(self, jobs: Sequence[Job], arrays: Mapping[str, ArraySpec]) -> None:
        # The job and the box of each value, and the function that makes it of the memory.
        self.rows: list[tuple[int, Box, Callable[[npt.NDArray[np.uint8]], npt.NDArray[Any]]]] = []
        self.bytes = 0
        self._jobs, self._arrays = jobs, arrays
        # By file: (a place in it, where ranges begin from there, the bytes of each, where they go).
        self._reads: dict[StoredFile, list[tuple[int, Any, int, int]]] = defaultdict(list)
        self._beside = 0

    @property
    def needs(self) -> int:
        """Return the bytes in flight: the memory, and values that are made of it."""
        return self.bytes + self._beside

    def add(self, index: int, box: Box) -> None:
        """Add a box of an array."""
        job = self._jobs[index]
        shape, of_file = box_shape(box), self._arrays[job.target.parts[0].source]
        is_as_it_is = numpy_dtype(of_file.dtype) == job.dtype
        if is_as_it_is and job.target.is_plain and shape == job.target.shape:
            place = self._read(of_file, 0, _AT_ONCE, prod(shape) * job.dtype.itemsize)
            self.rows.append((index, box, partial(_whole, place, job.dtype, shape)))
            return
        views = [self._view(*block) for block in _blocks(job.target, box, self._arrays)]
        if len(views) > 1 or not is_as_it_is:
            self._beside += prod(shape) * job.dtype.itemsize
        self.rows.append((index, box, partial(_assembled, job, box, views)))

    def _view(self, part: Part, block: Block, filled: Box) -> _View:
        """Read a block into memory of its own."""
        array = self._arrays[part.source]
        dtype = numpy_dtype(array.dtype)
        offset = sum(s * by for s, by in zip(part.starts, row_major(part.form.shape), strict=True))
        place = self._read(array, offset * dtype.itemsize, block.begins, block.size)
        return _View(place, dtype, block, filled)

    def _read(self, array: ArraySpec, offset: int, begins: Any, size: int) -> slice:
        """Read ranges of an array; returns their place in memory."""
        place = -(-self.bytes // _ALIGNED) * _ALIGNED
        self.bytes = place + len(begins) * size
        assert array.file is not None
        if size:
            self._reads[array.file].append((array.begin + offset, begins, size, place))
        return slice(place, self.bytes)

    def ranges(self) -> Iterator[tuple[StoredFile, Ranges]]:
        """Yield, in parts, what is read of each file."""
        for file, rows in self._reads.items():
            firsts, begins, sizes, places = zip(*rows, strict=True)
            counts = [len(each) for each in begins]
            first, size, place, start = (
                np.repeat(np.array(column, np.int64), counts)
                for column in (firsts, sizes, places, [0, *accumulate(counts[:-1])])
            )
            within = (np.arange(len(size)) - start) * size
            all_of_file = Ranges(np.concatenate(begins) + first, size, place + within)
            for share in all_of_file.shares():
                yield file, share

    def memory(self) -> npt.NDArray[np.uint8]:
        """Return the memory: the system gives one large piece faster than many."""
        memory = np.empty(self.bytes + _ALIGNED, np.uint8)
        first = -memory.ctypes.data % _ALIGNED
        return memory[first : first + self.bytes]


def _whole(
    place: slice, dtype: np.dtype[Any], shape: Shape, memory: npt.NDArray[np.uint8]
) -> npt.NDArray[Any]:
    """Return an array as it stands in its file."""
    return _typed(memory, place, dtype).reshape(shape)


def _assembled(
    job: Job, box: Box, views: Sequence[_View], memory: npt.NDArray[np.uint8]
) -> npt.NDArray[Any]:
    """Return a box: one view, or several parts, or zeros beside."""
    parts = [_as_job_dtype(job, view.of(memory)) for view in views]
    if len(views) == 1 and views[0].filled == box:
        return parts[0]
    filled = [view.filled for view in views]
    return joined(box, job.dtype, zip(filled, parts, strict=True))  # type: ignore[no-any-return]


def _as_job_dtype(job: Job, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    result, loss = cast(values, job.dtype)
    check_kept(job.path, loss)
    return result  # type: ignore[no-any-return]


def _units(
    jobs: Sequence[Job], arrays: Mapping[str, ArraySpec], most_bytes: int
) -> Iterator[_Unit]:
    """Yield units of neighbours of a file."""
    most = max(1, most_bytes // _SHARE)
    unit = _Unit(jobs, arrays)
    for index in sorted(range(len(jobs)), key=[job.place(arrays) for job in jobs].__getitem__):
        job = jobs[index]
        for box in job.boxes(arrays, most):
            size = prod(box_shape(box)) * job.dtype.itemsize
            is_full = unit.needs + size > min(most, _UNIT_BYTES) or len(unit.rows) == _UNIT_ARRAYS
            if unit.rows and is_full:
                yield unit
                unit = _Unit(jobs, arrays)
            unit.add(index, box)
    if unit.rows:
        yield unit


def bytes_to_read(job: Job, arrays: Mapping[str, ArraySpec]) -> int:
    """Count the bytes in files that this process needs of the array's parts."""
    elements = sum(prod(box_shape(box)) for box in job.local_boxes)
    return elements * bits_of(arrays[job.target.parts[0].source].dtype) // 8


def fill(
    jobs: Sequence[Job], reader: Reader, most_bytes: int, done: Callable[[], None]
) -> list[Any]:
    """Make the arrays of the jobs; `done` is called in this thread after each unit."""
    filling = _Filling(jobs, reader, done)
    try:
        for unit in _units(jobs, reader.arrays, most_bytes):
            filling.read(unit, most_bytes)
        filling.make_room(0)
    except MemoryError as error:
        raise MemoryError(
            f"{error}: the host's memory is full, with up to {bytes_shown(most_bytes)} that are "
            "read and not on devices yet; give a smaller max_bytes_in_flight"
        ) from error
    finally:
        filling.pool.shutdown(cancel_futures=True)
    return list(filling.assembled())


_Reading = tuple[_Unit, npt.NDArray[np.uint8], list[Future[None]]]


class _Filling:
    """Units that threads read, and that this thread puts onto devices."""

    def __init__(self, jobs: Sequence[Job], reader: Reader, done: Callable[[], None]) -> None:
        self.pool = ThreadPoolExecutor(_THREADS, "shardrules-load")
        self._jobs, self._reader, self._done = jobs, reader, done
        # By device; of None the whole array.
        self._parts: list[dict[Any, Any]] = [{} for _ in jobs]
        self._reading: deque[_Reading] = deque()
        self._sent: deque[tuple[int, Any]] = deque()
        self._in_flight = 0

    def read(self, unit: _Unit, most_bytes: int) -> None:
        """Begin to read a unit, as soon as there is room."""
        self.make_room(most_bytes - unit.needs, _UNITS)
        self._in_flight += unit.needs
        memory = unit.memory()
        reads = [
            self.pool.submit(self._reader.read, file, ranges, memory)
            for file, ranges in unit.ranges()
        ]
        self._reading.append((unit, memory, reads))

    def make_room(self, at_most: int, units: int = 0) -> None:
        """Wait until so many bytes and units are in flight."""
        while True:
            is_over = self._in_flight > at_most
            if is_over and self._sent:
                self._arrive()
            elif self._reading and (
                is_over
                or len(self._reading) > units
                or all(read.done() for read in self._reading[0][2])
            ):
                self._put(*self._reading.popleft())
            else:
                return

    def _arrive(self) -> None:
        size, arrays = self._sent.popleft()
        jax.block_until_ready(arrays)
        self._in_flight -= size
        self._done()

    def _put(
        self, unit: _Unit, memory: npt.NDArray[np.uint8], reads: Sequence[Future[None]]
    ) -> None:
        """Put what was read onto devices."""
        for read in reads:
            read.result()
        boxes: dict[int, list[tuple[Box, npt.NDArray[Any]]]] = defaultdict(list)
        for index, box, make in unit.rows:
            boxes[index].append((box, make(memory)))
        rows: list[tuple[int, Any, Any, Any]] = []
        arrays = []
        for index, filled in boxes.items():
            job, (outer, values) = self._jobs[index], filled[0]
            if job.sharding.is_fully_addressable and box_shape(outer) == job.target.shape:
                rows.append((index, None, job.sharding, values))
                continue
            parts = dict(_parts_in(job, filled))
            if len(parts) == len(job.local_boxes):
                arrays.append(_made_at_once(job, parts))
                self._parts[index] = {None: arrays[-1]}
                continue
            kind = job.sharding.memory_kind
            for box, values in parts.items():
                for device in job.local_boxes[box]:
                    place = SingleDeviceSharding(device, memory_kind=kind)
                    rows.append((index, device, place, values))
        put = jax.device_put([row[3] for row in rows], [row[2] for row in rows])
        for (index, device, *_), array in zip(rows, put, strict=True):
            self._parts[index][device] = array
        self._sent.append((unit.needs, [*arrays, *put]))

    def assembled(self) -> Iterator[Any]:
        """Yield the arrays; of some no device is here."""
        for job, parts in zip(self._jobs, self._parts, strict=True):
            if None in parts:
                yield parts[None]
                continue
            order = job.sharding.addressable_devices_indices_map(job.target.shape)
            yield jax.make_array_from_single_device_arrays(
                job.target.shape, job.sharding, [parts[device] for device in order], dtype=job.dtype
            )


def _parts_in(
    job: Job, filled: Iterable[tuple[Box, npt.NDArray[Any]]]
) -> Iterator[tuple[Box, npt.NDArray[Any]]]:
    """Yield (box, values) of each box of devices that lies in one of these."""
    for outer, values in filled:
        for box in job.local_boxes:
            if all(a <= low and high <= b for (low, high), (a, b) in zip(box, outer, strict=True)):
                yield box, values[slices_in(box, outer)]


def _made_at_once(job: Job, parts: Mapping[Box, npt.NDArray[Any]]) -> Any:
    """Make an array whose parts are all there: in half the time of one of arrays on devices."""
    shape = job.target.shape
    return jax.make_array_from_callback(
        shape, job.sharding, lambda index: parts[box_of(index or (), shape)]
    )


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
