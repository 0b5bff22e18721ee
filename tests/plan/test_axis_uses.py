"""What mesh axes are for by their names: one table for `suggest`, `step_time` and `check`."""

from __future__ import annotations

import pytest

import shardrules as sr
from shardrules._plan.path_words import data_axes_among, use_of, uses_of
from tests.support import models

STAGES = ("stage", "pp", "pipe", "pipeline")
# Axes of MaxText, EasyDeL, EasyLM, t5x, axlearn and openpi.
KNOWN = {
    "data": "data", "dp": "data", "sp": "data", "replica_dcn": "data", "dcn_data": "data",
    "diloco": "data", "sequence": "data", "context": "data", "context_autoregressive": "data",
    "fsdp": "fsdp", "fsdp_transpose": "fsdp", "fsdp_0": "fsdp", "zero1": "fsdp",
    "tp": "tensor", "mp": "tensor", "model": "tensor", "tensor": "tensor",
    "tensor_transpose": "tensor", "tensor_sequence": "tensor", "autoregressive": "tensor",
    "expert": "experts", "ep": "experts", **dict.fromkeys(STAGES, "layers"), "x": None,
}  # fmt: skip


@pytest.mark.parametrize(("axis", "use"), KNOWN.items())
def test_the_axes_of_the_field_are_known_in_any_case(axis, use):
    assert use_of(axis) == use_of(axis.upper()) == use
    assert uses_of(["tp", axis])[axis] == (use or "fsdp")
    assert data_axes_among(["tp", axis]) == (() if use in ("tensor", "layers") else (axis,))


@pytest.mark.parametrize("axis", STAGES)
def test_a_stage_of_a_pipeline_is_no_axis_of_batches(axis):
    found = sr.suggest(models.llama(), {axis: 4, "tp": 2})
    assert found.declared["data_axes"] == ()
    (unused,) = found.plan.check()
    assert (unused.level, unused.kind) == ("warning", "unused-axis")
    assert axis in unused.message
    assert data_axes_among({axis: 4, "tp": 2}) == ()


def test_a_suggested_plan_carries_what_is_declared_about_it():
    found = sr.suggest(models.llama(), {"dp": 2, "fsdp": 2, "tp": 2})
    plan = found.plan
    state = {"mu": models.llama(), "nu": models.llama()}
    for one in (plan, plan.on_mesh({"dp": 4, "fsdp": 2, "tp": 1}), plan.for_optimizer(state), sr.plan(models.llama(), plan)):  # fmt: skip
        assert not one.check().at_least("warning")
    assert plan.check() == plan.check(**found.declared)
    # Other rules have declarations of their own.
    other = plan.with_rules(list(plan.rules))
    assert [one.kind for one in other.check()] == ["unused-axis"]
