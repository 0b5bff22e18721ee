"""A time limit for the compiler, and what is known of a step when it comes."""

from __future__ import annotations

import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules._program import dump
from tests.tpu.marks import needs_libtpu
from tests.tpu.test_prove import RULES, SIZES, batch, cpu_mesh, params, step


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The directory of temporary files; the time is over when the module is in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def wait(futures, timeout):
        for _ in range(10_000):
            assert not futures[0].done(), "too fast to be cut"
            if any(
                dump._read(path, timeout).text for path in Path(tempfile.gettempdir()).iterdir()
            ):
                return
            time.sleep(0.01)

    monkeypatch.setattr(dump, "wait", wait)
    return tmp_path


def proof_of(topology, *, function=step, timeout=None, **options):
    mesh = topology.mesh(SIZES)
    plan = sr.plan(params(), RULES, mesh)
    jitted = jax.jit(function, donate_argnums=0, **options)
    return sr.prove(
        jitted, plan, batch(mesh), on=topology, outputs=plan, large=2**16, timeout=timeout
    )


@needs_libtpu
@pytest.mark.parametrize("has_outputs", [False, True])
@pytest.mark.parametrize("function", [step, partial(step, hidden=None)])
def test_what_is_known_before_code_generation_is_a_proof(folder, function, has_outputs):
    topology = sr.Topology("v5e:2x4")
    plan = sr.plan(params(), RULES, topology.mesh(SIZES))
    options = {"out_shardings": plan.shardings()} if has_outputs else {}
    proof = proof_of(topology, function=function, timeout=60, **options)
    assert str(proof).startswith(
        "for v5e:2x4, fsdp=4,tp=2 (fsdp: line, tp: ring); no times: code generation did not end in 60 s"
    )
    assert (proof.is_cut, proof.time, proof.compiled, proof.is_cached) == (True, None, None, False)
    whole = proof_of(topology, function=function, **options)  # without a limit
    assert (whole.is_cut, whole.time is None) == (False, False)
    assert proof.findings == whole.findings
    assert proof.collectives == whole.collectives
    totals, other = proof.memory.totals, whole.memory.totals
    assert (totals.arguments, totals.outputs, totals.aliased) == (
        other.arguments, other.outputs, other.aliased,
    )  # fmt: skip
    assert proof.memory.buffers
    assert proof.to_json()["is_cut"]
    # The folder goes when the compiler ends.
    for thread in threading.enumerate():
        if thread.name == "shardrules-compiler":
            thread.join(60)
    assert not list(folder.iterdir())


@needs_libtpu
def test_a_step_that_ends_in_time_is_as_without_a_limit():
    topology = sr.Topology("v5e:2x4")
    assert proof_of(topology, timeout=600).findings == proof_of(topology).findings
    mesh = topology.mesh(SIZES)
    plan = sr.plan(params(layers=32, width=4096), RULES, mesh)
    refusals = []
    for timeout in (None, 600):
        with pytest.raises(sr.OutOfMemory) as caught:
            sr.compile(jax.jit(step), plan, batch(mesh, 2**19, 4096), on=mesh, timeout=timeout)
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1]


def test_nothing_is_known_in_no_time():
    mesh = cpu_mesh()
    slow = jax.jit(lambda x: jnp.tanh(x @ x.T))
    for call in (sr.compile, sr.prove):
        with pytest.raises(TimeoutError, match="the compiler has not ended in 1e-06 s"):
            call(slow, batch(mesh), on=mesh, timeout=1e-6)
    with pytest.raises(ZeroDivisionError):  # of the step itself
        sr.prove(lambda x: 1 / 0, batch(mesh), on=mesh, timeout=1e-6)
    assert not sr.prove(slow, batch(mesh), on=mesh, timeout=600).is_cut


@pytest.mark.parametrize("timeout", [0, -1, True, float("nan"), float("inf"), "600"])
def test_a_limit_that_is_none_is_told(timeout):
    for call in (sr.compile, sr.prove):
        with pytest.raises((TypeError, ValueError), match=r"timeout.*number"):
            call(lambda x: x, jnp.ones(8), timeout=timeout)


@pytest.mark.parametrize("cut", [0, 1, 2, 5, -1])
def test_a_cut_message_has_no_field(cut):
    message = b"\x0a\x80\x01" + b"m" * 128
    assert dump._first_field(message) == b"m" * 128
    assert dump._first_field(message[:cut]) == b""
