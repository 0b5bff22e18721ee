"""Several real JAX processes on loopback: they agree on the plan, and to the bit on the result.

Each process has four CPU devices; tests/support/process_worker.py is what they run. Whatever happens, no
process outlives its test.
"""

import json
import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._place.processes import difference_shown, first_difference, marks_of, row_at
from tests.support import process_worker
from tests.support.folders import ROOT
from tests.support.slow import slow

SECONDS = 150


def run(task, processes, devices, folder, worker=process_worker.__name__):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "SHARDRULES_TEST_FOLDER": str(folder),
        "JAX_PLATFORMS": "cpu",
        # Most of the time goes into compiling the step, in each process; unoptimized, half of it.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
    }
    command = [sys.executable, "-m", worker, task, str(processes), str(port)]
    logs = [folder / f"{index}.log" for index in range(processes)]
    outs = [folder / f"{index}.json" for index in range(processes)]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(processes):
            with logs[index].open("wb") as log:
                workers.append(
                    subprocess.Popen(
                        [*command, str(index), str(outs[index])],
                        cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        deadline = time.monotonic() + SECONDS
        while None in (codes := [worker.poll() for worker in workers]):
            # One that has failed leaves the others waiting.
            if any(codes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(code != 0 for code in codes):
        tails = [f"process {i}: {log.read_text()[-2000:]}" for i, log in enumerate(logs)]
        pytest.fail("\n".join([f"exit codes {codes} (None: stopped here)", *tails]))
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.parametrize(("processes", "devices"), [slow(1, 8), (2, 4), slow(4, 4)])
def test_same_plan_and_same_bits(processes, devices, tmp_path):
    found = run("agree", processes, devices, tmp_path)
    assert len({process["fingerprint"] for process in found}) == 1
    wanted = process_worker.unsharded()
    for process in found:
        assert process["digests"] == wanted


few_and_many = pytest.mark.parametrize("processes", [2, slow(4)])
MESH = process_worker.make_mesh()
FAILURES = process_worker.failures(MESH)
DIFFERENCES = process_worker.differences(MESH, None)
CALLS = process_worker.calls_of_others(MESH, None)


@few_and_many
def test_processes_that_waited_forever(processes, tmp_path):
    """One fails, or differs, in each way; all have an error, and the next call is right in all."""
    found = run("disagree", processes, 4, tmp_path)
    seen = set()
    for rows in zip(*(process["found"] for process in found), strict=True):
        odd, case = rows[0][:2]
        seen.add((odd, case))
        for index, (*same, error, next_is_right) in enumerate(rows):
            assert same == [odd, case]
            assert next_is_right
            check_error(error, odd, case, index, found[0]["devices"])
    assert {case for odd, case in seen if odd is None} == set(FAILURES)
    ways = {*FAILURES, *DIFFERENCES, *CALLS}
    for odd in (0, 1):
        assert not ways - {case for other, case in seen if other == odd}
    # Of 120 calls, those still in the store are the last, the one before, which process 0 may be about to
    # delete, and the exit of a process that is ahead.
    for process in found:
        assert len({key.split("/")[2] for key in process["keys"]}) <= 3
    for index, process in enumerate(found):
        check_audits(process["audited"], index)


AUDITS = {
    "as planned": [],
    "all wrong": ["sharding a"],
    "on a device of each": ["devices b"],
    "alone": [],
    "values": [],
    "values that differ": ["differs b"],
    "values on the host that differ": ["memory-kind b", "differs b"],
}
# Where process 1 has something else: where, what process 0 has there, and what process 1 has.
DIFFERENT_AUDITS = {
    "sharding": ("a", "as planned: planned float32[8, 8] P('fsdp', None)", "an array sharded as P('tp', None): planned"),
    "host": ("b", "as planned: planned float32[8] P()", "an array in this process's memory and on no device: planned float32[8] P()"),
    "missing": ("a", "as planned", "not in the tree"),
    "extra": ("leaf 2 of the tree", "no such leaf", "c not in the plan"),
    "plan": ("a", "as planned", "an array sharded as P('fsdp', None): planned float32[8, 8] P('sp', None)"),
    "values of one": ("a", "as planned: planned float32[8, 8] P('fsdp', None)", "as planned: planned float32[8, 8] P('fsdp', None), values compared"),
}  # fmt: skip


def check_audits(audited, index):
    """The same findings in each process, or an error that names the first path that differs."""
    assert {*audited} == {*AUDITS, *DIFFERENT_AUDITS, "no plan"}
    for case, findings in AUDITS.items():
        assert audited[case] == findings, case
    for case, (path, zero, one) in DIFFERENT_AUDITS.items():
        error = audited[case]
        assert error.startswith("RuntimeError: audit: not the same in process 0 and process 1\n")
        assert f"{path}: process 0 has {zero}" in error, error
        assert f", and process 1 has {one}" in error, error
        assert error.endswith(f"; this is process {index}")
    other = "RuntimeError: audit: process 1 failed before anything was done: TypeError: plan is"
    assert audited["no plan"].startswith("TypeError: plan is None" if index == 1 else other)


def check_error(error, odd, case, index, devices):
    if case in FAILURES and odd in (None, index):
        assert error.startswith(FAILURES[case][1])
    elif case in FAILURES:
        failed = f"RuntimeError: shard: process {odd} failed before anything was done: "
        assert error.startswith(failed + FAILURES[case][1])
    else:
        assert error.endswith(f"; this is process {index}")
        for text in differing(case, odd, devices):
            assert text in error, error


def differing(case, odd, devices):
    """What the message has to say of process 0, and of the first that differs from it."""
    if case in CALLS:
        zero, one = (CALLS[case][1], "shard") if odd == 0 else ("shard", CALLS[case][1])
        return [f"processes make different calls: process 0 calls {zero}, and process", f" {one};"]
    _, where, *texts = DIFFERENCES[case]
    fields = {
        "n": len(devices) // 4,
        "order": " ".join(map(str, devices)),
        "backwards": " ".join(map(str, devices[::-1])),
    }
    usual, other = (text.format(**fields) for text in texts)
    zero, one = (other, usual) if odd == 0 else (usual, other)
    return [f"{where}: process 0 has {zero}", f", and process 1 has {one}", "jax_enable_x64"]


@few_and_many
def test_waiting_ends(processes, tmp_path):
    """For a process that does something of its own, that is interrupted, or that has ended."""
    found = run("wait", processes, 4, tmp_path)
    for rows in zip(*(process["found"] for process in found), strict=True):
        for index, (odd, case, error, next_is_right) in enumerate(rows):
            assert next_is_right
            told = f"{error}\n"
            if case == "late":
                assert told.startswith("RuntimeError: shard: given up after waiting ")
                assert f"for process {odd}; a process that needs longer" in told
                assert "SHARDRULES_WAIT_SECONDS" in told
            elif index == odd:
                assert told.startswith("KeyboardInterrupt")
            else:
                assert f"process {odd} failed while it waited for the others: Keyboard" in told
    assert len(found[0]["found"]) == 4
    for index, process in enumerate(found):
        starts, ends = f"shard: process {index} waits ", f" s for process {int(index != 1)}"
        assert any(line.startswith(starts) and ends in line for line in process["log"])
        if index != 1:
            assert process["left"].startswith("RuntimeError: shard: process 1 has ended")


def test_a_process_that_ends_before_its_first_call_is_not_waited_for(tmp_path):
    found = run("end_early", 2, 4, tmp_path)
    assert found[0]["error"].startswith("RuntimeError: shard: process 1 has ended; this is")
    assert found[0]["seconds"] < SECONDS / 2


class TestWithoutACluster:
    """In this process, which takes itself for one of two."""

    @pytest.fixture(autouse=True)
    def second(self, monkeypatch):
        monkeypatch.setattr(jax, "process_count", lambda: 2)

    def test_several_processes_without_a_coordination_service(self):
        mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
        # Of its own devices alone, it asks nobody.
        assert sr.shard(np.ones(2), P("tp"), mesh).shape == (2,)
        assert sr.gather(jax.numpy.ones(2)).shape == (2,)
        with pytest.raises(RuntimeError, match=r"call jax\.distributed\.initialize\(\) in each"):
            sr.shard(np.ones(2), None)
        with pytest.raises(ValueError, match="no mesh"):
            sr.shard(np.ones(2), P("tp"))

    @pytest.mark.parametrize("given", ["soon", "0", "-1", "nan"])
    def test_a_time_limit_that_is_none(self, given, monkeypatch):
        monkeypatch.setenv("SHARDRULES_WAIT_SECONDS", given)
        with pytest.raises(ValueError, match=f"SHARDRULES_WAIT_SECONDS is '{given}'; it must be"):
            sr.shard(np.ones(2), None)


def test_the_first_difference_is_shown_where_it_is():
    """However long what comes before it."""
    rows = [("['w']", "float32[8] for P()"), ("devices", " ".join(map(str, range(4096))))]
    other = [rows[0], (rows[1][0], rows[1][1].replace(" 4000 ", " 9999 "))]
    index = first_difference(*map(marks_of, (rows, other)))
    a, b = (row_at(each, index) for each in (rows, other))
    message = difference_shown(index, a, b, ("process 0", "process 1"))
    assert " 4000 4001 " in message
    assert " 9999 4001 " in message
    assert len(message) < 600
