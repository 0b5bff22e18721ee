"""Boxes of arrays in files, read into numpy arrays: each contiguous range in one call."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from shardrules import _core
from shardrules._base.dtypes import is_inexact
from shardrules._base.io import FileError, opened
from shardrules._base.text import bytes_shown, shown
from shardrules._checkpoint.boxes import Box, box_shape, hull_of, intersection, slices_in
from shardrules._checkpoint.ranges import (
    GAP,
    MOST_SHARE,
    Band,
    Copy,
    Ranges,
    StoredLayout,
    Tiles,
    band_shares,
    band_tables,
    bands_of,
    copy_of,
    in_file_order,
    share_bytes,
    shares_of,
)
from shardrules._plan.files.leaves import ArraySpec, StoredFile, state_of
from shardrules._plan.files.remote import RemoteFile

if TYPE_CHECKING:
    import io

    import numpy.typing as npt

DEFAULT_IN_FLIGHT: Final = 2 << 30
"""Bytes that are on their way at once, unless more or less is asked for."""


def bound_of(
    bound: int | None, least: int, needs: str, keyword: str = "max_bytes_in_flight"
) -> int:
    """Return the bound on bytes in flight, or the default.

    Args:
        bound: The bound, if there is one.
        least: The bytes of the largest part, which are in flight at once.
        needs: What has so many bytes, for the error.
        keyword: The name of the bound.
    """
    if bound is None:
        return max(DEFAULT_IN_FLIGHT, least)
    if bound < least:
        raise ValueError(f"{keyword} is {bytes_shown(bound)}, and {needs}: give at least {least:,}")
    return bound


Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def checked_progress(progress: object) -> bool | Progress | None:
    """Check that the value is a truth value, None or a function."""
    if progress is True:
        try:
            import rich.progress  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"progress: the bar needs rich, which cannot be imported here ({error}); "
                "pip install 'shardrules[cli]', or give a function"
            ) from error
        return True
    if progress is None or progress is False:
        return None
    if not callable(progress):
        raise TypeError(
            f"progress is {shown(progress)}; it must be True or a function of two numbers"
        )
    return cast("Progress", progress)


@contextmanager
def reported(progress: bool | Progress | None, what: str) -> Iterator[Progress | None]:
    """Yield the function to call; for True it moves a bar, in the first process alone."""
    import jax

    if progress is not True:
        yield progress or None
        return
    if jax.process_index() != 0:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


STAGING: Final = 2 << 20
"""Maximum bytes of rows that are read at once, to be copied from there; they stay in a cache."""

# The same for files of other machines, where a request takes milliseconds.
_REMOTE_GAP: Final = 256 << 10
# Linux has 1,024.
_MOST_BUFFERS: Final = 1000
# More than there are threads that read. A process may often have no more than 256 in all.
_MOST_FILES: Final = 64
_SAMPLE: Final = 64
# Copies of boxes of one form are worked out once, unless they have many ranges.
_MOST_FORMS: Final = 1024
_MOST_RANGES: Final = 8192


class BoxRequest(NamedTuple):
    """A box of a stored array, and the array of its shape to fill; the dtype may be another."""

    box: Box
    into: npt.NDArray[Any]


# Not on Windows.
_native: Callable[..., tuple[int, int]] | None = getattr(_core, "read_ranges", None)
_bands: Callable[..., tuple[int, int]] | None = getattr(_core, "read_bands", None)


class _OpenFile:
    """File, and how many threads read it."""

    def __init__(self, stored: StoredFile) -> None:
        self.stored = stored
        self.users = 0
        self._closing = ExitStack()
        self.file = self._closing.enter_context(opened(stored.path))

    def close(self, *, is_checked: bool) -> None:
        """Close it; checked, if it is as it was when its header was read."""
        with self._closing:
            if is_checked:
                _check_unchanged(self.stored, self.file)


class Reader:
    """Open files; for several threads. A context manager that checks the files at its end.

    At most `_MOST_FILES` are open; then the one that was used longest ago is checked and closed.

    Attributes:
        bytes_read: How many bytes have been read so far.
    """

    def __init__(self, arrays: Mapping[str, ArraySpec]) -> None:
        self.arrays = arrays
        self.bytes_read = 0
        self._files: OrderedDict[StoredFile, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._copies: dict[Any, Copy | list[Tiles]] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with ExitStack() as closing:
            for file in self._files.values():
                closing.callback(file.close, is_checked=error is None)

    def sample(self, name: str) -> bytes:
        """Read some bytes in the middle of an array."""
        array = self.arrays[name]
        layout = StoredLayout(array)
        size = layout.dtype.itemsize * prod(array.shape)
        data = np.empty(min(size, _SAMPLE), np.uint8)
        begin = array.begin + (size - len(data)) // 2
        if len(data):
            self._read(layout.file, Ranges(*(np.array([n]) for n in (begin, len(data), 0))), data)
        return data.tobytes()

    def tasks(
        self,
        copies: Mapping[StoredFile, Sequence[Copy]],
        tiles: Mapping[str, Sequence[Tiles]],
        memory: npt.NDArray[np.uint8],
        threads: int,
    ) -> tuple[list[Callable[[], object]], Callable[[], object]]:
        """Return what reads into memory, in parts for so many threads, and what to call after it.

        Of each file it reads the ranges of `copies`; `tiles` has by array what lies otherwise.
        """
        ranges = {file: in_file_order(of_file) for file, of_file in copies.items()}
        bands: dict[tuple[StoredFile, int], list[Band]] = defaultdict(list)
        for name, of_array in tiles.items():
            layout = StoredLayout(self.arrays[name])
            of_item = bands[layout.file, layout.dtype.itemsize]
            of_item += bands_of(self.arrays[name].begin, of_array)
        total = sum(int(each.sizes.sum()) for each, _ in ranges.values())
        total += sum(band.bytes for of_item in bands.values() for band in of_item)
        most = share_bytes(total, threads)
        tasks: list[Callable[[], object]] = []
        for file, (of_file, _) in ranges.items():
            tasks += [partial(self._read, file, each, memory) for each in shares_of(of_file, most)]
        for (file, item), of_item in bands.items():
            tasks += [
                partial(self._read_bands, file, item, each, memory)
                for each in band_shares(of_item, most)
            ]

        def read_twice() -> None:
            for _, again in ranges.values():
                for place, size, other in zip(*(column.tolist() for column in again), strict=True):
                    memory[other : other + size] = memory[place : place + size]

        return tasks, read_twice

    def copy_of(
        self,
        name: str,
        source: Box,
        lengths: tuple[int, ...],
        axis_strides: Callable[[], Sequence[int]],
        key: Any,
    ) -> Copy | list[Tiles] | None:
        """Work out how a box of an array is copied; None if rows have to be read for it first.

        `lengths` and strides are as in `copy_of`; `key` tells these strides from others.
        """
        array = self.arrays[name]
        key = (array.shape, array.dtype, source, lengths, key)
        copy = self._copies.get(key)
        if copy is None:
            copy = copy_of(StoredLayout(array), source, lengths, axis_strides())
            few = not isinstance(copy, Copy) or len(copy.begins) < _MOST_RANGES
            if len(self._copies) < _MOST_FORMS and few:
                self._copies[key] = copy
        is_local = array.file is not None and isinstance(array.file.path, Path)
        has_core = _native is not None and _bands is not None
        return copy if isinstance(copy, Copy) or (has_core and is_local) else None

    def fill(self, name: str, requests: Sequence[BoxRequest]) -> None:
        """Fill each requested box of an array, by rows that are read once for all."""
        layout = StoredLayout(self.arrays[name])
        item_bytes, staging = layout.dtype.itemsize, self._staging()
        for box, together in _hulls(requests):
            for part in _chunks(box, item_bytes):
                shape, begins = box_shape(part), layout.ranges(part)
                rows, size = staging[: prod(shape) * item_bytes], layout.range_bytes(part)
                sizes = np.full(len(begins), size)
                self._read(layout.file, Ranges(begins, sizes, np.cumsum(sizes) - size), rows)
                values = rows.view(layout.dtype).reshape(shape)
                for request in together:
                    common = intersection(part, request.box)
                    if prod(box_shape(common)):
                        into = request.into[slices_in(common, request.box)]
                        copy_values(values[slices_in(common, part)], into)

    def _staging(self) -> npt.NDArray[np.uint8]:
        """Return the thread's own rows: memory that is new costs more than a copy."""
        if not hasattr(self._of_thread, "staging"):
            self._of_thread.staging = np.empty(STAGING, np.uint8)
        return self._of_thread.staging  # type: ignore[no-any-return]

    def _read(self, stored: StoredFile, ranges: Ranges, memory: npt.NDArray[np.uint8]) -> None:
        """Read ranges, which are in the order of the file."""
        begin, size = int(ranges.begins[0]), int(ranges.sizes.sum())
        self._checked(stored, begin, size, lambda file: _read_ranges(file, ranges, memory))

    def _read_bands(
        self, stored: StoredFile, item: int, bands: Sequence[Band], memory: npt.NDArray[np.uint8]
    ) -> None:
        read, tables, size = _bands, band_tables(bands), sum(band.bytes for band in bands)
        assert read is not None
        self._checked(
            stored, bands[0].begin, size,
            lambda file: read(file.fileno(), *tables, item, memory, GAP),
        )  # fmt: skip

    def _checked(
        self,
        stored: StoredFile,
        at: int,
        size: int,
        read: Callable[[io.BufferedReader], tuple[int, int]],
    ) -> None:
        """Read so many bytes of a file, from here on."""
        with self._opened(stored) as file:
            code = 0
            try:
                at, code = read(file.file)
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
            self.bytes_read += size

    @contextmanager
    def _opened(self, stored: StoredFile) -> Iterator[_OpenFile]:
        """Yield the file, which stays open meanwhile."""
        with self._lock:
            file = self._files.get(stored)
            if file is None:
                self._close_oldest()
                file = self._files[stored] = _OpenFile(stored)
                _check_unchanged(stored, file.file)
            self._files.move_to_end(stored)
            file.users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1

    def _close_oldest(self) -> None:
        """Close the file that was used longest ago, if there are too many."""
        if len(self._files) < _MOST_FILES:
            return
        idle = next((stored for stored, file in self._files.items() if not file.users), None)
        if idle is not None:
            self._files.pop(idle).close(is_checked=True)


