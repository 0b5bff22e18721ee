"""Boxes of arrays, and their pieces where an array is transposed, reshaped, joined or split."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple

Span = tuple[int, int]
Box = tuple[Span, ...]
"""Begin and end of a part in each dimension."""


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in box)


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def shifted(box: Box, offsets: tuple[int, ...]) -> Box:
    """Move a box by an offset in each dimension."""
    return tuple((begin + by, end + by) for (begin, end), by in zip(box, offsets, strict=True))


def intersection(box: Box, other_box: Box) -> Box:
    """Return what two boxes have in common; a length of 0 in a dimension if they have nothing."""
    pairs = ((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other_box, strict=True))
    return tuple((begin, max(begin, end)) for begin, end in pairs)


def hull_of(boxes: Iterable[Box]) -> Box:
    """Return the smallest box that has all of these in it."""
    return tuple(
        (min(begin for begin, _ in spans), max(end for _, end in spans))
        for spans in zip(*boxes, strict=True)
    )


def slices_in(box: Box, outer: Box) -> Any:
    """Return a box as an index of an array that has the values of an outer box; it gives a view."""
    pairs = zip(box, outer, strict=True)
    return (*(slice(begin - at, end - at) for (begin, end), (at, _) in pairs), ...)


Groups = tuple[tuple[str, ...], ...]
"""Per dimension the axes that it consists of, the slowest first."""

# Arrays of one form share their pieces, unless an array is cut into very many.
_MOST_PIECES: Final = 64
# Elements: shorter runs are read with what is between them, and picked.
_LEAST_RUN: Final = 2048
_TOKEN: Final = re.compile(r"\(|\)|[A-Za-z_]\w*|\S")


class Arrangement(NamedTuple):
    """Axes of an array's dimensions, and of the result's."""

    source: Groups
    target: Groups

    @property
    def stacked(self) -> tuple[str, ...]:
        """Return the axes of the result alone, along which arrays are stacked or joined."""
        return _only_in(self.target, self.source)

    @property
    def unstacked(self) -> tuple[str, ...]:
        """Return the axes of the array alone, along which it is taken apart."""
        return _only_in(self.source, self.target)

    def without(self, axes: tuple[str, ...]) -> Arrangement:
        """Return the arrangement of a stacked array, or of a part, which has no such axes."""
        return Arrangement(
            *(
                tuple(tuple(axis for axis in group if axis not in axes) for group in groups)
                for groups in self
            )
        )


def _only_in(groups: Groups, excluded: Groups) -> tuple[str, ...]:
    axes = {axis for group in excluded for axis in group}
    return tuple(axis for group in groups for axis in group if axis not in axes)


@lru_cache(maxsize=256)
def arrangement(text: str) -> Arrangement:
    """Parse the text of an arrangement. A `1` is a dimension of no axes."""
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"dims {text!r} must have one '->', as in 'out in -> in out'")
    dims = Arrangement(*(_axis_groups(text, side) for side in sides))
    for groups in dims:
        axes = [axis for group in groups for axis in group]
        if repeated := {axis for axis in axes if axes.count(axis) > 1}:
            raise ValueError(f"dims {text!r} has the axis {min(repeated)!r} twice on one side")
    apart = [[axis for axis in group if axis in dims.unstacked] for group in dims.source]
    inner = [axis for group in dims.source for axis in group[1:] if axis in dims.unstacked]
    if len(inner) > 1 or any(len(axes) > 1 for axes in apart):
        raise ValueError(
            f"dims {text!r} takes an array apart inside of a dimension along "
            f"{' and '.join(axis for axes in apart for axis in axes)}; it can do so along one axis"
        )
    return dims


def _axis_groups(text: str, side: str) -> Groups:
    groups: list[tuple[str, ...]] = []
    opened: list[str] | None = None
    for token in _TOKEN.findall(side):
        if token == "(" and opened is None:
            opened = []
        elif token == ")" and opened:
            groups.append(tuple(opened))
            opened = None
        elif token == "1" and opened is None:
            groups.append(())
        elif not token.isidentifier():
            raise ValueError(
                f"dims {text!r}: {token!r} is in the wrong place; write the names of axes, those "
                "of one dimension in parentheses, or 1"
            )
        elif opened is None:
            groups.append((token,))
        else:
            opened.append(token)
    if opened is not None:
        raise ValueError(f"dims {text!r}: a parenthesis is not closed")
    return tuple(groups)


class Gap(NamedTuple):
    """A dimension of the array that consists of rows, of each of which the result has a part."""

    dim: int
    outer: int
    """How many of the dimension's axes number the rows; the others are in a row."""
    begin: int
    """Where the part begins in a row."""
    row: int
    """The elements of a row."""


