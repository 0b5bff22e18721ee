"""`trace`: what a step does, by its jaxpr, whoever has written it; small programs with known answers, and what is refused."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.compiled import array, constrained, devices

SIZES = {"fsdp": 4, "tp": 2}


def shape(*sizes, dtype="float32", **sharding):
    return jax.ShapeDtypeStruct(sizes, dtype, **sharding)


OTHERS = [devices(fsdp=n) for n in (8, 4)]
CUT = [array(mesh, (64, 128), "fsdp") for mesh in OTHERS]


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


STACKS = {"q": (48, 24), "k": (48, 8), "v": (48, 8), "o": (24, 48), "gate": (48, 96), "up": (48, 96), "down": (96, 48)}
DECODER = {"embed": shape(80, 48), "head": shape(48, 80), "layers": {n: shape(2, *s) for n, s in STACKS.items()}}


def train(params, tokens):
    def loss(params):
        logits = decoder(params, tokens[:, :-1])
        of_next = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - of_next)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_roles_of_a_decoder_come_from_what_it_does():
    """And not from names: of the leaves without theirs they are the same."""
    leaves, treedef = jax.tree.flatten(DECODER)
    tokens, unnamed = shape(8, 17, dtype="int32"), lambda leaves, tokens: train(treedef.unflatten(leaves), tokens)
    step, other = sr.trace(jax.jit(train), DECODER, tokens), sr.trace(unnamed, leaves, tokens)
    counts, others = (sorted((r.role, r.size, len(r.arrays)) for r in s.dimensions) for s in (step, other))
    assert counts == others
    named = roles(step)
    for path, expected in {
        "0/embed": ["vocabulary", "model width"], "0/head": ["model width", "vocabulary"],
        "0/layers/gate": ["layers", "model width", "hidden"], "1": ["batch", "sequence"],
    }.items():  # fmt: skip
        assert [named[f"inputs/{path}", dim] for dim in range(len(expected))] == expected
    # 24 outputs of q are 2 x 3 x 4: split by a reshape, and named by attention.
    for name in "qo":
        text = "24: KV heads 2 x query heads of a KV head 3 x head size 4"
        assert text in step.explain(f"layers/{name}")
    assert "8: KV heads 2 x head size 4" in step.explain("layers/k")
    assert not step.unmodelled


def test_heads_in_code_by_device_are_heads():
    """Attention in `shard_map` names what its arguments consist of, as it does without."""
    mesh = devices(tp=2)
    rules = [("[qkv]$", (None, "tp", None)), ("o", ("tp", None, None))]
    tree = {name: shape(48, 6, 8) for name in "qkv"} | {"o": shape(6, 8, 48)}
    plan = sr.plan(tree, rules, mesh)

    def attend(w, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[name]) for name in "qkv")
        chances = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        return jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", chances, v), w["o"])

    def by_device(w, x):
        local = lambda w, x: lax.psum(attend(w, x), "tp")  # noqa: E731
        return jax.shard_map(local, mesh=mesh, in_specs=(plan.specs(), P()), out_specs=P())(w, x)

    whole, local = (
        [[roles(sr.trace(step, plan, shape(4, 16, 48)))[f"inputs/0/{w}", dim] for dim in range(3)]
         for w in "qo"]
        for step in (attend, by_device)
    )  # fmt: skip
    assert whole == local
    assert whole[0] == ["model width", "heads", "head size"]


@pytest.mark.parametrize("pad", [lambda e: e.at[0].set(0.0), lambda e: (8 * e).at[0].set(0.0)])
def test_a_table_in_which_a_row_is_set_to_zero_is_no_state(pad):
    loss = lambda params, tokens: jnp.mean((pad(params["embed"])[tokens] @ params["up"]) ** 2)  # noqa: E731
    step = sr.trace(jax.grad(loss), {"embed": shape(96, 16), "up": shape(16, 24)}, shape(8, 12, dtype="int32"))
    assert [roles(step)["inputs/0/embed", dim] for dim in (0, 1)] == ["vocabulary", "model width"]


def test_experts_are_those_that_kernels_are_apart_for():
    def moe(params, x):
        chances = jax.nn.softmax(x @ params["a"])
        weight, chosen = lax.top_k(chances, 2)
        mask = (jax.nn.one_hot(chosen, 8) * weight[..., None]).sum(1)
        inputs = jnp.einsum("te,td->etd", mask, x)
        return jnp.einsum("eth,ehd->td", jax.nn.relu(jnp.einsum("etd,edh->eth", inputs, params["b"])), params["c"])

    tree = {"a": shape(16, 8), "b": shape(8, 16, 24), "c": shape(8, 24, 16)}
    named = roles(sr.trace(moe, tree, shape(32, 16)))
    assert named["inputs/0/a", 1] == named["inputs/0/b", 0] == named["inputs/0/c", 0] == "experts"
    assert named["inputs/0/b", 2] == named["inputs/0/c", 1] == "hidden"
    assert named["inputs/0/b", 1] == "model width"


def test_rows_of_the_gradients_of_experts_are_the_batch():
    loss = lambda params, x, sizes: jnp.sum(lax.ragged_dot(x, params["up"], sizes) ** 2)  # noqa: E731
    args = {"up": shape(8, 32, 24)}, shape(64, 32), shape(8, dtype="int32")
    named = roles(sr.trace(jax.grad(loss), *args))
    assert [named[key] for key in (("inputs/0/up", 0), ("inputs/2", 0), ("inputs/1", 0))] == ["experts"] * 2 + ["batch"]


# Frameworks

ROWS, WIDTH, HIDDEN = 24, 64, 160


def mean_square(apply, x):
    return jnp.mean((x + apply(x)) ** 2)


def plain(adam):
    params = {"up": shape(WIDTH, HIDDEN), "down": shape(HIDDEN, WIDTH)}
    loss = lambda params, x: mean_square(lambda x: jax.nn.relu(x @ params["up"]) @ params["down"], x)  # noqa: E731

    def update(params, state, x):
        updates, state = adam.update(jax.grad(loss)(params, x), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    return jax.jit(update, donate_argnums=(0, 1)), (params, jax.eval_shape(adam.init, params))


def nnx_in_a_pair(adam):
    """`step((model, optimizer), x)`, which was traced as if it computed nothing."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    if not hasattr(nnx, "Pytree"):
        pytest.skip("modules of this flax are no trees for JAX")

    def make():
        rngs = nnx.Rngs(0)
        up, down = (nnx.Linear(*s, use_bias=False, rngs=rngs) for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
        model = nnx.Sequential(up, nnx.relu, down)
        return model, nnx.Optimizer(model, adam, wrt=nnx.Param)

    @nnx.jit
    def update(state, x):
        model, optimizer = state
        optimizer.update(model, nnx.grad(lambda model: mean_square(model, x))(model))

    return update, (nnx.eval_shape(make),)


def equinox(adam):
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    model = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, use_bias=False, use_final_bias=False, key=jax.random.key(0))

    @eqx.filter_jit
    def update(model, state, x):
        grads = eqx.filter_grad(lambda model: mean_square(jax.vmap(model), x))(model)
        updates, state = adam.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state

    return update, (model, adam.init(eqx.filter(model, eqx.is_array)))


