"""`Table` of texts; `Answer`: rows with lines above and below, whose slices keep the lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Self, SupportsIndex, TypeVar, overload

from shardrules._base.text import (
    and_more,
    answer,
    coloured,
    printable,
    printable_json,
    printable_lines,
)

# Wider cells, such as names of a megabyte, stand out of their column: all others are not padded.
_WIDEST: Final = 200


class Column(NamedTuple):
    """Column of a table."""

    head: str
    is_right: bool = False


class Table:
    """Table of texts, as aligned lines or HTML."""

    def __init__(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        self.columns = [*columns]
        self.rows = [*rows]

    def lines(self) -> list[str]:
        """Return the heads and a line for each row, in aligned columns."""
        lines = [[column.head for column in self.columns], *self.rows]
        widths = [min(_WIDEST, max(map(len, cells))) for cells in zip(*lines, strict=True)]
        return [
            "  ".join(
                text.rjust(width) if column.is_right else text.ljust(width)
                for text, column, width in zip(line, self.columns, widths, strict=True)
            ).rstrip()
            for line in lines
        ]

    def html(self, most: int | None = None) -> str:
        """Return an HTML table of so many rows; texts are escaped."""

        def line(tag: str, cells: Iterable[str]) -> str:
            marked = (f"<{tag}>{coloured(printable(cell))}</{tag}>" for cell in cells)
            return f"<tr>{''.join(marked)}</tr>"

        rows = self.rows[:most]
        body = "".join(line("td", row) for row in rows)
        for rest in and_more(len(self.rows), len(rows), "row"):
            body += f'<tr><td colspan="{len(self.columns)}">{rest}; print shows them</td></tr>'
        head = line("th", (column.head for column in self.columns))
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


_Row = TypeVar("_Row")


class Section(NamedTuple):
    """A part of the page of a plan."""

    title: str
    parts: tuple[Any, ...]
    """Answers, of which it has what a notebook shows; tables and texts, which it has whole."""


@answer
class Answer(tuple[_Row, ...]):
    """Rows of an answer, with what is said of all of them.

    A subclass names its rows in JSON, makes a table of them, and says what stands above and below.
    Attributes of an answer are about all rows, and its slices have them too.

    Args:
        rows: The rows.
        about: The attributes.
    """

    _version: ClassVar[int] = 1
    """Of its JSON: another one where a key changes its meaning or goes."""
    _rows_key: ClassVar[str] = "rows"

    def __new__(cls, rows: Iterable[_Row] = (), **about: Any) -> Self:
        self = super().__new__(cls, rows)
        for name, value in about.items():
            setattr(self, name, value)
        return self

    @overload
    def __getitem__(self, index: SupportsIndex) -> _Row: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if isinstance(index, slice):  # about which the same is said
            part = tuple.__new__(type(self), part)
            part.__dict__.update(self.__dict__)
        return part

    @property
    def heading(self) -> str:
        """Lines above the rows; "" for none."""
        return ""

    @property
    def notes(self) -> list[str]:
        """Lines below the rows."""
        return []

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The rows by field, as libraries for data frames take them."""
        fields: tuple[str, ...] = getattr(self[0], "_fields", ()) if len(self) else ()
        return {name: [getattr(row, name) for row in self] for name in fields}

    def to_json(self) -> str:
        """Return a JSON object: its version, what is said of all rows, and the rows."""
        rows = list(map(self._row_json, self))
        return printable_json({"version": self._version, **self._json(), self._rows_key: rows})

    def _json(self) -> dict[str, Any]:
        return {}

    def _row_json(self, row: Any) -> Any:
        return row._asdict()

    def _body(self) -> list[Any]:
        """Return the rows as a table, or themselves, which have a text."""
        return [*self]

    def _parts(self) -> list[Any]:
        heading = [printable_lines(self.heading.split("\n"))] if self.heading else []
        return [*heading, *self._body(), *self.notes]
