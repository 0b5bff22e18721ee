"""Arrays of a tree from the arrays of a checkpoint and renames: the parts that make each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, product
from math import prod
from typing import Final, NamedTuple

from shardrules._base.dtypes import converts
from shardrules._base.text import counted
from shardrules._checkpoint.boxes import (
    Arrangement,
    Box,
    Gap,
    Piece,
    Sized,
    intersection,
    shifted,
    sized,
    unchanged,
)
from shardrules._checkpoint.patterns import needed_text
from shardrules._checkpoint.problems import Problems
from shardrules._checkpoint.renames import Rename, numbered_axes, stacked_axes
from shardrules._plan.files.leaves import ArraySpec

Shape = tuple[int, ...]

_PLAIN: Final = Rename("", "")


class SourcePart(NamedTuple):
    """Array, or a part of one, that becomes a part of a target."""

    source: str
    rename: Rename
    sized: Sized
    source_at: Shape
    """Where the part begins in the array."""
    stacked: Mapping[str, int]
    """By axis that stacks, the index among the stacked arrays."""
    target_at: Shape = ()
    """Where it begins in the target."""

    def pieces(self, box: Box) -> Iterator[Piece]:
        """Yield the pieces of the array that are in this box of the target."""
        target_shape = self.sized.target_shape
        full = tuple((at, at + size) for at, size in zip(self.target_at, target_shape, strict=True))
        inside = intersection(box, full)
        if any(begin == end for begin, end in inside):
            return
        pieces = self.sized.pieces(shifted(inside, tuple(-at for at in self.target_at)))
        if not (any(self.source_at) or any(self.target_at)):
            yield from pieces
            return
        for piece in pieces:
            yield piece._replace(
                source=shifted(piece.source, self.source_at),
                target=shifted(piece.target, self.target_at),
            )


class Target(NamedTuple):
    """Array of the tree."""

    shape: Shape
    dtype: str
    parts: tuple[SourcePart, ...]
    has_own_dtype: bool = False
    """Whether a record says its dtype."""
    is_padded: bool = False
    """Whether there are zeros beside the parts."""

    @property
    def sources(self) -> list[str]:
        """Return the names of all arrays of which it is made."""
        return [part.source for part in self.parts]


def targets_of(
    arrays: Mapping[str, ArraySpec],
    renames: Sequence[Rename],
    shapes: Mapping[str, Shape],
    problems: Problems,
) -> dict[str, Target]:
    """Return the arrays of the tree by their paths."""
    renames_of, useless = _renames_of(list(arrays), renames)
    for rename in useless:
        problems.add(
            "this Rename finds no array; correct its pattern, or give optional=True if some models "
            "have such arrays and others have not",
            str(getattr(rename.pattern, "pattern", rename.pattern)),
            list(arrays),
        )
    parts_of: dict[str, list[SourcePart]] = defaultdict(list)
    for name, records in renames_of.items():
        for rename in records:
            try:
                for path, part in _parts_of_target(name, arrays[name].shape, rename, shapes):
                    parts_of[path].append(part)
            except _MisfitError as error:
                problems.add(str(error), name)
    targets: dict[str, Target] = {}
    for path, parts in parts_of.items():
        try:
            targets[path] = _target_of_parts(parts, arrays, shapes.get(path))
        except _MisfitError as error:
            problems.add(str(error), path)
    return targets


def _renames_of(
    names: Sequence[str], renames: Sequence[Rename]
) -> tuple[dict[str, list[Rename]], list[Rename]]:
    """Return (the records that count for each name, the records that must find one and do not)."""
    shared: dict[str, list[Rename]] = defaultdict(list)
    last = dict.fromkeys(names, _PLAIN)
    all_names, left, useless = "\n".join(names), list(names), []
    for rename in renames:
        search, text = re.compile(rename.pattern).search, needed_text(rename.pattern)
        if text in all_names:
            first = [name for name in left if text in name and search(name)]
            if rename.shared:
                for name in first:
                    shared[name].append(rename)
            elif first:
                last |= dict.fromkeys(first, rename)
                left = [name for name in left if last[name] is _PLAIN]
            if first:
                continue
        if not rename.optional and not finds(rename, names):
            useless.append(rename)
    records = {
        name: [*shared[name], *([] if rename is _PLAIN else [rename])]
        if name in shared
        else [rename]
        for name, rename in last.items()
    }
    left_out = [name for name, of_name in records.items() if any(r.path is None for r in of_name)]
    for name in left_out:
        records[name] = [rename for rename in records[name] if rename.path is not None]
    return records, useless


def finds(rename: Rename, names: Sequence[str]) -> bool:
    """Say whether the record finds any of the names."""
    search, text = re.compile(rename.pattern).search, needed_text(rename.pattern)
    return any(text in name and search(name) for name in names)


class _MisfitError(Exception):
    """Problem of one array."""


def _parts_of_target(
    name: str, shape: Shape, rename: Rename, shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, SourcePart]]:
    """Yield (path, part) for each part of the array."""
    path = name
    if rename is not _PLAIN:
        path = re.sub(rename.pattern, rename.path or "", name, count=1)
        for axis in numbered_axes(rename):
            path = path.replace(f"{{{axis}}}", str(_position(name, rename, axis)))
    dims = rename.arrangement
    if dims is None:
        yield path, SourcePart(name, rename, unchanged(shape), (0,) * len(shape), {})
        return
    if len(dims.source) != len(shape):
        raise _MisfitError(
            f"its shape is {list(shape)}, and the rename that finds it is for {rename.dims!r}; "
            "put another rename before it"
        )
    stacked = {axis: _position(name, rename, axis) for axis in stacked_axes(rename)}
    counts = {axis: _count(rename, axis, dims, shape) for axis in dims.unstacked}
    parts: list[tuple[str | None, dict[str, int], dict[str, int]]] = []
    for numbers in product(*map(range, counts.values())):
        unstacked = dict(zip(counts, numbers, strict=True))
        part_path = _filled_stack(path, rename, unstacked)
        in_tree = None if part_path is None else shapes.get(part_path)
        of_axes = _part_sizes(rename, {**stacked, **unstacked}, counts, shape, in_tree)
        parts.append((part_path, unstacked, of_axes))
    starts = [_starts(group, shape[dim], counts, parts) for dim, group in enumerate(dims.source)]
    for part_path, unstacked, of_axes in parts:
        if part_path is None:
            continue
        at, gap = [0] * len(shape), None
        for dim, (start, group) in enumerate(zip(starts, dims.source, strict=True)):
            place = _apart_at(group, counts)
            if place is None:
                continue
            begin = start[unstacked[group[place]]]
            if place:
                gap = Gap(dim, place, begin, start[-1])
            else:
                at[dim] = begin
        of_part = sized(dims.without((*stacked, *counts)), tuple(of_axes.items()), gap)
        yield part_path, SourcePart(name, rename, of_part, tuple(at), stacked)


def _apart_at(group: Sequence[str], counts: Mapping[str, int]) -> int | None:
    """Return where in a dimension the axis is that takes it apart."""
    return next((at for at, axis in enumerate(group) if axis in counts), None)


def _rename_words(rename: Rename, axis: str) -> list[str | None] | None:
    words = rename.words.get(axis)
    return None if words is None else [None if word is None else str(word) for word in words]


def _position(name: str, rename: Rename, axis: str) -> int:
    """Return the index of the array among those that are stacked along the axis."""
    match = re.search(rename.pattern, name)
    word, words = (match[axis] if match else None) or "", _rename_words(rename, axis)
    if words is None and word.isdecimal():
        return int(word)
    if words is None or word not in words:
        raise _MisfitError(
            f"the rename's words for {axis!r} do not have {word!r}; numbers alone need no words"
        )
    return words.index(word)


def _count(rename: Rename, axis: str, dims: Arrangement, shape: Shape) -> int:
    """Count the parts along an axis that takes the array apart."""
    if (axis,) in dims.source:
        size = shape[dims.source.index((axis,))]
        words = rename.words.get(axis)
        if words is not None and len(words) != size:
            raise _MisfitError(
                f"its dimension {axis!r} has {counted(size, 'element')}, and words {len(words):,}"
            )
        return size
    size_of_axis = rename.sizes.get(axis)
    if axis in rename.words:
        return len(rename.words[axis])
    if not isinstance(size_of_axis, int):
        raise _MisfitError(f"its rename needs words for {axis!r}, or its size")
    return size_of_axis


def _filled_stack(path: str, rename: Rename, unstacked: Mapping[str, int]) -> str | None:
    for axis, number in unstacked.items():
        words = _rename_words(rename, axis)
        word = str(number) if words is None else words[number]
        if word is None:
            return None
        path = path.replace(f"{{{axis}}}", word)
    return path


def _part_sizes(
    rename: Rename,
    positions: Mapping[str, int],
    counts: Mapping[str, int],
    shape: Shape,
    in_tree: Shape | None,
) -> dict[str, int]:
    """Return the size of each axis of a part: the array's, the rename's, the tree's, or the rest.

    Args:
        rename: The rename, with dims.
        positions: By axis that stacks or takes apart, which part this is.
        counts: By axis that takes apart, the number of parts.
        shape: The array's shape.
        in_tree: The shape of the part in the tree, if that is known.
    """
    record_dims = rename.arrangement
    assert record_dims is not None
    dims = list(zip(record_dims.source, shape, strict=True))
    sizes = {group[0]: size for group, size in dims if len(group) == 1}
    for axis, size in _own_sizes(rename, record_dims, positions):
        sizes.setdefault(axis, size)
    if in_tree is not None and len(in_tree) == len(record_dims.target):
        for group, size in zip(record_dims.target, in_tree, strict=True):
            if len(group) == 1 and group[0] not in rename.resize:
                sizes.setdefault(group[0], size)
    for group, size in dims:
        place = _apart_at(group, counts)
        count = 1 if place is None else counts[group[place]]
        inner = [axis for axis in group if axis not in counts]
        unknown = [axis for axis in inner if axis not in sizes]
        if len(unknown) > 1:
            raise _MisfitError(f"its rename needs the sizes of all but one of {', '.join(inner)}")
        if unknown and place and unknown[0] in group[:place]:
            continue  # `_starts` knows the rows
        in_axes = prod(sizes[axis] for axis in inner if axis in sizes) * count
        if unknown:
            sizes[unknown[0]] = size // in_axes if in_axes else 0
        if (unknown or place is None) and prod(sizes[axis] for axis in inner) * count != size:
            raise _MisfitError(
                f"its dimension of {counted(size, 'element')} is not one of "
                f"{_sizes_shown(group, sizes)}"
            )
    return sizes


def _own_sizes(
    rename: Rename, dims: Arrangement, positions: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Yield (axis, its size in this part) for each size that the rename has."""
    for group in (*dims.source, *dims.target):
        position = next((positions[axis] for axis in group if axis in positions), None)
        for axis in group:
            size = rename.sizes.get(axis)
            if isinstance(size, int):
                yield axis, size
            elif size is not None and position is not None and position < len(size):
                yield axis, size[position]


