"""Arrays of a tree from the arrays of a checkpoint and renames: the parts that make each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from math import prod
from typing import Final, NamedTuple

from shardrules._base.dtypes import converts
from shardrules._base.io import FileError
from shardrules._base.text import counted, near_shown
from shardrules._checkpoint.layouts import (
    Arrangement,
    Form,
    Shape,
    form_of,
    plain_form,
    stacking_place,
)
from shardrules._checkpoint.names import DirectedRename
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.fold import fold_paths

_MOST_NEAR: Final = 5
# More parts than any model has experts or layers: a shape in a file may say anything.
_MOST_PARTS: Final = 1_000_000


class Problems:
    """Problems with arrays, told in one error; equal lines with many paths become one."""

    def __init__(self, name: str, *, in_file: bool = True) -> None:
        self._name = name
        self._in_file = in_file
        self._paths: dict[str, list[str]] = defaultdict(list)
        self._among: dict[str, Sequence[str]] = {}

    def add(self, what: str, path: str, among: Sequence[str] = ()) -> None:
        """Note what is wrong with the path; the nearest of others is named beside it."""
        self._paths[what].append(path)
        self._among[what] = among

    def raise_all(self) -> None:
        """Raise an error with all of them, if there are any."""
        if not self._paths:
            return
        count = sum(map(len, self._paths.values()))
        lines = [f"{self._name}: {counted(count, 'problem')} with the arrays:"]
        for what, paths in self._paths.items():
            for pattern in fold_paths(paths):
                # More of them would cost seconds, and tell no more.
                others = fold_paths(self._among[what]) if len(lines) <= _MOST_NEAR else ()
                lines.append(f"  {pattern}: {what}{near_shown(pattern, others)}")
        error = FileError(*lines)
        raise error if self._in_file else ValueError(str(error))


class Part(NamedTuple):
    """Array, or a region of one, that becomes a region of a target."""

    source: str
    form: Form
    starts: Shape
    """Where the region begins in the view of the array."""
    at: Shape
    """Where it begins in the view of the target."""


class Target(NamedTuple):
    """Array of the tree."""

    shape: Shape
    dtype: str
    parts: tuple[Part, ...]
    view: Shape
    """Its shape, with two dimensions for one that is joined in each row."""
    has_own_dtype: bool = False
    """Whether a record says its dtype."""
    is_padded: bool = False
    """Whether there are zeros beside the parts."""

    @property
    def is_plain(self) -> bool:
        """Say whether it is one array as it is, but for its name and dtype."""
        return len(self.parts) == 1 and self.parts[0].form.is_plain and not self.is_padded


class Targets(NamedTuple):
    """The arrays of a tree by their paths, and what was found on the way."""

    by_path: dict[str, Target]
    doubles: list[tuple[str, Target]]
    """What `shared` records would have made of paths that other arrays make."""
    left: list[str]
    """The names that no record finds; they are paths, too."""


class _MisfitError(Exception):
    """Problem of one array."""


class _Found(NamedTuple):
    """Part whose place in the target is not known yet."""

    name: str
    record: DirectedRename | None
    form: Form
    starts: Shape
    stacked: Mapping[str, int]
    """By axis that stacks, the index among the stacked arrays."""
    groups: tuple[tuple[str, ...], ...]
    """The dimensions of the target with their axes."""
    sizes: Mapping[str, int]


def targets_of(
    arrays: Mapping[str, ArraySpec],
    records: Sequence[DirectedRename],
    shapes: Mapping[str, Shape],
    problems: Problems,
) -> Targets:
    """Return the arrays of the tree.

    Args:
        arrays: The arrays of the checkpoint.
        records: What renames do; in the direction from the tree, arrays and tree change places.
        shapes: The shapes in the tree by path, as far as they are known.
        problems: Where to note what does not fit.
    """
    if not records:
        plain = {name: _plain(name, array) for name, array in arrays.items()}
        return Targets(plain, [], list(arrays))
    records_of, left, useless = _records_of(list(arrays), records)
    found: dict[str, list[_Found]] = defaultdict(list)
    for name in left:
        found[name].append(_whole(name, arrays[name].shape))
    for name, of_name in records_of.items():
        for record, values in of_name:
            try:
                for path, part in _parts(name, arrays[name].shape, record, values, shapes):
                    found[path].append(part)
            except _MisfitError as error:
                problems.add(str(error), name)
    targets, doubles = {}, []
    for path, parts in found.items():
        # An array of the path's own goes before what is shared.
        own = [part for part in parts if part.record is None or not part.record.rename.shared]
        try:
            targets[path] = _target(own or parts, arrays, shapes.get(path))
            if own and len(own) < len(parts):
                shared = [part for part in parts if part not in own]
                doubles.append((path, _target(shared, arrays, shapes.get(path))))
        except _MisfitError as error:
            problems.add(str(error), path)
    for record in useless:
        problems.add(
            f"this Rename finds no array; {_why_not(record, found)}", record.text, [*arrays]
        )
    return Targets(targets, doubles, left)


def _plain(name: str, array: ArraySpec) -> Target:
    zeros = (0,) * len(array.shape)
    part = Part(name, plain_form(array.shape), zeros, zeros)
    return Target(array.shape, array.dtype, (part,), array.shape)


def _whole(name: str, shape: Shape) -> _Found:
    form, axes = plain_form(shape), [f"dim{i}" for i in range(len(shape))]
    sizes = dict(zip(axes, shape, strict=True))
    return _Found(name, None, form, (0,) * len(shape), {}, tuple((axis,) for axis in axes), sizes)


def _why_not(record: DirectedRename, found: Mapping[str, Sequence[_Found]]) -> str:
    for path, parts in found.items():
        earlier = parts[0].record
        if earlier is not None and record.values(path) is not None:
            return (
                f"{parts[0].name} became {path} by {earlier.rename!r}, and Renames do not chain: "
                "write its name in the checkpoint"
            )
    return (
        "correct its name, or give optional=True if some models have such arrays and others have "
        "not"
    )


_Match = tuple[DirectedRename, dict[str, str]]


def _records_of(
    names: Sequence[str], records: Sequence[DirectedRename]
) -> tuple[dict[str, list[_Match]], list[str], list[DirectedRename]]:
    """Return (the records that count for each name, the names left, the records that lack one)."""
    own: dict[str, _Match | None] = {}
    shared: dict[str, list[_Match]] = defaultdict(list)
    left, useless = list(names), []
    for record in records:
        matches = [(name, record.values(name)) for name in left]
        hits = {name: values for name, values in matches if values is not None}
        for name, values in hits.items():
            if record.rename.shared:
                shared[name].append((record, values))
            else:
                own[name] = None if record.is_left_out else (record, values)
        if hits and not record.rename.shared:
            left = [name for name in left if name not in hits]
        if not hits and not record.rename.optional and not _finds(record, own):
            useless.append(record)
    found: dict[str, list[_Match]] = {
        name: [] if match is None else [match] for name, match in own.items()
    }
    for name, matches_of_name in shared.items():
        # Backwards, a leaf that has a record of its own is no copy of another.
        if not (name in own and matches_of_name[0][0].is_back):
            found[name] = [*matches_of_name, *found.get(name, [])]
    if any(record.is_back for record in records):
        left = [name for name in left if name not in shared]
    return found, left, useless


def _finds(record: DirectedRename, names: Iterable[str]) -> bool:
    return any(record.values(name) is not None for name in names)


def _parts(
    name: str,
    shape: Shape,
    record: DirectedRename,
    values: Mapping[str, str],
    shapes: Mapping[str, Shape],
) -> Iterator[tuple[str, _Found]]:
    """Yield (path, part) for each part of the array."""
    dims = record.dims
    if dims is None:
        path = record.path(values, {})
        assert path is not None
        _check_back(record, name, values, path)
        yield path, _whole(name, shape)._replace(record=record)
        return
    if len(dims.source) != len(shape):
        raise _MisfitError(
            f"its shape is {list(shape)}, and the rename that finds it is for {_text(dims)!r}; "
            "put another rename before it"
        )
    stacked = {axis: _position(record, axis, values[axis]) for axis in record.stacked}
    counts = {axis: _count(record, axis, dims, shape) for axis in record.apart}
    if prod(counts.values()) > _MOST_PARTS:
        raise _MisfitError(
            f"it would be taken apart into {prod(counts.values()):,} arrays; at most "
            f"{_MOST_PARTS:,} are made"
        )
    if not counts and (known := record.forms.get(shape)) is not None:
        # Arrays of one form, such as all experts, of which nothing else is known.
        path = record.path(values, {})
        assert path is not None
        _check_back(record, name, values, path)
        form, begins, sizes = known
        yield path, _Found(name, record, form, begins, stacked, dims.target, sizes)
        return
    parts: list[tuple[str | None, dict[str, int], dict[str, int]]] = []
    for numbers in product(*map(range, counts.values())):
        part = dict(zip(counts, numbers, strict=True))
        path = record.path(values, part)
        in_tree = None if path is None else shapes.get(path)
        sizes = _sizes(record, {**stacked, **part}, counts, shape, in_tree)
        parts.append((path, part, sizes))
    starts = {
        group[place]: _starts(group, place, shape[dim], counts, parts)
        for dim, group in enumerate(dims.source)
        if (place := _place_apart(group, counts)) is not None
    }
    for path, part, sizes in parts:
        if path is None:
            continue
        spans = {
            axis: (starts[axis][i], starts[axis][i + 1], starts[axis][-1])
            for axis, i in part.items()
        }
        kept = _kept(record, dims, shapes.get(path))
        form, begins = form_of(dims, sizes, kept, spans, shape)
        _check_back(record, name, values, path)
        if not counts and path not in shapes and record.has_even_sizes:
            record.forms[shape] = (form, begins, sizes)
        yield path, _Found(name, record, form, begins, stacked, dims.target, sizes)


def _check_back(record: DirectedRename, name: str, values: Mapping[str, str], made: str) -> None:
    """Check that what goes back would come to the same path again."""
    if record.forward is not None:
        there = record.forward.values(made)
        part = {axis: _position(record, axis, values[axis]) for axis in record.stacked}
        if there is None or record.forward.path(there, part) != name:
            raise _MisfitError(
                f"it would become {made!r}, which {record.rename!r} does not turn into this path "
                "again; put something between the fields that tells them apart"
            )
        if separator := record.lost_separator(values):
            raise _MisfitError(
                f"no name in renames tells what {separator!r} stands for; write it into one, as in "
                "'{first}.{rest*}'"
            )
        first = dict.fromkeys(record.apart, 0)
        one, *others = (
            (record.path(texts, first), [texts[axis] for axis in record.stacked])
            for texts in (values, record.other_values(name))
        )
        if others != [one]:
            raise _MisfitError(
                f"it would become {made!r}, and could as well be of {others[0][0]!r}, by "
                f"{record.rename!r}; put something between the fields that tells them apart"
            )


def _text(dims: Arrangement) -> str:
    sides = (" ".join(_group_text(group) for group in groups) for groups in dims)
    return " -> ".join(sides)


def _group_text(group: Sequence[str]) -> str:
    return group[0] if len(group) == 1 else f"({' '.join(group)})" if group else "1"


def _place_apart(group: Sequence[str], counts: Mapping[str, int]) -> int | None:
    """Return where in a dimension the axis is that takes it apart."""
    return next((at for at, axis in enumerate(group) if axis in counts), None)


def _position(record: DirectedRename, axis: str, word: str) -> int:
    """Return the index of the array among those that are stacked along the axis."""
    position = record.position(axis, word)
    if position is None:
        raise _MisfitError(
            f"{word!r} is no number along {axis!r}; give the words in their order, as in "
            f"{{{axis}:a|b}}"
        )
    return position


def _count(record: DirectedRename, axis: str, dims: Arrangement, shape: Shape) -> int:
    """Count the parts along an axis that takes the array apart."""
    words, size = record.words(axis), record.rename.sizes.get(axis)
    if (axis,) in dims.source:
        in_shape = shape[dims.source.index((axis,))]
        if words and len(words) != in_shape:
            raise _MisfitError(
                f"its dimension {axis!r} has {counted(in_shape, 'element')}, and {{{axis}}} has "
                f"{counted(len(words), 'word')}"
            )
        return in_shape
    if words:
        return len(words)
    if isinstance(size, int):
        return size
    dim, group = next((i, group) for i, group in enumerate(dims.source) if axis in group)
    others = [record.rename.sizes.get(other) for other in group if other != axis]
    known = [size for size in others if isinstance(size, int)]
    if len(known) < len(others) or not prod(known):
        raise _MisfitError(f"its rename needs words for {{{axis}}}, its size, or all others'")
    return shape[dim] // prod(known)


def _sizes(
    record: DirectedRename,
    positions: Mapping[str, int],
    counts: Mapping[str, int],
    shape: Shape,
    in_tree: Shape | None,
) -> dict[str, int]:
    """Return the size of each axis of a part: the array's, the rename's, the tree's, or the rest.

    Args:
        record: The record, which has dims.
        positions: By axis that stacks or takes apart, which part this is.
        counts: By axis that takes apart, the number of parts.
        shape: The array's shape.
        in_tree: The shape of the part in the tree, if that is known.
    """
    dims = record.dims
    assert dims is not None
    of_dims = list(zip(dims.source, shape, strict=True))
    sizes = {group[0]: size for group, size in of_dims if len(group) == 1}
    for axis, size in _own_sizes(record, dims, positions):
        sizes.setdefault(axis, size)
    if in_tree is not None and len(in_tree) == len(dims.target):
        for group, size in zip(dims.target, in_tree, strict=True):
            if len(group) == 1 and group[0] not in record.rename.resize:
                sizes.setdefault(group[0], size)
    for group, size in of_dims:
        place = _place_apart(group, counts)
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
            shown = [f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in group]
            raise _MisfitError(
                f"its dimension of {counted(size, 'element')} is not one of "
                f"{' x '.join(shown) or '1'}"
            )
    return {axis: size for axis, size in sizes.items() if axis not in positions}


def _own_sizes(
    record: DirectedRename, dims: Arrangement, positions: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Yield (axis, its size in this part) for each size that the rename has."""
    for group in (*dims.source, *dims.target):
        position = next((positions[axis] for axis in group if axis in positions), None)
        for axis in group:
            size = record.rename.sizes.get(axis)
            if isinstance(size, int):
                yield axis, size
            elif size is not None and position is not None and position < len(size):
                yield axis, size[position]


