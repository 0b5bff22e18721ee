"""Renames of families of models on Hugging Face, to the trees of flax, EasyDeL and MaxText: tables.

MaxText's are those of its conversion (`checkpoint_conversion/utils/param_mapping.py`), EasyDeL's
those of its modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from shardrules._base.arguments import boolean, check_real, check_type
from shardrules._base.text import near_shown, shown
from shardrules._checkpoint.renames import Rename


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Affine:
    r"""A function for `Rename(apply=)`: `x * factor + offset`, computed in float32.

    Args:
        factor: A number.
        offset: A number.

    Example:
        >>> import shardrules as sr
        >>> record = sr.Rename(r"norm\.weight$", "norm/scale", apply=sr.renames.Affine(offset=1.0))
        >>> record.apply.inverse()
        Affine(factor=1.0, offset=-1.0)
    """

    factor: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        check_real("factor", self.factor)
        check_real("offset", self.offset)
        if not self.factor:
            raise ValueError("factor is 0, which makes all arrays alike")

    def __call__(self, x: Any) -> Any:
        return (x.astype("float32") * self.factor + self.offset).astype(x.dtype)

    def inverse(self) -> Affine:
        """Return the function that undoes this one."""
        return Affine(1 / self.factor, -self.offset / self.factor)


# The values of E2M1; the sign is the highest bit.
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(blocks: Any, scales: Any) -> Any:
    """Unpack MXFP4: `blocks` [..., out, group, 16] of two codes a byte, `scales` [..., out, group].

    A scale is the exponent of 2, plus 127. Returns bfloat16 [..., group * 32, out].
    """
    import jax.numpy as jnp

    table = jnp.array([*_FP4, *(-value for value in _FP4)], "float32")
    values = table[jnp.stack([blocks & 15, blocks >> 4], axis=-1)]
    values = values.reshape(*blocks.shape[:-1], -1)
    values = jnp.ldexp(values, scales.astype("int32")[..., None] - 127)
    return values.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2).astype("bfloat16")


class _Row(NamedTuple):
    """A row of a table."""

    name: str
    """A regex in which `.` is itself. LAYER is `model.layers.` and the number."""
    path: str
    """LAYER is the path of the layer, NORM the word for the weights of norms."""
    dims: str = ""
    apply: str = ""
    """The name of a function that the configuration gives."""
    words: tuple[str, ...] = ()
    """Of the axis `part`."""
    argument: str = ""
    is_codes: bool = False
    """Whether a quantized model has codes and scales there."""


def _matrices(*rows: tuple[str, str], dims: str = "out in -> in out") -> tuple[_Row, ...]:
    return tuple(_Row(f"{name}.weight", path, dims, is_codes=True) for name, path in rows)


def _vectors(*rows: tuple[str, str], apply: str = "") -> tuple[_Row, ...]:
    return tuple(_Row(name, path, "a -> a", apply) for name, path in rows)


_EXPERT: Final = r"experts.(?P<expert>\d+)"
_STACKED: Final = "out in -> expert in out"
_FLAX: Final = (
    _Row("model.embed_tokens.weight", "model/embed_tokens/embedding"),
    _Row("model.norm.weight", "model/norm/NORM"),
    _Row("lm_head.weight", "lm_head/kernel", "out in -> in out"),
    *_vectors(
        (r"LAYER.(\w*layernorm).weight", r"LAYER/\2/NORM"),
        (r"LAYER.self_attn.(\w+_norm|\w+_layernorm).weight", r"LAYER/self_attn/\2/NORM"),
        ("LAYER.self_attn.sinks", "LAYER/self_attn/sinks"),
        (r"LAYER.(self_attn|mlp).(\w+).bias", r"LAYER/\2/\3/bias"),
        ("LAYER.mlp.gate.e_score_correction_bias", "LAYER/mlp/gate/e_score_correction_bias"),
    ),
    _Row(r"LAYER.(mlp|block_sparse_moe).gate.weight", r"LAYER/\2/gate/kernel", "out in -> in out"),
    *_matrices(
        (rf"LAYER.(mlp|block_sparse_moe).{_EXPERT}.(\w+)", r"LAYER/\2/experts/\4/kernel"),
        dims=_STACKED,
    ),
    *_matrices(
        (r"LAYER.mlp.(shared_experts?).(\w+)", r"LAYER/mlp/\2/\3/kernel"),
        (r"LAYER.(self_attn|mlp|block_sparse_moe).(\w+)", r"LAYER/\2/\3/kernel"),
    ),
)


def _gpt_oss(
    gate_up: str, down: str, kernel: str, bias: str, words: tuple[str, ...]
) -> tuple[_Row, ...]:
    """Return the rows of gpt-oss's experts, whose gate and up are interleaved; also as MXFP4."""
    name = "LAYER.mlp.experts"
    return (
        _Row(f"{name}.gate_up_proj", gate_up + kernel, "e in (out part) -> e in out", words=words),
        _Row(f"{name}.gate_up_proj_bias", gate_up + bias, "e (out part) -> e out", words=words),
        _Row(f"{name}.gate_up_proj_blocks", gate_up + kernel,
             "e (out part) group byte -> e out group byte", "mxfp4", words),
        _Row(f"{name}.gate_up_proj_scales", gate_up + kernel,
             "e (out part) group -> e out group", "", words, "scales"),
        _Row(f"{name}.down_proj", down + kernel, "e in out -> e in out"),
        _Row(f"{name}.down_proj_bias", down + bias, "e out -> e out"),
        _Row(f"{name}.down_proj_blocks", down + kernel, "e out group byte -> e out group byte",
             "mxfp4"),
        _Row(f"{name}.down_proj_scales", down + kernel, "e out group -> e out group",
             argument="scales"),
    )  # fmt: skip


