"""What TPUs' compiler makes of a solution, beside what was predicted."""

from __future__ import annotations

import jax

import shardrules as sr
from tests.solve.test_outcome import IN_PARTS, MANY, TREE, shape, train
from tests.tpu.marks import needs_libtpu

pytestmark = needs_libtpu


def test_the_compiler_adds_gradients_up_in_parts_as_predicted():
    """XLA for the CPU adds them whole: tests/solve/test_outcome.py has by how much."""
    plan = sr.plan(TREE, [(".*", ())], {"fsdp": 4, "tp": 2})
    step = sr.trace(jax.jit(train, donate_argnums=0), plan, shape(MANY, 512))
    solution = sr.solve(step, sr.Topology("v5e:2x4"), keep=IN_PARTS)
    (row,) = solution.prove(rounds=1, effort="fast").rounds
    weights, devices = 2 * 4 * 512 * 2048, 8
    sent = sum(sent.compiled for sent in row.sent)
    # Weights are gathered, and their gradients added: in parts, which sends half as much.
    assert sent < 2.5 * weights * (devices - 1) / devices
    assert not list(row._far()), row
