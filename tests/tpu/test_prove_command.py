"""`shardrules prove`, as a person and as CI would call it."""

from __future__ import annotations

import json
import textwrap

import pytest

from tests.support.command_line import invoke
from tests.tpu.marks import needs_libtpu

MODULE = textwrap.dedent(
    """
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

    def forgotten(mesh):
        return step_on(mesh, donate=())

    def too_large(mesh):
        return step_on(mesh, rows=2**27)

    def plan_alone(mesh):
        return step_on(mesh)[1][0]

    def broken(mesh):
        raise KeyError("w")
    """
)
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


@needs_libtpu
def test_a_step_that_is_right(run, tmp_path):
    code, out, _ = run("step_on", *ON, "--fail-on", "warning", "--html", "report.html")
    assert code == 0, out
    assert out.startswith("compiled for v5e:2x2, fsdp=4 (fsdp: ")
    assert ": it fits\n" in out
    assert "0 errors, 0 warnings" in out or "nothing found" in out
    page = (tmp_path / "report.html").read_text()
    assert '"program":{"mesh":{"fsdp":4}' in page
    code, out, _ = run("step_on", *ON, "--format", "json", "--fast")
    assert code == 0
    assert json.loads(out)["program"]["mesh"] == {"fsdp": 4}


@needs_libtpu
def test_a_step_with_a_fault(run):
    options = (*ON, "--large", "64kB", "--fail-on", "warning")
    code, out, _ = run("forgotten", *options)
    assert (code, "warning[donation]" in out) == (1, True)
    code, out, _ = run("forgotten", *options, "--format", "github")
    assert (code, "::warning" in out) == (1, True)
    code, out, _ = run("step_on", *ON, "--budget", "fsdp=1kB")
    assert (code, "error[budget]" in out) == (1, True)


@needs_libtpu
def test_a_step_that_does_not_fit(run):
    code, out, _ = run("too_large", *ON)
    assert code == 1
    assert out.startswith("does not fit: the step needs ")


@needs_libtpu
@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("step_on", ("--on", "v5e:2x2", "--mesh", "fsdp=8"), "fsdp=8 are 8 devices, and v5e:2x2 has 4"),
        ("plan_alone", ON, "it must be (step, arguments, outputs) or (step, arguments)"),
        ("broken", ON, "has raised KeyError"),
        ("missing", ON, "has no 'missing'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(run, function, options, message):
    code, _, err = run(function, *options)
    assert (code, message in err) == (2, True), err


def test_a_topology_that_is_none_is_told(run):
    code, _, err = run("step_on", "--on", "v5e:3x3", "--mesh", "fsdp=9")
    assert (code, "a host has 2x2 chips" in err) == (2, True), err
