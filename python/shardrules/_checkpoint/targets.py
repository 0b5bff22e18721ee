"""Arrays of a tree from the arrays of a checkpoint and renames: the parts that make each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import Final, NamedTuple

from shardrules._base.dtypes import converts
from shardrules._base.io import FileError
from shardrules._base.text import counted, near_shown
from shardrules._checkpoint.layouts import (
    Arrangement,
    Form,
    Groups,
    Shape,
    form_of,
    plain_form,
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
    """Where the region begins in the array."""
    at: Shape
    """Where it begins in the target."""


class Target(NamedTuple):
    """Array of the tree."""

    shape: Shape
    dtype: str
    parts: tuple[Part, ...]
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
    unfound: list[str]
    """The names that no record finds; they are paths, too."""


class _MisfitError(Exception):
    """Problem of one array."""


class _Region(NamedTuple):
    """Part of an array."""

    which: Mapping[str, int]
    """Which one it is along each axis that takes apart."""
    form: Form
    starts: Shape


class _Found(NamedTuple):
    """Part whose place in the target is not known yet."""

    name: str
    record: DirectedRename | None
    form: Form
    starts: Shape
    stacked: Mapping[str, int]
    """By axis that stacks, the index among the stacked arrays."""

    @property
    def groups(self) -> Groups:
        """Return the dimensions of the target with their axes, if its record tells them."""
        return () if self.record is None or self.record.dims is None else self.record.dims.target


def targets_of(
    arrays: Mapping[str, ArraySpec],
    records: Sequence[DirectedRename],
    problems: Problems,
    forward: Sequence[DirectedRename] = (),
) -> Targets:
    """Return the arrays of the tree.

    Args:
        arrays: The arrays of the checkpoint.
        records: What renames do; in the direction from the tree, arrays and tree change places.
        problems: Where to note what does not fit.
        forward: In the direction from the tree: what the renames do in the other.
    """
    if not records:
        plain = {name: plain_target(name, array) for name, array in arrays.items()}
        return Targets(plain, [], list(arrays))
    parts_by_path, unfound, finding = _found_parts(arrays, records, problems, forward)
    targets, doubles = {}, []
    for path, parts in parts_by_path.items():
        # An array of the path's own goes before what is shared.
        unshared = [part for part in parts if part.record is None or not part.record.rename.shared]
        try:
            targets[path] = _joined_target(unshared or parts, arrays)
            if unshared and len(unshared) < len(parts):
                shared = [part for part in parts if part not in unshared]
                doubles.append((path, _joined_target(shared, arrays)))
        except _MisfitError as error:
            problems.add(str(error), path)
    for record in records:
        if record.rename.optional or id(record) in finding or _finds(record, arrays):
            continue
        problems.add(
            "this Rename finds no array; correct its name, with {layer} for what differs in it, "
            "or give optional=True if some models have such arrays and others have not",
            record.text,
            [*arrays],
        )
    return Targets(targets, doubles, unfound)


def _found_parts(
    arrays: Mapping[str, ArraySpec],
    records: Sequence[DirectedRename],
    problems: Problems,
    forward: Sequence[DirectedRename],
) -> tuple[dict[str, list[_Found]], list[str], set[int]]:
    """Return (the parts of each path, the names left, the ids of records that find a name)."""
    parts_by_path: dict[str, list[_Found]] = defaultdict(list)
    finding: set[int] = set()
    unfound = []
    for name, array in arrays.items():
        matches = list(_matches(name, records))
        finding |= {id(record) for record, _ in matches}
        has_own = bool(matches) and not matches[-1][0].rename.shared
        if has_own and matches[-1][0].is_back:
            # A leaf that has a record of its own is no copy of another.
            matches = matches[-1:]
        if not has_own and not (matches and matches[-1][0].is_back):
            unfound.append(name)
            parts_by_path[name].append(_Found(name, None, *_as_it_is(array.shape), {}))
        for record, values in matches:
            try:
                for path, part in _parts_of_array(name, array.shape, record, values):
                    if record.is_back:
                        _check_back(record, values, name, path, forward)
                    parts_by_path[path].append(part)
            except _MisfitError as error:
                problems.add(str(error), name)
    return parts_by_path, unfound, finding


def plain_target(name: str, array: ArraySpec) -> Target:
    """Return an array as it is."""
    form, starts = _as_it_is(array.shape)
    return Target(array.shape, array.dtype, (Part(name, form, starts, starts),))


@lru_cache(maxsize=4096)
def _as_it_is(shape: Shape) -> tuple[Form, Shape]:
    return plain_form(shape), (0,) * len(shape)


def _matches(
    name: str, records: Sequence[DirectedRename]
) -> Iterator[tuple[DirectedRename, dict[str, str]]]:
    """Yield the records that count for a name: those that share it, and the first other one."""
    for record in records:
        values = record.values(name)
        if values is not None:
            yield record, values
            if not record.rename.shared:
                return


def _finds(record: DirectedRename, names: Iterable[str]) -> bool:
    return any(record.values(name) is not None for name in names)


def _parts_of_array(
    name: str, shape: Shape, record: DirectedRename, values: Mapping[str, str]
) -> Iterator[tuple[str, _Found]]:
    """Yield (path, part) for each part of the array; nothing if it is left out."""
    if record.rename.path is None:
        return
    stacked = {axis: _position(record, axis, values[axis]) for axis in record.stacked}
    for region in _regions(record, shape, stacked):
        part = _Found(name, record, region.form, region.starts, stacked)
        yield record.path(values, region.which), part


def _check_back(
    record: DirectedRename,
    values: Mapping[str, str],
    path: str,
    name: str,
    forward: Sequence[DirectedRename],
) -> None:
    """Check that what goes back to a name would come to the same path again."""
    if separator := record.lost_separator(values):
        raise _MisfitError(
            f"the name in {record.rename!r} does not tell what {separator!r} stands for; write it "
            "there, as in '{first}.{rest*}'"
        )
    finds = ((each, each.values(name)) for each in forward if not each.rename.shared)
    again, texts = next((each for each in finds if each[1] is not None), (None, None))
    if record.rename.shared or again is None or texts is None:
        return
    part = {axis: _position(record, axis, values[axis]) for axis in record.stacked}
    if again.rename is not record.rename or again.path(texts, part) != path:
        raise _MisfitError(
            f"it would become {name!r}, which {again.rename!r} does not turn into this path again"
        )


def _position(record: DirectedRename, axis: str, word: str) -> int:
    """Return the index of the array among those that are stacked along the axis."""
    position = record.position(axis, word)
    if position is None:
        raise _MisfitError(
            f"{word!r} is no number along {axis!r}; give the words in their order, as in "
            f"{{{axis}:a|b}}"
        )
    return position


def _regions(record: DirectedRename, shape: Shape, stacked: Mapping[str, int]) -> Sequence[_Region]:
    """Return the regions of an array, one for each array that it is taken apart into."""
    if record.dims is None:
        return (_Region({}, *_as_it_is(shape)),)
    is_even = all(isinstance(size, int) for size in record.rename.sizes.values())
    key = shape, () if is_even else tuple(stacked.values())
    if key not in record.regions:
        record.regions[key] = list(_made_regions(record, record.dims, shape, stacked))
    return record.regions[key]  # type: ignore[no-any-return]


def _made_regions(
    record: DirectedRename, dims: Arrangement, shape: Shape, stacked: Mapping[str, int]
) -> Iterator[_Region]:
    if len(dims.source) != len(shape):
        raise _MisfitError(
            f"its shape is {list(shape)}, and the rename that finds it has "
            f"dims={record.rename.dims!r}; put another rename before it"
        )
    counts = {axis: _count(record, axis, dims, shape) for axis in record.apart}
    if prod(counts.values()) > _MOST_PARTS:
        raise _MisfitError(
            f"it would be taken apart into {prod(counts.values()):,} arrays; at most "
            f"{_MOST_PARTS:,} are made"
        )
    for numbers in product(*map(range, counts.values())):
        index = dict(zip(counts, numbers, strict=True))
        positions = {**stacked, **index}
        sizes: dict[str, int] = {}
        for group in (*dims.target, *dims.source):
            sizes |= _own_sizes(record, group, positions)
        spans = {}
        for size, group in zip(shape, dims.source, strict=True):
            span = _measured(record, (size, group), sizes, counts, positions)
            if group and group[0] in counts:
                spans[group[0]] = span
        yield _Region(index, *form_of(dims, sizes, spans, shape))


def _own_sizes(
    record: DirectedRename, group: Sequence[str], positions: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of a dimension's axes that the rename says, of the parts at these places."""
    position = next((positions[axis] for axis in group if axis in positions), -1)
    sizes = {}
    for axis in group:
        size = record.rename.sizes.get(axis)
        if isinstance(size, tuple):
            size = size[position] if 0 <= position < len(size) else None
        if size is not None and axis not in positions:
            sizes[axis] = size
    return sizes


