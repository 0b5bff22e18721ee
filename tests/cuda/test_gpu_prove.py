"""`compile` and `prove` for GPUs that are not here, by XLA's compiler for CUDA."""

import re
from functools import partial

import jax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.command_line import invoke
from tests.support.contexts import needs_cuda
from tests.tpu.test_prove import HERE, RULES, SIZES, batch, clean, params, step
from tests.tpu.test_prove_command import MODULE

pytestmark = needs_cuda
TOPOLOGIES = {"h100:8": SIZES, "h200:4x2": SIZES, "b200:8x2": {"fsdp": 8, "tp": 2}, "gb200:16": {"fsdp": 4, "tp": 4}}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_clean_step_has_no_warning_and_its_arguments_are_the_plan_s_bytes(name):
    proof, *_ = clean(name, TOPOLOGIES[name])
    assert proof.time is None  # the compiler tells no cycles


def test_a_faulty_step_is_told_as_on_the_cluster():
    topology = sr.Topology("h100:8")
    plan = sr.plan(params(), RULES, SIZES)
    x = batch(topology.mesh(SIZES))
    proof = sr.prove(jax.jit(partial(step, hidden=None)), plan, x, on=topology, outputs=plan, large=2**16)
    kinds = {finding.kind for finding in proof.findings.at_least("warning")}
    assert {"donation", "unexpected"} & kinds


def test_a_step_that_does_not_fit_is_an_error_by_default():
    topology = sr.Topology("h100:8")
    mesh = topology.mesh(SIZES)
    plan = sr.plan(params(layers=32, width=4096), RULES, mesh)
    x = batch(mesh, 2**19, 4096)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=plan.shardings())
    proof = sr.prove(jitted, plan, x, on=topology, outputs=plan)
    (finding,) = [row for row in proof.findings if row.kind == "peak"]
    assert finding.level == "error"
    assert finding.bytes == proof.memory.peak - 80 * 10**9 > 0
    assert "over the memory of 80.0 GB" in finding.message
    roomy = sr.prove(jitted, plan, x, on=mesh, outputs=plan, hbm=2**40)
    assert not [row for row in roomy.findings if row.kind == "peak"]


def test_arguments_on_described_gpus_say_their_memory():
    x = batch(sr.Topology("h200:8").mesh(SIZES), 2**18, 2**17)
    proof = sr.prove(lambda x: (x @ x.T).sum(), x)
    (finding,) = proof.findings.at_least("error")
    assert (finding.kind, "over the memory of 141 GB" in finding.message) == ("peak", True)


def test_arguments_in_the_host_s_memory_are_refused():
    """JAX would count them in the device's: it describes GPUs without kinds of memory."""
    topology = sr.Topology("h100:8")
    host = NamedSharding(HERE, P("fsdp"), memory_kind="pinned_host")
    rules = [(".*", sr.RuleSpec("fsdp", memory_kind="pinned_host"))]
    there = jax.ShapeDtypeStruct((8, 8), "float32", sharding=host)
    for x in (there, sr.plan(there, rules, HERE)):
        with pytest.raises(ValueError, match="'pinned_host' .*; leave the kind out to count it so"):
            sr.prove(lambda x: jax.device_put(x, jax.memory.Space.Device), x, on=topology)


def test_arrays_that_a_step_keeps_on_the_host_are_not_counted():
    mesh = sr.Topology("h100:8").mesh(SIZES)
    plan = sr.plan(params(), RULES, mesh)
    x = batch(mesh, rows=2**16)
    policies = jax.checkpoint_policies
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["x"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip

    def peak(policy):
        def layer(x, w):
            x = checkpoint_name(x, "x")
            return x + jax.numpy.tanh(x @ w["up"]) @ w["down"], None

        def loss(params, x):
            saved = jax.checkpoint(layer, policy=policy)
            return (jax.lax.scan(saved, x, params)[0] ** 2).mean()

        return sr.prove(jax.grad(loss), plan, x, on=mesh).memory.peak

    kept = 4 * 4 * 2**16 * 256 // SIZES["fsdp"]
    assert peak(policies.nothing_saveable) - peak(offload) > 0.5 * kept


def test_hosts_change_the_order_of_what_is_sent_and_not_its_bytes():
    """The same mesh of 16 GPUs on one NVLink domain and on two."""
    totals = []
    for name in ("gb200:16", "gb200:8x2"):
        mesh = sr.Topology(name).mesh(fsdp=8, tp=2)
        plan = sr.plan(params(), RULES, mesh)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=plan.shardings())
        totals.append(sr.prove(jitted, plan, batch(mesh), on=mesh, outputs=plan).program.sent)
    assert totals[0] == totals[1]


ANSWERS = [
    (
        "step_on --on h100:4x2 --mesh fsdp=8 --fail-on warning",
        0,
        r"it fits: .*, on h100:4x2, fsdp=8 \(fsdp: DCN and NVLink\), in ",
    ),
    ("too_large --on h100:4 --mesh fsdp=4", 1, r"it does not fit: .*error\[peak\]"),
    ("step_on --on h100:8x2 --slices 2 --mesh fsdp=32", 2, "GPUs have hosts, not slices; give 'h100:8x4'"),
]


@pytest.mark.parametrize(("words", "code", "told"), ANSWERS)
def test_the_command_proves_for_gpus(tmp_path, monkeypatch, words, code, told):
    (tmp_path / "own_gpu_step.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = invoke("prove", *f"own_gpu_step:{words}".split())
    assert (done.exit_code, bool(re.search(told, done.stdout + done.stderr, re.DOTALL))) == (code, True), done


@pytest.mark.slow
def test_the_example_of_405_billion_parameters():
    """The same bytes as on 512 TPUs, and a reason for all but a few."""
    from examples import prove_405b

    topology = sr.Topology("h100:8x64")
    step, arguments, outputs = prove_405b.step_on(topology.mesh(fsdp=64, tp=8))
    proof = sr.prove(step, *arguments, on=topology, outputs=outputs)
    proof.raise_for("warning")
    lost = sum(row.sent for row in proof.collectives if not row.is_expected)
    assert lost < 0.001 * sum(proof.program.sent.values())
    # Arguments, results and what the passes keep: the rest is in use for a moment.
    assert 0.7 < proof.memory.alive / proof.memory.peak < 1.1
