"""Boxes of arrays in files, read into numpy arrays: each contiguous range in one call."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from shardrules._checkpoint.boxes import Box, box_shape, hull_of, intersection, slices_in
from shardrules._dtypes import is_inexact
from shardrules._files.leaves import ArraySpec, StoredFile, state_of
from shardrules._io import FileError, opened
from shardrules._text import bytes_shown, shown

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

    Raises:
        ValueError: The bound is too small.
    """
    if bound is None:
        return max(DEFAULT_IN_FLIGHT, least)
    if bound < least:
        raise ValueError(f"{keyword} is {bytes_shown(bound)}, and {needs}: give at least {least:,}")
    return bound


Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def checked_progress(progress: object) -> bool | Progress | None:
    """Check that the value is a truth value, None or a function.

    Raises:
        TypeError: It is something else.
        ImportError: It is True, and rich is not installed.
    """
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

# Shorter ranges of several boxes are copied from rows: each range costs microseconds in Python.
_LEAST_RANGE: Final = 64 << 10
# Linux has 1,024.
_MOST_BUFFERS: Final = 1000
# More than there are threads that read. A process may often have no more than 256 in all.
_MOST_FILES: Final = 64
_SAMPLE: Final = 64


class BoxRequest(NamedTuple):
    """A box of a stored array, and the array of its shape to fill; the dtype may be another."""

    box: Box
    into: npt.NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of this name in numpy or ml_dtypes."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


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

    Args:
        arrays: The stored arrays by name.

    Attributes:
        bytes_read: How many bytes have been read so far.
    """

    def __init__(self, arrays: Mapping[str, ArraySpec]) -> None:
        self.arrays = arrays
        self.bytes_read = 0
        self._files: OrderedDict[StoredFile, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self._of_thread = threading.local()

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
        layout = _StoredLayout(array)
        size = layout.dtype.itemsize * prod(array.shape)
        data = bytearray(min(size, _SAMPLE))
        if data:
            with self._opened(layout.file) as file:
                self._read(file, array.begin + (size - len(data)) // 2, [memoryview(data)])
        return bytes(data)

    def fill(self, name: str, requests: Sequence[BoxRequest]) -> None:
        """Fill each requested box of an array.

        Raises:
            FileError: The file has changed, or cannot be read.
        """
        layout = _StoredLayout(self.arrays[name])
        direct: dict[Box, BoxRequest] = {}
        staged: list[BoxRequest] = []
        for request in requests:
            is_long = len(requests) == 1 or layout.range_bytes(request.box) >= _LEAST_RANGE
            if is_long and layout.is_direct(request) and request.box not in direct:
                direct[request.box] = request
            else:
                staged.append(request)
        with self._opened(layout.file) as file:
            for box, together in _hulls(staged):
                if len(together) == 1 and layout.is_direct(together[0]):
                    direct[box] = together[0]
                else:
                    self._fill_staged(file, layout, box, together)
            self._fill_directly(file, layout, list(direct.values()))

    def _fill_directly(
        self, file: _OpenFile, layout: _StoredLayout, requests: Sequence[BoxRequest]
    ) -> None:
        """Fill boxes that lie as in the file; neighbours in the file are read in one call."""
        views = [_byte_range_of(request.into.reshape(-1).view(np.uint8)) for request in requests]
        ranges = [layout.ranges(request.box) for request in requests]
        counts = list(map(len, ranges))
        if not sum(counts):
            return
        begins = np.concatenate(ranges)
        if len(begins) == 1:
            self._read(file, int(begins[0]), [view for view in views if len(view)])
            return
        sizes = np.repeat([layout.range_bytes(request.box) for request in requests], counts)
        view_of = np.repeat(np.arange(len(requests)), counts)
        places = np.concatenate([np.arange(count) for count in counts]) * sizes
        order = np.argsort(begins, kind="stable")
        gaps = np.flatnonzero(begins[order][1:] != (begins + sizes)[order][:-1]) + 1
        columns = (column[order].tolist() for column in (view_of, places, sizes))
        rows = list(zip(*columns, strict=True))
        for start, end in pairwise([0, *gaps.tolist(), len(rows)]):
            for i in range(start, end, _MOST_BUFFERS):
                buffers = [
                    views[view][at : at + size]
                    for view, at, size in rows[i : min(end, i + _MOST_BUFFERS)]
                ]
                self._read(file, int(begins[order[i]]), buffers)

    def _fill_staged(
        self, file: _OpenFile, layout: _StoredLayout, box: Box, together: Sequence[BoxRequest]
    ) -> None:
        item_bytes = layout.dtype.itemsize
        staging = self._staging()
        for part in _chunks(box, item_bytes):
            shape = box_shape(part)
            rows = staging[: prod(shape) * item_bytes]
            view, size = _byte_range_of(rows), layout.range_bytes(part)
            for i, begin in enumerate(layout.ranges(part).tolist()):
                self._read(file, begin, [view[i * size : (i + 1) * size]])
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

    def _read(self, file: _OpenFile, begin: int, buffers: list[memoryview]) -> None:
        """Fill the buffers in turn."""
        at = begin
        try:
            while buffers:
                count = _read_at(file.file, at, buffers)
                if not count:
                    raise _changed(file.stored)
                at += count
                buffers = _after(buffers, count)
        except OSError as error:
            raise FileError(
                f"{file.stored.path}: byte {at:,}: {error.strerror or error}; "
                "check the disk, and copy or download the file again"
            ) from None
        with self._lock:
            self.bytes_read += at - begin

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


def _byte_range_of(array: Any) -> memoryview:
    return memoryview(array)


def _check_unchanged(stored: StoredFile, file: io.BufferedReader) -> None:
    if state_of(file.fileno()) != stored.state:
        raise _changed(stored)


def _changed(stored: StoredFile) -> FileError:
    return FileError(
        f"{stored.path}: the file has changed since its header was read; wait until it is written, "
        "and load again"
    )


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the rest of the buffers after this many bytes."""
    for i, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[i + 1 :]]
        count -= len(buffer)
    return []


if hasattr(os, "preadv"):

    def _read_at(file: io.BufferedReader, begin: int, buffers: list[memoryview]) -> int:
        return os.preadv(file.fileno(), buffers, begin)

else:  # Windows
    _seeking: Final = threading.Lock()

    def _read_at(file: io.BufferedReader, begin: int, buffers: list[memoryview]) -> int:
        with _seeking:
            file.raw.seek(begin, 0)
            return file.raw.readinto(buffers[0]) or 0


class _StoredLayout:
    """Places of the elements of a stored array, in row-major order."""

    def __init__(self, array: ArraySpec) -> None:
        assert array.file is not None
        self.file = array.file
        self.dtype = numpy_dtype(array.dtype)
        self._array = array

    def is_direct(self, request: BoxRequest) -> bool:
        """Say whether the bytes lie in the result as in the file."""
        return request.into.dtype == self.dtype and request.into.flags.c_contiguous

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


def copy_values(values: npt.NDArray[Any], into: npt.NDArray[Any]) -> None:
    """Copy, and convert where the dtypes differ.

    Raises:
        FloatingPointError: A finite value is too large for the other dtype.
    """
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
