"""`verify` of small training and decoding steps: each with a fault, and without it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.plans import shard_bytes

LARGE = 2**12
PARAMS = {
    "embed": jax.ShapeDtypeStruct((512, 64), "float32"),
    "layers": {
        "up": jax.ShapeDtypeStruct((3, 64, 256), "float32"),
        "down": jax.ShapeDtypeStruct((3, 256, 64), "float32"),
    },
}
RULES = [("embed", P("fsdp", "tp")), ("up", P(None, "fsdp", "tp")), ("down", P(None, "tp", "fsdp"))]


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))


@pytest.fixture(scope="module")
def plan(mesh):
    return sr.plan(PARAMS, RULES, mesh)


@pytest.fixture(scope="module")
def loss(mesh):
    def cut(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def loss(params, tokens, hidden="tp"):
        def layer(x, w):
            h = cut(jnp.tanh(x @ w["up"]), "fsdp", None, hidden)
            return cut(x + h @ w["down"], "fsdp"), None

        x = cut(params["embed"][tokens], "fsdp")
        return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] ** 2)

    return loss


def shape(mesh, dims, *spec, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))


def descend(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def warnings(findings):
    """(kind, paths) of what is a warning or worse."""
    return [(one.kind, one.paths) for one in findings.at_least("warning")]


# Donation


@pytest.fixture(scope="module")
def compiled_step(mesh, plan, loss):
    """compiled_step(donate, function): a step, or what has a result like the parameters."""

    def step(params, tokens):
        return descend(params, jax.grad(loss)(params, tokens))

    def compiled(donate, function=step):
        jitted = jax.jit(function, donate_argnums=donate, out_shardings=plan.shardings())
        tokens = shape(mesh, (16, 32), "fsdp", dtype="int32")
        return jitted.lower(plan.abstract(), tokens).compile()

    return compiled


@pytest.mark.parametrize("outputs", ["planned", "alike"])
def test_a_state_that_is_not_donated(compiled_step, plan, outputs):
    planned = plan if outputs == "planned" else None
    findings = sr.verify(compiled_step(()), (plan, None), planned, large=LARGE)
    ((kind, paths),) = warnings(findings)
    assert kind == "donation"
    assert set(paths) == {"inputs/0/embed", "inputs/0/layers/up", "inputs/0/layers/down"}
    finding = findings.at_least("warning")[0]
    assert finding.bytes == sum(shard_bytes(plan))
    assert "the old and the new ones take" in finding.message
    assert "donate_argnums=0" in finding.fix
    assert not warnings(sr.verify(compiled_step(()), (plan, None), planned))  # it is small
    assert not warnings(sr.verify(compiled_step(0), (plan, None), planned, large=LARGE))


def test_gradients_are_no_state_to_donate(compiled_step, plan, loss):
    compiled = compiled_step((), jax.grad(loss))
    assert not warnings(sr.verify(compiled, (plan, None), plan, large=LARGE))


def test_a_keyword_is_donated_by_its_name(mesh):
    compiled = (
        jax.jit(lambda *, state: {"w": state["w"] + 1}).lower(state={"w": shape(mesh, (64, 64), "fsdp")}).compile()
    )
    (finding,) = sr.verify(compiled, ({"state": P("fsdp")},), large=LARGE // 4)
    assert "donate_argnames='state'" in finding.fix


@pytest.mark.parametrize("donate", [(), 1])
def test_a_cache_of_scanned_layers_that_is_not_donated(mesh, donate):
    weights = {name: shape(mesh, (3, 64, 64)) for name in "qkv"}
    cut = (None, "fsdp", None, "tp")
    cache = {name: shape(mesh, (3, 8, 128, 64), *cut) for name in "kv"}

    def decode(weights, cache, x, position):
        def layer(x, of_layer):
            w, old = of_layer
            new = {
                name: jax.lax.dynamic_update_slice(old[name], (x @ w[name])[:, None], (0, position, 0)) for name in "kv"
            }
            scores = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x @ w["q"], new["k"]))
            return x + jnp.einsum("bs,bsd->bd", scores, new["v"]), new

        return jax.lax.scan(layer, x, (weights, cache))

    out = (None, {name: NamedSharding(mesh, P(*cut)) for name in "kv"})
    x, position = shape(mesh, (8, 64), "fsdp"), shape(mesh, (), dtype="int32")
    jitted = jax.jit(decode, donate_argnums=donate, out_shardings=out)
    compiled = jitted.lower(weights, cache, x, position).compile()
    findings = sr.verify(compiled, (None, P(*cut), None, None), large=LARGE)
    told = [] if donate else [("donation", ("inputs/1/k", "inputs/1/v"))]
    assert warnings(findings) == told


def test_placeholders_that_are_not_used_are_not_told(mesh, plan, loss):
    """Such as optax's adafactor has; an array that is not used is told."""

    def step(params, state, tokens):
        return descend(params, jax.grad(loss)(params, tokens)), state["v"] * 0.9

    state = {"v": shape(mesh, (64,)), "v_row": shape(mesh, (1,)), "unused": shape(mesh, (64,))}
    tokens = shape(mesh, (16, 32), "fsdp", dtype="int32")
    compiled = jax.jit(step).lower(plan.abstract(), state, tokens).compile()
    (finding,) = sr.verify(compiled, (plan, P(), None))
    assert finding.paths == ("inputs/1/unused",)


