"""Sharded arrays from stored ones: boxes of local devices, read in parallel within a bound."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._checkpoint.boxes import Box, Piece, box_of, box_shape, slices_in
from shardrules._checkpoint.reading import (
    STAGING,
    BoxRequest,
    Reader,
    bound_of,
    copy_values,
    numpy_dtype,
)
from shardrules._checkpoint.targets import SourcePart, Target
from shardrules._dtypes import bits_of
from shardrules._files.leaves import ArraySpec
from shardrules._io import FileError
from shardrules._specs import entries_of, entry_axes
from shardrules._text import bytes_shown, counted, mesh_shown, printable_lines

if TYPE_CHECKING:
    import numpy.typing as npt
    from jax.sharding import NamedSharding

    from shardrules._plan.table import Columns


class Forecast(NamedTuple):
    """Bytes that each process of a job reads of a checkpoint, each of them once."""

    mesh: dict[str, int]
    arrays: int
    bytes: int
    """Bytes of the checkpoint."""
    read: tuple[int, ...]
    """Per process, the bytes that it reads."""
    device_bytes: int
    """Bytes on the device that holds most."""
    largest: int
    """Bytes of the largest part on one device: the least that may be in flight."""
    in_flight: int
    """Maximum bytes of the host's memory for what is on its way."""
    bandwidth: int
    """Bytes that a process reads in a second."""

    @property
    def seconds(self) -> float:
        """Return the time of the process that reads most."""
        return max(self.read) / self.bandwidth

    def __str__(self) -> str:
        most, least = max(self.read), min(self.read)
        share = f"{most / self.bytes:.1%} of the checkpoint" if self.bytes else "nothing"
        each = (
            bytes_shown(most) if most == least else f"{bytes_shown(least)} to {bytes_shown(most)}"
        )
        processes, devices = len(self.read), prod(self.mesh.values())
        return printable_lines(
            [
                f"{counted(self.arrays, 'array')}, {bytes_shown(self.bytes)}, on "
                f"{mesh_shown(self.mesh)} ({counted(devices, 'device')}, "
                f"{counted(processes, 'process')})",
                f"each process reads    {each} ({share}); all together "
                f"{bytes_shown(sum(self.read))}",
                f"each device holds     {bytes_shown(self.device_bytes)} at most",
                f"in flight             {bytes_shown(self.in_flight)} at most; the largest part on "
                f"one device is {bytes_shown(self.largest)}",
                f"reading takes         {self.seconds:,.1f} s at {bytes_shown(self.bandwidth)} per "
                "second and process",
            ]
        )


def forecast(
    columns: Columns, *, processes: int, in_flight: int | None, bandwidth: int
) -> Forecast:
    """Forecast what loading the checkpoint of a plan would read.

    Args:
        columns: The plan. Devices are shared out among the processes in the mesh's order.
        processes: Number of processes, which divides that of the devices.
        in_flight: Maximum bytes in flight. Default: that of `load`.
        bandwidth: Bytes that a process reads in a second.

    Raises:
        ValueError: The processes do not divide the devices, an array is not placed, or its part on
            one device is larger than what may be in flight.
    """
    devices = columns.devices
    if devices % processes:
        raise ValueError(
            f"--processes is {processes:,}, and the mesh has {counted(devices, 'device')}: give a "
            "number that divides it"
        )
    read = np.zeros(processes, object)
    distinct: dict[tuple[tuple[str, ...], ...], npt.NDArray[np.int64]] = {}
    for kind, count in zip(columns.kinds, columns.counts.tolist(), strict=True):
        if kind.shape is None:
            continue
        if kind.spec is None:
            raise ValueError(f"not all arrays are placed: {kind.message}; see shardrules check")
        cuts = tuple(
            tuple(axis for axis in entry_axes(entry) if columns.axis_sizes.get(axis, 1) > 1)
            for entry in entries_of(kind.spec)
        )
        if cuts not in distinct:
            distinct[cuts] = _device_boxes(cuts, columns.axis_sizes, processes)
        read += distinct[cuts].astype(object) * (count * kind.device_bytes)
    largest = max((kind.device_bytes for kind in columns.kinds), default=0)
    needs = f"the largest part on one device has {bytes_shown(largest)}"
    most = bound_of(in_flight, largest, needs, "--in-flight")
    return Forecast(
        dict(columns.axis_sizes),
        len(columns.paths),
        columns.total_bytes,
        tuple(map(int, read)),
        sum(
            kind.device_bytes * int(n)
            for kind, n in zip(columns.kinds, columns.counts, strict=True)
        ),
        largest,
        min(most, max(map(int, read))),
        bandwidth,
    )


