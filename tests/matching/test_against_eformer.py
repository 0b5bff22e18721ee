"""Differential: the installed eformer, on every real rule set and every real manifest."""

from __future__ import annotations

import gc
from functools import cache

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import corpus

eformer = pytest.importorskip("eformer.escale", reason="eformer is not installed")


def is_spec(x):
    return isinstance(x, P)


def matched(match, rules, tree, **options):
    """The tree of specs, or None where no rule matches some leaf."""
    try:
        return match(rules, tree, **options)
    except ValueError as error:
        assert str(error).startswith("Partition rule not found for param: ")
        return None


@cache
def trees(model):
    manifest = corpus.manifest(model)
    built = manifest.nested(corpus.abstract), manifest.flat(corpus.abstract)
    # Out of the collector's sight: it would go through these trees again and again.
    gc.freeze()
    return built


# eformer takes seconds for each of these; the rules that were written for them are tried always.
LARGEST = {"deepseek-v3", "deepseek-v3-bf16", corpus.DEEPSEEK}
PAIRS = [
    pytest.param(
        model,
        rule_set,
        marks=pytest.mark.slow if model in LARGEST and "deepseek" not in rule_set else (),
    )
    for model in corpus.manifest_names()
    for rule_set in corpus.regex_rule_sets()
]


@pytest.mark.parametrize(("model", "rule_set"), PAIRS)
def test_every_rule_set_on_every_manifest(model, rule_set):
    rules = corpus.rules(rule_set)
    nested, flat = trees(model)
    expected = matched(eformer.match_partition_rules, rules, nested)
    assert matched(sr.match_partition_rules, rules, nested) == expected
    if corpus.manifest(model).separator == "/":  # the paths of both trees are the same
        expected = expected and flattened(expected)
    else:
        expected = matched(eformer.match_partition_rules, rules, flat)
    assert matched(sr.match_partition_rules, rules, flat) == expected


def flattened(tree, prefix=""):
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


def outcome(match, rules, tree, **options):
    """Structure and leaves: what == on trees does not look at, such as list against tuple."""
    result = matched(match, rules, tree, **options)
    if result is None and tree is not None:
        return None
    return jax.tree.structure(result, is_leaf=is_spec), jax.tree.leaves(result, is_leaf=is_spec)


KEYS = st.one_of(
    st.sampled_from(["layers", "mlp", "kernel", "bias", "wq", "0", "1", "a b", "é", "", "\n"]),
    st.text(max_size=4),
)
DIMS = st.lists(st.integers(0, 9), max_size=4).map(tuple)
LEAVES = st.one_of(
    DIMS.map(lambda shape: jax.ShapeDtypeStruct(shape, "float32")),
    st.sampled_from([0, 1.5, "text", True]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.integers(-2, 12), inner, max_size=3),
        st.none(),
    ),
    max_leaves=12,
)
SPECS = st.lists(st.sampled_from([None, "tp", "dp", ("dp", "fsdp")]), max_size=4).map(
    lambda entries: P(*entries)
)
PATTERNS = st.sampled_from(
    ["kernel", "layers/.*", r"\d", "^mlp", "wq$", "(a|b|é)", "[^/]+/0", r"\bias", ".", "$^", "1/"]
)  # fmt: skip
RULES = st.lists(st.tuples(PATTERNS, SPECS), max_size=4)


@settings(max_examples=400, deadline=None)
@given(RULES, SPECS | st.none(), TREES, st.sampled_from([0, 0, 10, 200, None]), st.booleans())
def test_generated_trees(rules, catch_all, tree, min_size, strict):
    if catch_all is not None:
        rules = [*rules, (".*", catch_all)]
    options = {"min_size": min_size, "strict": strict}
    expected = outcome(eformer.match_partition_rules, rules, tree, **options)
    assert outcome(sr.match_partition_rules, rules, tree, **options) == expected
