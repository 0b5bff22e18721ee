"""Tables of companions: LoRA factors, and quantized weights with their scales.

Each record says how a library names such leaves and orders their dimensions. They are made, and
checked, when they are first asked for.
"""

from __future__ import annotations

from math import prod
from typing import Final

from shardrules._base.specs import Dim
from shardrules._plan.companions import Companion, Shape


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
