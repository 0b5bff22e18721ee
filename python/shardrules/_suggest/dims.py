"""The folded paths of a model as units: their words, and what their dimensions are.

Costs once per folded path. Must not know about meshes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from shardrules._plan.roles import parts_of_model
from shardrules._suggest.patterns import apart, numbered, words_of
from shardrules._text import brief

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.fold import Folded
    from shardrules._plan.roles import Part
    from shardrules._plan.table import Columns
    from shardrules._suggest.patterns import Word

Side = Literal[
    "layers", "experts", "vocabulary", "outer", "inner", "heads", "head", "fused", "window",
    "vector", "one",
]  # fmt: skip
"""A stack of layers; of experts; rows of an embedding; the side of the residual stream, or the
other; heads, and the size of one; kernels that are stacked into one; a window of a convolution; the
only dimension; of size 1."""

# More is no window, and a stack of more kernels, such as those of keys and values, is none.
_WINDOW: Final = 32
_FUSED: Final = 4
# Kernels of attention that make several things, by how many; others have heads there.
_FUSES: Final = ((3, re.compile(r"\w*qkv\w*|query_key_value|c_attn|in_proj\w*")),
                 (2, re.compile(r"\w*kv\w*|key_value\w*")))  # fmt: skip
_ATTENTION: Final = re.compile(r"att(n|ention)")
_KEYS: Final = re.compile(r"(to_)?w?(k|v|kv)(_(proj|einsum))?|(key|value)(_proj)?")
# To the latent space of DeepSeek's attention, where a norm needs all of a token's elements.
_TO_LATENT: Final = re.compile(r"(linear_)?w?(q|kv|qkv)_(a|down)(_\w+)?")
# Heads of keys whose size nothing tells have as many elements, or half as many in small models.
_HEAD: Final = 128
_SMALL: Final = 2048


class Dims(NamedTuple):
    """The dimensions of a leaf."""

    sides: tuple[Side, ...]
    is_known: bool
    """Whether shapes and words leave no doubt which side is which."""
    unit: int = 1
    """Elements of the inner side that belong together: a head's."""
    is_assumed: bool = False
    """Whether nothing tells the unit, and it is taken to be the usual one."""
    tensor: Literal["any", "heads", "none"] = "any"
    """What tensor axes may cut: of keys and values heads alone, since there are fewer of them than
    of queries; of routers and of projections to a latent space nothing."""

    @property
    def is_vector(self) -> bool:
        """Whether it is a bias or a norm."""
        return not {"outer", "inner", "vocabulary", "heads"} & {*self.sides}

    @property
    def is_small(self) -> bool:
        """Whether it is surely a bias, a norm or a scalar, and no kernel of unknown dimensions."""
        return {*self.sides} <= {"layers", "experts", "vector", "one"}


def dims_of(parts: Sequence[Part]) -> list[Dims]:
    """The dimensions of each part of a model."""
    widths = _widths(parts)
    found = [_dims(part, width) for part, width in zip(parts, widths, strict=True)]
    queries: dict[str, int] = defaultdict(int)
    for part, dims in zip(parts, found, strict=True):
        if part.is_attention:
            queries[part.input_key] = max(queries[part.input_key], _inner_size(part, dims))
    return [
        _bounded(part, dims, queries[part.input_key])
        for part, dims in zip(parts, found, strict=True)
    ]


def _inner_size(part: Part, dims: Dims) -> int:
    return prod(
        size
        for size, side in zip(part.shape, dims.sides, strict=True)
        if side in ("inner", "heads", "head")
    )


def _bounded(part: Part, dims: Dims, queries: int) -> Dims:
    """The dimensions, with what tensor axes may cut of them; `queries` are the widest ones."""
    if dims.is_vector:
        return dims
    if part.is_router or (part.is_attention and _TO_LATENT.fullmatch(part.module)):
        return dims._replace(tensor="none")
    inner = _inner_size(part, dims)
    if not (part.is_attention and _KEYS.fullmatch(part.module) and inner < queries):
        return dims
    head = _HEAD if part.width >= _SMALL else _HEAD // 2
    if "inner" in dims.sides and inner % head == 0:
        dims = dims._replace(unit=head, is_assumed=True)
    return dims._replace(tensor="heads")


def _widths(parts: Sequence[Part]) -> list[frozenset[int]]:
    """Per part the residual widths that are near it: its tower's; outside of towers, all.

    The residual stream goes through layers, and in and out of them. So it is the size that most
    leaves in the layers of a tower have, among those that leaves outside have too.
    """
    towers = [_tower(part) for part in parts]
    outside = {
        size
        for part, tower in zip(parts, towers, strict=True)
        if tower is None
        for size in _free(part)
    }
    votes: dict[str, Counter[int]] = defaultdict(Counter)
    for part, tower in zip(parts, towers, strict=True):
        if tower is not None:
            votes[tower].update({size: part.leaves * _layers(part) for size in {*_free(part)}})
    width_of = {tower: _most_voted(of, outside) for tower, of in votes.items() if of}
    every = frozenset(width_of.values()) or frozenset(part.width for part in parts[:1])
    return [frozenset([width_of[tower]]) if tower in width_of else every for tower in towers]


