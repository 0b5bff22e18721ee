"""Axes of meshes: what they are for by their names, and those that a mesh may lack."""

from __future__ import annotations

import numpy as np
import pytest

import shardrules as sr
from shardrules._plan.path_words import data_axes_among, use_of, uses_of
from tests.support import models

ARRAY = np.zeros((8, 8), "float32")
TREE = {"a": {"kernel": ARRAY}, "b": ARRAY}


def test_a_plan_keeps_what_is_declared():
    rules = [("a", (("fsdp", "sp"), "tp"))]
    given = sr.Rules([*rules, ("b", "tp")], optional_axes=["sp"])
    plan = sr.plan(TREE, given, {"fsdp": 2, "tp": 2})
    for other in (
        plan.on_mesh({"fsdp": 4, "tp": 2}),
        plan.with_rules(sr.Rules([*rules, ("b", "fsdp")], optional_axes=["sp"])),
        plan.for_optimizer({"mu": TREE}),
        sr.plan(TREE, plan),
    ):
        assert not other.check().at_least("error")
        other.shardings()


def test_a_mesh_may_lack_axes_of_the_others():
    rules = (("a", ("fsdp", "tp")), (".*", (("fsdp", "sp"), None)))
    rows = sr.plan(TREE, rules, {"fsdp": 2, "sp": 1, "tp": 2}).sweep([{"fsdp": 4}, {"tp": 4}, {"fsdp": 2, "tp": 2}])
    optional = sr.Rules(rules, optional_axes=["fsdp", "tp", "sp"])
    for row in rows:
        assert (row.problems, row.bytes) == (0, sr.plan(TREE, optional, row.mesh).bytes_per_device().max)


def test_only_the_rules_that_name_an_axis_are_blamed_for_it():
    rules = [("vocab", ("tensor", "autoregressive")), ("embed", ("fsdp", "sequence")), ("mlp", "tensor")]
    names, sizes = {"a/kernel": ("vocab", "embed"), "b": ("embed", "mlp")}, {"fsdp": 2, "tensor": 2}
    found = sr.plan(TREE, sr.LogicalRules(rules), sizes, names=names).check().at_least("error")
    by_rule = {one.rule: one.message for one in found}
    assert by_rule.keys() == {0, 1}
    assert by_rule[1].startswith("rule 1 'embed' -> ('fsdp', 'sequence'): the mesh has no axis")
    assert "'autoregressive'" in by_rule[0]
    whole = {**sizes, "sequence": 1, "autoregressive": 1}
    assert not sr.plan(TREE, sr.LogicalRules(rules), whole, names=names).check().at_least("error")


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
