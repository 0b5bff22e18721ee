"""Folding siblings: `layers/0/w` to `layers/60/w` are shown as `layers/{0..60}/w`.

Paths that differ only in numbers and belong together become one pattern, exactly: what a pattern
stands for are those paths and no others. Costs one pass over all paths in C++, and sorting within
each group. Must not know what the paths name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardrules._core import templates

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Folded", "fold", "parts_of"]

_HOLE: Final = "\0#"
_NUL: Final = "\0" + "0"
# {{ and }} are braces of the path; {0..3,7} is a set of numbers.
_PARTS: Final = re.compile(r"\{\{|\}\}|\{([0-9][0-9.,]*)\}|[^{}]+")


class Folded(NamedTuple):
    """Paths of one group that one pattern stands for."""

    parts: tuple[str, ...]
    """Texts and sets of numbers by turns, beginning and ending with a text."""
    group: int
    rows: npt.NDArray[np.intp]
    """Which of the paths, ascending."""

    @property
    def pattern(self) -> str:
        """The parts in a row. As in a format string, a brace of the path itself is doubled."""
        return "".join(
            part if i % 2 else part.replace("{", "{{").replace("}", "}}")
            for i, part in enumerate(self.parts)
        )


def fold(paths: list[str], group_of: npt.NDArray[np.int32]) -> list[Folded]:
    """The paths of each group as patterns, in the order of their first paths.

    Args:
        paths: Of all leaves.
        group_of: Per path the number of its group, such as its kind; not negative.

    Example:
        >>> paths = [f"layers/{i}/{w}" for i in range(3) for w in ("k", "v")] + ["head"]
        >>> [folded.pattern for folded in fold(paths, np.zeros(7, np.int32))]
        ['layers/{0..2}/k', 'layers/{0..2}/v', 'head']
    """
    if not paths:
        return []
    names, of_path, all_numbers = templates(paths)
    template_of = np.frombuffer(of_path, np.int32).astype(np.int64)
    numbers = np.frombuffer(all_numbers, np.int64)
    holes = np.fromiter((name.count(_HOLE) for name in names), np.int64, len(names))[template_of]
    starts = np.cumsum(holes) - holes
    key = template_of * (int(group_of.max()) + 1) + group_of
    order = np.argsort(key, kind="stable")
    bounds = np.flatnonzero(np.diff(key[order])) + 1
    folded = []
    for rows in np.split(order, bounds):
        name, group = names[template_of[rows[0]]], int(group_of[rows[0]])
        matrix = numbers[starts[rows][:, None] + np.arange(int(holes[rows[0]]))]
        for values, part in _products(matrix, rows):
            folded.append(Folded(_parts(name, values), group, np.sort(part)))
    folded.sort(key=lambda one: int(one.rows[0]))
    return folded


def _products(
    matrix: npt.NDArray[np.int64], rows: npt.NDArray[np.intp]
) -> Iterator[tuple[list[npt.NDArray[np.int64]], npt.NDArray[np.intp]]]:
    """Splits the rows of numbers into products of sets: (the set of each column, the rows)."""
    values = [np.unique(column) for column in matrix.T]
    size = prod(map(len, values))
    # Equal paths of different leaves are one, so that distinct ones are counted.
    if not values or (size <= len(rows) and size == len(np.unique(_codes(matrix, values)))):
        yield values, rows
        return
    # Were each column free of the others, it would be a product.
    columns = (_alike(matrix, column) for column in range(matrix.shape[1]))
    group_of = next(groups for groups in columns if groups.any())
    order = np.argsort(group_of, kind="stable")
    for chosen in np.split(order, np.flatnonzero(np.diff(group_of[order])) + 1):
        yield from _products(matrix[chosen], rows[chosen])


def _alike(matrix: npt.NDArray[np.int64], column: int) -> npt.NDArray[np.intp]:
    """Per row a number, equal where the values of this column stand beside the same others."""
    others = np.delete(matrix, column, axis=1)
    distinct = np.unique(np.column_stack([matrix[:, column], others]), axis=0)
    values, firsts = np.unique(distinct[:, 0], return_index=True)
    groups: dict[bytes, int] = {}
    group_of_value = [
        groups.setdefault(part[:, 1:].tobytes(), len(groups))
        for part in np.split(distinct, firsts[1:])
    ]
    return np.array(group_of_value, np.intp)[np.searchsorted(values, matrix[:, column])]


def _codes(
    matrix: npt.NDArray[np.int64], values: list[npt.NDArray[np.int64]]
) -> npt.NDArray[np.intp]:
    """A number for each row, equal for equal rows."""
    places = [np.searchsorted(v, column) for v, column in zip(values, matrix.T, strict=True)]
    return np.asarray(np.ravel_multi_index(tuple(places), tuple(map(len, values))))


def _parts(template: str, values: list[npt.NDArray[np.int64]]) -> tuple[str, ...]:
    """The template's texts and the sets of its holes; a set of one number is text."""
    first, *texts = template.split(_HOLE)
    parts = [first]
    for numbers, text in zip(values, texts, strict=True):
        if len(numbers) == 1:
            parts[-1] += f"{numbers[0]}{text}"
        else:
            parts += [_set_shown(numbers), text]
    return tuple(part.replace(_NUL, "\0") for part in parts)


def _set_shown(numbers: npt.NDArray[np.int64]) -> str:
    """{0..60}, or {0,2..5}."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]}..{run[-1]}"] if len(run) > 2 else map(str, run)
    return "{" + ",".join(texts) + "}"


def parts_of(pattern: str) -> Iterator[tuple[str, str | None]]:
    """What a pattern consists of: (a text of its paths, None), or ("", a set without its braces).

    Raises:
        ValueError: Its braces make no sense.

    Example:
        >>> list(parts_of("{{x}}/{0..2}"))
        [('{', None), ('x', None), ('}', None), ('/', None), ('', '0..2')]
    """
    end = 0
    for part in _PARTS.finditer(pattern):
        if part.start() != end:
            break
        end = part.end()
        text = part.group()
        yield ("", part[1]) if part[1] is not None else (text[0] if text[0] in "{}" else text, None)
    if end != len(pattern):
        raise ValueError(f"its braces make no sense from character {end} on")