def _measured(
    record: DirectedRename,
    dimension: tuple[int, Sequence[str]],
    sizes: dict[str, int],
    counts: Mapping[str, int],
    positions: Mapping[str, int],
) -> tuple[int, int]:
    """Return where a region begins and ends in a dimension.

    The size of the axis that is not known is added to the sizes.

    Args:
        record: The record.
        dimension: Its size and its axes.
        sizes: Of axes, as far as they are known.
        counts: Of parts along axes that take apart.
        positions: Which part it is along these, and along axes that stack.
    """
    size, group = dimension
    axis = group[0] if group and group[0] in counts else ""
    inner, at = [each for each in group if each != axis], positions.get(axis, 0)

    def width(i: int) -> int:
        of_part = sizes | _own_sizes(record, group, {**positions, axis: i})
        return prod(of_part.get(each, 1) for each in inner)

    ends: Sequence[int]
    if any(isinstance(record.rename.sizes.get(each), tuple) for each in inner):
        ends = [0, *accumulate(map(width, range(counts.get(axis, 1))))]
    else:  # there may be very many parts
        ends = range(0, counts.get(axis, 1) * width(at) + 1, width(at))
    unknown = [each for each in inner if each not in sizes]
    if len(unknown) > 1:
        raise _MisfitError(f"its rename needs the sizes of all but one of {', '.join(group)}")
    rest = size // ends[-1] if unknown and ends[-1] else 1
    if ends[-1] * rest != size:
        of_axes = {**record.rename.sizes, **counts}
        factors = [f"{each}={of_axes[each]}" if each in of_axes else each for each in group]
        product_shown = " x ".join(factors) or "1"
        raise _MisfitError(
            f"its dimension of {counted(size, 'element')} is not one of {product_shown}"
        )
    sizes |= dict.fromkeys(unknown, rest)
    return (ends[at] * rest, ends[at + 1] * rest) if axis else (0, size)


