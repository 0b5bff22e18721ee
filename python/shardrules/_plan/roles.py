"""Roles of the dimensions of a model's arrays: layers, experts, residual, hidden, heads, and so on.

Read from shapes, from the fold and, where these leave a choice, from words in the paths: the
residual width is the size that most arrays have; the arrays of stacked layers all begin with one
size, and those of experts with as many as a router has outputs; a model's kernels are all [in,
out], as flax's, or all [out, in], as torch's.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Final, Literal, NamedTuple

from shardrules._plan import path_words
from shardrules._plan.fold import Folded, runs_of
from shardrules._plan.path_words import COMPONENT, components_of, words_of

Side = Literal[
    "layers", "experts", "vocabulary", "residual", "hidden", "heads", "head", "fused", "window",
    "vector", "other",
]  # fmt: skip
"""Role of a dimension: a stack of layers; of experts; rows of an embedding; the side of the
residual stream, or the other one; heads, and the size of one; kernels that are stacked into one; a
window of a convolution; the only dimension; of size 1."""
Shape = tuple[int, ...]


class Dims(NamedTuple):
    """Roles of the dimensions of a folded path's arrays."""

    sides: tuple[Side, ...]
    columns: tuple[int, ...] = ()
    """Dimensions that are not contracted, nor looked up: those of a bias of the kernel."""
    is_known: bool = True
    """True if shapes and words leave no doubt which side is which."""
    unit: int = 1
    """Elements of the hidden side that belong together: a head's."""
    is_assumed: bool = False
    """True if the unit is a guess."""
    head: int | None = None
    """The dimension that is cut by heads, or is one, if their size is known: the unit."""
    tensor: Literal["any", "heads", "none"] = "any"
    """Sides that tensor axes may shard: of keys and values heads only, since there are fewer of
    them than of queries; of routers and of projections to a latent space none."""

    @property
    def is_vector(self) -> bool:
        """True for biases and norms."""
        return not {"residual", "hidden", "vocabulary", "heads"} & {*self.sides}


def roles_of(
    folded: Iterable[Folded], shapes: Sequence[Shape], head_dim: int | None = None
) -> list[Dims]:
    """Return the roles of the dimensions of a model's parameters, for each folded path.

    `shapes` are those of the groups; `head_dim` is by default that of norms of single heads.
    """
    arrays = [_Array(of, shapes[of.group]) for of in folded]
    _find_stacks(arrays)
    _find_heads(arrays, head_dim)
    _find_experts(arrays)
    width = _residual_width(arrays)
    is_in_out = _is_in_out(arrays, width)
    for array in arrays:
        array.contracted = _contracted(array, width, is_in_out)
    roles = [_dims(*pair) for pair in zip(arrays, _residual_widths(arrays, width), strict=True)]
    queries: dict[tuple[str, ...], int] = defaultdict(int)
    for array, dims in zip(arrays, roles, strict=True):
        if array.is_attention:
            queries[array.block] = max(queries[array.block], _hidden_size(array, dims))
    counts = {array.experts for array in arrays if array.experts > 1}
    return [
        _with_tensor(array, dims, queries[array.block], width, counts)
        for array, dims in zip(arrays, roles, strict=True)
    ]


def experts_dim(path: str, shape: Shape) -> int | None:
    """Return the dimension of experts, by the path and the shape of a kernel alone; or None."""
    words = [word.lower() for word in COMPONENT.findall(path)]
    return len(shape) - 3 if _is_of_experts(words) and len(shape) > 2 else None


_NUMBERED_EXPERTS: Final = re.compile(r"(?:^|[/.\[\]'])experts?_?[/.\[\]']*\{([^{}]*)\}")


