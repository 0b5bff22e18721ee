"""Roles of the dimensions of kernels: a stack of layers, experts, contracted, or made.

Read from shapes, from the fold and, where these leave a choice, from words in the paths: the
residual width is the size that most leaves have; the arrays of stacked layers all begin with one
size, and those of experts with as many as a router has outputs; a model's kernels are all [in,
out], as flax's, or all [out, in], as torch's.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Final, Literal

from shardrules._plan.fold import Folded, parts_of, runs_of

DimRole = Literal["stack", "experts", "in", "out", "lookup", "unknown"]
"""A dimension of layers that are scanned; of experts; contracted with the kernel's input; made by
the kernel; of rows that tokens look up; or that is in or out, without a sign of which."""

Shape = tuple[int, ...]

_Block = tuple[str, ...]
"""Words of the path of what a module is in."""

_SPLIT: Final = re.compile(r"[/.\[\]']+")
# Components that name an array within its module, and modules that name nothing.
_ARRAY: Final = re.compile(r"kernel|weight|w|value|embedding|param|bias|b|scale")
_NEUTRAL: Final = re.compile(r"dense|linear|layer|base_layer|projection")
_VECTOR: Final = re.compile(r"bias|scale|norm|gamma|beta|(^|_)ln(_|$)|(^|_)b$")
_NORM: Final = re.compile(r"norm|(^|_)ln(_|$)")
_LOOKUP: Final = re.compile(r"embed|wte|wpe|vocab")
_NOT_LOOKUP: Final = re.compile(r"patch|proj|unembed|head|conv")
_EXPERTS: Final = re.compile(r"experts?(_|$)|moe")
_NOT_EXPERTS: Final = re.compile(r"shared|att")
_STACK_NAMES: Final = re.compile(r"\w*layers?|stack\w*|stages?|repeats?|blocks?|periods?")
_ROUTER: Final = re.compile(r"(\w*_)?(router|gate|gating|switch|w_?[gr])(_\w*)?")
# What begins with one size though it is no stack of layers: that of heads, a window or experts.
_NO_STACK: Final = re.compile(r"att(n|ention)|conv|experts?(_|$)|moe")
# Projections from the residual stream, and back to it.
_READS: Final = re.compile(
    r"(to_)?w?q(kv)?(_.*)?|(to_)?w?kv?(_.*)?|(to_)?w?v(_proj)?|query.*|key.*|value.*|c_attn|in_proj.*|gate.*|up(_.*)?"
    r"|w[13]|wi(_.*)?|fc1|fc_in|c_fc|dense_h_to_4h|intermediate|lm_head|head|logits.*|router|classifier"
)
_WRITES: Final = re.compile(
    r"w?o(_proj)?|(to_)?out(_.*)?|output|down(_.*)?|w2|fc2|fc_out|(c_)?proj|dense_4h_to_h|attn_out"
    r"|mlp_out|attn_vec.*|linear2|(self_?)?att(n|ention)"
)

_ATTENTION: Final = re.compile(
    r"w?(q|k|v|o|qk|kv|qkv)(_.*)?|query.*|key.*|value.*|c_attn|.*att(n|ention).*"
)
# Of these names, the one that MLPs and experts have as well.
_BACK: Final = re.compile(r"w?o(_.*)?")


@dataclass(frozen=True)
class Part:
    """The leaves of one folded path, which do the same in each layer."""

    pattern: str
    """The folded path."""
    module: str
    """The last word of its module's path."""
    leaves: int
    """How many there are."""
    shape: Shape
    dims: tuple[DimRole, ...]
    """What each dimension is. Norms, biases and scalars have none that is contracted."""
    experts: int
    """How many experts there are in a layer; 1 without."""
    input_key: str
    """Kernels with one key share their input: of one module, and of attention or not."""
    is_attention: bool
    """Whether it makes queries, keys or values, or reads what attention made of them."""
    is_router: bool
    """Whether it makes a number for each expert."""
    width: int
    """Elements of the residual stream for each token; 0 if that is not known."""
    flow: Literal["reads", "writes"] | None
    """Whether by its name the module reads the residual stream, or writes to it."""

    @property
    def is_product(self) -> bool:
        """Whether tokens are multiplied by it, or look up its rows."""
        return not {"in", "lookup", "unknown"}.isdisjoint(self.dims)

    def size(self, role: DimRole) -> int:
        """Return the product of the dimensions with this role; 1 without."""
        return prod(n for n, of in zip(self.shape, self.dims, strict=True) if of == role)


