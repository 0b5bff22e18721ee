"""Axes that the mesh lacks: an error at every door, in one form, unless they are declared."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

ARRAY = np.zeros((8, 8), "float32")
TREE = {"a": {"kernel": ARRAY}, "b": ARRAY}
NAMES = {"a/kernel": ("embed", None), "b": ("embed", None)}
DROPPING = sr.Correction(absent="drop")
ALONE = sr.Correction(absent="drop_axis")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))


def rules_of(spec):
    return [(".*", spec)]


def logical_of(spec):
    return sr.LogicalRules([("embed", spec[0])])


DOORS = {
    "named_shardings by rules": lambda spec, mesh, **more: sr.named_shardings(
        TREE, rules_of(spec), mesh, **more
    ),
    "named_shardings by specs": lambda spec, mesh, **more: sr.named_shardings(
        TREE, spec, mesh, **more
    ),
    "named_shardings by names": lambda spec, mesh, **more: sr.named_shardings(
        TREE, logical_of(spec), mesh, names=NAMES, **more
    ),
    "named_shardings with companions": lambda spec, mesh, **more: sr.named_shardings(
        TREE, rules_of(spec), mesh, companions=sr.LORA, **more
    ),
    "plan by rules": lambda spec, mesh, **more: sr.plan(
        TREE, rules_of(spec), mesh, **more
    ).shardings(),
    "plan by specs": lambda spec, mesh, **more: sr.plan(TREE, spec, mesh, **more).shardings(),
    "plan by names": lambda spec, mesh, **more: sr.plan(
        TREE, logical_of(spec), mesh, names=NAMES, **more
    ).shardings(),
    "shard": lambda spec, mesh, **more: placed(sr.shard(TREE, rules_of(spec), mesh, **more)),
    "reshard": lambda spec, mesh, **more: placed(
        sr.reshard(jax.tree.map(jax.numpy.asarray, TREE), rules_of(spec), mesh, **more)
    ),
    "shard by specs": lambda spec, mesh, **more: placed(sr.shard(TREE, spec, mesh, **more)),
    "shard by a plan": lambda spec, mesh, **more: placed(
        sr.shard(TREE, sr.plan(TREE, rules_of(spec), mesh, **more))
    ),
    "with_sharding_constraint": lambda spec, mesh, **more: placed(
        sr.with_sharding_constraint(TREE, spec, mesh, **more)
    ),
    "with_sharding_constraint in jit": lambda spec, mesh, **more: placed(
        jax.jit(lambda tree: sr.with_sharding_constraint(tree, rules_of(spec), mesh, **more))(TREE)
    ),
    "spec_for": lambda spec, mesh, **more: {
        path: NamedSharding(mesh, sr.spec_for(path, (8, 8), rules_of(spec), mesh, **more))
        for path in ("a/kernel", "b")
    },
}
LOGICAL = ("named_shardings by names", "plan by names")


def placed(tree):
    return jax.tree.map(lambda array: array.sharding, tree)


def is_placed(found, mesh, spec):
    on = NamedSharding(mesh, spec)
    return all(sharding.is_equivalent_to(on, 2) for sharding in jax.tree.leaves(found))


@pytest.mark.parametrize("door", DOORS)
class TestEveryDoor:
    def test_a_misspelt_axis_is_an_error_of_one_form(self, door, mesh):
        with pytest.raises(ValueError, match="cannot be sharded as the ") as caught:
            DOORS[door](P("tpp"), mesh)
        message = str(caught.value)
        heading, leaf, reason, *_ = message.splitlines()
        assert heading.endswith("say, on the mesh fsdp=2,tp=2:")
        assert heading.startswith(("1 leaf" if door == "spec_for" else "2 leaves") + " cannot be")
        assert leaf.startswith("    a/kernel  shape (8, 8)  ")
        assert "'tpp'" in message.replace(reason, "")
        assert reason == (
            "        the mesh has no axis 'tpp' (did you mean 'tp'?): rename it, add it to the mesh, or "
            "declare that a mesh may lack it: optional_axes=['tpp']"
        )

    def test_one_that_is_there_is_none(self, door, mesh):
        assert is_placed(DOORS[door](P("tp"), mesh), mesh, P("tp"))

    def test_one_that_is_declared_is_dropped_alone(self, door, mesh):
        found = DOORS[door](P(("fsdp", "sp")), mesh, optional_axes=["sp"])
        assert is_placed(found, mesh, P("fsdp"))
        with pytest.raises(ValueError, match="the mesh has no axis 'tpp'"):
            DOORS[door](P(("fsdp", "sp", "tpp")), mesh, optional_axes=["sp"])

    def test_a_correction_that_drops_does(self, door, mesh):
        found = DOORS[door](P(("fsdp", "sp")), mesh, correction=DROPPING, optional_axes=["sp"])
        assert is_placed(found, mesh, P())
        assert is_placed(DOORS[door](P(("fsdp", "sp")), mesh, correction=ALONE), mesh, P("fsdp"))


def test_a_rule_declares_its_own(mesh):
    rules = [("a", sr.RuleSpec(("fsdp", "sp"), optional_axes=["sp"])), (".*", ("tp", "sp"))]
    with pytest.raises(ValueError, match="(?s)^1 leaf .* b  shape .* no axis 'sp'"):
        sr.named_shardings(TREE, rules, mesh)
    found = sr.named_shardings(TREE, rules, mesh, optional_axes=("sp",))
    assert found["a"]["kernel"].spec == P("fsdp", None)
    assert found["b"].spec == P("tp", None)


def test_a_spec_of_shapes_names_an_axis_too(mesh):
    rules = [(".*", sr.fsdp("fdsp", min_bytes=0))]
    with pytest.raises(ValueError, match="did you mean 'fsdp'"):
        sr.named_shardings(TREE, rules, mesh)
    assert sr.named_shardings(TREE, rules, mesh, optional_axes=["fdsp"])["b"].spec == P()


def test_more_than_twenty_are_counted():
    tree = {f"w{index:02}": ARRAY for index in range(23)}
    on = {"tp": 2}
    for rules in (rules_of(P("nope")), P("nope")):
        with pytest.raises(ValueError, match=r"^23 leaves(?s:.*)\n    \.\.\. and 3 more leaves$"):
            sr.named_shardings(tree, rules, on)
        with pytest.raises(ValueError, match="^23 leaves"):
            sr.plan(tree, rules, on).shardings()


def test_a_logical_rule_that_has_lost_its_axes_leaves_the_name_to_the_next():
    """As an axis of one device would, it takes nothing from the rules after it."""
    rules = [("embed", "sp"), ("embed", "tp")]
    for optional, spec in ((["sp"], P("tp", None)), ([], None)):
        given = {"names": NAMES, "optional_axes": optional}
        plan = sr.plan(TREE, sr.LogicalRules(rules), {"tp": 2}, **given)
        if spec is None:
            assert {one.kind for one in plan.check().at_least("error")} == {"unknown-axis"}
        else:
            found = sr.named_shardings(TREE, sr.LogicalRules(rules), {"tp": 2}, **given)
            assert plan.specs()["b"] == found["b"].spec == spec


def test_what_matches_specs_alone_knows_no_mesh():
    assert sr.match_partition_rules(rules_of(P("tpp")), TREE)["b"] == P("tpp")


def test_a_plan_keeps_what_is_declared():
    rules = [("a", (("fsdp", "sp"), "tp"))]
    plan = sr.plan(TREE, [*rules, ("b", "tp")], {"fsdp": 2, "tp": 2}, optional_axes=["sp"])
    for other in (
        plan.on_mesh({"fsdp": 4, "tp": 2}),
        plan.with_rules([*rules, ("b", "fsdp")]),
        plan.for_optimizer({"mu": TREE}),
        sr.plan(TREE, plan),
        sr.suggest(plan, like=sr.Rules(rules)).plan,
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
        for row in rows:
            there = sr.plan(TREE, self.RULES, row.mesh, optional_axes=["fsdp", "tp", "sp"])
            assert row.bytes == there.bytes_per_device().max

    def test_an_axis_that_none_of_them_has_is_a_problem(self):
        plan = sr.plan(TREE, [("a", "tpp"), (".*", "tp")], {"tp": 2})
        assert [row.problems for row in plan.sweep([{"tp": 2}, {"tp": 4}])] == [1, 1]
        assert [row.problems for row in plan.for_optimizer({"mu": TREE}).sweep([{"tp": 2}])] == [1]


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
