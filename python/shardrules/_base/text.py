"""Texts for people: safe lines, counts, bytes and seconds, near names, and `repr`.

Names come from files, and files may come from anyone, so lines are made printable before they are
joined. A prompt calls `repr` for a value and for each item of a list, so a class is one of two
things: an answer, such as the findings of a check, shows its text; a record, such as a finding, is
a short line.
"""

from __future__ import annotations

import heapq
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

# GitHub's runner obeys ::name:: at the beginning of a line, after white space. It and the runners
# of Azure and TeamCity obey ##[name], ##vso[ and ##teamcity[ anywhere.
_COMMAND: Final = re.compile(r"^ *:(?=:)|#(?=#[\w.-]*\[)")


def printable(line: str) -> str:
    r"""Escape characters in a line that a terminal or a CI runner would act upon.

    These are characters for which `str.isprintable` is false (controls, line breaks, marks of
    direction and other formats, halves of surrogate pairs), and the first character of a command to
    a CI runner. They are written as \u001b.

    Example:
        >>> print(printable("a\x1b[2J\nb"), printable(r"layers/\d+/(wq|键)"))
        a\u001b[2J\u000ab layers/\d+/(wq|键)
        >>> print(printable("::error::x"), printable("##[error]x"))
        \u003a:error::x \u0023#[error]x
    """
    if not line.isprintable():
        line = "".join(c if c.isprintable() else _escaped_character(c) for c in line)
    return _COMMAND.sub(_without_command, line) if "::" in line or "##" in line else line


def printable_lines(lines: Iterable[str]) -> str:
    """Join lines after making each of them printable."""
    return "\n".join(map(printable, lines))


def printable_json(value: Any) -> str:
    """Return a value as indented JSON without commands to a CI runner.

    The JSON value is the same.
    """
    return re.sub("#(?=#)", r"\\u0023", json.dumps(value, indent=1))


def _without_command(match: re.Match[str]) -> str:
    return match[0][:-1] + _escaped_character(match[0][-1])


