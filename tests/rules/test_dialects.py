"""Each dialect against a plain restatement of its library, and against the library where it is."""

import os
import random
import re
import tomllib
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat.keras import LayoutMap
from tests.support import references
from tests.support.folders import DATA
from tests.support.random_patterns import compiles, random_pattern, random_text
from tests.support.random_trees import RULES, trees
from tests.support.trees import array, kinds_of_trees, trees_of_libraries

CASES = tomllib.loads((DATA / "dialects.toml").read_text("utf-8"))


def chosen(rules, path):
    """The winner's index, in the words of the restatements; and that of a walk, which must agree."""
    matching = rules.all_matches(path)
    first = rules.first_match(path)
    assert (first is None) == (matching == [])
    if rules.dialect.precedence == "only":
        leaf = {path: array(8, 8)}
        try:
            payload = rules.match(leaf)[path]
        except ValueError as error:
            assert "several rules" in str(error)
            return references.SEVERAL
        return getattr(payload, "rule", None)
    return first


LEAF = array(2)


class Payload:
    """A spec that says which rule it is of."""

    def __init__(self, rule):
        self.rule = rule


def payload_rules(patterns, dialect):
    return sr.Rules([(pattern, Payload(i)) for i, pattern in enumerate(patterns)], dialect)


ALL_CASES = {f"{name}: {case['name']}": (name, case) for name in CASES for case in CASES[name]}


@pytest.mark.parametrize("name", ALL_CASES)
def test_corpus(name):
    name, case = ALL_CASES[name]
    dialect = getattr(sr.dialects, name)
    patterns = case["rules"]
    rules = payload_rules(patterns, dialect)
    words = {-1: None, -2: references.SEVERAL}
    for path, index in case["paths"]:
        expected = words.get(index, index)
        assert references.CHOSEN_BY[name](patterns, path) == expected, path
        assert chosen(rules, path) == expected, path


@pytest.mark.parametrize("seed", range(100))
def test_random_full_matches(seed):
    rng = random.Random(seed)
    patterns = [random_pattern(rng, depth=2, irregular=rng.random() < 0.2) for _ in range(2)]
    patterns = list(dict.fromkeys(patterns))  # keys of a mapping
    if not all(map(compiles, patterns)):
        return
    rules = payload_rules(patterns, sr.dialects.KERAS)
    for path in [*(random_text(rng, 6) for _ in range(30)), "", "\n"]:
        assert chosen(rules, path) == references.by_layout_map(patterns, path), (patterns, path)


@pytest.mark.parametrize("libraries", [False, True])
def test_keystr_paths_are_those_of_jax(libraries):
    kinds = trees_of_libraries() if libraries else kinds_of_trees()
    everything = replace(sr.dialects.KEYSTR, scalars="none")
    for kind, tree in kinds.items():
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        paths = [jax.tree_util.keystr(path) for path, _ in flat]
        # "(?=...)": also through `re`, which sees the whole path as text.
        for prefix in ("", "(?=)"):
            patterns = [rf"{prefix}\A{re.escape(path)}\Z" for path in paths]
            payloads = treedef.flatten_up_to(payload_rules(patterns, everything).match(tree))
            assert [p.rule for p in payloads] == [paths.index(path) for path in paths], kind


WHOLE_RULES = RULES.map(lambda rules: [*rules, (".*", P("rest"))])


def is_spec(node):
    return isinstance(node, P)


def outcome(match, *args):
    try:
        return match(*args)
    except ValueError as error:
        return str(error).splitlines()[0].split(":")[0]


def spectrax(rules, tree, min_size, strict):
    """spectrax.sharding.match_partition_rules, as docs/guides/dialects.md writes it."""
    dialect = sr.dialects.SPECTRAX
    dialect = dialect if strict else replace(dialect, scalars="none", rank="keep")
    return sr.Rules(rules, dialect, min_size=min_size or 0).match(tree)


def scalax(rules, tree, strict=True):
    library = pytest.importorskip("scalax.sharding", reason="scalax is not installed")
    return library.TreePathShardingRule(*rules, strict=strict).apply(tree)


def of_dialect(dialect):
    return lambda rules, tree, *_: sr.Rules(rules, dialect).match(tree)


