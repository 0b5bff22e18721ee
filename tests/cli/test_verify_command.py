"""`shardrules verify`, as a person and as CI would call it."""

from __future__ import annotations

import json
import re
import sys
import textwrap

import pytest

from tests.support.command_line import invoke

MODULE = textwrap.dedent(
    """
    import functools
    import jax
    import shardrules as sr
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    mesh = Mesh(jax.devices(), ("data",))
    params = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
    plan = sr.plan(params, [("w", "data")], mesh)

    def compiled(spec):
        out = {"w": NamedSharding(mesh, spec)}
        step = jax.jit(lambda p: {"w": p["w"] * 2}, out_shardings=out, donate_argnums=0)
        return step.lower(plan.abstract()).compile()

    def as_planned():
        return compiled(P("data")), (plan,), plan

    def gathering():
        return compiled(P()), (plan,)

    def plan_alone():
        return plan
    """
)


WRAPPED = {
    "flax.nnx": """
import jax
import shardrules as sr
from flax import nnx
from jax.sharding import Mesh

mesh = Mesh(jax.devices(), ("data",))
model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
plan = sr.plan(nnx.state(model), sr.Rules([("kernel", "data")], sr.dialects.NNX), mesh)

def go():
    nnx.update(model, sr.shard(nnx.state(model), plan.shardings()))
    def step(model):
        model.kernel.value *= 2
    return nnx.jit(step, donate_argnums=0).lower(model).compile(), (plan,)
""",
    "equinox": """
import equinox as eqx
import jax
import shardrules as sr
from jax.sharding import Mesh

mesh = Mesh(jax.devices(), ("data",))
model = eqx.nn.Linear(64, 64, use_bias=False, key=jax.random.key(0))
plan = sr.plan(model, [("weight", "data")], mesh)

def go():
    placed = sr.shard(model, plan.shardings())
    step = eqx.filter_jit(lambda model: jax.tree.map(lambda w: w * 2, model), donate="all")
    return step.lower(placed).compile(), (plan,), plan
""",
}


@pytest.fixture
def verify(tmp_path, monkeypatch):
    """verify(function, *options): the command's result for a function of the module above."""
    (tmp_path / "verified.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name, *options: invoke("verify", f"verified:{name}", *options)


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("as_planned", [], 0),
        ("as_planned", ["--fail-on", "info", "--hbm", "1GB"], 0),
        ("as_planned", ["--hbm", "1kB"], 1),
        ("gathering", [], 1),
        ("gathering", ["--fail-on", "never"], 0),
        ("plan_alone", [], 2),
        ("nothing", [], 2),
        ("gathering", ["--fail-on", "now"], 2),
        ("gathering", ["--large", "much"], 2),
    ],
)
def test_exit_codes(verify, name, options, code):
    assert verify(name, *options).exit_code == code


def test_what_it_prints(verify):
    result = verify("gathering", "--large", "1kB")
    assert "error[fixed-point]" in result.stdout
    assert "error[gathered]" in result.stdout
    assert "outputs/w" in result.stdout
    findings = json.loads(verify("gathering", "--format", "json").stdout)["findings"]
    assert {one["kind"] for one in findings} == {"fixed-point", "donation"}
    assert (
        "::error title=shardrules fixed-point::" in verify("gathering", "--format", "github").stdout
    )
    assert re.fullmatch(r"nothing found: .* planned; .*\n", verify("as_planned").stdout)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--budget", "data"], "--budget 'data': write what it is of and its bytes, as fsdp=25GB"),
        (["--budget", "data=1GB", "--budget", "data=2GB"], "two budgets, '1GB' and '2GB'"),
        (["--budget", "dta=1GB"], "did you mean data?"),
        (["--budget", "data=much"], "'much' is not a number of bytes"),
        (["--budget", "data=25"], "write 25 GB"),
        (["--budget", "=25GB"], "budget['']"),
        (["--lock", "none.lock"], "none.lock: no such file; write it with --update-lock"),
        (["--lock", "verified.py"], "this is not JSON"),
        (["--update-lock"], "give --lock as well"),
    ],
)
def test_wrong_budgets_and_locks(verify, options, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = verify("as_planned", *options)
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_budgets(verify):
    assert verify("as_planned", "--budget", "data=0", "--budget", "peak=1GB").exit_code == 0
    result = verify("gathering", "--budget", "data=1kB", "--budget", "all-gather=1GB")
    assert result.exit_code == 1
    assert "error[budget]: data: each device sends " in result.stdout
    assert "over the budget of 1.00 kB" in result.stdout
    assert "all-gather: " not in result.stdout


def test_a_lock_is_written_and_compared(verify, tmp_path):
    lock = tmp_path / "step.lock"
    done = verify("as_planned", "--lock", lock, "--update-lock", "--fail-on", "info")
    assert (done.exit_code, done.stderr.count("step.lock")) == (0, 1)
    before = lock.read_text()
    assert json.loads(before)["mesh"] == {"data": 8}
    done = verify("as_planned", "--lock", lock, "--fail-on", "info")
    assert done.exit_code == 0
    assert "the peak compared with " in done.stdout
    done = verify("gathering", "--lock", lock, "--format", "json")
    assert (done.exit_code, lock.read_text()) == (1, before)
    kinds = [one["kind"] for one in json.loads(done.stdout)["findings"]]
    assert kinds.count("budget") == 2
    assert verify("gathering", "--lock", lock, "--update-lock", "--fail-on", "never").exit_code == 0
    done = verify("as_planned", "--lock", lock, "--fail-on", "warning")
    assert done.exit_code == 0
    assert "info[budget]: all-gather over data: each device sends 0 B in a step" in done.stdout


def test_what_a_function_must_return(verify):
    message = verify("plan_alone").stderr
    assert "verified:plan_alone" in message
    assert "(compiled, inputs, outputs)" in message
    assert "is not the name of an object" in invoke("verify", "step.py").stderr


@pytest.mark.parametrize("library", WRAPPED)
def test_what_other_libraries_compile_in_a_module_of_one_letter(library, tmp_path, monkeypatch):
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    is_old = library == "equinox" and module.__version__.startswith(("0.11.", "0.12."))
    if is_old or (library == "flax.nnx" and not hasattr(module, "graphlib")):
        pytest.skip(f"this {library} is older than those that verify reads")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "v.py").write_text(WRAPPED[library])
    try:
        result = invoke("verify", "v:go", "--fail-on", "info")
    finally:
        sys.modules.pop("v", None)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("nothing found: 1 of 1 input planned, 1 of 1 output planned")
