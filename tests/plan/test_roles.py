"""Which dimension of a kernel is what, on real models and on made ones."""

from __future__ import annotations

import re

import jax
import pytest

import shardrules as sr
from shardrules._plan.roles import parts_of_model
from tests.support import corpus


def roles(tree):
    """{folded path: the roles of its dimensions}."""
    plan = sr.plan(tree, [(".*", ())], {"tp": 2})
    parts = parts_of_model(plan.folded, [kind.shape for kind in plan.kinds])
    return {part.pattern: part for part in parts}


def dims(tree):
    """{folded path: its roles as a text}, of a tree of shapes."""
    return {path: " ".join(part.dims) for path, part in roles(abstract(tree)).items()}


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
        assert len(matrix) < 2 or ("out" in matrix and "unknown" not in part.dims)


def test_siblings_share_their_input_and_attention_has_one_of_its_own():
    parts = of_model("maxtext-llama3.1-405b-unscanned")
    assert (
        len({part.input_key for path, part in parts.items() if re.search("key|query|value", path)})
        == 1
    )
    parts = roles(abstract({"layers": [{"wq": (64, 32), "gate": (64, 256), "up": (64, 256)}] * 2}))
    wq, gate, up = (parts[f"layers/{{0,1}}/{name}"].input_key for name in ("wq", "gate", "up"))
    assert gate == up != wq
    layer = {"attn": dict.fromkeys("qkvo", (64, 64)), "mlp": {"wi": (64, 256), "wo": (256, 64)}}
    parts = roles(abstract({"layers": [layer] * 2, "norm": {"scale": (64,)}}))
    assert {path[13:] for path, part in parts.items() if part.is_attention} == {
        f"attn/{n}" for n in "qkvo"
    }
    assert parts["layers/{0,1}/mlp/wo"].input_key == parts["layers/{0,1}/mlp/wi"].input_key


NORM = {"norm": {"scale": (64,)}}
QUANTIZED = {"up": {"kernel": (64, 256), "weight_scale_inv": (2, 4)}}
NNX = {
    "up": {"kernel": {"value": (64, 256)}, "bias": {"value": (256,)}},
    "norm": {"scale": {"value": (64,)}},
}
OF_EXPERTS = {"gate_up": {"kernel": (8, 64, 256), "bias": (8, 256)}, "router": {"bias": (8,)}}


@pytest.mark.parametrize(("tree", "path", "expected", "experts"), [
    ({"w": (512, 128)}, "w", "unknown unknown", 1),
    # The experts of vectors are a dimension, too; those that are leaves have none.
    ({"mlp": {"experts": OF_EXPERTS}, **NORM}, "mlp/experts/gate_up/bias", "experts out", 8),
    ({"mlp": {"experts": OF_EXPERTS}, **NORM}, "mlp/experts/router/bias", "out", 1),
    ({"experts": [QUANTIZED] * 8, **NORM}, "experts/{0..7}/up/kernel", "in out", 8),
    ({"experts": [QUANTIZED] * 8, **NORM}, "experts/{0..7}/up/weight_scale_inv", "out out", 8),
    ({"layers": [NNX] * 3}, "layers/{0..2}/up/kernel/value", "in out", 1),
])  # fmt: skip
def test_the_roles_of_made_trees(tree, path, expected, experts):
    part = roles(abstract(tree))[path]
    assert (" ".join(part.dims), part.experts) == (expected, experts)


LAYER = {"wq": (64, 4, 16), "wo": (4, 16, 64), "up": (64, 256), "down": (256, 64), "gain": (64,)}


@pytest.mark.parametrize("layers", [4, 8])
@pytest.mark.parametrize("name", ["layers", "l", "params", "blk"])
def test_a_stack_is_told_by_its_shapes_whatever_it_is_called(name, layers):
    # As many layers as heads are not taken for heads.
    found = dims({"embed": (512, 64), name: stacked(LAYER, layers), "norm": (64,)})
    assert {key: found[f"{name}/{key}"] for key in LAYER} == {
        "wq": "stack in out out",
        "wo": "stack in in out",
        "up": "stack in out",
        "down": "stack in out",
        "gain": "stack out",
    }


def stacked(tree, layers):
    return jax.tree.map(
        lambda shape: (layers, *shape), tree, is_leaf=lambda x: isinstance(x, tuple)
    )


