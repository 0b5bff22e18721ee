"""`shardrules solve`: rules of least time on standard output, and what is refused."""

from __future__ import annotations

import io
import json
import sys

import pytest

from tests.support.command_line import ended, invoke

MODULE = """
import jax
import jax.numpy as jnp

import shardrules as sr

TREE = {
    "up": jax.ShapeDtypeStruct((512, 2048), "float32"),
    "down": jax.ShapeDtypeStruct((2048, 512), "float32"),
}


def loss(params, x):
    return jnp.mean(jnp.square(jax.nn.relu(x @ params["up"]) @ params["down"]))


def step_on(mesh):
    x = jax.ShapeDtypeStruct((2**18, 512), "float32")
    return jax.jit(jax.grad(loss)), (sr.plan(TREE, [(".*", ())], mesh), x)


def without_plan(mesh):
    return loss, (TREE, jax.ShapeDtypeStruct((8, 512), "float32"))


def no_step(mesh):
    return 3
"""
WORDS = ("solve", "mlp_to_solve:step_on", "-m", "fsdp=4,tp=2", "--hardware", "v5p")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "mlp_to_solve.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mlp_to_solve", None)


def test_it_writes_rules_and_constraints(folder):
    pytest.importorskip("ortools")
    done = invoke(*WORDS)
    assert done.exit_code == 0
    assert "# mlp_to_solve.py:" in done.stdout
    assert "x = jax.lax.with_sharding_constraint(x, P(('fsdp', 'tp')))" in done.stdout
    assert "a step on fsdp=4,tp=2, " in done.stderr
    assert "none takes less" in done.stderr
    (folder / "rules.toml").write_text(done.stdout)
    model = {"params": [["up", [512, 2048], "F32"], ["down", [2048, 512], "F32"]]}
    (folder / "model.json").write_text(json.dumps(model))
    checked = invoke("check", "model.json", "-r", "rules.toml", "-m", "fsdp=4,tp=2")
    assert checked.exit_code == 0, checked.stdout
    assert invoke(*WORDS, "-q").stderr == ""


@pytest.mark.parametrize(("is_terminal", "options"), [(True, ()), (True, ("-q",)), (False, ())])
def test_a_terminal_shows_how_far_it_is(monkeypatch, is_terminal, options):
    pytest.importorskip("ortools")
    monkeypatch.setattr("sys.argv", ["shardrules", *WORDS, *options])
    monkeypatch.setattr("sys.stderr", screen := io.StringIO())
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
    assert ended() == 0
    told = screen.getvalue()
    is_told = "mesh 1 of 1, fsdp=4,tp=2: best " in told and "bound " in told and "gap 0.0%" in told
    assert is_told == (is_terminal and not options)


def test_other_forms():
    python = invoke(*WORDS, "--format", "python")
    assert "from jax.sharding import PartitionSpec as P" in python.stdout
    text = invoke(*WORDS, "--format", "text")
    assert "batch 262,144" in text.stdout
    assert text.stderr == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("solve", "mlp_to_solve:step_on"), "give the devices: --on v5p:8x8x8, or --mesh and"),
        (("solve", "mlp_to_solve:step_on", "-m", "fsdp=4"), "give the devices: --hardware v5p"),
        ((*WORDS, "--axes", "a,b"), "'--axes' exclude each other"),
        ((*WORDS, "--on", "v5p:2x2x2"), "'--on' and '--hardware' exclude each other"),
        ((*WORDS, "--hbm", "1MB"), "more than the 1.00 MB that there are\n  "),
        ((*WORDS, "--hbm", "much"), "there are no figures for 'much'"),
        (("solve", "mlp_to_solve:without_plan", *WORDS[2:]), "none of the arguments is a Plan"),
        (("solve", "mlp_to_solve:no_step", *WORDS[2:]), "this gives 3"),
        (("solve", "mlp_to_solve:step_on", "-m", "fsdp=4", "--hardware", "v99"), "figures for 'v99'"),
    ],
)
def test_what_is_wrong_is_told(words, told):
    done = invoke(*words)
    assert (done.exit_code, done.stdout, "bug in shardrules" in done.stderr) == (2, "", False)
    assert told in done.stderr
