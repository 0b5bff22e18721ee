"""Checks of arguments of public functions; the errors name the parameter.

A check costs an `isinstance` or two, and nothing for each leaf of a tree. The axis sizes of a
mesh are parsed here, too, and their bounds checked.
"""

from __future__ import annotations

import functools
import operator
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from math import inf, isqrt, prod
from numbers import Real
from types import UnionType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from shardrules._base.text import brief, byte_count, shown, with_article

MOST: Final = 2**63 - 1
"""The largest number that the core and numpy's int64 hold."""

_LEAST_MEMORY: Final = 1024
"""Bytes that every device has; less is a number of gigabytes."""


def check_type(name: str, value: object, types: type | UnionType, what: str) -> None:
    """Check that the value is of one of the types; `what` says in the message what it must be."""
    if not isinstance(value, types):
        raise TypeError(f"{name} is {shown(value)}; it must be {what}")


def check_choice(name: str, choice: object, choices: tuple[object, ...]) -> None:
    # What cannot be hashed may have an == that gives no bool, as arrays have.
    if not isinstance(choice, Hashable) or choice not in choices:
        names = ", ".join(map(repr, choices))
        raise ValueError(f"{name} is {brief(choice)}; it must be one of {names}")


_TYPES: Final = {str: "a string", str | None: "a string or None"}


def check_fields(record: Any) -> None:
    """Check fields of a dataclass: those whose annotation is a Literal, a class, or str | None."""
    choices_of, types_of = _fields_of(record.__class__)
    for name, choices in choices_of.items():
        value = getattr(record, name)
        if type(value) is not str or value not in choices:
            check_choice(name, value, choices)
    for name, types in types_of.items():
        value = getattr(record, name)
        if not isinstance(value, types):
            check_type(name, value, types, _TYPES.get(types) or with_article(types.__name__))


@functools.cache
def _fields_of(record_type: type) -> tuple[dict[str, tuple[object, ...]], dict[str, Any]]:
    hints = get_type_hints(record_type)
    choices = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    types = {
        name: hint
        for name, hint in hints.items()
        if hint in _TYPES or (isinstance(hint, type) and hint is not bool)
    }
    return choices, types


def boolean(name: str, value: object) -> bool:
    """Return the value, a bool of Python or numpy, as Python's."""
    if not isinstance(value, Hashable) or value not in (True, False):
        raise TypeError(f"{name} is {shown(value)}; it must be True or False")
    return bool(value)


def integer(name: str, value: Any, least: int = 0, most: int = MOST, what: str = "") -> int:
    """Return the value, an integer of Python or numpy, as an int."""
    needed = what or "an integer"
    asked: Any = None if isinstance(value, bool) else value
    try:
        number = operator.index(asked)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}; it must be {needed}") from None
    if not least <= number <= most:
        largest = "2**63 - 1" if most == MOST else f"{most:,}"
        raise ValueError(
            f"{name} is {shown(number)}; it must be {needed} from {least} to {largest}"
        )
    return number


def check_real(name: str, value: object) -> None:
    """Check that the value is a real number, which others can be compared with."""
    check_type(name, value, Real, "a number")


def check_share(name: str, value: Any, example: str) -> None:
    """Check that the value is a part of something: a finite number that is not negative."""
    check_real(name, value)
    if isinstance(value, bool) or not 0 <= value < inf:
        raise ValueError(f"{name} is {value}; it must be a share such as {example}")


