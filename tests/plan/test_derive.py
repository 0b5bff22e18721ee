"""Derived plans: optax says what an optimizer's state is, MaxText's and LWM's own rules what stacks are."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.slow import some
from tests.support.trees import array as abstract

optax = pytest.importorskip("optax")

SIZES = {"dp": 2, "fsdp": 4, "tp": 2}
RULES = [("embed", P("tp", "fsdp")), ("experts", P(None, "fsdp", "tp")), ("kernel", P("fsdp", "tp")), ("bias", P("tp"))]


def params():
    return {
        "embed": abstract(64, 32),
        "layers": [
            {"kernel": abstract(32, 32), "bias": abstract(32)},
            {"kernel": abstract(32, 48), "bias": abstract(30)},
        ],
        "experts": abstract(4, 32, 16),
        "odd": {"kernel": abstract(7, 16)},
        "temperature": abstract(),
    }


def plan_of(tree=None, mesh=None, **kwargs):
    return sr.plan(params() if tree is None else tree, RULES, mesh or SIZES, **kwargs)


def labels(tree):
    return {key: "frozen" if key == "embed" else "trained" for key in tree}


def bare(tree):
    """A tree of specs as a tree of boxes that a tree_map passes as they are."""
    return jax.tree.map(lambda spec: SimpleNamespace(spec=spec), tree, is_leaf=lambda x: isinstance(x, P))


TRANSFORMATIONS = {
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3),
    "lion": lambda: optax.lion(1e-3),
    "sgd": lambda: optax.sgd(1e-3),
    "momentum": lambda: optax.sgd(1e-3, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3), optax.ema(0.9)),
    "masked": lambda: optax.masked(optax.adam(1e-3), {k: k != "embed" for k in params()}),
    "multi_transform": lambda: optax.multi_transform(
        {"trained": optax.adam(1e-3), "frozen": optax.sgd(1e-3, momentum=0.9)}, labels(params())
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    "numbers alone": lambda: optax.inject_hyperparams(optax.sgd)(1e-3),
    "a random key": lambda: optax.add_noise(0.1, 0.5, 0),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_specs_are_those_that_optax_maps(name):
    tx = TRANSFORMATIONS[name]()
    plan = plan_of()
    state = jax.eval_shape(tx.init, params())
    specs = plan.for_optimizer(state).specs()
    expected = optax.tree_map_params(
        tx,
        lambda leaf, box: leaf if isinstance(leaf, optax.MaskedNode) else box.spec,
        state,
        bare(plan.specs()),
        transform_non_params=lambda _: P(),
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    assert jax.tree.leaves(specs) == jax.tree.leaves(expected)


@pytest.mark.parametrize("least", [1, 16, 32, 128])
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_adafactor(least, momentum):
    factored_dims = pytest.importorskip("optax._src.factorized")._factored_dims
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=least, momentum=momentum)
    plan = plan_of()
    specs = plan.for_optimizer(jax.eval_shape(tx.init, params())).specs()[0]

    def without(dim, spec):
        entries = [e for i, e in enumerate(spec) if i != dim]
        return P(*entries) if any(entries) else P()

    def check(leaf, box, row, col, v):
        factors = factored_dims(leaf.shape, True, least)
        if factors is None:
            assert (row, col, v) == (P(), P(), box.spec)
        else:
            d1, d0 = factors
            assert row == without(d0, box.spec)
            assert col == without(d1, box.spec)
            assert v == P()

    is_spec = {"is_leaf": lambda x: isinstance(x, P)}
    jax.tree.map(check, params(), bare(plan.specs()), specs.v_row, specs.v_col, specs.v, **is_spec)


def test_square_factors_differ():
    plan = plan_of()
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=16)
    derived = plan.for_optimizer(jax.eval_shape(tx.init, params()))
    factors = {derived.explain(f"{name}/layers/0/kernel").kind.spec for name in ("v_row", "v_col")}
    assert factors == {P("fsdp"), P("tp")}
    told = str(derived.explain("v_row/layers/0/kernel"))
    assert re.search(r"derived +the parameter's without dim \d \(factored moment\)", told)
    assert "follows        layers/0/kernel" in told
    assert "rule 2: 'kernel' wins" in told


def test_histories_and_layer_norms():
    plan = plan_of()
    lbfgs = jax.eval_shape(optax.scale_by_lbfgs(5).init, params())
    derived = plan.for_optimizer(lbfgs)
    assert derived.explain("diff_params_memory/embed").kind.spec == P(None, "tp", "fsdp")
    assert derived.explain("params/embed").kind.spec == P("tp", "fsdp")
    novograd = plan.for_optimizer(jax.eval_shape(optax.novograd(1e-3).init, params()))
    assert novograd.specs()[0].nu["embed"] == P()


def test_flax_train_state():
    TrainState = pytest.importorskip("flax.training.train_state").TrainState
    tx = optax.adam(1e-3)
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=tx), params())
    plan = plan_of()
    derived = plan.for_optimizer(state)
    specs = derived.specs()
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    assert specs.params == specs.opt_state[0].mu == plan.specs()
    assert specs.step == specs.opt_state[0].count == P()
    # The parameters are not the optimizer's.
    cut = plan.for_optimizer(state, zero1="dp")
    assert cut.specs().params == plan.specs()
    assert cut.specs().opt_state[0].mu["embed"] == P(("tp", "dp"), "fsdp")
    whole = plan.bytes_per_device()
    assert cut.bytes_per_device().params == whole.params + 4  # the step


def test_nnx_optimizer():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    plan = plan_of(nnx.state(model, nnx.Param))
    state = nnx.state(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
    derived = plan.for_optimizer(state)
    assert jax.tree.structure(derived.specs()) == jax.tree.structure(state)
    moments = [path for path in derived.paths if "/mu/" in path or "/nu/" in path]
    assert len(moments) == 4
    for path in moments:
        assert derived.explain(path).kind.spec == (P("fsdp", "tp") if "kernel" in path else P("tp")), path


@pytest.mark.parametrize(
    ("name", "zero1"), some(itertools.product(["adam", "adafactor", "multi_transform"], [None, "dp", "tp"]), 4)
)
def test_it_runs(mesh, name, zero1):
    make = {"adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=16)}
    tx = {**TRANSFORMATIONS, **make}[name]()
    plan = plan_of(mesh=mesh)
    derived = plan.for_optimizer(jax.eval_shape(tx.init, params()), zero1=zero1)
    wanted = plan.shardings(), derived.shardings()
    values = jax.device_put(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), params()), wanted[0])

    def step(values, state):
        updates, state = tx.update(values, state, values)
        return optax.apply_updates(values, updates), state

    state = jax.jit(tx.init, out_shardings=wanted[1])(values)
    _, state = jax.jit(step, out_shardings=wanted)(values, state)
    held = jax.tree.leaves(jax.tree.map(lambda x: x.addressable_shards[0].data.nbytes, state))
    assert sum(held) == derived.bytes_per_device().max
    for array, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(wanted[1]), strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
    assert jax.tree.map(lambda leaf: leaf.sharding, derived.abstract()) == wanted[1]


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((64, 32), P(), P("dp", None)),
        ((32, 64), P(), P(None, "dp")),
        ((32, 32), P(), P("dp", None)),  # the first of equals
        ((64, 48), P("fsdp"), P("fsdp", "dp")),  # 16 are held of 64
        ((64, 7), P("fsdp"), P(("fsdp", "dp"), None)),
        ((4, 7), P("fsdp"), P("fsdp", None)),  # nothing divides
        ((64, 64), P("dp"), P("dp", None)),  # it cuts already
        ((64, 64), P(("fsdp", "dp")), P(("fsdp", "dp"), None)),
        ((0, 8), P(), P(None, "dp")),
    ],
)
def test_zero1_chooses_a_dimension(shape, spec, expected):
    plan = sr.plan({"w": abstract(*shape)}, [("w", spec)], SIZES)
    derived = plan.for_optimizer({"mu": {"w": abstract(*shape)}}, zero1="dp")
    assert derived.specs()["mu"]["w"] == expected
    told = derived.explain("mu/w").kind.origin.endswith(", cut by dp too (ZeRO-1)")
    assert told == (expected != plan.specs()["w"])


def test_zero1_of_an_axis_of_one_or_none():
    plan = plan_of(mesh={"dp": 1, "fsdp": 4, "tp": 2})
    state = jax.eval_shape(optax.adam(1e-3).init, params())
    assert plan.for_optimizer(state, zero1="dp").specs() == plan.for_optimizer(state).specs()
    with pytest.raises(ValueError, match=r"zero1: the mesh .* has no axis 'data'"):
        plan.for_optimizer(state, zero1="data")


@pytest.fixture(scope="module")
def keras():
    before = os.environ.setdefault("KERAS_BACKEND", "jax")
    module = pytest.importorskip("keras")
    if before != "jax" or module.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend here")
    return module


@pytest.mark.parametrize("name", ["Adam", "Nadam", "Lion", "RMSprop", "Muon", "Adafactor", "Ftrl"])
def test_keras_optimizers_find_their_parameters(keras, name):
    layers = keras.layers
    inner = keras.Sequential([keras.Input((16,)), layers.Dense(32, name="up")], name="net_1")
    entry = keras.Input((16,))
    mixed = layers.MultiHeadAttention(2, 4, name="attn")(*[inner(entry)[:, None]] * 2)
    model = keras.Model(entry, layers.LayerNormalization(name="norm")(mixed))
    optimizer = getattr(keras.optimizers, name)(use_ema=True)
    model.compile(optimizer)
    optimizer.build(model.trainable_variables)
    state = {variable.path: variable.value for variable in optimizer.variables}
    parameters = {variable.path: variable.value for variable in model.trainable_variables}
    rules = [("kernel", P("fsdp", "tp")), (".*", P("tp"))]
    plan = sr.plan(parameters, rules, SIZES)
    derived = plan.for_optimizer(state)
    followed = 0
    for variable in model.trainable_variables:
        flat = variable.path.replace("/", "_")
        for path in derived.paths:
            if re.fullmatch(rf".*/{flat}_[a-z_]+", path):
                assert derived.explain(path).source == variable.path, path
                assert derived.explain(path).kind.spec == plan.explain(variable.path).kind.spec, path
                followed += 1
    assert followed >= 2 * len(model.trainable_variables)
    assert tuple(derived.explain(f"{optimizer.name}/iteration").kind.spec) == ()


def test_a_flat_name_of_several_parameters_is_that_of_none():
    same = {"a_b": {"c": abstract(8, 8)}, "a": {"b_c": abstract(8, 8)}}
    plan = sr.plan(same, [("", P("fsdp", "tp"))], SIZES)
    assert plan.for_optimizer({"a_b_c_momentum": abstract(8, 8)}).kinds[0].spec == P("fsdp", "tp")
    rules = [("other|a_b", P("fsdp", "tp")), ("", P("tp"))]
    plan = sr.plan({**same, "other": abstract(8, 8)}, rules, SIZES)
    state = {"a_b_c_momentum": abstract(8, 8), "other_momentum": abstract(8, 8)}
    derived = plan.for_optimizer(state)
    assert derived.explain("other_momentum").kind.spec == P("fsdp", "tp")
    kind = derived.explain("a_b_c_momentum").kind
    assert tuple(kind.spec) == ()
    assert kind.origin == "no parameter is found by its path: replicated"


def test_the_longest_path_of_whole_components():
    rules = [("ab/w", P("tp")), ("^b/w", P("fsdp")), ("^w", P("dp"))]
    tree = {"b": {"w": abstract(8)}, "w": abstract(8)}
    plan = sr.plan(tree, rules, SIZES)
    derived = plan.for_optimizer({"mu": {"ab": {"w": abstract(8)}, "b": {"w": abstract(8)}}})
    assert derived.sources == ["w", "b/w"]
    assert derived.explain("mu/ab/w").kind.spec == P("dp")
    nested = sr.plan({"mu": {"w": abstract(8)}, "w": abstract(8)}, [("mu", P("tp")), *rules], SIZES)
    assert nested.for_optimizer({"0": {"mu": {"w": abstract(8)}}}).sources == ["mu/w"]


@pytest.mark.parametrize("dialect", [sr.dialects.EFORMER, replace(sr.dialects.KEYSTR, correction=sr.Correction())])
@pytest.mark.parametrize("name", ["adamw", "momentum", "multi_transform"])
def test_a_state_of_params_follows_a_plan_of_variables(name, dialect):
    """flax's init gives {"params": params}, and optimizers are given params alone."""
    tx, tree = TRANSFORMATIONS[name](), params()
    rules = sr.Rules([("embed", P("tp")), ("kernel", P("fsdp", "tp")), ("", P())], dialect)
    state = jax.eval_shape(tx.init, tree)
    expected = sr.plan(tree, rules, SIZES).for_optimizer(state).specs()
    for variables in (
        {"params": tree},
        {"params": tree, "batch_stats": {"mean": abstract(64, 32)}},
        {"model": {"params": tree}},
    ):
        plan = sr.plan(variables, rules, SIZES)
        assert plan.for_optimizer(state).specs() == expected
        train_state = {"params": variables, "opt_state": state}
        assert plan.for_optimizer(train_state).specs()["opt_state"] == expected


