"""How values are said in messages and tables: bytes, counts, meshes, whatever was passed.

Each idea has one wording, here. Must not know what a message is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["and_more", "bytes_shown", "check_choice", "counted", "mesh_shown", "nearest", "shown"]

_NEAR: Final = 0.7
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def shown(value: object) -> str:
    """A value and its type, short enough for an error message."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} (a {type(value).__name__})"


def check_choice(name: str, choice: object, choices: tuple[object, ...]) -> None:
    """That it is one of the choices.

    Raises:
        ValueError: It is not; the message lists them.
    """
    if choice not in choices:
        raise ValueError(f"{name} is {choice!r}; it must be one of {', '.join(map(repr, choices))}")


def bytes_shown(count: int) -> str:
    """Bytes in powers of 1000: 0 B, 999 B, 1.50 kB, 29.4 MB."""
    size, unit = float(count), 0
    while abs(size) >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if unit == 0 else max(0, 2 - len(str(int(abs(size)))) + 1)
    return f"{size:.{digits}f} {_UNITS[unit]}"


def counted(count: int, what: str) -> str:
    """`1 leaf`, `2,000 large leaves`: the last word in the plural."""
    *before, noun = what.split(" ")
    irregular = {"leaf": "leaves", "axis": "axes", "mesh": "meshes"}
    plural = noun if count == 1 else irregular.get(noun, noun + "s")
    return f"{count:,} {' '.join([*before, plural])}"


def and_more(count: int, told: int, what: str) -> list[str]:
    """The line after the first `told` of `count` things; none if that is all of them."""
    return [f"... and {counted(count - told, f'more {what}')}"] if count > told else []


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of these names that was probably meant; None if none is near enough.

    Two letters swapped, or a name that begins with the other, are near; `sp` and `tp` are not.
    """
    from difflib import SequenceMatcher

    def nearness(other: str) -> float:
        a, b = name.lower(), other.lower()
        if sorted(a) == sorted(b):
            return 1.0
        return 0.9 if a.startswith(b) or b.startswith(a) else SequenceMatcher(None, a, b).ratio()

    near = max(names, key=nearness, default=None)
    return near if name and near is not None and nearness(near) >= _NEAR else None


def mesh_shown(axis_sizes: Mapping[str, int]) -> str:
    """As it is written on the command line: dp=8,tp=4."""
    return ",".join(f"{axis}={size}" for axis, size in axis_sizes.items())
