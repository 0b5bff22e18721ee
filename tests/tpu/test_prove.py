"""`prove`: on the devices that are here, and for TPUs that are not."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from examples import prove_405b
from shardrules._program.work import LEAST_CYCLES
from tests.program.verify.test_step_sweep import step_on
from tests.support.command_line import invoke
from tests.support.compiled import array, compiled_on, devices
from tests.support.contexts import needs_libtpu
from tests.support.folders import ROOT
from tests.support.plans import shard_bytes

SIZES = {"fsdp": 4, "tp": 2}


def params(layers=3, width=256):
    stack = jax.ShapeDtypeStruct((layers, width, 4 * width), "float32")
    return {"up": stack, "down": jax.ShapeDtypeStruct((layers, 4 * width, width), "float32")}


RULES = [("up", P(None, "fsdp", "tp")), ("down", P(None, "tp", "fsdp"))]


def loss(params, x, hidden="tp", is_kept=False):
    def layer(x, w):
        h = jax.lax.with_sharding_constraint(jnp.tanh(x @ w["up"]), P("fsdp", hidden))
        return jax.lax.with_sharding_constraint(x + h @ w["down"], P("fsdp")), None

    return jnp.mean(jax.lax.scan(layer if is_kept else jax.checkpoint(layer), x, params)[0] ** 2)


def step(params, x, **changes):
    gradients = jax.grad(partial(loss, **changes))(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def batch(mesh, rows=512, width=256):
    return array(mesh, (rows, width), "fsdp")


HERE = devices(**SIZES)


# On the devices that are here


def test_arguments_without_a_plan_are_proved_as_they_are():
    assert sr.prove(lambda x, y: x + y, jnp.ones(8), np.ones(8)).memory.totals.arguments == 64
    moved = sr.prove(lambda x: x * 2, batch(Mesh(HERE.devices[::-1], HERE.axis_names)), on=HERE)
    assert moved.program._executable.inputs.shardings == [NamedSharding(HERE, P("fsdp"))]


def test_a_step_that_names_other_devices_is_told():
    other = NamedSharding(devices(fsdp=4), P("fsdp"))
    with pytest.raises(ValueError, match="names other devices than those that it is compiled for"):
        sr.prove(lambda x: jax.lax.with_sharding_constraint(x * 2, other), jnp.ones(8), on=HERE)


# For TPUs that are not here


TOPOLOGIES = {"v5e:4x4": {"fsdp": 8, "tp": 2}, "v5p:2x2x2": {"fsdp": 4, "tp": 2}}


def clean(name, sizes):
    """Return the proof of a step that is right there, of which this is looked at, and what `prove` takes for it."""
    mesh = sr.Topology(name).mesh(sizes)
    plan = sr.plan(params(), RULES, mesh)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=plan.shardings())
    asked = partial(sr.prove, jitted, plan, batch(mesh, rows=4096), outputs=plan)
    proof = asked(on=sr.Topology(name))
    proof.raise_for("warning")
    assert proof.memory.totals.arguments == sum(shard_bytes(plan)) + 4 * 4096 * 256 // mesh.shape["fsdp"]
    assert proof.target.startswith(f"on {name}, fsdp=")
    assert proof.program.sent
    assert not proof.program.is_per_iteration
    assert all(row.is_expected for row in proof.collectives)
    return proof, asked, mesh


@needs_libtpu
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_clean_step_has_no_warning_and_its_arguments_are_the_plan_s_bytes(name):
    proof, asked, mesh = clean(name, TOPOLOGIES[name])
    assert 0 < proof.time.shortest <= proof.time.longest
    for on in (mesh, name):
        again = asked(on=on)
        assert (again.time, again.program.sent) == (proof.time, proof.program.sent)


LAYOUTS = {
    "fsdp": ("v5e:2x4", [("", P(None, ("fsdp", "tp")))]),
    "swapped": ("v5e:2x4", [("up", P(None, "tp", "fsdp")), ("down", P(None, "fsdp", "tp"))]),
    "megatron and fsdp": ("v5p:2x2x2", RULES),
    "replicated": ("v5p:2x2x2", [("", P())]),
}


@needs_libtpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_equal_and_memory_is_within_a_hundredth(layout):
    name, rules = LAYOUTS[layout]
    mesh = sr.Topology(name).mesh(SIZES)
    plan, x = sr.plan(params(layers=4, width=1024), rules, mesh), batch(mesh, 16384, 1024)
    jitted = jax.jit(step, donate_argnums=0)
    proof = sr.prove(jitted, plan, x, on=mesh)
    whole = compiled_on(jitted, plan, x, on=mesh)
    assert proof.program.sent == sr.inspect(whole, (plan, None)).sent
    assert proof.memory.peak == pytest.approx(whole.memory_analysis().total_allocation_bytes, rel=0.01)
    assert proof.memory.alive <= proof.memory.peak


@needs_libtpu
def test_time_is_by_the_compiler_s_cycles_of_the_program_that_will_run():
    without, asked, mesh = clean("v5e:2x2", {"fsdp": 2, "tp": 2})
    proof = asked(on=mesh, time=True)
    time = proof.time
    assert 0 < time.shortest == max(LEAST_CYCLES * time.computing, time.sending) < time.longest
    assert sum(seconds for _, seconds in time.lines) == pytest.approx(time.computing)
    assert any("test_prove.py" in line for line, _ in time.lines)
    assert (proof.memory.peak, time.sending) == (without.memory.peak, without.time.sending)
    assert without.time.computing < time.computing


OPTIONS = {"xla_tpu_enable_async_collective_fusion": False, "xla_enable_async_all_gather": False}


@needs_libtpu
@pytest.mark.parametrize("option", OPTIONS)
def test_options_reach_the_compiler_by_jit_and_by_the_environment(option, monkeypatch):
    mesh = sr.Topology("v5e:2x2").mesh(fsdp=4)
    w, x = (array(mesh, (n, 2048), "fsdp", dtype="bfloat16") for n in (2048, 4096))

    def product(w, x):  # which is traced once: its lines are those of the first call
        return jnp.tanh(x @ w)

    def text(options=None):
        step = jax.jit(product, compiler_options=options)
        return sr.prove(step, w, x, on=mesh).program._executable.hlo.text

    by_jit, without = text({option: OPTIONS[option]}), text()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{option}=false")
    assert text() == by_jit != without
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_no_such_flag=1")
    with pytest.raises(RuntimeError, match="has crashed, by exit code 1.*\n.*'xla_no_such_flag'"):
        text()


@needs_libtpu
def test_plans_and_arguments_on_other_devices_are_taken_by_their_axes():
    plan, topology = sr.plan(params(), RULES, HERE), sr.Topology("v5e:2x4")
    proof = sr.prove(jax.jit(step, donate_argnums=0), plan, batch(HERE), on=topology, outputs=plan)
    assert proof.program.mesh == topology.mesh(SIZES)
    assert not proof.findings.at_least("error")
    with pytest.raises(ValueError, match="fsdp=4,tp=2 are 8 devices, and v5e:4x4 has 16"):
        sr.prove(step, plan, on=sr.Topology("v5e:4x4"))
    with pytest.raises(ValueError, match="the meshes of the arguments are none"):
        sr.prove(lambda x: x, jnp.ones(8), on=topology)


@needs_libtpu
def test_a_step_that_does_not_fit_names_what_is_large():
    mesh = sr.Topology("v5e:2x4").mesh(SIZES)
    plan = sr.plan(params(layers=32, width=4096), RULES, mesh)
    with pytest.raises(sr.OutOfMemory) as caught:
        sr.prove(jax.jit(partial(step, is_kept=True)), plan, batch(mesh, 2**19, 4096), on=mesh)
    refusal = caught.value
    assert refusal.required > refusal.available
    assert abs(refusal.available - sr.Hardware.named("v5e").memory_bytes) < 2**24
    assert refusal.buffers[0].bytes > 2**30
    assert refusal.buffers[0].place.file.endswith("test_prove.py")
    assert "jax.checkpoint" in str(refusal).splitlines()[-1]


@needs_libtpu
def test_what_a_refused_step_needs_includes_its_arguments():
    mesh = sr.Topology("v5e:2x2").mesh(fsdp=4)
    x = array(mesh, (2**16, 2**16), dtype="bfloat16")
    with pytest.raises(sr.OutOfMemory) as caught:
        sr.prove(lambda x: jnp.sin(y := x @ x.T) @ y, x, on=mesh)
    assert caught.value.required == pytest.approx(3 * 2**33, rel=0.01)


@needs_libtpu
def test_the_cache_of_jax_is_left_alone(tmp_path, monkeypatch):
    """What is written for described devices cannot be read; and the user's own entries go on being written."""
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: getattr(jax.config, name) for name in settings}
    monkeypatch.setenv("SHARDRULES_CACHE", "off")
    sizes = []
    try:
        compilation_cache.reset_cache()
        for name, value in settings.items():
            jax.config.update(name, value)
        x = batch(mesh := sr.Topology("v5e:2x4").mesh(SIZES))
        for number in range(2):
            sr.prove(lambda x: jnp.sin(x) * 3, x, on=mesh, time=True)
            jax.jit(lambda x: x * 7 - number).lower(jnp.ones(8)).compile()  # noqa: B023 # called at once
            sizes.append([path.name.partition("-")[0] for path in tmp_path.glob("*-cache")].count("jit__lambda"))
        assert {name: getattr(jax.config, name) for name in settings} == settings
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert sizes == [1, 2]