# Ours and theirs: restatements, which are always there, and libraries.
PEERS = {
    "EasyLM": (of_dialect(sr.dialects.EASYLM), lambda r, t, *_: references.easylm(r, t)),
    "JAXSeq": (of_dialect(sr.dialects.KEYSTR), lambda r, t, *_: references.jaxseq(r, t)),
    "scalax": (of_dialect(sr.dialects.EASYLM), lambda r, t, *_: scalax(r, t)),
    "Spectrax": (spectrax, references.spectrax),
}


@pytest.mark.parametrize("peer", PEERS)
@given(WHOLE_RULES, trees(), st.sampled_from([None, 0, 1, 2, 6]), st.booleans())
def test_generated_trees(peer, rules, tree, min_size, strict):
    ours, theirs = (jax.tree.leaves(match(rules, tree, min_size, strict), is_leaf=is_spec) for match in PEERS[peer])
    assert ours == theirs


def test_a_small_leaf_needs_no_rule_in_spectrax():
    for match in PEERS["Spectrax"]:
        assert match([], {"a": array(3)}, 4, True) == {"a": P()}


@pytest.fixture(scope="module")
def keras(tmp_path_factory):
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ.setdefault("KERAS_HOME", str(tmp_path_factory.mktemp("keras")))
    return pytest.importorskip("keras.distribution", reason="keras is not installed")


class TestAgainstKeras:
    @staticmethod
    def outcome(layouts, path):
        layout = outcome(layouts.__getitem__, path)  # an error, where several match
        return layout and (references.SEVERAL if type(layout) is str else tuple(getattr(layout, "axes", layout)))

    def both(self, keras, patterns):
        made = LayoutMap(), keras.LayoutMap(None)
        for layouts in made:
            for i, pattern in enumerate(patterns):
                layouts[pattern] = (None, f"axis{i}")
        return made

    @pytest.mark.parametrize("case", CASES["KERAS"], ids=lambda case: case["name"])
    def test_corpus(self, keras, case):
        ours, keras_map = self.both(keras, case["rules"])
        for path, _ in case["paths"]:
            assert self.outcome(ours, path) == self.outcome(keras_map, path)

    def test_the_mapping(self, keras):
        ours, keras_map = self.both(keras, ["a", "b.*"])
        for layouts in (ours, keras_map):
            assert (list(layouts), len(layouts)) == (["a", "b.*"], 2)
            with pytest.raises(ValueError, match="already"):
                layouts["a"] = ("x",)
            with pytest.raises(ValueError, match="TensorLayout"):
                layouts["c"] = ["x"]
            with pytest.raises(KeyError):
                del layouts["c"]
            del layouts["b.*"]
            assert layouts["bc"] is None
        layout = ours[".*kernel"] = keras.TensorLayout((None, "model"))
        assert ours["dense/kernel"] is layout
        assert ours.specs({"dense": {"kernel": array(2, 2)}}) == {"dense": {"kernel": P(None, "model")}}

    def test_the_advice_for_a_layout_map_of_keras(self, keras):
        rules = keras.LayoutMap(None)
        rules[".*kernel"] = keras.TensorLayout((None, "tp"))
        tree = {"a": {"kernel": array(8, 8), "bias": array(8)}}
        with pytest.raises(TypeError, match=r"LayoutMap\(rules.device_mesh\) .*\.update\(rules\)"):
            sr.named_shardings(tree, rules, {"tp": 2})
        layouts = LayoutMap(rules.device_mesh)
        layouts.update(rules)
        shardings = sr.named_shardings(tree, layouts.rules, {"tp": 2})
        assert shardings["a"]["kernel"].spec == P(None, "tp")


