"""`LogicalRules` as a value."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr

RULES = [("batch", ("dp", "fsdp")), ("embed", ["fsdp"]), ("embed", "tp"), ("kv", None), ("q", [])]


def test_they_are_a_value():
    rules, same = sr.LogicalRules(RULES), sr.LogicalRules(tuple(map(tuple, RULES)))
    assert (rules, hash(rules)) == (same, hash(same))
    assert tuple(rules)[1:] == (("embed", ("fsdp",)), ("embed", "tp"), ("kv", None), ("q", None))
    assert (rules[2], len(rules)) == (("embed", "tp"), 5)
    mapping = {"embed": "fsdp", "heads": ("tp", "sp")}
    assert sr.LogicalRules(mapping) == sr.LogicalRules(list(mapping.items()))
    other = sr.LogicalRules(RULES, sr.dialects.MAXTEXT)
    assert other != rules
    assert pickle.loads(pickle.dumps(other)) == other
    with pytest.raises(AttributeError):
        rules.dialect = sr.dialects.MAXTEXT
    with pytest.raises(TypeError, match=r"rules must be rules for paths.*named_shardings"):
        sr.match_partition_rules(rules, {"w": np.ones(2)})


def test_their_dialect_counts_if_none_is_given():
    rules = sr.LogicalRules([("embed", "tp"), ("embed", "fsdp")], sr.dialects.FLAX_CORE)
    assert sr.logical_to_mesh(("embed",), rules) == P("fsdp")
    assert sr.logical_to_mesh(("embed",), rules, dialect=sr.dialects.LINEN) == P("tp")
    with sr.logical_axis_rules(rules):
        assert sr.logical_to_mesh(("embed",)) == P("fsdp")
