"""`ArraySpec`, the leaf that stands for an array in a file, and the checks that make one."""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from shardrules._base.arguments import MOST
from shardrules._base.dtypes import numpy_name
from shardrules._base.io import FileError, first_repeated
from shardrules._base.text import brief, shown
from shardrules._plan.files.remote import RemoteFile


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


_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")


def check_text(path: Path, words: Sequence[str], what: str) -> None:
    """Check that each word can be encoded, since JSON can escape half a surrogate pair."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        word = next(filter(_HALF_PAIR.search, words))
        raise FileError(
            f"{path}: {what} {word!r} has half a surrogate pair in its name; rename it"
        ) from None


# The second for half a surrogate pair in the name of a field.
_WRONG: Final = (msgspec.ValidationError, UnicodeEncodeError)


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