KERNELS = {"up": (8, 64, 256), "down": (8, 256, 64), "bias": (8, 64)}


def test_a_stack_without_a_norm_is_told_by_its_name_and_size():
    found = dims({"embed": (512, 64), "decoder": {"layers": KERNELS}})
    assert [found[f"decoder/layers/{name}"] for name in KERNELS] == [
        "stack in out", "stack in out", "stack out",
    ]  # fmt: skip


OTHERS = [
    {"self_attn": {"q": (8, 64, 16), "o": (8, 16, 64)}},  # heads first
    {"convs": {"a": (3, 3, 64, 64), "b": (3, 3, 64, 128)}},
    {"convs": {"a": (5, 64, 128), "b": (5, 128, 64)}},
    {"qkv": {"x": (64, 4, 16), "y": (64, 2, 16)}},  # the width
    {"experts": {"up": (8, 64, 256), "down": (8, 256, 64)}},
    {"moe": {"router": (64, 8), "w": {"up": (8, 64, 256), "down": (8, 256, 64)}}},
    {"mlp": {"gate": (64, 8), "w": {"up": (8, 64, 256), "down": (8, 256, 64)}}},
]
WITHOUT_A_NORM = [
    {"attention": KERNELS},  # not the name of a stack
    {"layers": {**KERNELS, "scale": (64,)}},  # an array without the layers
    {"layers": {"up": (8, 64, 256), "down": (9, 256, 64)}},
    {"layers": {"up": (64, 4, 16), "down": (64, 64)}},  # the width
    {"layers": {"q": (8, 64), "o": (8, 32)}},  # matrices
]


@pytest.mark.parametrize(
    "block", [*({**block, "norm": (64,)} for block in OTHERS), *WITHOUT_A_NORM]
)
def test_arrays_that_begin_alike_are_not_always_a_stack(block):
    found = dims({"embed": (512, 64), **block})
    assert not any("stack" in of for of in found.values()), found


def moe(router, *names):
    """A block whose experts no name tells."""
    up, gate, down = names
    return {router: {"kernel": (64, 8)}, up: (8, 64, 256), gate: (8, 64, 256), down: (8, 256, 64)}


HEADS = {"q": (64, 4, 16), "k": (64, 4, 16), "v": (64, 4, 16), "o": (4, 16, 64)}


@pytest.mark.parametrize("block", [
    {"GptOssMlp": moe("gate", "wi_0", "wi_1", "wo")},
    {"MoeBlock_0": moe("gate", "wi_0", "wi_1", "wo")},
    {"mlp": moe("router", "w1", "w3", "w2")},
    moe("router", "w1", "w3", "w2"),
    moe("w_gate", "up", "gate", "down"),
])  # fmt: skip
@pytest.mark.parametrize("depth", [None, 4])
def test_experts_are_as_many_as_their_router_has_outputs(block, depth):
    layer = {**block, "attn": HEADS, **NORM}
    tree = {"layers": [layer] * 4 if depth is None else stacked(layer, depth)}
    parts = roles(abstract({"embed": (512, 64), **tree}))
    experts = {path: part for path, part in parts.items() if part.experts > 1}
    names = {re.sub(r"\{.*\}", "", path.split("/")[-1]) for path in experts}
    assert names < {"wi_", "wo", "w", "w2", "up", "gate", "down"}
    assert {part.experts for part in experts.values()} == {8}
    assert sum(part.leaves * part.size("stack") for part in experts.values()) == 3 * 4
    assert all(part.dims[-3:] == ("experts", "in", "out") for part in experts.values())
    assert not any(part.is_attention for part in experts.values())
    assert len({part.input_key for part in experts.values()}) == 1


MLP = {"gate": {"kernel": (64, 256)}, "up": {"kernel": (64, 256)}, "down": {"kernel": (256, 64)}}
MIXER = {"gate": (64, 256), "in_proj": (64, 2, 256), "out_proj": (256, 64)}


@pytest.mark.parametrize("layer", [{**MLP, **HEADS}, MIXER])  # beside a kernel of three dimensions
def test_a_gate_as_wide_as_an_mlp_is_no_router(layer):
    parts = roles(abstract({"layers": [{**layer, **NORM}] * 4, "embed": {"embedding": (512, 64)}}))
    assert {part.experts for part in parts.values()} == {1}