def _starts(
    group: tuple[str, ...],
    place: int,
    size: int,
    counts: Mapping[str, int],
    parts: list[tuple[str | None, dict[str, int], dict[str, int]]],
) -> list[int]:
    """Return where each part begins in a dimension of the array, or in each row of it; and the end.

    The number of rows is noted in the sizes of the parts, if it is not there.
    """
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


def _kept(record: DirectedRename, dims: Arrangement, in_tree: Shape | None) -> dict[str, int]:
    """Return the sizes of axes that are cut or filled up."""
    sizes = {}
    for axis, size in record.rename.resize.items():
        if size is None and (in_tree is None or len(in_tree) != len(dims.target)):
            raise _MisfitError(
                f"its Rename has resize={{{axis!r}: None}}, and no tree tells the size; give it"
            )
        sizes[axis] = size or (in_tree or ())[dims.target.index((axis,))]
    return sizes


def _target(
    found: Sequence[_Found], arrays: Mapping[str, ArraySpec], in_tree: Shape | None
) -> Target:
    """Put the parts of a target together."""
    first = found[0]
    axes = _stacking_axes(first)
    if any(_stacking_axes(part) != axes for part in found):
        raise _MisfitError("renames with different dims make it; only one can stack arrays")
    dtypes = sorted({_dtype(part, arrays) for part in found})
    if len(dtypes) > 1:
        raise _MisfitError(f"its parts have the dtypes {', '.join(dtypes)}; give one in dtype")
    if len({tuple(part.stacked.values()) for part in found}) < len(found):
        names = ", ".join(repr(part.name) for part in found[:3])
        raise _MisfitError(f"several arrays would become it: {names}; rename or leave out one")
    starts = {dim: _stack_starts(dim, axis, found) for dim, axis in axes.items()}
    count = prod(len(starts_of_dim) - 1 for starts_of_dim in starts.values())
    if len(found) < count:
        raise _MisfitError(
            f"it stacks {counted(count, 'array')}, and the checkpoint has {len(found):,}; is it "
            "whole?"
        )
    shapes = {
        tuple(starts[i][-1] if i in starts else n for i, n in enumerate(part.form.target))
        for part in found
    }
    if len(shapes) > 1:
        raise _MisfitError(f"its parts have different shapes: {sorted(map(list, shapes))}")
    (filled,) = shapes
    view = list(filled)
    if first.record is not None and first.record.dims is not None:
        for axis, size in _kept(first.record, first.record.dims, in_tree).items():
            view[first.groups.index((axis,))] = size
    parts = tuple(
        Part(
            part.name,
            part.form,
            part.starts,
            tuple(
                starts[dim][part.stacked[axes[dim]]] if dim in axes else 0
                for dim in range(len(view))
            ),
        )
        for part in found
    )
    has_own = first.record is not None and first.record.rename.dtype is not None
    shape = _merged(view, first)
    return Target(shape, dtypes[0], parts, tuple(view), has_own, tuple(view) != filled)


