"""Arrays of a tree from the arrays of a checkpoint and renames: the parts that make each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import prod
from typing import Final, NamedTuple

from shardrules._base.dtypes import converts
from shardrules._base.io import FileError
from shardrules._base.text import counted, near_shown
from shardrules._checkpoint.layouts import Form, Shape, Span, form_of, plain_form
from shardrules._checkpoint.names import DirectedRename, MisfitError
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.fold import fold_paths

_MOST_NEAR: Final = 5
# More parts than any model has experts or layers: a shape in a file may say anything.
_MOST_PARTS: Final = 1_000_000


class Problems:
    """Problems with arrays, told in one error; equal lines with many paths become one."""

    def __init__(self, name: str) -> None:
        self._name = name
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
        raise FileError(*lines)


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

    @property
    def is_plain(self) -> bool:
        """Say whether it is one array as it is, but for its name and dtype."""
        form = self.parts[0].form
        return len(self.parts) == 1 and form.is_plain and form.shape == self.shape


class Targets(NamedTuple):
    """The arrays of a tree by their paths, and what `save` has to look at again."""

    by_path: dict[str, Target]
    doubles: list[tuple[str, Target]]
    """What `shared` records would have made of paths that other arrays make."""
    unmatched: list[str]
    """The names that no record finds; they are paths, too."""


class _Member(NamedTuple):
    """Part whose place in the target is not known yet."""

    name: str
    record: DirectedRename | None
    form: Form
    starts: Shape
    stacked: Mapping[str, int]
    """By axis that stacks, the index among the stacked arrays."""


def targets_of(
    arrays: Mapping[str, ArraySpec], records: Sequence[DirectedRename], problems: Problems
) -> Targets:
    """Return the arrays of the tree; raise an error with all problems, if there are any.

    If records go back, arrays and tree change places.
    """
    if not records:
        plain = {name: plain_target(name, array) for name, array in arrays.items()}
        return Targets(plain, [], list(arrays))
    parts_by_path: dict[str, list[_Member]] = defaultdict(list)
    unmatched = []
    for name, array in arrays.items():
        for record, values in _records_for(name, records):
            try:
                if record is None:
                    unmatched.append(name)
                    parts_by_path[name].append(_Member(name, None, *_as_it_is(array.shape), {}))
                elif record.rename.path is not None:
                    for path, part in _parts_of_array(name, array.shape, record, values):
                        parts_by_path[path].append(part)
            except MisfitError as error:
                problems.add(str(error), name)
    targets, doubles = {}, []
    for path, parts in parts_by_path.items():
        # An array of the path's own goes before what is shared.
        shared = [part for part in parts if part.record is not None and part.record.rename.shared]
        unshared = [part for part in parts if part not in shared] if shared else parts
        try:
            targets[path] = _target_of(unshared or shared, arrays)
            if unshared and shared:
                doubles.append((path, _target_of(shared, arrays)))
        except MisfitError as error:
            problems.add(str(error), path)
    for record in records:
        if not record.rename.optional and all(record.values(name) is None for name in arrays):
            problems.add(
                "this Rename finds no array; correct its name, with {layer} for what differs in "
                "it, or give optional=True if some models have such arrays and others have not",
                record.text,
                [*arrays],
            )
    problems.raise_all()
    return Targets(targets, doubles, unmatched)


def plain_target(name: str, array: ArraySpec) -> Target:
    """Return an array as it is."""
    form, starts = _as_it_is(array.shape)
    return Target(array.shape, array.dtype, (Part(name, form, starts, starts),))


@lru_cache(maxsize=4096)
def _as_it_is(shape: Shape) -> tuple[Form, Shape]:
    return plain_form(shape), (0,) * len(shape)


def _records_for(
    name: str, records: Sequence[DirectedRename]
) -> list[tuple[DirectedRename | None, dict[str, str]]]:
    """Return the records for a name: those that share it, and the first other one, or None.

    On the way back, a leaf that has a record of its own is no copy of another.
    """
    sharing: list[tuple[DirectedRename | None, dict[str, str]]] = []
    for record in records:
        if (values := record.values(name)) is not None:
            if not record.rename.shared:
                return [*(() if record.is_back else sharing), (record, values)]
            sharing.append((record, values))
    return sharing if sharing and records[0].is_back else [*sharing, (None, {})]


def _parts_of_array(
    name: str, shape: Shape, record: DirectedRename, values: Mapping[str, str]
) -> Iterator[tuple[str, _Member]]:
    """Yield (path, part) for each part of the array."""
    stacked = record.positions(values)
    is_even = all(isinstance(size, int) for size in record.rename.sizes.values())
    key = shape, () if is_even else tuple(stacked.values())
    if key not in record.regions:
        record.regions[key] = list(_regions(record, shape, stacked))
    for which, form, starts in record.regions[key]:
        yield record.path(values, which), _Member(name, record, form, starts, stacked)


def _regions(
    record: DirectedRename, shape: Shape, stacked: Mapping[str, int]
) -> Iterator[tuple[Mapping[str, int], Form, Shape]]:
    """Yield (which one along axes that take apart, form, begin) of each region of an array."""
    dims = record.dims
    if record.rename.dims is None:
        yield {}, *_as_it_is(shape)
        return
    if len(dims.source) != len(shape):
        raise MisfitError(
            f"its shape is {list(shape)}, and the rename that finds it has "
            f"dims={record.rename.dims!r}; put another rename before it"
        )
    repeated = _said_sizes(record, [axis for axis in dims.stacked if axis not in stacked], {})
    rows = list(zip(dims.source, shape, strict=True))
    counts = [_count(record, group, size) for group, size in rows]
    if prod(counts) > _MOST_PARTS:
        raise MisfitError(
            f"it would be taken apart into {prod(counts):,} arrays; at most {_MOST_PARTS:,} are "
            "made"
        )
    cuts = [_cuts(record, *row, n, stacked) for row, n in zip(rows, counts, strict=True)]
    for region in product(*map(enumerate, cuts)):
        which = {
            group[0]: i
            for group, (i, _) in zip(dims.source, region, strict=True)
            if {*group[:1]} & {*record.apart}
        }
        sizes = {axis: size for _, (sizes, _) in region for axis, size in sizes.items()}
        spans = [span for _, (_, span) in region]
        yield which, *form_of(dims, repeated | sizes, spans, shape)


def _cuts(
    record: DirectedRename, group: Sequence[str], size: int, count: int, stacked: Mapping[str, int]
) -> list[tuple[dict[str, int], Span]]:
    """Return (sizes of axes, span) of the parts of a dimension: one, or those it is taken into."""
    apart = [axis for axis in group[:1] if axis in record.apart]
    inner = group[len(apart) :]
    known = [
        _said_sizes(record, inner, {**stacked, **dict.fromkeys(apart, i)}) for i in range(count)
    ]
    unknown = [axis for axis in inner if axis not in known[0]] if known else []
    if len(unknown) > 1:
        raise MisfitError(f"its rename needs the sizes of all but one of {', '.join(group)}")
    ends = [*accumulate((prod(sizes.values()) for sizes in known), initial=0)]
    rest = size // ends[-1] if unknown else 1
    if ends[-1] * rest != size:
        of_axes = {**record.rename.sizes, **dict.fromkeys(apart, count)}
        factors = [f"{axis}={of_axes[axis]}" if axis in of_axes else axis for axis in group]
        raise MisfitError(
            f"its dimension of {counted(size, 'element')} is not one of "
            f"{' x '.join(factors) or '1'}"
        )
    return [
        (sizes | dict.fromkeys(unknown, rest), (begin * rest, end * rest))
        for sizes, (begin, end) in zip(known, pairwise(ends), strict=True)
    ]


def _said_sizes(
    record: DirectedRename, axes: Sequence[str], positions: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of axes that the rename says, of the part at these positions."""
    sizes = {}
    for axis in axes:
        size = record.rename.sizes.get(axis)
        if isinstance(size, tuple):
            groups = (*record.dims.source, *record.dims.target)
            firsts = (group[0] for group in groups if axis in group)
            at = next((positions[first] for first in firsts if first in positions), -1)
            if at >= len(size):
                raise MisfitError(f"it has a part {at}, and its rename has sizes of {len(size)}")
            size = size[at] if at >= 0 else None
        if size is not None:
            sizes[axis] = size
    return sizes