def test_a_state_of_another_model_is_no_replicated_state():
    plan = plan_of()
    other = jax.eval_shape(optax.adam(1e-3).init, {"decoder": {"kernel": abstract(8, 8)}})
    with pytest.raises(ValueError, match=r"no leaf of the state follows a parameter: .*decoder"):
        plan.for_optimizer(other)
    assert plan.for_optimizer({"random words": abstract(2, dtype="uint32")}).specs() == {"random words": P()}


def test_what_is_not_known_is_told():
    plan = plan_of()
    state = {"embed": abstract(64, 33), "layers": abstract(128, 128), "count": abstract()}
    derived = plan.for_optimizer(state, zero1=None)
    assert set(jax.tree.leaves(derived.specs())) == {P()}
    assert "no known relation to the parameter's (64, 32)" in derived.explain("embed").kind.origin
    for path in ("layers", "count"):
        assert "no parameter is found by its path" in derived.explain(path).kind.origin
    assert derived.explain("layers").kind.rule is None
    assert derived.explain("layers").kind.status == "placed"
    # A square kernel's moment that is no v_row or v_col could lack either dimension.
    derived = plan.for_optimizer({"m": {"layers": [{"kernel": abstract(32)}, {"kernel": abstract(48)}]}})
    assert "no known relation" in derived.explain("m/layers/0/kernel").kind.origin
    assert derived.explain("m/layers/1/kernel").kind.spec == P("tp")


