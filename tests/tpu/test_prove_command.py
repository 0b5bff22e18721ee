"""`shardrules prove`, as a person and as CI would call it."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.support.command_line import invoke
from tests.support.contexts import needs_libtpu

MODULE = """
import jax
import shardrules as sr
from jax.sharding import NamedSharding, PartitionSpec as P

def step_on(mesh, rows=512, donate=(0,)):
    plan = sr.plan({"w": jax.ShapeDtypeStruct((512, 512), "float32")}, [("w", "fsdp")], mesh)
    x = jax.ShapeDtypeStruct((rows, 512), "float32", sharding=NamedSharding(mesh, P("fsdp")))

    def step(params, x):
        grads = jax.grad(lambda p: ((x @ p["w"]) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    return jax.jit(step, donate_argnums=donate, out_shardings=plan.shardings()), (plan, x), plan

forgotten = lambda mesh: step_on(mesh, donate=())
too_large = lambda mesh: step_on(mesh, rows=2**27)
plan_alone = lambda mesh: step_on(mesh)[1][0]
untraceable = lambda mesh: (jax.jit(lambda x: x["missing"]), step_on(mesh)[1][:1])
broken = lambda mesh: {}["w"]
"""
ON = ("--on", "v5e:2x2", "--mesh", "fsdp=4")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(function, *options): exit code, standard output and error."""
    (tmp_path / "own_step.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(name, *options):
        result = invoke("prove", f"own_step:{name}", *options)
        return result.exit_code, result.stdout, result.stderr

    return call


CPU = ("--mesh", "fsdp=4")
FAULT = (*ON, "--large", "64kB", "--fail-on", "warning")
ANSWERS = [
    # function, options, exit code, what is told
    ("step_on", (*ON, "--fail-on", "warning"), 0, r"it fits: .* of 16.9 GB, on v5e:2x2, fsdp=4 \(fsdp: .*roofline: "),
    ("step_on", (*ON, "--format", "json"), 0, r'"mesh": {\s*"fsdp": 4'),
    ("step_on", (*ON, "--time"), 0, "by the compiler's estimate"),
    ("step_on", (*CPU, "--fail-on", "warning", "--hbm", "1GB"), 0, " on fsdp=4 by XLA for CPU: a TPU's partitioner may"),
    ("forgotten", FAULT, 1, r"warning\[donation\]"),
    ("forgotten", (*FAULT, "--format", "github"), 1, "::warning"),
    ("step_on", (*ON, "--budget", "fsdp=1kB"), 1, r"error\[budget\]"),
    ("too_large", ON, 1, "^does not fit: the step needs "),
    ("step_on", (*CPU, "--slices", "2"), 2, "'--slices' needs '--on'"),
    ("step_on", (*CPU, "--time"), 2, "'--time' needs '--on'"),
    ("step_on", (*CPU, "--axis-types", "manual"), 2, "--axis-types"),
    ("step_on", (*CPU, "--update-lock"), 2, "'--update-lock' needs '--lock'"),
    ("step_on", ("--on", "v5e:2x2", "--mesh", "fsdp=8"), 2, "fsdp=8 are 8 devices, and v5e:2x2 has 4"),
    ("plan_alone", CPU, 2, r"it must be \(step, arguments, outputs\) or \(step, arguments\)"),
    ("broken", CPU, 2, "has raised KeyError"),
    ("untraceable", CPU, 2, "the step fails: KeyError: 'missing'\nshardrules called <lambda>, which "),
    ("missing", CPU, 2, "has no 'missing'"),
    ("step_on", ("--on", "v5e:3x3", "--mesh", "fsdp=9"), 2, "v5e:3x3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "options", "code", "told"),
    [pytest.param(*row, marks=needs_libtpu if "--on" in row[1] else ()) for row in ANSWERS],
)
def test_what_is_told(run, function, options, code, told):
    done, out, err = run(function, *options)
    assert done == code, (out, err)
    assert re.search(told, out + err, re.DOTALL), (out, err)


LONG = """
import pathlib
from examples import prove_405b

def step_on(mesh):
    answer = prove_405b.step_on(mesh)
    pathlib.Path("begun").touch()
    return answer
"""


@needs_libtpu
@pytest.mark.parametrize("options", [(), ("--time",)])
def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path, options):
    lock_file = pathlib.Path("/tmp/libtpu_lockfile")  # which others may have left there
    was_there = lock_file.exists()
    (tmp_path / "files").mkdir()
    (tmp_path / "own_step.py").write_text(LONG)
    environment = {
        **os.environ, "SHARDRULES_CACHE": "cache", "TMPDIR": str(tmp_path / "files"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd(), *sys.path]),
    }  # fmt: skip
    words = ["-m", "shardrules", "prove", "own_step:step_on", "--on", "v5p:8x8x8", "--mesh", "fsdp=64,tp=8"]
    with subprocess.Popen([sys.executable, *words, *options], cwd=tmp_path, env=environment,
                          stderr=subprocess.DEVNULL, start_new_session=True) as process:  # fmt: skip
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
            assert process.poll() is None
        if options:
            time.sleep(6)  # within the compiler, which takes longer
        while not options and not list((tmp_path / "files").iterdir()):  # as of a child
            time.sleep(0.01)
        process.terminate()
        assert process.wait(120) in (128 + signal.SIGTERM, -signal.SIGTERM)
    until = time.monotonic() + 10
    while list((tmp_path / "files").iterdir()) and time.monotonic() < until:
        time.sleep(0.1)
    assert list((tmp_path / "files").iterdir()) == []
    assert not (tmp_path / "cache").exists()
    assert lock_file.exists() == was_there
    with pytest.raises(ProcessLookupError):  # no child is left
        os.killpg(process.pid, 0)


@needs_libtpu
def test_it_needs_no_network(tmp_path):
    """In a namespace of its own, which has not even a loopback device that is up."""
    alone = ["unshare", "--map-root-user", "--net"]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system lets no user unshare its network")
    (tmp_path / "own_step.py").write_text(MODULE)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [*alone, sys.executable, "-m", "shardrules", "prove", "own_step:step_on", *ON],
        env={**os.environ, "PYTHONPATH": path, "SHARDRULES_CACHE": "off"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "it fits: " in done.stdout


@needs_libtpu
def test_a_lock_of_a_step(run):
    lock = ("--lock", "step.lock")
    code, _, err = run("step_on", *ON, *lock, "--update-lock")
    assert (code, "for later runs to compare with" in err) == (0, True), err
    code, out, _ = run("step_on", *ON, *lock)
    assert (code, "error" in out.splitlines()[-1].replace("0 errors", "")) == (0, False), out
    code, out, _ = run("forgotten", *ON, *lock)
    assert (code, "error[budget]" in out) == (1, True), out


@needs_libtpu
def test_the_jobs_of_a_project_file(run, tmp_path):
    (tmp_path / "shardrules.toml").write_text(
        'on = "v5e:2x2"\nmesh = {fsdp = 4}\n'
        '[jobs.right]\nfunction = "own_step:step_on"\nhbm = "15GB"\nlock = "step.lock"\n'
        '[jobs.large]\nfunction = "own_step:too_large"\n[jobs.model]\nmodel = "model.json"\n'
    )
    done = invoke("prove")
    assert done.exit_code == 2
    assert "error: right: step.lock: no such file; write it with --update-lock" in done.stderr
    done = invoke("prove", "--update-lock")
    assert (done.exit_code, "error: large: '--update-lock' needs '--lock'" in done.stderr) == (2, True)
    assert (tmp_path / "step.lock").exists()
    done = invoke("prove", "--job", "right", "--format", "json")
    assert (done.exit_code, json.loads(done.stdout)["program"]["mesh"]) == (0, {"fsdp": 4})
    done = invoke("prove")
    assert (done.exit_code, "does not fit: " in done.stdout) == (1, True)
