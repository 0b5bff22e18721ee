"""Which dimension of a kernel is what, on real models and on made ones."""

from __future__ import annotations

import re

import jax
import pytest

import shardrules as sr
from shardrules._plan import path_words
from shardrules._plan.roles import roles_of
from tests.support import corpus


def roles(tree, heads=None):
    """{folded path: roles of its dimensions}."""
    plan = sr.plan(tree, [(".*", ())], {"tp": 2})
    shapes = [kind.shape or () for kind in plan.kinds]
    found = roles_of(plan.folded, shapes, heads)
    return {folded.pattern: of for folded, of in zip(plan.folded, found, strict=True)}


def sides(tree):
    return {path: " ".join(of.sides) for path, of in roles(tree).items()}


def model(name):
    return corpus.manifest(name).nested(corpus.with_dtype)


def abstract(tree):
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"), tree, is_leaf=lambda x: isinstance(x, tuple)
    )


TABLE = [words for words in vars(path_words).values() if isinstance(words, path_words.Words)]


@pytest.mark.parametrize("words", [*TABLE, *(words for _, words in path_words.FUSED)])
def test_each_example_has_a_word_of_its_row(words):
    components = words.example.split("/")
    assert words.are_in(*components)
    assert any(map(words.is_name, components)) or words in (
        path_words.NORM, path_words.VECTOR, path_words.LOOKUP, path_words.NO_LOOKUP,
        path_words.EXPERTS, path_words.NO_EXPERTS, path_words.NO_STACK, path_words.IN_ATTENTION,
    )  # fmt: skip


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


@pytest.mark.parametrize("name", ["llama-3.1-405b", "easydel-deepseek-v3", "maxtext-llama3.1-405b-scanned"])
def test_each_kernel_is_understood_and_has_a_residual_side(name):
    for found in roles(model(name)).values():
        assert found.is_known
        assert found.is_vector or "residual" in found.sides


def test_without_a_sign_of_the_layout_it_is_not_known():
    (found,) = roles(abstract({"w": (512, 128)})).values()
    assert (found.is_known, found.columns) == (False, ())


def test_a_kernel_of_four_dimensions_without_the_width_is_not_known():
    up, down = {"kernel": (64, 256)}, {"kernel": (256, 64)}
    found = roles(abstract({"up": up, "down": down, "mix": {"kernel": (4, 8, 12, 16)}}))
    assert (found["mix/kernel"].is_known, found["mix/kernel"].columns) == (False, ())
    assert found["mix/kernel"].sides == ("window",) * 4


def test_names_of_square_kernels_tell_their_sides():
    """They are [in, out] where nothing says otherwise, also without an array's name behind them."""
    square = {"attn": dict.fromkeys(("wq", "wk", "wv", "wo"), (64, 64))}
    found = roles(abstract({"layers": [square] * 2, "norm": (64,)}))
    ends = {path.rpartition("/")[2]: of for path, of in found.items()}
    assert ends["wq"].sides == ends["wk"].sides == ("residual", "hidden")
    assert ends["wo"].sides == ("hidden", "residual")
    assert all(dims.is_known for dims in ends.values())


def test_a_head_of_known_size_is_no_residual_width():
    """In attention without an MLP beside it, heads are as often there as the width."""
    shapes = {"q": (2048, 16, 128), "k": (2048, 4, 128), "v": (2048, 4, 128), "o": (16, 128, 2048)}
    found = roles(abstract({"attn": shapes}), dict.fromkeys(range(4), 128))
    ends = {path.rpartition("/")[2]: of.sides for path, of in found.items()}
    assert ends["q"] == ends["k"] == ends["v"] == ("residual", "heads", "head")
    assert ends["o"] == ("heads", "head", "residual")


def test_the_experts_of_vectors_are_a_dimension_too():
    module = {"gate_up": {"kernel": (8, 64, 256), "bias": (8, 256)}, "router": {"bias": (8,)}}
    found = sides(abstract({"mlp": {"experts": module}, "norm": {"scale": (64,)}}))
    assert found["mlp/experts/gate_up/bias"] == "experts vector"
    assert found["mlp/experts/router/bias"] == "vector"