_FLAX_GPT_OSS: Final = (
    *_gpt_oss(
        "LAYER/mlp/experts/{part}",
        "LAYER/mlp/experts/down_proj",
        "/kernel",
        "/bias",
        ("gate_proj", "up_proj"),
    ),
    *_FLAX,
)


def _attention(at: str, *, query: str = "", is_rotated: bool = False) -> tuple[_Row, ...]:
    """Return MaxText's attention; rotated, it has the two halves of a head interleaved."""
    dims = "(heads dim) in -> in heads dim"
    rotated = "(heads half pair) in -> in heads (pair half)" if is_rotated else dims
    bias, out = "(heads dim) -> heads dim", "out (heads dim) -> heads dim out"
    return (
        _Row("LAYER.self_attn.q_proj.weight", f"{at}/query/kernel", rotated, query),
        _Row("LAYER.self_attn.k_proj.weight", f"{at}/key/kernel", rotated),
        _Row("LAYER.self_attn.v_proj.weight", f"{at}/value/kernel", dims),
        _Row("LAYER.self_attn.o_proj.weight", f"{at}/out/kernel", out),
        _Row("LAYER.self_attn.q_proj.bias", f"{at}/query/bias", bias),
        _Row("LAYER.self_attn.k_proj.bias", f"{at}/key/bias", bias),
        _Row("LAYER.self_attn.v_proj.bias", f"{at}/value/bias", bias),
        _Row("LAYER.self_attn.o_proj.bias", f"{at}/out/bias", "out -> out"),
    )  # fmt: skip


_MLP: Final = (("gate_proj", "wi_0"), ("up_proj", "wi_1"), ("down_proj", "wo"))


def _mlp(at: str, name: str = "mlp") -> tuple[_Row, ...]:
    return _matrices(*((f"LAYER.{name}.{word}", f"{at}/{path}/kernel") for word, path in _MLP))


def _moe(at: str, name: str = "mlp", words: tuple[str, ...] = ()) -> tuple[_Row, ...]:
    names = [(words[i] if words else word, path) for i, (word, path) in enumerate(_MLP)]
    return (
        _Row(f"LAYER.{name}.gate.weight", f"{at}/gate/kernel", "out in -> in out"),
        *_matrices(
            *((f"LAYER.{name}.{_EXPERT}.{word}", f"{at}/{path}") for word, path in names),
            dims=_STACKED,
        ),
    )


def _gemma(end: str) -> tuple[_Row, ...]:
    return _vectors(
        ("LAYER.input_layernorm.weight", f"LAYER/pre_self_attention_norm{end}/scale"),
        ("LAYER.post_attention_layernorm.weight", f"LAYER/post_self_attention_norm{end}/scale"),
        ("LAYER.pre_feedforward_layernorm.weight", f"LAYER/pre_ffw_norm{end}/scale"),
        ("LAYER.post_feedforward_layernorm.weight", f"LAYER/post_ffw_norm{end}/scale"),
        ("LAYER.self_attn.q_norm.weight", "LAYER/self_attention/query_norm/scale"),
        ("LAYER.self_attn.k_norm.weight", "LAYER/self_attention/key_norm/scale"),
        apply="norm",
    )


