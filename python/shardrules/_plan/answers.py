"""`Answer`: rows with lines above and below, as text, JSON and HTML; its slices keep the lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Self, SupportsIndex, TypeVar, overload

from shardrules._base.text import answer, printable_json, printable_lines
from shardrules._plan.tables import Table

_Row = TypeVar("_Row")


class Section(NamedTuple):
    """A part of the page of a plan."""

    name: str
    """By which the page's scripts know it."""
    data: Any
    """What they show, as JSON has it."""


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
        made = super().__new__(cls, rows)
        for name, value in about.items():
            setattr(made, name, value)
        return made

    @overload
    def __getitem__(self, index: SupportsIndex) -> _Row: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        return self._with(part) if isinstance(index, slice) else part

    def _with(self, rows: Iterable[_Row]) -> Self:
        """Return an answer of these rows, about which the same is said."""
        made = tuple.__new__(type(self), rows)
        made.__dict__.update(self.__dict__)
        return made

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
        fields: tuple[str, ...] = getattr(self[0], "_fields", ()) if self else ()
        return {name: [getattr(row, name) for row in self] for name in fields}

    def to_json(self) -> str:
        """Return a JSON object: its version, what is said of all rows, and the rows."""
        rows = list(map(self._row_json, self))
        return printable_json({"version": self._version, **self._json(), self._rows_key: rows})

    def _json(self) -> dict[str, Any]:
        return {}

    def _row_json(self, row: Any) -> Any:
        return row._asdict()

    def _body(self) -> list[Table | str]:
        """Return the rows as a table, or as texts."""
        return list(map(str, self))

    def _parts(self) -> list[Table | str]:
        heading = [printable_lines(self.heading.split("\n"))] if self.heading else []
        return [*heading, *self._body(), *self.notes]
