"""`solve`: rules and constraints, the best as compiled, and what is refused."""

import random
import re
from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.specs import Entries, entries_of, entries_of_cuts, entry_axes
from shardrules._base.text import seconds_shown
from shardrules._plan.suggest.draft import MOST_RULES
from shardrules._program.solve import candidates
from shardrules._program.solve import solution as solving
from shardrules._program.solve.candidates import shortlist
from shardrules._program.solve.search import Search, best_of
from shardrules._program.solve.solution import with_specs
from shardrules._program.verify import prove
from tests.support import models
from tests.support.compiled import devices

SIZES = {"fsdp": 4, "tp": 2}
MANY, FEW = 2**18, 8
HERE = devices(**SIZES)


def shape(*sizes, **options):
    return jax.ShapeDtypeStruct(sizes, "float32", **options)


TREE = {"up": shape(512, 2048), "down": shape(2048, 512)}


def mlp(params, x):
    return (jax.nn.relu(x @ params["up"]) @ params["down"]).sum()


def train(params, x):
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(mlp)(params, x))


def solved(rows=FEW, mesh=SIZES, **options):
    step = sr.trace(jax.jit(train, donate_argnums=0), sr.plan(TREE, [(".*", ())], mesh), shape(rows, 512))
    return sr.solve(step, mesh, hardware="v5p", **options)


# Rules


def test_arrays_with_logical_names_get_rules_of_paths():
    names = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    plan = sr.plan(TREE, sr.LogicalRules([("embed", None)]), HERE, names=names)
    solution = sr.solve(sr.trace(train, plan, shape(FEW, 512)), SIZES, hardware="v5p")
    assert dict(solution.rules) == {"^up$": (None, ("fsdp", "tp")), "down": (("fsdp", "tp"),)}
    assert sr.plan(TREE, solution.rules, HERE).specs() == solution.plan.specs()


def cuts_of(plan):
    """{path: the axes of each dimension}."""
    kinds = {path: plan.explain(path).kind for path in plan.paths}
    axes = {path: [*map(entry_axes, entries_of(kind.spec or ())), *[()] * 9] for path, kind in kinds.items()}
    return {path: tuple(axes[path][: len(kind.shape)]) for path, kind in kinds.items()}


def with_cuts(tree, cuts, mesh):
    specs = {path: Entries(entries_of_cuts(rows)) for path, rows in cuts.items()}
    return with_specs(sr.plan(tree, [(".*", ())], mesh), specs)[0]


@pytest.mark.parametrize("name", ["llama", "mamba", "gpt_oss"])
@pytest.mark.parametrize("mesh", [{"fsdp": 8, "tp": 4}, {"fsdp": 8, "ep": 4, "tp": 2}], ids=str)
def test_rules_give_all_leaves_the_cuts_of_another_plan(name, mesh):
    tree = getattr(models, name)()
    expected = cuts_of(sr.suggest(tree, mesh).plan)
    plan = with_cuts(tree, expected, mesh)
    assert cuts_of(plan) == expected
    assert len(plan.rules) <= MOST_RULES
    assert not plan.coverage.dead and not plan.coverage.shadowed  # noqa: PT018
    assert len(plan.rules.all_matches("~")) == 0


def test_many_specs_are_still_exact_where_paths_are_random():
    shuffle = random.Random(7)
    choices = [((), ()), (("fsdp",), ()), ((), ("tp",)), (("fsdp",), ("tp",)), (("tp",), ("fsdp",))]
    for _ in range(60):
        words = [shuffle.choice("abcdefg") * shuffle.randint(1, 3) for _ in range(12)]
        paths = [[*shuffle.choices(words, k=2), str(shuffle.randint(0, 3)), shuffle.choice(words)] for _ in words * 2]
        expected = {"/".join(path): shuffle.choice(choices) for path in paths}
        plan = with_cuts(dict.fromkeys(expected, models.array(64, 64)), expected, {"fsdp": 8, "tp": 4})
        assert cuts_of(plan) == expected


def test_what_rules_cannot_say_is_refused_with_the_leaf():
    tree = {"a": models.array(4, 64), "b": models.array(64, 64)}
    with pytest.raises(ValueError, match="'a': rules of the dialect eformer cannot give it"):
        with_cuts(tree, {"a": (("tp",), ()), "b": ((), ())}, {"tp": 8})


def test_constraints_need_devices_with_the_axes_of_the_solution():
    solution = solved()
    for mesh in (None, devices(fsdp=2, tp=4)):
        with pytest.raises(ValueError, match="and the solution is for fsdp=4,tp=2: give a mesh"):
            solution.constraints(mesh).__enter__()


# As compiled


@pytest.fixture
def few(monkeypatch):
    """Three layouts are compiled."""
    monkeypatch.setattr(candidates, "MOST", 3)


