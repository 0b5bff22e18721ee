"""Steps of `equinox.filter_jit` that are compiled, proved and traced for shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.compiled import compiled_on

eqx = pytest.importorskip("equinox", reason="equinox is not installed")

RULES = [("weight$", P("fsdp", "tp")), ("bias$", P())]


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tp"))


@pytest.fixture
def model():
    return eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(0))


@pytest.fixture
def plan(model, mesh):
    return sr.plan(eqx.filter(model, eqx.is_array), RULES, mesh)


@pytest.fixture
def shapes(model, plan):
    """The model with shapes in the place of its arrays, and with its functions."""
    return eqx.combine(plan.abstract(), eqx.filter(model, eqx.is_array, inverse=True))


@pytest.fixture(scope="module")
def x(mesh):
    return jax.ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(mesh, P("fsdp")))


def train(x, model, scale=1.0, spec=P("fsdp", "tp")):
    gradients = eqx.filter_grad(lambda model: scale * jnp.mean(jax.vmap(model)(x) ** 2))(model)
    arrays, static = eqx.partition(eqx.apply_updates(model, gradients), eqx.is_array)
    arrays = jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, spec if a.ndim == 2 else P()), arrays)
    return eqx.combine(arrays, static)


def kinds(findings):
    return {one.kind for one in findings.at_least("warning")}


def test_a_step_is_the_program_that_runs(mesh, model, plan, shapes, x):
    """The text of what is compiled for shapes is that of what is compiled for arrays."""
    step = eqx.filter_jit(train, donate="all-except-first")
    arrays, static = eqx.partition(model, eqx.is_array)
    held = eqx.combine(jax.device_put(arrays, plan.shardings()), static)
    batch = jax.device_put(np.ones((16, 64), "float32"), x.sharding)
    with jax.set_mesh(mesh):
        there = step.lower(batch, held).compile().compiled
        held = step(batch, held)
    for args in ((x, shapes), (batch, held)):
        compiled = compiled_on(step, *args, on=mesh).compiled
        assert compiled.as_text() == there.as_text()
        assert compiled.memory_analysis().alias_size_in_bytes > 0


@pytest.mark.parametrize("donate", ["none", "all", "all-except-first", "warn"])
def test_a_right_step_has_no_warning_and_a_faulty_one_has(plan, shapes, mesh, x, donate):
    def proved(step):
        return sr.prove(
            eqx.filter_jit(step, donate=donate), x, shapes, on=mesh, inputs=(None, plan),
            outputs=plan, large=1024,
        ).findings  # fmt: skip

    findings = proved(train)
    assert kinds(findings) == ({"donation"} if donate == "none" else set())
    assert "14 of 15" not in findings.scope
    if donate == "none":
        assert "give filter_jit donate=" in findings[0].fix
    faulty = proved(lambda x, model: train(x, model, spec=P()))
    assert {"donation", "output"} <= kinds(faulty)


def test_constants_are_of_the_step(mesh, shapes, x):
    """A number is a constant, not an array, and options of filter_jit are those of the compiler."""
    step = eqx.filter_jit(train)
    texts = {scale: compiled_on(step, x, shapes, scale, on=mesh).compiled.as_text() for scale in (1.0, 3.0)}
    assert texts[1.0] != texts[3.0]
    wrong = eqx.filter_jit(train, compiler_options={"no_such_option": True})
    with pytest.raises(Exception, match="no_such_option"):
        compiled_on(wrong, x, shapes, on=mesh)


def test_arrays_of_the_function_itself_are_on_the_mesh(mesh, model, x):
    """They are arguments of what runs, and count."""
    step = eqx.filter_jit(lambda x: jax.vmap(model)(x))
    module = eqx.filter_jit(model)
    one = jax.ShapeDtypeStruct((64,), "float32")
    compiled = compiled_on(module, one, on=mesh).compiled
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    assert compiled.memory_analysis().argument_size_in_bytes == held + 4 * 64
    assert sr.prove(step, x, on=mesh).program.mesh == mesh


def test_a_plan_of_constants_is_refused(model, mesh, x):
    whole = sr.plan(model, RULES, mesh)
    text = r"argument 1 .*no arrays.*: activation, final_activation: give equinox\.combine\("
    for call in (sr.prove, sr.trace):
        with pytest.raises(ValueError, match=text):
            call(eqx.filter_jit(train), x, whole, on=mesh)
    held = eqx.combine(whole.abstract(), eqx.filter(model, eqx.is_array, inverse=True))  # as the message says
    step = eqx.filter_jit(train, donate="all")
    proof = sr.prove(step, x, held, on=mesh, inputs=(None, whole), outputs=whole, large=1024)
    assert not kinds(proof.findings)
    traced = sr.trace(step, x, held, on=mesh)
    assert "hidden" in traced.explain("layers/0/weight")


def test_a_step_that_calls_none_in_the_place_of_a_function_is_told(plan, mesh, x):
    with pytest.raises(TypeError, match="'NoneType'") as caught:
        sr.prove(eqx.filter_jit(train), x, plan, on=mesh)
    assert "give equinox.combine(plan.abstract(), static)" in caught.value.__notes__[-1]
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        sr.prove(eqx.filter_jit(train), x, on=mesh)
    with pytest.raises(ZeroDivisionError):  # of the step itself
        sr.prove(eqx.filter_jit(lambda x: 1 / 0), x, on=mesh)


def test_a_method_is_refused(mesh, x):
    class Model(eqx.Module):
        w: jax.Array

        @eqx.filter_jit(donate="all")
        def train(self, x):
            return Model(self.w + (x @ self.w).sum())

    model = Model(jnp.ones((64, 64)))
    with pytest.raises(TypeError, match=r"a method of a module; give the class's"):
        sr.prove(model.train, x, on=mesh)
    plan = sr.plan(model, [("w", P("fsdp"))], mesh)
    assert sr.prove(Model.train, plan, x, on=mesh).memory.totals.arguments == 64 * 64 + 16 * 64
