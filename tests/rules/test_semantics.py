"""eformer 0.0.101's semantics, one by one; and what we add."""

from __future__ import annotations

import warnings

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr

TREE = {"w": np.zeros((4, 8)), "b": np.zeros(8), "step": np.array(3), "lr": 0.1}
RULES = [("w", P("tp", None)), ("b", P("tp", "dp")), ("step|lr", P("dp"))]


@pytest.fixture(params=["shardrules", "eformer"])
def match(request):
    if request.param == "shardrules":
        return sr.match_partition_rules
    reason = "eformer is not installed"
    return pytest.importorskip("eformer.escale", reason=reason).match_partition_rules


def test_scalars_shapeless_leaves_and_truncation(match):
    assert match(RULES, TREE) == {"w": P("tp", None), "b": P("tp"), "step": P(), "lr": P()}


def test_scalars_need_no_rule(match):
    assert match([], {"step": np.array(3), "lr": 0.1, "name": "x"}) == {
        "step": P(), "lr": P(), "name": P()
    }  # fmt: skip


def test_a_leaf_may_be_the_tree(match):
    assert match([("^$", P("dp"))], np.zeros(3)) == P("dp")


def test_not_strict_looks_at_no_shape(match):
    specs = match(RULES, TREE, 1000, False)
    assert specs == {"w": P("tp", None), "b": P("tp", "dp"), "step": P("dp"), "lr": P("dp")}


@pytest.mark.parametrize(("min_size", "sharded"), [(0, True), (32, True), (33, False)])
def test_min_size(match, min_size, sharded):
    expected = P("tp", None) if sharded else P()
    assert match([("w", P("tp", None))], {"w": np.zeros((4, 8))}, min_size) == {"w": expected}


def test_min_size_comes_after_the_match(match):
    with pytest.raises(ValueError, match="Partition rule not found for param: w"):
        match([("x", P())], {"w": np.zeros(2)}, 1000)


def test_min_size_of_none_is_the_default(match):
    tree = {"small": np.zeros(16383), "large": np.zeros(16384)}
    assert match([(".*", P("tp"))], tree, None) == {"small": P(), "large": P("tp")}


def test_the_same_object_is_given_to_every_leaf():
    spec = P("of this test")  # an equal one would be there from an earlier call
    specs = sr.match_partition_rules([(".*", spec)], {"a": np.zeros(2), "b": np.zeros(3)})
    assert specs["a"] is spec
    assert specs["b"] is spec


def test_unreduced_axes_survive_when_nothing_is_cut():
    spec = P("tp", unreduced={"dp"})
    assert sr.match_partition_rules([(".*", spec)], np.zeros(2)) is spec


def test_min_size_from_the_environment(monkeypatch):
    monkeypatch.setenv("MIN_SHARDING_SIZE", "10")
    tree = {"small": np.zeros(9), "large": np.zeros(10)}
    specs = sr.match_partition_rules([(".*", P("tp"))], tree, None)
    assert specs == {"small": P(), "large": P("tp")}


@pytest.mark.parametrize("word", ["true", "yes", "1", "on"])
def test_logged_moves(monkeypatch, word):
    monkeypatch.setenv("LOG_SHARDING_MOVE", word)
    with pytest.warns(UserWarning) as record:
        sr.match_partition_rules(RULES, TREE, 16)
    assert sorted(str(w.message) for w in record) == [
        "PartitionSpec Related to b was safer and faster being local array.",
    ]
    with pytest.warns(UserWarning) as record:
        sr.match_partition_rules(RULES, TREE)
    assert [str(w.message) for w in record] == [
        f"PartitionSpec Related to b went out of range (will be auto trimed to {P('tp')})."
    ]
    assert record[0].filename == __file__


def test_moves_are_silent_otherwise(monkeypatch):
    monkeypatch.setenv("LOG_SHARDING_MOVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sr.match_partition_rules(RULES, TREE, 16)


def test_logged_moves_are_eformers(monkeypatch):
    constraints = pytest.importorskip(
        "eformer.escale.partition.constraints", reason="eformer is not installed"
    )
    monkeypatch.setattr(constraints, "LOG_SHARDING_MOVE", True)
    monkeypatch.setenv("LOG_SHARDING_MOVE", "true")
    logged = []
    for match in (constraints.match_partition_rules, sr.match_partition_rules):
        with pytest.warns(UserWarning) as record:
            match(RULES, TREE, 5)
            match(RULES, TREE, 100)
        logged.append(sorted((str(w.message), w.category) for w in record))
    assert logged[0] == logged[1]


def test_specs_in_other_forms():
    tree = {k: np.zeros((4, 4)) for k in ("none", "axis", "tuple", "list")}
    rules = [
        ("none", None), ("axis", "tp"), ("tuple", ("dp", ("fsdp", "tp"), None)), ("list", ["dp", ["tp"]])
    ]  # fmt: skip
    assert sr.match_partition_rules(rules, tree) == {
        "none": P(), "axis": P("tp"), "tuple": P("dp", ("fsdp", "tp")), "list": P("dp", ("tp",))
    }  # fmt: skip
    assert sr.match_partition_rules(rules, tree, strict=False)["tuple"] == P(
        "dp", ("fsdp", "tp"), None
    )


def test_other_objects_are_given_as_they_are():
    payload = frozenset({"any", "hashable"})
    device = jax.devices()[0]
    tree = {"a": np.zeros(2), "b": np.zeros((1, 2))}
    assert sr.match_partition_rules([("a", payload), ("b", device)], tree) == {
        "a": payload, "b": device
    }  # fmt: skip