@dataclass
class _Seen:
    """A folded path on its way to a `Part`."""

    folded: Folded
    shape: Shape
    words: _Block
    front: dict[int, DimRole] = field(default_factory=dict)
    """Dimensions of layers, and of experts."""

    @cached_property
    def module(self) -> _Block:
        """The words up to that of the module, which an array's own name may stand behind."""
        words = self.words
        if len(words) > 1 and _ARRAY.fullmatch(words[-1]):
            words = words[:-1]
        while len(words) > 1 and (words[-1] == "#" or _NEUTRAL.fullmatch(words[-1])):
            words = words[:-1]
        return words

    @cached_property
    def block(self) -> str:
        """The folded path of what the module is in."""
        below = len(_path_words(self.folded.pattern)) - len(self.module) + 1
        pattern = self.folded.pattern
        for _ in range(below):
            pattern = re.sub(r"[/.\[\]']*(?:\{[^{}]*\}|[^/.\[\]'])*[\]']*$", "", pattern, count=1)
        return pattern

    @property
    def is_norm(self) -> bool:
        return any(map(_NORM.search, self.words[-2:]))

    @property
    def is_vector(self) -> bool:
        return bool(_VECTOR.search(self.words[-1])) or self.is_norm

    @property
    def is_named_attention(self) -> bool:
        return _ATTENTION.fullmatch(self.module[-1]) is not None

    @property
    def makes_heads(self) -> bool:
        return self.is_named_attention and not _BACK.fullmatch(self.module[-1])

    @property
    def is_named_router(self) -> bool:
        return _ROUTER.fullmatch(self.module[-1]) is not None

    @property
    def rest(self) -> list[int]:
        """Dimensions of one layer's, and one expert's, array; those of size 1 left out."""
        return [dim for dim, size in enumerate(self.shape) if dim not in self.front and size > 1]

    @property
    def sizes(self) -> Shape:
        """Sizes of one layer's, and one expert's, array."""
        return tuple(size for dim, size in enumerate(self.shape) if dim not in self.front)

    @property
    def is_lookup(self) -> bool:
        words = self.words[-3:]
        is_named = any(map(_LOOKUP.search, words)) and not any(map(_NOT_LOOKUP.search, words))
        return len(self.rest) == 2 and (is_named or words[-1] == "embedding")

    @property
    def flow(self) -> Literal["reads", "writes"] | None:
        reads, writes = (bool(words.fullmatch(self.module[-1])) for words in (_READS, _WRITES))
        return None if reads == writes else "reads" if reads else "writes"

    @property
    def experts(self) -> int:
        """How many experts a layer has, along a dimension or as leaves of their own; 1 without."""
        along = [self.shape[dim] for dim, role in self.front.items() if role == "experts"]
        return along[0] if along else self.numbered_experts

    @cached_property
    def numbered_experts(self) -> int:
        """How many numbers the pattern has for experts, as in experts/{0..7}/w1; 1 without."""
        text = ""
        for literal, numbers in parts_of(self.folded.pattern):
            words = _path_words(text)
            if numbers is not None and words and re.fullmatch(r"experts?_?", words[-1]):
                return sum(run.stop - run.start for run in runs_of(numbers))
            text += literal if numbers is None else "#"
        return 1


def parts_of_model(folded: Iterable[Folded], shapes: Sequence[Shape | None]) -> tuple[Part, ...]:
    """Return the roles of a model's parameters.

    Args:
        folded: Of the parameters, and of nothing else.
        shapes: Per kind; None for what is not an array.

    Example:
        >>> import numpy as np
        >>> from shardrules._plan.fold import fold
        >>> paths = [f"layers/{i}/mlp/{w}/kernel" for i in range(2) for w in ("up", "down")]
        >>> folded = fold(paths, np.array([0, 1, 0, 1], np.int32))
        >>> parts = parts_of_model(folded, [(64, 256), (256, 64)])
        >>> [(part.pattern, part.dims, part.leaves) for part in parts][0]
        ('layers/{0,1}/mlp/up/kernel', ('in', 'out'), 2)
    """
    seen = [
        _Seen(part, shape, _named_words(_path_words(part.pattern)))
        for part in folded
        if (shape := shapes[part.group]) is not None
    ]
    stacks = [*_stacks(seen), *_stacks_by_shape(seen)]
    for part in seen:
        part.front = _front(part, stacks)
    for part, is_routed in zip(seen, _routed(seen), strict=True):
        is_apart = len(part.sizes) > (1 if part.is_vector else 2) and part.numbered_experts == 1
        is_expert = is_routed or _is_of_experts(part.words)
        if is_expert and is_apart and "experts" not in part.front.values():
            part.front[next(d for d in range(len(part.shape)) if d not in part.front)] = "experts"
    width = _residual_width(seen)
    is_in_out = _is_in_out(seen, width)
    attending = {part.block for part in seen if part.makes_heads}
    counts = {part.experts for part in seen if part.experts > 1}
    return tuple(_make_part(part, width, is_in_out, attending, counts) for part in seen)