class Piece(NamedTuple):
    """A box of the array that becomes a box of the result."""

    source: Box
    lengths: tuple[int, ...]
    """Per axis of the array, how much of it the box has."""
    order: tuple[int, ...]
    """The axes in the result's order."""
    target: Box
    picked: tuple[tuple[int, ...], Box] | None = None
    """A shape of the source box, and what is picked of it; None if all is."""

    def arranged(self, values: Any) -> Any:
        """Return the values of the source box with their axes in the result's order."""
        if self.picked is not None:
            shape, box = self.picked
            values = values.reshape(shape)[_index(box)]
        return values.reshape(self.lengths).transpose(self.order)


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


class Form(NamedTuple):
    """Reshape, pick, reshape to the axes, transpose, repeat, reshape."""

    stored: tuple[int, ...]
    picks: Box
    axes: tuple[int, ...]
    order: tuple[int, ...]
    once: tuple[int, ...]
    """The axes of the result, those that are repeated with the size 1."""
    repeated: tuple[int, ...]
    shape: tuple[int, ...]

    def arranged(self, xp: Any, values: Any) -> Any:
        """Return the result of numpy or jax.numpy."""
        values = (
            values.reshape(self.stored)[_index(self.picks)].reshape(self.axes).transpose(self.order)
        )
        if self.once != self.repeated:
            values = xp.broadcast_to(values.reshape(self.once), self.repeated)
        return values.reshape(self.shape)


class Sized:
    """An arrangement of one array, without stacked and unstacked axes, and the sizes of its axes.

    An axis of the result alone repeats the array.

    Args:
        dims: The arrangement.
        sizes: The size of each axis.
        gap: The dimension of the array of which the result has a part of each row.

    Attributes:
        source_shape: The array's shape.
        target_shape: The result's shape.
        form: How a whole array is arranged.
        is_simple: Whether each dimension of the array is one axis.
    """

    def __init__(self, dims: Arrangement, sizes: Mapping[str, int], gap: Gap | None = None) -> None:
        self._source, self._target = dims
        self._sizes = dict(sizes)
        self._axes = [axis for group in self._source for axis in group]
        in_target = [axis for group in self._target for axis in group]
        order = tuple(self._axes.index(axis) for axis in in_target if axis in self._axes)
        shape, self.target_shape = (
            tuple(prod(self._sizes[axis] for axis in group) for group in groups) for groups in dims
        )
        axis_sizes = tuple(self._sizes[axis] for axis in self._axes)
        self._repeats = frozenset(in_target).difference(self._axes)
        repeated = tuple(self._sizes[axis] for axis in in_target)
        once = tuple(1 if axis in self._repeats else self._sizes[axis] for axis in in_target)
        self._gap = gap
        # Groups of axes of which a piece has a single interval, and axes of which it has an index.
        self._intervals: list[tuple[str, ...]] = [*self._source, *self._target]
        self._singles = list(self._repeats)
        self._picks = False
        stored, picks = shape, tuple((0, size) for size in shape)
        if gap is not None:
            group = self._source[gap.dim]
            self._outer, self._inner = group[: gap.outer], group[gap.outer :]
            self._intervals[gap.dim : gap.dim + 1] = [self._outer, self._inner]
            full = {axis: (0, size) for axis, size in self._sizes.items()}
            stored, picks = self._picked(gap, [(0, size) for size in shape], full)
            run = shape[gap.dim] // stored[gap.dim] * prod(shape[gap.dim + 1 :])
            self._picks = run < _LEAST_RUN
            if not self._picks:
                self._singles += self._outer
            shape = (*shape[: gap.dim], stored[gap.dim] * gap.row, *shape[gap.dim + 1 :])
        self.source_shape = shape
        self.form = Form(stored, picks, axis_sizes, order, once, repeated, self.target_shape)
        self.is_simple = gap is None and all(len(group) <= 1 for group in self._source)
        is_same = dims.source == dims.target and all(len(group) == 1 for group in dims.source)
        self._is_plain = gap is None and is_same
        self._pieces: dict[Box, tuple[Piece, ...]] = {}

    def _picked(
        self, gap: Gap, box: Iterable[Span], axes: Mapping[str, Span]
    ) -> tuple[tuple[int, ...], Box]:
        """Return (the shape with a dimension for the rows, what is picked of it)."""
        (first, last), (begin, end) = self._box((self._outer, self._inner), axes)
        shape = box_shape(tuple(box))
        rows = (*shape[: gap.dim], last - first, gap.row, *shape[gap.dim + 1 :])
        picks = [(0, size) for size in rows]
        picks[gap.dim + 1] = (gap.begin + begin, gap.begin + end)
        return rows, tuple(picks)

    def pieces(self, box: Box) -> tuple[Piece, ...]:
        """Return the pieces that together fill this box of the result."""
        pieces = self._pieces.get(box)
        if pieces is None:
            pieces = tuple(self._cut(box))
            if len(pieces) <= _MOST_PIECES:
                self._pieces[box] = pieces
        return pieces

    def _cut(self, box: Box) -> Iterator[Piece]:
        order = self.form.order
        if self._is_plain:
            yield Piece(box, box_shape(box), order, box)
            return
        of_dims = [
            _spans(*interval, [self._sizes[axis] for axis in group])
            for interval, group in zip(box, self._target, strict=True)
        ]
        for spans in product(*of_dims):
            span_of = {
                axis: span
                for group, of_group in zip(self._target, spans, strict=True)
                for axis, span in zip(group, of_group, strict=True)
            }
            for axes in self._connected(span_of):
                lengths = tuple(axes[axis][1] - axes[axis][0] for axis in self._axes)
                source, picked = self._source_box(axes)
                yield Piece(source, lengths, order, self._box(self._target, axes), picked)

    def _source_box(
        self, axes: Mapping[str, Span]
    ) -> tuple[Box, tuple[tuple[int, ...], Box] | None]:
        """Return (the box of the array, what is picked of it)."""
        box, gap = self._box(self._source, axes), self._gap
        if gap is None:
            return box, None
        (first, last), (begin, end) = self._box((self._outer, self._inner), axes)
        row, at = gap.row, first * gap.row + gap.begin
        span = (first * row, last * row) if self._picks else (at + begin, at + end)
        picked = self._picked(gap, box, axes) if self._picks else None
        return (*box[: gap.dim], span, *box[gap.dim + 1 :]), picked

    def _connected(self, axes: dict[str, Span]) -> Iterator[dict[str, Span]]:
        """Cut the axes' spans until each dimension of both arrays has a single interval."""
        cut = self._to_cut(axes)
        if cut is None:
            yield axes
            return
        for i in range(*axes[cut]):
            yield from self._connected({**axes, cut: (i, i + 1)})

    def _to_cut(self, axes: Mapping[str, Span]) -> str | None:
        """Find an axis that must be cut into indices."""
        for axis in self._singles:
            if axes[axis][1] - axes[axis][0] > 1:
                return axis
        for group in self._intervals:
            for at, axis in enumerate(group):
                begin, end = axes[axis]
                if end - begin > 1:
                    if any(axes[inner] != (0, self._sizes[inner]) for inner in group[at + 1 :]):
                        return axis
                    break
        return None

    def _box(self, groups: Groups, axes: Mapping[str, Span]) -> Box:
        box = []
        for group in groups:
            begin = last = 0
            for axis in group:
                begin = begin * self._sizes[axis] + axes[axis][0]
                last = last * self._sizes[axis] + axes[axis][1] - 1
            box.append((begin, last + 1))
        return tuple(box)


