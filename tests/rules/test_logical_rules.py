"""`LogicalRules` as a value."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr

RULES = [("batch", ("dp", "fsdp")), ("embed", ["fsdp"]), ("embed", "tp"), ("kv", None), ("q", [])]


class TestAsAValue:
    def test_equal_rules_are_equal_however_they_are_written(self):
        rules, same = sr.LogicalRules(RULES), sr.LogicalRules(tuple(map(tuple, RULES)))
        assert rules == same
        assert hash(rules) == hash(same)
        assert tuple(rules)[1:] == (
            ("embed", ("fsdp",)), ("embed", "tp"), ("kv", None), ("q", None),
        )  # fmt: skip
        assert rules[2] == ("embed", "tp")
        assert len(rules) == 5

    def test_another_dialect_makes_other_rules(self):
        assert sr.LogicalRules(RULES) != sr.LogicalRules(RULES, sr.dialects.MAXTEXT)

    def test_they_pickle(self):
        rules = sr.LogicalRules(RULES, sr.dialects.MAXTEXT)
        assert pickle.loads(pickle.dumps(rules)) == rules

    def test_they_do_not_change(self):
        with pytest.raises(AttributeError):
            sr.LogicalRules(RULES).dialect = sr.dialects.MAXTEXT

    def test_a_mapping_is_its_items(self):
        mapping = {"embed": "fsdp", "heads": ("tp", "sp")}
        assert sr.LogicalRules(mapping) == sr.LogicalRules(list(mapping.items()))

    def test_a_function_of_paths_refuses_them(self):
        with pytest.raises(TypeError, match=r"rules must be rules for paths.*named_shardings"):
            sr.match_partition_rules(sr.LogicalRules(RULES), {"w": np.ones(2)})


def test_their_dialect_counts_if_none_is_given():
    rules = sr.LogicalRules([("embed", "tp"), ("embed", "fsdp")], sr.dialects.FLAX_CORE)
    assert sr.logical_to_mesh(("embed",), rules) == P("fsdp")
    assert sr.logical_to_mesh(("embed",), rules, dialect=sr.dialects.LINEN) == P("tp")
    with sr.logical_axis_rules(rules):
        assert sr.logical_to_mesh(("embed",)) == P("fsdp")