def experts_dim(path: str, shape: Shape) -> int | None:
    """Return the dimension of experts, by the path and the shape of a kernel alone.

    None without one.

    Example:
        >>> experts_dim("layers/0/experts/up", (8, 64, 256))
        0
    """
    return len(shape) - 3 if _is_of_experts(_path_words(path)) and len(shape) > 2 else None


def _is_of_experts(words: _Block) -> bool:
    return any(map(_EXPERTS.search, words)) and not any(map(_NOT_EXPERTS.search, words))


def _path_words(pattern: str) -> _Block:
    text = re.sub(r"\{[^{}]*\}", "#", pattern).lower()
    return tuple(word for word in _SPLIT.split(text) if word) or (text,)


def _named_words(words: _Block) -> _Block:
    """Return the words up to the array's name: paths of flax nnx may have `value` behind it."""
    is_named = len(words) > 1 and (_ARRAY.fullmatch(words[-2]) or _VECTOR.search(words[-2]))
    return words[:-1] if is_named and words[-1] == "value" else words


def _stacks(seen: list[_Seen]) -> list[tuple[_Block, int, int]]:
    """(words of a block, the dimension along which its layers are stacked, how many they are).

    A norm has one dimension. One that has two is that of scanned layers, of which there are fewer
    than the model is wide.
    """
    stacks = []
    for part in seen:
        if part.is_norm and len(part.shape) == 2 and 1 not in part.shape:
            block = part.words[:-1] if _NORM.search(part.words[-1]) else part.words[:-2]
            layers = min(part.shape)
            stacks.append((block, part.shape.index(layers), layers))
    return stacks


def _stacks_by_shape(seen: list[_Seen]) -> list[tuple[_Block, int, int]]:
    """Find the same of blocks without a norm of two dimensions: all their arrays begin alike."""
    blocks: dict[_Block, list[_Seen]] = defaultdict(list)
    for part in seen:
        for end in range(1, len(part.words)):
            if part.words[end] != "#":
                blocks[part.words[:end]].append(part)
    routers = _routers(seen, None)
    stacks = []
    for block, arrays in blocks.items():
        is_named = _STACK_NAMES.fullmatch(block[-1]) is not None
        if _are_stacked([part.shape for part in arrays], is_named=is_named):
            layers = arrays[0].shape[0]
            is_other = all(
                part.is_named_attention or any(map(_NO_STACK.search, part.words)) for part in arrays
            )
            if layers not in _around(routers, block) and (is_named or not is_other):
                stacks.append((block, 0, layers))
    return stacks


def _are_stacked(shapes: list[Shape], *, is_named: bool) -> bool:
    """Tell if arrays all begin with one size, which is smaller than another of each kernel's.

    Some kernels must not have it a second time, as windows have; heads may be as many as layers.
    """
    if len(shapes) < 2 or len({shape[0] for shape in shapes if shape}) != 1:
        return False
    kernels = [shape for shape in shapes if len(shape) > 2]
    once = [shape for shape in kernels if shape[0] not in shape[1:]]
    return (
        min(map(len, shapes)) > 1
        and len(once) >= (1 if is_named else 2)
        and all(shape[0] < max(shape[1:]) for shape in kernels)
    )


def _front(part: _Seen, stacks: list[tuple[_Block, int, int]]) -> dict[int, DimRole]:
    """Return the dimension of layers, if there is one."""
    for block, dim, layers in stacks:
        if part.words[: len(block)] == block and part.shape[dim : dim + 1] == (layers,):
            return {dim: "stack"}
    return {}


def _routers(seen: list[_Seen], width: int | None) -> dict[_Block, set[int]]:
    """By the words of the block around a router, how many experts it chooses from.

    Its other side is the residual width, if that is known: a gate of an MLP is wider.
    """
    experts_in: dict[_Block, set[int]] = defaultdict(set)
    for part in seen:
        if len(part.rest) == 2 and not part.is_vector and part.is_named_router:
            experts, sibling = sorted(part.shape[dim] for dim in part.rest)
            if width in (None, sibling):
                experts_in[part.module[:-1]].add(experts)
    return experts_in


