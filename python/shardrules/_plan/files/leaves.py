"""`ArraySpec`, the leaf that stands for an array in a file, and checks of columns of arrays."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardrules._base.arguments import MOST
from shardrules._base.dtypes import numpy_name
from shardrules._base.io import FileError, first_repeated
from shardrules._base.text import brief, shown
from shardrules._plan.files.remote import RemoteFile

_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")
_ODD_SHAPE: Final = "needs a shape that is a list of integers"


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


class ArraySpecs(dict[tuple[tuple[int, ...], str], ArraySpec]):
    """{(shape, dtype): leaf} of one model, which may have several files.

    A leaf is made and checked when it is first looked up. Equal leaves are one object. Each column
    is checked as a whole, and searched for its invalid entry only after a check has failed.

    Args:
        keeps_places: Whether leaves say where their bytes are, if the file has them.
    """

    __slots__ = ("keeps_places",)

    def __init__(self, *, keeps_places: bool = False) -> None:
        super().__init__()
        self.keeps_places = keeps_places

    def __missing__(self, key: tuple[tuple[int, ...], str]) -> ArraySpec:
        shape, dtype = key
        if min(shape, default=0) < 0:
            raise ValueError(
                f"the shape {brief([*shape])} has a negative dimension; 0 is the least"
            )
        if _is_too_large(shape):
            raise ValueError(
                f"the shape {brief([*shape])} has more than 2**63 - 1 elements; correct the shape"
            )
        name = numpy_name(dtype)
        leaf = ArraySpec(shape, name) if name == dtype else self[shape, name]
        self[key] = leaf
        return leaf

    def of_columns(
        self, path: Path, names: Sequence[Any], shapes: Sequence[Any], dtypes: Sequence[Any]
    ) -> dict[str, ArraySpec]:
        """Make {name: leaf} of the names, shapes and dtypes in a file."""
        check_column(path, names, names, str, "has no string as its name")
        check_text(path, names, "array")
        check_column(path, names, shapes, list, _ODD_SHAPE)
        check_column(path, names, dtypes, str, "needs a dtype that is a string")
        # By type, since True and 1.0 equal 1 in a look-up.
        if not all_are(int, chain.from_iterable(shapes)):
            _raise_first(path, names, shapes, lambda shape: all_are(int, shape), _ODD_SHAPE)
        keys = zip(map(tuple, shapes), dtypes, strict=True)
        try:
            leaves = dict(zip(names, map(self.__getitem__, keys), strict=True))
        except ValueError:
            raise self._first_error(path, names, shapes, dtypes) from None
        if len(leaves) < len(names):
            name = first_repeated(list(names))
            raise FileError(f"{path}: array {name!r} is there twice; rename or remove one")
        return leaves

    def _first_error(
        self, path: Path, names: Sequence[Any], shapes: Sequence[Any], dtypes: Sequence[Any]
    ) -> FileError:
        for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
            try:
                self[tuple(shape), dtype]
            except ValueError as error:
                return FileError(f"{path}: array {name!r}: {error}")
        raise AssertionError("no leaf has an error")


def _is_too_large(shape: tuple[int, ...]) -> bool:
    """Count dimensions of 0 as 1, as numpy does; stop before the product gets long."""
    count = 1
    for size in shape:
        count *= size or 1
        if count > MOST:
            return True
    return False


def all_are(kind: type, values: Iterable[object]) -> bool:
    """Check for exactly this type; a list counts faster than a set is made."""
    types = list(map(type, values))
    return types.count(kind) == len(types)


def check_column(
    path: Path, names: Sequence[Any], column: Sequence[Any], kind: type, needs: str
) -> None:
    """Check that all values have exactly this type."""
    if not all_are(kind, column):
        _raise_first(path, names, column, lambda value: type(value) is kind, needs)


def _raise_first(
    path: Path,
    names: Sequence[Any],
    column: Sequence[Any],
    is_fine: Callable[[Any], bool],
    needs: str,
) -> None:
    for name, value in zip(names, column, strict=True):
        if not is_fine(value):
            raise FileError(f"{path}: array {name!r} {needs}, not {shown(value)}")


def check_text(path: Path, words: Sequence[str], what: str) -> None:
    """Check that each word can be encoded, since JSON can escape half a surrogate pair."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        word = next(filter(_HALF_PAIR.search, words))
        raise FileError(
            f"{path}: {what} {word!r} has half a surrogate pair in its name; rename it"
        ) from None