def _gemma_2(end: str) -> tuple[_Row, ...]:
    attention = _attention(f"LAYER/self_attention{end}", query="query")
    return (*_gemma(end), *attention, *_mlp(f"LAYER/mlp{end}"))


_MAXTEXT: Final = (
    _Row("model.embed_tokens.weight", "token_embedder/embedding"),
    _Row("model.norm.weight", "decoder/decoder_norm/scale"),
    _Row("lm_head.weight", "decoder/logits_dense/kernel", "out in -> in out"),
)
_NORMS: Final = _vectors(
    ("LAYER.input_layernorm.weight", "LAYER/pre_self_attention_layer_norm/scale"),
    ("LAYER.post_attention_layernorm.weight", "LAYER/post_self_attention_layer_norm/scale"),
)
_AT: Final = "LAYER/self_attention"
_MLA: Final = (
    *_NORMS,
    *_vectors(
        ("LAYER.self_attn.q_a_layernorm.weight", f"{_AT}/q_norm/scale"),
        ("LAYER.self_attn.kv_a_layernorm.weight", f"{_AT}/kv_norm/scale"),
    ),
    *_matrices(
        ("LAYER.self_attn.q_a_proj", f"{_AT}/wq_a/kernel"),
        ("LAYER.self_attn.kv_a_proj_with_mqa", f"{_AT}/wkv_a/kernel"),
    ),
    *_matrices(
        ("LAYER.self_attn.q_proj", f"{_AT}/query/kernel"),
        ("LAYER.self_attn.q_b_proj", f"{_AT}/wq_b/kernel"),
        ("LAYER.self_attn.kv_b_proj", f"{_AT}/wkv_b/kernel"),
        dims="(all_heads size) in -> in all_heads size",
    ),
    *_matrices(
        ("LAYER.self_attn.o_proj", f"{_AT}/out/kernel"),
        dims="out (all_heads size) -> all_heads size out",
    ),
)
_DEEPSEEK: Final = "LAYER/DeepSeekMoeBlock_0"
_DENSE: Final = (*_MLA, *_mlp("LAYER/mlp"))
_SPARSE: Final = (
    *_MLA,
    *_mlp(f"{_DEEPSEEK}/shared_experts", "mlp.shared_experts"),
    *_vectors(("LAYER.mlp.gate.e_score_correction_bias", f"{_DEEPSEEK}/MoeBlock_0/gate/bias")),
    *_moe(f"{_DEEPSEEK}/MoeBlock_0"),
)
_LAYERS: Final = {
    "llama": (*_NORMS, *_attention(_AT, query="query", is_rotated=True), *_mlp("LAYER/mlp")),
    "qwen": (
        *_NORMS,
        *_vectors(
            ("LAYER.self_attn.q_norm.weight", f"{_AT}/query_norm/scale"),
            ("LAYER.self_attn.k_norm.weight", f"{_AT}/key_norm/scale"),
        ),
        *_attention(_AT),
        *_mlp("LAYER/mlp"),
        *_moe("LAYER/moe_block"),
    ),
    "mixtral": (
        *_NORMS,
        *_attention(_AT, query="query"),
        *_moe("LAYER/MoeBlock_0", "block_sparse_moe", ("w1", "w3", "w2")),
    ),
    "gemma3": (*_gemma(""), *_attention(_AT), *_mlp("LAYER/mlp")),
    "gpt_oss": (
        *_NORMS,
        *_attention("LAYER/GptOssAttention"),
        *_vectors(
            ("LAYER.self_attn.sinks", "LAYER/GptOssAttention/sinks"),
            ("LAYER.mlp.router.bias", "LAYER/GptOssMlp/gate/bias"),
        ),
        _Row("LAYER.mlp.router.weight", "LAYER/GptOssMlp/gate/kernel", "out in -> in out"),
        *_gpt_oss("LAYER/GptOssMlp/wi_{part}", "LAYER/GptOssMlp/wo", "", "_bias", ("0", "1")),
    ),
}
# The table of MaxText; none for the types that have only the others.
_TYPES: Final = {
    "llama": "llama",
    "mistral": "",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
    "mixtral": "mixtral",
    "gemma": "",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "gpt_oss": "gpt_oss",
}
# The word for the weights of norms, and the path of a layer.
_LAYOUTS: Final = {
    "nnx": ("scale", "model/layers/{layer}"),
    "linen": ("scale", "model/layers_{layer}"),
    "easydel": ("kernel", "model/layers/{layer}"),
    "maxtext": ("scale", ""),
}
# So many layers of MaxText are scanned as one.
_CYCLE: Final = {"gpt_oss": 2, "gemma3": 6}