@dataclass
class _Array:
    """Arrays of one folded path, while the roles of their dimensions are found."""

    folded: Folded
    shape: Shape
    head: int | None = None
    """Size of a head, of a projection to or from heads of attention, if that is known."""
    front: dict[int, Side] = field(default_factory=dict)
    """Dimensions of layers and of experts."""
    contracted: list[int] = field(default_factory=list)
    """Dimensions that are contracted, or looked up; all of a matrix without a sign which are."""

    def __post_init__(self) -> None:
        components = components_of(self.folded)
        self.words = words_of(components)
        words = list(self.words)
        last = words[-1]
        is_array = path_words.ARRAY.is_name(last) and not path_words.TO_HEADS.is_name(last)
        if len(words) > 1 and is_array:
            words.pop()
        self.bare = tuple(words)
        """Words without the array's own name."""
        while len(words) > 1 and (words[-1] == "#" or path_words.NEUTRAL.is_name(words[-1])):
            words.pop()
        self.module = tuple(words)
        """Words up to that of the module, which an array's own name may stand behind."""
        self.name = words[-1]
        """Name of the module."""
        self.block = tuple(components[: len(words) - 1])
        """Path of what the module is in, with its sets of numbers."""
        self.is_norm = path_words.NORM.are_in(*self.words[-2:])
        self.is_vector = self.is_norm or path_words.VECTOR.are_in(self.words[-1])
        """True for biases and norms, by their names."""

    @property
    def rest(self) -> list[int]:
        """Dimensions of one layer's, and one expert's, array; those of size 1 left out."""
        return [dim for dim, size in enumerate(self.shape) if dim not in self.front and size > 1]

    @property
    def is_product(self) -> bool:
        """True if tokens are multiplied by it, or look up its rows."""
        return len(self.rest) > 1 and not self.is_vector

    @property
    def is_lookup(self) -> bool:
        """True if tokens look up its rows."""
        words = self.words[-3:]
        is_named = path_words.LOOKUP.are_in(*words) and not path_words.NO_LOOKUP.are_in(*words)
        return len(self.rest) == 2 and (is_named or words[-1] == "embedding")

    @property
    def layers(self) -> int:
        """How many layers are stacked in it; 0 if it is no stack."""
        sizes = [self.shape[dim] for dim, side in self.front.items() if side == "layers"]
        return prod(sizes) if sizes else 0

    @property
    def tower(self) -> str | None:
        """Path before the number of a layer; None outside of layers."""
        before, number, _ = self.folded.pattern.partition("{")
        if number:
            return before
        return "/".join(self.folded.pattern.split("/")[:2]) if self.layers else None

    @cached_property
    def numbered_experts(self) -> int:
        """How many numbers of experts the path has, as experts/{0..7}/w1; 1 without."""
        numbers = _NUMBERED_EXPERTS.search(self.folded.pattern.lower())
        return sum(map(len, runs_of(numbers[1]))) if numbers else 1

    @property
    def experts(self) -> int:
        """How many experts a layer has, along a dimension or as leaves of their own."""
        along = [self.shape[dim] for dim, side in self.front.items() if side == "experts"]
        return along[0] if along else self.numbered_experts

    @property
    def widths(self) -> set[int]:
        """Sizes that may be the residual width: none is a head's."""
        rest = self.rest
        sizes = {self.shape[dim] for dim in rest}
        return sizes - {self.head} if len(rest) > 2 else sizes

    @property
    def flow(self) -> Literal["reads", "writes"] | None:
        """Whether by its name the module reads the residual stream, or writes to it."""
        reads, writes = path_words.READS.is_name(self.name), path_words.WRITES.is_name(self.name)
        return None if reads == writes else "reads" if reads else "writes"

    @property
    def is_attention(self) -> bool:
        """True if it makes queries, keys or values, or reads what attention made of them."""
        return path_words.ATTENTION.is_name(self.name) and self.experts == 1

    @property
    def has_heads(self) -> bool:
        """True if it projects to heads of attention or from them, by its names."""
        *module, name = self.bare
        is_from = path_words.FROM_HEADS.is_name(name) and not self.is_vector
        is_in_attention = bool(self.shape) and path_words.IN_ATTENTION.are_in(*module)
        return is_in_attention and (is_from or path_words.TO_HEADS.is_name(name))


