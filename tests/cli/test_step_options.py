"""`--step` of `plan`, `check` and `sweep`: a traced step in the place of all that describes one."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.support.command_line import invoke

MODEL = {"params": [["up", [512, 2048], "F32"], ["down", [2048, 512], "F32"]]}
RIGHT = """
[[rules]]
pattern = "up"
spec = ["fsdp", "tp"]
[[rules]]
pattern = "down"
spec = ["tp", "fsdp"]
"""
# All weights over "fsdp" alone, and so the batch: the devices along "tp" repeat each other.
ONLY_FSDP = """
[[rules]]
pattern = ".*"
spec = ["fsdp"]
"""
# Its own rules are right; those of the command line count.
STEP = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

RULES = [("up", ("fsdp", "tp")), ("down", ("tp", "fsdp"))]


def step_on(mesh):
    tree = {
        "up": jax.ShapeDtypeStruct((512, 2048), "float32"),
        "down": jax.ShapeDtypeStruct((2048, 512), "float32"),
    }
    plan = sr.plan(tree, RULES, mesh)
    x = jax.ShapeDtypeStruct((64, 512), "float32", sharding=NamedSharding(mesh, P("fsdp")))

    def loss(params, x):
        return jnp.mean(jnp.square(jax.nn.relu(x @ params["up"]) @ params["down"]))

    return jax.jit(jax.grad(loss)), (plan, x)
"""
MODEL_BYTES = 2 * 512 * 2048 * 4
MESHES = [(("fsdp", n), ("tp", 8 // n)) for n in (1, 2, 4, 8)]
WORDS = ("model.json", "-m", "fsdp=4,tp=2")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "right.toml").write_text(RIGHT)
    (tmp_path / "only_fsdp.toml").write_text(ONLY_FSDP)
    (tmp_path / "right_step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("right_step", None)


def test_step_writes_a_page_with_each_dimension_in_its_colour(folder):
    (folder / "right_step.py").write_text(
        STEP.replace("jax.grad(loss)", "jax.grad(loss), donate_argnums=0")
    )
    words = ("step", "right_step:step_on", "-m", "fsdp=4,tp=2", "--html", "step.html")
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    page = (folder / "step.html").read_text()
    hues = {}
    for path in ("inputs/0/up", "inputs/0/down", "inputs/1"):
        row = page.split(f"<code>{path}</code>")[1].split("<tr>")[0]
        hues[path] = re.findall(r"--hue: (\d+)\">", row)
    # What is summed over has one colour in both arrays, and the batch another one.
    assert hues["inputs/0/up"][1] == hues["inputs/0/down"][0] != hues["inputs/0/down"][1]
    assert hues["inputs/1"][1] == hues["inputs/0/up"][0]
    assert len({*hues["inputs/0/up"], *hues["inputs/1"]}) == 3
    assert "default-src 'none'" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "right_step.py" in page


def test_paths_of_a_page_are_no_markup(folder):
    code = STEP.replace('"up":', '"<b>up</b>":').replace('["up"]', '["<b>up</b>"]')
    (folder / "right_step.py").write_text(code)
    done = invoke("step", "right_step:step_on", "-m", "fsdp=4,tp=2", "--html", "step.html")
    assert done.exit_code == 0, done.output
    page = (folder / "step.html").read_text()
    assert "<b>up</b>" not in page
    assert "&lt;b&gt;up&lt;/b&gt;" in page
