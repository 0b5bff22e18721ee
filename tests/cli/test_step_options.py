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


def test_check_tells_what_the_step_repeats(folder):
    words = ("check", *WORDS, "--fail-on", "warning")
    done = invoke(*words, "-r", "only_fsdp.toml", "--step", "right_step:step_on")
    assert done.exit_code == 1, done.output
    assert "warning[repeated]: the 2 devices along 'tp' compute the same" in done.stdout
    # Names alone do not tell it.
    assert "[repeated]" not in invoke(*words, "-r", "only_fsdp.toml").stdout
    done = invoke(*words, "-r", "right.toml", "--step", "right_step:step_on")
    assert (done.exit_code, done.stderr) == (0, ""), done.output


def test_plan_has_the_time_and_the_memory_of_the_step(folder):
    words = ("plan", *WORDS, "-r", "right.toml", "--format", "json")
    done = invoke(*words, "--step", "right_step:step_on", "--hardware", "v5p")
    assert done.exit_code == 0, done.output
    with_step, bare = json.loads(done.stdout), json.loads(invoke(*words).stdout)
    assert set(with_step) - set(bare) == {"time", "fits"}
    # Names tell the bytes of the weights alone; the step has activations and gradients too.
    assert bare["device_bytes"]["total"] == MODEL_BYTES // 8
    assert with_step["device_bytes"]["total"] > 2 * MODEL_BYTES // 8
    # Without the devices there is memory, but no time.
    alone = json.loads(invoke(*words, "--step", "right_step:step_on").stdout)
    assert set(alone) == set(bare)
    assert alone["device_bytes"] == with_step["device_bytes"]


def test_sweep_takes_the_step_on_each_mesh(folder):
    words = ("sweep", "model.json", "-r", "right.toml", "--devices", "8", "--axes", "fsdp,tp")
    words += ("--format", "json", "--hardware", "v5p")
    done = invoke(*words, "--step", "right_step:step_on")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert sorted(tuple(row["mesh"].items()) for row in rows) == MESHES
    seconds = [row["time"]["total"] for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


@pytest.mark.parametrize("option", [("--tokens", "64"), ("--experts-per-token", "2")])
def test_what_the_step_says_is_not_given(folder, option):
    words = ("plan", *WORDS, "-r", "right.toml", "--hardware", "v5p")
    done = invoke(*words, "--step", "right_step:step_on", *option)
    assert done.exit_code == 2
    assert "--step says it itself" in done.stderr
    assert option[0] in done.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("right_step:steps_on", "right_step"),
        ("no_such_module:step_on", "no_such_module"),
    ],
)
def test_wrong_functions_are_named(folder, source, message):
    done = invoke("check", *WORDS, "-r", "right.toml", "--step", source)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_sweep_traces_the_step_on_each_mesh_and_leaves_out_what_it_is_not_for(folder):
    code = STEP.replace("plan = sr.plan", "calls.append(dict(mesh.shape))\n    plan = sr.plan")
    (folder / "right_step.py").write_text(code.replace("RULES =", "calls = []\nRULES ="))
    words = ("sweep", "model.json", "-r", "right.toml", "--devices", 128, "--axes", "fsdp,tp")
    done = invoke(*words, "--step", "right_step:step_on", "--hardware", "v5p", "--format", "json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {"fsdp": 64, "tp": 2} in [row["mesh"] for row in told["rows"]]
    (left,) = told["left_out"]
    assert left["mesh"] == {"fsdp": 128, "tp": 1}
    assert "64 rows cannot be cut into 128 parts by fsdp" in left["why"]
    assert left["mesh"] in sys.modules["right_step"].calls


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", 8, "--axes", "fsdp,tp", "--prove", 2), "without --step there is nothing to"),
        (("-m", "fsdp=8", "--prove", 2, "--step", "right_step:step_on"), "those of --mesh"),
        (
            ("--devices", 8, "--axes", "fsdp,tp", "--prove", 2, "--step", "right_step:step_on"),
            "prove: give the topology",
        ),
    ],
)
def test_what_cannot_be_proven_is_told(folder, words, message):
    done = invoke("sweep", "model.json", "-r", "right.toml", *words)
    assert done.exit_code == 2
    assert message in done.stderr


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
