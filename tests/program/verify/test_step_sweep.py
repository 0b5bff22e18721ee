"""`sr.sweep` by XLA for CPU: each row is what `prove` says, in order, with what failed; interrupts."""

import itertools
import json
import pickle
from collections import Counter

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program import compiler
from shardrules._program.verify import sweep as module
from tests.support.command_line import invoke
from tests.support.compiled import array

FUNCTION = f"{__name__}:step_on"


def step_on(mesh, batch=64, width=64):
    if width % 3 == 0:
        raise ValueError(f"no heads\nof {width}")
    plan = sr.plan({"w": jax.ShapeDtypeStruct((width, 64), "float32")}, [("w", ("fsdp", "tp"))], mesh)
    x = array(mesh, (batch, width), "fsdp")

    def loss(params, x):
        return (jax.lax.with_sharding_constraint(x @ params["w"], P("fsdp", "tp")) ** 2).mean()

    return jax.jit(jax.grad(loss), out_shardings=plan.shardings()), (plan, x), plan


def test_each_row_is_a_proof_and_the_best_is_first():
    rows = sr.sweep(step_on, 4, batch=[64, 128], hbm="100MB")
    assert rows.is_whole
    assert rows.heading == (
        "6 programs on 4 devices by XLA for CPU: a TPU's partitioner may choose otherwise; no time is "
        "known of these devices: what sends least comes first; fits: 6"
    )
    tried = {(tuple(row.mesh.values()), row.choices["batch"]) for row in rows}
    assert tried == set(itertools.product([(1, 4), (2, 2), (4, 1)], [64, 128]))
    for row in rows:
        mesh = AbstractMesh(tuple(row.mesh.values()), tuple(row.mesh), axis_types=(AxisType.Auto,) * 2)
        step, args, outputs = step_on(mesh, **row.choices)
        proof, sent = sr.prove(step, *args, on=row.mesh, outputs=outputs), Counter()
        for (axes, _), size in proof.program.sent.items():
            sent[",".join(axes)] += size
        assert (row.peak, row.fits, row.sent, row.why) == (proof.memory.peak, True, sent, "")
        assert (row.time, row.seconds) == (None, None)
    costs = [sum(row.sent.values()) / row.choices["batch"] for row in rows]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_what_does_not_fit_or_cannot_be_compiled_is_a_row_that_says_why():
    rows = sr.sweep(step_on, {"fsdp": 2, "tp": 2}, width=[66, 64], batch=[2**16, 64], hbm=10**6)
    assert [(row.choices["width"], row.choices["batch"]) for row in rows[:2]] == [(64, 64), (64, 2**16)]
    fits, large, refused, _ = rows
    assert (fits.fits, large.fits, large.peak > 10**6) == (True, False, True)
    assert "of it are f32[" in large.why
    assert "what sends least" not in sr.sweep(step_on, {"fsdp": 2, "tp": 2}, width=[66]).heading
    assert (refused.peak, refused.why) == (None, "ValueError: no heads of 66")
    assert rows.heading.endswith("; fits: 1; does not fit: 1; not compiled: 2")


def test_answers_are_rows_that_keep_their_heading():
    rows = sr.sweep(step_on, {"fsdp": 2, "tp": 1}, width=[64, 63])
    assert (rows[:1].heading, rows[:1][0], pickle.loads(pickle.dumps(rows))) == (rows.heading, rows[0], rows)
    heading, head, first, _ = str(rows).split("\n")
    assert (heading, first.startswith("fsdp=2,tp=1  64")) == (rows.heading, True)
    assert ("HBM" in head, "time" in head) == (True, False)  # which no row has
    odd = module.StepSweep([rows[0]._replace(choices={"policy": P("fsdp")})], summary=rows.summary)
    written = json.loads(odd.to_json())
    assert (written["summary"], written["rows"][0]["peak"]) == (rows.summary, rows[0].peak)
    assert "fsdp" in written["rows"][0]["choices"]["policy"]