def byte_size(name: str, value: Any) -> int:
    """Return bytes that are given as a number or a text such as "95GB"."""
    if isinstance(value, str):
        text = value.strip()
        if text.isdecimal() and 0 < int(text) < _LEAST_MEMORY:
            raise ValueError(f"{name} is {value!r}: a unit is missing; write '{text}GB'")
        try:
            value = byte_count(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    check_type(name, value, Real, "a number of bytes, such as 95e9 or '95GB'")
    if isinstance(value, bool) or not 0 <= value < inf:
        raise ValueError(
            f"{name} is {shown(value)}; it must be a number of bytes, such as 95e9 or '95GB'"
        )
    return int(value)


def hbm_bytes(hbm: float | str | None) -> int | None:
    """Return bytes of memory; less than a device has is told as what does not fit."""
    return None if hbm is None else byte_size("hbm", hbm)


def memory_bytes(name: str, value: Any) -> int:
    """Return the bytes of a device's memory, of which each has a thousand."""
    count = byte_size(name, value)
    if count < _LEAST_MEMORY:
        raise ValueError(
            f"{name} is {value!r}: that is {count} bytes; write {count}e9, or '{count}GB'"
        )
    return count


def check_file(name: str, value: object) -> None:
    check_type(name, value, str | os.PathLike | None, "the path of a file")


def strings(name: str, value: Any) -> tuple[str, ...]:
    """Return a sequence of strings, as a tuple; a single string is refused."""
    return check_items(name, as_tuple(name, value, "strings"), str, "a string")


def as_tuple(name: str, value: Any, what: str) -> tuple[Any, ...]:
    """Return the items of an iterable, as a tuple. A string or a mapping is refused."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        is_item = isinstance(value, str) and what.startswith(("strings", "patterns", "words"))
        hint = f": write [{brief(value)}]" if is_item else ""
        raise TypeError(f"{name} is {shown(value)}; it must be a sequence of {what}{hint}")
    return tuple(value)


def check_items(
    name: str, values: tuple[Any, ...], types: type | UnionType, what: str
) -> tuple[Any, ...]:
    """Check that each value is of one of the types; return them."""
    for position, value in enumerate(values):
        if not isinstance(value, types):
            check_type(f"{name}[{position}]", value, types, what)
    return values


def checked_shape(name: str, value: Any) -> tuple[Any, ...]:
    """Return a shape, as a tuple. Symbolic dimensions and the like are for the caller to check."""
    shape = as_tuple(name, value, "integers")
    for position, size in enumerate(shape):
        if isinstance(size, int | float | str | bytes | None):
            integer(f"{name}[{position}]", size)
    return shape


# A plan has a number for each device: 128 MB for this many. Real meshes have 10,000s of devices.
_MOST_DEVICES: Final = 2**24
# NumPy 1's arrays have no more dimensions, and a mesh is an array of devices.
_MOST_AXES: Final = 32
_AXIS: Final = re.compile(r"\s*(?P<name>[^=\s]+)\s*=\s*(?P<size>\S+)\s*")
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,1000}")
_SIZED: Final = re.compile(r"([^\W\d]\w*)\s*[=:]\s*([0-9]+)(?![\w.])")


def parse_mesh(text: str) -> dict[str, int]:
    """{axis: size}, in the order of the text."""
    if not text.strip():
        raise ValueError("the mesh is empty; write its axes as dp=8,tp=4")
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis = _AXIS.fullmatch(part)
        if axis is None:
            raise ValueError(
                f"mesh {text!r}: {part!r} is not an axis; write {_mesh_meant(text) or 'it as tp=4'}"
            )
        name = axis["name"]
        if name in sizes:
            raise ValueError(f"mesh {text!r}: axis {name!r} is there twice; rename or remove one")
        if not _INTEGER.fullmatch(axis["size"]):
            raise ValueError(
                f"mesh {text!r}: the size of {name!r} is not an integer; write "
                f"{_mesh_meant(text) or f'{name}=4'}"
            )
        sizes[name] = int(axis["size"])
    try:
        return checked_sizes(sizes)
    except ValueError as error:
        raise ValueError(f"mesh {text!r}: {error}") from None


def _mesh_meant(text: str) -> str:
    """Return the mesh of a text with other marks between its parts; "" if a size is missing."""
    sizes = _SIZED.findall(text)
    return ",".join(map("=".join, sizes)) if len(sizes) > text.count(",") else ""


def checked_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Devices per axis, as a new dict."""
    if not sizes:
        raise ValueError("a mesh without axes; write them as {'fsdp': 8, 'tp': 4}")
    checked = {}
    for name, size in sizes.items():
        if not isinstance(name, str):
            check_type("the name of a mesh axis", name, str, "a string")
        is_plain = type(size) is int and 0 < size <= MOST
        checked[name] = (
            size if is_plain else integer(f"the size of the mesh axis {brief(name)}", size, 1)
        )
    check_bounds(checked)
    return checked


def check_bounds(sizes: Mapping[str, int]) -> None:
    """Check that a mesh has at most 32 axes and 2**24 devices."""
    if len(sizes) > _MOST_AXES:
        raise ValueError(
            f"a mesh of {len(sizes):,} axes; it can have at most {_MOST_AXES}: leave out axes of "
            "size 1"
        )
    devices = prod(sizes.values())
    if devices > _MOST_DEVICES:
        raise ValueError(
            f"a mesh of {brief(devices)} devices; it can have at most {_MOST_DEVICES:,}: "
            "make an axis smaller"
        )


def mesh_shapes(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield all sizes of so many axes whose product is the count, the smallest first."""
    if axes == 0:
        yield from [()] if count == 1 else []
        return
    if axes == 1:
        yield (count,)
        return
    small = [size for size in range(1, isqrt(count) + 1) if count % size == 0]
    for size in sorted({*small, *(count // size for size in small)}):
        yield from ((size, *rest) for rest in mesh_shapes(count // size, axes - 1))
