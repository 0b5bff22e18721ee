"""`suggest`: what experts do beyond the fewest bytes, and what it says if it cannot cut something."""

from __future__ import annotations

import gzip
import json
import re

import pytest

import shardrules as sr
from shardrules._base.specs import entry_axes
from tests.support import models
from tests.support.folders import DATA
from tests.support.models import array, kernel

GPT_OSS = DATA / "maxtext-dumps" / "gpt-oss-20b_tpu7x-16_default.json.gz"


def specs(found):
    return {pattern: tuple(getattr(spec, "spec", spec)) for pattern, spec in found.rules}


def by_name(found, path):
    """The spec of a leaf, without the entries at its end that cut nothing."""
    entries = [*found.plan.kind(path).spec]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def gpt_oss():
    leaves = json.loads(gzip.decompress(GPT_OSS.read_bytes()))["leaves"]
    return {
        re.sub(r"[\[\]']", "", path): array(*leaf["shape"])
        for path, leaf in leaves.items()
        if path.startswith(".params")
    }


def multi_head(heads, width=1152, size=256):
    """An attention of flax's MultiHeadAttention, in layers with an MLP."""
    attention = {name: kernel(width, heads, size) for name in ("query", "key", "value")}
    attention["out"] = kernel(heads, size, width)
    layer = {
        "MultiHeadAttention_0": attention,
        "mlp": {"up": kernel(width, 6912), "down": kernel(6912, width)},
        "norm": {"scale": array(width)},
    }
    return {"embed": {"embedding": array(32000, width)}, "layers": models.layers(4, layer)}


def test_what_cannot_be_cut_is_not_declared_and_check_warns_of_it():
    found = sr.suggest(models.llama(), {"fsdp": 6, "tp": 3})
    assert found.declared["replicated"] == ()
    assert {one.kind for one in found.warnings} == {"replicated"}
    named = {path for one in found.warnings for path in one.paths}
    assert named >= {f"model/layers/{{0..3}}/{name}/kernel" for name in ("mlp/up_proj", "self_attn/k_proj")}
    assert found.plan.check(**found.declared).at_least("warning")
    assert "give a mesh of which an axis divides a dimension of them" in str(found)
    # Norms and kernels that nothing cuts have rules of their own.
    assert all(len({dim.role == "vector" for dim in reason.dims}) == 1 for reason in found.reasons)
    assert specs(found)["scale"] == ()


@pytest.mark.parametrize("heads", [2, 3, 4, 8])
def test_few_heads_are_heads(heads):
    found = sr.suggest(multi_head(heads), {"fsdp": 4, "tp": heads})
    assert specs(found)["MultiHeadAttention_0/(query|key|value)/kernel"] == ("fsdp", "tp")
    assert specs(found)["MultiHeadAttention_0/out/kernel"] == ("tp", None, "fsdp")
    (reason,) = [one for one in found.reasons if "out" in str(one.pattern)]
    assert [dim.role for dim in reason.dims] == ["heads", "head", "residual"]


def test_queries_keys_and_values_in_one_kernel_are_not_heads():
    tree = multi_head(12, width=768, size=64)
    fused = {"qkv": kernel(768, 3, 768), "kv_einsum": {"w": array(2, 8, 768, 64)}, "out": kernel(12, 64, 768)}
    for layer in tree["layers"].values():
        layer |= {"MultiHeadAttention_0": fused}
        layer["mlp"]["gating_einsum"] = {"w": array(2, 768, 6912)}
    found = sr.suggest(tree, {"fsdp": 4, "tp": 2})
    roles = {str(one.pattern): [dim.role for dim in one.dims] for one in found.reasons}
    assert roles["MultiHeadAttention_0/qkv/kernel"] == ["residual", "fused", "hidden"]
    assert roles["MultiHeadAttention_0/kv_einsum/w"] == ["fused", "heads", "residual", "head"]
    assert roles["mlp/gating_einsum/w"] == ["fused", "residual", "hidden"]


FLAT = models.llama(width=8192, hidden=28672)
APART = multi_head(32, width=4096, size=128)
for layer in APART["layers"].values():
    layer["MultiHeadAttention_0"] |= {"key": kernel(4096, 8, 128), "value": kernel(4096, 8, 128)}


@pytest.mark.parametrize(
    ("tree", "mesh", "head_dim", "spec"),
    [
        *((APART, {"tp": tp}, None, (None, "tp")) for tp in (2, 4, 8)),
        (APART, {"tp": 16}, None, ()),
        # Nothing tells the size of heads: they are not halved, and nothing is said about them.
        (FLAT, {"fsdp": 4, "tp": 8}, None, ("fsdp", "tp")),
        (FLAT, {"fsdp": 4, "tp": 16}, None, ("fsdp",)),
        (FLAT, {"fsdp": 4, "tp": 16}, 64, ("fsdp", "tp")),
        (FLAT, {"fsdp": 4, "tp": 8}, 256, ("fsdp",)),
        (FLAT, {"fsdp": 4, "tp": 16}, 128, ("fsdp",)),
        (models.llama(kv=4096), {"tp": 64}, None, (None, "tp")),  # as many heads as queries
    ],
)
def test_heads_of_keys_are_cut_where_they_divide_and_whole_elsewhere(tree, mesh, head_dim, spec):
    found = sr.suggest(tree, mesh, head_dim=head_dim)
    kernels = {
        path: by_name(found, path) for path in found.plan.paths if re.search(r"(k_proj|v_proj|key|value)/kernel", path)
    }
    assert {*kernels.values()} == {spec}
    assert all(isinstance(one, tuple) for _, one in found.rules) or head_dim
    assert not found.warnings


