"""What users take from a solution: rules, constraints, and the best as compiled."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.memory import Refusal
from shardrules._program.solve import candidates
from shardrules._program.solve import solution as solving
from shardrules._program.solve.candidates import shortlist
from shardrules._program.solve.price import Machine
from shardrules._program.solve.search import Search, best_of
from shardrules._program.solve.space import Space

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
SIZES = {"fsdp": 4, "tp": 2}


def solved(rows=MANY, mesh=None, **options):
    mesh = mesh or SIZES
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
    solution = sr.solve(step, SIZES, hardware="v5p")
    assert dict(solution.rules) == {"^up$": (None, AXES), "down": (AXES,)}


def test_the_step_with_its_constraints_gives_the_same():
    solution = solved(FEW)
    params = jax.tree.map(lambda s: jax.numpy.ones(s.shape, s.dtype), TREE)
    x = jax.numpy.arange(FEW * 512.0).reshape(FEW, 512) % 3 - 1
    expected = jax.jit(train)(params, x)
    with solution.constraints(devices()) as step:
        result = step(params, x)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert result["up"].sharding.spec == P(None, AXES)


def test_constraints_need_devices_with_the_axes_of_the_solution():
    solution = solved(FEW)
    for mesh in (None, devices(2, 4)):
        with pytest.raises(ValueError, match="and the solution is for fsdp=4,tp=2: give a mesh"):
            solution.constraints(mesh).__enter__()


def test_without_a_plan_the_rules_are_of_the_first_argument():
    step = sr.trace(train, TREE, shape(FEW, 512), on=devices())
    solution = sr.solve(step, SIZES, hardware="v5p")
    assert [spec for _, spec in solution.rules] == [(None, AXES), (AXES,)]


def compiled(rows=FEW):
    """Solve for devices, whose compiler is asked about three layouts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "MOST", 3)
        return solved(rows, devices())


def test_bytes_and_memory_are_the_compilers():
    solution = compiled()
    with solution.constraints() as step:
        proof = sr.prove(step, solution.plan, shape_on(solution, "inputs/1", FEW, 512))
    assert solution.compiled.memory == proof.memory.peak
    assert solution.compiled.sent_in_all == sum(row.sent_at_least for row in proof.collectives)
    assert solution.program.collectives == proof.collectives
    (first,) = (row for row in solution.candidates if row.what == "the best by prediction")
    assert first.predicted.sent == pytest.approx(first.compiled.sent, rel=0.01)
    assert "as compiled, the best of" in solution.summary


def shape_on(solution, path, *sizes):
    sharding = NamedSharding(solution.mesh, solution.specs[path])
    return jax.ShapeDtypeStruct(sizes, "float32", sharding=sharding)


def test_fsdp_and_the_layout_of_the_program_are_among_those_compiled_and_what_is_the_same_once():
    rules = [("up", P(None, "tp")), ("down", P("tp"))]
    sizes = {"fsdp": 2, "tp": 2}
    step = sr.trace(jax.jit(train), sr.plan(TREE, rules, sizes), shape(FEW, 512))
    search = Search(Space(step, Machine(sr.Hardware.named("v5p"), sizes), 10**12), sizes)
    best, _ = best_of([search])
    entries = shortlist(best, [search])
    assert [row.what for row in entries][:3] == [
        "the best by prediction", "FSDP", "as in the program",
    ]  # fmt: skip
    assert 3 < len(entries) <= 10
    found = [row.assignment for row in entries]
    other = {"fsdp": "tp", "tp": "fsdp"}
    turned = [
        {name: tuple(sorted(map(other.get, axes))) for name, axes in row.items()} for row in found
    ]
    assert not [row for row, swapped in zip(found, turned, strict=True) if row != swapped in found]


def costs_as_if(monkeypatch, seconds):
    """Let compiled steps take other seconds, by the layout's predicted cost."""
    real = candidates._costs

    def costs(layout, program, peak):
        return real(layout, program, peak)._replace(seconds=seconds(layout.seconds.total))

    monkeypatch.setattr(candidates, "_costs", costs)