class TestChoices:
    @pytest.mark.parametrize(
        ("rules", "choices", "tree", "specs"),
        [
            # Of size one is a scalar, and of size zero is none.
            ([(".", ("x", "y"))], {}, {"a": array(1, 1)}, [P()]),
            ([(".", ("x", "y"))], {}, {"a": array(0, 1), "b": array(1, 2)}, [P("x", "y")] * 2),
            ([], {}, {"a": 3, "b": "text"}, [P(), P()]),
            ([("a", "x")], {"scalars": "none"}, {"a": 3}, [P("x")]),
            ([("a", ("x", None, "y"))], {}, {"a": array(4)}, [P("x", None, "y")]),
            ([("a", ("x", "y"))], {"rank": "replicate"}, {"a": array(4)}, [P()]),
            ([("a", ("x", "y"))], {"min_size": "before"}, {"b": array(3)}, [P()]),
        ],
    )
    def test_each(self, rules, choices, tree, specs):
        rules = sr.Rules(rules, replace(sr.dialects.EASYLM, **choices), min_size=4 * ("min_size" in choices))
        assert list(rules.match(tree).values()) == specs
        with pytest.raises(ValueError, match="Partition rule not found"):  # min_size comes after the match
            sr.Rules([], sr.dialects.EASYLM, min_size=4).match({"a": array(3)})

    def test_coverage_counts_a_rule_once(self):
        rules = sr.Rules([("a", None), ("a|b", None), ("c", None)], sr.dialects.KERAS)
        coverage = rules.coverage({"a": array(2), "b": array()})
        assert (coverage.matched, coverage.won, coverage.dead) == ((1, 2, 0), (1, 1, 0), (2,))
        assert rules.all_matches("a") == [0, 1]

    def test_corrections(self):
        """What spectrax-lib's sanitize_partition_spec_for_mesh_and_shape gives."""
        mesh = {"dp": 2, "tp": 4}
        rules = [("a", (("dp", "pp"), "tp")), ("b", ("dp", "tp")), ("c", ("tp",))]
        tree = {"a": array(4, 8), "b": array(8), "c": array(6)}
        specs = sr.named_shardings(tree, sr.Rules(rules, sr.dialects.SPECTRAX), mesh)
        assert [s.spec for s in specs.values()] == [P("dp", "tp"), P(), P(None)]


class TestNnx:
    """Without the `value` of its variables, a state of flax nnx has the paths of its pure dict."""

    @pytest.fixture
    def nnx(self):
        return pytest.importorskip("flax.nnx", reason="flax is not installed")

    @pytest.fixture
    def model(self, nnx):
        class Attention(nnx.Module):
            def __init__(self, rngs):
                self.value = nnx.Linear(8, 8, rngs=rngs)
                self.out = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)
                self.inner = nnx.Linear(8, 8, use_bias=False, rngs=rngs)

        class Model(nnx.Module):
            def __init__(self, rngs):
                self.attn, self.norm = Attention(rngs), nnx.BatchNorm(8, rngs=rngs)
                self.value = nnx.Param(np.ones((8, 8), np.float32))

        return Model(nnx.Rngs(0))

    def test_a_state_is_decided_as_its_pure_dict(self, nnx, model):
        rules = [("value$", "tp"), ("kernel$|lora_a$", ("fsdp", "tp")), ("bias", None), (".*", ())]
        state = nnx.state(model, nnx.Param)
        pure = nnx.to_pure_dict(state)
        of_both = (state, sr.Rules(rules, sr.dialects.NNX)), (pure, rules)
        plans = [sr.plan(tree, given, {"fsdp": 2, "tp": 2}) for tree, given in of_both]
        ours, theirs = (dict(zip(plan.paths, plan.rule, strict=True)) for plan in plans)
        assert ours == theirs
        assert {"attn/value/kernel", "value"} <= ours.keys()
        matched = sr.Rules(rules, sr.dialects.NNX).match(state)
        assert jax.tree.structure(matched, is_leaf=is_spec) == jax.tree.structure(state)
        assert nnx.to_pure_dict(matched) == sr.Rules(rules).match(pure)

    @pytest.mark.parametrize(
        ("tree", "paths"),
        [
            (lambda: pytest.importorskip("flax.nnx").Param(LEAF), [""]),
            ({"value": LEAF}, [""]),
            ({"a": OrderedDict(value=LEAF)}, ["a"]),
            ({"a": defaultdict(dict, value=LEAF)}, ["a"]),
            ({"a": namedtuple("Value", "value")(LEAF)}, ["a"]),
            ({"value": {"value": LEAF}}, ["value"]),
            ({"a": OrderedDict(value=LEAF, b=None)}, ["a/value"]),
            ({"a": [LEAF]}, ["a/0"]),
            (OrderedDict(b=LEAF), ["b"]),
            ({"value": LEAF, "a": {"value": LEAF, "b": LEAF}}, ["value", "a/value", "a/b"]),
            ({"c": {"value": [LEAF]}}, ["c/value/0"]),
            ({"d": {"value": {"value": {"value": LEAF}}}}, ["d/value/value"]),
            ({"e": {"value": None}, "f": [{"value": LEAF}]}, ["f/0"]),
        ],
    )  # fmt: skip
    def test_the_hidden_key_of_a_root_and_of_other_nodes_was_in_the_path(self, tree, paths):
        """At the root, and in nodes other than dicts and registered ones."""
        tree = tree() if callable(tree) else tree
        assert sr.plan(tree, sr.Rules([("", ())], sr.dialects.NNX), {"tp": 2}).paths == paths
        rules = [(rf"\A{path}\Z", "right") for path in paths]
        matched = sr.Rules([*rules, ("", "wrong")], sr.dialects.NNX).match(tree)
        assert jax.tree.leaves(matched, is_leaf=is_spec) == [P("right")] * len(paths)

    def test_other_dialects_with_a_hidden_key(self, nnx, model):
        keystr = sr.Rules(
            [(r"^\['attn'\]\['inner'\]\['kernel'\]$", "tp"), (".*", None)],
            replace(sr.dialects.KEYSTR, hidden_key=".value"),
        )
        matched = nnx.to_pure_dict(keystr.match(nnx.state(model)))
        assert matched["attn"]["inner"]["kernel"] == P("tp")


