"""Which dimension of a kernel is what, on real models and on made ones."""

from __future__ import annotations

import re

import jax
import pytest

import shardrules as sr
from shardrules._plan.roles import roles_of
from tests.support import corpus


def roles(tree, head_dim=None):
    """{folded path: roles of its dimensions}."""
    plan = sr.plan(tree, [(".*", ())], {"tp": 2})
    shapes = [kind.shape or () for kind in plan.kinds]
    found = roles_of(plan.folded, shapes, head_dim)
    return {folded.pattern: of for folded, of in zip(plan.folded, found, strict=True)}


def model(name):
    return corpus.manifest(name).nested(corpus.with_dtype)


def abstract(tree):
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"), tree, is_leaf=lambda x: isinstance(x, tuple)
    )


# model, the end of a folded path, roles, the dimensions of a bias
EXPECTED = [
    ("llama-3.1-405b", "embed_tokens/weight", "vocabulary residual", (1,)),
    ("llama-3.1-405b", "q_proj/weight", "hidden residual", (0,)),
    ("llama-3.1-405b", "down_proj/weight", "residual hidden", (0,)),
    ("llama-3.1-405b", "lm_head/weight", "hidden residual", (0,)),
    ("easylm-llama-3.1-405b", "feed_forward/w{1,3}/kernel", "residual hidden", (1,)),
    ("easylm-llama-3.1-405b", "attention/wo/kernel", "hidden residual", (1,)),
    ("lwm-7b-scanned", "attention/wq/kernel", "layers residual hidden", (0, 2)),
    ("lwm-7b-scanned", "attention_norm/kernel", "layers vector", (0, 1)),
    # HF's GPT-2 and flax's have each the other's layout under the library's own names.
    ("gpt2", "mlp/c_fc/weight", "residual hidden", (1,)),
    ("flax-gpt2", "mlp/c_fc/kernel", "hidden residual", (0,)),
    ("flax-gpt2", "wpe/embedding", "vocabulary residual", (1,)),
    ("vit-base-patch16-224", "patch_embeddings/projection/weight", "hidden residual window window", (0,)),
    ("flax-t5-v1_1-xxl", "decoder/block/{0..23}/layer/2/DenseReluDense/wo/kernel", "hidden residual", (1,)),
    ("deepseek-v3", "q_a_proj/weight_scale_inv", "vector vector", (0, 1)),
    ("deepseek-v3-fused", "experts/gate_up_proj", "experts hidden residual", (0, 1)),
    ("easydel-deepseek-v3", "mlp/experts/down_proj/kernel", "experts hidden residual", (0, 2)),
    ("easydel-deepseek-v3", "mlp/shared_experts/up_proj/kernel", "residual hidden", (1,)),
    ("mixtral-8x22b", "experts/{0..7}/w2/weight", "residual hidden", (0,)),
    ("maxtext-deepseek3-671b-scanned", "MoeBlock_0/wo", "experts layers hidden residual", (0, 1, 3)),
    ("maxtext-deepseek3-671b-scanned", "MoeBlock_0/gate/kernel", "residual layers hidden", (1, 2)),
    ("maxtext-deepseek3-671b-scanned", "moe_layers/self_attention/out/kernel", "heads layers head residual", (1, 3)),
    ("maxtext-deepseek3-671b-scanned", "moe_layers/self_attention/wkv_b/kernel", "residual layers heads head", (1, 2, 3)),
    ("maxtext-llama3.1-405b-scanned", "self_attention/value/kernel", "residual layers heads head", (1, 2, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "end", "expected", "columns"), EXPECTED)
def test_the_roles_of_real_models(name, end, expected, columns):
    (found,) = [of for path, of in roles(model(name)).items() if path.endswith(end)]
    assert (" ".join(found.sides), found.columns) == (expected, columns)


def test_a_kernel_of_four_dimensions_without_the_width_is_not_known():
    up, down = {"kernel": (64, 256)}, {"kernel": (256, 64)}
    found = roles(abstract({"up": up, "down": down, "mix": {"kernel": (4, 8, 12, 16)}}))
    assert not found["mix/kernel"].is_known
    assert found["mix/kernel"].sides == ("window",) * 4


def moe(router, *names):
    """A block whose experts no name tells."""
    up, gate, down = names
    return {router: {"kernel": (64, 8)}, up: (8, 64, 256), gate: (8, 64, 256), down: (8, 256, 64)}


NORM = {"norm": {"scale": (64,)}}
EMBED = {"embed": (512, 64)}
EXPERT = {"up": {"kernel": (64, 256), "weight_scale_inv": (2, 4)}}
NNX = {"up": {"kernel": {"value": (64, 256)}, "bias": {"value": (256,)}}, "norm": {"scale": {"value": (64,)}}}
HEADS = {"q": (2048, 16, 128), "k": (2048, 4, 128), "v": (2048, 4, 128), "o": (16, 128, 2048)}
STACK = {"up": (8, 64, 256), "down": (8, 256, 64), "bias": (8, 64)}
FEW_HEADS = {"q": (64, 4, 16), "k": (64, 4, 16), "o": (4, 16, 64)}
MLP = {"gate": {"kernel": (64, 256)}, "up": {"kernel": (64, 256)}, "down": {"kernel": (256, 64)}}
MIXER = {"gate": (64, 256), "in_proj": (64, 2, 256), "out_proj": (256, 64), **NORM}
# In one block with experts, as many, and before the width.
AS_MANY = {**moe("router", "w1", "w3", "w2"), **dict.fromkeys(("wq", "wk", "wv"), (8, 64, 16)), **NORM}
# what, tree, some of its paths with their roles
MADE = [
    ("names of square kernels", {"layers": [{"attn": dict.fromkeys(("wq", "wk", "wv", "wo"), (64, 64))}] * 2, "norm": (64,)},
     {"layers/{0,1}/attn/wq": "residual hidden", "layers/{0,1}/attn/wo": "hidden residual"}),
    ("a head of known size is no width", {"attn": HEADS},
     {"attn/q": "residual heads head", "attn/k": "residual heads head", "attn/o": "heads head residual"}),
    ("experts of vectors", {"mlp": {"experts": {"gate_up": {"kernel": (8, 64, 256), "bias": (8, 256)}, "router": {"bias": (8,)}}}, **NORM},
     {"mlp/experts/gate_up/bias": "experts vector", "mlp/experts/router/bias": "vector"}),
    ("experts that are leaves", {"experts": [EXPERT] * 8, **NORM},
     {"experts/{0..7}/up/kernel": "residual hidden", "experts/{0..7}/up/weight_scale_inv": "vector vector"}),
    ("paths of nnx", {"layers": [NNX] * 3}, {"layers/{0..2}/up/kernel/value": "residual hidden"}),
    ("a stack without a norm", {**EMBED, "decoder": {"layers": STACK}},
     {"decoder/layers/up": "layers residual hidden", "decoder/layers/down": "layers hidden residual", "decoder/layers/bias": "layers vector"}),
    ("as many heads as experts", {**EMBED, "layers": [AS_MANY] * 4},
     {"layers/{0..3}/wq": "heads residual head", "layers/{0..3}/w2": "experts hidden residual"}),
    ("a stack of another name with a norm", {**EMBED, "blk": {"down": (8, 256, 64), "up": (8, 64, 256), "norm": (8, 64)}},
     {"blk/up": "layers residual hidden", "blk/down": "layers hidden residual", "blk/norm": "layers vector"}),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "expected"), [pytest.param(*row[1:], id=row[0]) for row in MADE])
