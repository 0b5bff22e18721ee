"""Pairs that an earlier call had are not compiled again, and what comes of them is the same."""

import enum
import gc
import re
import weakref
from collections import namedtuple
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base import specs
from shardrules._rules import matcher, rules
from shardrules._rules.dialects import EASYLM, EFORMER
from shardrules._rules.rules import remembered_rules
from shardrules.compat import eformer as compat_eformer
from shardrules.compat import keras

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


class Rule(NamedTuple):
    pattern: Any
    spec: Any


def companions():
    tree = {"wq": {"kernel": np.zeros((4, 4)), "lora_a": np.zeros((4, 2))}}
    made = sr.plan(tree, fresh_pairs(), MESH, companions=sr.LORA)
    return made.check(replicated=["".join(["n", "m"])])


def layouts():
    layouts = keras.LayoutMap()
    layouts["".join(["wq", "/kernel"])] = ("fsdp", "tp")
    return layouts


def shardings_by(spec):
    return lambda: sr.named_shardings(TREE, [("kernel", spec()), (".*", None)], MESH)


EXACT = sr.Correction(indivisible="error")
# What tests/test_arguments.py, which has all that takes rules, does not try.
CALLS = {
    "tuples": lambda: sr.match_partition_rules(tuple(fresh_pairs()), TREE),
    "lists": lambda: sr.match_partition_rules([list(pair) for pair in fresh_pairs()], TREE),
    "namedtuples": lambda: sr.match_partition_rules([Rule(*pair) for pair in fresh_pairs()], TREE),
    "create_pattern_based_partition_spec": lambda: (
        compat_eformer.create_pattern_based_partition_spec("wq|wk->fsdp.tp,norm->tp", MESH)("wq", None)
    ),
    "keras.LayoutMap": lambda: layouts().specs(TREE),
    "fsdp": shardings_by(lambda: sr.fsdp("fsdp", min_bytes=0)),
    "units": shardings_by(lambda: sr.RuleSpec(("fsdp", None), units=(2, None))),
    "correction": shardings_by(lambda: sr.RuleSpec("tp", replace(EXACT, rank="error"))),
    "lists in a spec": shardings_by(lambda: [["fsdp"], None]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_equal_pairs_are_compiled_once(compiled, name):
    first = CALLS[name]()
    assert len(compiled) == 1
    assert CALLS[name]() == CALLS[name]() == first
    assert len(compiled) == 1


def test_companions_and_declarations_are_compiled_once(compiled):
    companions()
    first = list(compiled)
    assert len(first) > 1
    companions()
    assert [patterns for patterns in compiled[len(first) :] if patterns] == []


class Axis(enum.StrEnum):
    TP = "tp"


LOOKALIKES = {
    "numbers": (1, True, 1.0, np.int64(1)),
    "objects": (("w", "tp"), Rule("w", "tp"), Rule("w", "tp")),
    "strings": (P("tp"), P(Axis.TP), ("tp",), (Axis.TP,), "tp", Axis.TP),
    "entries": (P("a", "b"), P(("a", "b")), P("a", "b", None), P(("a",), "b")),
    "unconstrained": (P(None), P(P.UNCONSTRAINED)),
    "records": (
        *(sr.RuleSpec(spec) for spec in ("tp", Axis.TP, P("tp"))),
        sr.RuleSpec("tp", EXACT),
        sr.RuleSpec("tp", memory_kind="pinned_host"),
    ),
}


@pytest.mark.parametrize("pair", [lambda *items: items, Rule])
@pytest.mark.parametrize("kind", LOOKALIKES)
def test_lookalikes_are_not_mixed_up(kind, pair):
    for spec in LOOKALIKES[kind] * 2:
        expected = sr.Rules([pair("w", spec)])
        found = remembered_rules([pair("w", spec)], EFORMER)
        assert found[0] == expected[0]
        assert type(found[0][1]) is type(expected[0][1])
        assert remembered_rules([pair("w", spec)], EASYLM).dialect == EASYLM
        leaf = sr.match_partition_rules([pair("w", spec)], {"w": np.zeros((2, 2, 2))})["w"]
        if isinstance(spec, P):
            assert leaf == spec
        elif type(spec) is Rule or not isinstance(spec, str | tuple | sr.RuleSpec):
            assert leaf is spec  # an object of the user's own


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
        ([("w", P("tp"))], ValueError, "not found for param: norm"),
        ([Rule("w", {})], TypeError, "rule 0: the spec {} (a dict) cannot be hashed"),
        ([Rule(3, None)], TypeError, "rule 0: the pattern must be a string"),
        ([namedtuple("Own", "a b c")(1, 2, 3)], TypeError, "is not a (pattern, spec) pair: Own(a=1, b=2, c=3)"),
    ],
)
def test_errors_are_the_same_each_time(pairs, error, fragment):
    for _ in range(3):
        with pytest.raises(error) as raised:
            sr.match_partition_rules(pairs, TREE)
        assert fragment in str(raised.value)


def test_the_memory_is_bounded():
    class Axis(str):
        __slots__ = ("__weakref__",)

    own = Axis("tp")
    alive = weakref.ref(own)
    sr.match_partition_rules([("w", own), (".*", None)], {"w": np.zeros(4)})
    leaf = np.zeros(4)
    tree = weakref.ref(leaf)
    sr.match_partition_rules([("w", own), (".*", None)], {"w": leaf})
    del own, leaf
    assert tree() is None
    for i in range(16):
        sr.match_partition_rules([(".*", f"axis{i}")], TREE)
    specs._remembered_spec.cache_clear()
    gc.collect()
    assert alive() is None
