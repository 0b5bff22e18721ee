"""Several real JAX processes on loopback: they agree on the plan, and to the bit on the result.

Each process has four CPU devices; tests/process_worker.py is what they run. Whatever happens, no
process outlives its test.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from tests import process_worker

ROOT = Path(__file__).parent.parent
SECONDS = 150
# With nothing of shardrules: of 58 runs of seven calls each, by two or four processes, four never ended.
needs_allgather = pytest.mark.skipif(
    not hasattr(jax, "set_mesh"),
    reason="process_allgather of this JAX stops or crashes at times on CPU",
)


def run(task, processes, devices, folder):
    """What each of the processes has found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        # Most of the time goes into compiling the step, in each process; unoptimized, half of it.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} "
        "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, "-m", "tests.process_worker", task]
    command += [f"--processes={processes}", f"--port={port}"]
    logs = [folder / f"{index}.log" for index in range(processes)]
    outs = [folder / f"{index}.json" for index in range(processes)]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(processes):
            with logs[index].open("wb") as log:
                workers.append(
                    subprocess.Popen(
                        [*command, f"--index={index}", f"--out={outs[index]}"],
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


@pytest.mark.parametrize(
    ("processes", "devices"),
    [(1, 8), *(pytest.param(n, 4, marks=needs_allgather) for n in (2, 4))],
)
def test_same_plan_and_same_bits(processes, devices, tmp_path):
    found = run("agree", processes, devices, tmp_path)
    assert len({process["fingerprint"] for process in found}) == 1
    wanted = process_worker.unsharded()
    for process in found:
        assert process["digests"] == wanted


@needs_allgather
@pytest.mark.parametrize("processes", [2, 4])
def test_disagreement_is_an_error_in_every_process(processes, tmp_path):
    found = run("disagree", processes, 4, tmp_path)
    plan = "RuntimeError: the plan differs between processes; this is process {}"
    order = "RuntimeError: the order of the mesh's devices differs between processes; this is"
    failed = "RuntimeError: process 1 failed before anything was placed"
    for index, process in enumerate(found):
        odd = index == 1
        starts = {
            "rule": plan.format(index),
            "axes": plan.format(index),
            "shape": plan.format(index),
            "devices": f"{order} process {index}",
            "no rule": "ValueError: " if odd else failed,
            "no array": "TypeError: the leaf ['b'] is 'text'" if odd else failed,
        }
        errors = process["errors"]
        assert errors.keys() == starts.keys()
        for case, start in starts.items():
            assert errors[case].startswith(start), errors[case]
        assert all(f"    process {i}: " in errors["rule"] for i in range(processes))
