"""How the dimensions of an array make those of another: "out (heads dim) -> heads dim out".

An arrangement is written as einops writes them. With the sizes of its axes it maps a box of the
result to boxes of the array, so a device can ask for its own part alone. Costs microseconds per
box. Must not know about names, files or devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import prod
from typing import Final, NamedTuple

__all__ = ["Arrangement", "Box", "Form", "Piece", "Sized", "arrangement", "box_shape", "identity"]

Box = tuple[tuple[int, int], ...]
"""Per dimension where a part begins and ends."""

Groups = tuple[tuple[str, ...], ...]
"""Per dimension the axes that it consists of, the slowest first."""

_TOKEN: Final = re.compile(r"\(|\)|[A-Za-z_]\w*|\S")


class Arrangement(NamedTuple):
    """The axes of an array's dimensions, and of the result's."""

    source: Groups
    target: Groups

    @property
    def stacked(self) -> tuple[str, ...]:
        """Axes of the result alone: along them, arrays are stacked or joined."""
        return _only_in(self.target, self.source)

    @property
    def unstacked(self) -> tuple[str, ...]:
        """Axes of the array alone: along them it is taken apart."""
        return _only_in(self.source, self.target)

    def without(self, axes: tuple[str, ...]) -> Arrangement:
        """The same for one of the arrays that are stacked, or of the parts: no such axes."""
        return Arrangement(
            *(
                tuple(tuple(axis for axis in group if axis not in axes) for group in groups)
                for groups in self
            )
        )


def _only_in(groups: Groups, others: Groups) -> tuple[str, ...]:
    known = {axis for group in others for axis in group}
    return tuple(axis for group in groups for axis in group if axis not in known)


@lru_cache(maxsize=256)
def arrangement(text: str) -> Arrangement:
    """The arrangement of a text.

    Raises:
        ValueError: It has another form, names an axis twice, or stacks along an axis that is not
            the first of its dimension.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"dims {text!r} must have one '->', as in 'out in -> in out'")
    found = Arrangement(*(_groups(text, side) for side in sides))
    for groups in found:
        axes = [axis for group in groups for axis in group]
        if repeated := {axis for axis in axes if axes.count(axis) > 1}:
            raise ValueError(f"dims {text!r} has the axis {min(repeated)!r} twice on one side")
        apart = {*found.stacked, *found.unstacked}
        for group in groups:
            if inner := apart.intersection(group[1:]):
                raise ValueError(
                    f"dims {text!r}: the axis {min(inner)!r} is on one side alone, so it must be "
                    "the first of its dimension"
                )
    return found


def _groups(text: str, side: str) -> Groups:
    groups: list[tuple[str, ...]] = []
    opened: list[str] | None = None
    for token in _TOKEN.findall(side):
        if token == "(" and opened is None:
            opened = []
        elif token == ")" and opened:
            groups.append(tuple(opened))
            opened = None
        elif not token.isidentifier():
            raise ValueError(
                f"dims {text!r}: {token!r} is in the wrong place; write the names of axes, those "
                "of one dimension in parentheses"
            )
        elif opened is None:
            groups.append((token,))
        else:
            opened.append(token)
    if opened is not None:
        raise ValueError(f"dims {text!r}: a parenthesis is not closed")
    return tuple(groups)


@lru_cache(maxsize=64)
def identity(rank: int) -> Arrangement:
    """The arrangement that changes nothing."""
    groups = tuple((f"dim{i}",) for i in range(rank))
    return Arrangement(groups, groups)


class Piece(NamedTuple):
    """A box of the array that becomes a box of the result."""

    source: Box
    lengths: tuple[int, ...]
    """Per axis of the array, how much of it the box has."""
    order: tuple[int, ...]
    """The axes in the result's order."""
    target: Box


class Form(NamedTuple):
    """Reshape to the axes, transpose, reshape."""

    axes: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]


