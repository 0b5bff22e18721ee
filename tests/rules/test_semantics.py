"""eformer 0.0.101's semantics, one by one; and what we add."""

import importlib
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


WHOLE = P("tp", None)
W = [("w", WHOLE)]
NEEDS_NO_RULE = {"step": np.array(3), "lr": 0.1, "name": "x"}


@pytest.mark.parametrize(
    ("rules", "tree", "options", "specs"),
    [
        # Scalars and leaves without a shape are replicated, specs too long cut.
        (RULES, TREE, (), {"w": WHOLE, "b": P("tp"), "step": P(), "lr": P()}),
        ([], NEEDS_NO_RULE, (), {"step": P(), "lr": P(), "name": P()}),
        ([("^$", P("dp"))], np.zeros(3), (), P("dp")),
        # What is not strict looks at no shape.
        (RULES, TREE, (1000, False), {"w": WHOLE, "b": P("tp", "dp"), "step": P("dp"), "lr": P("dp")}),
        (W, {"w": np.zeros((4, 8))}, (0,), {"w": WHOLE}),
        (W, {"w": np.zeros((4, 8))}, (32,), {"w": WHOLE}),
        (W, {"w": np.zeros((4, 8))}, (33,), {"w": P()}),
        (W, {"w": np.zeros(16383)}, (None,), {"w": P()}),
        (W, {"w": np.zeros((16384, 1))}, (None,), {"w": WHOLE}),
    ],
)  # fmt: skip
def test_each(match, rules, tree, options, specs):
    assert match(rules, tree, *options) == specs


def test_min_size_comes_after_the_match(match):
    with pytest.raises(ValueError, match="Partition rule not found for param: w"):
        match([("x", P())], {"w": np.zeros(2)}, 1000)


def test_the_same_object_is_given_to_every_leaf():
    spec = P("of this test")  # an equal one would be there from an earlier call
    specs = sr.match_partition_rules([(".*", spec)], {"a": np.zeros(2), "b": np.zeros(3)})
    assert specs["a"] is specs["b"] is spec
    unreduced = P("tp", unreduced={"dp"})  # which survives where nothing is cut
    assert sr.match_partition_rules([(".*", unreduced)], np.zeros(2)) is unreduced


def test_min_size_from_the_environment(monkeypatch):
    monkeypatch.setenv("MIN_SHARDING_SIZE", "10")
    tree = {"small": np.zeros(9), "large": np.zeros(10)}
    specs = sr.match_partition_rules([(".*", P("tp"))], tree, None)
    assert specs == {"small": P(), "large": P("tp")}
    monkeypatch.setenv("MIN_SHARDING_SIZE", "abc")
    with pytest.raises(ValueError, match=r"MIN_SHARDING_SIZE is 'abc'.*number of elements"):
        sr.match_partition_rules([(".*", P("tp"))], tree, None)


SAFER = "PartitionSpec Related to b was safer and faster being local array."
TRIMMED = f"PartitionSpec Related to b went out of range (will be auto trimed to {P('tp')})."


@pytest.mark.parametrize("word", ["true", "yes", "1", "on", "0"])
def test_logged_moves(monkeypatch, match, word):
    monkeypatch.setenv("LOG_SHARDING_MOVE", word)
    if match is not sr.match_partition_rules:  # it has read its environment
        constraints = importlib.import_module("eformer.escale.partition.constraints")
        monkeypatch.setattr(constraints, "LOG_SHARDING_MOVE", word != "0")
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        match(RULES, TREE, 16)
        match(RULES, TREE)
    logged = [(str(w.message), w.category) for w in record]
    assert logged == [(text, UserWarning) for text in (SAFER, TRIMMED) if word != "0"]
    if match is sr.match_partition_rules:
        assert {w.filename for w in record} <= {__file__}


def test_specs_in_other_forms():
    tree = {k: np.zeros((4, 4)) for k in ("none", "axis", "tuple", "list")}
    rules = [
        ("none", None), ("axis", "tp"), ("tuple", ("dp", ("fsdp", "tp"), None)), ("list", ["dp", ["tp"]])
    ]  # fmt: skip
    assert sr.match_partition_rules(rules, tree) == {
        "none": P(), "axis": P("tp"), "tuple": P("dp", ("fsdp", "tp")), "list": P("dp", ("tp",))
    }  # fmt: skip
    assert sr.match_partition_rules(rules, tree, strict=False)["tuple"] == P("dp", ("fsdp", "tp"), None)


def test_other_objects_are_given_as_they_are():
    payload = frozenset({"any", "hashable"})
    device = jax.devices()[0]
    tree = {"a": np.zeros(2), "b": np.zeros((1, 2))}
    assert sr.match_partition_rules([("a", payload), ("b", device)], tree) == {
        "a": payload, "b": device
    }  # fmt: skip
