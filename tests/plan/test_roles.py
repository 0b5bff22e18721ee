"""Which dimension of a kernel is what, on real models and on made ones."""

from __future__ import annotations

import re

import jax
import pytest

import shardrules as sr
from shardrules._plan.roles import parts_of_model
from tests.support import corpus


def roles(tree, names=None):
    """{folded path: the roles of its dimensions}."""
    rules = sr.LogicalRules([]) if names else [(".*", ())]
    plan = sr.plan(tree, rules, {"tp": 2}, names=names)
    shapes, of_kinds = ([getattr(kind, what) for kind in plan.kinds] for what in ("shape", "names"))
    return {part.pattern: part for part in parts_of_model(plan.folded, shapes, of_kinds)}


def of_model(name):
    manifest = corpus.manifest(name)
    return roles(manifest.nested(corpus.with_dtype))


def abstract(tree):
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )


# model, the end of a folded path, roles, experts
EXPECTED = [
    ("llama-3.1-405b", "embed_tokens/weight", "lookup out", 1),
    ("llama-3.1-405b", "q_proj/weight", "out in", 1),
    ("llama-3.1-405b", "down_proj/weight", "out in", 1),
    ("llama-3.1-405b", "lm_head/weight", "out in", 1),
    ("easylm-llama-3.1-405b", "feed_forward/w{1,3}/kernel", "in out", 1),
    ("easylm-llama-3.1-405b", "attention/wo/kernel", "in out", 1),
    ("lwm-7b-scanned", "attention/wq/kernel", "stack in out", 1),
    ("lwm-7b-scanned", "attention_norm/kernel", "stack out", 1),
    # HF's GPT-2 and flax's have each the other's layout under the library's own names.
    ("gpt2", "mlp/c_fc/weight", "in out", 1),
    ("flax-gpt2", "mlp/c_fc/kernel", "out in", 1),
    ("flax-gpt2", "wpe/embedding", "lookup out", 1),
    ("vit-base-patch16-224", "patch_embeddings/projection/weight", "out in in in", 1),
    ("flax-t5-v1_1-xxl", "decoder/block/{0..23}/layer/2/DenseReluDense/wo/kernel", "in out", 1),
    ("deepseek-v3", "q_a_proj/weight_scale_inv", "out out", 1),
    ("deepseek-v3-fused", "experts/gate_up_proj", "experts out in", 256),
    ("easydel-deepseek-v3", "mlp/experts/down_proj/kernel", "experts in out", 256),
    ("easydel-deepseek-v3", "mlp/shared_experts/up_proj/kernel", "in out", 1),
    ("mixtral-8x22b", "experts/{0..7}/w2/weight", "out in", 8),
    ("maxtext-deepseek3-671b-scanned", "MoeBlock_0/wo", "experts stack in out", 256),
    ("maxtext-deepseek3-671b-scanned", "MoeBlock_0/gate/kernel", "in stack out", 1),
    ("maxtext-deepseek3-671b-scanned", "moe_layers/self_attention/out/kernel", "in stack in out", 1),
    ("maxtext-deepseek3-671b-scanned", "moe_layers/self_attention/wkv_b/kernel", "in stack out out", 1),
    ("maxtext-llama3.1-405b-scanned", "self_attention/value/kernel", "in stack out out", 1),
]  # fmt: skip


@pytest.mark.parametrize(("model", "end", "dims", "experts"), EXPECTED)
def test_the_roles_of_real_models(model, end, dims, experts):
    (part,) = [part for pattern, part in of_model(model).items() if pattern.endswith(end)]
    assert (" ".join(part.dims), part.experts) == (dims, experts)


@pytest.mark.parametrize(
    "model", ["llama-3.1-405b", "easydel-deepseek-v3", "maxtext-llama3.1-405b-scanned"]
)
def test_each_kernel_has_one_side_of_each_kind(model):
    for part in of_model(model).values():
        matrix = [role for role in part.dims if role in ("in", "out", "lookup")]
        if len(matrix) > 1:
            assert "out" in matrix
            assert "unknown" not in part.dims


def test_siblings_share_their_input_whatever_their_arrays_are_called():
    parts = of_model("maxtext-llama3.1-405b-unscanned")
    keys = {part.input_key for path, part in parts.items() if re.search("key|query|value", path)}
    assert len(keys) == 1