def _merged(view: Sequence[int], part: _Found) -> Shape:
    """Return the shape of which this is the view."""
    sizes, shape = iter(view), []
    for group in part.groups:
        rows = next(sizes) if stacking_place(group, [], part.sizes) else 1
        shape.append(rows * next(sizes))
    return tuple(shape)


def _stacking_axes(part: _Found) -> dict[int, str]:
    """Return the dimensions of the target's view along which it is stacked, with their axes."""
    axes: dict[int, str] = {}
    dim = 0
    for group in part.groups:
        place = stacking_place(group, [], part.sizes)
        dim += bool(place)
        if place is not None:
            axes[dim] = group[place]
        dim += 1
    return axes


def _dtype(part: _Found, arrays: Mapping[str, ArraySpec]) -> str:
    """Return the record's dtype, or the array's."""
    dtype = arrays[part.name].dtype
    goal = None if part.record is None else part.record.rename.dtype
    if goal is None or (part.record is not None and part.record.is_back):
        return dtype
    if not converts(dtype, goal):
        raise _MisfitError(
            f"{part.name!r} is {dtype}, and its Rename has dtype={goal!r}, to which it cannot be "
            "converted; quantise with a library that makes scales"
        )
    return str(goal)


def _stack_starts(dim: int, axis: str, found: Sequence[_Found]) -> list[int]:
    """Return where each stacked array begins in a dimension of the target; and the end."""
    sizes: dict[int, int] = {}
    for part in found:
        size = part.form.target[dim]
        if sizes.setdefault(part.stacked[axis], size) != size:
            raise _MisfitError(f"its parts have different sizes along {axis!r}")
    record = found[0].record
    words = () if record is None else record.words(axis)
    count = len(words) or max(sizes) + 1
    if len(sizes) < count:
        first = next(i for i in range(count) if i not in sizes)
        raise _MisfitError(
            f"it is stacked along {axis!r}, and {words[first] if words else first} is missing; is "
            f"the checkpoint whole? Write numbers that do not begin with 0 as {{{axis}:1|2}}"
        )
    return [0, *accumulate(sizes[i] for i in range(count))]
