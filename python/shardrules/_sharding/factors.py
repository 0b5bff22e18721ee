"""Mesh axes in parts: tp=8 as tp_0=4, tp_1=2, so that an array of 4 heads can be cut by tp_0.

Parts are named after their axis and stand side by side, the first outermost, so P(("tp_0", "tp_1"))
on the mesh of the parts is P("tp") on the mesh before. Costs a look at each axis. Must not know
about arrays.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import prod
from typing import NamedTuple

from shardrules._format import mesh_shown
from shardrules._mesh_sizes import check_bounds

__all__ = ["Cut", "cuts_of", "in_parts"]


class Cut(NamedTuple):
    """Axes of the mesh that cut an array together or not at all."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    """What they cut by, in steps: an axis that may be factored is cut by its primes, to see which
    fit. Only if all fit can an array on this mesh have the axes."""


def cuts_of(
    axis: str, axis_sizes: Mapping[str, int], *, has_parts: bool, by_factors: bool
) -> list[Cut]:
    """The cuts of an axis of a spec; an absent axis is one of size 0.

    Args:
        axis: The axis.
        axis_sizes: Devices along each mesh axis.
        has_parts: Whether the axis may be on the mesh in parts.
        by_factors: Whether some of its factors may cut an array without the others.
    """
    if not has_parts:
        return [Cut((axis,), (axis_sizes.get(axis, 0),))]
    parts = _parts_of(axis, axis_sizes)
    sizes = [axis_sizes.get(part, 0) for part in parts]
    if not by_factors:
        return [Cut(parts, (prod(sizes),))]
    return [Cut((part,), _primes(size)) for part, size in zip(parts, sizes, strict=True)]


def _parts_of(axis: str, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The parts of this axis that are axes of the mesh; the axis itself if there are none."""
    if axis in axis_sizes:
        return (axis,)
    part = re.compile(rf"{re.escape(axis)}(_[0-9]+)+")
    return tuple(filter(part.fullmatch, axis_sizes)) or (axis,)


def in_parts(axis_sizes: Mapping[str, int], factors: Mapping[str, Iterable[int]]) -> dict[str, int]:
    """The sizes of a mesh with some of its axes in parts.

    The parts are as few as can be if each factor divides the next. Otherwise they are the axis's
    prime factors.

    Args:
        axis_sizes: Devices along each mesh axis.
        factors: For each axis, the numbers of shards that some of its parts are to make.

    Raises:
        ValueError: A part would have the name of another axis, or there are too many parts.
    """
    sizes: dict[str, int] = {}
    for axis, size in axis_sizes.items():
        parts = _sizes_of_parts(size, factors.get(axis, ()))
        names = [axis] if len(parts) == 1 else [f"{axis}_{i}" for i in range(len(parts))]
        for name in names:
            if name in sizes or (name != axis and name in axis_sizes):
                raise ValueError(
                    f"the axis {axis!r} of the mesh {mesh_shown(axis_sizes)} cannot be factored: "
                    f"one part would be {name!r}, which the mesh has already; rename that axis"
                )
        sizes.update(zip(names, parts, strict=True))
    check_bounds(sizes)
    return sizes


def _sizes_of_parts(size: int, factors: Iterable[int]) -> tuple[int, ...]:
    chain = [1, *sorted(factors), size]
    if all(larger % smaller == 0 for smaller, larger in pairwise(chain)):
        return tuple(larger // smaller for smaller, larger in pairwise(chain))
    return _primes(size)


@functools.cache
def _primes(number: int) -> tuple[int, ...]:
    """The prime factors in ascending order; of 0 and 1 the number itself."""
    found, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return (*found, number) if number > 1 or not found else tuple(found)