def test_experts_that_are_leaves_have_no_dimension_of_experts():
    expert = {"up": {"kernel": (64, 256), "weight_scale_inv": (2, 4)}}
    found = sides(abstract({"experts": [expert] * 8, "norm": {"scale": (64,)}}))
    assert {*found.values()} == {"residual hidden", "vector vector", "vector"}


def test_nnx_paths_have_roles():
    layer = {"up": {"kernel": {"value": (64, 256)}, "bias": {"value": (256,)}}, "norm": {"scale": {"value": (64,)}}}  # fmt: skip
    found = sides(abstract({"layers": [layer] * 3}))
    assert found["layers/{0..2}/up/kernel/value"] == "residual hidden"


LAYER = {"wq": (64, 4, 16), "wo": (4, 16, 64), "up": (64, 256), "down": (256, 64), "gain": (64,)}


@pytest.mark.parametrize("layers", [4, 8])
@pytest.mark.parametrize("name", ["layers", "l", "params", "blk"])
def test_a_stack_is_told_by_its_shapes_whatever_it_is_called(name, layers):
    # As many layers as heads are not taken for heads.
    stack = {key: (layers, *shape) for key, shape in LAYER.items()}
    found = sides(abstract({"embed": (512, 64), name: stack, "norm": (64,)}))
    assert {key: found[f"{name}/{key}"] for key in LAYER} == {
        "wq": "layers residual heads head",
        "wo": "layers heads head residual",
        "up": "layers residual hidden",
        "down": "layers hidden residual",
        "gain": "layers vector",
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
    found = sides(abstract({"embed": (512, 64), **block, "norm": (64,)}))
    assert all("layers" not in of for of in found.values()), found


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


def test_as_many_heads_as_experts_are_heads():
    """In one block with them, and before the width."""
    heads = dict.fromkeys(("wq", "wk", "wv"), (8, 64, 16))
    layer = {**moe("router", "w1", "w3", "w2"), **heads, "norm": {"scale": (64,)}}
    found = sides(abstract({"embed": (512, 64), "layers": [layer] * 4}))
    assert found["layers/{0..3}/wq"] == "heads residual head"
    assert found["layers/{0..3}/w2"] == "experts hidden residual"


def test_a_gate_of_an_mlp_is_no_router():
    mlp = {"gate": {"kernel": (64, 256)}, "up": {"kernel": (64, 256)}, "down": {"kernel": (256, 64)}}
    heads = {"q": (64, 4, 16), "k": (64, 4, 16), "o": (4, 16, 64)}
    assert not any(
        "experts" in of for of in sides(abstract({"layers": [{**mlp, **heads, "norm": {"scale": (64,)}}] * 2})).values()
    )


def test_a_gate_beside_a_kernel_of_three_dimensions_is_no_router():
    mixer = {"gate": (64, 256), "in_proj": (64, 2, 256), "out_proj": (256, 64), "norm": {"scale": (64,)}}
    assert not any(
        "experts" in of for of in sides(abstract({"layers": [mixer] * 4, "embed": {"embedding": (512, 64)}})).values()
    )


def test_a_stack_without_a_norm_is_told_by_its_name_and_size():
    kernels = {"up": (8, 64, 256), "down": (8, 256, 64), "bias": (8, 64)}
    found = sides(abstract({"embed": (512, 64), "decoder": {"layers": kernels}}))
    assert found["decoder/layers/up"] == "layers residual hidden"
    assert found["decoder/layers/down"] == "layers hidden residual"
    assert found["decoder/layers/bias"] == "layers vector"
    for other in (
        {"attention": kernels},  # not the name of a stack
        {"layers": {**kernels, "scale": (64,)}},  # an array without the layers
        {"layers": {"up": (8, 64, 256), "down": (9, 256, 64)}},
        {"layers": {"up": (64, 4, 16), "down": (64, 64)}},  # the width
        {"layers": {"q": (8, 64), "o": (8, 32)}},  # matrices
    ):
        found = sides(abstract({"embed": (512, 64), **other}))
        assert all("layers" not in of for of in found.values()), other
