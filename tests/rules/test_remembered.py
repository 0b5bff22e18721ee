"""Pairs that an earlier call had are not compiled again, and what comes of them is the same."""

from __future__ import annotations

import ast
import enum
import gc
import itertools
import re
import threading
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._rules import matcher, rules
from shardrules._rules.dialects import EASYLM, EFORMER
from shardrules._rules.rules import remembered_rules
from shardrules.compat import eformer as compat_eformer
from shardrules.compat import keras
from tests.support.folders import ROOT

TREE = {"wq": {"kernel": np.zeros((4, 4))}, "norm": np.zeros(4)}
MESH = {"fsdp": 2, "tp": 2}


def fresh_pairs():
    """Equal pairs in which nothing is the same object as before."""
    return [("".join(["wq", "/kernel"]), P("fsdp", "tp")), (re.compile("NORM", re.I), P())]


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """The patterns of each rule list that is compiled; none is remembered at first."""
    rules._compiled.cache_clear()
    make = matcher.compile_patterns
    lists = []

    def counted(patterns, modes):
        lists.append(patterns)
        return make(patterns, modes)

    monkeypatch.setattr(matcher, "compile_patterns", counted)
    yield lists
    rules._compiled.cache_clear()


ENTRIES = {
    "match_partition_rules": lambda pairs: sr.match_partition_rules(pairs, TREE),
    "named_shardings": lambda pairs: sr.named_shardings(TREE, pairs, MESH),
    "spec_for": lambda pairs: sr.spec_for("wq/kernel", (4, 4), pairs, MESH),
    "plan": lambda pairs: sr.plan(TREE, pairs, MESH).specs(),
    "compat.eformer": lambda pairs: compat_eformer.match_partition_rules(pairs, TREE),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_equal_pairs_are_compiled_once(compiled, entry):
    first = ENTRIES[entry](fresh_pairs())
    assert ENTRIES[entry](tuple(fresh_pairs())) == first
    assert ENTRIES[entry]([list(pair) for pair in fresh_pairs()]) == first
    assert ENTRIES[entry]([list(pair) for pair in fresh_pairs()]) == first
    # Checked, a list of lists is what the tuples are.
    assert len(compiled) <= 2
    assert ENTRIES[entry]([("wq", P("tp")), ("norm", P())]) != first


class Rule(NamedTuple):
    pattern: Any
    spec: Any


class Numbered(tuple):
    """A pair whose items are others each time that they are read."""

    count = itertools.count()

    def __getitem__(self, index):
        return (".*", f"axis {next(self.count)}")[index]


def test_equal_namedtuples_are_compiled_once(compiled):
    for _ in range(3):
        sr.match_partition_rules([Rule(*pair) for pair in fresh_pairs()], TREE)
    assert len(compiled) == 1
    assert sr.match_partition_rules([Rule("wq", P("tp")), Rule("norm", P())], TREE) == {
        "wq": {"kernel": P("tp")}, "norm": P(),
    }  # fmt: skip


def test_namedtuples_that_differ_are_not_mixed_up(compiled):
    tree = {"w": np.zeros((2, 2))}
    # A spec that is a namedtuple is an object of the user's own, and no pair.
    specs = [1, True, Rule("w", "tp"), Rule("w", "tp"), P("tp"), P(Axis.TP), ("w", "tp")]
    for spec in specs * 2:
        expected = sr.Rules([Rule("w", spec)]).match(tree)["w"]
        leaf = sr.match_partition_rules([Rule("w", spec)], tree)["w"]
        assert repr(leaf) == repr(expected)
        assert isinstance(leaf, P) or leaf is spec
    first, second = (sr.match_partition_rules([Numbered("ab")], tree)["w"] for _ in range(2))
    assert first != second
    for odd in (Rule("w", {}), Rule(3, None)):
        with pytest.raises(TypeError, match="rule 0"):
            sr.match_partition_rules([odd], tree)
    with pytest.raises(TypeError, match=r"is not a \(pattern, spec\) pair: Own\(a=1, b=2, c=3\)"):
        sr.match_partition_rules([namedtuple("Own", "a b c")(1, 2, 3)], tree)


def layouts():
    layouts = keras.LayoutMap()
    layouts["".join(["wq", "/kernel"])] = ("fsdp", "tp")
    return layouts


# Those of libraries whose pairs are not ours; tests/test_arguments.py has the others.
OF_LIBRARIES = {
    "eformer.create_pattern_based_partition_spec": lambda: (
        compat_eformer.create_pattern_based_partition_spec("wq|wk->fsdp.tp,norm->tp", MESH)("wq", None)
    ),
    "keras.LayoutMap.rules": lambda: layouts().rules,
    "keras.LayoutMap.specs": lambda: layouts().specs(TREE),
}  # fmt: skip


@pytest.mark.parametrize("entry", OF_LIBRARIES)
def test_pairs_of_libraries_are_compiled_once(compiled, entry):
    first = OF_LIBRARIES[entry]()
    assert len(compiled) == 1
    assert OF_LIBRARIES[entry]() == first
    assert len(compiled) == 1


def test_companions_and_declarations_are_compiled_once(compiled):
    tree = {"wq": {"kernel": np.zeros((4, 4)), "lora_a": np.zeros((4, 2))}}

    def use():
        sr.plan(tree, fresh_pairs(), MESH, companions=sr.LORA).check(
            replicated=["".join(["n", "m"])]
        )
        return len([patterns for patterns in compiled if patterns])

    assert use() == use() > 2


def test_dialects_are_told_apart():
    assert remembered_rules([("a", "tp")], EFORMER) is not remembered_rules([("a", "tp")], EASYLM)


# Where Rules are made of patterns in each call, and why. All else takes `remembered_rules`.
MAKING_RULES = {
    "_rules/rules.py": "what remembers, and pickles",
    "_plan/findings.py": "it remembers its own, whose errors have other names",
    "_files/rules.py": "who reads a file gets an object of its own",
    "_plan/lock.py": "the same",
    "_plan/resolve.py": "patterns of a tree of specs, which nobody gave",
    "_plan/check_leaves.py": "made once",
    "_writer/draft.py": "patterns that are being written",
    "_cli/inputs.py": "rules with what the command line adds",
    "_cli/advice.py": "one rule for a function that only takes rules",
    "demo.py": "shown as a user's own",
}


def test_nothing_else_makes_rules_of_patterns():
    package = ROOT / "python/shardrules"
    making = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Rules"
        and ast.unparse(node.args[0]) != "()"
    }
    assert making == MAKING_RULES.keys()


