"""Companions: LoRA factors, quantized weights with their scales, and stacked layers.

Each record says how a library names such leaves and orders their dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Final, NamedTuple

from shardrules._base.arguments import as_tuple, check_type, integer
from shardrules._base.specs import Dim
from shardrules._base.text import brief, shown, without_defaults
from shardrules._rules.patterns import check_template

Shape = tuple[int, ...]
Dims = tuple[Dim | EllipsisType, ...]


@dataclass(frozen=True, slots=True)
class Companion:
    r"""Leaves that follow the rule of another path: their base's, which need not be in the tree.

    Such a leaf gets the rule that its base's path meets; of the rule's spec it takes an entry for
    each of its dimensions, together with the unit (`RuleSpec`), and that is corrected for its own
    shape. A dimension of size 1 takes none. If no rule matches the base's path, the leaf's own
    counts.

    Args:
        pattern: A regex that `re.search` finds in the leaf's path.
        base: What `re.sub` puts in the place of what was found. The result is the base's path.
        dims: Per dimension of the leaf: the base's dimension that it is; None for a dimension that
            the base does not have and that is not cut; or the mesh axis, or axes, that cut it. The
            record is for leaves of this rank only. A final `...` stands for all further dimensions,
            those of the base in order. Or a function that returns the dims of a leaf of any rank
            from its shape and its base's, which is None where the base is not in the tree.

    Raises:
        ValueError: dims are not of this form.
        re.error: The pattern or the replacement is invalid.

    Example:
        >>> import jax
        >>> import shardrules as sr
        >>> scale = sr.Companion("kernel_scale$", "kernel", dims=(1,))
        >>> tree = {"wq": {"kernel_scale": jax.ShapeDtypeStruct((512,), "float32")}}
        >>> rules, mesh = [("wq/kernel$", ("fsdp", "tp"))], {"fsdp": 8, "tp": 4}
        >>> sr.plan(tree, rules, mesh, companions=[scale]).specs()["wq"]["kernel_scale"][0]
        'tp'
    """

    pattern: str | re.Pattern[str]
    base: str
    dims: Dims | Callable[[Shape, Shape | None], tuple[Dim, ...]] = (...,)

    __repr__ = without_defaults

    def __post_init__(self) -> None:
        check_type("pattern", self.pattern, str | re.Pattern, "a pattern")
        check_type("base", self.base, str, "a string")
        check_template(self.pattern, self.base)
        if not callable(self.dims):
            if type(self.dims) is not tuple:
                object.__setattr__(self, "dims", as_tuple("dims", self.dims, "dimensions"))
            check_dims(self.dims)


class DimStep(NamedTuple):
    """Dimensions of a leaf in terms of its base's."""

    dims: Dims
    """The dims of the `Companion`, or the result of its function."""
    rank: int | None
    """The leaf's rank; None for a base that is not in the tree and has dimensions of its own."""


class Link(NamedTuple):
    """Companion that finds a leaf, or the base of one."""

    companion: Companion
    base: str
    """The path to which it leads."""
    step: DimStep


def base_path(companion: Companion, path: str) -> str:
    """Return the path of the base of the leaf of this path."""
    return re.sub(companion.pattern, companion.base, path, count=1)


def fits_rank(companion: Companion, rank: int | None) -> bool:
    """Tell whether leaves of this rank can follow their base so; None if it is not known."""
    if callable(companion.dims):
        return rank is not None
    named, is_open = named_dims(companion.dims)
    if rank is None:
        return is_open
    # There must be a place for each dimension that the base does not have.
    return all(isinstance(dim, int) for dim in named[rank:]) if is_open else len(named) == rank


def check_dims(dims: Dims) -> None:
    """Check that each is a dimension, None, a mesh axis or a tuple of them, or a final ellipsis."""
    for position, dim in enumerate(dims):
        if dim is not None and not _is_dim(dim) and not (dim is ... and position == len(dims) - 1):
            raise ValueError(
                f"dims has {shown(dim)}; it has dimensions from 0 on, None and mesh axes, and "
                "at its end there may be an ellipsis"
            )


def named_dims(dims: Dims) -> tuple[tuple[Dim, ...], bool]:
    """Return the dims before the ellipsis, and whether there is one."""
    named = tuple(dim for dim in dims if dim is not ...)
    return named, len(named) < len(dims)