# Gathers


def compiled_loss(mesh, plan, loss, *spec, **options):
    """The gradient of the loss, for tokens that come in with this spec."""
    tokens = shape(mesh, (16, 32), *spec, dtype="int32")
    jitted = jax.jit(jax.grad(partial(loss, **options)), out_shardings=plan.shardings())
    return jitted.lower(plan.abstract(), tokens).compile()


def test_tokens_that_come_in_whole_are_cut_by_what_is_made_of_them(mesh, plan, loss):
    whole, cut = (compiled_loss(mesh, plan, loss, *spec) for spec in ((), ("fsdp",)))
    for compiled in (whole, cut):
        findings = sr.verify(compiled, (plan, None), large=LARGE)
        assert any(one.kind == "gathered" for one in findings)
        assert not warnings(findings)


def test_tokens_that_come_in_whole_do_not_hide_an_axis_of_the_model(mesh, plan, loss):
    """Where the hidden activations are whole, the kernel that reads them is gathered over tp."""
    for spec in ((), ("fsdp",)):
        compiled = compiled_loss(mesh, plan, loss, *spec, hidden=None)
        findings = sr.verify(compiled, (plan, None), large=LARGE)
        told = {path for _, paths in warnings(findings) for path in paths}
        assert told == {"inputs/0/layers/down"}, spec
        assert any("do the same work" in one.message for one in findings)


@pytest.mark.parametrize("spec", [P(("fsdp", "tp"), None), P("fsdp", "tp")])
def test_a_table_of_rows_that_are_looked_up_is_in_no_product(mesh, spec):
    def looked_up(table, kernel, tokens):
        table = jax.lax.with_sharding_constraint(table, NamedSharding(mesh, P()))
        return jnp.tanh(table[tokens] @ kernel)

    def multiplied(table, kernel, x):
        table = jax.lax.with_sharding_constraint(table, NamedSharding(mesh, P()))
        return jnp.tanh(x @ table @ kernel)

    table, kernel = shape(mesh, (512, 64), *spec), shape(mesh, (64, 64), None, "tp")
    tokens = shape(mesh, (16, 32), "fsdp", dtype="int32")
    compiled = jax.jit(looked_up).lower(table, kernel, tokens).compile()
    findings = sr.verify(compiled, (spec, None, None), large=LARGE)
    assert [(one.level, one.kind) for one in findings] == [("info", "gathered")]
    x = shape(mesh, (64, 512), "fsdp")
    compiled = jax.jit(multiplied).lower(table, kernel, x).compile()
    assert warnings(sr.verify(compiled, (spec, None, None), large=LARGE))


# What decoding gathers