def _count(record: DirectedRename, group: Sequence[str], size: int) -> int:
    """Count the parts along a dimension."""
    if not group or group[0] not in record.apart:
        return 1
    if words := record.words(group[0]):
        return len(words)
    count, *inner = (record.rename.sizes.get(axis) for axis in group)
    lengths = [len(each) for each in inner if isinstance(each, tuple)]
    if isinstance(count, int) or lengths:
        return count if isinstance(count, int) else lengths[0]
    if None in inner:
        raise MisfitError(f"its rename needs words for {{{group[0]}}}, its size, or all others'")
    return size // prod(each for each in inner if isinstance(each, int))


def _target_of(members: Sequence[_Member], arrays: Mapping[str, ArraySpec]) -> Target:
    """Put the parts of a target together."""
    record = members[0].record
    axes = _stacking_axes(members[0])
    if any(_stacking_axes(part) != axes for part in members):
        raise MisfitError("renames with different dims make it; only one can stack arrays")
    dtypes = sorted({_dtype_of_part(part, arrays) for part in members})
    if len(dtypes) > 1:
        raise MisfitError(f"its parts have the dtypes {', '.join(dtypes)}; give one in dtype")
    if len({tuple(part.stacked.values()) for part in members}) < len(members):
        names = ", ".join(repr(part.name) for part in members[:3])
        raise MisfitError(f"several arrays would become it: {names}; rename or leave out one")
    ends = {dim: _stack_ends(dim, axis, members) for dim, axis in axes.items()}
    if len(members) < (count := prod(len(each) - 1 for each in ends.values())):
        raise MisfitError(
            f"it stacks {counted(count, 'array')}, and the checkpoint has {len(members):,}; is it "
            "whole?"
        )
    filled = [ends[dim][-1] if dim in ends else n for dim, n in enumerate(members[0].form.target)]
    parts = []
    for part in members:
        box = [
            ends[dim][(i := part.stacked[axes[dim]]) : i + 2] if dim in axes else (0, size)
            for dim, size in enumerate(filled)
        ]
        if part.form.target != tuple(end - begin for begin, end in box):
            shapes = sorted({part.form.target for part in members})
            raise MisfitError(f"its parts have different shapes: {list(map(list, shapes))}")
        parts.append(Part(part.name, part.form, part.starts, tuple(begin for begin, _ in box)))
    shape = list(filled)
    if record is not None:
        for axis, size in record.rename.resize.items():
            shape[record.dims.target.index((axis,))] = size
    has_own = record is not None and record.rename.dtype is not None
    return Target(tuple(shape), dtypes[0], tuple(parts), has_own)


