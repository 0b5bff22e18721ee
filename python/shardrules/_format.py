"""How values are written in messages and tables: bytes, counts, meshes, and whatever was passed.

Each kind of value has one form, here. Must not know what a message is about.
"""

from __future__ import annotations

import re
import reprlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from shardrules._printable import printable

__all__ = [
    "Column",
    "Table",
    "and_more",
    "brief",
    "byte_count",
    "bytes_shown",
    "counted",
    "mesh_shown",
    "misspelt",
    "nearest",
    "seconds_shown",
    "shown",
    "with_article",
]

_NEAR: Final = 0.7
# Comparing takes the product of two lengths.
_COMPARED: Final = 100
_VOWELS: Final = ("a", "e", "i", "o", "A", "E", "I", "O", "nd")  # an ndarray
# Wider cells, such as names of a megabyte, stand out of their column: all others are not padded.
_WIDEST: Final = 200
# Of a path; a cell that is elided keeps so many characters.
_WORDS: Final = re.compile(r"[^/]*/|[^/]+")
_LEAST_CELL: Final = 24
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_BYTES_OF: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
                    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


class _Start(reprlib.Repr):
    """`repr` of the first items alone: a whole tree may be given where a word belongs."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 12
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write more than some thousand digits.
        return repr(x) if x.bit_length() < 250 else f"2**{x.bit_length() - 1} or so"


_start: Final = _Start()


class Column(NamedTuple):
    """Column of a table."""

    head: str
    is_right: bool = False
    is_elided: bool = False
    """Whether long cells lose their middle where lines must be narrow."""
    is_optional: bool = False
    """Whether it goes where lines must be narrow, the last one first."""


class Table:
    """Table of texts, as aligned lines or HTML."""

    def __init__(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        self.columns = [*columns]
        self.rows = [*rows]

    def lines(self) -> list[str]:
        """Returns the heads and a line for each row, in aligned columns."""
        widths = self._widths()
        return [
            "  ".join(
                text.rjust(width) if column.is_right else text.ljust(width)
                for text, column, width in zip(line, self.columns, widths, strict=True)
            ).rstrip()
            for line in ([column.head for column in self.columns], *self.rows)
        ]

    def html(self, caption: str, last: str = "") -> str:
        """Returns an HTML table, with a last line if there is one; texts are escaped."""
        from html import escape

        def line(tag: str, cells: Iterable[str]) -> str:
            marked = (f"<{tag}>{escape(printable(cell))}</{tag}>" for cell in cells)
            return f"<tr>{''.join(marked)}</tr>"

        body = "".join(line("td", row) for row in self.rows)
        if last:
            body += f'<tr><td colspan="{len(self.columns)}">{escape(printable(last))}</td></tr>'
        return (
            f"<table><caption>{escape(printable(caption))}</caption>"
            f"<thead>{line('th', (column.head for column in self.columns))}</thead>"
            f"<tbody>{body}</tbody></table>"
        )

    def narrow(self, width: int) -> Table:
        """Returns the table for lines of this width, without columns and middles that lack room."""
        columns, rows = self.columns, self.rows
        least = [
            min(size, _LEAST_CELL) if column.is_elided else size
            for column, size in zip(columns, self._widths(), strict=True)
        ]
        kept = [*range(len(columns))]
        for number in reversed(range(len(columns))):
            if columns[number].is_optional and _line_width(least[n] for n in kept) > width:
                kept.remove(number)
        for number in kept:
            if columns[number].is_elided:
                others = _line_width(least[n] for n in kept) - least[number]
                room = max(width - others, least[number])
                rows = [
                    [*row[:number], elided(row[number], room), *row[number + 1 :]] for row in rows
                ]
        return Table([columns[n] for n in kept], ([row[n] for n in kept] for row in rows))

    def _widths(self) -> list[int]:
        lines = ([column.head for column in self.columns], *self.rows)
        return [min(_WIDEST, max(map(len, cells))) for cells in zip(*lines, strict=True)]


def _line_width(widths: Iterable[int]) -> int:
    return sum(width + 2 for width in widths) - 2


def elided(text: str, width: int) -> str:
    """Returns a path without its middle, between two words where that is possible."""
    if len(text) <= width:
        return text
    room, start, end = width - 4, "", ""
    words = deque(_WORDS.findall(text))
    while words:
        free = room - len(start) - len(end)
        is_last = len(words[-1]) <= free and (len(end) <= len(start) or len(words[0]) > free)
        if not is_last and len(words[0]) > free:
            break
        start, end = (start, words.pop() + end) if is_last else (start + words.popleft(), end)
    if end:
        return f"{start}.../{end}"
    half = max(width - 3, 2) // 2  # a word is longer
    return f"{text[:half]}...{text[-half:]}"


def brief(value: object) -> str:
    """A value, short enough for an error message."""
    text = printable(" ".join(_start.repr(value).splitlines()))
    return text if len(text) <= 80 else f"{text[:77]}..."


def shown(value: object) -> str:
    """A value and its type, short enough for an error message."""
    return f"{brief(value)} ({with_article(type(value).__name__)})"


def with_article(name: str) -> str:
    """The name of a type as words have it: a dict, an int."""
    return f"{'an' if name.startswith(_VOWELS) else 'a'} {name}"


def bytes_shown(count: int) -> str:
    """Bytes in powers of 1000: 0 B, 999 B, 1.50 kB, 29.4 MB."""
    size, unit = float(count), 0
    while abs(size) >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if unit == 0 else max(0, 2 - len(str(int(abs(size)))) + 1)
    return f"{size:.{digits}f} {_UNITS[unit]}"


def seconds_shown(seconds: float) -> str:
    """Seconds with three digits: 0 s, 12.3 us, 4.56 ms, 1.20 s, 3,600 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size or unit == "us":
            count = seconds / size
            digits = 0 if count == 0 else max(0, 2 - len(str(int(count))) + 1)
            return f"{count:,.{digits}f} {unit}" if count else "0 s"
    raise AssertionError