def _device_boxes(
    cuts: tuple[tuple[str, ...], ...], axis_sizes: Mapping[str, int], processes: int
) -> npt.NDArray[np.int64]:
    """Count, per process, the different boxes that its devices hold of an array cut like this."""
    sizes = tuple(axis_sizes.values())
    places = dict(zip(axis_sizes, np.indices(sizes).reshape(len(sizes), -1), strict=True))
    box = np.zeros(prod(sizes), np.int64)
    for axes in cuts:
        for axis in axes:
            box = box * axis_sizes[axis] + places[axis]
    of_processes = np.sort(box.reshape(processes, -1), axis=1)
    changes = np.diff(of_processes, axis=1) != 0
    counts: npt.NDArray[np.int64] = 1 + changes.sum(axis=1, dtype=np.int64)
    return counts


_THREADS: Final = min(16, 2 + (os.cpu_count() or 1))
# To wait for one of many units takes time for each.
_UNITS: Final = 4 * _THREADS
# What lets the CPU backend use a buffer as it is.
_ALIGNED: Final = 64
# So many small arrays are put onto devices in one call.
_BATCH: Final = 128
_BATCH_BYTES: Final = 8 << 20
# Units of at most this size keep all threads busy.
_SHARE: Final = 4


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

    def source_rows(self, box: Box) -> tuple[str, Box]:
        """Return the array and the rows of it that are read first for this box."""
        for part in self.target.parts:
            for piece in part.pieces(box):
                return part.source, piece.source[:1]
        return "", ()

    @property
    def is_small(self) -> bool:
        """Say whether it is read in one range, and JAX cuts it into the devices' parts."""
        shape = self.target.shape
        size = prod(shape) * self.dtype.itemsize
        return size <= STAGING and self.sharding.is_fully_addressable

    @property
    def box_sizes(self) -> Mapping[Box, int]:
        """The bytes in flight for each local box: the buffer, and what is staged for it."""
        sizes = _buffer_sizes(self.sharding, self.target.shape, self.dtype.itemsize)
        parts = [part for part in self.target.parts if part.scale or not part.sized.is_simple]
        if not parts:
            return sizes
        return {
            box: size
            + sum(
                prod(box_shape(piece.source)) * (12 if part.scale else 8)
                for part in parts
                for piece in part.pieces(box)
                if not _fills_view(part, piece)
            )
            for box, size in sizes.items()
        }


@lru_cache(maxsize=4096)
def _buffer_sizes(
    sharding: NamedSharding, shape: tuple[int, ...], item_bytes: int
) -> dict[Box, int]:
    return {box: prod(box_shape(box)) * item_bytes for box in _local_boxes(sharding, shape)}


class _Unit(NamedTuple):
    jobs: Sequence[int]
    boxes: Sequence[Box]
    """Boxes of the only job; empty for whole arrays."""
    bytes: int


