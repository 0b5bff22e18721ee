"""Models that no manifest has, as trees of abstract arrays: written from their public definitions."""

from typing import Any

from jax import ShapeDtypeStruct

Shapes = dict[str, tuple[int, ...]]


def array(*shape: int) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape, "bfloat16")


def kernel(*shape: int) -> dict[str, Any]:
    return {"kernel": array(*shape)}


def weight(*shape: int, bias: int = 0) -> dict[str, Any]:
    return {"weight": array(*shape)} | ({"bias": array(bias)} if bias else {})


def layers(count: int, layer: Any) -> dict[str, Any]:
    return {str(number): layer for number in range(count)}


def nested(shapes: Shapes, depth: int = 1, dtype: str = "bfloat16") -> dict[str, Any]:
    """Dicts in dicts of arrays, by their paths; a `*` stands for each of the layers."""
    tree: dict[str, Any] = {}
    for path, shape in shapes.items():
        for layer in range(depth if "*" in path else 1):
            *outer, last = path.replace("*", str(layer)).split("/")
            node = tree
            for key in outer:
                node = node.setdefault(key, {})
            node[last] = ShapeDtypeStruct(shape, dtype)
    return tree


def at(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}/{path}": shape for path, shape in shapes.items()}


def dense(**sizes: tuple[int, int]) -> Shapes:
    """Torch's linear modules of these names, (in, out), with biases; `a__b` is `a/b`."""
    both = {"weight": lambda a, b: (b, a), "bias": lambda a, b: (b,)}
    return {f"{name.replace('__', '/')}/{part}": of(*size) for name, size in sizes.items() for part, of in both.items()}


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
    projections = {"q": (width, queries), "k": (width, kv), "v": (width, kv), "o": (queries, width)}
    layer: Shapes = {}
    for name, (first, second) in projections.items():
        layer[f"self_attn/{name}_proj/kernel"] = (first, second)
        if lora:
            layer |= at(f"self_attn/{name}_proj", {"lora_a": (first, lora), "lora_b": (lora, second)})
    layer |= {f"self_attn/{of}_norm/scale": (head_norm,) for of in ("qk" if head_norm else "")}
    layer |= {f"mlp/{name}_proj/kernel": (width, hidden) for name in ("gate", "up")}
    layer |= {"mlp/down_proj/kernel": (hidden, width)}
    layer |= {f"{of}_layernorm/scale": (width,) for of in ("input", "post_attention")}
    shapes = {"embed_tokens/embedding": (128256, width), **at("layers/*", layer), "norm/scale": (width,)}
    return nested({**at("model", shapes), "lm_head/kernel": (width, 128256)}, depth)


def mamba(width: int = 2560, depth: int = 4) -> dict[str, Any]:
    """state-spaces/mamba-2.8b."""
    inner = 2 * width
    mixer: Shapes = {
        "in_proj/weight": (2 * inner, width), "conv1d/weight": (inner, 1, 4), "conv1d/bias": (inner,),
        "x_proj/weight": (192, inner), "dt_proj/weight": (inner, 160), "dt_proj/bias": (inner,),
        "A_log": (inner, 16), "D": (inner,), "out_proj/weight": (width, inner),
    }  # fmt: skip
    layer = {**at("mixer", mixer), "norm/weight": (width,)}
    shapes = {"embedding/weight": (50280, width), **at("layers/*", layer), "norm_f/weight": (width,)}
    return nested({**at("backbone", shapes), "lm_head/weight": (50280, width)}, depth)


def gemma(depth: int = 42) -> dict[str, Any]:
    """google-deepmind/gemma's einsum kernels, of Gemma 2 9B."""
    layer: Shapes = {
        "attn/q_einsum/w": (16, 3584, 256), "attn/kv_einsum/w": (2, 8, 3584, 256), "attn/attn_vec_einsum/w": (16, 256, 3584),
        "mlp/gating_einsum/w": (2, 3584, 14336), "mlp/linear/w": (14336, 3584), "pre_attention_norm/scale": (3584,),
    }  # fmt: skip
    shapes = {"embedder/input_embedding": (256128, 3584), **at("layer_*", layer), "final_norm/scale": (3584,)}
    return nested(at("transformer", shapes), depth)