def byte_count(text: str) -> int:
    """The number of bytes that a text such as 96GB, 80GiB or 1000000 means.

    Raises:
        ValueError: The text has another form, or the number is negative.
    """
    digits = text.strip().rstrip("BbKkMmGgTtIi ")
    unit = text.strip()[len(digits) :].strip().upper()
    try:
        count = int(float(digits) * _BYTES_OF["" if unit == "B" else unit])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a number of bytes; write it as 96GB or 80GiB") from None
    if count < 0:
        raise ValueError(f"{text!r} is negative; write a number of bytes, such as 96GB or 80GiB")
    return count


def counted(count: int, what: str) -> str:
    """`1 leaf`, `2,000 large leaves`: the last word in the plural."""
    *before, noun = what.split(" ")
    irregular = {
        "leaf": "leaves", "axis": "axes", "mesh": "meshes", "process": "processes",
        "entry": "entries",
    }  # fmt: skip
    plural = noun if count == 1 else irregular.get(noun, noun + "s")
    return f"{count:,} {' '.join([*before, plural])}"


def and_more(count: int, listed: int, what: str) -> list[str]:
    """The line after the first `listed` of `count` things; none if these are all of them."""
    return [f"... and {counted(count - listed, f'more {what}')}"] if count > listed else []


def misspelt(name: str, names: Iterable[str]) -> str | None:
    """The one of these names that this one is a misspelling of; None if none is near enough.

    Stricter than `nearest`: `exp` is no misspelling of `exp_with_fsdp`, nor `moe_layers` of
    `layers`.
    """
    from difflib import get_close_matches

    listed = [other[:_COMPARED] for other in names]
    swapped = (other for other in listed if sorted(other) == sorted(name))
    return next(swapped, None) or next(iter(get_close_matches(name, listed, 1, 0.85)), None)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of these names that was probably meant; None if none is near enough.

    Two letters swapped, or a name that begins with the other, are near; `sp` and `tp` are not.
    """
    from difflib import SequenceMatcher

    def nearness(other: str) -> float:
        a, b = (text[:_COMPARED].lower() for text in (name, other))
        if sorted(a) == sorted(b):
            return 1.0
        return 0.9 if a.startswith(b) or b.startswith(a) else SequenceMatcher(None, a, b).ratio()

    near = max(names, key=nearness, default=None)
    return near if name and near is not None and nearness(near) >= _NEAR else None


def mesh_shown(axis_sizes: Mapping[str, int]) -> str:
    """The mesh as the command line has it: dp=8,tp=4."""
    return ",".join(f"{axis}={size}" for axis, size in axis_sizes.items())
