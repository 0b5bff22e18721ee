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


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))


def rules_of(spec, optional=()):
    return sr.Rules([(".*", spec)], optional_axes=optional)


def logical_of(spec, optional):
    return sr.LogicalRules([("embed", spec[0])], optional_axes=optional)


def on_live(tree):
    return jax.tree.map(jax.numpy.asarray, tree)


# What each door says of a spec, by rules that declare optional axes. Specs declare none.
DOORS = {
    "named_shardings by rules": lambda spec, mesh, *axes: sr.named_shardings(TREE, rules_of(spec, *axes), mesh),
    "named_shardings by names": lambda spec, mesh, axes=(): sr.named_shardings(TREE, logical_of(spec, axes), mesh, names=NAMES),
    "plan by rules": lambda spec, mesh, *axes: sr.plan(TREE, rules_of(spec, *axes), mesh).shardings(),
    "plan with companions": lambda spec, mesh, *axes: sr.plan(TREE, rules_of(spec, *axes), mesh, companions=sr.LORA).shardings(),
    "plan by names": lambda spec, mesh, axes=(): sr.plan(TREE, logical_of(spec, axes), mesh, names=NAMES).shardings(),
    "shard": lambda spec, mesh, *axes: placed(sr.shard(TREE, rules_of(spec, *axes), mesh)),
    "shard by a plan": lambda spec, mesh, *axes: placed(sr.shard(TREE, sr.plan(TREE, rules_of(spec, *axes), mesh))),
    "reshard": lambda spec, mesh, *axes: placed(sr.reshard(on_live(TREE), rules_of(spec, *axes), mesh)),
    "with_sharding_constraint": lambda spec, mesh, *axes: placed(sr.with_sharding_constraint(TREE, rules_of(spec, *axes), mesh)),
    "with_sharding_constraint in jit": lambda spec, mesh, *axes: placed(
        jax.jit(lambda tree: sr.with_sharding_constraint(tree, rules_of(spec, *axes), mesh))(TREE)
    ),
    "spec_for": lambda spec, mesh, *axes: {
        path: NamedSharding(mesh, sr.spec_for(path, (8, 8), rules_of(spec, *axes), mesh))
        for path in ("a/kernel", "b")
    },
}  # fmt: skip
BY_SPECS = {
    "named_shardings by specs": lambda spec, mesh: sr.named_shardings(TREE, spec, mesh),
    "plan by specs": lambda spec, mesh: sr.plan(TREE, spec, mesh).shardings(),
    "shard by specs": lambda spec, mesh: placed(sr.shard(TREE, spec, mesh)),
    "with_sharding_constraint by specs": lambda spec, mesh: placed(sr.with_sharding_constraint(TREE, spec, mesh)),
}  # fmt: skip


def placed(tree):
    return jax.tree.map(lambda array: array.sharding, tree)


def is_placed(found, mesh, spec):
    on = NamedSharding(mesh, spec)
    return all(sharding.is_equivalent_to(on, 2) for sharding in jax.tree.leaves(found))


@pytest.mark.parametrize("door", {**DOORS, **BY_SPECS}.items(), ids=[*DOORS, *BY_SPECS])
class TestEveryDoor:
    def test_a_misspelt_axis_is_an_error_of_one_form(self, door, mesh):
        with pytest.raises(ValueError, match=r"the mesh has no axis 'tpp' \(did you mean 'tp'\?\)") as caught:
            door[1](P("tpp"), mesh)
        for part in ("\n    a/kernel", "declare that a mesh may lack it: optional_axes=['tpp']"):
            assert part in str(caught.value)

    def test_one_that_is_there_is_none(self, door, mesh):
        assert is_placed(door[1](P("tp"), mesh), mesh, P("tp"))


@pytest.mark.parametrize("door", DOORS)
def test_one_that_is_declared_is_dropped_alone(door, mesh):
    found = DOORS[door](P(("fsdp", "sp")), mesh, ["sp"])
    assert is_placed(found, mesh, P("fsdp"))
    with pytest.raises(ValueError, match="the mesh has no axis 'tpp'"):
        DOORS[door](P(("fsdp", "sp", "tpp")), mesh, ["sp"])


def test_a_rule_declares_its_own(mesh):
    rules = [("a", sr.RuleSpec(("fsdp", "sp"), optional_axes=["sp"])), (".*", ("tp", "sp"))]
    with pytest.raises(ValueError, match="(?s)^1 leaf .* b  shape .* no axis 'sp'"):
        sr.named_shardings(TREE, rules, mesh)
    found = sr.named_shardings(TREE, sr.Rules(rules, optional_axes=("sp",)), mesh)
    assert found["a"]["kernel"].spec == P("fsdp", None)
    assert found["b"].spec == P("tp", None)


def test_a_spec_of_shapes_names_an_axis_too(mesh):
    rules = [(".*", sr.fsdp("fdsp", min_bytes=0))]
    with pytest.raises(ValueError, match="did you mean 'fsdp'"):
        sr.named_shardings(TREE, rules, mesh)
    assert sr.named_shardings(TREE, sr.Rules(rules, optional_axes=["fdsp"]), mesh)["b"].spec == P()


def test_more_than_twenty_are_counted():
    tree = {f"w{index:02}": ARRAY for index in range(1, 24)}
    on = {"tp": 2}
    for rules in (rules_of(P("nope")), P("nope")):
        told = r"^23 leaves(?s:.*)    w20 .*\n.*\n    \.\.\. and 3 more leaves$"
        with pytest.raises(ValueError, match=told):
            sr.named_shardings(tree, rules, on)
        with pytest.raises(ValueError, match=r"\.\.\. and 5 more patterns"):
            sr.plan(tree, rules, on).shardings()


def test_a_logical_rule_that_has_lost_its_axes_leaves_the_name_to_the_next():
    """As an axis of one device would, it takes nothing from the rules after it."""
    rules = [("embed", "sp"), ("embed", "tp")]
    for optional, spec in ((["sp"], P("tp", None)), ([], None)):
        given = sr.LogicalRules(rules, optional_axes=optional)
        plan = sr.plan(TREE, given, {"tp": 2}, names=NAMES)
        if spec is None:
            assert {one.kind for one in plan.check().at_least("error")} == {"unknown-axis"}
        else:
            found = sr.named_shardings(TREE, given, {"tp": 2}, names=NAMES)
            assert plan.specs()["b"] == found["b"].spec == spec