def _sizes_shown(group: tuple[str, ...], sizes: Mapping[str, int]) -> str:
    shown = [f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in group]
    return " x ".join(shown) or "1"


def _starts(
    group: tuple[str, ...],
    size: int,
    counts: Mapping[str, int],
    parts: list[tuple[str | None, dict[str, int], dict[str, int]]],
) -> list[int]:
    """Return where each part begins in a dimension of the array, or in each row of it; and the end.

    The number of rows is noted in the sizes of the parts, if it is not there.
    """
    place = _apart_at(group, counts)
    if place is None:
        return []
    axis, outer, inner = group[place], group[:place], group[place + 1 :]
    of_part = {part[axis]: prod(sizes[name] for name in inner) for _, part, sizes in parts}
    starts = [0, *accumulate(of_part[i] for i in range(counts[axis]))]
    row, rows = starts[-1], 1
    for _, _, sizes in parts:
        rows = prod(sizes[name] for name in outer if name in sizes)
        for name in outer:
            if name not in sizes:
                sizes[name] = size // (row * rows) if row * rows else 0
                rows *= sizes[name]
    if row * rows != size:
        of_rows = f"in each of {counted(rows, 'row')} " if outer else ""
        raise _MisfitError(
            f"its dimension has {counted(size, 'element')}, and its "
            f"{counted(counts[axis], 'part')} along {axis!r} {of_rows}{row:,}"
        )
    return starts


