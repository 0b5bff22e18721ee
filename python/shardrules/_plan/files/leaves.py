"""`ArraySpec`, the leaf that stands for an array in a file, and the files of stores.

Stores such as gs, s3 and hf are read through fsspec, which asks again for what fails.
"""

from __future__ import annotations

import functools
import io
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import msgspec

from shardrules._base.arguments import MOST
from shardrules._base.dtypes import numpy_name
from shardrules._base.io import FileError, first_repeated
from shardrules._base.text import brief, shown

_CHECK: Final = "check the URL, your credentials and the connection"
_INSTALL: Final = (
    "pip install fsspec, and for gs:// gcsfs, for s3:// s3fs, for hf:// huggingface_hub"
)


@dataclass(frozen=True, order=True)
class RemotePath:
    """A URL, with the questions that are asked of a `Path`."""

    url: str

    def __str__(self) -> str:
        return self._without_secrets(self.url)

    def _without_secrets(self, text: str) -> str:
        """Return a text without this URL's password, and its query, where signatures are."""
        place, mark, query = self.url.partition("?")
        # hf://organization/model@revision has no user.
        user, at, _ = place.partition("://")[2].partition("/")[0].rpartition("@")
        return text.replace(mark + query, "").replace(user + at, "")

    @property
    def name(self) -> str:
        return PurePosixPath(str(self)).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(str(self)).suffix

    def with_name(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/').rpartition('/')[0]}/{name}")

    def is_file(self) -> bool:
        return self._type == "file"

    def is_dir(self) -> bool:
        return self._type == "directory"

    @cached_property
    def _type(self) -> object:
        with self.asked() as (store, place):
            try:
                return store.info(place)["type"]
            except FileNotFoundError:
                return None

    def state(self) -> tuple[int, int, int, int]:
        """Ask for the size and version of the file, as `StoredFile` has them."""
        with self.asked() as (store, place):
            store.invalidate_cache()
            size, version = store.info(place)["size"], store.ukey(place)
        return 0, 0, int(size), zlib.crc32(str(version).encode())

    def iterdir(self) -> list[RemotePath]:
        with self.asked() as (store, place):
            names = store.ls(place, detail=False)
        return [RemotePath(f"{self.url.rstrip('/')}/{PurePosixPath(name).name}") for name in names]

    def opened(self) -> RemoteFile:
        return RemoteFile(self)

    @contextmanager
    def asked(self) -> Iterator[tuple[Any, str]]:
        """Yield fsspec's store and the place in it; what goes wrong there is a FileError."""
        try:
            from fsspec.core import url_to_fs

            yield url_to_fs(self.url)
        except Exception as error:
            fix = _INSTALL if isinstance(error, ImportError) else _CHECK
            words = self._without_secrets(f"{type(error).__name__}: {error}")
            raise FileError(f"{self}: {words}; {fix}") from error


class RemoteFile(io.RawIOBase):
    """A file that is read in ranges; its `state` is that of a `StoredFile`."""

    def __init__(self, path: RemotePath) -> None:
        self.path, self.state, self._at = path, path.state(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self.state[2])
        data = self.ranges([self._at], [end])[0] if end > self._at else b""
        buffer[: len(data)] = data
        self._at = end
        return len(data)

    def ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Read these ranges at once."""
        with self.path.asked() as (store, place):
            parts: list[Any] = store.cat_ranges([place] * len(begins), begins, ends)
            for begin, end, part in zip(begins, ends, parts, strict=True):
                if isinstance(part, Exception):
                    raise part
                if len(part) != end - begin:
                    raise OSError(f"byte {begin:,}: {len(part):,} of {end - begin:,} bytes came")
        return parts


_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")
# The second for half a surrogate pair in the name of a field.
_WRONG: Final = (msgspec.ValidationError, UnicodeEncodeError)


class StoredFile(NamedTuple):
    """A file as it was when its header was read."""

    path: Path
    state: tuple[int, int, int, int]
    """Its device, inode, bytes, and time of the last change in nanoseconds."""


def state_of(file: io.BufferedReader) -> tuple[int, int, int, int]:
    """Return the `state` of a `StoredFile` from the open file."""
    if isinstance(file.raw, RemoteFile):
        return file.raw.path.state()
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of an array. Not a tuple, which JAX would treat as a node of a tree.

    Args:
        shape: The dimensions.
        dtype: The name of the dtype in numpy or ml_dtypes.
        file: The file that has its bytes in row-major order, where they are to be read.
        begin: The offset of its first byte in the file.
    """

    shape: tuple[int, ...]
    dtype: str
    file: StoredFile | None = field(default=None, repr=False)
    begin: int = field(default=0, repr=False)


@functools.lru_cache(maxsize=1 << 16)
def array_spec(shape: tuple[int, ...], dtype: str) -> ArraySpec:
    """Check and return a leaf without a file. Equal ones are one object, which plans need once."""
    if min(shape, default=0) < 0:
        raise ValueError(f"the shape {brief([*shape])} has a negative dimension; 0 is the least")
    count = 1
    for size in shape:  # 0 counts as 1, as in numpy; and the product does not get long
        count *= size or 1
        if count > MOST:
            raise ValueError(
                f"the shape {brief([*shape])} has more than 2**63 - 1 elements; correct it"
            )
    name = numpy_name(dtype)
    return ArraySpec(shape, name) if name == dtype else array_spec(shape, name)


def leaves_of(path: Path, rows: Sequence[tuple[str, tuple[int, ...], str]]) -> dict[str, ArraySpec]:
    """Return {name: leaf} of the rows (name, shape, dtype) of a file."""
    check_text(path, [name for name, _, _ in rows], "array")
    leaves: dict[str, ArraySpec] = {}
    for name, shape, dtype in rows:
        try:
            leaves[name] = array_spec(shape, dtype)
        except ValueError as error:
            raise FileError(f"{path}: array {name!r}: {error}") from None
    if len(leaves) < len(rows):
        name = first_repeated([name for name, _, _ in rows])
        raise FileError(f"{path}: array {name!r} is there twice; rename or remove one")
    return leaves


def check_text(path: Path, words: Sequence[str], what: str) -> None:
    """Check that each word can be encoded, since JSON can escape half a surrogate pair."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        word = next(filter(_HALF_PAIR.search, words))
        raise FileError(
            f"{path}: {what} {word!r} has half a surrogate pair in its name; rename it"
        ) from None


def converted(
    path: Path, values: Sequence[Any], kind: Any, name_of: Callable[[int], str], fix: str
) -> list[Any]:
    """Convert values of JSON to this type; an error names the first that is not of it."""
    try:
        return msgspec.convert(values, list[kind])
    except _WRONG:
        for index, value in enumerate(values):
            try:
                msgspec.convert(value, kind)
            except _WRONG as error:
                raise FileError(
                    f"{path}: {name_of(index)}: {error}: it is {shown(value)}; {fix}"
                ) from None
        raise