def _check_unchanged(stored: StoredFile, file: io.BufferedReader) -> None:
    if state_of(file) != stored.state:
        raise _changed(stored)


def _changed(stored: StoredFile) -> FileError:
    return FileError(
        f"{stored.path}: the file has changed since its header was read; wait until it is written, "
        "and load again"
    )


def _read_ranges(
    file: io.BufferedReader, ranges: Ranges, memory: npt.NDArray[np.uint8]
) -> tuple[int, int]:
    """Read ranges; returns (where it stopped, 0, or the system's error there, or -1 at the end)."""
    if isinstance(file.raw, RemoteFile):
        _read_remote(file.raw, ranges, memory)
        return 0, 0
    if _native is not None:
        return _native(file.fileno(), *ranges, memory, GAP)
    view, between = memoryview(memory.data), memoryview(bytearray(GAP))
    rows = zip(*(column.tolist() for column in ranges), strict=True)
    buffers: list[memoryview] = []
    end = at = int(ranges.begins[0])
    for begin, size, place in rows:
        if not 0 <= begin - end <= GAP or len(buffers) >= _MOST_BUFFERS:
            at, code = _read_span(file, at, buffers)
            if code:
                return at, code
            buffers, at = [], begin
        elif begin > end:
            buffers.append(between[: begin - end])
        buffers.append(view[place : place + size])
        end = begin + size
    return _read_span(file, at, buffers)


