r"""Renames as data: from the names and layouts of Hugging Face to those of flax, and of experts.

Each record says how a library names such arrays and how their dimensions are ordered; reading them
costs nothing. Must not know how a rename is applied.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from shardrules._moving.renames import Rename

__all__ = ["DEEPSEEK_STACKED", "DEEPSEEK_UNSTACKED", "HF_TO_FLAX"]

# A model of the family may lack it.
_part: Final = partial(Rename, optional=True)

_LAYER: Final = r"^model\.layers\.(\d+)\."
_TRANSPOSED: Final = "out in -> in out"

HF_TO_FLAX: Final = (
    _part(r"^model\.embed_tokens\.weight$", "model/embed_tokens/embedding"),
    _part(r"^model\.norm\.weight$", "model/norm/scale"),
    _part(r"^lm_head\.weight$", "lm_head/kernel", _TRANSPOSED),
    _part(_LAYER + r"(\w*layernorm)\.weight$", r"model/layers/\1/\2/scale"),
    _part(_LAYER + r"self_attn\.([qk]_norm)\.weight$", r"model/layers/\1/self_attn/\2/scale"),
    _part(_LAYER + r"(self_attn|mlp)\.(\w+)\.bias$", r"model/layers/\1/\2/\3/bias"),
    # Qwen3's mixture of experts; `gate` is the router.
    _part(
        _LAYER + r"mlp\.experts\.(?P<expert>\d+)\.(\w+)\.weight$",
        r"model/layers/\1/mlp/experts/\3/kernel",
        "out in -> expert in out",
    ),
    _part(
        _LAYER + r"(self_attn|mlp)\.(\w+)\.weight$", r"model/layers/\1/\2/\3/kernel", _TRANSPOSED
    ),
    # Computed, and no parameter; old checkpoints have it.
    _part(r"rotary_emb\.inv_freq$", None),
)
r"""Renames: Llama, Qwen2, Qwen3 and Mistral of Hugging Face to a tree in the manner of flax linen,
`model/layers/0/self_attn/q_proj/kernel` [in, out], with `bias`, `scale` and `embedding`; the
experts of Qwen3 are stacked in `mlp/experts/gate_proj/kernel` [expert, in, out]."""

_EXPERT: Final = r"\.mlp\.experts\.(?P<expert>\d+)\.(\w+)\.weight$"
_SCALE: Final = r"\g<0>_scale_inv"
_BLOCKS: Final = (128, 128)

DEEPSEEK_STACKED: Final = (
    _part(
        _EXPERT,
        r".mlp.experts.\2.weight",
        "out in -> expert out in",
        scale=_SCALE,
        blocks=_BLOCKS,
        dtype="bfloat16",
    ),
    _part(r"_proj(_with_mqa)?\.weight$", r"\g<0>", scale=_SCALE, blocks=_BLOCKS, dtype="bfloat16"),
)
r"""Renames: DeepSeek-V3 with the experts of a layer stacked,
`model.layers.3.mlp.experts.gate_proj.weight` [expert, out, in]. Its FP8 weights times their scales
are bfloat16, as DeepSeek's own conversion has them, whatever `dtype` of the call is; other names
stay."""

DEEPSEEK_UNSTACKED: Final = (
    _part(
        r"\.mlp\.experts\.(\w+)\.weight$",
        r".mlp.experts.{expert}.\1.weight",
        "expert out in -> out in",
    ),
)
"""Renames: the experts that `DEEPSEEK_STACKED` stacks, taken apart again."""
