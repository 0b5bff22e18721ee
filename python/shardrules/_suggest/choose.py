"""Patterns for phrases, each matched with the paths of the whole model before it is given out.

Costs a match of one path per unit, some times over. Must not know why units share a phrase.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import inf, prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._plan.axis_uses import is_gathered, use_of
from shardrules._rules.rules import Rules
from shardrules._suggest.dims import Unit, alone
from shardrules._suggest.patterns import TIGHTEST, least_tightness, pattern_of, text_pattern
from shardrules._suggest.texts import pattern_shown
from shardrules._text import brief

if TYPE_CHECKING:
    from shardrules._plan.axis_uses import AxisUse
    from shardrules._rules.dialects import Dialect
    from shardrules._rules.patterns import Pattern
    from shardrules._suggest.dims import Dims, Side, Unit
    from shardrules._suggest.patterns import Label, Phrase

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


_MOST_TEXTS: Final = 1000


def listed(
    units: Sequence[Unit], labels: Sequence[Label]
) -> tuple[list[tuple[Pattern, Any]], list[tuple[Unit, ...]]]:
    """A rule for each path, where patterns are texts."""
    of: dict[str, list[Unit]] = defaultdict(list)
    value_of: dict[str, Any] = {}
    for unit, label in zip(units, labels, strict=True):
        text = text_pattern(unit.words)
        # Numbers in names are written out, path by path.
        for one in [unit] if text is not None else alone(unit):
            of[text or one.path].append(one)
            value_of[text or one.path] = label.value
    if len(of) > _MOST_TEXTS:
        raise ValueError(
            f"the dialect lists paths one by one, and {len(of):,} differ not only in "
            f"numbers; more than {_MOST_TEXTS:,} are no rules: choose a dialect of regexes"
        )
    return list(value_of.items()), [tuple(alike) for alike in of.values()]


def proven(
    said: list[Phrase],
    units: Sequence[Unit],
    dialect: Dialect,
    least: int,
) -> tuple[list[tuple[Pattern, Any]], list[tuple[Unit, ...]]]:
    """Patterns as loose as they may be: of a path of each unit only its own matches.

    Patterns that leave numbers open may also match what patterns with numbers, before them, match.

    Raises:
        ValueError: No pattern of the dialect tells some path from another.
    """
    words = [unit.words for unit in units]
    tightness = [max(least, least_tightness(phrase)) for phrase in said]
    owner = {unit: number for number, phrase in enumerate(said) for unit in phrase.units}
    paths = [unit.path for unit in units]
    while True:
        pairs = [
            (pattern_of(phrase, words, dialect, tight), phrase.label.value)
            for phrase, tight in zip(said, tightness, strict=True)
        ]
        wrong = dict(_wrong(Rules(pairs, dialect), paths, owner, said))
        loose = {rule: path for rule, path in wrong.items() if tightness[rule] < TIGHTEST}
        if not loose:
            break
        for rule in loose:
            tightness[rule] += 1
    if wrong:
        rule, path = next(iter(wrong.items()))
        raise ValueError(
            f"{brief(path)}: no pattern of the dialect {dialect.name} tells it from the leaves of "
            f"{pattern_shown(pairs[rule][0])}: rename it, or choose another dialect"
        )
    return pairs, [tuple(units[number] for number in phrase.units) for phrase in said]


def _wrong(
    rules: Rules, paths: Sequence[str], owner: Mapping[int, int], said: Sequence[Phrase]
) -> Iterator[tuple[int, str]]:
    """The rules that match a path of another, or not one of their own; and a path of each."""
    for unit, path in enumerate(paths):
        own = owner.get(unit)
        matches = rules.all_matches(path)
        if own is not None and own not in matches:
            yield own, path
        for rule in matches:
            is_later = own is not None and rule > own and said[own].label.is_numbered
            if rule != own and not is_later:
                yield rule, path