@pytest.mark.parametrize("tokens", [8, 2**14])
@pytest.mark.parametrize("spec", [None, P()])
def test_a_table_that_is_gathered_for_a_few_rows(mesh, spec, tokens):
    cut = partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, spec or P()))

    def rows(params, tokens):
        table = params["table"] if spec is None else cut(params["table"])
        return jnp.take(table, tokens, axis=0) * 2

    table = {"table": jax.ShapeDtypeStruct((2048, 64), "float32")}
    plan = sr.plan(table, [("table", "tp")], mesh)
    batch = shape(mesh, (tokens,), "fsdp", dtype="int32")
    compiled = jax.jit(rows).lower(plan.abstract(), batch).compile()
    findings = sr.verify(compiled, (plan, None), large=LARGE)
    # Many rows may cost more than the table.
    is_bad = spec is not None and tokens == 8
    assert [one.kind for one in findings.at_least("warning")] == ["unexpected"] * is_bad
    if is_bad:
        assert "a planned table, gathered for a few of its rows" in findings[0].message


@pytest.mark.parametrize("read", [P("fsdp"), P()])
def test_a_cache_that_is_gathered_where_it_is_read(mesh, read):
    cache = shape(mesh, (8, 256, 64), "fsdp")
    x = shape(mesh, (8, 1, 64), "fsdp")

    def decode(cache, x, position):
        cache = jax.lax.dynamic_update_slice(cache, x, (0, position, 0))
        keys = jax.lax.with_sharding_constraint(cache, NamedSharding(mesh, read))
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, keys))
        return cache, jnp.einsum("bts,bsd->btd", scores, keys)

    rows = NamedSharding(mesh, P("fsdp"))
    compiled = jax.jit(decode, donate_argnums=0, out_shardings=rows).lower(cache, x, 3).compile()
    findings = sr.verify(compiled, (P("fsdp"), P("fsdp"), None), P("fsdp"), large=LARGE)
    told = [one for one in findings.at_least("warning") if one.kind == "unexpected"]
    assert len(told) == (read == P())


# Arguments of `prove` that nothing places: one program for each, and a word about it

KERNEL = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
ARRAYS = {
    "numpy": np.ones((32, 64), "float32"),
    "float64 of numpy": np.ones((32, 64)),
    "jax": jnp.ones((32, 64), "float32"),
    "abstract": jax.ShapeDtypeStruct((32, 64), "float32"),
}


def squares(params, x, scale=1.0, rate=1.0):
    return jnp.mean((x * scale @ params["w"]) ** 2) * rate


def without_sharding(proof):
    return [one for one in proof.findings if "without a sharding" in one.message]


@pytest.mark.parametrize("is_on", [True, False])
def test_an_array_without_a_sharding_is_the_same_program_whatever_it_is(mesh, is_on):
    step, plan = jax.jit(squares), sr.plan(KERNEL, [("w", P("fsdp", "tp"))], mesh)
    proofs = [sr.prove(step, plan, x, on=mesh if is_on else None, time=True) for x in ARRAYS.values()]
    assert len({proof.compiled.as_text() for proof in proofs}) == 1
    for proof in proofs:
        (finding,) = without_sharding(proof)
        assert (finding.level, finding.kind, finding.paths) == ("warning", "input", ("inputs/1",))
        assert finding.bytes == 32 * 64 * 4
        assert "NamedSharding(plan.mesh, P('fsdp'))" in finding.fix


def test_what_has_a_sharding_is_no_finding_and_beside_it_the_rest_is_info(mesh):
    plan = sr.plan(KERNEL, [("w", P("fsdp", "tp"))], mesh)
    for spec in (("fsdp",), ()):
        assert not without_sharding(sr.prove(jax.jit(squares), plan, shape(mesh, (32, 64), *spec), on=mesh))
    x = shape(mesh, (32, 64), "fsdp")
    (finding,) = without_sharding(sr.prove(jax.jit(squares), plan, x, np.ones(64, "float32"), 0.1, on=mesh))
    assert (finding.level, finding.paths) == ("info", ("inputs/2",))


@pytest.mark.parametrize("name", ARRAYS)
def test_jit_itself_may_say_how_it_is_sharded(mesh, name):
    plan = sr.plan(KERNEL, [("w", P("fsdp", "tp"))], mesh)
    step = jax.jit(squares, in_shardings=(plan.shardings(), NamedSharding(mesh, P("fsdp"))))
    proof = sr.prove(step, plan, ARRAYS[name], on=mesh, time=True)
    assert proof.compiled.input_shardings[0][1].spec == P("fsdp")
    assert not without_sharding(proof)
