"""Dead and shadowed rules, and all matches of a path: one pass, checked against `re`."""

import re
from collections import Counter

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._rules.rules import matcher_of
from tests.support import corpus
from tests.support.slow import MODELS
from tests.support.work import counters


def coverage_by_re(patterns, paths):
    """The same by the obvious loops."""
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