def _count(record: DirectedRename, axis: str, dims: Arrangement, shape: Shape) -> int:
    """Count the parts along an axis that takes the array apart."""
    size, group = next(row for row in zip(shape, dims.source, strict=True) if axis in row[1])
    if words := record.words(axis):
        return len(words)
    given_sizes = [record.rename.sizes.get(each) for each in group]
    if isinstance(count := record.rename.sizes.get(axis), int):
        return count
    several = next((len(each) for each in given_sizes if isinstance(each, tuple)), None)
    if several is not None:
        return several
    others = [each for each in given_sizes if isinstance(each, int)]
    if len(others) < len(group) - 1:
        raise _MisfitError(f"its rename needs words for {{{axis}}}, its size, or all others'")
    return size // prod(others)


def _joined_target(members: Sequence[_Found], arrays: Mapping[str, ArraySpec]) -> Target:
    """Put the parts of a target together."""
    first = members[0]
    axes = _stacking_axes(first)
    if any(_stacking_axes(part) != axes for part in members):
        raise _MisfitError("renames with different dims make it; only one can stack arrays")
    dtypes = sorted({_dtype_of_part(part, arrays) for part in members})
    if len(dtypes) > 1:
        raise _MisfitError(f"its parts have the dtypes {', '.join(dtypes)}; give one in dtype")
    if len({tuple(part.stacked.values()) for part in members}) < len(members):
        names = ", ".join(repr(part.name) for part in members[:3])
        raise _MisfitError(f"several arrays would become it: {names}; rename or leave out one")
    starts = {dim: _stack_starts(dim, axis, members) for dim, axis in axes.items()}
    count = prod(len(starts_of_dim) - 1 for starts_of_dim in starts.values())
    if len(members) < count:
        raise _MisfitError(
            f"it stacks {counted(count, 'array')}, and the checkpoint has {len(members):,}; is it "
            "whole?"
        )
    shapes = {
        tuple(starts[i][-1] if i in starts else n for i, n in enumerate(part.form.target))
        for part in members
    }
    if len(shapes) > 1:
        raise _MisfitError(f"its parts have different shapes: {sorted(map(list, shapes))}")
    (filled,) = shapes
    shape = list(filled)
    for axis, size in first.record.rename.resize.items() if first.record else ():
        shape[first.groups.index((axis,))] = size
    parts = tuple(
        Part(
            part.name,
            part.form,
            part.starts,
            tuple(
                starts[dim][part.stacked[axes[dim]]] if dim in axes else 0
                for dim in range(len(shape))
            ),
        )
        for part in members
    )
    has_own = first.record is not None and first.record.rename.dtype is not None
    return Target(tuple(shape), dtypes[0], parts, has_own, tuple(shape) != filled)


def _stacking_axes(part: _Found) -> dict[int, str]:
    """Return the dimensions of the target along which it is stacked, with their axes."""
    firsts = enumerate(group[0] if group else "" for group in part.groups)
    return {dim: axis for dim, axis in firsts if axis in part.stacked}


def _dtype_of_part(part: _Found, arrays: Mapping[str, ArraySpec]) -> str:
    """Return the record's dtype, or the array's."""
    dtype = arrays[part.name].dtype
    if part.record is None or part.record.rename.dtype is None or part.record.is_back:
        return dtype
    goal: str = part.record.rename.dtype
    if not converts(dtype, goal):
        raise _MisfitError(
            f"{part.name!r} is {dtype}, and its Rename has dtype={goal!r}, to which it cannot be "
            "converted; quantise with a library that makes scales"
        )
    return goal


def _stack_starts(dim: int, axis: str, members: Sequence[_Found]) -> list[int]:
    """Return where each stacked array begins in a dimension of the target; and the end."""
    sizes: dict[int, int] = {}
    for part in members:
        size = part.form.target[dim]
        if sizes.setdefault(part.stacked[axis], size) != size:
            raise _MisfitError(f"its parts have different sizes along {axis!r}")
    record = members[0].record
    words = () if record is None else record.words(axis)
    count = len(words) or max(sizes) + 1
    if len(sizes) < count:
        first = next(i for i in range(count) if i not in sizes)
        raise _MisfitError(
            f"it is stacked along {axis!r}, and {words[first] if words else first} is missing; is "
            f"the checkpoint whole? Write numbers that do not begin with 0 as {{{axis}:1|2}}"
        )
    return [0, *accumulate(sizes[i] for i in range(count))]
