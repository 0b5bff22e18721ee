"""Models that no manifest has, as trees of abstract arrays: written from their public definitions."""

from __future__ import annotations

from typing import Any

from jax import ShapeDtypeStruct


def array(*shape: int) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape, "bfloat16")


def kernel(*shape: int) -> dict[str, Any]:
    return {"kernel": array(*shape)}


def weight(*shape: int, bias: int = 0) -> dict[str, Any]:
    """A torch module's parameters."""
    return {"weight": array(*shape)} | ({"bias": array(bias)} if bias else {})


def layers(count: int, layer: Any) -> dict[str, Any]:
    return {str(number): layer for number in range(count)}


def llama(
    width: int = 4096,
    hidden: int = 11008,
    kv: int = 1024,
    depth: int = 4,
    queries: int = 0,
    head_norm: int = 0,
    lora: int = 0,
) -> dict[str, Any]:
    queries = queries or width
    sizes = {
        "q_proj": (width, queries), "k_proj": (width, kv), "v_proj": (width, kv),
        "o_proj": (queries, width),
    }  # fmt: skip
    attention: dict[str, Any] = {name: kernel(*size) for name, size in sizes.items()}
    for name, (first, second) in sizes.items():
        if lora:
            attention[name] |= {"lora_a": array(first, lora), "lora_b": array(lora, second)}
    if head_norm:
        attention |= {f"{of}_norm": {"scale": array(head_norm)} for of in "qk"}
    layer = {
        "self_attn": attention,
        "mlp": {
            "gate_proj": kernel(width, hidden),
            "up_proj": kernel(width, hidden),
            "down_proj": kernel(hidden, width),
        },
        "input_layernorm": {"scale": array(width)},
        "post_attention_layernorm": {"scale": array(width)},
    }
    return {
        "model": {
            "embed_tokens": {"embedding": array(128256, width)},
            "layers": layers(depth, layer),
            "norm": {"scale": array(width)},
        },
        "lm_head": kernel(width, 128256),
    }


def mamba(width: int = 2560, depth: int = 4) -> dict[str, Any]:
    """state-spaces/mamba-2.8b."""
    inner = 2 * width
    mixer = {
        "in_proj": weight(2 * inner, width),
        "conv1d": weight(inner, 1, 4, bias=inner),
        "x_proj": weight(192, inner),
        "dt_proj": weight(inner, 160, bias=inner),
        "A_log": array(inner, 16),
        "D": array(inner),
        "out_proj": weight(width, inner),
    }
    layer = {"mixer": mixer, "norm": weight(width)}
    return {
        "backbone": {"embedding": weight(50280, width), "layers": layers(depth, layer), "norm_f": weight(width)},
        "lm_head": weight(50280, width),
    }


def gemma(depth: int = 42) -> dict[str, Any]:
    """google-deepmind/gemma's einsum kernels, of Gemma 2 9B."""
    layer = {
        "attn": {
            "q_einsum": {"w": array(16, 3584, 256)},
            "kv_einsum": {"w": array(2, 8, 3584, 256)},
            "attn_vec_einsum": {"w": array(16, 256, 3584)},
        },
        "mlp": {"gating_einsum": {"w": array(2, 3584, 14336)}, "linear": {"w": array(14336, 3584)}},
        "pre_attention_norm": {"scale": array(3584)},
    }
    return {
        "transformer": {
            "embedder": {"input_embedding": array(256128, 3584)},
            **{f"layer_{number}": layer for number in range(depth)},
            "final_norm": {"scale": array(3584)},
        }
    }


