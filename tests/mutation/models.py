"""Shapes of published models, for rules that were written for them; no check was tuned on them.

From the models' own configurations and the paths that their libraries give parameters; `*` stands
for each layer. Nothing here is a checkpoint.
"""

from typing import Any, Final, NamedTuple

from tests.support.models import Shapes, nested
from tests.support.models import at as _at


class Model(NamedTuple):
    """A model by its layers."""

    layers: int
    shapes: Shapes
    """By path; a `*` stands for each of the layers."""
    dtype: str = "bfloat16"

    def tree(self) -> dict[str, Any]:
        """Nested dicts of abstract arrays."""
        return nested(self.shapes, self.layers, self.dtype)


def _attention(hidden: int, q: int, kv: int, norm: int = 0) -> Shapes:
    norms = {"q_norm/kernel": (norm,), "k_norm/kernel": (norm,)} if norm else {}
    return {
        "q_proj/kernel": (hidden, q),
        "k_proj/kernel": (hidden, kv),
        "v_proj/kernel": (hidden, kv),
        "o_proj/kernel": (q, hidden),
        **norms,
    }


def _mlp(hidden: int, inner: int) -> Shapes:
    return {"gate_proj/kernel": (hidden, inner), "up_proj/kernel": (hidden, inner), "down_proj/kernel": (inner, hidden)}


def _experts(experts: int, hidden: int, inner: int) -> Shapes:
    return {path: (experts, *shape) for path, shape in _mlp(hidden, inner).items()}


_NORMS: Final = ("input_layernorm/kernel", "post_attention_layernorm/kernel")


def _decoder(hidden: int, vocabulary: int, attention: tuple[int, ...], inner: int, norms: tuple[str, ...] = _NORMS,
             *, has_head: bool = True) -> Shapes:  # fmt: skip
    """Of layers of attention and an MLP."""
    return {
        "model/embed_tokens/embedding": (vocabulary, hidden), "model/norm/kernel": (hidden,),
        **({"lm_head/kernel": (hidden, vocabulary)} if has_head else {}),
        **_at("model/layers/*/self_attn", _attention(hidden, *attention)),
        **_at("model/layers/*/mlp", _mlp(hidden, inner)),
        **_at("model/layers/*", dict.fromkeys(norms, (hidden,))),
    }  # fmt: skip


