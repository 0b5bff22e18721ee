"""`fill`: arrays from files: neighbours are read into one buffer, whose views go onto devices."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache
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
from shardrules._checkpoint.conversion import cast, check_kept, numpy_dtype
from shardrules._checkpoint.layouts import (
    Block,
    Box,
    Shape,
    block_of,
    box_of,
    box_shape,
    join,
    row_major,
    slices_in,
    tiled_hull,
)
from shardrules._checkpoint.targets import Part, Target
from shardrules._plan.files.leaves import ArraySpec, StoredFile, state_of
from shardrules._plan.files.remote import RemoteFile

DEFAULT_IN_FLIGHT: Final = 2 << 30
"""Bytes that are on their way at once, unless more or less is asked for."""
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

# Reads at once: a store on a network takes milliseconds to answer each.
_THREADS: Final = 16
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
# Bytes of an array, and arrays, by which processes see that they have the same files.
_SAMPLE: Final = 64
_MOST_SAMPLES: Final = 512

_T = TypeVar("_T")


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

    def bytes_of(self, box: Box) -> int:
        """Return the bytes of a box on a device."""
        return prod(box_shape(box)) * self.dtype.itemsize

    def place(self, arrays: Mapping[str, ArraySpec]) -> tuple[str, int]:
        """Return where its first bytes stand: the file, and the offset there."""
        first = arrays[self.target.parts[0].source]
        return "" if first.file is None else str(first.file.path), first.begin

    def bytes_in_files(self, arrays: Mapping[str, ArraySpec]) -> int:
        """Count the bytes in files that this process needs of the array's parts."""
        elements = sum(prod(box_shape(box)) for box in self.local_boxes)
        return elements * bits_of(arrays[self.target.parts[0].source].dtype) // 8


