"""`trace`: what a step does, by its jaxpr; small programs with known answers, and what is refused."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

SIZES = {"fsdp": 4, "tp": 2}


def shape(*sizes, dtype="float32", **sharding):
    return jax.ShapeDtypeStruct(sizes, dtype, **sharding)


def planned(tree, rules, sizes=SIZES):
    return sr.plan(tree, rules, sizes)


def batch_on(plan, *sizes, spec=P("fsdp"), dtype="float32"):
    mesh = jax.tree.leaves(plan.abstract())[0].sharding.mesh
    return shape(*sizes, dtype=dtype, sharding=NamedSharding(mesh, spec))


def roles(step):
    return {array: row.role for row in step.dimensions for array in row.arrays}


# Dimensions and their roles


def decoder(params, tokens, kv_heads=2, size=4):
    """Two scanned layers of grouped attention and a gated MLP, with a table and a head."""
    x = params["embed"][tokens]

    def layer(x, w):
        rows, length, _ = x.shape
        q = (x @ w["q"]).reshape(rows, length, kv_heads, -1, size)
        k = (x @ w["k"]).reshape(rows, length, kv_heads, size)
        v = (x @ w["v"]).reshape(rows, length, kv_heads, size)
        chances = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k))
        mixed = jnp.einsum("bkgts,bskd->btkgd", chances, v).reshape(rows, length, -1)
        x = x + mixed @ w["o"]
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

    x, _ = lax.scan(layer, x, params["layers"])
    return x @ params["head"]


def decoder_params(layers=2, width=48, heads=6, kv_heads=2, size=4, hidden=96, words=80):
    stack = partial(shape, layers)
    return {
        "embed": shape(words, width),
        "head": shape(width, words),
        "layers": {
            "q": stack(width, heads * size),
            "k": stack(width, kv_heads * size),
            "v": stack(width, kv_heads * size),
            "o": stack(heads * size, width),
            "gate": stack(width, hidden),
            "up": stack(width, hidden),
            "down": stack(hidden, width),
        },
    }


def train(params, tokens):
    def loss(params):
        logits = decoder(params, tokens[:, :-1])
        of_next = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - of_next)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_roles_of_a_decoder_come_from_what_it_does():
    step = sr.trace(jax.jit(train), decoder_params(), shape(8, 17, dtype="int32"))
    by_array = roles(step)
    of = {
        path.removeprefix("inputs/0/"): [by_array[path, dim] for dim in range(rank)]
        for path, rank in {
            "inputs/0/embed": 2,
            "inputs/0/head": 2,
            "inputs/0/layers/gate": 3,
        }.items()
    }
    assert of == {
        "embed": ["vocabulary", "model width"],
        "head": ["model width", "vocabulary"],
        "layers/gate": ["layers", "model width", "hidden"],
    }
    # 24 outputs of q are 2 x 3 x 4: split by a reshape, and named by attention.
    text = step.explain("layers/q")
    assert "24: KV heads 2 x query heads of a KV head 3 x head size 4" in text
    assert "8: KV heads 2 x head size 4" in step.explain("layers/k")
    assert "24: KV heads 2 x query heads of a KV head 3 x head size 4" in step.explain("layers/o")
    assert by_array["inputs/1", 0] == "batch"
    assert not step.unmodelled


def test_heads_in_code_by_device_are_heads():
    """Attention in `shard_map` names what its arguments consist of, as it does without."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    rules = [("[qkv]$", (None, "tp", None)), ("o", ("tp", None, None))]
    tree = {name: shape(48, 6, 8) for name in "qkv"} | {"o": shape(6, 8, 48)}
    plan = sr.plan(tree, rules, mesh)
    specs = plan.specs()

    def attend(w, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[name]) for name in "qkv")
        chances = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        return jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", chances, v), w["o"])

    def by_device(w, x):
        local = lambda w, x: lax.psum(attend(w, x), "tp")  # noqa: E731
        return jax.shard_map(local, mesh=mesh, in_specs=(specs, P()), out_specs=P())(w, x)

    named = [
        {
            dim: roles(sr.trace(step, plan, shape(4, 16, 48)))[f"inputs/0/{array}", dim]
            for dim in range(3)
        }
        for step in (attend, by_device)
        for array in "qo"
    ]
    assert named[:2] == named[2:]
    assert named[0] == {0: "model width", 1: "heads", 2: "head size"}


