"""`LogicalRules` as a value, and the order in which rules of a name are tried."""

from __future__ import annotations

import pickle
from dataclasses import replace

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


class TestWhereNamesAreResolved:
    def test_their_dialect_counts_if_none_is_given(self):
        rules = sr.LogicalRules([("embed", "tp"), ("embed", "fsdp")], sr.dialects.FLAX_CORE)
        assert sr.logical_to_mesh(("embed",), rules) == P("fsdp")
        assert sr.logical_to_mesh(("embed",), rules, dialect=sr.dialects.LINEN) == P("tp")
        with sr.logical_axis_rules(rules):
            assert sr.logical_to_mesh(("embed",)) == P("fsdp")

    @pytest.mark.parametrize(
        ("absent", "spec"), [("drop", P("tp")), ("drop_axis", P("fsdp")), ("prefix", P("tp"))]
    )
    def test_a_rule_whose_axes_the_mesh_lacks_loses_to_the_next(self, absent, spec):
        rules = [("seq", ("sp", "fsdp")), ("seq", "tp")]
        sharding = sr.logical_to_mesh_sharding(
            ("seq",), {"fsdp": 2, "tp": 2}, rules,
            arrays=np.ones(8), correction=sr.Correction(absent=absent),
        )  # fmt: skip
        assert sharding.spec == spec

    def test_in_maxtext_it_wins_and_is_cut(self):
        rules = sr.LogicalRules([("heads", ("fsdp", "tp")), ("heads", "dp")], sr.dialects.MAXTEXT)
        sharding = sr.logical_to_mesh_sharding(
            ("heads",), {"dp": 2, "fsdp": 4, "tp": 3}, rules,
            arrays=np.ones(6), correction=sr.dialects.MAXTEXT.correction,
        )  # fmt: skip
        assert sharding.spec == P("tp")

    def test_the_explanation_names_the_reason(self):
        rules = [("seq", "sp"), ("seq", "tp"), ("seq", "fsdp")]
        dropping = replace(sr.dialects.LINEN, correction=sr.Correction(absent="drop"))
        text = sr.explain_logical(("seq",), rules, {"fsdp": 2, "tp": 3}, (8,), dialect=dropping)
        assert text.splitlines() == [
            "dim 0 'seq' -> 'fsdp'  (rule 2)",
            "    rule 0 ('seq', 'sp') lost: the mesh lacks its mesh axes",
            "    rule 1 ('seq', 'tp') lost: its mesh axes do not divide the dimension",
        ]
        text = sr.explain_logical(("seq",), rules, {"fsdp": 2, "tp": 3}, (8,))
        assert text.splitlines()[-1] == "dim 0: rule 0 ('seq', 'sp'): the mesh has no axis 'sp'"
