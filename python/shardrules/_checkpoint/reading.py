"""Boxes of arrays in files, read into numpy arrays: exactly their bytes, each range in one call.

What several boxes need of neighbouring bytes is read in one call. A file must be as it was when its
header was read. Costs a system call per contiguous range, and a copy from the processor's cache
where ranges are short, or lie otherwise in the result than in the file. Must not know about devices
or names.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from shardrules._checkpoint.renames import Box, box_shape
from shardrules._dtypes import is_inexact
from shardrules._files.leaves import StoredArray, StoredFile, state_of
from shardrules._io import FileError, opened
from shardrules._text import shown

if TYPE_CHECKING:
    import io

    import numpy.typing as npt

DEFAULT_IN_FLIGHT: Final = 2 << 30
"""Bytes that are on their way at once, unless more or less is asked for."""


Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def checked_progress(progress: object) -> bool | Progress | None:
    """The value, if it is a truth value, None or a function.

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
    """The function to call; for True it moves a bar, in the first process alone."""
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


class WantedBytes(NamedTuple):
    """A box of a stored array, and the array of its shape to fill; the dtype may be another."""

    box: Box
    into: npt.NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of this name in numpy or ml_dtypes."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


class _OpenFile:
    """A file, and how many threads read it."""

    def __init__(self, stored: StoredFile) -> None:
        self.stored = stored
        self.users = 0
        self._closing = ExitStack()
        self.file = self._closing.enter_context(opened(stored.path))

    def close(self, *, is_checked: bool) -> None:
        """Closes it; checked, if it is as it was when its header was read."""
        with self._closing:
            if is_checked:
                _check_unchanged(self.stored, self.file)


class Reader:
    """Open files; for several threads. A context manager that checks the files at its end.

    At most `_MOST_FILES` are open; then the one that was used longest ago is checked and closed.

    Attributes:
        bytes_read: How many bytes have been read so far.
    """

    def __init__(self) -> None:
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

    def sample(self, array: StoredArray) -> bytes:
        """Some bytes in the middle of an array."""
        size = _Layout(array).dtype.itemsize * prod(array.shape)
        found = bytearray(min(size, _SAMPLE))
        begin = array.begin + (size - len(found)) // 2
        if not found:
            return b""
        with self._file(array.file) as file:
            self._read(array.file, file, begin, [memoryview(found)])
        return bytes(found)

    def fill(self, array: StoredArray, wanted: Sequence[WantedBytes]) -> None:
        """Fills each wanted box.

        Raises:
            FileError: The file has changed, or cannot be read.
        """
        with self._file(array.file) as file:
            self._fill(array, file, wanted)

    def _fill(
        self, array: StoredArray, file: io.BufferedReader, wanted: Sequence[WantedBytes]
    ) -> None:
        layout = _Layout(array)
        direct: dict[Box, WantedBytes] = {}
        staged: list[WantedBytes] = []
        for one in wanted:
            lies_alike = layout.is_direct(one) and layout.range_bytes(one.box) >= _LEAST_RANGE
            if lies_alike and one.box not in direct:
                direct[one.box] = one
            else:
                staged.append(one)
        for box, together in _hulls(staged):
            if len(together) == 1 and layout.is_direct(together[0]):
                direct[box] = together[0]
            else:
                self._fill_staged(array, file, layout, box, together)
        self._fill_directly(array, file, layout, list(direct.values()))

    def _fill_directly(
        self,
        array: StoredArray,
        file: io.BufferedReader,
        layout: _Layout,
        wanted: Sequence[WantedBytes],
    ) -> None:
        """Fills boxes that lie as in the file; neighbours in the file are read in one call."""
        views = [_bytes_of(one.into.reshape(-1).view(np.uint8)) for one in wanted]
        ranges = [layout.ranges(one.box) for one in wanted]
        if not sum(map(len, ranges)):
            return
        begins = np.concatenate(ranges)
        sizes = np.repeat([layout.range_bytes(one.box) for one in wanted], list(map(len, ranges)))
        whose = np.repeat(np.arange(len(wanted)), list(map(len, ranges)))
        places = np.concatenate([np.arange(len(of)) for of in ranges]) * sizes
        order = np.argsort(begins, kind="stable")
        gaps = np.flatnonzero(begins[order][1:] != (begins + sizes)[order][:-1]) + 1
        rows = list(zip(*(one[order].tolist() for one in (whose, places, sizes)), strict=True))
        bounds = [0, *gaps.tolist(), len(rows)]
        for start, end in pairwise(bounds):
            for i in range(start, end, _MOST_BUFFERS):
                buffers = [
                    views[view][at : at + size]
                    for view, at, size in rows[i : min(end, i + _MOST_BUFFERS)]
                ]
                self._read(array.file, file, int(begins[order[i]]), buffers)

    def _fill_staged(
        self,
        array: StoredArray,
        file: io.BufferedReader,
        layout: _Layout,
        box: Box,
        together: Sequence[WantedBytes],
    ) -> None:
        item_bytes = layout.dtype.itemsize
        staging = self._staging()
        for part in _chunks(box, item_bytes):
            shape = box_shape(part)
            rows = staging[: prod(shape) * item_bytes]
            view, size = _bytes_of(rows), layout.range_bytes(part)
            for i, begin in enumerate(layout.ranges(part).tolist()):
                self._read(array.file, file, begin, [view[i * size : (i + 1) * size]])
            values = rows.view(layout.dtype).reshape(shape)
            for one in together:
                common = tuple(
                    (max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, one.box, strict=True)
                )
                if all(a < b for a, b in common):
                    copy_values(values[_slices(common, part)], one.into[_slices(common, one.box)])

    def _staging(self) -> npt.NDArray[np.uint8]:
        """The thread's own rows: memory that is new costs more than a copy."""
        if not hasattr(self._of_thread, "staging"):
            self._of_thread.staging = np.empty(STAGING, np.uint8)
        return self._of_thread.staging  # type: ignore[no-any-return]

    def _read(
        self, stored: StoredFile, file: io.BufferedReader, begin: int, buffers: list[memoryview]
    ) -> None:
        """Fills the buffers in turn."""
        at, left = begin, list(buffers)
        try:
            while left:
                count = _read_at(file, at, left)
                if not count:
                    raise _changed(stored)
                at += count
                left = _after(left, count)
        except OSError as error:
            raise FileError(
                f"{stored.path}: byte {at:,}: {error.strerror or error}; "
                "check the disk, and copy or download the file again"
            ) from None
        with self._lock:
            self.bytes_read += at - begin

    @contextmanager
    def _file(self, stored: StoredFile) -> Iterator[io.BufferedReader]:
        """The file, which stays open meanwhile."""
        with self._lock:
            found = self._files.get(stored)
            if found is None:
                self._close_one()
                found = self._files[stored] = _OpenFile(stored)
                _check_unchanged(stored, found.file)
            self._files.move_to_end(stored)
            found.users += 1
        try:
            yield found.file
        finally:
            with self._lock:
                found.users -= 1

    def _close_one(self) -> None:
        """Closes the file that was used longest ago, if there are too many."""
        if len(self._files) < _MOST_FILES:
            return
        idle = next((one for one, file in self._files.items() if not file.users), None)
        if idle is not None:
            self._files.pop(idle).close(is_checked=True)