@lru_cache(maxsize=1024)
def sized(dims: Arrangement, sizes: tuple[tuple[str, int], ...], gap: Gap | None = None) -> Sized:
    """Return one `Sized` for all arrays of one form, which then share their pieces."""
    return Sized(dims, dict(sizes), gap)


@lru_cache(maxsize=1024)
def unchanged(shape: tuple[int, ...]) -> Sized:
    """Return what leaves an array of this shape as it is."""
    groups = tuple((f"dim{i}",) for i in range(len(shape)))
    return Sized(Arrangement(groups, groups), {f"dim{i}": size for i, size in enumerate(shape)})


def _spans(begin: int, end: int, sizes: list[int]) -> list[tuple[Span, ...]]:
    """Cut an interval of a dimension into boxes of its axes: end of a row, rows, begin of one."""
    if begin >= end or not sizes:
        return [()] if begin < end else []
    if len(sizes) == 1:
        return [((begin, end),)]
    inner = prod(sizes[1:])
    full = tuple((0, size) for size in sizes[1:])
    first, last = -(-begin // inner), end // inner
    if first > last:  # inside one row
        rest = _spans(begin - last * inner, end - last * inner, sizes[1:])
        return [((last, last + 1), *spans) for spans in rest]
    before = _spans(begin - (first - 1) * inner, inner, sizes[1:]) if begin % inner else []
    after = _spans(0, end - last * inner, sizes[1:]) if end % inner else []
    return [
        *(((first - 1, first), *spans) for spans in before),
        *([((first, last), *full)] if first < last else []),
        *(((last, last + 1), *spans) for spans in after),
    ]