def test_projections_to_a_latent_space_are_whole_over_tensor_axes():
    attention = {
        "q_a_proj": kernel(4096, 1536), "q_b_proj": kernel(1536, 12288),
        "kv_a_proj_with_mqa": kernel(4096, 576), "kv_b_proj": kernel(512, 16384),
        "o_proj": kernel(8192, 4096), "q_a_layernorm": {"scale": array(1536)},
    }  # fmt: skip
    layer = {"self_attn": attention, "mlp": {"up_proj": kernel(4096, 11008), "down_proj": kernel(11008, 4096)}}
    tree = {"embed": {"embedding": array(32000, 4096)}, "layers": models.layers(4, layer)}
    found = sr.suggest(tree, {"fsdp": 4, "tp": 8})
    assert specs(found)["self_attn/(q_a_proj|kv_a_proj_with_mqa)/kernel"] == ("fsdp",)
    assert specs(found)["self_attn/(q|kv)_b_proj/kernel"] == ("fsdp", "tp")
    assert not found.warnings
    # Over tp alone they are whole, on purpose.
    whole = sr.suggest(tree, {"tp": 8})
    assert specs(whole)["self_attn/(q_a_proj|kv_a_proj_with_mqa)/kernel"] == ()
    assert not whole.warnings


def test_biases_follow_the_columns_of_their_kernels():
    dense = {"fc1": models.weight(4096, 1024, bias=4096), "fc2": models.weight(1024, 4096, bias=1024)}
    attention = {name: models.weight(1024, 1024, bias=1024) for name in ("query", "key", "value", "out")}
    layer = {"attention": attention, "mlp": dense, "norm": models.weight(1024, bias=1024)}
    tree = {"embed": models.weight(50265, 1024), "layers": models.layers(24, layer)}
    found = sr.suggest(tree, {"fsdp": 2, "tp": 4})
    for name, spec in {"attention/query": ("tp",), "attention/out": (), "mlp/fc1": ("tp",),
                       "mlp/fc2": (), "norm": ()}.items():  # fmt: skip
        assert (by_name(found, f"layers/0/{name}/bias")) == spec
    only_fsdp = sr.suggest(tree, {"fsdp": 8})
    assert (by_name(only_fsdp, "layers/0/mlp/fc1/bias")) == ()


EXPERTS = {"wi_0": ("ep", None, "fsdp"), "wi_1": ("ep", None, "fsdp"), "wo": ("ep", None, None, "fsdp")}
BIASES = {"query/bias": ("tp",), "key/bias": ("tp",), "wi_0_bias": ("ep", None, "tp"), "out/bias": ()}


@pytest.mark.parametrize(
    ("mesh", "ends"),
    [
        ({"fsdp": 16, "ep": 8}, EXPERTS),  # that no name tells
        ({"fsdp": 4, "tp": 4}, {"gate/kernel": ("fsdp",)}),  # routers are whole over tensor axes
        ({"fsdp": 2, "tp": 4, "ep": 2}, BIASES),  # with heads and of experts
    ],
)
def test_experts_routers_and_biases(mesh, ends):
    found = sr.suggest(gpt_oss(), mesh)
    assert {end: {by_name(found, path) for path in found.plan.paths if path.endswith(end)} for end in ends} == {
        end: {spec} for end, spec in ends.items()}  # fmt: skip
    assert not found.warnings


def test_scales_follow_their_blocks():
    experts = {
        "gate_up_proj_blocks": array(32, 5760, 90, 16), "gate_up_proj_scales": array(32, 5760, 90),
        "down_proj_blocks": array(32, 2880, 90, 16), "down_proj_scales": array(32, 2880, 90),
    }  # fmt: skip
    layer = {"mlp": {"experts": experts, "router": models.weight(32, 2880)}, "norm": models.weight(2880)}
    tree = {"embed": models.weight(201088, 2880), "layers": models.layers(4, layer)}
    for mesh in ({"fsdp": 4, "tp": 4}, {"fsdp": 2, "ep": 8}, {"tp": 8}):
        found = sr.suggest(tree, mesh)
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = ((by_name(found, f"layers/0/mlp/experts/{name}_{of}")) for of in ("blocks", "scales"))
            for size, of_blocks, of_scales in zip((32, 5760, 90), blocks, scales, strict=False):
                assert {*entry_axes(of_blocks)} <= {*entry_axes(of_scales)}, (mesh, size)


def test_a_rule_says_one_thing_of_its_dimensions():
    # By fsdp alone, out and query have one spec: once it is heads, once the residual stream.
    tree = multi_head(6144, width=6144, size=2)
    for layer in tree["layers"].values():
        layer["MultiHeadAttention_0"] |= {"key": kernel(6144, 8, 128), "value": kernel(6144, 8, 128)}
    found = sr.suggest(tree, {"fsdp": 8, "tp": 4})
    for reason in found.reasons:
        rows = found.plan.rule == reason.rule
        shapes = {found.plan.kinds[kind].shape for kind in found.plan.kind_of[rows]}
        cut = {tuple((dim.role, dim.axes) for dim in reason.dims if dim.axes)}
        assert len(cut) == 1
        assert len({len(shape) for shape in shapes}) == 1
    assert not any("|out" in str(one.pattern) or "out|" in str(one.pattern) for one in found.reasons)