def _around(routers: dict[_Block, set[int]], words: _Block) -> set[int]:
    """Return how many experts the routers in the blocks around these words choose from."""
    return set().union(*(routers[words[:end]] for end in range(len(words))))


def _routed(seen: list[_Seen]) -> list[bool]:
    """Find the arrays of experts whatever they are called: as many as a router has outputs.

    An array with a name of attention is one if it is as large as another of them.
    """
    routers = _routers(seen, _residual_width(seen))
    sizes = [
        tuple(sorted(part.sizes))
        if part.sizes
        and part.sizes[0] in _around(routers, part.words)
        and not any(map(_NOT_EXPERTS.search, part.words))
        else ()
        for part in seen
    ]
    pairs = list(zip(seen, sizes, strict=True))
    kernels = {size for part, size in pairs if len(size) > 2 and not part.is_named_attention}
    return [size in kernels or bool(size and kernels and part.is_vector) for part, size in pairs]


def _residual_width(seen: list[_Seen]) -> int:
    """Return the size that most arrays of layers have, the smallest of equals; 0 without any.

    The experts of a layer count as one.
    """
    votes: Counter[int] = Counter()
    for part in seen:
        layers = prod(part.shape[dim] for dim, role in part.front.items() if role == "stack")
        arrays = layers * len(part.folded.rows) // part.numbered_experts
        for size in {part.shape[dim] for dim in part.rest}:
            votes[size] += arrays
    return max(votes, key=lambda size: (votes[size], -size), default=0)


def _is_in_out(seen: list[_Seen], width: int) -> bool | None:
    """Return whether kernels are [in, out]; None without a sign.

    The names of some say which side the width is on. Without such names, arrays are called so.
    """
    votes = 0
    for part in seen:
        rest = part.rest
        ends = [part.shape[dim] == width for dim in (rest[:1] + rest[-1:])]
        if len(rest) < 2 or sum(ends) != 1 or part.is_vector or part.is_lookup:
            continue
        if part.flow:
            votes += 1 if ends[0] == (part.flow == "reads") else -1
    if votes == 0:
        called = {part.words[-1] for part in seen if len(part.shape) > 1}
        is_kernel = "kernel" in called
        return is_kernel if is_kernel != ("weight" in called) else None
    return votes > 0


def _make_part(
    part: _Seen, width: int, is_in_out: bool | None, attending: set[str], counts: set[int]
) -> Part:
    """Make the part; routers have as many outputs as the model has experts, which are counted."""
    shape = part.shape
    roles: dict[int, DimRole] = {**dict.fromkeys(range(len(shape)), "out"), **part.front}
    if len(part.rest) > 1 and not part.is_vector:
        roles |= _matrix_roles(part, width, is_in_out)
    dims = tuple(roles[dim] for dim in range(len(shape)))
    is_attention = (
        part.is_named_attention
        and part.experts == 1
        and (part.makes_heads or part.block in attending)
    )
    ins, outs = (
        prod(n for n, of in zip(shape, dims, strict=True) if of == role) for role in ("in", "out")
    )
    is_product = {"in", "out"} <= {*dims} and part.experts == 1
    return Part(
        pattern=part.folded.pattern,
        module=part.module[-1],
        leaves=len(part.folded.rows),
        shape=shape,
        dims=dims,
        experts=part.experts,
        input_key=f"{part.block} attention" if is_attention else part.block,
        is_attention=is_attention,
        is_router=is_product and part.is_named_router and min(ins, outs) in counts,
        width=width,
        flow=part.flow,
    )


def _matrix_roles(part: _Seen, width: int, is_in_out: bool | None) -> dict[int, DimRole]:
    """Return the roles of the dimensions of a matrix, whose sides may be several dimensions."""
    rest = part.rest
    first, last = part.shape[rest[0]] == width, part.shape[rest[-1]] == width
    if part.is_lookup:
        return {rest[1] if first and not last else rest[0]: "lookup"}
    if is_in_out is None or (len(rest) > 3 and not (first or last)):
        return dict.fromkeys(rest, "unknown")
    if not is_in_out:
        return dict.fromkeys(rest[1:], "in")
    # Several dimensions on one side, such as heads: the other side is the width, if it is one.
    is_back = last and not first
    return dict.fromkeys(rest[:-1] if is_back else rest[:1], "in")
