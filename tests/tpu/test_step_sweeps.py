"""`sr.sweep` on a slice: all of its meshes, ranked by the time of one of the batch; what does not fit."""

from __future__ import annotations

import json

import shardrules as sr
from tests.program.verify.test_step_sweep import step_on
from tests.support.command_line import invoke
from tests.tpu.marks import needs_libtpu

pytestmark = needs_libtpu


def test_all_meshes_of_a_slice_ranked_by_the_time_of_one_of_the_batch():
    topology = sr.Topology("v5e:2x2")
    rows = sr.sweep(step_on, topology, batch=[2**16, 2**28])
    assert sorted(tuple(row.mesh.values()) for row in rows) == sorted(
        tuple(sizes.values()) for sizes in topology.meshes(("fsdp", "tp")) for _ in range(2)
    )
    fitting = [row for row in rows if row.fits]
    assert [row.seconds for row in fitting] == sorted(row.seconds for row in fitting)
    for row in fitting:
        step, args, outputs = step_on(topology.mesh(row.mesh), **row.choices)
        proof = sr.prove(step, *args, on=topology, outputs=outputs)
        assert (row.peak, row.time) == (proof.memory.peak, proof.time)
        assert row.seconds == proof.time.longest / row.choices["batch"]
    refused = rows[len(fitting) :]
    assert {row.choices["batch"] for row in refused} == {2**28}
    for row in refused:
        assert (row.fits, row.time) == (False, None)
        assert row.peak > topology.hardware.memory_bytes
        assert " of it are f32[" in row.why


def test_the_command():
    done = invoke(
        "sweep", "tests.program.verify.test_step_sweep:step_on", "--on", "v5e:2x2", "--axes", "fsdp,tp",
        "--try", "batch=65536", "--format", "json",
    )  # fmt: skip
    assert (done.exit_code, done.stderr) == (0, "")
    assert [row["fits"] for row in json.loads(done.stdout)["rows"]] == [True] * 3
