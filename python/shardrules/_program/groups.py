"""Parses replica groups and source-target pairs, and finds the mesh axes that they span."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

_GROUPS: Final = re.compile(r"(?:replica_groups|source_target_pairs)=")
_EXPLICIT: Final = re.compile(r"\{(?:\{[\d,]*\},?)*\}")
_IOTA: Final = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH: Final = re.compile(
    r"mesh\[([^\]]*)\](?:, device_ids=\(((?:\([^)]*\)|[^()]|T\([^)]*\))*)\))? \{([^}]*)\}"
)
_MOST_DEVICES: Final = 1 << 17
"""Of a program, more than machines have; a text may have any number."""
_AXIS: Final = re.compile(r"'?([^',=]+?)'?=(\d+)")
_AXIS_PART: Final = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")


class ReplicaGroups(tuple[tuple[int, ...], ...]):
    """Partitions that exchange data, by group; of collective-permute (source, target) pairs."""

    __slots__ = ()

    def axes(self, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
        """List the mesh axes along which members of a group differ, in the mesh's order.

        A group spans these axes if their sizes' product is its size. XLA may split an axis.

        Args:
            axis_sizes: Devices along each mesh axis; partitions are positions in the mesh.
        """
        sizes = tuple(axis_sizes.values())
        members = np.concatenate([np.array(group, np.int64) for group in self])
        firsts = np.repeat([group[0] for group in self], [len(group) for group in self])
        places = zip(
            axis_sizes,
            np.unravel_index(members, sizes),
            np.unravel_index(firsts, sizes),
            strict=True,
        )
        return tuple(axis for axis, place, first in places if (place != first).any())


def read_groups(attributes: str, partitions: int) -> ReplicaGroups:
    """Parse the replica groups of a collective, or its (source, target) pairs."""
    begin = _GROUPS.search(attributes)
    if begin is None:
        return _parsed_groups(_EXPLICIT, "{}", partitions)
    for form in _FORMS:
        if match := form.match(attributes, begin.end()):
            return _parsed_groups(form, match[0], partitions)
    raise ValueError(f"replica groups of an unknown form: {attributes[begin.start() :][:80]}")


@lru_cache(maxsize=256)
def _parsed_groups(form: re.Pattern[str], text: str, partitions: int) -> ReplicaGroups:
    """Parse groups; those without a member are one group of all partitions."""
    match = form.fullmatch(text)
    assert match is not None
    return ReplicaGroups(_FORMS[form](match) or (tuple(range(_within_bound(partitions))),))


def _within_bound(count: int) -> int:
    if count > _MOST_DEVICES:
        raise ValueError(f"the text has groups of {count} devices, of {_MOST_DEVICES:,} at most")
    return count


_Groups = tuple[tuple[int, ...], ...]


def _explicit(text: re.Match[str]) -> _Groups:
    return tuple(map(_group_numbers, re.findall(r"\{([\d,]+)\}", text[0])))


def _iota(text: re.Match[str]) -> _Groups:
    return _group_rows(_transposed(text[2], text[3]), _group_numbers(text[1])[1])


def _mesh(text: re.Match[str]) -> _Groups:
    """Parse groups along mesh axes, or parts of them: `:(4)2` are 2 parts of each 4."""
    sizes = {axis: int(size) for axis, size in _AXIS.findall(text[1])}
    along = [
        (axis, int(before or 1), int(before or 1) * int(size or sizes[axis]))
        for axis, before, size in _AXIS_PART.findall(text[3])
    ]
    parts = []
    for axis, size in sizes.items():
        cuts = {1, size, *(cut for name, *ends in along if name == axis for cut in ends)}
        parts += [(axis, begin, end) for begin, end in pairwise(sorted(cuts))]
    inner = [
        i
        for name, begin, end in along
        for i, (axis, first, _) in enumerate(parts)
        if axis == name and begin <= first < end
    ]
    outer = [i for i in range(len(parts)) if i not in inner]
    dims = [end // begin for _, begin, end in parts]
    ids = (
        _device_ids(text[2], _within_bound(prod(sizes.values())))
        .reshape(dims)
        .transpose(outer + inner)
    )
    return _group_rows(ids, prod(dims[i] for i in inner))


def _device_ids(text: str | None, count: int) -> npt.NDArray[np.int64]:
    """Parse the devices of a mesh: [4,2]T(1,0), or one by one; ascending without a text."""
    if text is None:
        return np.arange(count)
    sizes, _, order = text.partition("]")
    if order:
        return _transposed(sizes.strip("(["), order.strip("T()"))
    return np.array(_group_numbers(text), np.int64)


def _transposed(sizes: str, order: str | None) -> npt.NDArray[np.int64]:
    """Flatten 0, 1, 2, ... in an array of these sizes, transposed to this order."""
    shape = _group_numbers(sizes)
    ids = np.arange(_within_bound(prod(shape))).reshape(shape)
    return (ids.transpose(_group_numbers(order)) if order else ids).ravel()


def _group_rows(ids: npt.NDArray[np.int64], size: int) -> _Groups:
    return tuple(map(tuple, ids.reshape(-1, size).tolist()))


def _group_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


_FORMS: Final = {_EXPLICIT: _explicit, _IOTA: _iota, _MESH: _mesh}
