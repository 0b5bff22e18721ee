"""Ranges of bytes of files, read into memory: each file as it was when its header was read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules import _core
from shardrules._base.io import FileError, opened
from shardrules._checkpoint.conversion import numpy_dtype
from shardrules._plan.files.leaves import ArraySpec, RemoteFile, StoredFile, state_of

if TYPE_CHECKING:
    import io

    import numpy.typing as npt

GAP: Final = 4 << 10
"""Bytes between two ranges that are read along: less than what a call of the system takes."""
SHARE: Final = 16 << 20
"""Bytes that are read at once."""
# The gap of files of other machines, where a request takes milliseconds.
_REMOTE_GAP: Final = 256 << 10
_SAMPLE: Final = 64
_seeking: Final = threading.Lock()


class Ranges(NamedTuple):
    """Ranges of bytes in a file, and where in memory they go."""

    begins: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    def part(self, index: Any) -> Ranges:
        """Return some of them."""
        return Ranges(*(column[index] for column in self))

    def in_order(self) -> Ranges:
        """Return them in the order of the file, neighbours as one."""
        is_sorted = (np.diff(self.begins) >= 0).all()
        ranges = self if is_sorted else self.part(np.argsort(self.begins, kind="stable"))
        begins, sizes, places = ranges
        is_next = (np.diff(begins) == sizes[:-1]) & (np.diff(places) == sizes[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~is_next]))
        return Ranges(begins[first], np.add.reduceat(sizes, first), places[first])

    def shares(self) -> Iterator[Ranges]:
        """Yield them in parts of about `SHARE` bytes; long ones are cut."""
        ranges = self
        if int(ranges.sizes.max()) > SHARE:
            cuts = -(-ranges.sizes // SHARE)
            ranges = ranges.part(np.repeat(np.arange(len(cuts)), cuts))
            at = (np.arange(len(ranges.begins)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * SHARE
            sizes = np.minimum(ranges.sizes - at, SHARE)
            ranges = Ranges(ranges.begins + at, sizes, ranges.places + at)
        share = (np.cumsum(ranges.sizes) - 1) // SHARE
        ends = np.flatnonzero(np.diff(share)) + 1
        for begin, end in pairwise([0, *ends.tolist(), len(share)]):
            yield ranges.part(slice(begin, end))


# Not on Windows.
_native: Callable[..., tuple[int, int]] | None = getattr(_core, "read_ranges", None)


class Reader:
    """Open files; for several threads. A context manager that checks the files at its end.

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with self._closing:
            for stored, file in self._files.items() if error is None else ():
                _check_unchanged(stored, file)

    def sample(self, name: str) -> bytes:
        """Read some bytes in the middle of an array."""
        array = self.arrays[name]
        size = numpy_dtype(array.dtype).itemsize * prod(array.shape)
        data = np.empty(min(size, _SAMPLE), np.uint8)
        begin = array.begin + (size - len(data)) // 2
        if len(data) and array.file is not None:
            self.read(array.file, Ranges(*(np.array([n]) for n in (begin, len(data), 0))), data)
        return data.tobytes()

    def read(self, stored: StoredFile, ranges: Ranges, memory: npt.NDArray[np.uint8]) -> None:
        """Read ranges, which are in the order of the file."""
        at, code = int(ranges.begins[0]), 0
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
            file = self._files.get(stored)
            if file is None:
                file = self._closing.enter_context(opened(stored.path))
                _check_unchanged(stored, file)
                self._files[stored] = file
            return file


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
    spans: list[slice] = []
    first = 0
    for i in range(1, len(begins) + 1):
        is_near = (
            i < len(begins)
            and begins[i] - ends[i - 1] <= _REMOTE_GAP
            and ends[i] - begins[first] <= SHARE
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