def _escaped_character(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_VOWELS: Final = ("a", "e", "i", "o", "A", "E", "I", "O", "nd")  # an ndarray
_WIDEST: Final = 200
"""Characters that are shown of a name, which may have a megabyte."""
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


def brief(value: object) -> str:
    """Return a value, short enough for an error message."""
    text = printable(" ".join(_start.repr(value).splitlines()))
    return text if len(text) <= 80 else f"{text[:77]}..."


def shown(value: object) -> str:
    """Return a value and its type, short enough for an error message."""
    return f"{brief(value)} ({with_article(type(value).__name__)})"


def with_article(name: str) -> str:
    """Return the name of a type as words have it: a dict, an int."""
    return f"{'an' if name.startswith(_VOWELS) else 'a'} {name}"


def bytes_shown(count: int) -> str:
    """Bytes in powers of 1000: 0 B, 999 B, 1.50 kB, 29.4 MB."""
    size, unit = float(count), 0
    while abs(size) >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if unit == 0 else max(0, 2 - len(str(int(abs(size)))) + 1)
    return f"{size:.{digits}f} {_UNITS[unit]}"


def seconds_shown(seconds: float) -> str:
    """Seconds with three digits: 0 s, 12.3 ns, 4.56 ms, 1.20 s, 3,600 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if seconds >= 0.9995 * size or unit == "ns":
            count = seconds / size
            digits = 0 if count == 0 else max(0, 2 - len(str(int(count))) + 1)
            return f"{count:,.{digits}f} {unit}" if count else "0 s"
    raise AssertionError


def byte_count(text: str) -> int:
    """Return the number of bytes that a text such as 96GB, 80GiB or 1000000 means."""
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


def and_more(count: int, count_shown: int, what: str) -> list[str]:
    """Return ["... and 12 more leaves"], or [] if all are shown."""
    more = f"more {what}"
    return [f"... and {counted(count - count_shown, more)}"] if count > count_shown else []


def mesh_shown(axis_sizes: Mapping[str, int]) -> str:
    """Return the mesh as the command line has it: dp=8,tp=4."""
    return ",".join([f"{axis}={size}" for axis, size in axis_sizes.items()])


# Comparing takes the product of two lengths, and the ends of paths tell more than their beginnings.
_COMPARED: Final = 100
# Of 10^5 names this many are compared in full, which takes some milliseconds.
_CANDIDATES: Final = 40
_PIECE: Final = 4
# A name that begins or ends like the one that was given is as near as this at most.
_PART: Final = 0.8
SLIP: Final = 0.85
"""The nearness of a name with a slip, from which parts of names are further away."""


def near_names(
    name: str, names: Iterable[str], least: float = 0.5, most: int = 3, part: float = _PART
) -> list[str]:
    """Return those of these names that were probably meant, the nearest first.

    Args:
        name: The name that is not there.
        names: Those that are.
        least: How near they must be, from 0 to 1. Two letters swapped, or other cases, are 1.
        most: How many to return.
        part: How near those are that begin or end with it.

    Example:
        >>> near_names("layers/0/mlp/kernl", ["layers/0/mlp/kernel", "embed", "layers/0/mlp/bias"])
        ['layers/0/mlp/kernel', 'layers/0/mlp/bias']
    """
    from difflib import SequenceMatcher

    meant = name[-_COMPARED:].lower()
    pieces = {meant[i : i + _PIECE] for i in range(0, len(meant), _PIECE)}
    matcher = SequenceMatcher(b=meant, autojunk=False)

    def ratio(text: str) -> float:
        matcher.set_seq1(text)
        return matcher.ratio()

    def nearness(candidate: str) -> tuple[float, float]:
        text = candidate[-_COMPARED:].lower()
        similarity = 1.0 if sorted(text) == sorted(meant) else ratio(text)
        begins = text.startswith(meant) or meant.startswith(text)
        return max(similarity, part * (1.0 if begins else ratio(text[-len(meant) :]))), similarity

    shared = {each: sum(map(each.lower().__contains__, pieces)) for each in names}
    likely = heapq.nlargest(_CANDIDATES, shared, key=shared.__getitem__)
    rated = heapq.nlargest(most, ((*nearness(each), each) for each in likely), itemgetter(0, 1))
    return [each for rating, _, each in rated if name and rating >= least]


def nearest(name: str, names: Iterable[str], least: float = 0.7) -> str | None:
    """Return the one of these names that was probably meant; None if none is near enough."""
    return next(iter(near_names(name, names, least, most=1)), None)


def near_shown(name: str, names: Iterable[str], least: float = 0.5) -> str:
    """Return "; near it: a, b" for an error message, or ""."""
    near = [printable(text) for text in near_names(name, names, least)]
    texts = [text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..." for text in near]
    return f"; near it: {', '.join(texts)}" if texts else ""


_T = TypeVar("_T")
# A screen or two: an answer may stand in a list after all.
_MOST_LINES: Final = 60
_FOLDED: Final = 12
"""From so many lines on, a text in a notebook is folded."""
_MOST_OF_LINE: Final = 2_000
MOST_HTML: Final = 200_000
"""Characters that a notebook gets of one value."""
_COLOUR_OF: Final = {
    **dict.fromkeys(("error", "does not fit", "DOES NOT FIT", "PROBLEM"), "#d32f2f"),
    "warning": "#b26a00",
    "info": "#1976d2",
    "fits": "#2e7d32",
}
_VERDICT: Final = re.compile(
    r"^(error|warning|info)(?=\[)|\b(fits|does not fit|DOES NOT FIT)\b|(?<=^  )PROBLEM\b"
)


def answer(cls: type[_T]) -> type[_T]:
    """Make `repr` and notebooks show the first lines of `str`; `print` shows all of them.

    A class with `_parts`, tables and texts, is shown by these.
    """
    if hasattr(cls, "_parts") and "__str__" not in vars(cls):
        cls.__str__ = _joined_parts  # type: ignore[method-assign]
    cls.__repr__ = _first_lines  # type: ignore[method-assign]
    cls._repr_html_ = _html  # type: ignore[attr-defined]
    return readable(cls)


def record(cls: type[_T]) -> type[_T]:
    """Make the `repr` of a NamedTuple one short line; notebooks show its text, if it has one."""
    cls.__repr__ = _record_line  # type: ignore[method-assign]
    if "__str__" in vars(cls):
        cls._repr_html_ = _html  # type: ignore[attr-defined]
    return readable(cls)


def without_defaults(self: Any) -> str:
    """Return the `repr` of a dataclass, without the fields that have their defaults."""
    named = ((field, getattr(self, field.name)) for field in fields(self))
    texts = (f"{field.name}={value!r}" for field, value in named if not _is_default(field, value))
    return f"{type(self).__name__}({', '.join(texts)})"


def _is_default(field: Field[Any], value: object) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return type(value) is type(default) and bool(value == default)


def _first_lines(self: object) -> str:
    lines = str(self).split("\n")
    rest = (f"{line}; print shows them" for line in and_more(len(lines), _MOST_LINES, "line"))
    return "\n".join([*lines[:_MOST_LINES], *rest])


def _record_line(self: Any) -> str:
    named = (f"{name}={brief(value)}" for name, value in zip(self._fields, self, strict=True))
    return f"{type(self).__name__}({', '.join(named)})"


def _joined_parts(self: Any) -> str:
    """Return the parts of an answer as lines."""
    parts: list[Any] = self._parts()
    return "\n".join(
        printable_lines(part.lines()) if hasattr(part, "html") else str(part) for part in parts
    )


def _html(self: Any) -> str:
    """Return the parts of an answer, tables and texts; texts of many lines are folded."""
    parts: list[Any] = self._parts() if hasattr(self, "_parts") else [str(self)]
    pages: list[str] = []
    for number, part in enumerate(parts):
        is_table = hasattr(part, "html")
        page = part.html(_MOST_LINES) if is_table else _text_html(str(part))
        if sum(map(len, pages)) + len(page) > MOST_HTML - 100:
            (rest,) = and_more(len(parts), number, "part")
            return "".join([*pages, f"<pre>{rest}; print shows them</pre>"])
        pages.append(page)
    return "".join(pages)


def _text_html(text: str) -> str:
    """Return a text with its first line as the head of the others, which can be folded."""
    head, *lines = text.split("\n")
    if not lines:
        return f"<pre>{coloured(head)}</pre>"
    most = _MOST_LINES - 1
    rest = [f"{line}; print shows them" for line in and_more(len(lines), most, "line")]
    body = "\n".join(map(coloured, [*lines[:most], *rest]))
    is_open = " open" if len(lines) < _FOLDED else ""
    summary = f"<summary><code>{coloured(head)}</code></summary>"
    return f"<details{is_open}>{summary}<pre>{body}</pre></details>"


def coloured(line: str) -> str:
    """Return a line as HTML, of at most some thousand characters, with its verdicts in colour."""
    from html import escape

    text = line if len(line) <= _MOST_OF_LINE else f"{line[:_MOST_OF_LINE]}..."
    return _VERDICT.sub(_marked, escape(text, quote=False))


def _marked(match: re.Match[str]) -> str:
    return f'<b style="color:{_COLOUR_OF[match[0]]}">{match[0]}</b>'


def readable(cls: type[_T]) -> type[_T]:
    # A NamedTuple's are ForwardRefs, which `help` would show as such.
    if hasattr(cls, "_fields"):
        plain = {n: getattr(a, "__forward_arg__", a) for n, a in cls.__annotations__.items()}
        cls.__annotations__ = cls.__new__.__annotations__ = plain
    return cls


@record
class Place(NamedTuple):
    """File and line of the user's program."""

    file: str
    line: int

    def __str__(self) -> str:
        file = Path(self.file)
        folder = Path.cwd()
        return f"{file.relative_to(folder) if file.is_relative_to(folder) else file}:{self.line}"
