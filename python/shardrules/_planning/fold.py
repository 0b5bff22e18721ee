"""Folding siblings: `layers/0/w` to `layers/60/w` are shown as `layers/{0..60}/w`.

Paths that differ only in numbers and belong together become one pattern, exactly: what a pattern
stands for are those paths and no others. Costs one pass over all paths in C++, and sorting within
each group. Must not know what the paths name.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardrules._core import templates

if TYPE_CHECKING:
    import numpy.typing as npt

_HOLE: Final = "\0"


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
    column = next(i for i, one in enumerate(values) if len(one) > 1)
    alike: dict[bytes, list[int]] = {}
    others = np.delete(matrix, column, axis=1)
    for value in values[column]:
        rest = np.unique(others[matrix[:, column] == value], axis=0)
        alike.setdefault(rest.tobytes(), []).append(value)
    if len(alike) == 1:  # the product is elsewhere: split by this column's values after all
        alike = {bytes([i]): [value] for i, value in enumerate(values[column])}
    for members in alike.values():
        chosen = np.isin(matrix[:, column], members)
        yield from _products(matrix[chosen], rows[chosen])


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
    return tuple(parts)


def _set_shown(numbers: npt.NDArray[np.int64]) -> str:
    """{0..60}, or {0,2..5}."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]}..{run[-1]}"] if len(run) > 2 else map(str, run)
    return "{" + ",".join(texts) + "}"
