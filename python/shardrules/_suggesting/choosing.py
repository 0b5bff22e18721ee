"""The choice of a spec for each part of a model: few bytes on a device, and little to send.

Each way to lay the mesh axes along the dimensions that they divide costs bytes, and discomfort: a
number for what an expert would avoid. The fewest bytes that any way would hold are the start; then
discomfort is paid off while that costs hardly any bytes. Costs some thousand products per distinct
shape. Must not know about paths.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import inf, prod
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._planning.axis_uses import is_gathered

if TYPE_CHECKING:
    from shardrules._planning.axis_uses import AxisUse
    from shardrules._suggesting.dims import Dims, Side

__all__ = ["SLACK", "Array", "Cuts", "choose", "discomfort_of", "parts_of_cuts"]

Cuts = tuple[tuple[str, ...], ...]
"""Per dimension the axes that cut it."""

# The share of the fewest bytes that comfort may cost in all.
SLACK: Final = 0.008
# A cut into parts of fewer elements is hardly worth what it sends.
_FEW_ELEMENTS: Final = 8
_COUNTED: Final = ("experts", "heads", "layers")

# Per use of an axis and side of a leaf the discomfort of this cut; what is not there is not cut.
_DISCOMFORT: Final[dict[AxisUse, dict[Side, int]]] = {
    # Gathered whole before use: any side will do. Few and large parts are the residual side's.
    "fsdp": {"outer": 0, "inner": 1, "heads": 1, "vocabulary": 2, "experts": 3, "head": 3,
             "window": 8, "vector": 10},
    # Column-parallel into heads and hidden units, row-parallel back: one sum for each pair.
    "tensor": {"inner": 0, "heads": 0, "vocabulary": 0, "outer": 4, "experts": 2,
               "window": 9, "vector": 11},
    # Beside experts, as another axis of fsdp.
    "experts": {"experts": -6, "outer": 2, "inner": 3, "heads": 3, "vocabulary": 4,
                "window": 9, "vector": 11},
    # A stage of a pipeline has layers of its own.
    "layers": {"layers": -6},
    "data": {},
}  # fmt: skip


# What tensor axes may cut of keys and values, routers and latents; of all else anything.
_TENSOR: Final[dict[str, tuple[Side, ...]]] = {"heads": ("heads", "inner"), "none": ()}


class Array(NamedTuple):
    """Arrays that are alike, as far as bytes and sides go."""

    shape: tuple[int, ...]
    dims: Dims
    bytes: int
    """Of all of them."""


class _Way(NamedTuple):
    """A way to cut an array."""

    bytes: float
    discomfort: int
    cuts: Cuts


def choose(
    arrays: Sequence[Array], axis_sizes: Mapping[str, int], uses: Mapping[str, AxisUse]
) -> list[Cuts]:
    """Per array the axes that cut each dimension."""
    used = {axis: size for axis, size in axis_sizes.items() if size > 1 and uses[axis] != "data"}

    @cache
    def ways_of(shape: tuple[int, ...], dims: Dims) -> list[_Way]:
        return _front(_ways(shape, dims, used, uses))

    fronts = [
        [way._replace(bytes=way.bytes * one.bytes) for way in ways_of(one.shape, one.dims)]
        for one in arrays
    ]
    # Arrays that are alike are cut alike; biases and norms are all whole, or all cut.
    key_of = [None if one.dims.is_vector else (one.shape, one.dims) for one in arrays]
    groups: dict[object, list[list[_Way]]] = defaultdict(list)
    for key, front in zip(key_of, fronts, strict=True):
        groups[key].append(front)
    most = _comfortable(list(groups.values()), SLACK * sum(front[0].bytes for front in fronts))
    most_of = dict(zip(groups, most, strict=True))
    return [_at_most(front, most_of[key]).cuts for key, front in zip(key_of, fronts, strict=True)]


def _comfortable(groups: list[list[list[_Way]]], slack: float) -> list[float]:
    """Per group of arrays the discomfort that is paid off, the cheapest first."""
    chosen = [inf] * len(groups)
    spent = [0.0] * len(groups)
    steps = sorted(
        (sum(_at_most(front, level).bytes - front[0].bytes for front in group), -level, place)
        for place, group in enumerate(groups)
        for level in {way.discomfort for front in group for way in front}
    )
    for cost, level, place in steps:
        if -level < chosen[place] and cost - spent[place] <= slack:
            slack -= cost - spent[place]
            spent[place], chosen[place] = cost, -level
    return chosen


def _at_most(front: list[_Way], discomfort: float) -> _Way:
    """The way with the fewest bytes among those of so much discomfort, or the least."""
    return next((way for way in front if way.discomfort <= discomfort), front[-1])


def _ways(
    shape: tuple[int, ...],
    dims: Dims,
    axis_sizes: Mapping[str, int],
    uses: Mapping[str, AxisUse],
) -> Iterator[_Way]:
    """All ways to lay the axes along the dimensions that they divide."""
    axes = list(axis_sizes)
    choices: list[tuple[int | None, ...]] = [
        (None, *(dim for dim, side in enumerate(dims.sides)
                 if side in _DISCOMFORT[uses[axis]] and shape[dim] % axis_sizes[axis] == 0))
        for axis in axes
    ]  # fmt: skip
    for places in itertools.product(*choices):
        cuts: Cuts = tuple(
            tuple(axis for axis, place in zip(axes, places, strict=True) if place == dim)
            for dim in range(len(shape))
        )
        discomfort = discomfort_of(shape, dims, cuts, axis_sizes, uses)
        if discomfort is not None:
            yield _Way(1 / parts_of_cuts(cuts, axis_sizes), discomfort, cuts)


def parts_of_cuts(cuts: Cuts, axis_sizes: Mapping[str, int]) -> int:
    """Into how many parts an array is cut."""
    return prod(axis_sizes[axis] for of in cuts for axis in of)


def discomfort_of(
    shape: tuple[int, ...],
    dims: Dims,
    cuts: Cuts,
    axis_sizes: Mapping[str, int],
    uses: Mapping[str, AxisUse],
) -> int | None:
    """How much of what an expert would avoid these cuts are; None if they cannot be."""
    parts = [prod(axis_sizes[axis] for axis in of) for of in cuts]
    if any(size % count for size, count in zip(shape, parts, strict=True)):
        return None
    found = 2 * sum(
        count > 1 and size // count < _FEW_ELEMENTS and side not in _COUNTED
        for size, count, side in zip(shape, parts, dims.sides, strict=True)
    )
    for side, of in zip(dims.sides, cuts, strict=True):
        for axis in of:
            if side not in _DISCOMFORT[uses[axis]] or (
                uses[axis] == "tensor" and side not in _TENSOR.get(dims.tensor, (side,))
            ):
                return None
            # Of biases, tensor axes cut columns, if anything.
            is_odd = dims.is_vector and side == "experts" and uses[axis] == "tensor"
            found += _DISCOMFORT[uses[axis]]["vector" if is_odd else side]
    computing = {axis: size for axis, size in axis_sizes.items() if not is_gathered(axis)}
    return None if _cuts_heads(shape, dims, cuts, computing) else found


def _cuts_heads(
    shape: tuple[int, ...], dims: Dims, cuts: Cuts, computing: Mapping[str, int]
) -> bool:
    """Whether a head is cut by axes that compute with its parts; others gather it whole."""
    if dims.unit == 1 or "inner" not in dims.sides:
        return False
    inner = dims.sides.index("inner")
    parts = prod(computing.get(axis, 1) for axis in cuts[inner])
    return parts > 1 and shape[inner] // parts % dims.unit != 0


def _front(ways: Iterator[_Way]) -> list[_Way]:
    """The ways to which no other is better in both, the fewest bytes first."""
    front: list[_Way] = []
    for way in sorted(ways, key=lambda one: (one.bytes, one.discomfort)):
        if not front or way.discomfort < front[-1].discomfort:
            front.append(way)
    return front