MODELS: Final = {
    "qwen3-235b-a22b": Model(94, {
        "model/embed_tokens/embedding": (151936, 4096), "lm_head/kernel": (4096, 151936), "model/norm/kernel": (4096,),
        **_at("model/layers/*/self_attn", _attention(4096, 64 * 128, 4 * 128, norm=128)),
        **_at("model/layers/*/mlp/experts", _experts(128, 4096, 1536)),
        "model/layers/*/mlp/gate/kernel": (4096, 128),
        **_at("model/layers/*", dict.fromkeys(_NORMS, (4096,))),
    }),
    "qwen3-32b": Model(64, _decoder(5120, 151936, (64 * 128, 8 * 128, 128), 25600)),
    "gemma-3-27b": Model(62, {
        **_decoder(5376, 262208, (32 * 128, 16 * 128, 128), 21504, has_head=False),
        "model/layers/*/pre_feedforward_layernorm/kernel": (5376,), "model/layers/*/post_feedforward_layernorm/kernel": (5376,),
    }),
    "gpt-oss-120b": Model(36, {
        "model/embed_tokens/embedding": (201088, 2880), "lm_head/kernel": (2880, 201088), "model/norm/scale": (2880,),
        **_at("model/layers/*/self_attn", _attention(2880, 64 * 64, 8 * 64)),
        "model/layers/*/self_attn/q_proj/bias": (4096,), "model/layers/*/self_attn/o_proj/bias": (2880,), "model/layers/*/self_attn/sinks": (64,),
        "model/layers/*/mlp/experts/gate_up_proj": (128, 2880, 5760), "model/layers/*/mlp/experts/down_proj": (128, 2880, 2880),
        "model/layers/*/mlp/experts/gate_up_proj_bias": (128, 5760), "model/layers/*/mlp/experts/down_proj_bias": (128, 2880),
        "model/layers/*/mlp/gate/kernel": (2880, 128), "model/layers/*/mlp/gate/bias": (128,),
        "model/layers/*/input_layernorm/scale": (2880,), "model/layers/*/post_attention_layernorm/scale": (2880,),
    }),
    "falcon-40b": Model(60, {
        "transformer/word_embeddings/embedding": (65024, 8192), "lm_head/kernel": (8192, 65024),
        "transformer/h/*/self_attention/query_key_value/kernel": (8192, 9216), "transformer/h/*/self_attention/dense/kernel": (8192, 8192),
        "transformer/h/*/mlp/dense_h_to_4h/kernel": (8192, 32768), "transformer/h/*/mlp/dense_4h_to_h/kernel": (32768, 8192),
        "transformer/h/*/ln_attn/scale": (8192,), "transformer/h/*/ln_attn/bias": (8192,), "transformer/ln_f/scale": (8192,), "transformer/ln_f/bias": (8192,),
    }),
    "mamba-2.8b": Model(64, {
        "backbone/embeddings/embedding": (50280, 2560), "lm_head/kernel": (2560, 50280), "backbone/norm_f/kernel": (2560,),
        "backbone/layers/*/norm/kernel": (2560,), "backbone/layers/*/mixer/in_proj/kernel": (2560, 10240),
        "backbone/layers/*/mixer/out_proj/kernel": (5120, 2560), "backbone/layers/*/mixer/conv1d/kernel": (4, 1, 5120),
        "backbone/layers/*/mixer/conv1d/bias": (5120,), "backbone/layers/*/mixer/A_log": (5120, 16), "backbone/layers/*/mixer/D": (5120,),
        "backbone/layers/*/mixer/dt_proj/kernel": (160, 5120), "backbone/layers/*/mixer/dt_proj/bias": (5120,),
        "backbone/layers/*/mixer/x_proj/kernel": (5120, 192),
    }, "float32"),
    "gpt-neox-20b": Model(44, {
        "transformer/wte/embedding": (50432, 6144), "lm_head/kernel": (6144, 50432),
        "transformer/h/*/attention/w_qkv/kernel": (6144, 18432), "transformer/h/*/attention/w_qkv/bias": (18432,),
        "transformer/h/*/attention/wo/kernel": (6144, 6144), "transformer/h/*/attention/wo/bias": (6144,),
        "transformer/h/*/mlp/dense_h_to_4h/kernel": (6144, 24576), "transformer/h/*/mlp/dense_h_to_4h/bias": (24576,),
        "transformer/h/*/mlp/dense_4h_to_h/kernel": (24576, 6144), "transformer/h/*/mlp/dense_4h_to_h/bias": (6144,),
        **{f"transformer/h/*/{norm}/{part}": (6144,) for norm in ("input_layernorm", "post_attention_layernorm") for part in ("scale", "bias")},
    }, "float16"),
    "command-r7b": Model(32, _decoder(4096, 256000, (32 * 128, 8 * 128), 14336, _NORMS[:1], has_head=False)),
    "phi-3-medium": Model(40, {
        "model/embed_tokens/embedding": (32064, 5120), "lm_head/kernel": (5120, 32064), "model/norm/kernel": (5120,),
        "model/layers/*/self_attn/qkv_proj/kernel": (5120, 7680), "model/layers/*/self_attn/o_proj/kernel": (5120, 5120),
        "model/layers/*/mlp/gate_up_proj/kernel": (5120, 35840), "model/layers/*/mlp/down_proj/kernel": (17920, 5120),
        **_at("model/layers/*", dict.fromkeys(_NORMS, (5120,))),
    }),
    "mpt-30b": Model(48, {
        "transformer/wte/embedding": (50432, 7168), "transformer/norm_f/scale": (7168,), "lm_head/kernel": (7168, 50432),
        "transformer/blocks/*/attn/Wqkv/kernel": (7168, 21504), "transformer/blocks/*/attn/out_proj/kernel": (7168, 7168),
        "transformer/blocks/*/ffn/up_proj/kernel": (7168, 28672), "transformer/blocks/*/ffn/down_proj/kernel": (28672, 7168),
        "transformer/blocks/*/norm_1/scale": (7168,), "transformer/blocks/*/norm_2/scale": (7168,),
    }),
    "gemma-7b-keras": Model(28, {
        "token_embedding/embeddings": (256128, 3072),
        "decoder_block_*/attention/query/kernel": (16, 3072, 256), "decoder_block_*/attention/key/kernel": (16, 3072, 256),
        "decoder_block_*/attention/value/kernel": (16, 3072, 256), "decoder_block_*/attention/attention_output/kernel": (16, 256, 3072),
        "decoder_block_*/ffw_gating/kernel": (3072, 24576), "decoder_block_*/ffw_gating_2/kernel": (3072, 24576),
        "decoder_block_*/ffw_linear/kernel": (24576, 3072), "decoder_block_*/pre_attention_norm/scale": (3072,), "decoder_block_*/pre_ffw_norm/scale": (3072,),
        "final_normalization/scale": (3072,),
    }),
    "llama-3-8b-scalax": Model(32, _decoder(4096, 128256, (4096, 1024), 14336)),
}  # fmt: skip