def _read_remote(file: RemoteFile, ranges: Ranges, memory: npt.NDArray[np.uint8]) -> None:
    """Read ranges of another machine at once, those that are near one another as one."""
    begins, ends = ranges.begins, ranges.begins + ranges.sizes
    spans: list[slice] = []
    first = 0
    for i in range(1, len(begins) + 1):
        is_near = (
            i < len(begins)
            and begins[i] - ends[i - 1] <= _REMOTE_GAP
            and ends[i] - begins[first] <= MOST_SHARE
        )
        if not is_near:
            spans.append(slice(first, i))
            first = i
    starts = [int(begins[span.start]) for span in spans]
    parts = file.ranges(starts, [int(ends[span.stop - 1]) for span in spans])
    for span, start, part in zip(spans, starts, parts, strict=True):
        data = np.frombuffer(part, np.uint8)
        for begin, size, place in zip(*(column[span].tolist() for column in ranges), strict=True):
            memory[place : place + size] = data[begin - start : begin - start + size]


def _read_span(file: io.BufferedReader, at: int, buffers: Sequence[memoryview]) -> tuple[int, int]:
    """Fill the buffers in turn, from this offset on."""
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        try:
            count = _read_at(file, at, left)
        except OSError as error:
            return at, error.errno or -1
        if not count:
            return at, -1
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return at, 0