def test_bytes_and_memory_are_the_compilers(few):
    solution = solved(FEW, HERE)
    x = shape(FEW, 512, sharding=NamedSharding(solution.mesh, solution.specs["inputs/1"]))
    with solution.constraints() as step:
        proof = sr.prove(step, solution.plan, x)
    assert solution.compiled.memory == proof.memory.peak
    assert sum(solution.compiled.sent.values()) == sum(row.sent_at_least for row in proof.collectives)
    assert solution.program.collectives == proof.collectives
    (first,) = (row for row in solution.candidates if row.what == "the best by prediction")
    assert first.predicted.sent == pytest.approx(first.compiled.sent, rel=0.01)
    assert "as compiled, the best of" in solution.summary


@pytest.mark.parametrize("says", ["argument", "jit", "constraint"])
def test_fsdp_and_the_layout_of_the_program_are_among_those_compiled_and_what_is_the_same_once(says):
    sizes = {"fsdp": 2, "tp": 2}
    plan = sr.plan(TREE, [("up", P("fsdp", "tp")), ("down", P("tp", "fsdp"))], devices(fsdp=2, tp=2))
    cut = NamedSharding(plan.mesh, P("fsdp"))
    constrained = lambda params, x: train(params, jax.lax.with_sharding_constraint(x, cut))  # noqa: E731
    jitted = jax.jit(
        constrained if says == "constraint" else train, in_shardings=(None, cut if says == "jit" else None)
    )
    step = sr.trace(jitted, plan, shape(FEW, 512, **({"sharding": cut} if says == "argument" else {})))
    search = Search(step, sizes, sr.Hardware.named("v5p"), 10**12)
    entries = shortlist(best_of([search])[0], [search])
    assert [row.what for row in entries][:3] == ["the best by prediction", "FSDP", "as in the program"]
    own = search.space.of_program()
    assert own == entries[2].assignment in search.space.starts()
    cuts = [search.space.cuts(number, own) for number in step._equations.body.inputs]
    assert cuts == [(("tp",), ("fsdp",)), (("fsdp",), ("tp",)), (("fsdp",), ())]
    assert 3 < len(entries) <= 10
    other, chosen = {"fsdp": "tp", "tp": "fsdp"}, [row.assignment for row in entries]
    turned = [{name: tuple(sorted(map(other.get, axes))) for name, axes in row.items()} for row in chosen]
    assert not [row for row, swapped in zip(chosen, turned, strict=True) if row != swapped in chosen]


def test_the_answer_is_the_best_as_compiled_and_not_as_predicted(few, monkeypatch):
    real = candidates._costs
    monkeypatch.setattr(
        candidates, "_costs", lambda row, *args: real(row, *args)._replace(seconds=1 / row.seconds.total)
    )
    solution = solved(FEW, HERE)
    least, *_, most = sorted(row.predicted.seconds for row in solution.candidates)
    assert solution.candidates[0].predicted.seconds == most > least
    assert solution.compiled.seconds == min(row.compiled.seconds for row in solution.candidates)
    assert solution.gap == 0  # of predictions
    answer, *_ = solution.candidates
    row = next(line for line in str(solution).splitlines() if line.startswith(answer.what))
    assert all(seconds_shown(cost.seconds) in row for cost in (answer.compiled, answer.predicted))


def refuse():
    raise sr.OutOfMemory(200 * 10**9, 10**9, ())


def answered(answer):
    return SimpleNamespace(answer=answer, close=lambda: None)  # as a child that has ended


def test_a_layout_that_the_compiler_refuses_or_fails_at_is_no_answer(few, monkeypatch):
    crash = mock.Mock(side_effect=RuntimeError("the compiler has crashed, by signal 6. Its last words: none"))
    real, answers = prove.CompilerChild, iter(map(answered, (refuse, crash)))
    monkeypatch.setattr(prove, "CompilerChild", lambda *args: next(answers, None) or real(*args))
    solution = solved(FEW, HERE)
    assert not solution.candidates[0].refusal
    refusals = {row.what: row.refusal for row in solution.candidates if row.refusal}
    assert refusals == {
        "the best by prediction": "it needs 200 GB of 103 GB", "FSDP": "the compiler has crashed, by signal 6",
    }  # fmt: skip
    assert all(text in str(solution) for text in refusals.values())


def test_if_all_are_refused_layouts_that_need_less_are_compiled(few, monkeypatch):
    rooms = []
    monkeypatch.setattr(solving, "best_of", lambda searches, show: rooms.append(searches[0].hbm) or best_of(searches))
    monkeypatch.setattr(prove, "CompilerChild", lambda *_: answered(refuse))
    with pytest.raises(ValueError, match="nothing fits: the compiler refuses all of the") as error:
        solved(MANY, HERE)
    assert "FSDP on fsdp=4,tp=2: it needs 200 GB of 103 GB" in str(error.value)
    assert rooms[1] < 0.1 * rooms[0]  # predictions are of some GB, and so much too low


def test_an_interrupt_takes_the_best_that_is_compiled(few, monkeypatch):
    read, done = candidates._with_answer, []

    def interrupted(*args):
        if done:
            raise KeyboardInterrupt
        done.append(read(*args))
        return done[0]

    monkeypatch.setattr(candidates, "_with_answer", interrupted)
    assert solved(FEW, HERE).candidates == (done[0].row,)


