"""Axis sizes of a mesh, from text or a dict, and the bounds that every mesh must keep."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isqrt, prod
from typing import Final

from shardrules._base.arguments import check_type, integer
from shardrules._base.text import brief

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
        check_type("the name of a mesh axis", name, str, "a string")
        checked[name] = integer(f"the size of the mesh axis {brief(name)}", size, 1)
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