def _stacking_axes(part: _Member) -> dict[int, str]:
    """Return the dimensions of the target along which it is stacked, with their axes."""
    groups = part.record.dims.target if part.record else ()
    return {dim: group[0] for dim, group in enumerate(groups) if {*group[:1]} & {*part.stacked}}


def _dtype_of_part(part: _Member, arrays: Mapping[str, ArraySpec]) -> str:
    """Return the record's dtype, or the array's."""
    dtype = arrays[part.name].dtype
    if part.record is None or part.record.rename.dtype is None or part.record.is_back:
        return dtype
    goal: str = part.record.rename.dtype
    if not converts(dtype, goal):
        raise MisfitError(
            f"{part.name!r} is {dtype}, and its Rename has dtype={goal!r}, to which it cannot be "
            "converted; quantise with a library that makes scales"
        )
    return goal


def _stack_ends(dim: int, axis: str, members: Sequence[_Member]) -> list[int]:
    """Return where each stacked array begins in a dimension of the target; and the end."""
    assert members[0].record is not None
    sizes = {part.stacked[axis]: part.form.target[dim] for part in members}
    words = members[0].record.words(axis) or range(max(sizes) + 1)
    missing = next((word for i, word in enumerate(words) if i not in sizes), None)
    if missing is not None:
        raise MisfitError(
            f"it is stacked along {axis!r}, and {missing} is missing; is the checkpoint whole? "
            f"Write numbers that do not begin with 0 as {{{axis}:1|2}}"
        )
    return [0, *accumulate(sizes[i] for i in range(len(words)))]
