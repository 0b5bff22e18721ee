"""`Rules` as a value; which of them are dead or shadowed, checked against `re`; and axes made of several."""

import copy
import pickle
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._rules.rules import matcher_of
from shardrules.compat.flax_core_spmd import get_logical_axis_rules
from tests.support import corpus
from tests.support.slow import MODELS
from tests.support.work import counters

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


@pytest.mark.parametrize("duplicate", [list, copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_equality_hash_and_copies(duplicate):
    again = sr.Rules(duplicate(sr.Rules(PAIRS, memory_budget=4096)))
    assert again == sr.Rules(PAIRS)
    assert again.first_match("a/bias") == 1
    assert again.match({"wq": {"kernel": np.zeros((2, 2))}}) == {"wq": {"kernel": P("fsdp", "tp")}}
    assert hash(sr.Rules(PAIRS)) == hash(sr.Rules(PAIRS))
    assert sr.Rules(PAIRS) != sr.Rules(PAIRS[:2])
    assert sr.Rules([("a", P())]) != sr.Rules([(re.compile("a", re.I), P())])
    assert sr.Rules(PAIRS) != PAIRS


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


def coverage_by_re(patterns, paths):
    hits = [[i for i, p in enumerate(patterns) if re.search(p, path)] for path in paths]
    matched = Counter(i for found in hits for i in found)
    won = Counter(found[0] for found in hits if found)
    lost = Counter((i, found[0]) for found in hits for i in found[1:])
    return matched, won, lost, sum(not found for found in hits)


def assert_same_coverage(coverage, patterns, paths):
    matched, won, lost, unmatched = coverage_by_re(patterns, paths)
    rules = range(len(patterns))
    assert coverage.matched == tuple(matched[i] for i in rules)
    assert coverage.won == tuple(won[i] for i in rules)
    assert coverage.unmatched == unmatched
    pairs = {(i, j): n for i, by in coverage.lost.items() for j, n in by.items()}
    assert pairs == dict(lost)


@pytest.mark.parametrize("rule_set", corpus.regex_rule_sets()[::7])
@pytest.mark.parametrize("model", MODELS[::6])
def test_real_rules_on_real_models(model, rule_set):
    rules = corpus.rules(rule_set)
    manifest = corpus.manifest(model)
    tree = manifest.flat(corpus.abstract)
    paths = [path for path, leaf in tree.items() if leaf.shape]
    patterns = [pattern for pattern, _ in rules]
    assert_same_coverage(sr.Rules(rules).coverage(tree), patterns, paths)
    assert_same_coverage(matcher_of(sr.Rules(rules)).coverage_of_paths(paths), patterns, paths)


def test_paths_beside_each_other():
    patterns = ["wq/kernel", "(?=x)lookahead|é", "k.rnel$", "", "\ud800"]
    paths = ["", *["wq/kernel"] * 2, "é/kernel", "wq/kérnel", "\ud800/kernel", "wq/\U0001f600"]
    matcher = matcher_of(sr.Rules([(pattern, P()) for pattern in patterns]))
    assert_same_coverage(matcher.coverage_of_paths(paths), patterns, paths)


def test_dead_and_shadowed():
    patterns = ["wq/kernel", "kernel", "wk/kernel", r"(?=x)lookahead", "lora", "norm", ".*", ""]
    tree = {"layers": [{"wq": {"kernel": 0}, "wk": {"kernel": 0}, "norm": 0}] * 3, "odd": {"xlookahead": 0}}
    rules = sr.Rules([(p, None) for p in patterns])
    coverage = rules.coverage(tree, strict=False)
    paths = [f"layers/{i}/{name}" for i in range(3) for name in ("norm", "wk/kernel", "wq/kernel")]
    paths.append("odd/xlookahead")
    assert_same_coverage(coverage, patterns, paths)
    assert coverage.dead == (3, 4)
    assert coverage.shadowed == {2: (1,), 7: (0, 1, 5, 6)}
    assert coverage.unmatched == 0
    with_fallback = sr.Rules([("x(?=look)", None), (".*", None)]).coverage(tree, strict=False)
    assert with_fallback.won == (1, 9)


def test_leaves_that_need_no_rule_are_not_counted():
    tree = {"a": np.zeros(3), "b": np.float32(1), "c": "text"}
    rules = sr.Rules([("a|b", P())])
    assert rules.coverage(tree).matched == (1,)
    assert rules.coverage(tree).unmatched == 0
    assert rules.coverage(tree, strict=False).unmatched == 1
    assert sr.Rules([]).coverage(tree) == sr.types.Coverage((), (), 1, {})


def test_all_matches_learns_like_first_match():
    rules = sr.Rules([(r"layers/\d+/.*kernel", None), ("wq", None), (".*", None)])
    for _ in range(40):
        assert rules.all_matches("layers/3/wq/kernel") == [0, 1, 2]
    learnt = counters(rules)
    assert rules.all_matches("layers/3/wq/kernel") == [0, 1, 2]
    assert counters(rules) == learnt


PREFIX = sr.Correction(indivisible="prefix")
PARTS = {"tp": ("kv", "rep")}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("tp", (("kv", "rep"),)),
        ((None, ("fsdp", "tp")), (None, ("fsdp", "kv", "rep"))),
        (P(None, ("fsdp", "tp")), P(None, ("fsdp", "kv", "rep"))),
        (P("fsdp", P.UNCONSTRAINED), P("fsdp", P.UNCONSTRAINED)),
        (P("fsdp", reduced={"tp"}), P("fsdp", reduced={"kv", "rep"})),
        (None, None),
        (sr.fsdp("tp", within=(None, "tp2")), sr.fsdp(("kv", "rep"), within=(None, "tp2"))),
        (
            sr.RuleSpec("tp", PREFIX, units=(2,), memory_kind="pinned_host", optional_axes=["tp"]),
            sr.RuleSpec((("kv", "rep"),), PREFIX, units=(2,), memory_kind="pinned_host", optional_axes=["kv", "rep"]),
        ),
        (frozenset({"tp"}), frozenset({"tp"})),  # an object of the user's own
    ],
)  # fmt: skip
def test_each_spec(spec, expected):
    rules = sr.Rules([("w", spec), ("v", "tp")], min_size=8, memory_budget=0, optional_axes=["tp"])
    pairs = [("w", expected), ("v", (("kv", "rep"),))]
    assert rules.with_axes(PARTS) == sr.Rules(pairs, min_size=8, optional_axes=["kv", "rep"])


def test_logical_rules():
    rules = sr.LogicalRules(
        [("kv_heads", "tp"), ("mlp", ("fsdp", "tp")), ("embed", "fsdp"), ("norm", None), ("x", P.UNCONSTRAINED)],
        sr.dialects.MAXTEXT,
        optional_axes=["tp", "fsdp"],
    )  # fmt: skip
    split = rules.with_axes(PARTS)
    assert split.dialect == rules.dialect
    assert split.optional_axes == ("kv", "rep", "fsdp")
    assert tuple(split) == (
        ("kv_heads", ("kv", "rep")),
        ("mlp", ("fsdp", "kv", "rep")),
        ("embed", "fsdp"),
        ("norm", None),
        ("x", P.UNCONSTRAINED),
    )
