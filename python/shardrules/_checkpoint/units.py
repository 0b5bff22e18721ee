"""Arrays from files: units of neighbours are read into memory, and their views put onto devices."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import Any, Final, NamedTuple, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, SingleDeviceSharding

from shardrules._base.dtypes import bits_of
from shardrules._base.io import FileError
from shardrules._base.text import bytes_shown
from shardrules._checkpoint.conversion import LossError, converted, numpy_dtype
from shardrules._checkpoint.files import GAP, Ranges, Reader
from shardrules._checkpoint.layouts import (
    Box,
    Piece,
    Shape,
    box_of,
    box_shape,
    hull_of,
    pieces,
    row_major,
    slices_in,
    whole_box,
)
from shardrules._checkpoint.targets import Part, Target
from shardrules._plan.files.leaves import ArraySpec, StoredFile

DEFAULT_IN_FLIGHT: Final = 2 << 30
"""Bytes that are on their way at once, unless more or less is asked for."""
# Reads at once: a store on a network takes milliseconds to answer each.
_THREADS: Final = 16
_UNITS: Final = 4 * _THREADS
# What lets the CPU backend use a buffer as it is.
_ALIGNED: Final = 64
# Smaller arrays are read together, and JAX cuts them, which is faster than to do it here.
_SMALL: Final = 2 << 20
_UNIT_BYTES: Final = 32 << 20
_UNIT_ARRAYS: Final = 1024
# Units of at most this part of what is in flight keep all threads busy.
_SHARE: Final = 4
# Bytes: shorter runs are read with what is between them, if that is not many times as much.
_SHORT: Final = 512
_MOST_BETWEEN: Final = 4
# Memory that a box takes at most, to its bytes: what is between, and its values in another dtype.
_MOST_TIMES: Final = 4 * _MOST_BETWEEN
# Of more parts, those in a box are looked up.
_FEW: Final = 8

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

    @property
    def is_put_whole(self) -> bool:
        """Say whether JAX cuts it into its devices' parts."""
        size = prod(self.target.shape) * self.dtype.itemsize
        return size <= _SMALL and self.sharding.is_fully_addressable

    def place(self, arrays: Mapping[str, ArraySpec]) -> tuple[str, int]:
        """Return where its first bytes stand: the file, and the offset there."""
        first = arrays[self.target.parts[0].source]
        return "" if first.file is None else str(first.file.path), first.begin

    def is_direct(self, arrays: Mapping[str, ArraySpec]) -> bool:
        """Say whether its bytes in memory are those of the file."""
        target = self.target
        return target.is_plain and numpy_dtype(arrays[target.parts[0].source].dtype) == self.dtype

    def boxes(self, arrays: Mapping[str, ArraySpec]) -> list[Box]:
        """Return the boxes to read: those of devices, or one for all that JAX cuts.

        It copies what is turned in any case; and of short rows, calls for each would take longer.
        """
        if self.is_put_whole:
            return [whole_box(self.target.shape)]
        boxes = list(self.local_boxes)
        if len(boxes) > 1 and not _is_read_in_place(self, boxes[0], arrays):
            hull = hull_of(boxes)
            if prod(box_shape(hull)) == sum(prod(box_shape(box)) for box in boxes):
                return [hull]
        return boxes