def test_attention_and_mlp_of_one_module_have_inputs_of_their_own():
    parts = roles(abstract({"layers": [{"wq": (64, 32), "gate": (64, 256), "up": (64, 256)}] * 2}))
    keys = {path: part.input_key for path, part in parts.items()}
    assert keys["layers/{0,1}/gate"] == keys["layers/{0,1}/up"] != keys["layers/{0,1}/wq"]


def test_without_a_sign_of_the_layout_it_is_not_known():
    (part,) = roles(abstract({"w": (512, 128)})).values()
    assert part.dims == ("unknown", "unknown")


def test_names_tell_layers_and_experts():
    tree = abstract({"mlp": {"a": (4, 2, 64, 256), "wi": (64, 256), "wo": (256, 64)}})
    names = {"mlp/a": ("exp", "layers", "embed", "mlp"), "mlp/wi": ("embed", "mlp"), "mlp/wo": ("mlp", "embed")}  # fmt: skip
    parts = roles(tree, names)
    assert parts["mlp/a"].dims == ("experts", "stack", "in", "out")
    assert parts["mlp/a"].experts == 4


def test_the_experts_of_vectors_are_a_dimension_too():
    module = {"gate_up": {"kernel": (8, 64, 256), "bias": (8, 256)}, "router": {"bias": (8,)}}
    parts = roles(abstract({"mlp": {"experts": module}, "norm": {"scale": (64,)}}))
    assert parts["mlp/experts/gate_up/bias"].dims == ("experts", "out")
    assert parts["mlp/experts/router/bias"].dims == ("out",)


def test_experts_that_are_leaves_have_no_dimension_of_experts():
    expert = {"up": {"kernel": (64, 256), "weight_scale_inv": (2, 4)}}
    parts = roles(abstract({"experts": [expert] * 8, "norm": {"scale": (64,)}}))
    assert {part.dims for part in parts.values()} == {("in", "out"), ("out", "out"), ("out",)}
    assert parts["experts/{0..7}/up/kernel"].experts == 8


def test_nnx_paths_have_roles():
    layer = {"up": {"kernel": {"value": (64, 256)}, "bias": {"value": (256,)}}, "norm": {"scale": {"value": (64,)}}}  # fmt: skip
    parts = roles(abstract({"layers": [layer] * 3}))
    kernel = parts["layers/{0..2}/up/kernel/value"]
    assert (kernel.dims, kernel.input_key) == (("in", "out"), "layers/{0..2}")


LAYER = {"wq": (64, 4, 16), "wo": (4, 16, 64), "up": (64, 256), "down": (256, 64), "gain": (64,)}


@pytest.mark.parametrize("layers", [4, 8])
@pytest.mark.parametrize("name", ["layers", "l", "params", "blk"])
def test_a_stack_is_told_by_its_shapes_whatever_it_is_called(name, layers):
    # As many layers as heads are not taken for heads.
    stack = {key: (layers, *shape) for key, shape in LAYER.items()}
    parts = roles(abstract({"embed": (512, 64), name: stack, "norm": (64,)}))
    assert {key: parts[f"{name}/{key}"].dims for key in LAYER} == {
        "wq": ("stack", "in", "out", "out"),
        "wo": ("stack", "in", "in", "out"),
        "up": ("stack", "in", "out"),
        "down": ("stack", "in", "out"),
        "gain": ("stack", "out"),
    }


@pytest.mark.parametrize(
    "block",
    [
        {"self_attn": {"q": (8, 64, 16), "o": (8, 16, 64)}},  # heads first
        {"convs": {"a": (3, 3, 64, 64), "b": (3, 3, 64, 128)}},
        {"convs": {"a": (5, 64, 128), "b": (5, 128, 64)}},
        {"qkv": {"x": (64, 4, 16), "y": (64, 2, 16)}},  # the width
        {"experts": {"up": (8, 64, 256), "down": (8, 256, 64)}},
        {"moe": {"router": (64, 8), "w": {"up": (8, 64, 256), "down": (8, 256, 64)}}},
        {"mlp": {"gate": (64, 8), "w": {"up": (8, 64, 256), "down": (8, 256, 64)}}},
    ],
)
def test_arrays_that_begin_alike_are_not_always_a_stack(block):
    found = roles(abstract({"embed": (512, 64), **block, "norm": (64,)}))
    assert all("stack" not in part.dims for part in found.values()), found