def _find_stacks(arrays: list[_Array]) -> None:
    """Find the dimensions of scanned layers, by their norms, or by name and shapes."""
    stacks: list[tuple[tuple[str, ...], int, int]] = []
    shapes_of: dict[tuple[str, ...], list[Shape]] = defaultdict(list)
    for array in arrays:
        words = array.words
        if array.is_norm and len(array.shape) == 2 and 1 not in array.shape:
            layers = min(array.shape)
            block = words[:-1] if path_words.NORM.are_in(words[-1]) else words[:-2]
            stacks.append((block, array.shape.index(layers), layers))
        for end in range(1, len(words)):
            if path_words.STACK.is_name(words[end - 1]) and words[end] != "#":
                shapes_of[words[:end]].append(array.shape)
    stacks += [
        (block, 0, shapes[0][0]) for block, shapes in shapes_of.items() if _are_stacked(shapes)
    ]
    for array in arrays:
        for block, dim, layers in stacks:
            is_inside = array.words[: len(block)] == block
            if is_inside and array.shape[dim : dim + 1] == (layers,):
                array.front[dim] = "layers"
                break


def _are_stacked(shapes: list[Shape]) -> bool:
    """Tell if arrays all begin with one size, smaller than another of each kernel's."""
    kernels = [shape for shape in shapes if len(shape) > 2]
    return (
        len(shapes) > 1
        and min(map(len, shapes)) > 1
        and len({shape[0] for shape in shapes}) == 1
        and any(shape[0] not in shape[1:] for shape in kernels)
        and all(shape[0] < max(shape[1:]) for shape in kernels)
    )


def _find_heads(arrays: list[_Array], head_dim: int | None) -> None:
    """Find the sizes of heads. Norms of all heads together are as large as their projection."""
    norms: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for array in arrays:
        if path_words.HEAD_NORM.is_name(array.bare[-1]) and array.shape:
            norms[array.bare[:-1]].add(array.shape[-1])
    projections = [array for array in arrays if array.has_heads]
    for array in projections:
        if len(array.rest) < 3:
            norms[array.bare[:-1]] -= {*array.shape}
    for array in projections:
        sizes = norms[array.bare[:-1]] - {1}
        array.head = head_dim or (sizes.pop() if len(sizes) == 1 else None)


def _find_experts(arrays: list[_Array]) -> None:
    """Find the dimensions of experts: by names, or as many as a router beside them has outputs.

    The other side of a router is the residual width: a gate of an MLP is wider.
    """
    width = _residual_width(arrays)
    routers: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for array in arrays:
        if len(array.rest) == 2 and not array.is_vector and path_words.ROUTER.is_name(array.name):
            experts, other = sorted(array.shape[dim] for dim in array.rest)
            if other == width:
                routers[array.module[:-1]].add(experts)
    for array in arrays:
        rest = [dim for dim in range(len(array.shape)) if dim not in array.front]
        if len(rest) <= (1 if array.is_vector else 2) or array.numbered_experts > 1:
            continue
        around = set().union(*(routers[array.words[:end]] for end in range(len(array.words))))
        is_apart = path_words.NO_EXPERTS.are_in(*array.words) or (
            path_words.ATTENTION.is_name(array.name) and not path_words.BACK.is_name(array.name)
        )
        if (array.shape[rest[0]] in around and not is_apart) or _is_of_experts(array.words):
            array.front[rest[0]] = "experts"


def _is_of_experts(words: Iterable[str]) -> bool:
    return path_words.EXPERTS.are_in(*words) and not path_words.NO_EXPERTS.are_in(*words)


def _residual_width(arrays: Iterable[_Array], outside: Container[int] = ()) -> int:
    """Return the size that most arrays have, the smallest of equals; 0 without any.

    Sizes that leaves outside have too come first. The experts of a layer count as one.
    """
    votes: Counter[int] = Counter()
    for array in arrays:
        count = (array.layers or 1) * len(array.folded.rows) // array.numbered_experts
        votes.update(dict.fromkeys(array.widths, count))
    return max(votes, key=lambda size: (size in outside, votes[size], -size), default=0)


# Names that agree, at least, to be believed.
_FEW: Final = 3


