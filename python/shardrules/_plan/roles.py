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
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal, NamedTuple

from shardrules._plan.fold import Folded, parts_of, runs_of

DimRole = Literal["stack", "experts", "in", "out", "lookup", "unknown"]
"""A dimension of layers that are scanned; of experts; contracted with the kernel's input; made by
the kernel; of rows that tokens look up; or that is in or out, without a sign of which."""

Shape = tuple[int, ...]

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


class _Seen(NamedTuple):
    """A folded path on its way to a `Part`."""

    folded: Folded
    pattern: str
    shape: Shape
    words: tuple[str, ...]

    @property
    def module(self) -> tuple[str, ...]:
        """The words up to that of the module, which an array's own name may stand behind."""
        words = self.words
        if len(words) > 1 and _ARRAY.fullmatch(words[-1]):
            words = words[:-1]
        while len(words) > 1 and (words[-1] == "#" or _NEUTRAL.fullmatch(words[-1])):
            words = words[:-1]
        return words

    @property
    def is_vector(self) -> bool:
        return bool(_VECTOR.search(self.words[-1])) or any(map(_NORM.search, self.words[-2:]))

    @property
    def is_norm(self) -> bool:
        return any(map(_NORM.search, self.words[-2:]))


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
        _Seen(
            part,
            part.pattern,
            shape,
            _named_roles(_path_words(part.pattern)),
        )
        for part in folded
        if (shape := shapes[part.group]) is not None
    ]
    stacks = [*_stacks(seen), *_stacks_by_shape(seen)]
    fronts = [_leading_dims(part, stacks) for part in seen]
    routed = _routed(seen, fronts)
    for number, (part, front) in enumerate(zip(seen, fronts, strict=True)):
        _add_experts(part, front, number in routed)
    width = _residual_width(seen, fronts)
    is_in_out = _is_in_out(seen, fronts, width)
    attending = {_block(part) for part in seen if _makes_heads(part)}
    parts = [
        _make_part(part, front, width, is_in_out, attending)
        for part, front in zip(seen, fronts, strict=True)
    ]
    return _with_routers(parts)


def experts_dim(path: str, shape: Shape) -> int | None:
    """Return the dimension of experts, by the path and the shape of a kernel alone.

    None without one.

    Example:
        >>> experts_dim("layers/0/experts/up", (8, 64, 256))
        0
    """
    return len(shape) - 3 if _is_of_experts(_path_words(path)) and len(shape) > 2 else None


def _with_routers(parts: list[Part]) -> tuple[Part, ...]:
    """Return the same parts.

    Routers are marked: a model has as many experts as they have outputs.
    """
    counts = {part.experts for part in parts if part.experts > 1}
    return tuple(
        replace(part, is_router=True)
        if part.experts == 1
        and {"in", "out"} <= {*part.dims}
        and _ROUTER.fullmatch(part.module)
        and min(part.size("in"), part.size("out")) in counts
        else part
        for part in parts
    )


def _path_words(pattern: str) -> tuple[str, ...]:
    text = re.sub(r"\{[^{}]*\}", "#", pattern).lower()
    return tuple(word for word in _SPLIT.split(text) if word) or (text,)


