"""Reads the dimensions of a model's arrays from shapes and paths: `Unit`, `Dims`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from shardrules._base.text import brief
from shardrules._plan.roles import Part, parts_of_model
from shardrules._plan.suggest.patterns import Path, apart, numbered, words_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.fold import Folded
    from shardrules._plan.plan import Plan

Side = Literal[
    "layers", "experts", "vocabulary", "residual", "hidden", "heads", "head", "fused", "window",
    "vector", "other",
]  # fmt: skip
"""Role of a dimension: a stack of layers; of experts; rows of an embedding; the side of the
residual stream, or the other one; heads, and the size of one; kernels that are stacked into one; a
window of a convolution; the only dimension; of size 1."""

# Sizes of windows, and of stacks of kernels, such as those of keys and values, are smaller.
_WINDOW: Final = 32
_FUSED: Final = 4
# Kernels of attention with several outputs, by how many; others have heads there.
_FUSES: Final = ((3, re.compile(r"\w*qkv\w*|query_key_value|c_attn|in_proj\w*")),
                 (2, re.compile(r"\w*kv\w*|key_value\w*")))  # fmt: skip
_ATTENTION: Final = re.compile(r"att(n|ention)")
_KEYS: Final = re.compile(r"(to_)?w?(k|v|kv)(_(proj|einsum))?|(key|value)(_proj)?")
# To the latent space of DeepSeek's attention, where a norm needs all of a token's elements.
_TO_LATENT: Final = re.compile(r"(linear_)?w?(q|kv|qkv)_(a|down)(_\w+)?")
# Elements of a head of unknown size; small models have half as many.
_HEAD: Final = 128
_SMALL: Final = 2048


class Dims(NamedTuple):
    """Roles of a leaf's dimensions."""

    sides: tuple[Side, ...]
    is_known: bool
    """True if shapes and words leave no doubt which side is which."""
    unit: int = 1
    """Elements of the hidden side that belong together: a head's."""
    is_assumed: bool = False
    """True if the unit is a guess."""
    tensor: Literal["any", "heads", "none"] = "any"
    """Sides that tensor axes may shard: of keys and values heads only, since there are fewer of
    them than of queries; of routers and of projections to a latent space none."""

    @property
    def is_vector(self) -> bool:
        """True for biases and norms."""
        return not {"residual", "hidden", "vocabulary", "heads"} & {*self.sides}

    @property
    def is_small(self) -> bool:
        """True for biases, norms and scalars, but not for kernels of unknown dimensions."""
        return {*self.sides} <= {"layers", "experts", "vector", "other"}


def _dims_of_model(parts: Sequence[Part]) -> list[Dims]:
    pairs = [(part, _dims(part, width)) for part, width in zip(parts, _widths(parts), strict=True)]
    queries: dict[str, int] = defaultdict(int)
    for part, dims in pairs:
        if part.is_attention:
            queries[part.input_key] = max(queries[part.input_key], _hidden_size(part, dims))
    return [_with_tensor(part, dims, queries[part.input_key]) for part, dims in pairs]


def _hidden_size(part: Part, dims: Dims) -> int:
    pairs = zip(part.shape, dims.sides, strict=True)
    return prod(size for size, side in pairs if side in ("hidden", "heads", "head"))


def _with_tensor(part: Part, dims: Dims, queries: int) -> Dims:
    """Say what tensor axes may shard of the dimensions; `queries` is the size of the widest."""
    if dims.is_vector:
        return dims
    if part.is_router or (part.is_attention and _TO_LATENT.fullmatch(part.module)):
        return dims._replace(tensor="none")
    hidden = _hidden_size(part, dims)
    if not (part.is_attention and _KEYS.fullmatch(part.module) and hidden < queries):
        return dims
    head = _HEAD if part.width >= _SMALL else _HEAD // 2
    if "hidden" in dims.sides and hidden % head == 0:
        dims = dims._replace(unit=head, is_assumed=True)
    return dims._replace(tensor="heads")


