"""`Rules` as a value: immutable, hashable, picklable, usable from many threads at once."""

import copy
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat.flax_core_spmd import get_logical_axis_rules

PAIRS = [("wq/kernel", P("fsdp", "tp")), (re.compile("BIAS", re.I), P()), (r"(?=x)x", None)]


def test_a_sequence_of_its_pairs():
    rules = sr.Rules(PAIRS)
    assert len(rules) == 3
    assert rules[0] == PAIRS[0]
    assert [pattern for pattern, _ in rules] == [pattern for pattern, _ in PAIRS]
    assert rules.dialect is sr.dialects.EFORMER
    assert str(rules).splitlines() == [
        "3 rules, dialect eformer",
        "rule 0: 'wq/kernel' -> P('fsdp', 'tp')",
        "rule 1: re.compile('BIAS', re.IGNORECASE) -> P()",
        "rule 2: '(?=x)x' -> P()",
    ]


POLICY = {"correction": sr.Correction(indivisible="error"), "optional_axes": ("sp",)}
KINDS = {
    "paths": (sr.Rules, sr.dialects.NNX, sr.dialects.EASYLM, {**POLICY, "min_size": 8}),
    "names": (sr.LogicalRules, sr.dialects.FLAX_CORE, sr.dialects.MAXTEXT, POLICY),
}
OTHER = {"correction": sr.Correction(indivisible="keep"), "optional_axes": (), "min_size": 0}


@pytest.mark.parametrize("like", KINDS)
def test_rules_made_of_rules_lost_their_dialect_and_policy(like):
    make, first, other, policy = KINDS[like]
    rules = make([("w", "tp")], first, **policy)
    assert make(rules) == rules
    assert make(make([("w", "tp")], first)).dialect is first
    # What is given holds, and all else stays.
    for name in policy:
        changed = {name: OTHER[name]}
        assert make(rules, **changed) == make(list(rules), first, **{**policy, **changed})
    assert make(rules, other) == make(list(rules), other, **policy)
    # A dialect brings its own correction, unless the rules have one of their own.
    assert make(make([("w", "tp")], first), other).dialect is other
    assert make(rules, other, correction=other.correction).dialect is other


def test_the_rules_in_force_lost_their_dialect_when_made_into_rules():
    rules = sr.LogicalRules([("w", "tp")], sr.dialects.FLAX_CORE, optional_axes=["sp"])
    with sr.logical_axis_rules(rules):
        assert sr.LogicalRules(get_logical_axis_rules()) == rules


def test_equality_and_hash():
    assert sr.Rules(PAIRS) == sr.Rules(list(PAIRS))
    assert hash(sr.Rules(PAIRS)) == hash(sr.Rules(PAIRS))
    assert sr.Rules(PAIRS) != sr.Rules(PAIRS[:2])
    assert sr.Rules([("a", P())]) != sr.Rules([(re.compile("a", re.I), P())])
    assert sr.Rules(PAIRS) != PAIRS


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_copies_and_pickles(duplicate):
    rules = sr.Rules(PAIRS, memory_budget=4096)
    again = duplicate(rules)
    assert again == rules
    assert again.first_match("a/bias") == 1
    assert again.match({"wq": {"kernel": np.zeros((2, 2))}}) == {"wq": {"kernel": P("fsdp", "tp")}}


def test_immutable():
    rules = sr.Rules(PAIRS)
    with pytest.raises(AttributeError, match="immutable"):
        rules.dialect = None
    with pytest.raises(AttributeError):
        rules.other = 1
    with pytest.raises(AttributeError, match="immutable"):
        del rules._matcher
    with pytest.raises(AttributeError, match="immutable"):
        rules.__init__([("other", None)])
    assert rules == sr.Rules(PAIRS)


def test_nested_use_from_a_leaf():
    """A leaf whose shape property resolves another tree with the same rules."""
    rules = sr.Rules([("inner", P("tp")), (".*", P("dp"))])
    inner = []

    class Leaf:
        @property
        def shape(self):
            inner.append(rules.match({"inner": np.zeros(2), "x": np.zeros(3)}))
            return (4,)

    assert rules.match({"a": Leaf(), "b": [Leaf()]}) == {"a": P("dp"), "b": [P("dp")]}
    assert inner == [{"inner": P("tp"), "x": P("dp")}] * 2


def test_threads_share_rules():
    rules = sr.Rules([(rf"layers/{i}/.*(kernel|é{i})", i) for i in range(40)] + [(".*", -1)], memory_budget=30_000)
    trees = [{"layers": {str((i + t) % 40): {"mlp": {"kernel": 0, f"é{i}": 0}} for i in range(40)}} for t in range(8)]
    expected = [sr.Rules(list(rules)).match(tree, strict=False) for tree in trees]
    barrier = threading.Barrier(8)

    def work(t):
        barrier.wait()
        return [rules.match(trees[t], strict=False) for _ in range(50)]

    with ThreadPoolExecutor(8) as pool:
        for t, results in enumerate(pool.map(work, range(8))):
            assert results == [expected[t]] * 50