def _is_dim(dim: object) -> bool:
    if isinstance(dim, tuple):
        return all(isinstance(axis, str) for axis in dim)
    if isinstance(dim, int):
        return not isinstance(dim, bool) and dim >= 0
    return dim is None or isinstance(dim, str)


def _base_spans(sizes: Shape, base: Shape) -> list[tuple[int, int]] | None:
    """Find the leftmost dimensions of the base that each size is; several if they are merged."""
    spans: list[tuple[int, int]] = []
    start, end = 0, len(base)
    for size in sizes:
        ranges = ((i, j) for i in range(start, end) for j in range(i + 1, end + 1))
        span = next((span for span in ranges if prod(base[slice(*span)]) == size), None)
        if span is None:
            return None
        spans.append(span)
        start = span[1]
    return spans


def _dims_of_a(shape: Shape, base: Shape | None) -> tuple[Dim, ...]:
    """[..., in, rank]: of equal dimensions of the base, the first."""
    if not base:
        return (*range(len(shape) - 1), None)
    spans = _base_spans(shape[:-1], base)
    return (*(first for first, _ in spans), None) if spans else (None,) * len(shape)


def _dims_of_b(shape: Shape, base: Shape | None) -> tuple[Dim, ...]:
    """[rank, ..., out], or [batch, rank, out]: of equal dimensions of the base, the last."""
    if not base:
        return (None, *range(1, len(shape)))
    for rank_at in range(len(shape) - 1):
        sizes = (*shape[:rank_at], *shape[rank_at + 1 :])
        if mirrored := _base_spans(sizes[::-1], base[::-1]):
            dims = [len(base) - end for _, end in reversed(mirrored)]
            return (*dims[:rank_at], None, *dims[rank_at:])
    return (None,) * len(shape)


# [./]: checkpoint names are dotted, the paths of trees made of them slashed.
LORA: Final = (
    # flax.nnx.LoRA and LoRALinear, and linen modules of that manner: [in, r] and [r, out] beside a
    # kernel [in, out].
    Companion(r"(^|/)(?:lora/)?lora_[aA](?:/kernel)?(/value)?$", r"\1kernel\2", dims=(0, None)),
    Companion(r"(^|/)(?:lora/)?lora_[bB](?:/kernel)?(/value)?$", r"\1kernel\2", dims=(None, 1)),
    # qwix: [..., in, r] and [r, ..., out], or [batch, r, out], beside a weight of any name, the
    # dimensions of which an einsum may have in any order.
    Companion(r"_lora_a(/value)?$", r"\1", dims=_dims_of_a),
    Companion(r"_lora_b(/value)?$", r"\1", dims=_dims_of_b),
    # peft's Linear: [r, in] and [out, r] beside a weight [out, in]; "default" is an adapter's name.
    Companion(r"(^|[./])lora_A(?:[./]\w+)?[./]weight$", r"\1weight", dims=(None, 1)),
    Companion(r"(^|[./])lora_B(?:[./]\w+)?[./]weight$", r"\1weight", dims=(0, None)),
    # DoRA in peft: [out].
    Companion(r"(^|[./])lora_magnitude_vector(?:[./]\w+)?(?:[./]weight)?$", r"\1weight", dims=(0,)),
    # peft's Embedding: [r, rows] and [columns, r] beside a weight [rows, columns].
    Companion(r"(^|[./])lora_embedding_A(?:[./]\w+)?$", r"\1weight", dims=(None, 0)),
    Companion(r"(^|[./])lora_embedding_B(?:[./]\w+)?$", r"\1weight", dims=(1, None)),
)
r"""Companions: the factors of LoRA follow the kernel or weight that they adapt; their dimension r,
the rank of the adaptation, is not cut. Of flax.nnx (`lora_a`, `lora_b`), qwix (`..._lora_a`,
`..._lora_b`) and Hugging Face's peft (`lora_A`, `lora_B`, `lora_magnitude_vector`,
`lora_embedding_A`, `lora_embedding_B`). Those of qwix find their dimensions by their sizes where
the weight is in the tree; else a weight [in, out] is assumed."""

_GROUPED: Final = r"(^|[./])(?:qweight|qzeros|scales)$"

