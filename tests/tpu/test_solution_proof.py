"""What TPUs' compiler makes of a solution, beside what was predicted."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.program.solve.test_outcome import MANY, TREE, shape, train
from tests.tpu.marks import needs_libtpu

pytestmark = needs_libtpu


def test_the_compiler_adds_gradients_up_in_parts_as_predicted():
    """XLA for the CPU adds them whole: tests/program/solve/test_outcome.py has by how much."""
    topology = sr.Topology("v5e:2x4")
    mesh = topology.mesh(fsdp=8, tp=1)
    plan = sr.plan(TREE, [(".*", ())], mesh)
    step = sr.trace(jax.jit(train, donate_argnums=0), plan, shape(MANY, 512))
    in_parts = [("up$", P("fsdp")), ("down$", P(None, "fsdp"))]
    solution = sr.solve(step, mesh, hardware="v5e", keep=in_parts)
    (row,) = solution.prove(topology, rounds=1).rounds
    (sent,) = row.sent
    # Weights are gathered, and their gradients added in parts, which sends half as much.
    assert sent.compiled < 2 * 2 * 4 * 512 * 2048
    assert sent.predicted == pytest.approx(sent.compiled, rel=0.1), row
