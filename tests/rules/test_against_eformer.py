"""Differential: the installed eformer, on every real rule set and every real manifest."""

import gc
import itertools
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import corpus
from tests.support.random_trees import RULES, SPECS, trees
from tests.support.slow import slow

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
def trees_of(model):
    manifest = corpus.manifest(model)
    built = manifest.nested(corpus.abstract), manifest.flat(corpus.abstract)
    # Out of the collector's sight: it would go through these trees again and again.
    gc.freeze()
    return built


FAMILIES = ("deepseek", "gpt2", "gptj", "llama", "mixtral", "t5", "whisper")
MODELS, RULE_SETS = corpus.manifest_names(), corpus.regex_rule_sets()
SMALLER = [model for model in MODELS if model not in corpus.LARGEST]


def family(name):
    letters = name.replace("_", "").replace("-", "").lower()
    return next((family for family in FAMILIES if family in letters), None)


def are_family(model, rule_set):
    return family(model) is not None and family(model) == family(rule_set)


def is_tried_always(model, rule_set):
    """Rules on the models of their own family, and each rule set on one more, in turn."""
    turn = SMALLER[RULE_SETS.index(rule_set) % len(SMALLER)]
    return model in SMALLER and (are_family(model, rule_set) or model == turn)


# The largest models, for which eformer takes up to ten seconds, see the rules of their family.
PAIRS = [
    pair if is_tried_always(*pair) else slow(*pair)
    for pair in itertools.product(MODELS, RULE_SETS)
    if pair[0] in SMALLER or are_family(*pair)
]


@pytest.mark.parametrize(("model", "rule_set"), PAIRS)
def test_every_rule_set_on_every_manifest(model, rule_set):
    rules = corpus.rules(rule_set)
    nested, flat = trees_of(model)
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


@given(RULES, SPECS | st.none(), trees(0, 1.5, "text", True), st.sampled_from([0, 0, 10, 200, None]), st.booleans())
def test_generated_trees(rules, catch_all, tree, min_size, strict):
    if catch_all is not None:
        rules = [*rules, (".*", catch_all)]
    options = {"min_size": min_size, "strict": strict}
    expected = outcome(eformer.match_partition_rules, rules, tree, **options)
    assert outcome(sr.match_partition_rules, rules, tree, **options) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model", ["easydel-mixtral-8x22b", "flax-gpt2"])
def test_shardings_of_arrays_that_fit(model):
    axes = ("dp", "fsdp", "ep", "tp", "sp")
    on = Mesh(np.array(jax.devices()[:8]).reshape(1, 4, 1, 2, 1), axes)
    rules = corpus.rules("easydel__mixtral-MixtralConfig-v0.1.4")
    rules = [*rules, (".*", P())]
    tree = corpus.manifest(model).flat(corpus.abstract)
    specs = eformer.match_partition_rules(rules, tree)
    ours = sr.named_shardings(tree, rules, on)
    for path, leaf in tree.items():
        with on:  # what eformer reads
            theirs = eformer.get_corrected_named_sharding(leaf.shape, specs[path], False)
        assert ours[path] == theirs, path
