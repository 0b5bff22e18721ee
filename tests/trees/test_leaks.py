"""Leaks, caught three ways: cycles are collectable, memory stays where it is, references balance."""

from __future__ import annotations

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
from tests.support.slow import some

CALLS = 100_000
MESH = {"fsdp": 4, "tp": 2}


class Payload:
    """A spec that refers to whatever it is given."""

    shape = (4, 8)
    dtype = np.dtype("float32")


def through_rules(payload):
    payload.other = sr.Rules([("a", payload), ("b(?=c)", payload)])
    assert payload.other.match({"a": payload})["a"] is payload


def through_a_spec_table(payload):
    def make(rule, rank):
        return payload

    payload.other = _core.SpecTable([None], [0], make)
    matcher = matcher_of(sr.Rules([(".*", None)]))
    matcher.decide([payload], payload.other, None, None)


def through_a_sharding_table(payload):
    def make(spec, rank, kept):
        return payload

    corrector = _core.Corrector([([4], 1)], "drop", "drop")
    payload.other = _core.ShardingTable([corrector], [0], make, make)
    matcher_of(sr.Rules([(".*", None)])).decide([payload], payload.other, None, None)


def through_a_sharding_table_by_shape(payload):
    def make(spec, shape, dtype):
        return payload

    payload.other = _core.ShardingTable([None], [0], make, make)
    matcher_of(sr.Rules([(".*", None)])).decide([payload], payload.other, None, None)


def through_searches(payload):
    """The functions that the core calls for rules and characters beyond it."""
    rules = sr.Rules([("a", None)])
    options = _core.DialectOptions("/", "/", False, "value", False, False, False, False)

    def call(*_):
        return payload and rules

    patterns = [None, [0x110000, 0]]
    payload.other = _core.RuleSet(
        patterns, [0], call, -1, -1, True, [(0, call)], 1 << 20, 1, options
    )
    assert payload.other.first_match("é") == 0


def through_a_plan(payload):
    payload.other = sr.plan({"a": Payload()}, sr.Rules([("a", P("tp"))]), MESH)
    payload.other.explain("a")
    matcher_of(payload.other.rules).remembered("payload", lambda: payload)


CYCLES = (
    through_rules, through_a_spec_table, through_a_sharding_table, through_a_sharding_table_by_shape, through_searches,
    through_a_plan,
)  # fmt: skip


@pytest.mark.parametrize("through", CYCLES)
def test_cycles_are_collected(through):
    def cycle():
        payload = Payload()
        through(payload)
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


def test_objects_whose_init_fails_do_not_crash_the_collector():
    for cls in (_core.RuleSet, _core.SpecTable):
        with pytest.raises(TypeError):
            cls.__new__(cls)
        gc.collect()


class Slotted:
    """Siblings of it are known again."""

    __slots__ = ("shape",)

    def __init__(self):
        self.shape = (4, 8)


LEAF = Payload()
TREE = {"layers": [{"kernel": LEAF, "bias": LEAF}, (LEAF, None)], "é": {7: LEAF}}
SIBLING = Slotted()
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


# (what is called, how often a call of the 10^5 it is)
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
    # 16 bytes a call would be 1.6 MB; the allocator itself moves by some hundred KiB.
    assert resident() - before < 1500


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