def _widths(parts: Sequence[Part]) -> list[frozenset[int]]:
    """Find the residual widths near each part: its tower's; outside of towers, all.

    The residual width is the size that most leaves in the layers of a tower have, among those that
    leaves outside have too.
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
            layers = part.leaves * part.size("stack")
            votes[tower].update(dict.fromkeys(_free(part), layers))

    def winner(sizes: Counter[int]) -> int:
        return max(sizes, key=lambda size: (size in outside, sizes[size], -size))

    width_of = {tower: winner(sizes) for tower, sizes in votes.items() if sizes}
    widths = frozenset(width_of.values()) or frozenset(part.width for part in parts[:1])
    return [frozenset([width_of[tower]]) if tower in width_of else widths for tower in towers]


def _tower(part: Part) -> str | None:
    """Return the path before the number of a layer; None outside of layers."""
    before, number, _ = part.pattern.partition("{")
    if number:
        return before
    return "/".join(part.pattern.split("/")[:2]) if "stack" in part.dims else None


def _free(part: Part) -> list[int]:
    """List the sizes of one layer's, and one expert's, array."""
    return [
        size
        for size, role in zip(part.shape, part.dims, strict=True)
        if role not in ("stack", "experts") and size > 1
    ]


def _dims(part: Part, widths: frozenset[int]) -> Dims:
    sides: dict[int, Side] = {}
    free = []
    for dim, (size, role) in enumerate(zip(part.shape, part.dims, strict=True)):
        if role in ("stack", "experts"):
            sides[dim] = "layers" if role == "stack" else "experts"
        elif size <= 1:
            sides[dim] = "other"
        else:
            free.append(dim)
    is_known = True
    if len(free) == 1 or not part.is_product:
        # Of a norm, or parameters of each channel, nothing is contracted.
        sides |= dict.fromkeys(free, "vector")
    elif free:
        of_free, is_known = _matrix_dims(part, free, widths)
        sides |= of_free
    return Dims(tuple(sides[dim] for dim in range(len(part.shape))), is_known)


def _matrix_dims(
    part: Part, free: list[int], widths: frozenset[int]
) -> tuple[dict[int, Side], bool]:
    shape = part.shape
    if "lookup" in part.dims:
        return {d: "vocabulary" if part.dims[d] == "lookup" else "residual" for d in free}, True
    ins = [dim for dim in free if part.dims[dim] == "in"]
    outs = [dim for dim in free if part.dims[dim] == "out"]
    residual = [dim for dim in free if shape[dim] in widths]
    has_heads = _has_heads(part) and len(free) > 2 and len(residual) == 1
    if _is_convolution(shape, free) and not has_heads:
        return _convolution_sides(shape, free), True
    if len(free) > 2 and len(residual) == 1:
        return _heads(part, free, residual[0]), True
    if len(free) > 3:
        return dict.fromkeys(free, "window"), False
    if not ins or not outs:
        by_size = sorted(free, key=lambda dim: (shape[dim], -dim))
        return {**dict.fromkeys(free, "residual"), by_size[-1]: "hidden"}, False
    hidden, is_known = _hidden(part, ins, outs, widths)
    return {**dict.fromkeys(ins + outs, "residual"), **_of_heads(part, hidden)}, is_known


def _hidden(
    part: Part, ins: list[int], outs: list[int], widths: frozenset[int]
) -> tuple[list[int], bool]:
    """Return the hidden side, and whether that is sure."""
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
    """Say whether names mean a kernel of attention, and no convolution in it."""
    path = part.pattern.lower()
    return (part.is_attention or bool(_ATTENTION.search(path))) and "conv" not in path


def _heads(part: Part, free: list[int], residual: int) -> dict[int, Side]:
    """Names the sides of a kernel with several dimensions beside the residual one."""
    first, *rest = (dim for dim in free if dim != residual)
    if part.shape[first] <= _FUSED and (len(rest) > 1 or not _has_heads(part)):
        return {residual: "residual", first: "fused", **_of_heads(part, rest)}
    return {residual: "residual", **_of_heads(part, [first, *rest])}


def _of_heads(part: Part, dims: list[int]) -> dict[int, Side]:
    """Names the hidden sides of a kernel, such as heads and the size of one."""
    first, *rest = dims
    if any(part.shape[first] == n and names.fullmatch(part.module) for n, names in _FUSES) and rest:
        return {first: "fused", **_of_heads(part, rest)}
    return {first: "heads" if rest else "hidden", **dict.fromkeys(rest, "head")}


def _is_convolution(shape: tuple[int, ...], free: list[int]) -> bool:
    """Look for a window, before or behind the channels: a square, or small and odd."""
    sizes = [shape[dim] for dim in free]
    ends = sizes[:2], sizes[-2:]
    if len(free) > 3:
        return any(first == second < _WINDOW for first, second in ends)
    return len(free) == 3 and any(size < _WINDOW and size % 2 for size in (sizes[0], sizes[-1]))


def _convolution_sides(shape: tuple[int, ...], free: list[int]) -> dict[int, Side]:
    """Names the sides of a convolution; channels are first in torch, and last in flax."""
    first, last = free[:2], free[-2:]
    ends = first if shape[free[0]] > shape[free[-1]] else last
    channels = sorted(ends, key=lambda dim: shape[dim])
    return {**dict.fromkeys(free, "window"), channels[0]: "residual", channels[1]: "hidden"}


# Some 0.3 ms each.
_MOST_PATHS: Final = 4000


class Unit(NamedTuple):
    """Leaves of one folded path."""

    folded: Folded
    words: Path
    part: Part
    dims: Dims
    paths: Sequence[str]
    """Paths of all leaves of the tree."""
    bytes: int
    """Bytes of all its leaves together."""

    @property
    def path(self) -> str:
        """Path of the first leaf."""
        return self.paths[int(self.folded.rows[0])]

    def with_rows(self, rows: Sequence[int], words: Path | None = None) -> Unit:
        """Return the unit with these of its leaves."""
        return self._replace(
            folded=self.folded._replace(rows=np.array(rows, np.intp)),
            words=self.words if words is None else words,
            part=replace(self.part, leaves=len(rows)),
            bytes=self.bytes // len(self.folded.rows) * len(rows),
        )

    def where(self, mask: npt.NDArray[np.bool_]) -> list[Unit]:
        """Return the unit with the leaves in a mask of rows; nothing if none are."""
        rows = self.folded.rows[mask[self.folded.rows]]
        return [self.with_rows(rows.tolist())] if len(rows) else []

    def leaves(self) -> list[Unit]:
        """Split the unit into one for each leaf."""
        return [self.with_rows([row]) for row in self.folded.rows.tolist()]

    def numbered(self) -> list[Unit]:
        """Split the unit into one for each of its words with numbers."""
        rows: list[int] = self.folded.rows.tolist()
        rows_of: dict[Path, list[int]] = defaultdict(list)
        paths = [self.paths[row] for row in rows]
        for row, words in zip(rows, numbered(self.words, paths), strict=True):
            rows_of[words].append(row)
        return [self.with_rows(of_words, words) for words, of_words in rows_of.items()]


def units_of(columns: Plan, heads: Mapping[int, int]) -> list[Unit]:
    """Collect the leaves that need a rule."""
    kinds = columns.kinds
    needed = [kind.shape is not None and kind.status != "placed" for kind in kinds]
    needing = (path for path in columns.folded if needed[path.group])
    folded = list(apart(needing, columns.paths))
    if len(folded) > _MOST_PATHS:
        raise ValueError(
            f"the tree has {len(folded):,} paths that differ not only in numbers, such as "
            f"{brief(columns.paths[folded[0].rows[0]])}; rules that name more than {_MOST_PATHS:,} "
            "are no rules: cut each array's largest dimension, with [('.*', shardrules.fsdp(axis))]"
        )
    parts = parts_of_model(folded, [kind.shape for kind in kinds])
    units = []
    for path, words, part, dims in zip(
        folded, words_of(folded), parts, _dims_of_model(parts), strict=True
    ):
        head = heads.get(int(path.rows[0]))
        with_head = dims._replace(unit=head, is_assumed=False) if head else dims
        size = kinds[path.group].bytes * len(path.rows)
        units.append(Unit(path, words, part, with_head, columns.paths, size))
    return units
