"""Arguments of `prove` that nothing places: one program for each, and a word about it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

PARAMS = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
ARRAYS = {
    "numpy": np.ones((32, 64), "float32"),
    "float64 of numpy": np.ones((32, 64)),
    "jax": jnp.ones((32, 64), "float32"),
    "abstract": jax.ShapeDtypeStruct((32, 64), "float32"),
}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))


@pytest.fixture(scope="module")
def plan(mesh):
    return sr.plan(PARAMS, [("w", P("fsdp", "tp"))], mesh)


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def told(proof):
    return [one for one in proof.findings if "without a sharding" in one.message]


@pytest.mark.parametrize("is_on", [True, False])
def test_an_array_without_a_sharding_is_the_same_program_whatever_it_is(plan, mesh, is_on):
    step = jax.jit(loss)
    proofs = {name: sr.prove(step, plan, x, on=mesh if is_on else None, time=True) for name, x in ARRAYS.items()}
    assert len({proof.compiled.as_text() for proof in proofs.values()}) == 1
    for proof in proofs.values():
        (finding,) = told(proof)
        assert (finding.level, finding.kind, finding.paths) == ("warning", "input", ("inputs/1",))
        assert finding.bytes == 32 * 64 * 4
        assert "NamedSharding(plan.mesh, P('fsdp'))" in finding.fix


def test_what_has_a_sharding_is_no_finding(plan, mesh):
    for spec in (P("fsdp"), P()):
        x = jax.ShapeDtypeStruct((32, 64), "float32", sharding=NamedSharding(mesh, spec))
        assert not told(sr.prove(jax.jit(loss), plan, x, on=mesh))


def test_beside_a_batch_that_is_sharded_it_is_info(plan, mesh):
    x = jax.ShapeDtypeStruct((32, 64), "float32", sharding=NamedSharding(mesh, P("fsdp")))

    def step(params, x, scale, rate):
        return loss(params, x * scale) * rate

    (finding,) = told(sr.prove(jax.jit(step), plan, x, np.ones(64, "float32"), 0.1, on=mesh))
    assert (finding.level, finding.paths) == ("info", ("inputs/2",))


@pytest.mark.parametrize("name", ARRAYS)
def test_jit_itself_may_say_how_it_is_sharded(plan, mesh, name):
    step = jax.jit(loss, in_shardings=(plan.shardings(), NamedSharding(mesh, P("fsdp"))))
    proof = sr.prove(step, plan, ARRAYS[name], on=mesh, time=True)
    assert proof.compiled.input_shardings[0][1].spec == P("fsdp")
    assert not told(proof)
