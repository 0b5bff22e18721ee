"""Biases and scales, which are cut as the kernels that they belong to.

Costs a look-up per folded path. Must not know how kernels are cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Final

from shardrules._planning.axis_uses import use_of
from shardrules._suggesting.choosing import parts_of_cuts

if TYPE_CHECKING:
    from shardrules._suggesting.choosing import Cuts
    from shardrules._suggesting.units import Unit

__all__ = ["with_followers"]

_SCALES: Final = re.compile(r"(.*_)?scales?(_\w+)?")
# Arrays that have such a name belong to the kernel of their module; others begin with its name.
_OF_MODULE: Final = re.compile(r"b|bias|scales?")


def with_followers(
    units: Sequence[Unit], cuts: Sequence[Cuts], axis_sizes: Mapping[str, int]
) -> list[Cuts]:
    """Cuts biases by the axes that cut the columns of their kernels, and scales by all of theirs.

    Axes that cut them already, for the bytes, do so where that is still possible; what would hold
    more bytes then stays as it is.
    """
    kernels: dict[tuple[str, ...], list[int]] = {}
    for number, unit in enumerate(units):
        if not unit.dims.is_vector:
            kernels.setdefault(_names(unit)[:-1], []).append(number)
    joined_cuts = list(cuts)
    for number, unit in enumerate(units):
        if unit.dims.is_vector:
            *module, name = _names(unit)
            for kernel in kernels.get(tuple(module), ()):
                if _belongs(name, _names(units[kernel])[-1], len(kernels[*module])):
                    own = dict(_followed(unit, units[kernel], cuts[kernel], name))
                    joined = _joined(unit.part.shape, own, cuts[number], axis_sizes)
                    if parts_of_cuts(joined, axis_sizes) >= parts_of_cuts(cuts[number], axis_sizes):
                        joined_cuts[number] = joined
                    break
    return joined_cuts


def _names(unit: Unit) -> tuple[str, ...]:
    """The words of its path, without the `value` of flax nnx."""
    names = tuple(word.text for word in unit.words)
    return names[:-1] if len(names) > 1 and names[-1] == "value" else names


def _belongs(name: str, kernel: str, kernels: int) -> bool:
    """Whether an array of this name belongs to the kernel, one of so many in the module."""
    if _OF_MODULE.fullmatch(name):
        return kernels == 1
    is_its = name.startswith(f"{kernel}_") or name == f"{kernel.removesuffix('_blocks')}_scales"
    return is_its and (name.endswith("_bias") or _SCALES.fullmatch(name) is not None)


def _followed(
    unit: Unit, kernel: Unit, cuts: Cuts, name: str
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(a dimension of the array, the axes that cut that of the kernel), where there are some."""
    shape, dims = kernel.part.shape, kernel.part.dims
    if _SCALES.fullmatch(name) and 1 < len(unit.part.shape) <= len(shape):
        yield from ((dim, cuts[dim]) for dim in range(len(unit.part.shape)) if cuts[dim])
        return
    made = [dim for dim, role in enumerate(dims) if role not in ("in", "lookup", "unknown")]
    for dim, size in enumerate(unit.part.shape):
        same = next((other for other in made if shape[other] == size), None)
        if same is not None:
            made.remove(same)
            # Along other dimensions, axes of experts are as those of fsdp.
            uses = {"tensor", "layers", *({"experts"} if dims[same] == "experts" else ())}
            yield dim, tuple(axis for axis in cuts[same] if use_of(axis) in uses)


def _joined(
    shape: tuple[int, ...],
    own: Mapping[int, tuple[str, ...]],
    cuts: Cuts,
    axis_sizes: Mapping[str, int],
) -> Cuts:
    """The axes of the kernel, and then those of the array itself, as far as they divide it."""
    joined: list[tuple[str, ...]] = [()] * len(shape)
    used: set[str] = set()
    wanted = [(dim, axis) for dim, axes in own.items() for axis in axes]
    wanted += [(dim, axis) for dim, axes in enumerate(cuts) for axis in axes]
    for dim, axis in wanted:
        parts = prod(axis_sizes[name] for name in (*joined[dim], axis))
        if axis not in used and shape[dim] % parts == 0:
            used.add(axis)
            joined[dim] = tuple(sorted((*joined[dim], axis), key=list(axis_sizes).index))
    return tuple(joined)