def _target_of_parts(
    parts: list[SourcePart], arrays: Mapping[str, ArraySpec], in_tree: Shape | None
) -> Target:
    axes = _stacking_axes(parts[0])
    if any(_stacking_axes(part) != axes for part in parts):
        raise _MisfitError("renames with different dims make it; only one can stack arrays")
    dtypes = sorted({_dtype(part, arrays) for part in parts})
    if len(dtypes) > 1:
        raise _MisfitError(f"its parts have the dtypes {', '.join(dtypes)}; give one in dtype")
    starts = {dim: _stack_starts(dim, axis, parts) for dim, axis in axes.items()}
    count = prod(len(starts_of_dim) - 1 for starts_of_dim in starts.values())
    if len({tuple(part.stacked.values()) for part in parts}) < len(parts):
        names = ", ".join(repr(part.source) for part in parts[:3])
        raise _MisfitError(f"several arrays would become it: {names}; rename or leave out one")
    if len(parts) < count:
        raise _MisfitError(
            f"it stacks {counted(count, 'array')}, and the checkpoint has {len(parts):,}; is it "
            "whole?"
        )
    shapes = {
        tuple(starts[i][-1] if i in starts else n for i, n in enumerate(part.sized.target_shape))
        for part in parts
    }
    if len(shapes) > 1:
        raise _MisfitError(f"its parts have different shapes: {sorted(map(list, shapes))}")
    (shape,) = shapes
    placed = (
        part._replace(
            target_at=tuple(
                starts[dim][part.stacked[axes[dim]]] if dim in axes else 0
                for dim in range(len(shape))
            )
        )
        for part in parts
    )
    size = _resized(shape, parts[0].rename, in_tree)
    is_padded = any(new > old for old, new in zip(shape, size, strict=True))
    return Target(size, dtypes[0], tuple(placed), parts[0].rename.dtype is not None, is_padded)