class Sized:
    """An arrangement of one array, without stacked and unstacked axes, and the sizes of its axes.

    Args:
        found: The arrangement.
        sizes: The size of each axis.

    Attributes:
        source_shape: The array's shape.
        target_shape: The result's shape.
    """

    def __init__(self, found: Arrangement, sizes: Mapping[str, int]) -> None:
        self._source, self._target = found
        self._sizes = dict(sizes)
        self._axes = [axis for group in self._source for axis in group]
        ordered = [axis for group in self._target for axis in group]
        self._order = tuple(self._axes.index(axis) for axis in ordered)
        self.source_shape, self.target_shape = (
            tuple(prod(self._sizes[axis] for axis in group) for group in groups) for groups in found
        )
        self._is_plain = found.source == found.target and all(len(g) == 1 for g in found.source)

    @property
    def form(self) -> Form:
        """How a whole array is arranged."""
        return Form(tuple(map(self._sizes.__getitem__, self._axes)), self._order, self.target_shape)

    @property
    def is_simple(self) -> bool:
        """Whether each dimension of the array is one axis."""
        return all(len(group) <= 1 for group in self._source)

    def pieces(self, box: Box) -> Iterator[Piece]:
        """The pieces that together fill this box of the result."""
        if self._is_plain:
            yield Piece(box, box_shape(box), self._order, box)
            return
        of_dims = [
            _spans(*interval, [self._sizes[axis] for axis in group])
            for interval, group in zip(box, self._target, strict=True)
        ]
        for spans in product(*of_dims):
            axes = {
                axis: span
                for group, of_group in zip(self._target, spans, strict=True)
                for axis, span in zip(group, of_group, strict=True)
            }
            for one in self._connected(axes):
                lengths = tuple(one[axis][1] - one[axis][0] for axis in self._axes)
                source, target = (self._box(groups, one) for groups in (self._source, self._target))
                yield Piece(source, lengths, self._order, target)

    def _connected(self, axes: dict[str, tuple[int, int]]) -> Iterator[dict[str, tuple[int, int]]]:
        """The axes' spans, cut until each dimension of both arrays has a single interval."""
        for group in (*self._source, *self._target):
            for at, axis in enumerate(group):
                begin, end = axes[axis]
                if end - begin == 1:
                    continue
                if any(axes[inner] != (0, self._sizes[inner]) for inner in group[at + 1 :]):
                    for i in range(begin, end):
                        yield from self._connected({**axes, axis: (i, i + 1)})
                    return
                break
        yield axes

    def _box(self, groups: Groups, axes: Mapping[str, tuple[int, int]]) -> Box:
        found = []
        for group in groups:
            begin = last = 0
            for axis in group:
                begin = begin * self._sizes[axis] + axes[axis][0]
                last = last * self._sizes[axis] + axes[axis][1] - 1
            found.append((begin, last + 1))
        return tuple(found)


def _spans(begin: int, end: int, sizes: list[int]) -> list[tuple[tuple[int, int], ...]]:
    """An interval of a dimension as boxes of its axes: the first row's end, rows, the last one."""
    if begin >= end or not sizes:
        return [()] if begin < end else []
    if len(sizes) == 1:
        return [((begin, end),)]
    inner = prod(sizes[1:])
    whole = tuple((0, size) for size in sizes[1:])
    first, last = -(-begin // inner), end // inner
    if first > last:  # inside one row
        rest = _spans(begin - last * inner, end - last * inner, sizes[1:])
        return [((last, last + 1), *one) for one in rest]
    before = _spans(begin - (first - 1) * inner, inner, sizes[1:]) if begin % inner else []
    after = _spans(0, end - last * inner, sizes[1:]) if end % inner else []
    return [
        *(((first - 1, first), *one) for one in before),
        *([((first, last), *whole)] if first < last else []),
        *(((last, last + 1), *one) for one in after),
    ]


def box_shape(box: Box) -> tuple[int, ...]:
    """The lengths of a box."""
    return tuple(end - begin for begin, end in box)