def _is_in_out(arrays: list[_Array], width: int) -> bool | None:
    """Return whether kernels are [in, out]; None without a sign.

    The names of several say which side the width is on; else arrays are called so.
    """
    votes = 0
    for array in arrays:
        if array.is_product and not array.is_lookup and (flow := array.flow):
            first, last = (array.shape[array.rest[end]] == width for end in (0, -1))
            if first != last:
                votes += 1 if first == (flow == "reads") else -1
    last_words = {array.words[-1] for array in arrays if len(array.shape) > 1}
    if abs(votes) >= _FEW:
        return votes > 0
    return "kernel" in last_words if ("kernel" in last_words) != ("weight" in last_words) else None


def _contracted(array: _Array, width: int, is_in_out: bool | None) -> list[int]:
    """Find what is contracted, by the names, sizes and order of dimensions."""
    if not array.is_product:
        return []
    rest = array.rest
    first, last = (array.shape[rest[end]] == width for end in (0, -1))
    if array.is_lookup:
        return [rest[1] if first and not last else rest[0]]
    # Without a sign, what a name tells of is as flax has it.
    if is_in_out is None and array.flow is None:
        return rest
    if is_in_out is False:
        return rest[1:]
    # Several dimensions on one side, such as heads: the other side is the width, if it is one.
    return rest[:-1] if last and not first else rest[:1]


def _residual_widths(arrays: list[_Array], width: int) -> list[set[int]]:
    """Find the residual widths near each array: its tower's; outside of towers, all."""
    towers: dict[str | None, list[_Array]] = defaultdict(list)
    for array in arrays:
        towers[array.tower].append(array)
    outside = {size for array in towers.pop(None, ()) for size in array.widths}
    width_of = {tower: _residual_width(inside, outside) for tower, inside in towers.items()}
    widths = {*width_of.values()} - {0} or {width}
    return [{width_of[array.tower]} if width_of.get(array.tower) else widths for array in arrays]


def _dims(array: _Array, widths: set[int]) -> Dims:
    free = array.rest
    sides: dict[int, Side] = dict.fromkeys(range(len(array.shape)), "other")
    is_known = True
    if not array.is_product:
        # Of a norm, or parameters of each channel, nothing is contracted.
        sides |= dict.fromkeys(free, "vector")
    elif array.is_lookup:
        sides |= {dim: "vocabulary" if dim in array.contracted else "residual" for dim in free}
    else:
        of_free, is_known = _sides_of_kernel(array, widths)
        sides |= of_free
    sides |= array.front
    columns = tuple(dim for dim in sides if dim not in array.contracted)
    dims = Dims(tuple(sides.values()), columns, is_known, unit=array.head or 1)
    if not array.head:
        return dims
    if "head" in dims.sides:
        return dims._replace(head=dims.sides.index("head"))
    is_from = path_words.FROM_HEADS.is_name(array.bare[-1])
    return dims._replace(head=max(array.contracted if is_from else columns, default=None))


# Kernels that are stacked into one, such as those of keys and values, are at most so many.
_MOST_FUSED: Final = 4


def _sides_of_kernel(array: _Array, widths: set[int]) -> tuple[dict[int, Side], bool]:
    shape, free, ins = array.shape, array.rest, array.contracted
    outs = [dim for dim in free if dim not in ins]
    residual = [dim for dim in free if shape[dim] in widths]
    # Names mean a kernel of attention, and no convolution in it.
    path = array.folded.pattern.lower()
    has_heads = "conv" not in path and (array.is_attention or path_words.IN_ATTENTION.are_in(path))
    is_split = len(free) > 2 and len(residual) == 1
    if _is_convolution(shape, free) and not (has_heads and is_split):
        return _sides_of_convolution(shape, free), True
    if is_split:
        first, *others = (dim for dim in free if dim != residual[0])
        if shape[first] <= _MOST_FUSED and (len(others) > 1 or not has_heads):
            return {residual[0]: "residual", first: "fused", **_of_heads(array, others)}, True
        return {residual[0]: "residual", **_of_heads(array, [first, *others])}, True
    if len(free) > 3:
        return dict.fromkeys(free, "window"), False
    if not outs:
        by_size = sorted(free, key=lambda dim: (shape[dim], -dim))
        return {**dict.fromkeys(free, "residual"), by_size[-1]: "hidden"}, False
    hidden, is_known = _hidden(array, ins, outs, widths)
    return {**dict.fromkeys(free, "residual"), **_of_heads(array, hidden)}, is_known