def _resized(shape: Shape, rename: Rename, in_tree: Shape | None) -> Shape:
    sizes = list(shape)
    for axis, size in rename.resize.items():
        assert rename.arrangement is not None
        dim = rename.arrangement.target.index((axis,))
        if size is None and (in_tree is None or len(in_tree) != len(shape)):
            raise _MisfitError(
                f"its Rename has resize={{{axis!r}: None}}, and no tree tells the size; give it"
            )
        sizes[dim] = size or (in_tree or shape)[dim]
    return tuple(sizes)


def _stacking_axes(part: SourcePart) -> dict[int, str]:
    """Return the dimensions of the target along which it is stacked, with their axes."""
    dims = part.rename.arrangement
    groups = () if dims is None else dims.target
    return {dim: group[0] for dim, group in enumerate(groups) if group and group[0] in part.stacked}


def _dtype(part: SourcePart, arrays: Mapping[str, ArraySpec]) -> str:
    """Return the record's dtype, or the array's."""
    dtype, rename = arrays[part.source].dtype, part.rename
    if rename.dtype is None:
        return dtype
    if not converts(dtype, rename.dtype):
        raise _MisfitError(
            f"{part.source!r} is {dtype}, and its Rename has dtype={rename.dtype!r}, to which it "
            "cannot be converted; quantise with a library that makes scales"
        )
    return str(rename.dtype)


def _stack_starts(dim: int, axis: str, parts: list[SourcePart]) -> list[int]:
    """Return where each stacked array begins in a dimension of the target; and the end."""
    sizes: dict[int, int] = {}
    for part in parts:
        size = part.sized.target_shape[dim]
        if sizes.setdefault(part.stacked[axis], size) != size:
            raise _MisfitError(f"its parts have different sizes along {axis!r}")
    words = parts[0].rename.words.get(axis)
    count = max(sizes) + 1 if words is None else len(words)
    if missing := [i for i in range(count) if i not in sizes]:
        first = missing[0] if words is None else words[missing[0]]
        raise _MisfitError(
            f"it is stacked along {axis!r}, and {first} is missing; is the checkpoint whole? "
            "Give words for numbers that do not begin with 0"
        )
    return [0, *accumulate(sizes[i] for i in range(count))]