def test_an_interrupt_keeps_the_rows_that_are_there(monkeypatch, tmp_path):
    closed = []
    answer, close = compiler.CompilerChild.answer, compiler.CompilerChild.close
    calls = itertools.count()

    def interrupted(self):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return answer(self)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(compiler.CompilerChild, "answer", interrupted)
    monkeypatch.setattr(compiler.CompilerChild, "close", lambda self: (closed.append(self), close(self)))
    rows = sr.sweep(step_on, {"fsdp": 2, "tp": 1}, batch=[16, 32, 48])
    assert [row.choices["batch"] for row in rows] == [16]
    assert not rows.is_whole
    assert "; not whole, as it was interrupted: 3 were to be tried" in rows.heading
    assert len(set(closed)) == 3
    assert list(tmp_path.iterdir()) == []
    calls = itertools.count(1)
    with pytest.raises(KeyboardInterrupt):  # none is there
        sr.sweep(step_on, {"fsdp": 2, "tp": 1}, batch=[16, 32])


WRONG = {
    "a keyword": ({"bach": [1]}, TypeError, r"step_on: .*'bach'; beside the mesh it takes batch, width"),
    "no values": ({"batch": []}, ValueError, "batch: there are no values to try"),
    "one value": ({"batch": 8}, TypeError, "batch is 8 .*; it must be a sequence of values"),
    "no number": ({"batch": ["8"]}, ValueError, "batch is '8'"),
    "axes beside a mesh": ({"axes": ("fsdp",)}, ValueError, "axes: on= is one mesh"),
    "a float": ({"on": 2.5}, TypeError, "on is 2.5"),
    "no slice": ({"on": "v5p:3"}, ValueError, "v5p:3"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_told_before_anything_is_compiled(kind, monkeypatch):
    monkeypatch.setattr(module, "_asked", None)
    options, error, match = WRONG[kind]
    with pytest.raises(error, match=match):
        sr.sweep(step_on, **{"on": {"fsdp": 2}} | options)


def test_a_function_that_returns_no_step_is_told():
    with pytest.raises(TypeError, match="step_on: this gives 3"):
        sr.sweep(lambda mesh: 3, {"fsdp": 2})


def run(*words):
    done = invoke("sweep", *words)
    return done.exit_code, done.stdout, done.stderr


def test_the_command():
    code, out, err = run(FUNCTION, "--devices", 2, "--axes", "fsdp,tp", "--try", "batch=16,32", "--try", "width=64",
                         "--hbm", "1MB")  # fmt: skip
    assert (code, err) == (0, "")
    assert out.startswith("4 programs on 2 devices by XLA for CPU")
    assert out.count("  fits") == 4
    code, out, _ = run(FUNCTION, "-m", "fsdp=2,tp=1", "--try", "batch=9000", "--hbm", "1MB", "--format", "json")
    (row,) = json.loads(out)["rows"]
    assert (code, row["fits"], row["choices"]) == (1, False, {"batch": 9000})


MIXED = {
    "a model without rules": (("model.json", "-m", "tp=2"), "model.json: a model needs --rules"),
    "choices of a model": (("model.json", "-m", "tp=2", "-r", "r.toml", "--try", "batch=8"), "'--try' and '-r' / '--rules' exclude each other"),
    "options of a model": ((FUNCTION, "-m", "tp=2", "--optimizer", "adam"), "a step has its own rules, gradients and optimizer"),
    "two meshes": ((FUNCTION, "-m", "tp=2", "-m", "tp=4"), "of a step give one"),
    "fixed axes": ((FUNCTION, "--devices", "4", "--axes", "fsdp,tp=1"), "'fsdp,tp=1' has sizes"),
    "a keyword": ((FUNCTION, "-m", "tp=2", "--try", "bach=8"), "beside the mesh it takes batch, width"),
    "no values": ((FUNCTION, "-m", "tp=2", "--try", "batch"), "'--try': 'batch': write it as keyword=values"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MIXED)
def test_options_that_do_not_go_together_are_told(kind):
    words, message = MIXED[kind]
    code, _, err = run(*words)
    assert (code, message in err) == (2, True), err


def test_axes_are_proposed_that_few_heads_share():
    def step_on(mesh):
        heads = {"wk": jax.ShapeDtypeStruct((16, 2, 8), "float32")}
        plan = sr.plan(heads, [("wk", P(None, "tp"))], mesh)
        return jax.jit(lambda params, x: x @ params["wk"][:, 0]), (plan, jax.ShapeDtypeStruct((4, 16), "float32"))

    rows = sr.sweep(step_on, {"tp": 4})
    assert [note.partition(": ")[0] for note in rows.notes] == ["few heads on tp=4"]
    assert rows.notes[0] in str(rows)
    assert sr.sweep(step_on, {"tp": 2}).notes == []