class _Block(NamedTuple):
    """Layers of one form."""

    numbers: range | None
    """The layers; None for all of them."""
    path: str
    """With `{layer}` if they are not stacked."""
    rows: tuple[_Row, ...]
    stacked_at: int | None = None
    """The dimension along which they are stacked."""


def from_hf(config: Mapping[str, Any], layout: str, *, scanned: bool = False) -> tuple[Rename, ...]:
    """Return the renames that load a model of Hugging Face into the tree of a library.

    They are for Llama, Mistral, Qwen 2 and 3, Mixtral, Gemma (text), DeepSeek V2 and V3 (also FP8)
    and gpt-oss (also MXFP4). Those for MaxText do what its own conversion does: it has other rotary
    dimensions for Llama, and other queries, norms and embeddings for some.

    Args:
        config: The content of the model's `config.json`.
        layout: "nnx" (`model/layers/0/self_attn/q_proj/kernel`), "linen" (`model/layers_0/...`),
            "easydel" (as nnx, but norms have `kernel`), or "maxtext" (`decoder/layers_0/...`).
        scanned: Whether layers are stacked: along the first dimension, or the second in MaxText.

    Returns:
        The records, all of them optional. For tied embeddings, put a `shared` one before them.

    Raises:
        ValueError: There is no such layout, no table for this `model_type`, or a key is missing.

    Example:
        >>> import shardrules as sr
        >>> config = {
        ...     "model_type": "llama",
        ...     "num_hidden_layers": 2,
        ...     "hidden_size": 64,
        ...     "num_attention_heads": 4,
        ... }
        >>> sr.renames.from_hf(config, "maxtext", scanned=True)[5].path
        'decoder/layers/pre_self_attention_layer_norm/scale'
    """
    check_type("config", config, Mapping, "the content of a config.json")
    check_type("layout", layout, str, "a string")
    boolean("scanned", scanned)
    if layout not in _LAYOUTS:
        raise ValueError(f"layout is {shown(layout)}; it must be one of {', '.join(_LAYOUTS)}")
    model_type = str(config.get("model_type"))
    family = _TYPES.get(model_type)
    if family is None or (layout == "maxtext" and not family):
        types = [each for each, table in _TYPES.items() if table or layout != "maxtext"]
        raise ValueError(
            f"config: there are no renames of model_type {model_type!r} for {layout}"
            f"{near_shown(model_type, types)}; there are of {', '.join(types)}"
        )
    count = _number(config, "num_hidden_layers")
    if layout == "maxtext":
        blocks = _maxtext_blocks(config, family, count, scanned)
    else:
        rows = _FLAX_GPT_OSS if family == "gpt_oss" else _FLAX
        path = "model/layers" if scanned else _LAYOUTS[layout][1]
        blocks = [_Block(None, path, rows, 0 if scanned else None)]
    records = (
        _block_rename(config, block, row, _LAYOUTS[layout][0])
        for block in blocks
        for row in block.rows
    )
    # DeepSeek's layer for more tokens.
    return (Rename(rf"^model\.layers\.{count}\.", None, optional=True), _COMPUTED, *records)


def _maxtext_blocks(
    config: Mapping[str, Any], family: str, count: int, scanned: bool
) -> list[_Block]:
    number, at = ("", 1) if scanned else ("_{layer}", None)
    common: tuple[_Row, ...] = _MAXTEXT
    if family.startswith("gemma"):
        embedding, norm, _ = _MAXTEXT
        common = (embedding._replace(apply="embedding"), norm._replace(apply="norm"))
    blocks = [_Block(None, "", common)]
    if family == "deepseek":
        dense = _number(config, "first_k_dense_replace")
        blocks.append(_Block(range(dense), f"decoder/dense_layers{number}", _DENSE, at))
        blocks.append(_Block(range(dense, count), f"decoder/moe_layers{number}", _SPARSE, at))
    elif family == "gemma2":
        for i, end in enumerate(("_local", "_global")):
            blocks.append(_Block(range(i, count, 2), f"decoder/layers{number}", _gemma_2(end), at))
    elif scanned and family in _CYCLE:
        cycle, rows = _CYCLE[family], _LAYERS[family]
        whole = count - count % cycle
        blocks += [
            _Block(range(i, whole, cycle), f"decoder/layers/layers_{i}", rows, at)
            for i in range(cycle)
        ]
        blocks += [
            _Block(range(i, i + 1), f"decoder/layers_remainder/layers_{i - whole}", rows)
            for i in range(whole, count)
        ]
    else:
        blocks.append(_Block(None, f"decoder/layers{number}", _LAYERS[family], at))
    return [block for block in blocks if block.numbers is None or block.numbers]