@lru_cache(maxsize=4096)
def _local_boxes(sharding: NamedSharding, shape: Shape) -> dict[Box, list[Any]]:
    devices_of: dict[Box, list[Any]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices_of[box_of(index or (), shape)].append(device)
    return dict(sorted(devices_of.items()))


def _is_read_in_place(job: Job, box: Box, arrays: Mapping[str, ArraySpec]) -> bool:
    """Say whether runs of a box that are not short lie in the file as in memory."""
    for part in job.target.parts:
        item = numpy_dtype(arrays[part.source].dtype).itemsize
        for piece in pieces(part.form, part.starts, part.at, box):
            axes = zip(piece.strides, piece.lengths, strict=True)
            long = [axis for axis in axes if axis[1] > 1]
            size = 1
            for stride, length in reversed(long):
                if stride != size:
                    break
                size *= length
            return long == sorted(long, reverse=True) and size * item >= _SHORT
    return True


class _Packed(NamedTuple):
    """How a piece is read into memory of its own, in the order of the file."""

    begins: npt.NDArray[np.int64]
    """Where its ranges begin, from the piece's first byte."""
    size: int
    """The bytes of each."""
    strides: Shape
    """The bytes between neighbours in memory, of each axis of the result."""

    @property
    def bytes(self) -> int:
        return len(self.begins) * self.size


@lru_cache(maxsize=64)
def _packed(lengths: Shape, strides: Shape, item: int) -> _Packed:
    axes = [axis for axis, stride in enumerate(strides) if stride and lengths[axis] > 1]
    axes.sort(key=strides.__getitem__)
    size = needed = 1
    in_memory = [0] * len(lengths)
    outer: list[int] = []
    for axis in axes:
        span = (lengths[axis] - 1) * strides[axis] + size
        is_one = strides[axis] == size
        is_short = (
            size * item < _SHORT
            and (strides[axis] - size) * item <= GAP
            and span <= _MOST_BETWEEN * needed * lengths[axis]
        )
        if outer or not (is_one or is_short):
            outer.append(axis)
            continue
        in_memory[axis] = strides[axis] * item
        size, needed = span, needed * lengths[axis]
    begins = np.zeros(1, np.int64)
    step = size * item
    for axis in outer:
        begins = (np.arange(lengths[axis]) * strides[axis] * item)[:, None] + begins
        begins = begins.reshape(-1)
        in_memory[axis] = step
        step *= lengths[axis]
    return _Packed(begins, size * item, tuple(in_memory))


class _Plan:
    """The memory of a unit, the ranges that fill it, and what is made of it then.

    Attributes:
        bytes: The bytes of memory.
        makes: Per box, a function of the memory.
    """

    def __init__(self, arrays: Mapping[str, ArraySpec]) -> None:
        self.bytes = 0
        self.makes: list[Callable[[npt.NDArray[np.uint8]], npt.NDArray[Any]]] = []
        self._arrays = arrays
        self._single: dict[StoredFile, list[tuple[int, int, int]]] = defaultdict(list)
        self._many: dict[StoredFile, list[Ranges]] = defaultdict(list)
        self._blank: list[slice] = []
        self._converted = 0
        self._end: tuple[StoredFile | None, int] = (None, 0)

    @property
    def needs(self) -> int:
        """Return the bytes in flight: the memory, and values in another dtype."""
        return self.bytes + self._converted

    def add(self, job: Job, box: Box) -> None:
        """Add a box of an array."""
        if box == whole_box(job.target.shape) and job.is_direct(self._arrays):
            self._add_whole(job)
            return
        shape = box_shape(box)
        if numpy_dtype(self._arrays[job.target.parts[0].source].dtype) != job.dtype:
            self._converted += prod(shape) * job.dtype.itemsize
        found = [
            (part, piece)
            for part in _parts_in(job.target, box)
            for piece in pieces(part.form, part.starts, part.at, box)
        ]
        if len(found) == 1 and found[0][1].target == box:
            view = self._read(*found[0])
            self.makes.append(partial(_value, job, view))
            return
        place = self._room(prod(shape) * job.dtype.itemsize)
        if job.target.is_padded or not found:
            self._blank.append(slice(place, self.bytes))
        strides = tuple(stride * job.dtype.itemsize for stride in row_major(shape))
        copies = []
        for part, piece in found:
            to = tuple(low - begin for (low, _), (begin, _) in zip(piece.target, box, strict=True))
            at = place + sum(low * stride for low, stride in zip(to, strides, strict=True))
            if not self._read_in_place(job, part, piece, at, strides):
                copies.append((piece.target, self._read(part, piece)))
        self.makes.append(partial(_assembled, job, box, place, copies))

    def _add_whole(self, job: Job) -> None:
        array = self._arrays[job.target.parts[0].source]
        size = prod(array.shape) * job.dtype.itemsize
        goes_on = self._end == (array.file, array.begin) and not self.bytes % job.dtype.itemsize
        place = self.bytes if goes_on and size < _SMALL else self._room(0)
        self.bytes = place + size
        self._end = (array.file, array.begin + size)
        if size and array.file is not None:
            self._single[array.file].append((array.begin, size, place))
        self.makes.append(partial(_view_of, job.dtype, array.shape, slice(place, self.bytes)))

    def _room(self, size: int) -> int:
        """Make room for so many bytes, and return where it begins."""
        place = -(-self.bytes // _ALIGNED) * _ALIGNED
        self.bytes = place + size
        self._end = (None, 0)
        return place

    def _read(self, part: Part, piece: Piece) -> _View:
        """Read a piece into memory of its own."""
        array = self._arrays[part.source]
        dtype = numpy_dtype(array.dtype)
        packed = _packed(piece.lengths, piece.strides, dtype.itemsize)
        place = self._room(packed.bytes)
        begins = packed.begins + (array.begin + piece.offset * dtype.itemsize)
        places = np.arange(len(begins)) * packed.size + place
        self._add_ranges(array, begins, packed.size, places)
        return _View(slice(place, self.bytes), dtype, piece.lengths, packed.strides,
                     box_shape(piece.target))  # fmt: skip

    def _read_in_place(self, job: Job, part: Part, piece: Piece, at: int, strides: Shape) -> bool:
        """Read a piece straight to its place, if it lies there as in the file."""
        array, item = self._arrays[part.source], job.dtype.itemsize
        if numpy_dtype(array.dtype) != job.dtype or job.dtype == np.bool_:
            return False
        to = [
            stride * prod(lengths[i + 1 :])
            for stride, lengths in zip(strides, _by_dims(piece, part), strict=True)
            for i in range(len(lengths))
        ]
        axes = sorted(
            (by * item, by_memory, length)
            for by, by_memory, length in zip(piece.strides, to, piece.lengths, strict=True)
            if length > 1
        )
        size = item
        outer: list[tuple[int, int, int]] = []
        for by, by_memory, length in axes:
            if not outer and by == by_memory == size:
                size *= length
            else:
                outer.append((by, by_memory, length))
        is_in_order = all(a[1] < b[1] for a, b in pairwise(outer))
        if outer and (size < _SHORT or not is_in_order or not outer[0][0]):
            return False
        begins = np.full(1, array.begin + piece.offset * item)
        places = np.full(1, at)
        for by, by_memory, length in reversed(outer):
            steps = np.arange(length)
            begins = (begins[:, None] + steps * by).reshape(-1)
            places = (places[:, None] + steps * by_memory).reshape(-1)
        self._add_ranges(array, begins, size, places)
        return True

    def _add_ranges(
        self, array: ArraySpec, begins: npt.NDArray[Any], size: int, places: npt.NDArray[Any]
    ) -> None:
        assert array.file is not None
        if size and len(begins):
            self._many[array.file].append(Ranges(begins, np.full(len(begins), size), places))

    def ranges(self) -> Iterator[tuple[StoredFile, Ranges]]:
        """Yield, in parts, what is read of each file."""
        for file in {**self._single, **self._many}:
            tables = self._many[file]
            if rows := self._single[file]:
                tables = [*tables, Ranges(*np.array(rows, np.int64).T)]
            joined = Ranges(*map(np.concatenate, zip(*tables, strict=True)))
            for share in joined.in_order().shares():
                yield file, share

    def memory(self) -> npt.NDArray[np.uint8]:
        """Return the memory: the system gives one large piece faster than many."""
        memory = np.empty(self.bytes + _ALIGNED, np.uint8)
        first = -memory.ctypes.data % _ALIGNED
        memory = memory[first : first + self.bytes]
        for part in self._blank:
            memory[part] = 0
        return memory


def _by_dims(piece: Piece, part: Part) -> Iterator[Shape]:
    """Yield the lengths of the axes of each dimension of the result."""
    at = 0
    for axes in part.form.target_axes:
        yield piece.lengths[at : at + len(axes)]
        at += len(axes)


class _View(NamedTuple):
    """Values in memory."""

    place: slice
    dtype: np.dtype[Any]
    lengths: Shape
    strides: Shape
    shape: Shape

    def of(self, memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Return them as an array of the result's shape."""
        values = np.lib.stride_tricks.as_strided(
            _view_of(self.dtype, (-1,), self.place, memory), self.lengths, self.strides
        )
        return values.reshape(self.shape)


def _view_of(
    dtype: np.dtype[Any], shape: Shape, place: slice, memory: npt.NDArray[np.uint8]
) -> npt.NDArray[Any]:
    if dtype == np.bool_:  # a file may have any bytes
        return np.not_equal(memory[place], 0).reshape(shape)
    values: npt.NDArray[Any] = memory[place].view(dtype)
    return values.reshape(shape)


def _value(job: Job, view: _View, memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return a box that one piece fills."""
    return _as_dtype(job, view.of(memory))


def _assembled(
    job: Job,
    box: Box,
    place: int,
    copies: Sequence[tuple[Box, _View]],
    memory: npt.NDArray[np.uint8],
) -> npt.NDArray[Any]:
    """Return a box of which some pieces are at their places, and others are copied there."""
    shape = box_shape(box)
    whole: npt.NDArray[Any] = memory[place : place + prod(shape) * job.dtype.itemsize]
    whole = whole.view(job.dtype).reshape(shape)
    # numpy copies the elements of dtypes that are not its own one by one.
    bits = np.dtype(f"u{job.dtype.itemsize}") if job.dtype.kind == "V" else job.dtype
    for target, view in copies:
        values = _as_dtype(job, view.of(memory))
        whole.view(bits)[slices_in(target, box)] = values.view(bits)
    return whole


def _as_dtype(job: Job, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    try:
        return converted(values, job.dtype)
    except LossError as error:
        raise FileError(
            f"{job.path}: {error}; give the array a dtype that has them, alone with "
            "Rename(..., dtype=...), or set jax_enable_x64 for 64 bits"
        ) from None


def _parts_in(target: Target, box: Box) -> Sequence[Part]:
    """Return the parts that may have something in a box."""
    parts = target.parts
    if len(parts) <= _FEW or not target.shape:
        return parts
    begins, ends = _bounds(parts)
    low, high = np.array(box).reshape(-1, 2).T
    return [parts[i] for i in np.flatnonzero(((begins < high) & (low < ends)).all(1)).tolist()]


@lru_cache(maxsize=64)
def _bounds(parts: tuple[Part, ...]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    begins = np.array([part.at for part in parts])
    return begins, begins + np.array([part.form.target for part in parts])


class _Unit(NamedTuple):
    jobs: Sequence[int]
    boxes: Sequence[Sequence[Box]]
    """Per job, those that are read."""


def _units(
    jobs: Sequence[Job], arrays: Mapping[str, ArraySpec], most_bytes: int
) -> Iterator[_Unit]:
    """Yield neighbours of a file together, large arrays alone, and larger ones in boxes."""
    most = max(1, most_bytes // _SHARE)
    together: list[int] = []
    size = 0
    for index in sorted(range(len(jobs)), key=[job.place(arrays) for job in jobs].__getitem__):
        job = jobs[index]
        total = prod(job.target.shape) * job.dtype.itemsize
        if job.is_put_whole and total <= most:
            if together and (
                size + total > min(most, _UNIT_BYTES) or len(together) == _UNIT_ARRAYS
            ):
                yield _Unit(together, [[whole_box(jobs[i].target.shape)] for i in together])
                together, size = [], 0
            together.append(index)
            size += total
            continue
        boxes = job.boxes(arrays)
        size_of_boxes = sum(prod(box_shape(box)) for box in boxes) * job.dtype.itemsize
        if size_of_boxes * _MOST_TIMES <= most or (
            sum(_need(job, box, arrays) for box in boxes) <= most
        ):
            yield _Unit([index], [boxes])
        else:
            yield from (_Unit([index], [[box]]) for box in job.local_boxes)
    if together:
        yield _Unit(together, [[whole_box(jobs[i].target.shape)] for i in together])


def _need(job: Job, box: Box, arrays: Mapping[str, ArraySpec]) -> int:
    """Return the memory for a box."""
    plan = _Plan(arrays)
    plan.add(job, box)
    return plan.needs


def bytes_in_flight(jobs: Sequence[Job], arrays: Mapping[str, ArraySpec], bound: int | None) -> int:
    """Return the bound, or the default; an error if a box on a device needs more."""
    least, of_job = 0, None
    for job in jobs:
        size = prod(job.target.shape) * job.dtype.itemsize
        if size * _MOST_TIMES <= (bound or DEFAULT_IN_FLIGHT):
            continue
        needs = max((_need(job, box, arrays) for box in job.local_boxes), default=0)
        if needs > least:
            least, of_job = needs, job
    if bound is None:
        return max(DEFAULT_IN_FLIGHT, least)
    if of_job is not None and least > bound:
        raise ValueError(
            f"max_bytes_in_flight is {bytes_shown(bound)}, and {of_job.path} with the shape "
            f"{list(of_job.target.shape)} needs {bytes_shown(least)} for its part on one device: "
            f"give at least {least:,}"
        )
    return bound


def bytes_to_read(job: Job, arrays: Mapping[str, ArraySpec]) -> int:
    """Count the bytes in files that this process needs of the array's parts."""
    elements = sum(prod(box_shape(box)) for box in job.local_boxes)
    return elements * bits_of(arrays[job.target.parts[0].source].dtype) // 8


class _Reading(NamedTuple):
    """A unit that is being read."""

    unit: _Unit
    plan: _Plan
    memory: npt.NDArray[np.uint8]
    reads: list[Future[None]]


def fill(
    jobs: Sequence[Job], reader: Reader, most_bytes: int, done: Callable[[], None]
) -> list[Any]:
    """Make the arrays of the jobs.

    Args:
        jobs: What to make.
        reader: The files of the stored arrays.
        most_bytes: Maximum bytes in flight, from `bytes_in_flight`.
        done: Called in this thread after each unit.
    """
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
    return filling.arrays


class _Filling:
    """Units that threads read, and that this thread puts onto devices."""

    def __init__(self, jobs: Sequence[Job], reader: Reader, done: Callable[[], None]) -> None:
        self.pool = ThreadPoolExecutor(_THREADS, "shardrules-load")
        self.arrays: list[Any] = [None] * len(jobs)
        self._jobs, self._reader, self._done = jobs, reader, done
        self._parts: dict[int, dict[Any, Any]] = defaultdict(dict)
        self._reading: deque[_Reading] = deque()
        self._sent: deque[tuple[int, Any]] = deque()
        self._in_flight = 0

    def read(self, unit: _Unit, most_bytes: int) -> None:
        """Begin to read a unit, as soon as there is room."""
        plan = _Plan(self._reader.arrays)
        for index, boxes in zip(unit.jobs, unit.boxes, strict=True):
            for box in boxes:
                plan.add(self._jobs[index], box)
        self.make_room(most_bytes - plan.needs, _UNITS)
        self._in_flight += plan.needs
        memory = plan.memory()
        reads = [
            self.pool.submit(self._reader.read, file, ranges, memory)
            for file, ranges in plan.ranges()
        ]
        self._reading.append(_Reading(unit, plan, memory, reads))

    def make_room(self, at_most: int, units: int = 0) -> None:
        """Wait until so many bytes and units are in flight."""
        while self._reading and (
            len(self._reading) > units
            or self._in_flight > at_most
            or all(read.done() for read in self._reading[0].reads)
        ):
            self._put(self._reading.popleft())
            while self._sent and self._in_flight > at_most:
                self._arrive()
        while self._sent and self._in_flight > at_most:
            self._arrive()

    def _arrive(self) -> None:
        size, arrays = self._sent.popleft()
        _wait_for(arrays)
        self._in_flight -= size
        self._done()

    def _put(self, reading: _Reading) -> None:
        """Put what was read onto devices."""
        for read in reading.reads:
            read.result()
        made = iter([make(reading.memory) for make in reading.plan.makes])
        values: list[Any] = []
        places: list[Any] = []
        rows: list[tuple[int, Any]] = []
        for index, boxes in zip(reading.unit.jobs, reading.unit.boxes, strict=True):
            job = self._jobs[index]
            of_job = {box: next(made) for box in boxes}
            whole = whole_box(job.target.shape)
            if whole in of_job and job.sharding.is_fully_addressable:
                values.append(of_job[whole])
                places.append(job.sharding)
                rows.append((index, None))
                continue
            for device, value in _by_device(job, of_job):
                values.append(value)
                places.append(SingleDeviceSharding(device, memory_kind=job.sharding.memory_kind))
                rows.append((index, device))
        arrays = jax.device_put(values, places)
        for (index, device), array in zip(rows, arrays, strict=True):
            if device is None:
                self.arrays[index] = array
            else:
                self._parts[index][device] = array
        for index in reading.unit.jobs:
            self._assemble(index)
        self._sent.append((reading.plan.needs, arrays))

    def _assemble(self, index: int) -> None:
        """Make an array of its parts, if all are there."""
        job, parts = self._jobs[index], self._parts.get(index, {})
        order = job.sharding.addressable_devices_indices_map(job.target.shape)
        if self.arrays[index] is None and len(parts) == len(order):
            self.arrays[index] = jax.make_array_from_single_device_arrays(
                job.target.shape, job.sharding, [parts[device] for device in order], dtype=job.dtype
            )
            self._parts.pop(index, None)


def _by_device(
    job: Job, values: Mapping[Box, npt.NDArray[Any]]
) -> Iterator[tuple[Any, npt.NDArray[Any]]]:
    """Yield the part of each device that lies in these boxes."""
    for box, devices in job.local_boxes.items():
        outer = box if box in values else next(iter(values))
        if outer != box and len(values) > 1:
            continue
        if any(low < a or high > b for (low, high), (a, b) in zip(box, outer, strict=True)):
            continue
        for device in devices:
            yield device, values[outer][slices_in(box, outer)]


def _wait_for(arrays: Any) -> None:
    """Wait until arrays are on their devices."""
    jax.block_until_ready(arrays)


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
