"""Leaks, caught three ways: cycles are collectable, memory stays where it is, references balance."""

import gc
import os
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import _core
from shardrules._plan.fold import fold
from shardrules._rules.rules import matcher_of
from tests.support.contexts import measures_memory
from tests.support.random_blocks import Slotted
from tests.support.slow import some

CALLS = 50_000
MESH = {"fsdp": 4, "tp": 2}


class Payload:
    """A spec that refers to whatever it is given."""

    shape = (4, 8)
    dtype = np.dtype("float32")


OPTIONS = _core.DialectOptions("/", "/", False, "value", False, False, False, False)


def decided(payload, table):
    """The table, after a walk has asked it about the payload."""
    matcher_of(sr.Rules([(".*", None)])).decide([payload], table, None, None)
    return table


def rules_of(payload):
    rules = sr.Rules([("a", payload), ("b(?=c)", payload)])
    assert rules.match({"a": payload})["a"] is payload
    return rules


def searches_of(payload):
    """The functions that the core calls for rules and characters beyond it."""
    rules = sr.Rules([("a", None)])
    call = lambda *_: payload and rules  # noqa: E731
    made = _core.RuleSet([None, [0x110000, 0]], [0], call, -1, -1, True, [(0, call)], 1 << 20, 1, OPTIONS)
    assert made.first_match("é") == 0
    return made


def plan_of(payload):
    plan = sr.plan({"a": Payload()}, sr.Rules([("a", P("tp"))]), MESH)
    plan.explain("a")
    matcher_of(plan.rules).remembered("payload", lambda: payload)
    return plan


def table_of(payload, corrector):
    make = lambda *_: payload  # noqa: E731
    return decided(payload, _core.ShardingTable([corrector], [0], make, make))


# What the payload refers to, and is referred to by.
CYCLES = {
    "rules": rules_of,
    "spec table": lambda one: decided(one, _core.SpecTable([None], [0], lambda *_: one)),
    "sharding table": lambda one: table_of(one, _core.Corrector([([4], 1)], "drop", "drop")),
    "sharding table by shape": lambda one: table_of(one, None),
    "searches": searches_of,
    "plan": plan_of,
}


@pytest.mark.parametrize("kind", CYCLES)
def test_cycles_are_collected(kind):
    def cycle():
        payload = Payload()
        payload.other = CYCLES[kind](payload)
        return weakref.ref(payload)

    watched = cycle()
    gc.collect()
    assert watched() is None


def test_what_was_cleared_does_not_crash():
    """The collector clears in any order; who is called afterwards gets an error."""
    seen = []

    class Last(Payload):
        def __del__(self):
            for call in (lambda: self.other.match([self]), lambda: self.other.first_match("é")):
                try:
                    seen.append(call())
                except TypeError as error:
                    seen.append(error)

    payload = Last()
    payload.other = sr.Rules([("[^a]b", payload), ("é(?=x)", payload), (".*", payload)])
    del payload
    gc.collect()
    assert len(seen) == 2


LEAF = Payload()
TREE = {"layers": [{"kernel": LEAF, "bias": LEAF}, (LEAF, None)], "é": {7: LEAF}}
SIBLING = Slotted((4, 8))  # whose siblings are known again
SIBLINGS = [{"kernel": SIBLING, "mlp": {"kernel": SIBLING, "bias": SIBLING}} for _ in range(4)]
REGULAR = sr.Rules([("kernel", P("fsdp", "tp")), (".*", P())])
RULES = sr.Rules([("kernel", P("fsdp", "tp")), ("é|bias", P("tp")), ("0(?=x)", P()), (".*", P())])
MATCHER = matcher_of(RULES)
PATHS = ["layers/1/kernel", "layers/2/é", "head"]


def use_new_rules():
    sr.match_partition_rules([("kernel|é", P("tp")), (".*", P())], TREE)


def use_unmatched():
    with pytest.raises(ValueError, match="not found"):
        sr.match_partition_rules([("none", P())], TREE)


# (what is called, how often a call of the 50,000 it is)
USES = {
    "match": (lambda: RULES.match(TREE), 1),
    "siblings": (lambda: REGULAR.match(SIBLINGS), 2),
    "named_shardings": (lambda: sr.named_shardings(TREE, RULES, MESH), 1),
    "first_match": (lambda: (RULES.first_match("layers/é"), RULES.all_matches("layers/0x")), 1),
    "survey": (
        lambda: MATCHER.survey(TREE, replicated=-1, unmatched=-2, ambiguous=-3), 1,
    ),
    "coverage": (lambda: RULES.coverage(TREE), 1),
    "templates": (lambda: _core.templates(PATHS), 1),
    "beside": (lambda: _core.aligned_values({"a": [0], "b": None}, {"a": [LEAF], "b": None}, 1), 1),
    "beside nodes": (lambda: _core.aligned_values({"a": [0]}, {"a": [LEAF]}, 1), 1),
    "fold": (lambda: fold(PATHS, np.zeros(3, np.int32)), 20),
    "new rules": (use_new_rules, 20),
    "errors": (use_unmatched, 20),
    "plan": (lambda: sr.plan(TREE, RULES, MESH).lock(), 200),
}  # fmt: skip


def resident():
    """KiB of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
@measures_memory
@pytest.mark.parametrize("name", some(USES, 3))
def test_memory_does_not_grow(name):
    use, cost = USES[name]
    for _ in range(CALLS // cost // 10):
        use()
    gc.collect()
    before = resident()
    for _ in range(CALLS // cost):
        use()
    gc.collect()
    # 16 bytes a call would be 0.8 MB; the allocator itself moves by some hundred KiB.
    assert resident() - before < 700


@pytest.mark.parametrize("name", USES)
def test_references_balance(name):
    use = USES[name][0]
    shared = (LEAF, SIBLING, TREE, RULES, *(spec for _, spec in (*RULES, *REGULAR)), *PATHS, MESH)
    for _ in range(20):
        use()
    gc.collect()
    before = [sys.getrefcount(x) for x in shared]
    for _ in range(100):
        use()
    gc.collect()
    assert [sys.getrefcount(x) for x in shared] == before
