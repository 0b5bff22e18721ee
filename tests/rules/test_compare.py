"""compare: the leaves about which two rule lists differ, also across dialects."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import corpus


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


TREE = {"layers": [{"wq": array(8, 8), "bias": array(8)}], "step": array(), "one": array(1)}


def test_nothing_differs():
    rules = [("wq", ("fsdp", "tp")), (".*", ("fsdp",))]
    assert sr.compare(TREE, rules, sr.Rules(rules)) == []
    full = [(r"\d/wq", P("fsdp", "tp")), (".*", P("fsdp"))]
    assert sr.compare(TREE["layers"], rules, sr.Rules(full, sr.dialects.BIG_VISION)) == []


def test_the_same_sharding_in_other_words():
    ours = [("wq", P("tp", None)), ("bias", P(("fsdp",))), ("one", P())]
    theirs = [("wq", P("tp")), ("bias", P("fsdp", None)), ("one", P(None))]
    assert sr.compare(TREE, ours, theirs) == []


def test_each_side_is_told():
    rules_a = [("wq", P("fsdp", "tp")), ("bias|one", P("tp"))]
    rules_b = sr.Rules([(r"\['wq'\]", P("tp")), (r"\['bias'\]", P("tp"))], sr.dialects.KEYSTR)
    (difference,) = sr.compare(TREE["layers"][0], rules_a, rules_b)
    assert difference == sr.types.Difference(
        path="wq",
        shape=(8, 8),
        a=sr.types.Decision(P("fsdp", "tp"), 0, "wq", None),
        b=sr.types.Decision(P("tp"), 0, r"\['wq'\]", None),
    )
    (turned,) = sr.compare(TREE["layers"][0], rules_b, rules_a)
    assert (turned.path, turned.a, turned.b) == ("['wq']", difference.b, difference.a)


def test_problems_are_differences():
    rules = [("wq", P("tp")), ("bias", P("tp")), ("one", P("tp"))]
    keras = sr.Rules(
        [(".*wq", P("tp")), ("layers.*q", None), (".*bias", ("tp", None))], sr.dialects.KERAS
    )
    found = {d.path: d for d in sr.compare(TREE, rules, keras)}
    assert {path: (d.b.spec, d.b.rule, d.b.problem) for path, d in found.items()} == {
        "layers/0/wq": (None, None, "ambiguous"),
        "layers/0/bias": (None, 2, "spec longer than rank"),
        "one": (P(), None, None),
    }
    (unmatched,) = sr.compare({"b": array(2)}, [], [("b", None)])
    assert unmatched.a == sr.types.Decision(None, None, None, "unmatched")


def test_the_same_problem_is_no_difference():
    assert sr.compare(TREE, [], sr.Rules([("x", None)])) == []


def test_leaves_that_need_no_rule_differ_by_dialect():
    rules = [(".*", P("tp"))]
    (difference,) = sr.compare(TREE, rules, sr.Rules(rules, sr.dialects.EASYLM))
    assert (difference.path, difference.a.rule, difference.b.rule) == ("one", 0, None)


def test_specs_whole_and_cut():
    rules = [(".*", P("dp", "tp"))]
    whole = sr.Rules(rules, replace(sr.dialects.EFORMER, rank="keep"))
    assert [d.path for d in sr.compare(TREE, rules, whole)] == ["layers/0/bias", "one"]


def test_min_size():
    rules = [(".*", P("tp"))]
    assert sr.compare(TREE, rules, sr.Rules(rules, sr.dialects.SPECTRAX), min_size=16) == []
    (difference,) = sr.compare(
        TREE, [("wq|one", P("tp"))], sr.Rules(rules, sr.dialects.SPECTRAX), min_size=16
    )
    assert (difference.path, difference.a.problem) == ("layers/0/bias", "unmatched")


def test_other_objects_and_rule_specs():
    token = frozenset({"any"})
    correction = sr.Correction(indivisible="error")
    rules = [("wq", sr.RuleSpec(("tp",), correction)), ("bias", token), ("one", None)]
    assert sr.compare(TREE, rules, [("wq", "tp"), ("bias", token), ("one", ())]) == []
    (difference,) = sr.compare(TREE, rules, [("wq", "tp"), ("bias", None), ("one", None)])
    assert (difference.path, difference.a.spec) == ("layers/0/bias", token)


def test_none_in_the_tree_is_no_leaf():
    tree = {"a": None, "b": array(4), "c": {}}
    assert [d.path for d in sr.compare(tree, [("b", "x")], [("b", "y")])] == ["b"]


def test_a_migration():
    """EasyDeL's rules of two versions of a model on the whole of it."""
    old = corpus.rules("easydel__deepseek_v2-DeepseekV2Config-v0.0.80")
    new = corpus.rules("easydel__deepseek_v3-DeepseekV3Config-v0.2.0")
    tree = corpus.manifest("easydel-deepseek-v3").nested(corpus.abstract)
    differences = sr.compare(tree, old, new)
    specs = [sr.match_partition_rules(rules, tree) for rules in (old, new)]
    leaves = [jax.tree.leaves(side, is_leaf=lambda x: isinstance(x, P)) for side in specs]
    assert 0 < len(differences) <= sum(a != b for a, b in zip(*leaves, strict=True))
    assert all(d.a.rule is not None and d.b.rule is not None for d in differences)


def test_what_rules_may_not_be():
    with pytest.raises(TypeError, match="rule 0"):
        sr.compare(TREE, ["x"], [])


def test_of_a_leaf_only_the_shape_is_read():
    class Leaf:
        shape = (8, 8)

        @property
        def dtype(self):
            raise RuntimeError("compare read the dtype")

    (difference,) = sr.compare({"a": [Leaf()]}, [("a", "tp")], [("a", "fsdp")])
    assert difference.path == "a/0"
    assert difference.shape == (8, 8)