def diffusion_transformer(width: int = 1152) -> dict[str, Any]:
    """facebookresearch/DiT, DiT-XL/2."""
    block = {
        "attn": {"qkv": weight(3 * width, width, bias=3 * width), "proj": weight(width, width, bias=width)},
        "mlp": {"fc1": weight(4 * width, width, bias=4 * width), "fc2": weight(width, 4 * width, bias=width)},
        "adaLN_modulation": {"1": weight(6 * width, width, bias=6 * width)},
    }
    return {
        "x_embedder": {"proj": weight(width, 4, 2, 2, bias=width)},
        "t_embedder": {"mlp": {"0": weight(width, 256), "2": weight(width, width)}},
        "y_embedder": {"embedding_table": weight(1001, width)},
        "pos_embed": array(1, 256, width),
        "blocks": layers(28, block),
        "final_layer": {"linear": weight(32, width, bias=32)},
    }


def siglip(depth: int = 27, width: int = 1152, hidden: int = 4304) -> dict[str, Any]:
    """big_vision's So400m, its layers in a scan."""

    def stack(*shape: int) -> ShapeDtypeStruct:
        return array(depth, *shape)

    heads = {name: {"kernel": stack(width, 16, 72), "bias": stack(16, 72)} for name in ("query", "key", "value")}
    block = {
        "LayerNorm_0": {"scale": stack(width), "bias": stack(width)},
        "MlpBlock_0": {
            "Dense_0": {"kernel": stack(width, hidden), "bias": stack(hidden)},
            "Dense_1": {"kernel": stack(hidden, width), "bias": stack(width)},
        },
        "MultiHeadDotProductAttention_0": {**heads, "out": {"kernel": stack(16, 72, width)}},
    }
    return {
        "embedding": {"kernel": array(14, 14, 3, width), "bias": array(width)},
        "pos_embedding": array(1, 256, width),
        "Transformer": {"encoderblock": block, "encoder_norm": {"scale": array(width)}},
        "head": {"kernel": array(width, 2048), "bias": array(2048)},
    }


def gpt_oss(depth: int = 4, width: int = 2880, experts: int = 128) -> dict[str, Any]:
    layer = {
        "self_attn": {
            "q_proj": weight(4096, width, bias=4096),
            "k_proj": weight(512, width, bias=512),
            "v_proj": weight(512, width, bias=512),
            "o_proj": weight(width, 4096, bias=width),
            "sinks": array(64),
        },
        "mlp": {
            "router": weight(experts, width, bias=experts),
            "experts": {
                "gate_up_proj": array(experts, width, 2 * width),
                "gate_up_proj_bias": array(experts, 2 * width),
                "down_proj": array(experts, width, width),
                "down_proj_bias": array(experts, width),
            },
        },
        "input_layernorm": weight(width),
    }
    return {
        "model": {"embed_tokens": weight(201088, width), "layers": layers(depth, layer), "norm": weight(width)},
        "lm_head": weight(201088, width),
    }


def resnet() -> dict[str, Any]:
    """torchvision's resnet50."""
    tree: dict[str, Any] = {"conv1": weight(64, 3, 7, 7), "bn1": weight(64, bias=64)}
    channels = 64
    for number, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], 1):
        stage: dict[str, Any] = {}
        for block in range(blocks):
            stage[str(block)] = {
                "conv1": weight(width, channels, 1, 1),
                "conv2": weight(width, width, 3, 3),
                "conv3": weight(4 * width, width, 1, 1),
                "bn3": weight(4 * width, bias=4 * width),
            }
            if block == 0:
                stage["0"]["downsample"] = {"0": weight(4 * width, channels, 1, 1)}
            channels = 4 * width
        tree[f"layer{number}"] = stage
    return tree | {"fc": weight(1000, 2048, bias=1000)}


def graph_network(width: int = 300) -> dict[str, Any]:
    """ogb's GIN."""
    layer = {
        "mlp": {
            "0": weight(2 * width, width, bias=2 * width),
            "1": weight(2 * width, bias=2 * width),
            "3": weight(width, 2 * width, bias=width),
        },
        "eps": array(1),
    }
    return {"embed": weight(119, width), "convs": layers(5, layer), "pool": weight(1, width)}
