"""What TPUs' compiler makes of a solution, beside what was predicted."""

from __future__ import annotations

import jax
import pytest

import shardrules as sr
from tests.solve.test_outcome import MANY, TREE, shape, train
from tests.tpu.marks import needs_libtpu

pytestmark = needs_libtpu


def test_the_compiler_adds_gradients_up_in_parts_as_predicted():
    """XLA for the CPU adds them whole: tests/solve/test_outcome.py has by how much."""
    plan = sr.plan(TREE, [(".*", ())], {"fsdp": 4, "tp": 2})
    step = sr.trace(jax.jit(train, donate_argnums=0), plan, shape(MANY, 512))
    (row,) = sr.solve(step, sr.Topology("v5e:2x4")).prove(rounds=1, effort="fast").rounds
    weights, devices = 2 * 4 * 512 * 2048, 8
    # Both are gathered for the products of the gradients, or one of them; and their gradients added.
    assert {sent.axes for sent in row.sent} == {("fsdp",)}
    assert row.sent[0].predicted == pytest.approx(1.5 * weights * (devices - 1) / devices, rel=0.2)
    assert not list(row._far())