QUANTIZED: Final = (
    # DeepSeek-V3's FP8: a scale for each block of 128 x 128.
    Companion(r"(^|[./])weight_scale_inv$", r"\1weight", dims=(0, 1)),
    # compressed-tensors: [out, in / 8] and scales [out, 1] or [out, groups], or one per row.
    Companion(r"(^|[./])weight_(?:packed|scale|zero_point)$", r"\1weight", dims=(0, 1)),
    Companion(r"(^|[./])weight_(?:scale|zero_point)$", r"\1weight", dims=(0,)),
    # GPTQ and AWQ: [in, out], [groups, out], packed along in or out, beside a weight [out, in].
    Companion(_GROUPED, r"\1weight", dims=(1, 0)),
    Companion(r"(^|[./])g_idx$", r"\1weight", dims=(1,)),
    # gpt-oss's MXFP4: [experts, out, in / 32, 16 bytes] and [experts, out, in / 32] beside an array
    # [experts, in, out].
    Companion(r"_proj_blocks$", "_proj", dims=(0, 2, 1, None)),
    Companion(r"_proj_scales$", "_proj", dims=(0, 2, 1)),
    # qwix: the values of a quantized weight, and scales of as many dimensions, some of them 1.
    Companion(r"/array/(?:qvalue|scale|zero_point)(/value)?$", r"\1"),
    # A flax kernel [in, out] with a scale for each output: [out] or [1, out].
    Companion(r"(^|/)kernel_scale(/value)?$", r"\1kernel\2", dims=(1,)),
    Companion(r"(^|/)kernel_scale(/value)?$", r"\1kernel\2", dims=(0, 1)),
)
r"""Companions: what quantization puts beside a weight, or in its place, follows the weight.
DeepSeek's `weight_scale_inv`; `qweight`, `qzeros`, `scales` and `g_idx` of GPTQ and AWQ;
`weight_packed`, `weight_scale` and `weight_zero_point` of compressed-tensors; `..._proj_blocks` and
`..._proj_scales` of gpt-oss; `array/qvalue`, `array/scale` and `array/zero_point` of qwix; and a
`kernel_scale` for each output."""


def stacked(
    at: str, layer: str | None = None, *, axis: int = 0, mesh_axis: str | None = None
) -> Companion:
    r"""Apply rules for single layers to a tree of stacked ones, as `jax.lax.scan` needs them.

    Args:
        at: The path of the stack, without what is above it: `decoder/layers`. "" is the root: each
            array is stacked, as in an ensemble that `jax.vmap` has made.
        layer: The path of the layer whose rules count; a `*` in it is layer 0. Default: `{at}/*`.
        axis: The dimension of the stack in its arrays; 1 in MaxText. Default: 0.
        mesh_axis: The mesh axis that cuts the stack, such as one of pipeline stages. Default: none.

    Returns:
        For `plan(..., companions=...)`.

    Raises:
        ValueError: axis is negative, or above 63; or there is a layer for the root.

    Example:
        >>> import jax
        >>> import shardrules as sr
        >>> rules = [(r"layers/\d+/wq", ("fsdp", "tp"))]
        >>> tree = {"layers": {"wq": jax.ShapeDtypeStruct((32, 512, 512), "bfloat16")}}
        >>> mesh = {"fsdp": 8, "tp": 4}
        >>> plan = sr.plan(tree, rules, mesh, companions=[sr.stacked("layers")])
        >>> tuple(plan.specs()["layers"]["wq"])
        (None, 'fsdp', 'tp')
    """
    check_type("at", at, str, "a path")
    check_type("layer", layer, str | None, "a path, or None")
    check_type("mesh_axis", mesh_axis, str | None, "a mesh axis or None")
    # No array has more dimensions: numpy's have 64.
    dims = (*range(integer("axis", axis, 0, 63)), mesh_axis, ...)
    if not at:
        if layer is not None:
            raise ValueError(
                f"layer is {brief(layer)}, and at is the root: leave layer, if the rules are for "
                r"the tree's own paths, or give a Companion('^(.*)$', r'LAYER/\1', (None, ...))"
            )
        return Companion("^(.*)$", r"\g<1>", dims)
    of_layer = (layer or f"{at}/*").replace("*", "0").replace("\\", r"\\")
    return Companion(rf"(^|[./]){re.escape(at)}([./]|$)", rf"\g<1>{of_layer}\g<2>", dims)