def _bytes_of(array: Any) -> memoryview:
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
    """What is left of the buffers after this many bytes."""
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


class _Layout:
    """Where the elements of a stored array are, in row-major order."""

    def __init__(self, array: StoredArray) -> None:
        self.dtype = numpy_dtype(array.dtype)
        self._array = array
        strides = [self.dtype.itemsize]
        for size in array.shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        self._strides = strides[: len(array.shape)]

    def is_direct(self, wanted: WantedBytes) -> bool:
        """Whether the bytes lie in the result as in the file."""
        return wanted.into.dtype == self.dtype and wanted.into.flags.c_contiguous

    def _whole_after(self, box: Box) -> int:
        """The last dimension of which the box has a part only; those after it are whole."""
        shape = self._array.shape
        parts = (dim for dim in range(len(shape)) if box[dim] != (0, shape[dim]))
        return max(parts, default=0)

    def range_bytes(self, box: Box) -> int:
        """The bytes of each contiguous range of the box."""
        if not box:
            return self.dtype.itemsize
        last = self._whole_after(box)
        return (box[last][1] - box[last][0]) * self._strides[last]

    def ranges(self, box: Box) -> npt.NDArray[np.int64]:
        """The offset in the file of each contiguous range of the box, in order."""
        places = np.array([self._array.begin], np.int64)
        if not box:
            return places
        if not prod(box_shape(box)):
            return places[:0]
        last = self._whole_after(box)
        for (first, after), stride in zip(box[:last], self._strides, strict=False):
            places = (places[:, None] + np.arange(first, after) * stride).reshape(-1)
        return places + box[last][0] * self._strides[last]


def copy_values(values: npt.NDArray[Any], into: npt.NDArray[Any]) -> None:
    """Copies, and converts where the dtypes differ.

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
    """The largest value of a floating dtype."""
    import ml_dtypes

    finfo: Any = ml_dtypes.finfo
    return float(finfo(dtype).max) if is_inexact(dtype) and dtype.kind != "c" else None


def _chunks(box: Box, item_bytes: int) -> Iterator[Box]:
    """Parts of the box, in order, with at most `STAGING` bytes each."""
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


def _slices(box: Box, of: Box) -> Any:
    """The box as an index of an array that has the values of another box; it gives a view."""
    return (*(slice(a - c, b - c) for (a, b), (c, _) in zip(box, of, strict=True)), ...)


def _hulls(wanted: Sequence[WantedBytes]) -> Iterator[tuple[Box, list[WantedBytes]]]:
    """Boxes to read, and what is wanted of each; boxes of the same rows that fill one are one."""
    of_rows: dict[Any, list[WantedBytes]] = defaultdict(list)
    for one in wanted:
        if prod(box_shape(one.box)):
            of_rows[one.box[:1]].append(one)
    for together in of_rows.values():
        distinct = {one.box for one in together}
        hull = tuple(
            (min(a for a, _ in spans), max(b for _, b in spans))
            for spans in zip(*distinct, strict=True)
        )
        filled = sum(prod(box_shape(box)) for box in distinct)
        if filled == prod(box_shape(hull)):
            yield hull, together
        else:
            for box in distinct:
                yield box, [one for one in together if one.box == box]