def _hidden(
    array: _Array, ins: list[int], outs: list[int], widths: set[int]
) -> tuple[list[int], bool]:
    """Return the hidden side, and whether that is sure."""
    size_in, size_out = (prod(array.shape[dim] for dim in side) for side in (ins, outs))
    if len(ins) != len(outs):
        return (ins if len(ins) > len(outs) else outs), True
    if (size_in in widths) != (size_out in widths):
        return (outs if size_in in widths else ins), True
    if array.flow is not None:
        return (ins if array.flow == "writes" else outs), True
    if size_in == size_out:
        return outs, False
    return (ins if size_in > size_out else outs), size_in not in widths


def _of_heads(array: _Array, dims: list[int]) -> dict[int, Side]:
    """Name the hidden sides of a kernel, such as heads and the size of one."""
    first, *others = dims
    if others and any(
        array.shape[first] == n and of.is_name(array.name) for n, of in path_words.FUSED
    ):
        return {first: "fused", **_of_heads(array, others)}
    return {first: "heads" if others else "hidden", **dict.fromkeys(others, "head")}


# Sizes of windows are smaller.
_WINDOW: Final = 32


def _is_convolution(shape: Shape, free: list[int]) -> bool:
    """Look for a window, before or behind the channels: a square, or small and odd."""
    sizes = [shape[dim] for dim in free]
    ends = sizes[:2], sizes[-2:]
    if len(free) > 3:
        return any(first == second < _WINDOW for first, second in ends)
    return len(free) == 3 and any(size < _WINDOW and size % 2 for size in (sizes[0], sizes[-1]))


def _sides_of_convolution(shape: Shape, free: list[int]) -> dict[int, Side]:
    """Name the sides of a convolution; channels are first in torch, and last in flax."""
    ends = free[:2] if shape[free[0]] > shape[free[-1]] else free[-2:]
    channels = sorted(ends, key=lambda dim: shape[dim])
    return {**dict.fromkeys(free, "window"), channels[0]: "residual", channels[1]: "hidden"}


# Elements of a head of unknown size; models narrower than that have half as many.
_HEAD: Final = 128
_SMALL: Final = 2048


def _with_tensor(array: _Array, dims: Dims, queries: int, width: int, counts: set[int]) -> Dims:
    """Say what tensor axes may shard of the dimensions.

    `queries` are the most elements that kernels of its attention make, `counts` the numbers of
    experts in layers.
    """
    if dims.is_vector:
        return dims
    if _is_router(array, counts) or (
        array.is_attention and path_words.TO_LATENT.is_name(array.name)
    ):
        return dims._replace(tensor="none")
    hidden = _hidden_size(array, dims)
    if not (array.is_attention and path_words.KEYS.is_name(array.name) and hidden < queries):
        return dims
    head = _HEAD if width >= _SMALL else _HEAD // 2
    if not array.head and "hidden" in dims.sides and hidden % head == 0:
        dims = dims._replace(unit=head, is_assumed=True)
    return dims._replace(tensor="heads")


def _is_router(array: _Array, counts: set[int]) -> bool:
    """Tell if it makes a number for each expert: a model has as many as routers have outputs."""
    ins = array.contracted
    outs = [dim for dim in array.rest if dim not in ins]
    if not (ins and outs) or array.is_lookup or array.experts > 1:
        return False
    sizes = (prod(array.shape[dim] for dim in dims) for dims in (ins, outs))
    return path_words.ROUTER.is_name(array.name) and min(sizes) in counts


def _hidden_size(array: _Array, dims: Dims) -> int:
    pairs = zip(array.shape, dims.sides, strict=True)
    return prod(size for size, side in pairs if side in ("hidden", "heads", "head"))