def test_rules_are_always_fresh(compiled):
    assert sr.Rules(fresh_pairs()) is not sr.Rules(fresh_pairs())
    sr.match_partition_rules(fresh_pairs(), TREE)
    sr.match_partition_rules(sr.Rules(fresh_pairs()), TREE)
    assert len(compiled) == 4


class Axis(enum.StrEnum):
    TP = "tp"


class Equal:
    """Equal to all others, and none the less another object."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1


EXACT = sr.Correction(indivisible="error")
LOOKALIKES = {
    "numbers": (1, True, 1.0, np.int64(1)),
    "objects": (Equal(), Equal()),
    "strings": (P("tp"), P(Axis.TP), ("tp",), (Axis.TP,), "tp", Axis.TP),
    "entries": (P("a", "b"), P(("a", "b")), P("a", "b", None), P(("a",), "b")),
    "unconstrained": (P(None), P(P.UNCONSTRAINED)),
    "records": (
        sr.RuleSpec("tp"),
        sr.RuleSpec(Axis.TP),
        sr.RuleSpec(P("tp")),
        sr.RuleSpec("tp", EXACT),
        sr.RuleSpec("tp", memory_kind="pinned_host"),
    ),
}


@pytest.mark.parametrize("kind", LOOKALIKES)
def test_lookalikes_are_not_mixed_up(kind):
    for spec in LOOKALIKES[kind] * 2:
        expected = sr.Rules([("w", spec)])
        found = remembered_rules([("w", spec)], EFORMER)
        assert repr(found[0]) == repr(expected[0])
        assert type(found[0][1]) is type(expected[0][1])
        leaf = sr.match_partition_rules([("w", spec)], {"w": np.zeros((2, 2, 2))})["w"]
        if isinstance(spec, P):
            assert repr(leaf) == repr(spec)
        elif not isinstance(spec, str | tuple | sr.RuleSpec):
            assert leaf is spec


@pytest.mark.parametrize(
    "make",
    [
        lambda: sr.fsdp("fsdp", min_bytes=0),
        lambda: sr.RuleSpec(("fsdp", None), units=(2, None)),
        lambda: replace(sr.RuleSpec("tp"), correction=replace(EXACT, rank="error")),
        lambda: [["fsdp"], None],
        lambda: ("fsdp", ("tp",)),
    ],
)
def test_equal_specs_are_the_same(compiled, make):
    for _ in range(3):
        sr.named_shardings(TREE, [("kernel", make()), (".*", None)], MESH)
    assert len(compiled) == 1


def test_a_list_that_changes_is_another_one():
    pairs = [["wq", ["tp", None]], [".*", None]]
    assert sr.match_partition_rules(pairs, TREE)["wq"]["kernel"] == P("tp", None)
    pairs[0][1][0] = "fsdp"
    assert sr.match_partition_rules(pairs, TREE)["wq"]["kernel"] == P("fsdp", None)
    pairs.insert(0, ("kernel", "tp"))
    assert sr.match_partition_rules(pairs, TREE)["wq"]["kernel"] == P("tp")


@pytest.mark.parametrize(
    ("pairs", "error", "fragment"),
    [
        ([("(", None)], re.error, "rule 0"),
        ([("a", None), ("b", {})], TypeError, "rule 1: the spec {} (a dict) cannot be hashed"),
        ([("a", None), "b"], TypeError, "rule 1 is not a"),
        ([(["a"], None)], TypeError, "rule 0: the pattern must be a string"),
        ([("w", P("tp"))], ValueError, "not found for param: norm"),
    ],
)
def test_errors_are_the_same_each_time(pairs, error, fragment):
    for _ in range(3):
        with pytest.raises(error) as raised:
            sr.match_partition_rules(pairs, TREE)
        assert fragment in str(raised.value)


def test_the_memory_is_bounded():
    class Own(str):
        __slots__ = ("__weakref__",)

    own = Own("tp")
    alive = weakref.ref(own)
    sr.match_partition_rules([("w", own), (".*", None)], {"w": np.zeros(4)})
    leaf = np.zeros(4)
    tree = weakref.ref(leaf)
    sr.match_partition_rules([("w", own), (".*", None)], {"w": leaf})
    del own, leaf
    assert tree() is None
    for i in range(16):
        sr.match_partition_rules([(".*", f"axis{i}")], TREE)
    from shardrules._base import specs as _specs

    _specs._remembered_spec.cache_clear()
    gc.collect()
    assert alive() is None


def test_threads_share_what_is_remembered():
    barrier = threading.Barrier(8)

    def match(number):
        barrier.wait()
        return [
            sr.match_partition_rules([("wq", f"a{(number + i) % 20}"), (".*", None)], TREE)
            for i in range(60)
        ]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(match, range(8)))
    for number, trees in enumerate(found):
        specs = [tree["wq"]["kernel"] for tree in trees]
        assert specs == [P(f"a{(number + i) % 20}") for i in range(60)]