@lru_cache(maxsize=4096)
def _local_boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """Return the distinct boxes of this process's devices, each with its devices."""
    devices_of: dict[Box, list[Any]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices_of[box_of(index or (), shape)].append(device)
    return dict(sorted(devices_of.items()))


def bytes_in_flight(jobs: Sequence[Job], bound: int | None) -> int:
    """Return the bound, or the default.

    Raises:
        ValueError: An array's part on one device alone takes more.
    """
    sizes = [max(job.box_sizes.values(), default=0) for job in jobs]
    if not sizes:
        return bound_of(bound, 0, "")
    least = max(sizes)
    path, target, *_ = jobs[sizes.index(least)]
    return bound_of(
        bound,
        least,
        f"{path} with the shape {list(target.shape)} needs {bytes_shown(least)} for its part on "
        "one device",
    )


def bytes_to_read(job: Job, arrays: Mapping[str, ArraySpec]) -> int:
    """Count the bytes in files that this process needs of the array's parts, without scales."""
    elements = sum(prod(box_shape(box)) for box in job.local_boxes)
    return elements * bits_of(arrays[job.target.parts[0].source].dtype) // 8


def fill(
    jobs: Sequence[Job], reader: Reader, most_bytes: int, done: Callable[[], None]
) -> list[Any]:
    """Make the arrays of the jobs.

    Args:
        jobs: What to make.
        reader: The files of the stored arrays.
        most_bytes: Maximum bytes in flight, from `bytes_in_flight`.
        done: Called in this thread after each unit.

    Raises:
        FileError: A file has changed, or cannot be read.
    """
    arrays: list[Any] = [None] * len(jobs)
    parts: dict[int, dict[Any, Any]] = defaultdict(dict)
    under_way: dict[Future[Any], _Unit] = {}
    in_flight = 0

    def finish(at_most: int, units: int) -> None:
        nonlocal in_flight
        while in_flight > at_most or len(under_way) > units:
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                unit = under_way.pop(future)
                try:
                    result = future.result()
                except MemoryError as error:
                    path = jobs[unit.jobs[0]].path
                    raise MemoryError(
                        f"{path}: {error}: the host's memory is full, with up to "
                        f"{bytes_shown(most_bytes)} that are read and not on devices yet; give a "
                        "smaller max_bytes_in_flight"
                    ) from error
                in_flight -= unit.bytes
                if unit.boxes:
                    parts[unit.jobs[0]] |= result
                else:
                    for index, array in zip(unit.jobs, result, strict=True):
                        arrays[index] = array
                done()

    pool = ThreadPoolExecutor(_THREADS, "shardrules-load")
    try:
        for unit in _units(jobs, most_bytes):
            finish(most_bytes - unit.bytes, _UNITS)
            work: Any = _boxes if unit.boxes else _arrays
            of_unit = [jobs[index] for index in unit.jobs]
            future = pool.submit(work, of_unit, unit.boxes, reader)
            under_way[future] = unit
            in_flight += unit.bytes
        finish(0, 0)
    finally:
        pool.shutdown(cancel_futures=True)
    for index, of_devices in parts.items():
        arrays[index] = _assembled(jobs[index], of_devices)
    return arrays


def _units(jobs: Sequence[Job], most_bytes: int) -> Iterator[_Unit]:
    most = max(1, most_bytes // _SHARE)
    small: list[int] = []
    small_bytes = 0
    for index, job in enumerate(jobs):
        sizes = job.box_sizes
        total = sum(sizes.values())
        if total <= most and not job.is_small:
            yield _Unit([index], (), total)
        elif total <= most:
            if small and (small_bytes + total > min(most, _BATCH_BYTES) or len(small) == _BATCH):
                yield _Unit(small, (), small_bytes)
                small, small_bytes = [], 0
            small.append(index)
            small_bytes += total
        else:
            yield from _units_of_boxes(index, job, sizes, most_bytes)
    if small:
        yield _Unit(small, (), small_bytes)


def _units_of_boxes(
    index: int, job: Job, sizes: Mapping[Box, int], most_bytes: int
) -> Iterator[_Unit]:
    # Boxes of the same rows stay together, since their rows are read once for all.
    of_rows: dict[Any, list[Box]] = defaultdict(list)
    for box in sizes:
        of_rows[job.source_rows(box)].append(box)
    for same_rows in of_rows.values():
        size = sum(map(sizes.__getitem__, same_rows))
        parts = [same_rows] if size <= most_bytes // 2 else [[box] for box in same_rows]
        for part in parts:
            yield _Unit([index], part, sum(map(sizes.__getitem__, part)))


def _arrays(jobs: Sequence[Job], _: Sequence[Box], reader: Reader) -> list[Any]:
    """Make whole arrays: one that is large, or several that are small."""
    import jax

    job = jobs[0]
    if not job.is_small:
        shape = job.target.shape
        buffers = _filled(job, tuple(job.local_boxes), reader)
        array = jax.make_array_from_callback(
            shape, job.sharding, lambda index: buffers[box_of(index or (), shape)]
        )
        return [jax.block_until_ready(array)]
    values = []
    for small in jobs:
        full = tuple((0, size) for size in small.target.shape)
        values.append(_filled(small, [full], reader)[full])
    return list(jax.block_until_ready(jax.device_put(values, [each.sharding for each in jobs])))


def _boxes(jobs: Sequence[Job], boxes: Sequence[Box], reader: Reader) -> dict[Any, Any]:
    """Make {device: its part} for these boxes."""
    import jax
    from jax.sharding import SingleDeviceSharding

    (job,) = jobs
    buffers = _filled(job, boxes, reader)
    memory_kind = job.sharding.memory_kind
    return {
        device: jax.block_until_ready(
            jax.device_put(buffers[box], SingleDeviceSharding(device, memory_kind=memory_kind))
        )
        for box in boxes
        for device in job.local_boxes[box]
    }


def _assembled(job: Job, parts: Mapping[Any, Any]) -> Any:
    import jax

    order = job.sharding.addressable_devices_indices_map(job.target.shape)
    return jax.make_array_from_single_device_arrays(
        job.target.shape, job.sharding, [parts[device] for device in order]
    )


def _filled(job: Job, boxes: Sequence[Box], reader: Reader) -> dict[Box, npt.NDArray[Any]]:
    """Read boxes from the files."""
    buffers = _buffers(boxes, job.dtype)
    if job.target.is_padded:
        for buffer in buffers.values():
            buffer[...] = 0
    requests: dict[str, list[BoxRequest]] = defaultdict(list)
    staged: list[tuple[SourcePart, Piece, npt.NDArray[Any], npt.NDArray[Any]]] = []
    for box, buffer in buffers.items():
        for part in job.target.parts:
            for piece in part.pieces(box):
                view = _view(buffer, box, piece)
                if _fills_view(part, piece):
                    into = view.transpose(_inverse(piece.order))
                    into = into.reshape(box_shape(piece.source))
                else:
                    dtype = numpy_dtype(reader.arrays[part.source].dtype)
                    into = np.empty(box_shape(piece.source), dtype)
                    staged.append((part, piece, into, view))
                requests[part.source].append(BoxRequest(piece.source, into))
    try:
        for name, of_array in requests.items():
            reader.fill(name, of_array)
        for part, piece, read, view in staged:
            values = read if part.scale is None else _scaled(read, part, piece, reader)
            copy_values(piece.arranged(values), view)
    except FloatingPointError as error:
        raise FileError(
            f"{job.path}: {error}: they would become infinite; give the array another dtype, alone "
            r"with Rename(pattern, r'\g<0>', dtype='float32')"
        ) from None
    for buffer in buffers.values():
        if job.dtype == np.bool_:  # a file may have any bytes
            np.not_equal(buffer.view(np.uint8), 0, out=buffer)
    return buffers


@lru_cache(maxsize=256)
def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _fills_view(part: SourcePart, piece: Piece) -> bool:
    """Say whether the bytes go straight to the result: no dimension is several long axes."""
    long = sum(length > 1 for length in piece.lengths)
    return (
        part.scale is None
        and piece.picked is None
        and long == sum(b - a > 1 for a, b in piece.source)
    )


def _view(buffer: npt.NDArray[Any], box: Box, piece: Piece) -> npt.NDArray[Any]:
    """Return the place of a piece, with a dimension for each of its axes in the result's order."""
    place: npt.NDArray[Any] = buffer[slices_in(piece.target, box)]
    return place.reshape([piece.lengths[axis] for axis in piece.order])


def _scaled(
    values: npt.NDArray[Any], part: SourcePart, piece: Piece, reader: Reader
) -> npt.NDArray[Any]:
    """Multiply the values by the scales of their blocks, in float32."""
    box = tuple(
        (begin // block, -(-end // block))
        for (begin, end), block in zip(piece.source, part.blocks, strict=True)
    )
    factors = np.empty(box_shape(box), np.float32)
    name = part.scale or ""
    stored = reader.arrays[name].shape
    # Dimensions of one scale may be left out.
    long = iter(
        span
        for span, block, size in zip(
            box, part.blocks, reader.arrays[part.source].shape, strict=True
        )
        if block < size
    )
    stored_box = tuple((0, 1) if size == 1 else next(long) for size in stored)
    reader.fill(name, [BoxRequest(stored_box, factors.reshape(box_shape(stored_box)))])
    for dim, ((begin, end), block) in enumerate(zip(piece.source, part.blocks, strict=True)):
        of_elements = np.arange(begin, end) // block - begin // block
        factors = factors.take(of_elements, dim)
    return values.astype(np.float32) * factors


def _buffers(boxes: Sequence[Box], dtype: np.dtype[Any]) -> dict[Box, npt.NDArray[Any]]:
    """Make an array for each box, in one piece of memory: the system gives large ones faster."""
    sizes = [prod(box_shape(box)) * dtype.itemsize for box in boxes]
    ends = list(accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes))
    memory = np.empty(ends[-1] + _ALIGNED if ends else 0, np.uint8)
    first = -memory.ctypes.data % _ALIGNED
    starts = [first, *(first + end for end in ends)]
    return {
        box: memory[start : start + size].view(dtype).reshape(box_shape(box))
        for box, start, size in zip(boxes, starts, sizes, strict=False)
    }
