"""Layouts: how the dimensions of one array become those of another, and which parts make a box."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]
Span = tuple[int, int]
Box = tuple[Span, ...]
"""Begin and end of a part in each dimension."""
Groups = tuple[tuple[str, ...], ...]
"""Per dimension the axes that it consists of, the slowest first."""

_DIMENSION: Final = re.compile(r"\([^()]*\)|[^()\s]+|\S")


@lru_cache(maxsize=4096)
def box_shape(box: Box) -> Shape:
    return tuple(end - begin for begin, end in box)


def box_of(index: tuple[slice, ...], shape: Shape) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


@lru_cache(maxsize=4096)
def whole_box(shape: Shape) -> Box:
    return tuple((0, size) for size in shape)


def tiled_hull(boxes: Collection[Box]) -> Box | None:
    """Return the smallest box that has all of these in it; None if they do not fill it."""
    hull = tuple(
        (min(begin for begin, _ in spans), max(end for _, end in spans))
        for spans in zip(*boxes, strict=True)
    )
    return hull if prod(box_shape(hull)) == sum(prod(box_shape(box)) for box in boxes) else None


def slices_in(box: Box, outer: Box) -> Any:
    """Return a box as an index of an array that has the values of an outer box; it gives a view."""
    pairs = zip(box, outer, strict=True)
    return (*(slice(begin - at, end - at) for (begin, end), (at, _) in pairs), ...)


def join(outer: Box, dtype: np.dtype[Any], parts: Iterable[tuple[Box, Any]]) -> Any:
    """Return the values of a box, made of those of boxes in it, with zeros beside them."""
    result = np.zeros(box_shape(outer), dtype)
    # numpy copies the elements of dtypes that are not its own one by one.
    bits = np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else dtype
    for box, values in parts:
        result.view(bits)[slices_in(box, outer)] = values.view(bits)
    return result


class Arrangement(NamedTuple):
    """Axes of an array's dimensions, and of the result's."""

    source: Groups
    target: Groups

    @property
    def stacked(self) -> tuple[str, ...]:
        """Return the axes of the result alone: arrays are stacked along them, or repeated."""
        return _only_in(self.target, self.source)

    @property
    def unstacked(self) -> tuple[str, ...]:
        """Return the axes of the array alone, along which it is taken apart."""
        return _only_in(self.source, self.target)


def _only_in(groups: Groups, excluded: Groups) -> tuple[str, ...]:
    axes = {axis for group in excluded for axis in group}
    return tuple(axis for group in groups for axis in group if axis not in axes)


def arrangement(text: str | None) -> Arrangement:
    """Parse the text of an arrangement; None is of no dimensions. A `1` is one of no axes."""
    if text is None:
        return Arrangement((), ())
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"dims {text!r} must have one '->', as in 'out in -> in out'")
    dims = Arrangement(*(_axis_groups(text, side) for side in sides))
    for groups in dims:
        axes = [axis for group in groups for axis in group]
        if repeated := {axis for axis in axes if axes.count(axis) > 1}:
            raise ValueError(f"dims {text!r} has the axis {min(repeated)!r} twice on one side")
    return dims


def _axis_groups(text: str, side: str) -> Groups:
    dims = _DIMENSION.findall(side)
    groups = tuple(tuple(dim.strip("()").split()) if dim != "1" else () for dim in dims)
    for dim, group in zip(dims, groups, strict=True):
        if dim != "1" and not (group and all(map(str.isidentifier, group))):
            raise ValueError(
                f"dims {text!r}: {dim!r} is no dimension; write the names of axes, those of one "
                "dimension in parentheses, or 1"
            )
    return groups


class Form(NamedTuple):
    """How a region of an array, whose dimensions consist of axes, becomes one of the result."""

    shape: Shape
    """The array's."""
    region: Shape
    axes: tuple[Shape, ...]
    """Of each dimension of the region, the sizes of its axes."""
    order: Shape
    """The axes in the order of the result; -1 repeats."""
    target_axes: tuple[Shape, ...]
    """Of each dimension of the result's region, the sizes of its axes."""

    @property
    def target(self) -> Shape:
        """Return the shape of the result's region."""
        return tuple(map(prod, self.target_axes))

    @property
    def keeps_order(self) -> bool:
        """Say whether elements that follow each other do so in the result."""
        return self.order == tuple(range(len(self.order)))

    @property
    def is_plain(self) -> bool:
        """Say whether it is a whole array as it is."""
        return self == plain_form(self.shape)

    def arranged(self, xp: Any, values: Any) -> Any:
        """Return the result's region, by numpy or jax.numpy."""
        values = values.reshape([size for axes in self.axes for size in axes])
        values = values.transpose([axis for axis in self.order if axis >= 0])
        if -1 in self.order:
            sizes = [size for axes in self.target_axes for size in axes]
            once = [1 if axis < 0 else n for axis, n in zip(self.order, sizes, strict=True)]
            values = xp.broadcast_to(values.reshape(once), sizes)
        return values.reshape(self.target)


