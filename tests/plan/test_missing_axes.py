"""Axes that a mesh may lack: in sweeps over meshes, and in the findings of rules for names."""

from __future__ import annotations

import numpy as np

import shardrules as sr

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


class TestSweep:
    RULES = (("a", ("fsdp", "tp")), (".*", (("fsdp", "sp"), None)))

    def test_a_mesh_may_lack_axes_of_the_others(self):
        plan = sr.plan(TREE, self.RULES, {"fsdp": 2, "sp": 1, "tp": 2})
        rows = plan.sweep([{"fsdp": 4}, {"tp": 4}, {"fsdp": 2, "tp": 2}])
        assert {tuple(row.mesh): row.problems for row in rows} == {
            ("fsdp",): 0, ("tp",): 0, ("fsdp", "tp"): 0}  # fmt: skip
        optional = sr.Rules(self.RULES, optional_axes=["fsdp", "tp", "sp"])
        for row in rows:
            assert row.bytes == sr.plan(TREE, optional, row.mesh).bytes_per_device().max


class TestLogicalFindings:
    RULES = sr.LogicalRules([
        ("vocab", ("tensor", "autoregressive")), ("embed", ("fsdp", "sequence")), ("mlp", "tensor"),
    ])  # fmt: skip
    NAMES = {"a/kernel": ("vocab", "embed"), "b": ("embed", "mlp")}

    def test_only_the_rules_that_name_an_axis_are_blamed_for_it(self):
        sizes = {"fsdp": 2, "tensor": 2}
        found = sr.plan(TREE, self.RULES, sizes, names=self.NAMES).check().at_least("error")
        by_rule = {one.rule: one.message for one in found}
        assert by_rule.keys() == {0, 1}
        assert by_rule[1].startswith("rule 1 'embed' -> ('fsdp', 'sequence'): the mesh has no axis")
        assert "'autoregressive'" in by_rule[0]
        whole = {**sizes, "sequence": 1, "autoregressive": 1}
        assert not sr.plan(TREE, self.RULES, whole, names=self.NAMES).check().at_least("error")