def moe(router, *names):
    """A block whose experts no name tells."""
    up, gate, down = names
    return {router: {"kernel": (64, 8)}, up: (8, 64, 256), gate: (8, 64, 256), down: (8, 256, 64)}


@pytest.mark.parametrize(
    "block",
    [
        {"GptOssMlp": moe("gate", "wi_0", "wi_1", "wo")},
        {"MoeBlock_0": moe("gate", "wi_0", "wi_1", "wo")},
        {"mlp": moe("router", "w1", "w3", "w2")},
        moe("router", "w1", "w3", "w2"),
        moe("w_gate", "up", "gate", "down"),
    ],
)
@pytest.mark.parametrize("depth", [None, 4])
def test_experts_are_as_many_as_their_router_has_outputs(block, depth):
    attention = {"q": (64, 4, 16), "k": (64, 4, 16), "v": (64, 4, 16), "o": (4, 16, 64)}
    layer = {**block, "attn": attention, "norm": {"scale": (64,)}}
    if depth is None:
        tree = {"layers": [layer] * 4}
    else:
        tree = {"layers": jax.tree.map(
            lambda shape: (depth, *shape), layer, is_leaf=lambda x: isinstance(x, tuple)
        )}  # fmt: skip
    parts = roles(abstract({"embed": (512, 64), **tree}))
    experts = {path: part for path, part in parts.items() if part.experts > 1}
    names = {re.sub(r"\{.*\}", "", path.split("/")[-1]) for path in experts}
    assert names < {"wi_", "wo", "w", "w2", "up", "gate", "down"}
    assert {part.experts for part in experts.values()} == {8}
    assert sum(part.leaves * part.size("stack") for part in experts.values()) == 3 * 4
    assert all(part.dims[-3:] == ("experts", "in", "out") for part in experts.values())
    assert not any(part.is_attention for part in experts.values())
    assert len({part.input_key for part in experts.values()}) == 1


def test_a_gate_of_an_mlp_is_no_router():
    mlp = {
        "gate": {"kernel": (64, 256)},
        "up": {"kernel": (64, 256)},
        "down": {"kernel": (256, 64)},
    }
    heads = {"q": (64, 4, 16), "k": (64, 4, 16), "o": (4, 16, 64)}
    parts = roles(abstract({"layers": [{**mlp, **heads, "norm": {"scale": (64,)}}] * 2}))
    assert {part.experts for part in parts.values()} == {1}


def test_a_gate_beside_a_kernel_of_three_dimensions_is_no_router():
    mixer = {
        "gate": (64, 256),
        "in_proj": (64, 2, 256),
        "out_proj": (256, 64),
        "norm": {"scale": (64,)},
    }
    parts = roles(abstract({"layers": [mixer] * 4, "embed": {"embedding": (512, 64)}}))
    assert {part.experts for part in parts.values()} == {1}


def test_an_mlps_wo_is_not_attentions():
    layer = {"attn": dict.fromkeys("qkvo", (64, 64)), "mlp": {"wi": (64, 256), "wo": (256, 64)}}  # fmt: skip
    parts = roles(abstract({"layers": [layer] * 2, "norm": {"scale": (64,)}}))
    assert not parts["layers/{0,1}/mlp/wo"].is_attention
    assert parts["layers/{0,1}/attn/o"].is_attention
    assert parts["layers/{0,1}/mlp/wo"].input_key == parts["layers/{0,1}/mlp/wi"].input_key


def test_a_stack_without_a_norm_is_told_by_its_name_and_size():
    kernels = {"up": (8, 64, 256), "down": (8, 256, 64), "bias": (8, 64)}
    parts = roles(abstract({"embed": (512, 64), "decoder": {"layers": kernels}}))
    assert parts["decoder/layers/up"].dims == ("stack", "in", "out")
    assert parts["decoder/layers/down"].dims == ("stack", "in", "out")
    assert parts["decoder/layers/bias"].dims == ("stack", "out")
    for other in (
        {"attention": kernels},  # not the name of a stack
        {"layers": {**kernels, "scale": (64,)}},  # an array without the layers
        {"layers": {"up": (8, 64, 256), "down": (9, 256, 64)}},
        {"layers": {"up": (64, 4, 16), "down": (64, 64)}},  # the width
        {"layers": {"q": (8, 64), "o": (8, 32)}},  # matrices
    ):
        found = roles(abstract({"embed": (512, 64), **other}))
        assert all("stack" not in part.dims for part in found.values()), other