@needs_libtpu
def test_a_program_for_other_devices_is_not_the_one_that_will_run():
    there = sr.Topology("v5e:2x4").mesh(SIZES)
    plan = sr.plan(params(), RULES, there)
    compiled = compiled_on(jax.jit(step, donate_argnums=0), plan, batch(HERE), on=HERE)
    (finding,) = [one for one in sr.verify(compiled, (plan, None), plan) if one.kind == "input"]
    assert finding.level == "info"
    assert finding.message.startswith("compiled for cpu devices, and planned on TPU v5 lite: ")
    proof = sr.prove(jax.jit(step, donate_argnums=0), plan, batch(there), on=there, outputs=plan)
    assert not [one for one in proof.findings if one.kind == "input"]


@needs_libtpu
def test_the_time_of_products_is_near_the_peak_and_above_it():
    """Of one large product, which nothing sends."""
    topology, size = sr.Topology("v5p:2x2x1"), 2**13
    mesh = topology.mesh(tp=4)
    x, w = array(mesh, (4 * size, size), "tp", dtype="bfloat16"), array(mesh, (size, size), dtype="bfloat16")
    proof = sr.prove(lambda x, w: x @ w, x, w, on=topology, time=True)
    at_peak = 2 * size**3 / topology.hardware.flops_per_second["bfloat16"]
    assert 1 < proof.time.computing / at_peak < 1.5
    assert proof.time.sending == 0


