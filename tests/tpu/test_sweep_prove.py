"""`Plan.sweep(prove=)`: the compiler for TPUs ranks the best meshes."""

from __future__ import annotations

import math

import pytest

import shardrules as sr
from tests.plan.test_sweep_step import PLAN, traced_on
from tests.tpu.marks import needs_libtpu

pytestmark = needs_libtpu


def test_the_compiler_ranks_the_first_rows():
    rows = PLAN.sweep(devices="v5e:2x2", step=traced_on, prove=2)
    compiled = [row.compiled for row in rows]
    assert None not in compiled[:2]
    assert compiled[:2] == sorted(compiled[:2])
    assert all(0 < seconds < math.inf for seconds in compiled[:2])
    assert set(compiled[2:]) <= {None}
    assert "compiled" in str(rows).splitlines()[0]


def test_axes_over_slices_are_those_of_the_topology():
    """Of two slices the first axis is over the data centre's network, which takes longer."""
    two = PLAN.sweep(devices=sr.Topology("v5e:2x2", slices=2), step=traced_on)
    one = PLAN.sweep(devices="v5e:2x4", step=traced_on)
    seconds = [
        {tuple(row.mesh.values()): row.time.sent.get(("fsdp",), 0.0) for row in rows}
        for rows in (two, one)
    ]
    both = seconds[0].keys() & seconds[1].keys()
    assert both
    assert all(seconds[0][mesh] > seconds[1][mesh] for mesh in both if mesh[0] > 1)


def test_a_step_that_is_for_one_mesh_is_not_compiled_for_others():
    with pytest.raises(TypeError, match="prove: give step= a function of the mesh"):
        PLAN.sweep(devices="v5e:2x2", step=traced_on({"fsdp": 2, "tp": 2}), prove=2)