@lru_cache(maxsize=4096)
def plain_form(shape: Shape) -> Form:
    """Return what leaves an array of this shape as it is."""
    axes = tuple((size,) for size in shape)
    return Form(shape, shape, axes, tuple(range(len(shape))), axes)


def row_major(shape: Sequence[int]) -> Shape:
    """Return the elements between neighbours along each dimension."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def form_of(
    dims: Arrangement, sizes: Mapping[str, int], spans: Sequence[Span], shape: Shape
) -> tuple[Form, Shape]:
    """Return the form of a part that has these spans, and where its region begins in the array."""
    of_source, of_target = (
        [tuple(axis for axis in group if axis in sizes) for group in groups] for groups in dims
    )
    in_source = [axis for group in of_source for axis in group]
    order = (
        in_source.index(axis) if axis in in_source else -1 for group in of_target for axis in group
    )
    axes, target_axes = (
        tuple(tuple(map(sizes.__getitem__, group)) for group in groups)
        for groups in (of_source, of_target)
    )
    form = Form(shape, box_shape(tuple(spans)), axes, tuple(order), target_axes)
    return form, tuple(begin for begin, _ in spans)


class Block(NamedTuple):
    """What is read, or written, of an array for a box of the result of its form."""

    begins: npt.NDArray[np.int64]
    """Where its ranges begin, in bytes from the begin of the region, in the order of the array."""
    size: int
    """The bytes of each."""
    form: Form
    """How what is read becomes that of the result."""
    inside: tuple[slice, ...]
    """Where in it the box is."""


@lru_cache(maxsize=1024)
def block_of(form: Form, box: Box, item: int) -> Block:
    """Return what is read, into memory of its own.

    Whole rows are read of a dimension that consists of several axes, if the box has several.
    """
    of_dims = [_spans(*span, axes) for span, axes in zip(box, form.target_axes, strict=True)]
    span_of = dict(zip(form.order, (span for spans in of_dims for span in spans), strict=True))
    steps = [
        stride * prod(axes[i + 1 :]) * item
        for stride, axes in zip(row_major(form.shape), form.axes, strict=True)
        for i in range(len(axes))
    ]
    begins, size = np.zeros(1, np.int64), item
    for axis, step in reversed([*enumerate(steps)]):
        low, high = span_of[axis]
        if len(begins) == 1 and (step == size or high - low == 1):
            size *= high - low
            begins = begins + low * step
        else:
            begins = ((np.arange(low, high) * step)[:, None] + begins).reshape(-1)
    firsts = (
        sum(low * by for (low, _), by in zip(spans, row_major(sizes), strict=True))
        for spans, sizes in zip(of_dims, form.target_axes, strict=True)
    )
    lengths = tuple(high - low for low, high in map(span_of.__getitem__, range(len(steps))))
    target_lengths = tuple(tuple(high - low for low, high in spans) for spans in of_dims)
    inside = tuple(slice(a - n, b - n) for (a, b), n in zip(box, firsts, strict=True))
    # What is read has one dimension, whatever the array has, and is all of its region.
    region = Form((), (), (lengths,), form.order, target_lengths)
    return Block(begins, size, region, inside)


def _spans(begin: int, end: int, sizes: Shape) -> tuple[Span, ...]:
    """Return the least interval of each axis that has this interval of their dimension in it."""
    if not sizes:
        return ()
    inner = prod(sizes[1:])
    first, last = begin // inner, -(-end // inner)
    if last - first > 1:
        return ((first, last), *((0, size) for size in sizes[1:]))
    return ((first, last), *_spans(begin - first * inner, end - first * inner, sizes[1:]))
