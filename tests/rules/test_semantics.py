"""eformer 0.0.101's semantics, one by one and on every real rule set and manifest; and what we add."""

import gc
import importlib
import itertools
import warnings
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import corpus
from tests.support.random_trees import RULES, SPECS, trees
from tests.support.slow import slow
from tests.support.trees import paths_of

TREE = {"w": np.zeros((4, 8)), "b": np.zeros(8), "step": np.array(3), "lr": 0.1}
THREE = [("w", P("tp", None)), ("b", P("tp", "dp")), ("step|lr", P("dp"))]


@pytest.fixture(params=["shardrules", "eformer"])
def match(request):
    is_ours = request.param == "shardrules"
    return (sr if is_ours else request.getfixturevalue("eformer")).match_partition_rules


WHOLE = P("tp", None)
W = [("w", WHOLE)]
NEEDS_NO_RULE = {"step": np.array(3), "lr": 0.1, "name": "x"}


@pytest.mark.parametrize(
    ("rules", "tree", "options", "specs"),
    [
        # Scalars and leaves without a shape are replicated, specs too long cut.
        (THREE, TREE, (), {"w": WHOLE, "b": P("tp"), "step": P(), "lr": P()}),
        ([], NEEDS_NO_RULE, (), {"step": P(), "lr": P(), "name": P()}),
        ([("^$", P("dp"))], np.zeros(3), (), P("dp")),
        # What is not strict looks at no shape.
        (THREE, TREE, (1000, False), {"w": WHOLE, "b": P("tp", "dp"), "step": P("dp"), "lr": P("dp")}),
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
        match(THREE, TREE, 16)
        match(THREE, TREE)
    logged = [(str(w.message), w.category) for w in record]
    assert logged == [(text, UserWarning) for text in (SAFER, TRIMMED) if word != "0"]
    if match is sr.match_partition_rules:
        assert {w.filename for w in record} <= {__file__}


@pytest.fixture(scope="module")
def eformer():
    return pytest.importorskip("eformer.escale", reason="eformer is not installed")


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


def are_family(*names):
    letters = [name.replace("_", "").replace("-", "").lower() for name in names]
    return any(all(family in each for each in letters) for family in FAMILIES)


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
def test_every_rule_set_on_every_manifest(eformer, model, rule_set):
    rules = corpus.rules(rule_set)
    nested, flat = trees_of(model)
    expected = matched(eformer.match_partition_rules, rules, nested)
    assert matched(sr.match_partition_rules, rules, nested) == expected
    if corpus.manifest(model).separator == "/":  # the paths of both trees are the same
        expected = expected and paths_of(expected)
    else:
        expected = matched(eformer.match_partition_rules, rules, flat)
    assert matched(sr.match_partition_rules, rules, flat) == expected


def outcome(match, rules, tree, **options):
    """Structure and leaves: what == on trees does not look at, such as list against tuple."""
    result = matched(match, rules, tree, **options)
    if result is None and tree is not None:
        return None
    return jax.tree.structure(result, is_leaf=is_spec), jax.tree.leaves(result, is_leaf=is_spec)


@given(RULES, SPECS | st.none(), trees(0, 1.5, "text", True), st.sampled_from([0, 0, 10, 200, None]), st.booleans())
def test_generated_trees(eformer, rules, catch_all, tree, min_size, strict):
    if catch_all is not None:
        rules = [*rules, (".*", catch_all)]
    options = {"min_size": min_size, "strict": strict}
    expected = outcome(eformer.match_partition_rules, rules, tree, **options)
    assert outcome(sr.match_partition_rules, rules, tree, **options) == expected