if hasattr(os, "preadv"):

    def _read_at(file: io.BufferedReader, begin: int, buffers: list[memoryview]) -> int:
        return os.preadv(file.fileno(), buffers, begin)

else:  # Windows
    _seeking: Final = threading.Lock()

    def _read_at(file: io.BufferedReader, begin: int, buffers: list[memoryview]) -> int:
        with _seeking:
            file.raw.seek(begin, 0)
            return file.raw.readinto(buffers[0]) or 0


def copy_values(values: npt.NDArray[Any], into: npt.NDArray[Any]) -> None:
    """Copy, and convert where the dtypes differ."""
    if values.dtype != into.dtype:
        _check_range(values, into.dtype)
    elif values.dtype.kind == "V":
        # numpy copies the elements of dtypes that are not its own one by one.
        same_size = np.dtype(f"u{values.dtype.itemsize}")
        values, into = values.view(same_size), into.view(same_size)
    into[...] = values


def _check_range(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> None:
    limit = _largest(dtype)
    if not values.size or limit is None or (_largest(values.dtype) or 0) <= limit:
        return
    if -limit <= values.min() and values.max() <= limit:
        return
    # Infinite values stay what they are, and some finite ones are rounded to the largest.
    finite = values[np.isfinite(values)].astype(np.float64)
    outside = finite[np.abs(finite) > limit]
    with np.errstate(over="ignore", invalid="ignore"):
        is_lost = not np.isfinite(outside.astype(dtype).astype(np.float64)).all()
    if is_lost:
        raise FloatingPointError(
            f"its values are from {finite.min():.4g} to {finite.max():.4g}, and the largest of "
            f"{dtype.name} is {limit:.4g}"
        )


@cache
def _largest(dtype: np.dtype[Any]) -> float | None:
    """Return the largest value of a floating dtype."""
    import ml_dtypes

    finfo: Any = ml_dtypes.finfo
    return float(finfo(dtype).max) if is_inexact(dtype) and dtype.kind != "c" else None


def _chunks(box: Box, item_bytes: int) -> Iterator[Box]:
    """Yield parts of the box, in order, with at most `STAGING` bytes each."""
    lengths = box_shape(box)
    if prod(lengths) * item_bytes <= STAGING:
        yield box
        return
    (begin, end), *inner = box
    row = prod(lengths[1:]) * item_bytes
    if row > STAGING:
        for i in range(begin, end):
            for rest in _chunks(tuple(inner), item_bytes):
                yield ((i, i + 1), *rest)
        return
    rows = STAGING // row
    for i in range(begin, end, rows):
        yield ((i, min(end, i + rows)), *inner)


def _hulls(requests: Sequence[BoxRequest]) -> Iterator[tuple[Box, list[BoxRequest]]]:
    """Yield boxes to read, with their requests; boxes of the same rows that tile one are one."""
    of_rows: dict[Box, list[BoxRequest]] = defaultdict(list)
    for request in requests:
        if prod(box_shape(request.box)):
            of_rows[request.box[:1]].append(request)
    for together in of_rows.values():
        distinct = {request.box for request in together}
        hull = hull_of(distinct)
        if sum(prod(box_shape(box)) for box in distinct) == prod(box_shape(hull)):
            yield hull, together
        else:
            for box in distinct:
                yield box, [request for request in together if request.box == box]