@needs_libtpu
@pytest.mark.parametrize("flops", [None, 10**9])
def test_a_pallas_kernel_has_no_cycles_and_counts_by_its_own_estimate(flops):
    pallas = pytest.importorskip("jax.experimental.pallas")
    cost = flops and pallas.CostEstimate(flops=flops, bytes_accessed=0, transcendentals=0)

    def double(x):
        def kernel(source, target):
            target[...] = source[...] * 2

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, shape, cost_estimate=cost)(x) @ x

    topology = sr.Topology("v5e:1x1")
    time = sr.prove(double, array(topology.mesh(tp=1), (256, 256)), on=topology, time=True).time
    if flops is None:
        assert len(time.uncounted) == 1
        assert "without 1 Pallas kernel, of which it says nothing" in str(time)
    else:
        at_peak = flops / topology.hardware.flops_per_second["bfloat16"]
        assert (time.kernels, time.uncounted) == (pytest.approx(2 * at_peak), ())


# Sweeps over the meshes of a slice


@needs_libtpu
def test_all_meshes_of_a_slice_ranked_by_the_time_of_one_of_the_batch():
    topology = sr.Topology("v5e:2x2")
    rows = sr.sweep(step_on, topology, batch=[2**16, 2**28])
    assert sorted(tuple(row.mesh.values()) for row in rows) == sorted(
        tuple(sizes.values()) for sizes in topology.meshes(("fsdp", "tp")) for _ in range(2)
    )
    fitting = [row for row in rows if row.fits]
    assert [row.seconds for row in fitting] == sorted(row.seconds for row in fitting)
    for row in fitting:
        function, args, outputs = step_on(topology.mesh(row.mesh), **row.choices)
        proof = sr.prove(function, *args, on=topology, outputs=outputs)
        assert (row.peak, row.time) == (proof.memory.peak, proof.time)
        assert row.seconds == proof.time.longest / row.choices["batch"]
    refused = rows[len(fitting) :]
    assert {row.choices["batch"] for row in refused} == {2**28}
    for row in refused:
        assert (row.fits, row.time) == (False, None)
        assert row.peak > topology.hardware.memory_bytes
        assert " of it are f32[" in row.why


@needs_libtpu
def test_the_command_that_sweeps():
    done = invoke(
        "sweep", "tests.program.verify.test_step_sweep:step_on", "--on", "v5e:2x2", "--axes", "fsdp,tp",
        "--try", "batch=65536", "--format", "json",
    )  # fmt: skip
    assert (done.exit_code, done.stderr) == (0, "")
    assert [row["fits"] for row in json.loads(done.stdout)["rows"]] == [True] * 3


# `make demo` ends with the proof of the step of 405B for 512 devices, by whatever compiler is there

PAGE = (ROOT / "docs" / "pod.md").read_text(encoding="utf-8")


@needs_libtpu
def test_it_proves_405b(capsys):
    prove_405b.main()
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("it fits: ")
    assert " of 103 GB, on v5p:8x8x8, fsdp=64,tp=8 (" in first
    (sent,) = (line for line in rest if line.startswith("each device sends "))
    if jax.__version_info__ >= (0, 12):
        assert first.partition(", in ")[0] in PAGE
        assert sent in PAGE
    assert not any(line.startswith("error") for line in rest)


def test_without_the_compiler_xla_for_cpu_is_asked(capsys, monkeypatch):
    def missing(*_):
        raise ImportError("libtpu is not installed")

    monkeypatch.setattr(sr.Topology, "mesh", missing)
    prove_405b.main()
    hint, first, *rest = capsys.readouterr().out.splitlines()
    assert hint == "libtpu is not installed"
    assert " on fsdp=64,tp=8 by XLA for CPU: a TPU's partitioner may choose otherwise" in first
    (sent,) = (line for line in rest if line.startswith("each device sends "))
    assert jax.__version_info__ < (0, 12) or f"{' '.join(sent.split()[3:5])} for the step above" in PAGE


def test_it_is_what_make_demo_runs_last():
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    assert recipe.splitlines()[-1].endswith("examples/prove_405b.py")