def diffusion_transformer(width: int = 1152) -> dict[str, Any]:
    """facebookresearch/DiT, DiT-XL/2."""
    block = dense(
        attn__qkv=(width, 3 * width), attn__proj=(width, width), mlp__fc1=(width, 4 * width),
        mlp__fc2=(4 * width, width), adaLN_modulation__1=(width, 6 * width),
    )  # fmt: skip
    shapes: Shapes = {
        "x_embedder/proj/weight": (width, 4, 2, 2), "x_embedder/proj/bias": (width,),
        "t_embedder/mlp/0/weight": (width, 256), "t_embedder/mlp/2/weight": (width, width),
        "y_embedder/embedding_table/weight": (1001, width), "pos_embed": (1, 256, width),
    }  # fmt: skip
    return nested({**shapes, **at("blocks/*", block), **dense(final_layer__linear=(width, 32))}, 28)


def siglip(depth: int = 27, width: int = 1152, hidden: int = 4304) -> dict[str, Any]:
    """big_vision's So400m, its layers in a scan."""
    attention = {f"{of}/{part}": (*shape, 16, 72) for of in ("query", "key", "value")
                 for part, shape in {"kernel": (width,), "bias": ()}.items()}  # fmt: skip
    block: Shapes = {
        "LayerNorm_0/scale": (width,), "LayerNorm_0/bias": (width,),
        "MlpBlock_0/Dense_0/kernel": (width, hidden), "MlpBlock_0/Dense_0/bias": (hidden,),
        "MlpBlock_0/Dense_1/kernel": (hidden, width), "MlpBlock_0/Dense_1/bias": (width,),
        **at("MultiHeadDotProductAttention_0", {**attention, "out/kernel": (16, 72, width)}),
    }  # fmt: skip
    stacked = {f"Transformer/encoderblock/{path}": (depth, *shape) for path, shape in block.items()}
    return nested({
        "embedding/kernel": (14, 14, 3, width), "embedding/bias": (width,), "pos_embedding": (1, 256, width),
        **stacked, "Transformer/encoder_norm/scale": (width,), "head/kernel": (width, 2048), "head/bias": (2048,),
    })  # fmt: skip


def gpt_oss(depth: int = 4, width: int = 2880, experts: int = 128) -> dict[str, Any]:
    layer = {
        **at("self_attn", dense(q_proj=(width, 4096), k_proj=(width, 512), v_proj=(width, 512), o_proj=(4096, width))),
        "self_attn/sinks": (64,),
        **dense(mlp__router=(width, experts)),
        "mlp/experts/gate_up_proj": (experts, width, 2 * width), "mlp/experts/gate_up_proj_bias": (experts, 2 * width),
        "mlp/experts/down_proj": (experts, width, width), "mlp/experts/down_proj_bias": (experts, width),
        "input_layernorm/weight": (width,),
    }  # fmt: skip
    shapes = {"embed_tokens/weight": (201088, width), **at("layers/*", layer), "norm/weight": (width,)}
    return nested({**at("model", shapes), "lm_head/weight": (201088, width)}, depth)


def resnet() -> dict[str, Any]:
    """torchvision's resnet50."""
    shapes: Shapes = {"conv1/weight": (64, 3, 7, 7), "bn1/weight": (64,), "bn1/bias": (64,)}
    channels = 64
    for number, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], 1):
        for block in range(blocks):
            shapes |= at(f"layer{number}/{block}", {
                "conv1/weight": (width, channels, 1, 1), "conv2/weight": (width, width, 3, 3),
                "conv3/weight": (4 * width, width, 1, 1), "bn3/weight": (4 * width,), "bn3/bias": (4 * width,),
            } | ({} if block else {"downsample/0/weight": (4 * width, channels, 1, 1)}))  # fmt: skip
            channels = 4 * width
    return nested({**shapes, **dense(fc=(2048, 1000))})


def graph_network(width: int = 300) -> dict[str, Any]:
    """ogb's GIN."""
    layer: Shapes = {
        "mlp/0/weight": (2 * width, width), "mlp/0/bias": (2 * width,), "mlp/1/weight": (2 * width,),
        "mlp/1/bias": (2 * width,), "mlp/3/weight": (width, 2 * width), "mlp/3/bias": (width,), "eps": (1,),
    }  # fmt: skip
    return nested({"embed/weight": (119, width), **at("convs/*", layer), "pool/weight": (1, width)}, 5)
