"""The text of a mesh, as in `dp=8,fsdp=16,tp=4`. Costs nothing. Must not know about devices."""

from __future__ import annotations

import re
from math import prod
from typing import Final

__all__ = ["parse_mesh"]

_MOST_DEVICES: Final = 2**31 - 1
_AXIS: Final = re.compile(r"\s*(?P<name>[^=\s]+)\s*=\s*(?P<size>\S+)\s*")
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,1000}")


def parse_mesh(text: str) -> dict[str, int]:
    """{axis: size}, in the order of the text.

    Args:
        text: As `dp=8,fsdp=16,tp=4`.

    Raises:
        ValueError: It is not of that form, an axis is there twice, or the sizes are not those of a
            mesh.
    """
    if not text.strip():
        raise ValueError("the mesh is empty; write its axes as dp=8,tp=4")
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis = _AXIS.fullmatch(part)
        if axis is None:
            raise ValueError(f"mesh {text!r}: {part!r} is no axis; write its name and size as tp=4")
        name = axis["name"]
        if name in sizes:
            raise ValueError(f"mesh {text!r}: axis {name!r} is there twice; rename or remove one")
        if not _INTEGER.fullmatch(axis["size"]):
            raise ValueError(f"mesh {text!r}: the size of {name!r} is no integer; write {name}=4")
        sizes[name] = int(axis["size"])
        if sizes[name] < 1:
            raise ValueError(f"mesh {text!r}: the size of {name!r} is below 1, which is the least")
    if prod(sizes.values()) > _MOST_DEVICES:
        raise ValueError(
            f"mesh {text!r}: the product of the sizes overflows 2**31 - 1 devices; make it smaller"
        )
    return sizes