def test_a_mesh_without_devices_has_no_compiler_and_candidates_as_predicted():
    solution = solved()
    assert solution.compiled is solution.program is None
    assert [row.what for row in solution.candidates][:2] == ["the best by prediction", "FSDP"]
    assert {row.compiled for row in solution.candidates} == {None}
    assert "as compiled" not in str(solution)


# The space, and what is refused


def layers(params, x):
    body = lambda x, w: (x + jnp.tanh(x @ w["a"]) @ w["b"], None)  # noqa: E731
    return jnp.sum(jax.lax.scan(body, x, params)[0] ** 2)


STACKS = {"a": shape(4, 512, 2048), "b": shape(4, 2048, 512)}


def test_what_does_not_fit_says_by_how_much_and_for_which_arrays():
    step = sr.trace(jax.grad(layers), STACKS, shape(2**16, 512))
    with pytest.raises(ValueError, match="nothing fits") as error:
        sr.solve(step, {"fsdp": 4}, hardware="v5p", hbm=10**8)
    text = r"needs .* on each device of fsdp=4, .* more than the 100 MB that .*\n  537 MB of float32\[.*\] .*/scan"
    assert re.search(text, str(error.value))


def test_an_interrupt_gives_the_best_so_far_with_its_gap(monkeypatch):
    whole = solved(64)
    assert (whole.gap, whole.bound) == (0, whole.seconds)

    monkeypatch.setattr(Search, "prove", mock.Mock(side_effect=KeyboardInterrupt))
    ended = solved(64)
    assert 0 < ended.bound <= whole.seconds <= ended.seconds
    assert ended.gap == pytest.approx(1 - ended.bound / ended.seconds)
    assert ended.gap > 0


def test_what_is_not_modelled_is_whole_and_named():
    def call(params, x):
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x) @ params["up"]

    solution = sr.solve(sr.trace(call, TREE, shape(2**16, 512)), {"fsdp": 4}, hardware="v5p")
    assert solution.step.unmodelled == ("pure_callback (1 times)",)
    spread = solution._layout.spread
    assert spread.space.local
    assert all(not any(spread.target(n)) for n in spread.space.local)


def test_a_step_without_products_and_a_mesh_of_one_device_have_solutions():
    added = sr.trace(lambda params, x: params["w"] + x, {"w": shape(8, 8)}, shape(8, 8))
    assert sr.solve(added, {"fsdp": 2}, hardware="v5p").seconds == 0
    alone = solved(4096, {"fsdp": 1})
    assert (alone.gap, alone.candidates[0].predicted.sent) == (0, {})


def test_of_branches_without_products_that_counts_which_does_something():
    """In which order they are written is no matter."""

    def looked_up(is_first, params, words, number):
        branches = [lambda: params["up"][words], lambda: jnp.zeros((4096, 2048))]
        return jax.lax.cond(number > 0, *branches[:: 1 if is_first else -1])

    args = TREE, jax.ShapeDtypeStruct((4096,), "int32"), jax.ShapeDtypeStruct((), "int32")
    seconds = [
        sr.solve(sr.trace(partial(looked_up, is_first), *args), {"tp": 8}, hardware="v5p").seconds
        for is_first in (True, False)
    ]
    assert seconds[0] == seconds[1] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hardware": None}, "hardware: give the devices"),
        ({"on": None}, "the step was traced without a mesh"),
        ({"step": sr.trace(lambda: 1.0)}, "traced without arrays among its arguments"),
        ({"on": sr.Topology("v5e:2x4")}, "hardware is 'v5p', and v5e:2x4 has v5e: leave it out"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    step = sr.trace(train, TREE, shape(8, 512))
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        sr.solve(**{"step": step, "on": {"fsdp": 4}, "hardware": "v5p", **options})


def test_what_only_code_by_device_makes_and_reads_is_not_chosen():
    """Such as what its forward pass saves for its backward pass, and constants in it; its specs stay."""
    mesh = devices(fsdp=8)

    def local(w, x):
        return jnp.sin(jnp.sin(x @ w) @ w.T)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("fsdp")), out_specs=P("fsdp"))
    grad = jax.grad(lambda w, x: jnp.sum(mapped(w, x)))
    step = sr.trace(grad, shape(64, 128), shape(4096, 64))
    made = next(op for op, _ in step._equations.everything() if op.name == "shard_map").outputs
    solution = sr.solve(step, {"fsdp": 8}, hardware="v5p")
    assert len(made) > 2
    assert all(solution._layout.spread.target(number)[0] == ("fsdp",) for number in made)
    assert [row.size for row in solution.choices[1:]] == [4096, 64, 128]
    with solution.constraints(mesh) as constrained:
        args = jnp.ones((64, 128)) / 128, jnp.ones((4096, 64))
        np.testing.assert_allclose(constrained(*args), jax.jit(grad)(*args), rtol=1e-5)