def test_the_roles_of_made_trees(tree, expected):
    found = roles(abstract(tree), 128 if tree.get("attn") is HEADS else None)
    assert {path: " ".join(found[path].sides) for path in expected} == expected
    assert all(dims.is_known for dims in found.values())


@pytest.mark.parametrize(
    ("role", "tree"),
    [
        ("layers", {"self_attn": {"q": (8, 64, 16), "o": (8, 16, 64)}}),  # heads first
        ("layers", {"convs": {"a": (3, 3, 64, 64), "b": (3, 3, 64, 128)}}),
        ("layers", {"convs": {"a": (5, 64, 128), "b": (5, 128, 64)}}),
        ("layers", {"qkv": {"x": (64, 4, 16), "y": (64, 2, 16)}}),  # the width
        ("layers", {"experts": {"up": (8, 64, 256), "down": (8, 256, 64)}}),
        ("layers", {"moe": {"router": (64, 8), "w": {"up": (8, 64, 256), "down": (8, 256, 64)}}}),
        ("layers", {"attention": STACK}),  # not the name of a stack
        ("layers", {"layers": {**STACK, "scale": (64,)}}),  # an array without the layers
        ("layers", {"layers": {"up": (8, 64, 256), "down": (9, 256, 64)}}),
        ("layers", {"layers": {"up": (64, 4, 16), "down": (64, 64)}}),  # the width
        ("layers", {"layers": {"q": (8, 64), "o": (8, 32)}}),  # matrices
        ("experts", {"layers": [{**MLP, **FEW_HEADS, **NORM}] * 2}),  # a gate of an MLP is no router
        ("experts", {"layers": [MIXER] * 4}),
    ],
)
def test_what_is_no_stack_and_no_experts(role, tree):
    found = roles(abstract({**EMBED, **tree, "norm": (64,)}))
    assert all(role not in of.sides for of in found.values()), found


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
    layer = {**block, "attn": {**FEW_HEADS, "v": (64, 4, 16)}, **NORM}
    stacked = jax.tree.map(lambda shape: (depth, *shape), layer, is_leaf=lambda x: isinstance(x, tuple))
    tree = {"layers": [layer] * 4 if depth is None else stacked}
    found = roles(abstract({"embed": (512, 64), **tree}))
    experts = {path: of for path, of in found.items() if "experts" in of.sides}
    names = {re.sub(r"\{.*\}", "", path.split("/")[-1]) for path in experts}
    assert names < {"wi_", "wo", "w", "w2", "up", "gate", "down"}
    assert {dims.sides[-3:] for dims in experts.values()} == {
        ("experts", "residual", "hidden"), ("experts", "hidden", "residual")}  # fmt: skip
    assert {("layers" in dims.sides) for dims in experts.values()} == {depth is not None}
    # As for no other, tensor axes leave the router whole.
    assert {*block} & {"w_gate", "router"} or all(
        of.tensor == "none" for path, of in found.items() if "gate/kernel" in path)  # fmt: skip