def _named_roles(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words up to the array's name: paths of flax nnx may have `value` behind it."""
    is_named = len(words) > 1 and (_ARRAY.fullmatch(words[-2]) or _VECTOR.search(words[-2]))
    return words[:-1] if is_named and words[-1:] == ("value",) else words


def _stacks(seen: list[_Seen]) -> list[tuple[tuple[str, ...], int, int]]:
    """(words of a block, the dimension along which its layers are stacked, how many they are).

    A norm has one dimension. One that has two is that of scanned layers, of which there are fewer
    than the model is wide.
    """
    stacks = []
    for part in seen:
        if part.is_norm and len(part.shape) == 2 and 1 not in part.shape:
            block = part.words[:-1] if _NORM.search(part.words[-1]) else part.words[:-2]
            dim = part.shape.index(min(part.shape))
            stacks.append((block, dim, part.shape[dim]))
    return stacks


def _stacks_by_shape(seen: list[_Seen]) -> list[tuple[tuple[str, ...], int, int]]:
    """Find the same of blocks without a norm of two dimensions: all their arrays begin alike."""
    blocks: dict[tuple[str, ...], list[_Seen]] = defaultdict(list)
    for part in seen:
        for end in range(1, len(part.words)):
            if part.words[end] != "#":
                blocks[part.words[:end]].append(part)
    routers = _routers(seen, [{} for _ in seen], None)
    stacks = []
    for block, arrays in blocks.items():
        is_named = _STACK_NAMES.fullmatch(block[-1]) is not None
        if _are_stacked([part.shape for part in arrays], is_named=is_named):
            layers = arrays[0].shape[0]
            around = set().union(*(routers[block[:end]] for end in range(len(block))))
            if layers not in around and (is_named or not all(map(_is_no_stack, arrays))):
                stacks.append((block, 0, layers))
    return stacks


def _is_no_stack(part: _Seen) -> bool:
    return (
        any(map(_NO_STACK.search, part.words)) or _ATTENTION.fullmatch(part.module[-1]) is not None
    )


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


def _leading_dims(
    part: _Seen, stacks: list[tuple[tuple[str, ...], int, int]]
) -> dict[int, DimRole]:
    """Return the dimensions of layers."""
    front: dict[int, DimRole] = {}
    for block, dim, layers in stacks:
        if part.words[: len(block)] == block and part.shape[dim : dim + 1] == (layers,):
            front[dim] = "stack"
            break
    return front


def _add_experts(part: _Seen, front: dict[int, DimRole], is_routed: bool) -> None:
    rest = [dim for dim in range(len(part.shape)) if dim not in front]
    is_apart = len(rest) > (1 if part.is_vector else 2) and _numbered_experts(part.pattern) == 1
    is_expert = is_routed or _is_of_experts(part.words)
    if is_expert and is_apart and "experts" not in front.values():
        front[rest[0]] = "experts"


def _routers(
    seen: list[_Seen], fronts: list[dict[int, DimRole]], width: int | None
) -> dict[tuple[str, ...], set[int]]:
    """By the words of the block around a router, how many experts it chooses from.

    Its other side is the residual width, if that is known: a gate of an MLP is wider.
    """
    experts_in: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for part, front in zip(seen, fronts, strict=True):
        rest = _rest(part, front)
        if len(rest) == 2 and not part.is_vector and _ROUTER.fullmatch(part.module[-1]):
            experts, sibling = sorted(part.shape[dim] for dim in rest)
            if width in (None, sibling):
                experts_in[part.module[:-1]].add(experts)
    return experts_in


def _routed(seen: list[_Seen], fronts: list[dict[int, DimRole]]) -> set[int]:
    """Find the arrays of experts whatever they are called: as many as a router has outputs.

    An array with a name of attention is one if it is as large as another of them.
    """
    routers = _routers(seen, fronts, _residual_width(seen, fronts))
    sizes: dict[int, Shape] = {}
    for number, (part, front) in enumerate(zip(seen, fronts, strict=True)):
        rest = tuple(size for dim, size in enumerate(part.shape) if dim not in front)
        around = set().union(*(routers[part.words[:end]] for end in range(len(part.words))))
        if rest and rest[0] in around and not any(map(_NOT_EXPERTS.search, part.words)):
            sizes[number] = tuple(sorted(rest))
    kernels = {
        size
        for number, size in sizes.items()
        if len(size) > 2 and not _ATTENTION.fullmatch(seen[number].module[-1])
    }
    return {
        number
        for number, size in sizes.items()
        if size in kernels or (kernels and seen[number].is_vector)
    }


def _is_of_experts(words: tuple[str, ...]) -> bool:
    return any(map(_EXPERTS.search, words)) and not any(map(_NOT_EXPERTS.search, words))


def _rest(part: _Seen, front: dict[int, DimRole]) -> list[int]:
    """Return the dimensions of one layer's, and one expert's, array; those of size 1 left out."""
    return [dim for dim, size in enumerate(part.shape) if dim not in front and size > 1]


def _residual_width(seen: list[_Seen], fronts: list[dict[int, DimRole]]) -> int:
    """Return the size that most arrays of layers have, the smallest of equals; 0 without any.

    The experts of a layer count as one.
    """
    votes: Counter[int] = Counter()
    for part, front in zip(seen, fronts, strict=True):
        layers = prod(part.shape[dim] for dim, role in front.items() if role == "stack")
        arrays = layers * len(part.folded.rows) // _numbered_experts(part.pattern)
        for size in {part.shape[dim] for dim in _rest(part, front)}:
            votes[size] += arrays
    return max(votes, key=lambda size: (votes[size], -size), default=0)


def _is_in_out(seen: list[_Seen], fronts: list[dict[int, DimRole]], width: int) -> bool | None:
    """Return whether kernels are [in, out]; None without a sign.

    The names of some say which side the width is on. Without such names, arrays are called so.
    """
    votes = 0
    for part, front in zip(seen, fronts, strict=True):
        rest = _rest(part, front)
        ends = [part.shape[dim] == width for dim in (rest[:1] + rest[-1:])]
        if len(rest) < 2 or sum(ends) != 1 or part.is_vector or _is_lookup(part, rest):
            continue
        if flow := _flow(part.module[-1]):
            votes += 1 if ends[0] == (flow == "reads") else -1
    if votes == 0:
        called = {part.words[-1] for part in seen if len(part.shape) > 1}
        return {(True, False): True, (False, True): False}.get(
            ("kernel" in called, "weight" in called)
        )
    return votes > 0


def _is_lookup(part: _Seen, rest: list[int]) -> bool:
    if len(rest) != 2:
        return False
    words = part.words[-3:]
    named = any(map(_LOOKUP.search, words)) and not any(map(_NOT_LOOKUP.search, words))
    return named or part.words[-1] == "embedding"


def _make_part(
    folded: _Seen,
    front: dict[int, DimRole],
    width: int,
    is_in_out: bool | None,
    attending: set[str],
) -> Part:
    rest = _rest(folded, front)
    roles: dict[int, DimRole] = {**dict.fromkeys(range(len(folded.shape)), "out"), **front}
    if len(rest) > 1 and not folded.is_vector:
        roles |= _matrix_roles(folded, rest, width, is_in_out)
    block = _block(folded)
    experts = _experts(folded, front)
    named = _ATTENTION.fullmatch(folded.module[-1]) is not None and experts == 1
    is_attention = named and (_makes_heads(folded) or block in attending)
    return Part(
        pattern=folded.pattern,
        module=folded.module[-1],
        leaves=len(folded.folded.rows),
        shape=folded.shape,
        dims=tuple(roles[dim] for dim in range(len(folded.shape))),
        experts=experts,
        input_key=f"{block} attention" if is_attention else block,
        is_attention=is_attention,
        is_router=False,
        width=width,
        flow=_flow(folded.module[-1]),
    )


def _makes_heads(part: _Seen) -> bool:
    name = part.module[-1]
    return _ATTENTION.fullmatch(name) is not None and not _BACK.fullmatch(name)


def _flow(name: str) -> Literal["reads", "writes"] | None:
    reads, writes = (bool(words.fullmatch(name)) for words in (_READS, _WRITES))
    return None if reads == writes else "reads" if reads else "writes"


def _matrix_roles(
    part: _Seen, rest: list[int], width: int, is_in_out: bool | None
) -> dict[int, DimRole]:
    """Return the roles of the dimensions of a matrix, whose sides may be several dimensions."""
    first, last = part.shape[rest[0]] == width, part.shape[rest[-1]] == width
    if _is_lookup(part, rest):
        lookup = rest[1] if first and not last else rest[0]
        return {lookup: "lookup"}
    if is_in_out is None or (len(rest) > 3 and not (first or last)):
        return dict.fromkeys(rest, "unknown")
    if not is_in_out:
        return dict.fromkeys(rest[1:], "in")
    # Several dimensions on one side, such as heads: the other side is the width, if it is one.
    is_back = last and not first
    return dict.fromkeys(rest[:-1] if is_back else rest[:1], "in")


def _experts(part: _Seen, front: dict[int, DimRole]) -> int:
    """Return how many experts a layer has: along a dimension, or as leaves of their own."""
    along = [part.shape[dim] for dim, role in front.items() if role == "experts"]
    return along[0] if along else _numbered_experts(part.pattern)


def _numbered_experts(pattern: str) -> int:
    """Return how many numbers a pattern has for experts, as in experts/{0..7}/w1; 1 without."""
    text = ""
    for literal, numbers in parts_of(pattern):
        words = _path_words(text)
        if numbers is not None and words and re.fullmatch(r"experts?_?", words[-1]):
            return sum(run.stop - run.start for run in runs_of(numbers))
        text += literal if numbers is None else "#"
    return 1


def _block(part: _Seen) -> str:
    """Return the folded path of what the module is in."""
    below = len(_path_words(part.pattern)) - len(part.module) + 1
    pattern = part.pattern
    for _ in range(below):
        pattern = re.sub(r"[/.\[\]']*(?:\{[^{}]*\}|[^/.\[\]'])*[\]']*$", "", pattern, count=1)
    return pattern