def test_the_answer_is_the_best_as_compiled_and_not_as_predicted(monkeypatch):
    costs_as_if(monkeypatch, lambda predicted: 1 / predicted)
    solution = compiled()
    least, *_, most = sorted(row.predicted.seconds for row in solution.candidates)
    assert solution.candidates[0].predicted.seconds == most > least
    assert solution.compiled.seconds == min(row.compiled.seconds for row in solution.candidates)
    assert solution.gap == 0  # of predictions
    plan = sr.plan(TREE, solution.rules, devices())
    assert plan.specs() == solution.plan.specs()


def answered(answer):
    """As a child that has ended."""
    return SimpleNamespace(answer=answer, close=lambda: None)


def test_a_layout_that_the_compiler_refuses_or_fails_at_is_no_answer(monkeypatch):
    real, asked = candidates.asked_compiler, []

    def refuse():
        return Refusal(200 * 10**9, 10**9, "")

    def crash():
        raise RuntimeError("the compiler has crashed, by signal 6. Its last words: none")

    def ask(lowered, mesh):
        asked.append(lowered)
        answer = dict(enumerate([refuse, crash], 1)).get(len(asked))
        return answered(answer) if answer else real(lowered, mesh)

    monkeypatch.setattr(candidates, "asked_compiler", ask)
    solution = compiled()
    assert not solution.candidates[0].refusal
    refusals = {row.what: row.refusal for row in solution.candidates if row.refusal}
    assert refusals == {
        "the best by prediction": "it needs 200 GB of 103 GB",
        "FSDP": "the compiler has crashed, by signal 6",
    }
    assert all(text in str(solution) for text in refusals.values())


def test_if_all_are_refused_layouts_that_need_less_are_compiled(monkeypatch):
    rooms = []

    def searched(searches):
        rooms.append(searches[0].space.hbm)
        return best_of(searches)

    monkeypatch.setattr(solving, "best_of", searched)
    refusal = Refusal(200 * 10**9, 10**9, "")
    monkeypatch.setattr(candidates, "asked_compiler", lambda *_: answered(lambda: refusal))
    with pytest.raises(ValueError, match="nothing fits: the compiler refuses all of the") as error:
        compiled(MANY)
    assert "FSDP on fsdp=4,tp=2: it needs 200 GB of 103 GB" in str(error.value)
    first, second = rooms
    assert second < 0.1 * first  # predictions are of some GB, and so much too low


def test_an_interrupt_takes_the_best_that_is_compiled(monkeypatch):
    read = candidates._read
    done = []

    def interrupted(*args):
        if done:
            raise KeyboardInterrupt
        done.append(read(*args))
        return done[0]

    monkeypatch.setattr(candidates, "_read", interrupted)
    solution = compiled()
    assert solution.candidates == (done[0].row,)


def test_a_mesh_without_devices_has_no_compiler():
    solution = solved(FEW)
    assert solution.compiled is solution.program is None
    assert len(solution.candidates) == 1
    assert "as compiled" not in str(solution)


def test_code_by_device_keeps_its_specs():
    mesh = devices()

    def local(x):
        return jax.lax.psum(x, "tp")

    def forward(params, x):
        x = x @ params["up"]
        spec = P("fsdp", "tp")
        return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P("fsdp"))(x)

    step = sr.trace(forward, sr.plan(TREE, [(".*", ())], mesh), shape(FEW, 512))
    solution = sr.solve(step, SIZES, hardware="v5p")
    params = jax.tree.map(lambda s: jax.numpy.ones(s.shape, s.dtype), TREE)
    x = jax.numpy.ones((FEW, 512))
    with solution.constraints(mesh) as constrained:
        np.testing.assert_array_equal(constrained(params, x), jax.jit(forward)(params, x))