def _block_rename(config: Mapping[str, Any], block: _Block, row: _Row, norm: str) -> Rename:
    numbers, dims = block.numbers, row.dims
    has_layer = row.name.startswith("LAYER")
    is_stacked = has_layer and block.stacked_at is not None
    if is_stacked:
        dims = _stacked(dims, block.stacked_at or 0)
    words: dict[str, tuple[Any, ...]] = {"part": row.words} if row.words else {}
    if numbers is not None and (is_stacked or (has_layer and "{layer}" in block.path)):
        words["layer"] = tuple(numbers)
    layer = r"\d+" if numbers is None else "|".join(map(str, numbers))
    if is_stacked or "{layer}" in block.path:
        layer = f"(?P<layer>{layer})"
    name = re.sub(r"(?<!\\)\.", r"\\.", row.name)
    fp8 = config.get("quantization_config") or {}
    is_scaled = row.is_codes and fp8.get("quant_method") == "fp8"
    return Rename(
        "^" + name.replace("LAYER", rf"model\.layers\.{layer}") + "$",
        row.path.replace("LAYER", block.path).replace("NORM", norm),
        dims or None,
        _config_sizes(config, dims),
        words,
        r"\g<0>_scale_inv" if is_scaled else None,
        tuple(fp8.get("weight_block_size") or (None, None)) if is_scaled else (),
        "bfloat16" if is_scaled else None,
        optional=True,
        apply=_FUNCTIONS[row.apply](config) if row.apply else None,
        argument=row.argument,
    )


def _stacked(dims: str, at: int) -> str:
    """Add the axis `layer` to the result."""
    source, target = dims.split("->")
    groups = re.findall(r"\([^)]*\)|\S+", target)
    return f"{source}-> {' '.join([*groups[:at], 'layer', *groups[at:]])}"


def _config_sizes(config: Mapping[str, Any], dims: str) -> dict[str, int]:
    """Return the sizes that the configuration tells of axes."""
    axes = set(re.findall(r"\w+", dims))
    sizes = {"half": 2} if "half" in axes else {}
    if "dim" in axes:
        sizes["dim"] = _head_dim(config)
    if "pair" in axes:
        sizes["pair"] = _head_dim(config) // 2
    if "all_heads" in axes:
        sizes["all_heads"] = _number(config, "num_attention_heads")
    return sizes


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, int):
        return value
    raise ValueError(f"config: {key} is {shown(value)}; it must be a number, as in config.json")


def _head_dim(config: Mapping[str, Any]) -> int:
    if isinstance(config.get("head_dim"), int):
        return int(config["head_dim"])
    return _number(config, "hidden_size") // _number(config, "num_attention_heads")


def _embedding_factor(config: Mapping[str, Any]) -> float:
    """Return what MaxText multiplies the embeddings of Gemma by, rounded as there."""
    import ml_dtypes
    import numpy as np

    root = _number(config, "hidden_size") ** 0.5
    is_third = config.get("model_type") == "gemma3_text"
    return float((ml_dtypes.bfloat16 if is_third else np.float32)(root))


_FUNCTIONS: Final[Mapping[str, Callable[[Mapping[str, Any]], Callable[..., Any]]]] = {
    "norm": lambda _: Affine(offset=1.0),
    "query": lambda config: Affine(_head_dim(config) ** -0.5),
    "embedding": lambda config: Affine(_embedding_factor(config)),
    "mxfp4": lambda _: mxfp4,
}

# Computed, and no parameter; old checkpoints have it.
_COMPUTED: Final = Rename(r"rotary_emb\.inv_freq$", None, optional=True)

HF_TO_FLAX: Final = (
    _COMPUTED,
    *(
        _block_rename({}, _Block(None, "model/layers/{layer}", _FLAX), row, "scale")
        for row in _FLAX
    ),
)
r"""Renames: Llama, Mistral, Qwen, Mixtral, Gemma and DeepSeek of Hugging Face to a tree in the
manner of flax, `model/layers/0/self_attn/q_proj/kernel` [in, out], with `bias`, `scale` and
`embedding`; experts are stacked in `mlp/experts/gate_proj/kernel` [expert, in, out]. As `from_hf`
for nnx, without scales."""