KERAS_RULES = [(".*kernel", ("x",)), ("a/.*", ("y",))]
REFUSED = {
    "several rules": (
        KERAS_RULES, {"a": {"kernel": array(4), "bias": array(4)}}, "1 leaf matches several rules, where only one may",
        "a/kernel  shape (4,)  rule 0: '.*kernel', rule 1: 'a/.*'", "add a rule whose pattern is the path itself"),
    "longer than the rank": (
        [(".*", ("x", None))], {"bias": array(4), "b": array()}, "2 leaves have fewer dimensions than the spec has",
        "    b  shape ()  rule 0: '.*' -> ('x', None)", "take a dialect with rank='truncate'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_keras_refuses(case):
    rules, tree, *parts = REFUSED[case]
    with pytest.raises(ValueError, match=parts[0]) as info:
        sr.Rules(rules, sr.dialects.KERAS).match(tree)
    assert [part for part in parts if part not in str(info.value)] == []


def test_an_indivisible_leaf_of_keras_is_told():
    rules = sr.Rules([("a/.*|b", "x")], sr.dialects.KERAS)
    with pytest.raises(ValueError, match=r"cannot be sharded (?s:.*) rule 0: 'a/\.\*\|b'"):
        sr.named_shardings({"b": array(3), "a": {"c": array(3)}}, rules, {"x": 2})
    compiled = sr.Rules([(re.compile("DENSE", re.I), None)], sr.dialects.KERAS)
    assert [compiled.first_match(path) for path in ("dense", "dense2")] == [0, None]


def test_layout_maps_of_ours():
    layouts = LayoutMap(SimpleNamespace(axis_names=("model",)))
    layouts[".*kernel"] = (None, "model")
    with pytest.raises(ValueError, match=r"'b': the mesh has no axes \['data'\]"):
        layouts["b"] = ("data",)
    with pytest.raises(TypeError, match=r"not LayoutMap; give its \.rules$"):  # which keep the dialect
        sr.named_shardings({"a": array(8)}, layouts, {"model": 2})
    assert layouts.rules.dialect is sr.dialects.KERAS


def test_events_of_other_dialects_do_not_stop_a_match(monkeypatch):
    monkeypatch.setenv("LOG_SHARDING_MOVE", "1")
    rules = sr.Rules([("a", ("x", "y"))], sr.dialects.EASYLM)
    assert rules.match({"a": np.zeros(4)}) == {"a": P("x", "y")}


@pytest.mark.parametrize("dialect", [sr.dialects.KERAS, sr.dialects.BIG_VISION], ids=repr)
def test_a_leaf_without_a_shape_has_no_dimensions_at_each_door(dialect):
    """named_shardings raised a TypeError, and plan replicated it without a word."""
    tree, mesh = {"w": array(8, 8), "flag": True}, {"tp": 2}
    both = sr.Rules([(".*", P("tp", None))], dialect)
    for call in (
        both.match,
        lambda tree: sr.named_shardings(tree, both, mesh),
        lambda tree: sr.plan(tree, both, mesh).specs(),
    ):
        with pytest.raises(ValueError, match=r"(?s)flag"):
            call(tree)
    one = sr.Rules([("w", P("tp", None))], dialect)  # and no rule matches the other
    assert sr.plan(tree, one, mesh).specs() == {"w": P("tp", None), "flag": P()}
    assert sr.named_shardings(tree, one, mesh)["flag"].spec == P()