def test_names_do_not_matter():
    """The same roles if nothing is called by what it is."""
    names = dict(zip(("q", "k", "v", "o", "gate", "up", "down"), "abcdefg", strict=True))

    def renamed(params, tokens):
        layers = {name: params["x"][letter] for name, letter in names.items()}
        return train({"embed": params["y"], "head": params["z"], "layers": layers}, tokens)

    params = decoder_params()
    layers = {letter: params["layers"][name] for name, letter in names.items()}
    tree = {"x": layers, "y": params["embed"], "z": params["head"]}
    tokens = shape(8, 17, dtype="int32")
    named, unnamed = sr.trace(train, params, tokens), sr.trace(renamed, tree, tokens)
    counts = [
        sorted((row.role, row.size, len(row.arrays)) for row in step.dimensions)
        for step in (named, unnamed)
    ]
    assert counts[0] == counts[1]


def test_experts_are_those_that_kernels_are_apart_for():
    def moe(params, x):
        chances = jax.nn.softmax(x @ params["a"])
        weight, chosen = lax.top_k(chances, 2)
        mask = (jax.nn.one_hot(chosen, 8) * weight[..., None]).sum(1)
        inputs = jnp.einsum("te,td->etd", mask, x)
        return jnp.einsum(
            "eth,ehd->td", jax.nn.relu(jnp.einsum("etd,edh->eth", inputs, params["b"])), params["c"]
        )

    tree = {"a": shape(16, 8), "b": shape(8, 16, 24), "c": shape(8, 24, 16)}
    by_array = roles(sr.trace(moe, tree, shape(32, 16)))
    assert {by_array["inputs/0/a", 1], by_array["inputs/0/b", 0], by_array["inputs/0/c", 0]} == {
        "experts"
    }
    assert by_array["inputs/0/b", 2] == by_array["inputs/0/c", 1] == "hidden"
    assert by_array["inputs/0/b", 1] == "model width"


def test_states_follow_their_parameters_by_flow():
    def update(state, x):
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))(state["p"])
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["zzz"], grads)
        return {"p": jax.tree.map(jnp.subtract, state["p"], moments), "zzz": moments}

    tree = {"w": shape(16, 24)}
    step = sr.trace(update, {"p": tree, "zzz": tree}, shape(8, 16))
    assert {("inputs/0/p/w", 1), ("inputs/0/zzz/w", 1)} in [
        set(row.arrays) for row in step.dimensions
    ]


def test_sizes_that_are_equal_are_not_one_dimension():
    step = sr.trace(lambda p, x: x @ p["w"], {"w": shape(16, 16)}, shape(8, 16))
    rows = {frozenset(row.arrays) for row in step.dimensions}
    assert frozenset({("inputs/0/w", 0), ("inputs/1", 1)}) in rows
    assert frozenset({("inputs/0/w", 1)}) in rows


def test_rows_of_the_gradients_of_experts_are_the_batch():
    def loss(params, x, sizes):
        return jnp.sum(lax.ragged_dot(x, params["up"], sizes) ** 2)

    sizes = shape(8, dtype="int32")
    step = sr.trace(jax.grad(loss), {"up": shape(8, 32, 24)}, shape(64, 32), sizes)
    named = roles(step)
    assert named["inputs/0/up", 0] == named["inputs/2", 0] == "experts"
    assert named["inputs/1", 0] == "batch"


def test_without_a_plan_the_mesh_is_that_of_the_arguments():
    mesh, other = (Mesh(np.array(jax.devices()[:n]), ("fsdp",)) for n in (8, 4))
    cut = [shape(64, 128, sharding=NamedSharding(m, P("fsdp"))) for m in (mesh, other)]
    x = shape(16, 64, sharding=NamedSharding(mesh, P("fsdp")))
    assert dict(sr.trace(lambda w, x: x @ w, cut[0], x).mesh.shape) == {"fsdp": 8}
    with pytest.raises(ValueError, match="the arguments have several meshes: fsdp=4; fsdp=8"):
        sr.trace(lambda w, x: x @ w, cut[1], x)


# Arithmetic


def test_loops_are_multiplied():
    def looped(p, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0]

    step = sr.trace(looped, shape(5, 16, 16), shape(8, 16))
    assert step.flops == 5 * 2 * 8 * 16 * 16
    assert [(row.operation, row.times) for row in step.work] == [("dot_general", 5)]


