"""Sharded arrays from stored ones: boxes of local devices, read in parallel within a bound."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from math import prod
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from shardrules._base.io import FileError
from shardrules._base.text import bytes_shown
from shardrules._checkpoint.boxes import Box, Piece, box_shape, slices_in
from shardrules._checkpoint.job import Job, fills_view
from shardrules._checkpoint.puts import assembled, parts_on_devices, stacked_arrays, whole_arrays
from shardrules._checkpoint.ranges import Copy, Tiles, axis_strides, numpy_dtype
from shardrules._checkpoint.reading import BoxRequest, Reader, copy_values
from shardrules._checkpoint.targets import SourcePart, Target
from shardrules._plan.files.leaves import ArraySpec, StoredFile

# Reads at once, also of one array: a store on a network takes milliseconds to answer each.
_THREADS: Final = 16
# To wait for one of many units takes time for each.
_UNITS: Final = 4 * _THREADS
# What lets the CPU backend use a buffer as it is.
_ALIGNED: Final = 64
# So many small arrays are read together, and put onto devices in one call.
_BATCH: Final = 1024
_BATCH_BYTES: Final = 16 << 20
# So many small arrays of one form are worth a program, which takes as long to compile as to put
# some thousands of them.
_MANY: Final = 8192
# Units of at most this size keep all threads busy.
_SHARE: Final = 4
# Of more parts, those in a box are looked up.
_FEW: Final = 8


class _Unit(NamedTuple):
    jobs: Sequence[int]
    boxes: Sequence[Sequence[Box]]
    """Per job, those that are filled."""
    is_whole: bool
    """Whether that makes whole arrays."""
    bytes: int
    is_stack: bool = False
    """Whether they are arrays of one form, which lie side by side in memory."""

    def room(self, size: int) -> int:
        """Return the memory that a buffer of this size gets."""
        return size if self.is_stack else -(-size // _ALIGNED) * _ALIGNED


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
    units = list(_units(jobs, reader.arrays, most_bytes))
    filling = _Filling(jobs, reader, most_bytes, done, max(1, _THREADS // max(1, len(units))))
    with filling.pool:
        try:
            for unit in units:
                filling.make_room(most_bytes - unit.bytes, _UNITS)
                filling.read(unit)
            filling.make_room(0, 0)
        finally:
            filling.pool.shutdown(cancel_futures=True)
    return filling.arrays()


class _Filling:
    """Units that threads read, and that this thread puts onto devices."""

    def __init__(
        self,
        jobs: Sequence[Job],
        reader: Reader,
        most_bytes: int,
        done: Callable[[], None],
        threads: int,
    ) -> None:
        self.pool = ThreadPoolExecutor(_THREADS, "shardrules-load")
        self._jobs = jobs
        self._reader = reader
        self._most_bytes = most_bytes
        self._done = done
        self._threads = threads
        self._arrays: list[Any] = [None] * len(jobs)
        self._parts: dict[int, dict[Any, Any]] = defaultdict(dict)
        self._reading = 0
        self._read: SimpleQueue[_Reading] = SimpleQueue()
        self._sent: deque[tuple[_Unit, Any]] = deque()
        self._in_flight = 0

    def read(self, unit: _Unit) -> None:
        """Begin to read a unit."""
        jobs = [self._jobs[index] for index in unit.jobs]
        plan = self._within(unit, partial(_plan, jobs, unit, self._reader, self._threads))
        reading = _Reading(unit, self._read, *plan)
        self._reading += 1
        self._in_flight += unit.bytes
        reading.submit(self.pool)

    def make_room(self, at_most: int, units: int) -> None:
        """Wait until so many bytes and units are in flight."""
        while self._in_flight > at_most or self._reading > units:
            if self._sent and (not self._reading or self._in_flight > at_most):
                unit, sent = self._sent.popleft()
                _wait_for(unit, sent)
                self._in_flight -= unit.bytes
                self._done()
                continue
            reading = self._read.get()
            self._reading -= 1
            filled = self._within(reading.unit, reading.result)
            self._sent.append((reading.unit, self._put(reading.unit, filled)))

    def arrays(self) -> list[Any]:
        """Return the arrays, with those that were put in parts."""
        for index, of_devices in self._parts.items():
            self._arrays[index] = assembled(self._jobs[index], of_devices)
        return self._arrays

    def _put(self, unit: _Unit, filled: list[dict[Box, npt.NDArray[Any]]]) -> Any:
        """Put the buffers of a unit onto devices; returns what arrives there."""
        jobs = [self._jobs[index] for index in unit.jobs]
        if not unit.is_whole:
            parts = parts_on_devices(jobs[0], filled[0])
            self._parts[unit.jobs[0]] |= parts
            return list(parts.values())
        arrays = (stacked_arrays if unit.is_stack else whole_arrays)(jobs, filled)
        for index, array in zip(unit.jobs, arrays, strict=True):
            self._arrays[index] = array
        return arrays

    def _within(self, unit: _Unit, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except MemoryError as error:
            raise MemoryError(
                f"{self._jobs[unit.jobs[0]].path}: {error}: the host's memory is full, with up to "
                f"{bytes_shown(self._most_bytes)} that are read and not on devices yet; give a "
                "smaller max_bytes_in_flight"
            ) from error


def _wait_for(unit: _Unit, sent: Any) -> None:
    """Wait until what was put for a unit is on the devices."""
    jax.block_until_ready(sent)


def _units(
    jobs: Sequence[Job], arrays: Mapping[str, ArraySpec], most_bytes: int
) -> Iterator[_Unit]:
    most = max(1, most_bytes // _SHARE)
    small: dict[Any, list[int]] = defaultdict(list)
    small_bytes: dict[Any, int] = defaultdict(int)
    forms = Counter(job.form for job in jobs if job.is_put_whole)

    def unit(form: Any) -> _Unit:
        size = small_bytes.pop(form, 0)
        indices = small.pop(form)
        return _Unit(indices, [jobs[i].boxes for i in indices], True, size, form is not None)

    # Neighbours in a file are read together.
    for index in sorted(range(len(jobs)), key=[job.place(arrays) for job in jobs].__getitem__):
        job = jobs[index]
        sizes = job.box_sizes
        total = sum(sizes.values())
        if total > most:
            yield from _units_of_boxes(index, job, sizes, most_bytes)
        elif not job.is_small:
            yield _Unit([index], [job.boxes], True, total)
        else:
            is_many = job.is_put_whole and forms[job.form] >= _MANY
            form = job.form if is_many else None
            together = small[form]
            if together and (
                small_bytes[form] + total > min(most, _BATCH_BYTES) or len(together) == _BATCH
            ):
                yield unit(form)
            small[form].append(index)
            small_bytes[form] += total
    for form in [*small]:
        yield unit(form)


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
            yield _Unit([index], [part], False, sum(map(sizes.__getitem__, part)))


class _Reading:
    """A unit that is being read: its buffers, the tasks that fill them, what is done after them."""

    def __init__(
        self,
        unit: _Unit,
        ended: SimpleQueue[_Reading],
        filled: list[dict[Box, npt.NDArray[Any]]],
        tasks: list[Callable[[], object]],
        after: Callable[[], object],
    ) -> None:
        self.unit = unit
        self._ended, self._filled, self._tasks, self._after = ended, filled, tasks, after
        self._lock = threading.Lock()
        self._left = len(tasks)
        self._error: BaseException | None = None

    def submit(self, pool: ThreadPoolExecutor) -> None:
        """Begin the tasks."""
        for task in self._tasks:
            pool.submit(self._run, task)
        if not self._tasks:
            self._ended.put(self)

    def _run(self, task: Callable[[], object]) -> None:
        error = self._error
        try:
            if error is None:
                task()
        except BaseException as raised:
            error = raised
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            is_last = not self._left
        if is_last:
            self._ended.put(self)

    def result(self) -> list[dict[Box, npt.NDArray[Any]]]:
        """Return the buffers by job and box, or raise the first error of a task."""
        if self._error is not None:
            raise self._error
        self._after()
        return self._filled


def _plan(
    jobs: Sequence[Job], unit: _Unit, reader: Reader, threads: int
) -> tuple[list[dict[Box, npt.NDArray[Any]]], list[Callable[[], object]], Callable[[], object]]:
    """Return (the buffers of a unit, the tasks that fill them, what is to be done after them)."""
    # Of this thread's memory, which the system has not taken back since an earlier call.
    memory, at = _memory(jobs, unit), 0
    filled: list[dict[Box, npt.NDArray[Any]]] = []
    copies: dict[StoredFile, list[Copy]] = defaultdict(list)
    tiles: dict[str, list[Tiles]] = defaultdict(list)
    staging: list[Callable[[], object]] = []
    for job, of_job in zip(jobs, unit.boxes, strict=True):
        buffers: dict[Box, npt.NDArray[Any]] = {}
        staged: dict[str, list[tuple[Piece, npt.NDArray[Any]]]] = defaultdict(list)
        for box, parts in zip(of_job, _parts_in(job.target, of_job), strict=True):
            buffer = _buffer(job, box, memory, at)
            if job.target.is_padded:
                buffer[...] = 0
            for part in parts:
                array = reader.arrays[part.source]
                for piece in part.pieces(box):
                    copy = _direct(job, part, piece, buffer.strides, reader)
                    if copy is None or array.file is None:
                        staged[part.source].append((piece, _view(buffer, box, piece)))
                        continue
                    place = at + sum(
                        (begin - start) * stride
                        for (begin, _), (start, _), stride in zip(
                            piece.target, box, buffer.strides, strict=True
                        )
                    )
                    if isinstance(copy, Copy):
                        copies[array.file].append(copy.at(array.begin, place))
                    else:
                        tiles[part.source] += [each.at(place) for each in copy]
            buffers[box] = buffer
            at += unit.room(buffer.nbytes)
        staging += [partial(_fill_staged, job, *each, reader) for each in staged.items()]
        filled.append(buffers)
    tasks, read_twice = reader.tasks(copies, tiles, memory, threads)

    def after() -> None:
        read_twice()
        for job, buffers in zip(jobs, filled, strict=True):
            for buffer in buffers.values() if job.dtype == np.bool_ else ():
                np.not_equal(buffer.view(np.uint8), 0, out=buffer)  # a file may have any bytes

    return filled, [*tasks, *staging], after


def _parts_in(target: Target, boxes: Sequence[Box]) -> list[Sequence[SourcePart]]:
    """Return, per box, the parts that may have something in it."""
    parts = target.parts
    if len(parts) <= _FEW or not target.shape:
        return [parts] * len(boxes)
    begins = np.array([part.target_at for part in parts])
    ends = begins + np.array([part.sized.target_shape for part in parts])
    spans = [np.array(box).reshape(-1, 2).T for box in boxes]
    return [
        [parts[i] for i in np.flatnonzero(((begins < end) & (begin < ends)).all(1)).tolist()]
        for begin, end in spans
    ]


def _direct(
    job: Job, part: SourcePart, piece: Piece, strides: tuple[int, ...], reader: Reader
) -> Copy | list[Tiles] | None:
    """Return how the bytes of a piece go straight to the result, if they can."""
    if piece.picked is not None:
        return None
    if numpy_dtype(reader.arrays[part.source].dtype) != job.dtype:
        return None
    shape = box_shape(piece.target)

    def of_axes() -> list[int]:
        lengths = [piece.lengths[axis] for axis in piece.order]
        in_order = axis_strides(shape, strides, lengths)
        return [in_order[i] for i in _inverse(piece.order)]

    key = (piece.order, shape, strides)
    return reader.copy_of(part.source, piece.source, piece.lengths, of_axes, key)


def _fill_staged(
    job: Job, name: str, views: Sequence[tuple[Piece, npt.NDArray[Any]]], reader: Reader
) -> None:
    """Fill views of the result with pieces of one array that have to be changed on the way."""
    requests, changed = [], []
    for piece, view in views:
        if fills_view(piece):
            into = view.transpose(_inverse(piece.order)).reshape(box_shape(piece.source))
        else:
            into = np.empty(box_shape(piece.source), numpy_dtype(reader.arrays[name].dtype))
            changed.append((piece, into, view))
        requests.append(BoxRequest(piece.source, into))
    try:
        reader.fill(name, requests)
        for piece, read, view in changed:
            copy_values(piece.arranged(read), view)
    except FloatingPointError as error:
        raise FileError(
            f"{job.path}: {error}: they would become infinite; give the array another dtype, alone "
            r"with Rename(pattern, r'\g<0>', dtype='float32')"
        ) from None


@lru_cache(maxsize=256)
def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _view(buffer: npt.NDArray[Any], box: Box, piece: Piece) -> npt.NDArray[Any]:
    """Return the place of a piece, with a dimension for each of its axes in the result's order."""
    place: npt.NDArray[Any] = buffer[slices_in(piece.target, box)]
    return place.reshape([piece.lengths[axis] for axis in piece.order])


def _memory(jobs: Sequence[Job], unit: _Unit) -> npt.NDArray[np.uint8]:
    """Return memory for a unit: the system gives one large piece faster than many."""
    size = sum(
        unit.room(prod(box_shape(box)) * job.dtype.itemsize)
        for job, of_job in zip(jobs, unit.boxes, strict=True)
        for box in of_job
    )
    memory = np.empty(size + _ALIGNED, np.uint8)
    first = -memory.ctypes.data % _ALIGNED
    return memory[first : first + size]


def _buffer(job: Job, box: Box, memory: npt.NDArray[np.uint8], at: int) -> npt.NDArray[Any]:
    shape = box_shape(box)
    return memory[at : at + prod(shape) * job.dtype.itemsize].view(job.dtype).reshape(shape)
