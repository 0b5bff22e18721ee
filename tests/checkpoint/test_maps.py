"""The maps that ship, leaf by leaf against a plain numpy conversion of the whole checkpoint."""

from __future__ import annotations

import re

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.checkpoint.test_load import bits, mesh_of
from tests.checkpoint.test_renames import FLOAT8, save  # noqa: F401

BFLOAT16 = ml_dtypes.bfloat16
D, F, V, HEAD, KV = 32, 96, 64, 8, 16


def values(rng, *shape, dtype=BFLOAT16):
    return (
        np.array(rng.choices(range(-100, 100), k=int(np.prod(shape)))).reshape(shape).astype(dtype)
    )


def llama(rng, *, layers=2, qwen=False, experts=0):
    """Names and, scaled down, shapes of Llama 3 or of Qwen3 as Hugging Face writes them."""
    arrays = {
        "model.embed_tokens.weight": values(rng, V, D),
        "model.norm.weight": values(rng, D),
        "lm_head.weight": values(rng, V, D),
    }
    for i in range(layers):
        at = f"model.layers.{i}."
        arrays |= {
            at + "input_layernorm.weight": values(rng, D),
            at + "post_attention_layernorm.weight": values(rng, D),
            at + "self_attn.q_proj.weight": values(rng, 2 * D, D),
            at + "self_attn.k_proj.weight": values(rng, KV, D),
            at + "self_attn.v_proj.weight": values(rng, KV, D),
            at + "self_attn.o_proj.weight": values(rng, D, 2 * D),
        }
        if qwen:
            arrays |= {at + f"self_attn.{n}_norm.weight": values(rng, HEAD) for n in "qk"}
            arrays |= {at + f"self_attn.{n}_proj.bias": values(rng, KV) for n in "kv"}
        places = [f"mlp.experts.{e}." for e in range(experts)] or ["mlp."]
        for place in places:
            arrays |= {
                at + place + "gate_proj.weight": values(rng, F, D),
                at + place + "up_proj.weight": values(rng, F, D),
                at + place + "down_proj.weight": values(rng, D, F),
            }
        if experts:
            arrays[at + "mlp.gate.weight"] = values(rng, experts, D)
    return arrays


def to_flax(arrays):
    """{path: array}, by numpy on the whole."""
    found, experts = {}, {}
    for name, array in arrays.items():
        *path, last = name.split(".")
        if "experts" in path:
            expert = int(path.pop(path.index("experts") + 1))
            experts.setdefault("/".join([*path, "kernel"]), {})[expert] = array.T
        elif "norm" in path[-1]:
            found["/".join([*path, "scale"])] = array
        elif last == "bias":
            found["/".join([*path, "bias"])] = array
        elif path[-1] == "embed_tokens":
            found["/".join([*path, "embedding"])] = array
        else:
            found["/".join([*path, "kernel"])] = array.T
    stacked = {path: np.stack([of[e] for e in sorted(of)]) for path, of in experts.items()}
    return found | stacked


RULES = [
    ("scale|bias", ()),
    ("experts", ("fsdp", None, "tp")),
    ("(o|down)_proj", ("tp", "fsdp")),
    ("embedding", ("fsdp",)),
    ("kernel", ("fsdp", "tp")),
]


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
@pytest.mark.parametrize("variant", [{}, {"qwen": True}, {"qwen": True, "experts": 4}])
def test_hugging_face_to_flax(save, rng, variant, shape):  # noqa: F811
    arrays = llama(rng, **variant)
    loaded = sr.load(save(arrays), RULES, mesh_of(shape), renames=sr.renames.HF_TO_FLAX)
    expected = to_flax(arrays)
    paths = {
        jax.tree_util.keystr(keys, simple=True, separator="/"): array
        for keys, array in jax.tree_util.tree_flatten_with_path(loaded)[0]
    }
    assert paths.keys() == expected.keys()
    for path, array in paths.items():
        assert bits(array) == bits(np.ascontiguousarray(expected[path])), path


def deepseek(rng, *, experts=4):
    """Names and, scaled down, shapes of DeepSeek-V3: a dense layer, and one of experts; FP8 with scales."""
    arrays = {"model.embed_tokens.weight": values(rng, V, D), "model.norm.weight": values(rng, D)}

    def quantized(name, out, of):
        arrays[name] = values(rng, out, of, dtype=FLOAT8)
        blocks = (-(-out // 128), -(-of // 128))
        arrays[f"{name}_scale_inv"] = (values(rng, *blocks, dtype="float32") + 101) / 977

    for i in range(2):
        at = f"model.layers.{i}."
        arrays[at + "input_layernorm.weight"] = values(rng, D)
        arrays[at + "self_attn.q_a_layernorm.weight"] = values(rng, 48)
        quantized(at + "self_attn.q_a_proj.weight", 48, 160)
        quantized(at + "self_attn.kv_a_proj_with_mqa.weight", 144, 160)
        places = [f"mlp.experts.{e}." for e in range(experts)] if i else []
        for place in [*places, "mlp.shared_experts." if i else "mlp."]:
            quantized(at + place + "gate_proj.weight", 192, 160)
            quantized(at + place + "down_proj.weight", 160, 192)
        if i:
            arrays[at + "mlp.gate.weight"] = values(rng, experts, D)
            arrays[at + "mlp.gate.e_score_correction_bias"] = values(rng, experts, dtype="float32")
    return arrays


def dequantized(arrays):
    """{name: array} with scales applied as DeepSeek's fp8_cast_bf16.py applies them."""
    found = {}
    for name, array in arrays.items():
        if (scale := arrays.get(f"{name}_scale_inv")) is not None:
            spread = scale.repeat(128, 0).repeat(128, 1)[: array.shape[0], : array.shape[1]]
            found[name] = (array.astype("float32") * spread).astype(BFLOAT16)
        elif not name.endswith("_scale_inv"):
            found[name] = array
    return found


EXPERT = re.compile(r"\.experts\.(\d+)\.")


@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(None, "tp")])
def test_deepseeks_experts_stacked_and_unstacked(save, rng, spec):  # noqa: F811
    arrays = deepseek(rng)
    whole = dequantized(arrays)
    expected = {name: array for name, array in whole.items() if not EXPERT.search(name)}
    for name in whole:
        if EXPERT.search(name):
            parts = [whole[EXPERT.sub(f".experts.{e}.", name)] for e in range(4)]
            expected[EXPERT.sub(".experts.", name)] = np.stack(parts)
    rules = [(r"experts\.\w+_proj", spec), ("", ())]
    loaded = sr.load(save(arrays), rules, mesh_of(), renames=sr.renames.DEEPSEEK_STACKED)
    assert loaded.keys() == expected.keys()
    for name, array in loaded.items():
        assert array.dtype == expected[name].dtype
        assert bits(array) == bits(expected[name]), name
    path = save({name: np.asarray(array) for name, array in loaded.items()})
    again = sr.load(path, P(), mesh_of(), renames=sr.renames.DEEPSEEK_UNSTACKED)
    assert again.keys() == whole.keys()
    for name, array in again.items():
        assert bits(array) == bits(whole[name]), name