def test_passes_are_told_apart():
    def loss(p, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.sum(lax.scan(jax.checkpoint(layer), x, p)[0])

    step = sr.trace(jax.grad(loss), shape(5, 16, 16), shape(8, 16))
    products = {}
    for row in step.work:
        if row.operation == "dot_general":
            products[row.part] = products.get(row.part, 0) + row.flops
    once = 5 * 2 * 8 * 16 * 16
    if jax.__version_info__ >= (0, 10):
        assert products == {"forward": once, "recomputed": once, "backward": 2 * once}
    else:  # this JAX writes no more than "rematted_computation" into the jaxpr
        assert products == {"other": 3 * once, "recomputed": once}


def test_operations_of_a_whole_step_are_counted_as_by_xla():
    params, tokens = decoder_params(layers=1), shape(8, 17, dtype="int32")
    step = sr.trace(train, params, tokens)
    cost = jax.jit(train).lower(params, tokens).cost_analysis()
    flops = (cost[0] if isinstance(cost, list) else cost)["flops"]
    assert step.flops == pytest.approx(flops, rel=0.01)


def test_of_branches_only_that_which_computes_most_is_counted():
    def step(w, x, i):
        return lax.switch(i, [lambda: x, lambda: x @ w, lambda: (x @ w) @ w])

    traced = sr.trace(step, shape(64, 64), shape(8, 64), shape(dtype="int32"))
    (products,) = [row for row in traced.work if row.operation == "dot_general"]
    assert (products.times, products.flops) == (2, 2 * 2 * 8 * 64 * 64)
    assert "summed over" in traced.explain("inputs/0")


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="branches of this JAX do not say of which platform they are",
)
def test_the_branch_of_a_platform_is_not_that_of_any():
    def step(x):
        return lax.platform_dependent(x, mosaic=lambda x: x @ x, default=lambda x: x + 1)

    traced = sr.trace(step, shape(64, 64))
    assert traced.flops == 64 * 64
    assert not traced.unmodelled


def test_calls_by_any_name_are_looked_into():
    double = jax.custom_batching.custom_vmap(lambda w, x: x @ w)
    double.def_vmap(lambda size, cut, w, x: (x @ w, True))
    traced = sr.trace(double, shape(16, 16), shape(8, 16))
    assert (traced.flops, traced.unmodelled) == (2 * 8 * 16 * 16, ())


def test_code_by_device_counts_on_all_devices():
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    double = jax.shard_map(lambda a, b: a @ b, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    assert sr.trace(double, shape(32, 16), shape(16, 16)).flops == 2 * 32 * 16 * 16


def test_what_is_not_modelled_is_named():
    def step(x):
        y = jax.pure_callback(lambda a: a, x, x)
        return lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: c * 2, y)

    told = sr.trace(step, shape(8)).unmodelled
    assert told[0] == "pure_callback (1 times)"
    assert "test_step.py" in told[1]
    assert "a loop whose length is not known" in told[1]


# What cannot be answered


MLP = {"up": shape(3, 128, 512), "down": shape(3, 512, 128)}


def multiplied(params, x):
    return x @ params["up"][0]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda p, s: s.explain("nothing"), KeyError, "is no argument's"),
        (lambda p, s: s.explain("downn"), KeyError, "down"),
        (lambda p, s: sr.trace(3), TypeError, "step is 3 .*give the function"),
        (lambda p, s: sr.trace(lambda x: 1 / 0, 1.0), ZeroDivisionError, "division"),
        (
            lambda p, s: sr.trace(lambda x, y: x, p, p.on_mesh({"fsdp": 8, "tp": 1})),
            ValueError,
            "several meshes",
        ),
    ],
)
def test_what_cannot_be_answered_is_told(call, error, text):
    plan = planned(MLP, [("", None)])
    with pytest.raises(error, match=text):
        call(plan, sr.trace(multiplied, plan, batch_on(plan, 64, 128)))


def test_what_nothing_reads_is_left_out():
    def step(x):
        lax.with_sharding_constraint(x @ x, P())  # a user's debugging line
        return x * 2

    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    plan = sr.plan({"x": shape(64, 64)}, [("x", P("fsdp"))], mesh)
    traced = sr.trace(lambda params: step(params["x"]), plan)
    assert traced.flops == 64 * 64


def test_a_batch_on_a_mesh_of_explicit_axes_is_of_the_plans_mesh():
    """`jax.sharding.AbstractMesh` has explicit axes unless told otherwise, and plans of sizes have not."""
    plan = planned(MLP, [("", None)])
    mesh = jax.sharding.AbstractMesh((4, 2), ("fsdp", "tp"))
    x = shape(64, 128, sharding=NamedSharding(mesh, P("fsdp")))
    step = sr.trace(multiplied, plan, x)
    assert step.flops == 2 * 64 * 128 * 512


def test_a_kernel_counts_by_what_it_estimates():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    def step(x, **options):
        return pallas.pallas_call(double, out_shape=shape(8, 128), name="double", **options)(x)

    estimate = pallas.CostEstimate(flops=10**9, transcendentals=0, bytes_accessed=8192)
    known = sr.trace(partial(step, cost_estimate=estimate), shape(8, 128))
    unknown = sr.trace(step, shape(8, 128))
    assert (known.flops, unknown.flops) == (10**9, 0)
    assert unknown.unmodelled == known.unmodelled
    assert "pallas_call double" in known.unmodelled[0]