def _most_voted(votes: Counter[int], outside: set[int]) -> int:
    return max(votes, key=lambda size: (size in outside, votes[size], -size))


def _tower(part: Part) -> str | None:
    """What comes before the number of a layer; None outside of layers."""
    before, number, _ = part.pattern.partition("{")
    if number:
        return before
    if "stack" in part.dims:
        return "/".join(part.pattern.split("/")[:2])
    return None


def _layers(part: Part) -> int:
    return part.size("stack")


def _free(part: Part) -> list[int]:
    """The sizes of the dimensions of one layer's, and one expert's, array."""
    return [
        size
        for size, role in zip(part.shape, part.dims, strict=True)
        if role not in ("stack", "experts") and size > 1
    ]


def _dims(part: Part, widths: frozenset[int]) -> Dims:
    sides: dict[int, Side] = {}
    free = []
    for dim, (size, role) in enumerate(zip(part.shape, part.dims, strict=True)):
        if role == "stack":
            sides[dim] = "layers"
        elif role == "experts":
            sides[dim] = "experts"
        elif size <= 1:
            sides[dim] = "one"
        else:
            free.append(dim)
    is_known = True
    if len(free) == 1:
        sides[free[0]] = "vector"
    elif free and not ({"in", "lookup", "unknown"} & {*part.dims}):
        # A norm, or parameters of each channel: nothing is contracted.
        sides.update(dict.fromkeys(free, "vector"))
    elif free:
        found, is_known = _matrix(part, free, widths)
        sides.update(found)
    return Dims(tuple(sides[dim] for dim in range(len(part.shape))), is_known)


def _matrix(part: Part, free: list[int], widths: frozenset[int]) -> tuple[dict[int, Side], bool]:
    shape = part.shape
    if "lookup" in part.dims:
        return {d: "vocabulary" if part.dims[d] == "lookup" else "outer" for d in free}, True
    ins = [dim for dim in free if part.dims[dim] == "in"]
    outs = [dim for dim in free if part.dims[dim] == "out"]
    residual = [dim for dim in free if shape[dim] in widths]
    has_heads = _has_heads(part) and len(free) > 2 and len(residual) == 1
    if _is_convolution(shape, free) and not has_heads:
        return _convolution(shape, free), True
    if len(free) > 2 and len(residual) == 1:
        return _heads(part, free, residual[0]), True
    if len(free) > 3:
        return dict.fromkeys(free, "window"), False
    if not ins or not outs:
        by_size = sorted(free, key=lambda dim: (shape[dim], -dim))
        return {**dict.fromkeys(free, "outer"), by_size[-1]: "inner"}, False
    inner, is_known = _inner(part, ins, outs, widths)
    found: dict[int, Side] = {**dict.fromkeys(ins + outs, "outer"), **dict.fromkeys(inner, "inner")}
    if len(inner) > 1:
        found |= _of_heads(part, inner)
    return found, is_known


def _inner(
    part: Part, ins: list[int], outs: list[int], widths: frozenset[int]
) -> tuple[list[int], bool]:
    """The inner side, and whether that is sure."""
    size_in, size_out = (prod(part.shape[dim] for dim in side) for side in (ins, outs))
    if len(ins) != len(outs):
        return (ins if len(ins) > len(outs) else outs), True
    if (size_in in widths) != (size_out in widths):
        return (outs if size_in in widths else ins), True
    if part.flow is not None:
        return (ins if part.flow == "writes" else outs), True
    if size_in == size_out:
        return outs, False
    return (ins if size_in > size_out else outs), size_in not in widths


def _has_heads(part: Part) -> bool:
    """Whether names say that it is a kernel of attention, and no convolution in it."""
    path = part.pattern.lower()
    return (part.is_attention or bool(_ATTENTION.search(path))) and "conv" not in path


def _heads(part: Part, free: list[int], residual: int) -> dict[int, Side]:
    """The sides of a kernel with several dimensions beside the residual one: those of heads."""
    others = [dim for dim in free if dim != residual]
    found: dict[int, Side] = {residual: "outer"}
    has_few = part.shape[others[0]] <= _FUSED
    if has_few and (len(others) > 2 or not _has_heads(part)):
        return {**found, others[0]: "fused", **_of_heads(part, others[1:])}
    return found | _of_heads(part, others)


