"""`solve`: rules and constraints, the best as compiled, and what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.memory import Refusal
from shardrules._program.solve import candidates
from shardrules._program.solve import solution as solving
from shardrules._program.solve.candidates import shortlist
from shardrules._program.solve.search import Search, best_of
from shardrules._program.solve.space import Space
from shardrules._program.solve.spread import Machine

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


def test_constraints_need_devices_with_the_axes_of_the_solution():
    solution = solved(FEW)
    for mesh in (None, devices(2, 4)):
        with pytest.raises(ValueError, match="and the solution is for fsdp=4,tp=2: give a mesh"):
            solution.constraints(mesh).__enter__()


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
    turned = [{name: tuple(sorted(map(other.get, axes))) for name, axes in row.items()} for row in found]
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
    read = candidates._with_answer
    done = []

    def interrupted(*args):
        if done:
            raise KeyboardInterrupt
        done.append(read(*args))
        return done[0]

    monkeypatch.setattr(candidates, "_with_answer", interrupted)
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


# The space, and what is refused


def layers(params, x):
    body = lambda x, w: (x + jnp.tanh(x @ w["a"]) @ w["b"], None)  # noqa: E731
    return jnp.sum(jax.lax.scan(body, x, params)[0] ** 2)


def train_layers(params, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(layers)(params, x))


STACKS = {"a": shape(4, 512, 2048), "b": shape(4, 2048, 512)}


def test_what_is_kept_is_so_in_loops_gradients_and_results():
    plan = sr.plan(STACKS, [("a", (None, "tp")), ("b", (None, None, "tp"))], {"fsdp": 4, "tp": 2})
    step = sr.trace(train_layers, plan, shape(2**16, 512))
    solution = sr.solve(step, {"fsdp": 4, "tp": 2}, hardware="v5p", keep=["inputs/0"])
    assert solution.specs["inputs/0/a"] == P(None, "tp")
    assert solution.specs["inputs/0/b"] == P(None, None, "tp")
    gathered = {s.axes for s in solution._spread.sent if s.kind == "all-gather" and s.trips == 4}
    assert gathered == {("tp",)}
    assert [sent for sent in solution._spread.sent if sent.trips == 1] == []


def test_what_does_not_fit_says_by_how_much():
    step = sr.trace(train_layers, STACKS, shape(2**16, 512))
    with pytest.raises(ValueError, match="nothing fits") as error:
        sr.solve(step, {"fsdp": 4}, hardware="v5p", hbm=10**8)
    assert re.search(r"needs .* on each device of fsdp=4, .* more than the 100 MB", str(error.value))
    with pytest.raises(ValueError, match="nothing fits of what was tried"):
        sr.solve(step, {"fsdp": 4}, hardware="v5p", hbm=10**8, time_limit=0)


def test_a_time_limit_gives_the_best_so_far_with_its_gap():
    whole = solved(64)
    assert (whole.gap, whole.bound) == (0, whole.seconds)
    ended = solved(64, time_limit=0)
    assert 0 < ended.bound <= whole.seconds <= ended.seconds
    assert ended.gap == pytest.approx(1 - ended.bound / ended.seconds)
    assert ended.gap > 0


def test_an_interrupt_gives_the_best_so_far(monkeypatch):
    def interrupt(self, most):
        raise KeyboardInterrupt

    monkeypatch.setattr("shardrules._program.solve.search.Search.prove", interrupt)
    assert solved(64).gap > 0


def test_what_is_not_modelled_is_whole_and_named():
    def call(params, x):
        y = jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return y @ params["up"]

    solution = sr.solve(sr.trace(call, TREE, shape(2**16, 512)), {"fsdp": 4}, hardware="v5p")
    assert solution.step.unmodelled == ("pure_callback (1 times)",)
    whole = solution._spread.arrays.local
    assert whole
    assert all(not any(solution._spread.target(n)) for n in whole)


def test_a_step_without_products_and_a_mesh_of_one_device_have_solutions():
    tree = {"w": shape(8, 8)}
    added = sr.trace(lambda params, x: params["w"] + x, tree, shape(8, 8))
    assert sr.solve(added, {"fsdp": 2}, hardware="v5p").seconds == 0
    alone = solved(4096, {"fsdp": 1})
    assert (alone.gap, alone.candidates[0].predicted.sent) == (0, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hardware": None}, "hardware: give the devices"),
        ({"keep": ["nowhere"]}, "keep: 'nowhere' is in no path"),
        ({"keep": "up"}, "keep is 'up' (a str); it must be a sequence"),
        ({"keep": [("up", P())]}, "keep[0] is ('up', "),
        ({"keep": ["("]}, "is no pattern"),
        ({"time_limit": float("nan")}, "time_limit"),
        ({"on": None}, "the step was traced without a mesh"),
        ({"step": sr.trace(lambda: 1.0)}, "traced without arrays among its arguments"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    step = sr.trace(train, TREE, shape(8, 512))
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        sr.solve(**{"step": step, "on": {"fsdp": 4}, "hardware": "v5p", **options})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 3}, "keep: inputs/1: dim 0 of size 8 is not divisible by fsdp=3"),
        ({"tp": 4}, "keep: inputs/1: the mesh has no axis 'fsdp'"),
    ],
)
def test_what_is_kept_must_be_possible_on_the_mesh(sizes, message):
    cut = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("fsdp",)), P("fsdp"))
    step = sr.trace(train, TREE, jax.ShapeDtypeStruct((8, 512), "float32", sharding=cut))
    with pytest.raises(ValueError, match=message):
        sr.solve(step, sizes, hardware="v5p", keep=["inputs/1"])


def test_what_only_code_by_device_makes_and_reads_is_not_chosen():
    """Such as what its forward pass saves for its backward pass, and constants in it."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))

    def local(w, x):
        return jnp.sin(jnp.sin(x @ w) @ w.T)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("fsdp")), out_specs=P("fsdp"))
    step = sr.trace(jax.grad(lambda w, x: jnp.sum(mapped(w, x))), shape(64, 128), shape(4096, 64))
    made = next(op for op, _ in step._equations.everything() if op.name == "shard_map").outputs
    solution = sr.solve(step, {"fsdp": 8}, hardware="v5p")
    assert len(made) > 2
    assert all(solution._spread.target(number)[0] == ("fsdp",) for number in made)
    assert [row.size for row in solution.choices[1:]] == [4096, 64, 128]