@lru_cache(maxsize=4096)
def _local_boxes(sharding: NamedSharding, shape: Shape) -> dict[Box, list[Any]]:
    devices_of: dict[Box, list[Any]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices_of[box_of(index or (), shape)].append(device)
    return dict(sorted(devices_of.items()))


@lru_cache(maxsize=4096)
def _local_hull(sharding: NamedSharding, shape: Shape) -> Box | None:
    return tiled_hull(_local_boxes(sharding, shape))


def fill(
    jobs: Sequence[Job], reader: Reader, most_bytes: int, progress: Progress | None
) -> Iterator[Any]:
    """Make the arrays of the jobs; progress is told in this thread after each unit."""
    filling = _Filling(jobs, reader, progress)
    try:
        for unit in _units(jobs, reader.arrays, most_bytes):
            filling.read(unit, most_bytes)
        filling.make_room(0)
    except MemoryError as error:
        raise MemoryError(
            f"{error}: the host's memory is full; give a smaller max_bytes_in_flight"
        ) from error
    finally:
        filling.pool.shutdown(cancel_futures=True)
    return filling.arrays()


class _Filling:
    """Units that threads read, and that this thread puts onto devices."""

    def __init__(self, jobs: Sequence[Job], reader: Reader, progress: Progress | None) -> None:
        self.pool = ThreadPoolExecutor(_THREADS, "shardrules-load")
        self._jobs, self._reader, self._progress = jobs, reader, progress
        self._total = sum(job.bytes_in_files(reader.arrays) for job in jobs) if progress else 0
        # By device; of None the whole array.
        self._parts: list[dict[Any, Any]] = [{} for _ in jobs]
        self._reading: deque[tuple[_Unit, npt.NDArray[np.uint8], list[Future[None]]]] = deque()
        self._sent: deque[tuple[int, Any]] = deque()
        self._in_flight = 0

    def read(self, unit: _Unit, most_bytes: int) -> None:
        """Begin to read a unit, as soon as there is room."""
        self.make_room(most_bytes - unit.needs)
        self._in_flight += unit.needs
        memory = unit.memory()
        reads = [
            self.pool.submit(self._reader.read, file, ranges, memory)
            for file, ranges in unit.ranges()
        ]
        self._reading.append((unit, memory, reads))

    def make_room(self, at_most: int) -> None:
        """Wait until so many bytes are in flight, and send on what has been read by then."""
        while True:
            is_over = self._in_flight > at_most
            if is_over and self._sent:
                self._arrive()
            elif self._reading and (is_over or all(read.done() for read in self._reading[0][2])):
                self._put(*self._reading.popleft())
            else:
                return

    def _put(
        self, unit: _Unit, memory: npt.NDArray[np.uint8], reads: Sequence[Future[None]]
    ) -> None:
        """Put what was read onto devices."""
        for read in reads:
            read.result()
        rows: list[tuple[int, Any, Any, Any]] = []
        arrays = []
        parts_of: dict[int, dict[Box, npt.NDArray[Any]]] = defaultdict(dict)
        for index, box, pieces in unit.rows:
            job = self._jobs[index]
            values = _values(job, box, pieces, memory)
            if job.sharding.is_fully_addressable and box_shape(box) == job.target.shape:
                rows.append((index, None, job.sharding, values))
                continue
            for own in [box] if box in job.local_boxes else job.local_boxes:
                parts_of[index][own] = values[slices_in(own, box)]
        for index, parts in parts_of.items():
            job = self._jobs[index]
            if len(parts) == len(job.local_boxes):
                arrays.append(_from_boxes(job, parts))
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

    def _arrive(self) -> None:
        size, arrays = self._sent.popleft()
        jax.block_until_ready(arrays)
        self._in_flight -= size
        if self._progress is not None:
            self._progress(self._reader.bytes_read, self._total)

    def arrays(self) -> Iterator[Any]:
        """Yield the arrays; of some no device is here."""
        for job, parts in zip(self._jobs, self._parts, strict=True):
            if None in parts:
                yield parts[None]
                continue
            order = job.sharding.addressable_devices_indices_map(job.target.shape)
            yield jax.make_array_from_single_device_arrays(
                job.target.shape, job.sharding, [parts[device] for device in order], dtype=job.dtype
            )


def _from_boxes(job: Job, parts: Mapping[Box, npt.NDArray[Any]]) -> Any:
    """Make an array whose parts are all there: in half the time of one of arrays on devices."""
    shape = job.target.shape
    return jax.make_array_from_callback(
        shape, job.sharding, lambda index: parts[box_of(index or (), shape)]
    )


def _units(
    jobs: Sequence[Job], arrays: Mapping[str, ArraySpec], most_bytes: int
) -> Iterator[_Unit]:
    """Yield units of neighbours of a file."""
    most = max(1, most_bytes // _SHARE)
    unit = _Unit(arrays)
    for index in sorted(range(len(jobs)), key=[job.place(arrays) for job in jobs].__getitem__):
        job = jobs[index]
        for box in _boxes(job, arrays, most):
            is_full = (
                unit.needs + job.bytes_of(box) > min(most, _UNIT_BYTES)
                or len(unit.rows) == _UNIT_ARRAYS
            )
            if unit.rows and is_full:
                yield unit
                unit = _Unit(arrays)
            unit.add(index, job, box)
    if unit.rows:
        yield unit


def _boxes(job: Job, arrays: Mapping[str, ArraySpec], most: int) -> Iterable[Box]:
    """Return the boxes to read: those of devices, or one that they fill, which JAX cuts.

    It copies what is turned in any case; of small arrays and short rows, a call for each would take
    longer.
    """
    hull = _local_hull(job.sharding, job.target.shape)
    if hull is None or (size := job.bytes_of(hull)) > most:
        return job.local_boxes
    is_whole = size <= _SMALL or not _is_read_in_place(job, arrays)
    return [hull] if is_whole else job.local_boxes


def _is_read_in_place(job: Job, arrays: Mapping[str, ArraySpec]) -> bool:
    """Return whether runs of a device's box that are not short lie in the file as in memory."""
    return all(
        part.form.keeps_order and block.size >= _SHORT
        for part, block, _ in _blocks(job.target, next(iter(job.local_boxes)), arrays)
    )


class _Unit:
    """Boxes that are read together: the memory, the ranges that fill it, and what is made of it."""

    def __init__(self, arrays: Mapping[str, ArraySpec]) -> None:
        self.rows: list[tuple[int, Box, list[_Piece]]] = []
        """The index of a job, a box of it, and what fills the box."""
        self._bytes = 0
        self._beside = 0
        self._arrays = arrays
        # By file: (a place in it, where ranges begin from there, the bytes of each, where they go).
        self._reads: dict[StoredFile, list[tuple[int, Any, int, int]]] = defaultdict(list)

    @property
    def needs(self) -> int:
        """Return the bytes in flight: the memory, and values that are made of it."""
        return self._bytes + self._beside

    def add(self, index: int, job: Job, box: Box) -> None:
        """Add a box of an array."""
        target, pieces = job.target, []
        if target.is_plain and box_shape(box) == target.shape:
            array = self._arrays[target.parts[0].source]
            dtype = numpy_dtype(array.dtype)
            place = self._read(array, 0, _AT_ONCE, prod(target.shape) * dtype.itemsize)
            pieces = [_Piece(place, dtype, None, box)]
        else:
            for part, block, filled in _blocks(target, box, self._arrays):
                array = self._arrays[part.source]
                dtype = numpy_dtype(array.dtype)
                steps = zip(part.starts, row_major(part.form.shape), strict=True)
                offset = sum(start * step for start, step in steps) * dtype.itemsize
                place = self._read(array, offset, block.begins, block.size)
                pieces.append(_Piece(place, dtype, block, filled))
        if len(pieces) > 1 or any(piece.dtype != job.dtype for piece in pieces):
            self._beside += job.bytes_of(box)
        self.rows.append((index, box, pieces))

    def _read(self, array: ArraySpec, offset: int, begins: Any, size: int) -> slice:
        """Read ranges of an array; returns their place in memory."""
        place = -(-self._bytes // _ALIGNED) * _ALIGNED
        self._bytes = place + len(begins) * size
        assert array.file is not None
        if size:
            self._reads[array.file].append((array.begin + offset, begins, size, place))
        return slice(place, self._bytes)

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
        memory = np.empty(self._bytes + _ALIGNED, np.uint8)
        first = -memory.ctypes.data % _ALIGNED
        return memory[first : first + self._bytes]


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


class _Piece(NamedTuple):
    """What stands in the memory of a unit, and which box of an array it fills."""

    place: slice
    dtype: np.dtype[Any]
    block: Block | None
    """None for a whole array as it is: of many small ones a block would be slower."""
    filled: Box


def _values(
    job: Job, box: Box, pieces: Sequence[_Piece], memory: npt.NDArray[np.uint8]
) -> npt.NDArray[Any]:
    """Return the values of a box: a view of the memory, or joined pieces, with zeros beside."""
    parts: list[tuple[Box, Any]] = []
    for place, dtype, block, filled in pieces:
        stored = memory[place]
        # A file may have any bytes for flags.
        stored = np.not_equal(stored, 0) if dtype == np.bool_ else stored.view(dtype)
        if block is None:
            values = stored.reshape(job.target.shape)
        else:
            values = block.form.arranged(np, stored)[block.inside]
        values, loss = cast(values, job.dtype)
        check_kept(job.path, loss)
        parts.append((filled, values))
    is_whole = [filled for filled, _ in parts] == [box]
    return parts[0][1] if is_whole else join(box, job.dtype, parts)  # type: ignore[no-any-return]


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
    view = memoryview(memory.data)
    for begin, size, place in zip(*(column.tolist() for column in ranges), strict=True):
        count = _read_at(file, begin, view[place : place + size])
        if count < size:
            return begin + count, -1
    return 0, 0


def _read_at(file: io.BufferedReader, begin: int, into: memoryview) -> int:
    """Read bytes, fewer at the end of the file, where the core does not: on Windows."""
    with _seeking:
        file.seek(begin)
        return file.readinto(into)


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


def digest(arrays: Mapping[str, ArraySpec]) -> str:
    """Return a digest of bytes in the middle of arrays: two models may have equal headers."""
    data = hashlib.sha256()
    with Reader(arrays) as reader:
        for array in list(arrays.values())[:: max(1, -(-len(arrays) // _MOST_SAMPLES))]:
            size = numpy_dtype(array.dtype).itemsize * prod(array.shape)
            sample = np.empty(min(size, _SAMPLE), np.uint8)
            begin = array.begin + (size - len(sample)) // 2
            if len(sample) and array.file is not None:
                reader.read(array.file, Ranges(*np.array([[begin], [len(sample)], [0]])), sample)
            data.update(sample.tobytes())
    return data.hexdigest()[:16]


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
