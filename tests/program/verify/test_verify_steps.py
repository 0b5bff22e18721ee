"""`verify` of small training and decoding steps: each with a fault, and without it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import compiled as support
from tests.support.compiled import devices
from tests.support.plans import shard_bytes

LARGE = 2**12
PARAMS = {
    "embed": jax.ShapeDtypeStruct((512, 64), "float32"),
    "layers": {
        name: jax.ShapeDtypeStruct(s, "float32") for name, s in {"up": (3, 64, 256), "down": (3, 256, 64)}.items()
    },
}
RULES = [("embed", P("fsdp", "tp")), ("up", P(None, "fsdp", "tp")), ("down", P(None, "tp", "fsdp"))]
MESH = devices(fsdp=4, tp=2)
PLAN = sr.plan(PARAMS, RULES, MESH)
cut, shape = partial(support.constrained, MESH), partial(support.array, MESH)
TOKENS = shape((16, 32), "fsdp", dtype="int32")


def loss(params, tokens, hidden="tp"):
    def layer(x, w):
        h = cut(jnp.tanh(x @ w["up"]), "fsdp", None, hidden)
        return cut(x + h @ w["down"], "fsdp"), None

    x = cut(params["embed"][tokens], "fsdp")
    return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] ** 2)


def descend(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def warnings(findings):
    """(kind, paths) of what is a warning or worse."""
    return [(one.kind, one.paths) for one in findings.at_least("warning")]


# Donation


def step(params, tokens):
    return descend(params, jax.grad(loss)(params, tokens))


def compiled_step(donate, function=step, tokens=TOKENS):
    """A step, or what has a result like the parameters."""
    jitted = jax.jit(function, donate_argnums=donate, out_shardings=PLAN.shardings())
    return jitted.lower(PLAN.abstract(), tokens).compile()


@pytest.mark.parametrize("planned", [PLAN, None], ids=["planned", "alike"])
def test_a_state_that_is_not_donated(planned):
    findings = sr.verify(compiled_step(()), (PLAN, None), planned, large=LARGE)
    ((kind, paths),) = warnings(findings)
    assert kind == "donation"
    assert set(paths) == {"inputs/0/embed", "inputs/0/layers/up", "inputs/0/layers/down"}
    finding = findings.at_least("warning")[0]
    assert finding.bytes == sum(shard_bytes(PLAN))
    assert "the old and the new ones take" in finding.message
    assert "donate_argnums=0" in finding.fix
    assert not warnings(sr.verify(compiled_step(()), (PLAN, None), planned))  # it is small
    assert not warnings(sr.verify(compiled_step(0), (PLAN, None), planned, large=LARGE))
    gradients = compiled_step((), jax.grad(loss))  # are no state
    assert not planned or not warnings(sr.verify(gradients, (PLAN, None), PLAN, large=LARGE))


def test_a_keyword_is_donated_by_its_name():
    compiled = jax.jit(lambda *, state: {"w": state["w"] + 1}).lower(state={"w": shape((64, 64), "fsdp")}).compile()
    (finding,) = sr.verify(compiled, ({"state": P("fsdp")},), large=LARGE // 4)
    assert "donate_argnames='state'" in finding.fix


@pytest.mark.parametrize("donate", [(), 1])
def test_a_cache_of_scanned_layers_that_is_not_donated(donate):
    weights = {name: shape((3, 64, 64)) for name in "qkv"}
    cut = (None, "fsdp", None, "tp")
    cache = {name: shape((3, 8, 128, 64), *cut) for name in "kv"}

    def decode(weights, cache, x, position):
        def layer(x, of_layer):
            w, old = of_layer
            new = {
                name: jax.lax.dynamic_update_slice(old[name], (x @ w[name])[:, None], (0, position, 0)) for name in "kv"
            }
            scores = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x @ w["q"], new["k"]))
            return x + jnp.einsum("bs,bsd->bd", scores, new["v"]), new

        return jax.lax.scan(layer, x, (weights, cache))

    out = (None, {name: NamedSharding(MESH, P(*cut)) for name in "kv"})
    x, position = shape((8, 64), "fsdp"), shape((), dtype="int32")
    jitted = jax.jit(decode, donate_argnums=donate, out_shardings=out)
    compiled = jitted.lower(weights, cache, x, position).compile()
    findings = sr.verify(compiled, (None, P(*cut), None, None), large=LARGE)
    assert warnings(findings) == ([] if donate else [("donation", ("inputs/1/k", "inputs/1/v"))])


def test_placeholders_that_are_not_used_are_not_told():
    """Such as optax's adafactor has; an array that is not used is told."""

    def step(params, state, tokens):
        return descend(params, jax.grad(loss)(params, tokens)), state["v"] * 0.9

    state = {"v": shape((64,)), "v_row": shape((1,)), "unused": shape((64,))}
    compiled = jax.jit(step).lower(PLAN.abstract(), state, TOKENS).compile()
    (finding,) = sr.verify(compiled, (PLAN, P(), None))
    assert finding.paths == ("inputs/1/unused",)


# Gathers


