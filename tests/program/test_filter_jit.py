"""Steps of `equinox.filter_jit` that are compiled, proved and traced for shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.compiled import array, compiled_on, devices

eqx = pytest.importorskip("equinox", reason="equinox is not installed")

RULES = [("weight$", P("fsdp", "tp")), ("bias$", P())]


MESH = devices(fsdp=4, tp=2)
MODEL = eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(0))
ARRAYS, STATIC = eqx.partition(MODEL, eqx.is_array)
PLAN = sr.plan(ARRAYS, RULES, MESH)
SHAPES = eqx.combine(PLAN.abstract(), STATIC)
X = array(MESH, (16, 64), "fsdp")


def train(x, model, scale=1.0, spec=P("fsdp", "tp")):
    gradients = eqx.filter_grad(lambda model: scale * jnp.mean(jax.vmap(model)(x) ** 2))(model)
    arrays, static = eqx.partition(eqx.apply_updates(model, gradients), eqx.is_array)
    arrays = jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, spec if a.ndim == 2 else P()), arrays)
    return eqx.combine(arrays, static)


def kinds(findings):
    return {one.kind for one in findings.at_least("warning")}


def test_a_step_is_the_program_that_runs():
    """The text of what is compiled for shapes is that of what is compiled for arrays."""
    step = eqx.filter_jit(train, donate="all-except-first")
    held = eqx.combine(jax.device_put(jax.tree.map(jnp.copy, ARRAYS), PLAN.shardings()), STATIC)
    batch = jax.device_put(np.ones((16, 64), "float32"), X.sharding)
    with jax.set_mesh(MESH):
        there = step.lower(batch, held).compile().compiled
        held = step(batch, held)
    for args in ((X, SHAPES), (batch, held)):
        compiled = compiled_on(step, *args, on=MESH).compiled
        assert compiled.as_text() == there.as_text()
        assert compiled.memory_analysis().alias_size_in_bytes > 0


@pytest.mark.parametrize("donate", ["none", "all", "all-except-first", "warn"])
def test_a_right_step_has_no_warning_and_a_faulty_one_has(donate):
    def proved(step):
        jitted, planned = eqx.filter_jit(step, donate=donate), {"inputs": (None, PLAN), "outputs": PLAN}
        return sr.prove(jitted, X, SHAPES, on=MESH, large=1024, **planned).findings

    findings = proved(train)
    assert kinds(findings) == ({"donation"} if donate == "none" else set())
    if donate == "none":
        assert 'give filter_jit donate="' in findings[0].fix
    faulty = proved(lambda x, model: train(x, model, spec=P()))
    assert {"donation", "output"} <= kinds(faulty)


def test_constants_are_of_the_step():
    """A number is a constant, not an array, and options of filter_jit are those of the compiler."""
    step = eqx.filter_jit(train)
    texts = {scale: compiled_on(step, X, SHAPES, scale, on=MESH).compiled.as_text() for scale in (1.0, 3.0)}
    assert texts[1.0] != texts[3.0]
    wrong = eqx.filter_jit(train, compiler_options={"no_such_option": True})
    with pytest.raises(Exception, match="no_such_option"):
        compiled_on(wrong, X, SHAPES, on=MESH)


def test_arrays_of_the_function_itself_are_on_the_mesh():
    """They are arguments of what runs, and count."""
    compiled = compiled_on(eqx.filter_jit(MODEL), jax.ShapeDtypeStruct((64,), "float32"), on=MESH).compiled
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(ARRAYS))
    assert compiled.memory_analysis().argument_size_in_bytes == held + 4 * 64
    assert sr.prove(eqx.filter_jit(lambda x: jax.vmap(MODEL)(x)), X, on=MESH).program.mesh == MESH


def test_a_plan_of_constants_is_refused():
    whole = sr.plan(MODEL, RULES, MESH)
    text = r"argument 1 .*no arrays.*: activation, final_activation: give equinox\.combine\("
    for call in (sr.prove, sr.trace):
        with pytest.raises(ValueError, match=text):
            call(eqx.filter_jit(train), X, whole, on=MESH)
    held = eqx.combine(whole.abstract(), STATIC)  # as the message says
    step = eqx.filter_jit(train, donate="all")
    proof = sr.prove(step, X, held, on=MESH, inputs=(None, whole), outputs=whole, large=1024)
    assert not kinds(proof.findings)
    assert "hidden" in sr.trace(step, X, held, on=MESH).explain("layers/0/weight")


def test_a_step_that_calls_none_in_the_place_of_a_function_is_told():
    with pytest.raises(TypeError, match="'NoneType'") as caught:
        sr.prove(eqx.filter_jit(train), X, PLAN, on=MESH)
    assert "give equinox.combine(plan.abstract(), static)" in caught.value.__notes__[-1]
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        sr.prove(eqx.filter_jit(train), X, on=MESH)
    with pytest.raises(ZeroDivisionError):  # of the step itself
        sr.prove(eqx.filter_jit(lambda x: 1 / 0), X, on=MESH)


def test_a_method_is_refused():
    class Model(eqx.Module):
        w: jax.Array

        @eqx.filter_jit(donate="all")
        def train(self, x):
            return Model(self.w + (x @ self.w).sum())

    model = Model(jnp.ones((64, 64)))
    with pytest.raises(TypeError, match=r"a method of a module; give the class's"):
        sr.prove(model.train, X, on=MESH)
    plan = sr.plan(model, [("w", P("fsdp"))], MESH)
    assert sr.prove(Model.train, plan, X, on=MESH).memory.totals.arguments == 64 * 64 + 16 * 64