def _of_heads(part: Part, dims: list[int]) -> dict[int, Side]:
    """The sides of the inner dimensions of a kernel, such as heads and the size of one."""
    first, *rest = dims
    if any(part.shape[first] == n and names.fullmatch(part.module) for n, names in _FUSES) and rest:
        return {first: "fused", **_of_heads(part, rest)}
    return {first: "heads" if rest else "inner", **dict.fromkeys(rest, "head")}


def _is_convolution(shape: tuple[int, ...], free: list[int]) -> bool:
    """Whether there is a window, before or behind the channels: a square, or small and odd."""
    sizes = [shape[dim] for dim in free]
    ends = sizes[:2], sizes[-2:]
    if len(free) > 3:
        return any(first == second < _WINDOW for first, second in ends)
    return len(free) == 3 and any(size < _WINDOW and size % 2 for size in (sizes[0], sizes[-1]))


def _convolution(shape: tuple[int, ...], free: list[int]) -> dict[int, Side]:
    """The channels are first in torch, and last in flax: where the larger numbers are."""
    first, last = free[:2], free[-2:]
    ends = first if shape[free[0]] > shape[free[-1]] else last
    channels = sorted(ends, key=lambda dim: shape[dim])
    return {**dict.fromkeys(free, "window"), channels[0]: "outer", channels[1]: "inner"}


# Some 0.3 ms each.
_MOST_PATHS: Final = 4000


class Unit(NamedTuple):
    """The leaves of one folded path."""

    folded: Folded
    words: tuple[Word, ...]
    part: Part
    dims: Dims
    every: Sequence[str]
    """The paths of all leaves of the tree."""
    bytes: int
    """Of all of them, whole."""
    names: tuple[Any, ...] = ()
    """The logical axis names of their dimensions, if rules are for names."""

    @property
    def path(self) -> str:
        """That of the first of its leaves."""
        return self.every[int(self.folded.rows[0])]


def units_of(columns: Columns, heads: Mapping[int, int]) -> list[Unit]:
    """The leaves that need a rule.

    Args:
        columns: Of the tree, without rules.
        heads: Per row that is a projection of attention the elements of a head, where they are
            known.

    Raises:
        ValueError: The paths have too many names.
    """
    kinds = columns.kinds
    needed = [
        kind.shape is not None and (kind.status != "placed" or kind.names is not None)
        for kind in kinds
    ]
    folded = apart((one for one in columns.folded if needed[one.group]), columns.paths)
    if len(folded) > _MOST_PATHS:
        raise ValueError(
            f"the tree has {len(folded):,} paths that differ not only in numbers, such as "
            f"{brief(columns.paths[folded[0].rows[0]])}; rules that name more than {_MOST_PATHS:,} "
            "are no rules: cut each array's largest dimension, with [('.*', shardrules.fsdp(axis))]"
        )
    parts = parts_of_model(folded, [kind.shape for kind in kinds], [kind.names for kind in kinds])
    return [
        Unit(
            one,
            words,
            part,
            _with_head(dims, heads.get(int(one.rows[0]))),
            columns.paths,
            kinds[one.group].bytes * len(one.rows),
            kinds[one.group].names or (),
        )
        for one, words, part, dims in zip(
            folded, words_of(folded), parts, dims_of(parts), strict=True
        )
    ]


def _with_head(dims: Dims, size: int | None) -> Dims:
    return dims if size is None else dims._replace(unit=size, is_assumed=False)


def with_rows(unit: Unit, chosen: npt.NDArray[np.bool_]) -> list[Unit]:
    """The unit with those of its leaves that are chosen; nothing if none are."""
    rows = unit.folded.rows[chosen[unit.folded.rows]]
    return [_of_rows(unit, unit.words, rows)] if len(rows) else []


def alone(unit: Unit) -> list[Unit]:
    """Each leaf as a unit."""
    rows = unit.folded.rows
    return [_of_rows(unit, unit.words, rows[i : i + 1]) for i in range(len(rows))]


def _of_rows(unit: Unit, words: tuple[Word, ...], rows: npt.NDArray[np.intp]) -> Unit:
    return unit._replace(
        folded=unit.folded._replace(rows=rows),
        words=words,
        part=replace(unit.part, leaves=len(rows)),
        bytes=unit.bytes // len(unit.folded.rows) * len(rows),
    )


def parted(unit: Unit) -> list[Unit]:
    """Per distinct words with numbers a unit."""
    rows = list(map(int, unit.folded.rows))
    found: dict[tuple[Word, ...], list[int]] = defaultdict(list)
    paths = [unit.every[row] for row in rows]
    for row, words in zip(rows, numbered(unit.words, paths), strict=True):
        found[words].append(row)
    return [_of_rows(unit, words, np.array(chosen, np.intp)) for words, chosen in found.items()]