@pytest.mark.parametrize("tokens", [TOKENS, shape((16, 32), dtype="int32")], ids=["cut", "whole"])
@pytest.mark.parametrize("hidden", ["tp", None])
def test_tokens_that_come_in_whole_are_cut_by_what_is_made_of_them(tokens, hidden):
    """Where the hidden activations are whole, the kernel that reads them is gathered over tp."""
    compiled = compiled_step((), jax.grad(partial(loss, hidden=hidden)), tokens)
    findings = sr.verify(compiled, (PLAN, None), large=LARGE)
    assert any(one.kind == "gathered" for one in findings)
    told = {path for _, paths in warnings(findings) for path in paths}
    assert told == (set() if hidden else {"inputs/0/layers/down"})
    assert any("do the same work" in one.message for one in findings) == (not hidden)


@pytest.mark.parametrize("spec", [P(("fsdp", "tp"), None), P("fsdp", "tp")])
def test_a_table_of_rows_that_are_looked_up_is_in_no_product(spec):
    def verified(function, x):
        args = shape((512, 64), *spec), shape((64, 64), None, "tp"), x
        return sr.verify(jax.jit(function).lower(*args).compile(), (spec, None, None), large=LARGE)

    findings = verified(lambda table, kernel, tokens: jnp.tanh(cut(table)[tokens] @ kernel), TOKENS)
    assert [(one.level, one.kind) for one in findings] == [("info", "gathered")]
    assert warnings(verified(lambda table, kernel, x: jnp.tanh(x @ cut(table) @ kernel), shape((64, 512), "fsdp")))


# What decoding gathers


@pytest.mark.parametrize("tokens", [8, 2**14])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_table_that_is_gathered_for_a_few_rows(is_gathered, tokens):
    def rows(table, tokens):
        return jnp.take(cut(table) if is_gathered else table, tokens, axis=0) * 2

    plan = sr.plan(jax.ShapeDtypeStruct((2048, 64), "float32"), [("", "tp")], MESH)
    compiled = jax.jit(rows).lower(plan.abstract(), shape((tokens,), "fsdp", dtype="int32")).compile()
    findings = sr.verify(compiled, (plan, None), large=LARGE)
    is_bad = is_gathered and tokens == 8  # many rows may cost more than the table
    assert [one.kind for one in findings.at_least("warning")] == ["unexpected"] * is_bad
    if is_bad:
        assert "a planned table, gathered for a few of its rows" in findings[0].message


@pytest.mark.parametrize("read", [("fsdp",), ()])
def test_a_cache_that_is_gathered_where_it_is_read(read):
    def decode(cache, x, position):
        cache = jax.lax.dynamic_update_slice(cache, x, (0, position, 0))
        keys = cut(cache, *read)
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, keys))
        return cache, jnp.einsum("bts,bsd->btd", scores, keys)

    cache, x = shape((8, 256, 64), "fsdp"), shape((8, 1, 64), "fsdp")
    compiled = jax.jit(decode, donate_argnums=0, out_shardings=cache.sharding).lower(cache, x, 3).compile()
    findings = sr.verify(compiled, (P("fsdp"), P("fsdp"), None), P("fsdp"), large=LARGE)
    told = [one for one in findings.at_least("warning") if one.kind == "unexpected"]
    assert len(told) == (not read)


# Arguments of `prove` that nothing places: one program for each, and a word about it

KERNEL = sr.plan({"w": jax.ShapeDtypeStruct((64, 64), "float32")}, [("w", P("fsdp", "tp"))], MESH)
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
def test_an_array_without_a_sharding_is_the_same_program_whatever_it_is(is_on):
    proofs = [sr.prove(jax.jit(squares), KERNEL, x, on=MESH if is_on else None, time=True) for x in ARRAYS.values()]
    assert len({proof.compiled.as_text() for proof in proofs}) == 1
    for proof in proofs:
        (finding,) = without_sharding(proof)
        assert (finding.level, finding.kind, finding.paths) == ("warning", "input", ("inputs/1",))
        assert finding.bytes == 32 * 64 * 4
        assert "NamedSharding(plan.mesh, P('fsdp'))" in finding.fix


def test_what_has_a_sharding_is_no_finding_and_beside_it_the_rest_is_info():
    for spec in (("fsdp",), ()):
        assert not without_sharding(sr.prove(jax.jit(squares), KERNEL, shape((32, 64), *spec), on=MESH))
    x = shape((32, 64), "fsdp")
    (finding,) = without_sharding(sr.prove(jax.jit(squares), KERNEL, x, np.ones(64, "float32"), 0.1, on=MESH))
    assert (finding.level, finding.paths) == ("info", ("inputs/2",))


@pytest.mark.parametrize("name", ARRAYS)
def test_jit_itself_may_say_how_it_is_sharded(name):
    step = jax.jit(squares, in_shardings=(KERNEL.shardings(), NamedSharding(MESH, P("fsdp"))))
    proof = sr.prove(step, KERNEL, ARRAYS[name], on=MESH, time=True)
    assert proof.compiled.input_shardings[0][1].spec == P("fsdp")
    assert not without_sharding(proof)