@pytest.mark.parametrize("make", [plain, nnx_in_a_pair, equinox])
def test_a_step_is_read_alike_whoever_has_written_it(make):
    step, args = make(pytest.importorskip("optax", reason="optax is not installed").adam(1e-3))
    traced = sr.trace(step, *args, shape(ROWS, WIDTH))
    assert not traced.unmodelled
    classes = {(row.role, row.size): len(row.arrays) for row in traced.dimensions if row.size > 1}
    # Both kernels, both moments of each, and the inputs.
    assert classes == {("model width", WIDTH): 7, ("hidden", HIDDEN): 6, ("batch", ROWS): 1}
    products = sum(row.flops for row in traced.work if row.operation == "dot_general")
    # Forward, and the gradients of both kernels and of what is between them.
    assert products == 5 * 2 * ROWS * WIDTH * HIDDEN


# Arithmetic


def looped(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0]


def switched(w, x, i):
    return lax.switch(i, [lambda: x, lambda: x @ w, lambda: (x @ w) @ w])


def by_platform(x):
    return lax.platform_dependent(x, mosaic=lambda x: x @ x @ x, default=lambda x: x @ x)


def by_device(a, b):
    return jax.shard_map(jnp.matmul, mesh=OTHERS[0], in_specs=(P("fsdp"), P()), out_specs=P("fsdp"))(a, b)


