"""Numbers as people read them."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def bytes_shown(count: int) -> str:
    """Bytes in powers of 1000: 0 B, 999 B, 1.50 kB, 29.4 MB."""
    size, unit = float(count), 0
    while abs(size) >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if unit == 0 else max(0, 2 - len(str(int(abs(size)))) + 1)
    return f"{size:.{digits}f} {_UNITS[unit]}"


def counted(count: int, what: str) -> str:
    """`1 leaf`, `2,000 large leaves`: the plural of the last word in -s, or of leaf and axis."""
    *before, noun = what.split(" ")
    irregular = {"leaf": "leaves", "axis": "axes"}
    plural = noun if count == 1 else irregular.get(noun, noun + "s")
    return f"{count:,} {' '.join([*before, plural])}"