def test_losses_and_problems_are_the_parameters():
    plan = plan_of()
    derived = plan.for_optimizer({"mu": params()})
    mine, theirs = derived.explain("mu/odd/kernel").kind, plan.explain("odd/kernel").kind
    assert mine.losses == theirs.losses != ()
    half = plan.for_optimizer({"mu": {"odd": {"kernel": abstract(7, 16, dtype="bfloat16")}}})
    assert half.explain("mu/odd/kernel").kind.losses == tuple(
        loss._replace(bytes=loss.bytes // 2) for loss in theirs.losses
    )
    unmatched = sr.plan({"x": abstract(4)}, RULES, SIZES).for_optimizer({"mu": {"x": abstract(4)}})
    assert unmatched.explain("mu/x").kind.status == "unmatched"


def test_stacks_with_units_corrections_and_truncation():
    exact = sr.RuleSpec(("fsdp", "tp"), sr.Correction(indivisible="error"), units=(None, 8))
    rules = [("layers/0/exact", exact), ("layers/0/cut", ("fsdp", "tp", "dp")), (".*", None)]
    tree = {"layers": {"exact": abstract(4, 16, 24), "cut": abstract(4, 16, 16), "b": abstract(4)}}
    plan = sr.plan(tree, rules, SIZES, companions=[sr.stacked("layers", mesh_axis="dp")])
    assert "dim 2 of size 24 is not divisible by tp=2 in multiples of 8" in plan.explain("layers/exact").kind.message
    assert plan.explain("layers/cut").kind.spec == ("dp", "fsdp", "tp")
    assert plan.explain("layers/b").kind.spec == ("dp",)
    wide = sr.plan({"layers": {"exact": abstract(4, 16, 32)}}, rules, SIZES, companions=[sr.stacked("layers")])
    assert wide.explain("layers/exact").kind.spec == (None, "fsdp", "tp")
    assert "dims (-, 0, 1)" in wide.explain("layers/exact").kind.origin


@pytest.mark.parametrize(("rank", "expected"), [("truncate", (None, "fsdp")), ("replicate", ()), ("error", None)])
def test_what_is_too_long_for_a_layer_is_too_long_for_its_stack(rank, expected):
    rules, correction = [("h/0/w", ("fsdp", "tp"))], sr.Correction(rank=rank)
    layer = sr.plan({"h": [{"w": abstract(8)}]}, sr.Rules(rules, correction=correction), SIZES)
    stack = sr.plan(
        {"h": {"w": abstract(4, 8)}}, sr.Rules(rules, correction=correction), SIZES, companions=[sr.stacked("h")],
    )  # fmt: skip
    assert stack.kinds[0].spec == expected
    assert [loss.kind for loss in stack.kinds[0].losses] == ["rank"]
    assert [loss.kind for loss in layer.kinds[0].losses] == ["rank"]


FOLLOWER = [("^base$", P("tp")), ("follower", P("fsdp"))]
TO_NOTHING, TO_BASE = sr.Companion("follower", "none"), sr.Companion("^fol.*", "base")
ONE = {"follower": abstract(8)}
QUANTIZED_LORA = {"kernel_lora_a": {"array": {"qvalue": abstract(64, 4), "scale": abstract(1, 4)}}}
FOLLOWING = {
    # what it is: (tree, rules, companions, {path: (spec, source)})
    "a stack at the root, as an ensemble of equinox.filter_vmap": (
        {"wq": abstract(8, 64, 32)}, [("wq", P("fsdp", "tp"))], [sr.stacked("")], {"wq": (P(None, "fsdp", "tp"), "wq")}),
    "the stack cut as well": (
        {"wq": abstract(8, 64, 32)}, [("wq", P("fsdp", "tp"))], [sr.stacked("", mesh_axis="dp")], {"wq": (P("dp", "fsdp", "tp"), "wq")}),
    "a stack in dim 1, as MaxText's, cut by stages": (
        {"layers": {"w": abstract(64, 8, 32)}}, [("layers/0/w", P("fsdp", "tp"))], [sr.stacked("layers", axis=1, mesh_axis="dp")],
        {"layers/w": (P("fsdp", "dp", "tp"), "layers/0/w")},
    ),
    "sizes without relation are not cut": (
        {"w": abstract(32, 64), "w_lora_a": abstract(40, 4), "w_lora_b": abstract(4, 40)},
        [("w", P("fsdp", "tp"))], sr.LORA, {"w_lora_a": (P(), "w"), "w_lora_b": (P(), "w")},
    ),
    "quantized factors follow through both tables": (
        {"q": QUANTIZED_LORA}, [("q/kernel$", P("fsdp", "tp"))], (*sr.QUANTIZED, *sr.LORA),
        {"q/kernel_lora_a/array/qvalue": (P("fsdp", None), "q/kernel"),
         "q/kernel_lora_a/array/scale": (P(), "q/kernel")},
    ),
    # The path of a layer is below that of its stack, so it could be found for ever.
    "each companion leads once": (
        {"layers": {"w": abstract(4, 8)}}, [("layers/0/w", P("tp"))], [sr.stacked("layers")] * 2,
        {"layers/w": (P(None, "tp"), "layers/0/w")},
    ),
    "a dimension that the base between has not": (
        {"leaf": abstract(8)}, [("base", P("fsdp", "tp"))],
        [sr.Companion("leaf$", "mid", dims=(7,)), sr.Companion("mid$", "base", dims=(0, ...))], {"leaf": (P(), "base")},
    ),
    "a base that no rule meets": (ONE, FOLLOWER, [TO_NOTHING], {"follower": (P("fsdp"), "follower")}),
    "a base that is not in the tree": (ONE, FOLLOWER, [TO_BASE], {"follower": (P("tp"), "base")}),
    "the first companion counts": (ONE, FOLLOWER, [TO_NOTHING, TO_BASE], {"follower": (P("fsdp"), "follower")}),
    "a record for another rank is none": (
        ONE, FOLLOWER, [replace(TO_NOTHING, dims=(0, 1)), TO_BASE], {"follower": (P("tp"), "base")}),
    "a leaf that no rule matches, too small for its base's": (
        ONE, sr.Rules(FOLLOWER[:1], min_size=9), [TO_BASE], {"follower": (P(), "base")}),
    "a leaf too small for its base's rule": (ONE, sr.Rules(FOLLOWER, min_size=9), [TO_BASE], {"follower": (P(), "follower")}),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLLOWING)
def test_leaves_follow_the_rule_of_a_base(case):
    tree, rules, companions, expected = FOLLOWING[case]
    plan = sr.plan(tree, rules, SIZES, companions=companions)
    assert {path: (P(*plan.explain(path).kind.spec), plan.explain(path).source) for path in expected} == expected
    moments = plan.for_optimizer(jax.eval_shape(optax.adam(1e-3).init, tree))
    assert moments.specs()[0].mu == plan.specs()
    assert {path: moments.explain(f"0/mu/{path}").source for path in expected} == {
        path: source for path, (_, source) in expected.items()
    }


def test_a_stack_below_itself_has_no_rule():
    tree = {"layers": {"w": abstract(4, 8)}}
    twice = sr.plan(tree, [("layers/0/0/w", P("tp"))], SIZES, companions=[sr.stacked("layers")])
    assert twice.kinds[0].status == "unmatched"
    with pytest.raises(ValueError, match=r"layer is 'blocks/0', and at is the root: .*Companion"):
        sr.stacked("", "blocks/0")


NAMES = [
    # (leaf, shape, base, spec on a mesh that divides all)
    ("q/lora_a", (64, 16), "q/kernel", ("in", None)),
    ("q/lora_b", (16, 64), "q/kernel", (None, "out")),
    ("q/lora/lora_a/value", (64, 16), "q/kernel/value", ("in", None)),
    ("q/lora_A/kernel", (64, 16), "q/kernel", ("in", None)),
    ("q/kernel_lora_a/value", (64, 16), "q/kernel/value", ("in", None)),
    ("q/w_proj_lora_b", (16, 2, 64), "q/w_proj", (None, "in", "out")),
    ("q.lora_A.weight", (16, 64), "q.weight", (None, "in")),
    ("q.lora_A.default.weight", (16, 64), "q.weight", (None, "in")),
    ("q/lora_B/default/weight", (64, 16), "q/weight", ("out", None)),
    ("q.lora_magnitude_vector.default.weight", (64,), "q.weight", ("out",)),
    ("e.lora_embedding_A.default", (16, 64), "e.weight", (None, "out")),
    ("e.lora_embedding_B", (64, 16), "e.weight", ("in", None)),
    ("q.weight_scale_inv", (8, 4), "q.weight", ("out", "in")),
    ("q.weight_scale", (64, 1), "q.weight", ("out", None)),
    ("q.weight_scale", (64,), "q.weight", ("out",)),
    ("q.weight_packed", (64, 8), "q.weight", ("out", "in")),
    ("q.qweight", (8, 64), "q.weight", ("in", "out")),
    ("q.qzeros", (4, 8), "q.weight", ("in", "out")),
    ("q.scales", (4, 64), "q.weight", ("in", "out")),
    ("q.g_idx", (64,), "q.weight", ("in",)),
    ("m/down_proj_blocks", (4, 64, 4, 16), "m/down_proj", ("expert", "out", "in", None)),
    ("m/down_proj_scales", (4, 64, 4), "m/down_proj", ("expert", "out", "in")),
    ("q/kernel/array/qvalue/value", (64, 64), "q/kernel/value", ("in", "out")),
    ("q/kernel/array/scale", (1, 64), "q/kernel", (None, "out")),
    ("q/kernel_scale", (64,), "q/kernel", ("out",)),
    ("q/kernel_scale", (1, 64), "q/kernel", (None, "out")),
]


@pytest.mark.parametrize(("leaf", "shape", "base", "spec"), NAMES)
def test_tables(leaf, shape, base, spec):
    rules = [
        ("kernel(/value)?$", P("in", "out")),
        (r"[./]weight$", P("out", "in")),
        (r"_proj$", P("expert", "in", "out")),
        (".*", P()),
    ]
    mesh = {"in": 2, "out": 4, "expert": 2}
    tree = {leaf: abstract(*shape)}
    plan = sr.plan(tree, rules, mesh, companions=(*sr.LORA, *sr.QUANTIZED))
    assert plan.sources == [base]
    assert plan.specs()[leaf] == P(*spec)
    assert plan.explain(leaf).tried[plan.kinds[0].rule].outcome == "wins"


# What qwix 0.1.8 makes of these weights: nnx.Linear, LinearGeneral in both directions, a square
# one, a convolution, and einsums BD,NDH->BNH, BNH,NHD->BD and (of experts) ECD,EDF->ECF.
QWIX = [
    # (weight, a, b, spec of a, spec of b), the weight's dimensions cut by x, y and z
    ((32, 64), (32, 4), (4, 64), ("x", None), (None, "y")),
    ((64, 8, 16), (64, 4), (4, 128), ("x", None), (None, "y")),
    ((8, 16, 32), (128, 4), (4, 32), ("x", None), (None, "z")),
    ((64, 64), (64, 4), (4, 64), ("x", None), (None, "y")),
    ((6, 32, 48), (6, 32, 4), (4, 48), ("x", "y", None), (None, "z")),
    ((2, 32, 8), (32, 4), (4, 2, 8), ("y", None), (None, "x", "z")),
    ((2, 8, 32), (2, 8, 4), (4, 32), ("x", "y", None), (None, "z")),
    ((6, 32, 48), (6, 32, 4), (6, 4, 48), ("x", "y", None), ("x", None, "z")),
]


@pytest.mark.parametrize(("weight", "a", "b", "of_a", "of_b"), QWIX)
def test_the_rank_of_qwixs_lora_is_not_cut(weight, a, b, of_a, of_b):
    """Nor on stacks: the weight of a layer is not in the tree, but its stack says which shape it has."""
    mesh, shapes = {"x": 2, "y": 2, "z": 2}, {"w": weight, "w_lora_a": a, "w_lora_b": b}
    rules = [("^h/(0/)?w$", P("x", "y", "z"))]
    for front, companions in (((), sr.LORA), ((5,), (sr.stacked("h"), *sr.LORA))):
        tree = {"h": {name: abstract(*front, *shape) for name, shape in shapes.items()}}
        specs, none = sr.plan(tree, rules, mesh, companions=companions).specs()["h"], [None] * len(front)
        assert (specs["w_lora_a"], specs["w_lora_b"]) == (P(*none, *of_a), P(*none, *of_b))


def test_combined_companions_fall_back_one_by_one():
    """To the rule of the kernel, or else that of a single layer's factor, or else the leaf's own."""
    tree = {"layers": {"q": {"lora_a": abstract(4, 64, 8)}}}
    rules = [("layers/0/q/kernel", P("fsdp")), ("layers/0/q/lora", P(None, "tp")), ("^layers/q", P("dp"))]
    for first, spec, counts in (
        (0, P(None, "fsdp", None), ""),
        (1, P(None, None, "tp"), "but no rule meets its base layers/0/q/kernel, so that of"),
        (2, P("dp", None, None), "but no rule meets its base layers/0/q/kernel, so its own counts"),
    ):
        plan = sr.plan(tree, rules[first:], SIZES, companions=[sr.stacked("layers"), *sr.LORA])
        assert plan.specs()["layers"]["q"]["lora_a"] == spec
        assert counts in str(plan.explain("layers/q/lora_a"))
        warned = [one.message for one in plan.check() if one.kind == "companion"]
        assert ["should follow a rule for 'layers/0/q/kernel'" in text for text in warned] == [True] * bool(counts)


def test_other_rules_leave_companions_out():
    tree, other = {"layers": {"w": abstract(4, 8, 8)}}, [("w", P(None, "tp"))]
    rules = [("layers/0/w", P("fsdp", "tp"))]
    plan = sr.plan(tree, rules, SIZES, companions=[sr.stacked("layers")]).with_rules(other)
    assert plan.specs() == sr.plan(tree, other, SIZES).specs() == {"layers": {"w": P(None, "tp", None)}}


def test_the_moment_of_a_kernel_was_replicated_where_a_module_is_called_as_a_field():
    """`mu/Dense_0/kernel` of the state ends in the path of another parameter, of a module `mu`."""
    params = {"Dense_0": {"kernel": abstract(128, 512)}, "mu": {"Dense_0": {"kernel": abstract(512, 256)}}}
    plan = sr.plan(params, [("kernel", ("fsdp", "tp"))], {"fsdp": 2, "tp": 2})
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    moments = plan.for_optimizer(state).specs()[0]
    whole = plan.for_optimizer({"params": params, "opt_state": state}).specs()
    assert moments.mu == moments.nu == whole["opt_state"][0].mu == plan.specs()


AXES = {"up": P("fsdp", "tp"), "down": P("tp", "fsdp")}
RULES_OF_AXES = {
    "specs": None,
    "paths": sr.Rules([("up", (None, "tp")), (".*", "tp")], optional_axes=["fsdp"]),
    "names": sr.LogicalRules([("fsdp", "fsdp"), ("tp", "tp")]),
}


@pytest.mark.parametrize("by", RULES_OF_AXES)
def test_optimizer_sharding_of_flax_was_undone(by):
    """A state whose Variables say other axes than the parameters' was cut as the parameters."""
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            for name, of_moments in AXES.items():
                own = tuple(axis if axis == "tp" else None for axis in of_moments)
                more = {"out_sharding": own, "optimizer_sharding": tuple(of_moments)}
                setattr(self, name, nnx.Param(jnp.zeros((8, 8)), eager_sharding=False, **more))

    def state_of(tx):
        return nnx.state(nnx.eval_shape(lambda: nnx.Optimizer(Model(), tx, wrt=nnx.Param)))

    state = state_of(optax.adam(1e-3))
    params = nnx.state(nnx.eval_shape(Model))
    rules = RULES_OF_AXES[by] or nnx.get_partition_spec(params)
    plan = sr.plan(params, rules, {"fsdp": 2, "tp": 2})
    assert P(*plan.explain("*up*").kind.spec) == P(None, "tp")
    derived = plan.for_optimizer(state)
    for moment, name in itertools.product(["mu", "nu"], AXES):
        kind = derived.explain(f"*{moment}/{name}*").kind
        assert P(*kind.spec) == AXES[name]
        assert kind.origin == f"the axes that the state itself names: {tuple(AXES[name])}"
    # Of a factored moment they say the axes of the parameter's dimensions, not of its own.
    factored = plan.for_optimizer(state_of(optax.scale_by_factored_rms(min_dim_size_to_factor=2)))
    assert "(factored moment)" in factored.explain("*v_row/up*").kind.origin
    assert "the rule says" not in str(derived.explain("*mu/up*"))
    # An axis that the mesh lacks is an error as in any spec.
    lacking = derived.on_mesh({"tp": 2})
    assert (lacking.explain("*mu/up*").kind.status == "misfit") == (by != "paths")
    errors = [one.kind for one in lacking.check() if one.level == "error"]
    assert errors == ([] if by == "paths" else ["unknown-axis"])


def test_rules_of_parameters_were_dead_for_a_state():
    """Low-rank moments follow no parameter, so that no rule matched a leaf of the state."""
    leaf = jax.ShapeDtypeStruct((8192, 8192), "float32")
    plan = sr.plan({"a": {"kernel": leaf}}, [("a/kernel", ("fsdp", "tp"))], {"fsdp": 2, "tp": 2})
    low = {"mu": {"a": {"kernel": jax.ShapeDtypeStruct((8192, 64), "float32")}}}
    assert not [one for one in plan.for_optimizer(low).check() if one.kind == "dead"]
