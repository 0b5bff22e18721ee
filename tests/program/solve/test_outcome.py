"""What users take from a solution: rules, constraints, a comparison, and the compiler's proof."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.solve import proof as proving

AXES = ("fsdp", "tp")


def devices(fsdp=4, tp=2):
    return Mesh(np.array(jax.devices()[: fsdp * tp]).reshape(fsdp, tp), AXES)


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def mlp(params, x):
    return (jax.nn.relu(x @ params["up"]) @ params["down"]).sum()


def train(params, x):
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(mlp)(params, x))


TREE = {"up": shape(512, 2048), "down": shape(2048, 512)}
MANY, FEW = 2**18, 8
IN_PARTS = [("up$", P(None, AXES)), ("down$", P(AXES))]


def solved(rows=MANY, mesh=None, **options):
    mesh = mesh or devices()
    plan = sr.plan(TREE, [(".*", ())], mesh)
    step = sr.trace(jax.jit(train, donate_argnums=0), plan, shape(rows, 512))
    return sr.solve(step, mesh, hardware="v5p", **options)


def test_rules_say_what_the_plan_says():
    for rows in (MANY, FEW):
        solution = solved(rows)
        plan = sr.plan(TREE, solution.rules, devices())
        assert plan.specs() == solution.plan.specs()
    assert [spec for _, spec in solution.rules] == [(None, AXES), (AXES,)]


def test_heads_are_units_of_the_rules():
    def attend(params, x):
        q, k, v = ((x @ params[n]).reshape(*x.shape[:2], -1, 128) for n in "qkv")
        scores = jax.nn.softmax(jax.numpy.einsum("bthd,bshd->bhts", q, k))
        return jax.numpy.einsum("bhts,bshd->bthd", scores, v).reshape(x.shape) @ params["o"]

    tree = {name: shape(1024, 1024, dtype="bfloat16") for name in "qkvo"}
    plan = sr.plan(tree, [(".*", ())], {"tp": 4})
    step = sr.trace(attend, plan, shape(2, 64, 1024, dtype="bfloat16"))
    solution = sr.solve(step, {"tp": 4}, hardware="v5p")
    values = dict(solution.rules)
    assert values["^(q|k|v)$"].units == (1, 128)
    assert values["^o$"].units == (128,)
    assert solution.plan.kind("q").spec == P(None, "tp")


def test_arrays_with_logical_names_get_rules_of_paths():
    names = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    plan = sr.plan(TREE, sr.LogicalRules([("embed", None)]), devices(), names=names)
    step = sr.trace(train, plan, shape(FEW, 512))
    solution = sr.solve(step, devices(), hardware="v5p")
    assert dict(solution.rules) == {"^up$": (None, AXES), "down": (AXES,)}


def test_the_step_with_its_constraints_gives_the_same():
    solution = solved(FEW)
    params = jax.tree.map(lambda s: jax.numpy.ones(s.shape, s.dtype), TREE)
    x = jax.numpy.arange(FEW * 512.0).reshape(FEW, 512) % 3 - 1
    expected = jax.jit(train)(params, x)
    with solution.constraints() as step:
        result = step(params, x)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert result["up"].sharding.spec == P(None, AXES)


def test_a_solution_without_devices_takes_those_of_the_context_or_says_so():
    plan = sr.plan(TREE, [(".*", ())], {"fsdp": 4, "tp": 2})
    solution = sr.solve(sr.trace(train, plan, shape(FEW, 512)), hardware="v5p")
    with pytest.raises(ValueError, match="the solution is for fsdp=4,tp=2, of no devices"):
        solution.constraints().__enter__()
    with pytest.raises(ValueError, match="it is fsdp=2,tp=4, and the solution is for fsdp=4,tp=2"):
        solution.constraints(devices(2, 4)).__enter__()
    with solution.constraints(devices()) as step:
        assert callable(step)
    assert len(solution.prove(devices(), rounds=1).rounds) == 1


def test_without_a_plan_the_rules_are_of_the_first_argument():
    step = sr.trace(train, TREE, shape(FEW, 512), on=devices())
    solution = sr.solve(step, devices(), hardware="v5p")
    assert [spec for _, spec in solution.rules] == [(None, AXES), (AXES,)]


def test_xla_for_cpu_adds_gradients_up_whole_where_they_are_predicted_in_parts():
    (row,) = solved(MANY, keep=IN_PARTS, forbid=[("", "tp")]).prove(rounds=1).rounds
    (sent,) = row.sent
    up_and_down = 2 * 4 * 512 * 2048 * 7 / 8
    assert sent.compiled - sent.predicted == pytest.approx(up_and_down, rel=0.01)


@pytest.mark.parametrize("rows", [FEW])
def test_the_compiler_sends_what_was_predicted(rows):
    proof = solved(rows).prove()
    assert proof.is_close, proof
    assert len(proof.rounds) == 1
    (row,) = proof.rounds
    assert sum(s.compiled for s in row.sent) == sum(row.proof.program.sent.values())
    for sent in row.sent:
        assert sent.predicted == pytest.approx(sent.compiled, rel=0.01)


def test_what_the_compiler_sends_beyond_it_is_a_price(monkeypatch):
    """As if XLA sent a hundred times as much for the cut of the batch."""
    real, calls = proving._predicted, []

    def small(solution):
        calls.append(solution)
        return {key: size // 100 for key, size in real(solution).items()}

    monkeypatch.setattr(proving, "_predicted", small)
    monkeypatch.setattr(proving, "_seconds", lambda solution, proof: solution.time.total * 100)
    proof = solved(MANY).prove()
    assert len(proof.rounds) > 1
    assert [row.solution for row in proof.rounds] == calls
    first, second, *_ = proof.rounds
    assert first.solution.specs != second.solution.specs
    assert "where they differ" in str(first)
    assert "test_outcome.py" in str(first)
    assert f"best: round {proof.rounds.index(proof.best) + 1}" in str(proof)


def test_the_last_round_is_fsdp_alone_and_taken_if_the_compiler_does_that_better(monkeypatch):
    """As if XLA sent a hundred times as much wherever anything but rows is cut."""

    def cuts_more(solution):
        return any(row.axes and row.role not in ("batch", "stored") for row in solution.choices)

    def seconds(solution, proof):
        return solution.time.total * (10**4 if cuts_more(solution) else 1)

    is_close = property(lambda row: not cuts_more(row.solution))
    monkeypatch.setattr(proving.ProofRound, "is_close", is_close)
    monkeypatch.setattr(proving, "_seconds", seconds)
    solution = solved(FEW)
    assert cuts_more(solution)
    assert cuts_more(solution.prove(rounds=1).best.solution)
    proof = solution.prove()
    assert len(proof.rounds) > 1
    assert not cuts_more(proof.best.solution)
    assert proof.best.solution.time.total > solution.time.total


def test_what_the_compiler_refuses_is_solved_with_less_memory(monkeypatch):
    real, refused = proving.prove, []

    def prove(*args, **options):
        if not refused:
            refused.append(args)
            raise sr.OutOfMemory(required=100 * 10**9, available=95 * 10**9, buffers=())
        return real(*args, **options)

    monkeypatch.setattr(proving, "prove", prove)
    solution = solved(MANY)
    rooms = []
    again = solution.again
    counted = lambda **options: rooms.append(options) or again.func(*again.args, **options)  # noqa: E731
    solution = replace(solution, again=partial(counted, **again.keywords))
    proof = solution.prove()
    assert "the compiler refuses it" in str(proof.rounds[0])
    assert proof.best is not proof.rounds[0] or len(proof.rounds) == 1
    memory = solution.machine.hardware.memory_bytes
    assert rooms[0]["hbm"] == round(memory * solution.memory.peak / (100 * 10**9))


def test_axes_that_are_interchangeable_are_not_compiled_twice(monkeypatch):
    """What is blamed on one axis of a size would be the same program along another one."""
    monkeypatch.setattr(proving, "_blamed", lambda row: [("batch", "fsdp")])
    monkeypatch.setattr(proving, "_seconds", lambda solution, proof: 10**6)
    monkeypatch.setattr(proving.ProofRound, "is_close", property(lambda row: False))
    proof = solved(MANY, devices(2, 2)).prove(rounds=2)
    first, second = (
        [row.axes for row in each.solution.choices if row.role == "batch"] for each in proof.rounds
    )
    assert any(first)
    assert not any(second)


def test_rounds_are_one_to_three():
    with pytest.raises(ValueError, match="rounds is 4"):
        solved(FEW).prove(rounds=4)


def test_code_by_device_keeps_its_specs_and_is_named():
    mesh = devices()

    def local(x):
        return jax.lax.psum(x, "tp")

    def forward(params, x):
        x = x @ params["up"]
        spec = P("fsdp", "tp")
        return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P("fsdp"))(x)

    step = sr.trace(forward, sr.plan(TREE, [(".*", ())], mesh), shape(FEW, 512))
    solution = sr.solve(step, mesh, hardware="v5p")
    (text,) = solution.unconstrained
    assert "test_outcome.py" in text
    assert text.endswith(": shard_map")
    params = jax.tree.map(lambda s: jax.numpy.ones(s.shape, s.dtype), TREE)
    x = jax.numpy.ones((FEW, 512))
    with solution.constraints() as constrained:
        np.testing.assert_array_equal(constrained(params, x), jax.jit(forward)(params, x))
    assert solved(FEW).unconstrained == ()
