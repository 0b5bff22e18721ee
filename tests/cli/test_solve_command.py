"""`shardrules solve`: rules of least time on standard output, and what is refused."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.command_line import invoke

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
def test_a_terminal_shows_how_far_it_is(is_terminal, options):
    pytest.importorskip("ortools")
    told = invoke(*WORDS, *options, is_terminal=is_terminal).stderr
    is_told = "mesh 1 of 1, fsdp=4,tp=2: best " in told and "bound " in told and "gap 0.0%" in told
    assert is_told == (is_terminal and not options)


def test_other_forms():
    python = invoke(*WORDS, "--format", "python")
    assert "from jax.sharding import PartitionSpec as P" in python.stdout
    text = invoke(*WORDS, "--format", "text")
    assert "batch 262,144" in text.stdout
    assert text.stderr == ""
    refused = invoke(*WORDS, "--hbm", "1MB")
    assert (refused.exit_code, "more than the 1.00 MB that there are\n  " in refused.stderr) == (2, True)