batched = jax.custom_batching.custom_vmap(lambda w, x: x @ w)
batched.def_vmap(lambda size, cut, w, x: (x @ w, True))


def with_a_line_of_debugging(x):
    constrained(OTHERS[0], x @ x)
    return x * 2


@pytest.mark.parametrize(
    ("step", "args", "flops"),
    [
        (looped, [shape(5, 16, 16), shape(8, 16)], 5 * 2 * 8 * 16 * 16),
        # Of branches that which computes most, or that of any platform.
        (switched, [shape(64, 64), shape(8, 64), shape(dtype="int32")], 2 * 2 * 8 * 64 * 64),
        (by_platform, [shape(64, 64)], 2 * 64**3),
        (batched, [shape(16, 16), shape(8, 16)], 2 * 8 * 16 * 16),
        (by_device, [shape(32, 16), shape(16, 16)], 2 * 32 * 16 * 16),
        (with_a_line_of_debugging, [shape(64, 64)], 0),
    ],
)
def test_products_are_counted(step, args, flops):
    """In loops, branches, code by device, calls of any name; and not what nothing reads."""
    if step is by_platform and jax.__version_info__ < (0, 10):
        pytest.skip("branches of this JAX do not say of which platform they are")
    traced = sr.trace(step, *args)
    assert traced.unmodelled == ()
    assert traced.flops == flops == sum(row.flops for row in traced.work)
    assert flops == 0 or "summed over" in traced.explain("inputs/0")


def test_passes_are_told_apart():
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    step = sr.trace(jax.grad(lambda p, x: jnp.sum(lax.scan(layer, x, p)[0])), shape(5, 16, 16), shape(8, 16))
    products = Counter()
    for row in step.work:
        products[row.part] += row.flops * (row.operation == "dot_general")
    once = 5 * 2 * 8 * 16 * 16
    assert +products == {"forward": once, "recomputed": once, "backward": 2 * once}


def test_what_is_not_modelled_is_named():
    def step(x):
        y = jax.pure_callback(lambda a: a, x, x)
        return lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: c * 2, y)

    callback, loop = sr.trace(step, shape(8)).unmodelled
    assert callback == "pure_callback (1 times)"
    assert re.search(r"test_step.py:\d+: a loop whose length is not known", loop)


def test_a_kernel_counts_by_what_it_estimates():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    def step(x, **options):
        return pallas.pallas_call(double, out_shape=shape(8, 128), name="double", **options)(x)

    estimate = pallas.CostEstimate(flops=10**9, transcendentals=0, bytes_accessed=8192)
    known, unknown = (sr.trace(f, shape(8, 128)) for f in (partial(step, cost_estimate=estimate), step))
    assert (known.flops, unknown.flops) == (10**9, 0)
    assert unknown.unmodelled == known.unmodelled
    is_named = jax.__version_info__ >= (0, 10)  # older JAXs drop the name of a kernel
    assert ("pallas_call double" if is_named else "pallas_call") in known.unmodelled[0]


# The mesh, and what cannot be answered


def up(params, x):
    return x @ params["up"]


def plan_on(sizes):
    return sr.plan({"up": shape(128, 512), "down": shape(512, 128)}, [("", ())], sizes)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda p, s: s.explain("nothing"), KeyError, "is no argument's"),
        (lambda p, s: s.explain("downn"), KeyError, "down"),
        (lambda p, s: sr.trace(3), TypeError, "step is 3 .*give the function"),
        (lambda p, s: sr.trace(lambda x: 1 / 0, 1.0), ZeroDivisionError, "division"),
        (lambda p, s: sr.trace(up, p, plan_on({"fsdp": 8, "tp": 1})), ValueError, "several meshes"),
        (lambda p, s: sr.trace(jnp.add, *CUT), ValueError, "the arguments have several meshes: fsdp=8; fsdp=4"),
    ],
)
def test_what_cannot_be_answered_is_told(call, error, text):
    plan = plan_on(SIZES)
    with pytest.raises(error, match=text):
        call(plan, sr.trace(up, plan, shape(64, 128)))
    assert dict(sr.trace(jnp.add, CUT[0], CUT[0]).mesh.shape) == {"fsdp": 8}  # that of the arguments, of one mesh
