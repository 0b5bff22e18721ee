"""Plan.check: each kind of finding on a case made for it, and on one that is nearly the same.

The findings on real models are compared with tests/data/golden. `UPDATE_GOLDEN=1 python -m pytest
tests/plan/test_check.py` writes them anew; read the difference.
"""

from __future__ import annotations

import ast
import json
import os
import re
import time
from dataclasses import replace
from typing import get_args

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.correction import LibraryCorrection
from shardrules._base.text import nearest
from shardrules._plan import check, check_context
from shardrules._plan.check_context import KINDS
from shardrules._plan.findings import CheckKind
from shardrules._plan.fold import fold
from tests.support import check_kinds, corpus
from tests.support.folders import DATA
from tests.support.plans import shard_bytes

GOLDEN = DATA / "golden"
MESH = {"fsdp": 8, "tp": 4}
MIB = 2**20


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


LARGE = array(4096, 1024)  # 16 MiB, just large
SMALL = array(4096, 1023)


def findings(tree, rules, mesh=MESH, **options):
    return sr.plan(tree, rules, mesh).check(**options)


def of_kind(found, kind):
    return [one for one in found if one.kind == kind]


def only(found, kind):
    (one,) = of_kind(found, kind)
    return one


SHARDED = [("w", ("fsdp", "tp"))]


def test_nothing_to_say():
    found = findings({"w": LARGE}, SHARDED)
    assert found == ()
    assert str(found) == "nothing found: 1 leaf, 1 rule, on fsdp=8,tp=4"


class TestUnmatched:
    def test_all_at_once(self):
        tree = {"w": LARGE, "x": [array(8, 2)] * 3, "y": array(2), "scalar": array()}
        one = only(findings(tree, SHARDED), "unmatched")
        assert (one.level, one.leaves, one.rule, one.paths) == ("error", 4, None, ("x/{0..2}", "y"))
        assert one.bytes == 3 * 64 + 8
        assert one.message == "no rule matches 4 leaves of 6"
        assert (
            one.fix
            == r"add rules for them, such as (r'x/\d+', P(...)); or replicate them by a last rule ('.*', P())"
        )

    def test_not_where_a_dialect_replicates(self):
        assert (
            of_kind(findings({"x": LARGE}, sr.Rules([("w", None)], sr.dialects.KERAS)), "unmatched")
            == []
        )

    def test_not_what_needs_no_rule(self):
        tree = {"w": LARGE, "scalar": array(), "name": "x", "none": None}
        assert of_kind(findings(tree, SHARDED), "unmatched") == []

    def test_the_example_is_in_the_dialects_own_form(self):
        keystr = sr.Rules([("w", None)], sr.dialects.KEYSTR)
        one = only(findings({"x": [LARGE] * 3}, keystr), "unmatched")
        assert r"""(r"\['x'\]\[\d+\]", P(...))""" in one.fix


@given(st.lists(st.lists(st.sampled_from(["a", "{", "}", "'", '"', "\\", "\n", "\0", "1", "23", "007", ".", "é", "\ud800", "٣", "-"]),
                         max_size=5).map("".join), min_size=1, max_size=6, unique=True))  # fmt: skip
def test_the_example_of_a_rule_matches_the_leaves(paths):
    plan = sr.plan({path: array(2) for path in paths}, [], MESH)
    one = only(plan.check(), "unmatched")
    written = re.fullmatch(
        r"add rules for them, such as \((.*), P\(\.\.\.\)\); or replicate .*", one.fix, re.S
    )[1]
    pattern = ast.literal_eval(written)
    (first,) = [folded for folded in plan.folded if folded.pattern == one.paths[0]]
    assert all(re.fullmatch(pattern, plan.paths[row]) for row in first.rows)


class TestMisfit:
    RULES = (("w", sr.RuleSpec(("fsdp", "tp"), sr.Correction(indivisible="error"))),)

    def test_indivisible(self):
        tree = {"w": [array(8, 6)] * 3, "w2": array(8, 8)}
        one = only(findings(tree, self.RULES), "misfit")
        assert (one.level, one.leaves, one.rule, one.paths) == ("error", 3, 0, ("w/{0..2}",))
        assert one.bytes == 3 * 8 * 6 * 4
        assert one.message == (
            "rule 0 'w' -> P('fsdp', 'tp') cannot be applied to the shape (8, 6): dim 1 of size 6 is not divisible by tp=4"
        )
        assert one.fix.startswith("use fewer axes or pad the array")

    def test_an_axis_twice(self):
        one = only(findings({"w": LARGE}, [("w", ("tp", "tp"))]), "misfit")
        assert "dim 1: 'tp' is used twice" in one.message
        assert one.fix == "an axis can cut only one dimension, once"

    def test_not_what_is_corrected(self):
        assert of_kind(findings({"w": array(8, 6)}, SHARDED), "misfit") == []

    def test_ambiguous(self):
        rules = sr.Rules([(".*w", ("tp",)), ("w.*", None)], sr.dialects.KERAS)
        found = findings({"w": LARGE, "aw": LARGE, "wb": LARGE}, rules)
        one = only(found, "misfit")
        assert (one.level, one.leaves, one.rule, one.paths) == ("error", 1, None, ("w",))
        assert "several rules match" in one.message

    def test_the_error_of_specs_has_all_of_these(self):
        plan = sr.plan({"w": array(8, 6), "x": array(2)}, self.RULES, MESH)
        with pytest.raises(
            ValueError, match=r"^1 leaf cannot be sharded (?s:.*)\nerror\[unmatched\]: no rule"
        ) as caught:
            plan.specs()
        assert "    w  shape (8, 6)  rule 0: 'w' -> P('fsdp', 'tp')\n" in str(caught.value)
        assert "dim 1 of size 6 is not divisible by tp=4: use fewer axes" in str(caught.value)


class TestCatchAll:
    def rules(self, spec=()):
        return [*SHARDED, ("experts/up", "tp"), (".*", spec)]

    def test_large_and_replicated(self):
        tree = {"w": LARGE, "experts": [{"fc": LARGE}] * 4, "small": array(8)}
        found = findings(tree, self.rules())
        one = found[0]
        assert one is only(found, "catch-all")
        assert (one.level, one.leaves, one.rule) == ("error", 5, 2)
        assert one.paths == ("experts/{0..3}/fc", "small")
        assert one.bytes == 4 * 16 * MIB + 32
        assert one.message == (
            "5 leaves of 6 (67.1 MB of 83.9 MB) match no rule but the catch-all, rule 2 '.*' -> P(): 67.1 MB on each device"
        )
        assert (
            r"(r'experts/\d+/fc', P(...)) (perhaps meant for them, but matching nothing: rule 1)"
            in one.fix
        )

    def test_many_small_ones_are_as_silent(self):
        tree = {"w": LARGE, "experts": [{"fc": array(64, 1024)}] * 64}
        assert only(findings(tree, self.rules()), "catch-all").level == "error"
        assert (
            only(
                findings({**tree, "experts": tree["experts"][1:]}, self.rules()), "catch-all"
            ).level
            == "info"
        )

    @pytest.mark.parametrize(("spec", "mesh"), [(("tp",), MESH), ((), {"fsdp": 1, "tp": 1})])
    def test_only_a_note_if_it_shards_or_there_is_one_device(self, spec, mesh):
        assert (
            only(findings({"w": LARGE, "x": LARGE}, self.rules(spec), mesh), "catch-all").level
            == "info"
        )

    @pytest.mark.parametrize("pattern", [".*", "", ".", ".+", "^", "(?s).*", r"[\s\S]"])
    def test_what_matches_whatever_comes(self, pattern):
        assert (
            only(findings({"w": LARGE, "x": LARGE}, [*SHARDED, (pattern, ())]), "catch-all").rule
            == 1
        )

    @pytest.mark.parametrize("pattern", ["x", "^(?!.*w)", "^[^w]*$", "[a-z]", "(x|w)"])
    def test_what_does_not(self, pattern):
        found = findings({"w": LARGE, "x": LARGE}, [*SHARDED, (pattern, ())])
        assert of_kind(found, "catch-all") == []
        assert only(found, "replicated").rule == 1

    def test_declared(self):
        tree = {"w": LARGE, "experts": [{"fc": LARGE}] * 4}
        assert (
            of_kind(findings(tree, self.rules(), replicated=["^experts/.*fc$"]), "catch-all") == []
        )

    def test_declared_in_part(self):
        tree = {"w": LARGE, "experts": [{"fc": LARGE}] * 5}
        one = only(
            findings(tree, self.rules(), replicated=["experts/0/", "experts/3/"]), "catch-all"
        )
        assert (one.paths, one.leaves) == (("experts/{1,2,4}/fc",), 3)

    def test_a_declared_pattern_is_no_backtracking_one(self):
        name = "a" * 5_000
        tree = {f"{name}!": LARGE, f"{name}": LARGE}
        begin = time.monotonic()
        one = only(findings(tree, self.rules(), replicated=["(a+)+$"]), "catch-all")
        assert time.monotonic() - begin < 10  # `re` takes 2**5000 steps
        assert one.paths == (f"{name}!",)

    PATTERNS = (
        "x/y",
        "^x",
        "y$",
        r"\['x'\]",
        r"x\ny",
        "X",
        re.compile("X", re.I),
        "(?=x)x/",
        r"(.)\1",
        "a|^$",
        r"\.",
        "x y",
    )

    @pytest.mark.parametrize(
        "dialect",
        [sr.dialects.EFORMER, sr.dialects.KEYSTR, sr.dialects.KERAS],
        ids=lambda d: d.name,
    )
    @pytest.mark.parametrize("pattern", PATTERNS, ids=str)
    def test_declared_patterns_are_searched_in_the_paths_of_any_dialect(self, dialect, pattern):
        tree = {"x": {"y": LARGE, "x y": [LARGE] * 2}, "z": {"xx": LARGE, "aa.b": LARGE}}
        plan = sr.plan(tree, sr.Rules([(".*", ())], dialect), MESH)
        found = plan.check(replicated=[pattern])
        told = {
            path for one in found if one.kind in ("catch-all", "replicated") for path in one.paths
        }
        left = [path for path in plan.paths if not re.search(pattern, path)]
        assert told == {one.pattern for one in fold(left, np.zeros(len(left), np.int32))}


class TestReplicated:
    def test_a_large_one(self):
        one = only(findings({"w": LARGE, "x": [LARGE] * 2}, [*SHARDED, ("x", None)]), "replicated")
        assert (one.level, one.leaves, one.rule, one.bytes) == ("warning", 2, 1, 32 * MIB)
        assert (
            one.message == "2 large leaves replicated (rule 1 'x' -> P()): 33.6 MB on each device"
        )

    def test_not_a_small_one(self):
        assert (
            of_kind(findings({"w": LARGE, "x": SMALL}, [*SHARDED, ("x", None)]), "replicated") == []
        )

    @pytest.mark.parametrize(("large", "count"), [(4096 * 1023 * 4, 1), (4096 * 1023 * 4 + 1, 0)])
    def test_what_is_large(self, large, count):
        found = findings({"w": LARGE, "x": SMALL}, [*SHARDED, ("x", None)], large=large)
        assert len(of_kind(found, "replicated")) == count

    def test_an_axis_of_one_device_cuts_nothing(self):
        rules = [*SHARDED, ("x", "dp")]
        assert (
            len(of_kind(findings({"w": LARGE, "x": LARGE}, rules, {"dp": 1, **MESH}), "replicated"))
            == 1
        )
        assert (
            of_kind(findings({"w": LARGE, "x": LARGE}, rules, {"dp": 2, **MESH}), "replicated")
            == []
        )

    def test_one_device(self):
        assert of_kind(findings({"x": LARGE}, [("x", None)], {"tp": 1}), "replicated") == []

    def test_what_the_mesh_leaves_nothing_of(self):
        one = only(findings({"x": array(4097, 1024)}, [("x", "tp")]), "replicated")
        assert (
            "1 large leaf replicated (rule 0 'x' -> P('tp'), of which the shapes and the mesh leave nothing)"
            in one.message
        )

    def test_declared(self):
        rules = [*SHARDED, ("x", None)]
        assert (
            of_kind(findings({"w": LARGE, "x": LARGE}, rules, replicated=["^x$"]), "replicated")
            == []
        )
        assert of_kind(findings({"w": LARGE, "x": LARGE}, rules, replicated=["^y$"]), "replicated")

    def test_without_a_rule(self):
        rules = sr.Rules([(".*w", ("fsdp", "tp"))], sr.dialects.KERAS)
        (one,) = of_kind(findings({"w": LARGE, "x": LARGE}, rules), "replicated")
        assert one.message == "1 large leaf replicated (no rule decides): 16.8 MB on each device"
        (one,) = of_kind(findings({"w": LARGE, "x": [LARGE] * 2}, rules), "replicated")
        assert one.message.startswith("2 large leaves replicated (no rule decides): ")


class TestRoom:
    """Whether the leaves fit into a device, if its memory is given."""

    def test_leaves_that_do_not_fit_are_an_error(self):
        tree = {"w": [LARGE] * 20, "norm": array(4096)}
        held = 20 * 16 * MIB // 32 + 4 * 4096
        found = findings(tree, [*SHARDED, ("norm", ())], hbm=held - 1)
        (one,) = of_kind(found, "memory")
        assert (one.level, one.bytes, one.paths) == ("error", 1, ("w/{0..19}", "norm"))
        assert one.message == "10.5 MB on the fullest device: params 10.5 MB; a device has 10.5 MB"
        for enough in (held, None):
            assert findings(tree, [*SHARDED, ("norm", ())], hbm=enough) == ()

    def test_what_is_on_the_host_takes_no_room(self):
        spec = sr.RuleSpec(("fsdp", "tp"), memory_kind="pinned_host")
        assert of_kind(findings({"w": LARGE}, [("w", spec)], hbm=1), "memory") == []


class TestThresholds:
    """Arrays that a rule leaves whole by its own threshold."""

    SMALL = {f"w{i}": array(1000, 1000) for i in range(8)}

    def test_what_a_rule_exempts_is_told_and_no_warning(self):
        rules = [(".*", sr.fsdp("fsdp", min_bytes=4 * MIB))]
        (one,) = findings({**self.SMALL, "big": LARGE}, rules, {"fsdp": 64})
        assert (one.level, one.kind, one.leaves, one.bytes) == ("info", "replicated", 8, 32_000_000)
        assert one.message == (
            "8 leaves replicated (by the threshold of rule 0 '.*' -> fsdp('fsdp', min_bytes=4194304)): 32.0 MB on each device"
        )
        assert one.fix == "lower its min_bytes or min_rank, if they are to be cut too"

    def test_so_is_what_the_state_of_an_optimizer_inherits(self):
        params = {f"w{i}": array(1000, 1000, dtype="bfloat16") for i in range(8)} | {"big": LARGE}
        plan = sr.plan(params, [(".*", sr.fsdp("fsdp", min_bytes=3 * MIB))], {"fsdp": 64})
        state = {"mu": jax.tree.map(lambda leaf: array(*leaf.shape), params)}
        assert [one.level for one in plan.for_optimizer(state).check()] == ["info"]

    def test_what_no_threshold_exempts_is_a_warning(self):
        odd = {f"w{i}": array(1001, 1001) for i in range(8)}
        rules = [(".*", sr.fsdp("fsdp", min_bytes=1000))]
        one = only(findings({**odd, "big": LARGE}, rules, {"fsdp": 64}), "replicated")
        assert (one.level, one.leaves) == ("warning", 8)


class TestCorrection:
    def test_what_it_costs(self):
        # Cut by fsdp=8 alone: 4096*1022*4/8 bytes; with tp=4 it would be a quarter.
        one = only(findings({"w": [array(4096, 1022)] * 20}, SHARDED), "correction")
        assert one.bytes == 20 * (4096 * 1022 * 4 // 8) * 3 // 4
        assert (one.level, one.leaves, one.rule, one.paths) == ("warning", 20, 0, ("w/{0..19}",))
        assert one.message == (
            "rule 0 'w' -> P('fsdp', 'tp'): dim 1 of size 1022 is not divisible by tp=4; costs 31.4 MB on each device"
        )
        assert one.fix == "use fewer axes or pad the array"

    def test_a_cheap_one_is_a_note(self):
        assert only(findings({"w": array(8, 6)}, SHARDED), "correction").level == "info"

    def test_not_of_what_fits(self):
        assert of_kind(findings({"w": [LARGE] * 20}, SHARDED), "correction") == []

    @pytest.mark.parametrize(
        ("size", "spec", "policy", "parts"),
        [
            (8, ("fsdp", "tp"), "prefix", 8),
            (4, ("fsdp", "tp"), "drop_axis", 4),
            (50280, ("rows",), None, None),
            (50281, ("rows", "tp"), None, None),
        ],
    )
    def test_the_advised_correction_keeps_what_is_said(self, size, spec, policy, parts):
        """A vocabulary of 50,280 on 32 devices: a prefix of the axes would keep nothing."""
        mesh = {**MESH, "rows": 32, "sp": 1}
        tree, rules = {"w": array(size, 16)}, [("w", (spec,))]
        (one,) = (found for found in findings(tree, rules, mesh) if found.kind == "correction")
        if policy is None:
            assert one.fix == "use fewer axes or pad the array"
            return
        said = f"or let Correction(indivisible={policy!r}) cut it into {parts} parts"
        assert one.fix == f"use fewer axes or pad the array, {said}"
        plan = sr.plan(tree, sr.Rules(rules, correction=sr.Correction(indivisible=policy)), mesh)
        assert plan.kind("w").device_bytes * parts == plan.kind("w").bytes

    def test_an_absent_axis_takes_those_beside_it(self):
        rules = [("w", (("fsdp", "sp"), "tp")), ("v", ("tp", ("sp", "fsdp"))), ("x", ("tp", "sp"))]
        tree = {"w": LARGE, "v": LARGE, "x": LARGE}
        dropping = LibraryCorrection(absent="drop")
        found = sr.plan(tree, sr.Rules(rules, correction=dropping), MESH).check(
            optional_axes=["sp"]
        )
        with_it, without = (one for one in found if one.kind == "correction")
        # w and v have a 4th of their 16 MiB on a device, and could have a 32nd.
        assert with_it.bytes == 2 * (4 * MIB - MIB // 2)
        assert with_it.message == (
            "rules 0, 1: the mesh has no axis 'sp', so 'fsdp' beside it is dropped too; costs 7.34 MB on each device"
        )
        assert (with_it.rule, with_it.leaves) == (None, 2)
        assert (
            without.message
            == "rule 2 'x' -> P('tp', 'sp'): the mesh has no axis 'sp'; costs nothing"
        )
        assert (without.rule, without.bytes, without.level) == (2, 0, "info")
        dropping = LibraryCorrection(absent="drop_axis")
        alone = sr.plan(tree, sr.Rules(rules, correction=dropping), MESH).check(
            optional_axes=["sp"]
        )
        assert [one.bytes for one in of_kind(alone, "correction")] == [0]
        assert [one.bytes for one in of_kind(findings(tree, rules), "unknown-axis")] == [0]

    def test_small_ones_that_are_large_together(self):
        names = [f"w{letter}" for letter in "abcdefgh"]
        rules = [(name, ("fsdp", "tp")) for name in names]
        tree = {name: array(4096, 1022) for name in names}  # 1.57 MB each
        found = findings(tree, rules, large=8 * MIB)
        assert [one.level for one in of_kind(found, "correction")] == ["warning"] * 8
        # Beside 800 MB they are nothing.
        found = findings(
            {**tree, "big": [LARGE] * 1600}, [*rules, *SHARDED, ("big", ("fsdp", "tp"))]
        )
        assert {one.level for one in of_kind(found, "correction")} == {"info"}

    def test_a_spec_that_is_too_long(self):
        one = only(findings({"w": array(8)}, SHARDED), "correction")
        assert "the spec has 2 entries, the array 1 dimension" in one.message
        assert one.fix == "shorten the spec"


class TestUnknownAxis:
    """An axis that the mesh lacks passed as two notes that "cost nothing"."""

    WHOLE = array(16384, 16384, dtype="bfloat16")

    def test_an_axis_misspelt(self):
        found = findings({"w": self.WHOLE}, [("w", ("fdsp", "tp"))], {"fsdp": 64, "tp": 8})
        one = only(found, "unknown-axis")
        assert (one.level, one.leaves, one.rule, one.paths) == ("error", 1, 0, ("w",))
        assert "the mesh has no axis 'fdsp' (did you mean 'fsdp'?)" in one.message
        assert one.bytes == 2 * 16384**2 // 8 - 2 * 16384**2 // 512
        assert "optional_axes" in one.fix
        right = findings({"w": self.WHOLE}, [("w", ("fsdp", "tp"))], {"fsdp": 64, "tp": 8})
        assert right == ()

    def test_no_name_is_near(self):
        (one,) = of_kind(findings({"w": self.WHOLE}, [("w", ("fsdp", "sp"))]), "unknown-axis")
        assert one.message == "rule 0 'w' -> P('fsdp', 'sp'): the mesh has no axis 'sp'"

    @pytest.mark.parametrize("name", ["fsdp", "fdsp", "FSDP", "fsdp_axis", "fsd", "fspd"])
    def test_what_is_near(self, name):
        assert nearest(name, ["tp", "dp", "fsdp"]) == "fsdp"

    @pytest.mark.parametrize("name", ["sp", "ep", "mp", "model", "x", ""])
    def test_what_is_not(self, name):
        assert nearest(name, ["tp", "dp"]) is None

    def test_an_axis_of_the_spec_was_not_meant(self):
        (one,) = of_kind(findings({"w": self.WHOLE}, [("w", ("fsdp", "fdsp"))]), "unknown-axis")
        assert "did you mean" not in one.message

    def test_who_says_drop_gets_the_finding_all_the_same(self):
        """As eformer drops the axis."""
        plan = sr.plan({"w": self.WHOLE}, sr.Rules([("w", ("fdsp", "tp"))], correction=LibraryCorrection(absent="drop")), {"fsdp": 64, "tp": 8})  # fmt: skip
        assert plan.specs() == {"w": P(None, "tp")}
        assert only(plan.check(), "unknown-axis").level == "error"

    @pytest.mark.parametrize(
        "dialect",
        [sr.dialects.EFORMER, sr.dialects.EASYLM, sr.dialects.NNX],
        ids=lambda one: one.name,
    )
    def test_the_plan_gives_no_specs_and_has_one_finding(self, dialect):
        rules = sr.Rules([("w", ("fdsp", "tp"))], dialect)
        plan = sr.plan({"w": self.WHOLE}, rules, {"fsdp": 64, "tp": 8})
        assert [one.kind for one in plan.check()] == ["unknown-axis"]
        told = r"(?s)^1 leaf cannot .* w  shape .* rule 0: 'w' -> P\('fdsp', 'tp'\)\n.*mean 'fsdp'"
        for refused in (plan.specs, plan.shardings, plan.abstract):
            with pytest.raises(ValueError, match=told):
                refused()
        for rule in ([("w", ("fsdp", "tp"))], [("w", sr.RuleSpec("fdsp", optional_axes=["fdsp"]))]):
            sr.plan({"w": self.WHOLE}, rule, {"fsdp": 64, "tp": 8}).shardings()

    def test_bytes_are_counted_without_the_axis_alone(self):
        """What is misspelt would cost that much; the rest of the rule is meant as it stands."""
        rules = [("w", (("fsdp", "spp"), "tpp"))]
        plan = sr.plan({"w": self.WHOLE}, rules, {"fsdp": 4, "tp": 2})
        assert shard_bytes(plan) == [2 * 16384**2 // 4]
        assert [(one.kind, one.bytes) for one in plan.check()] == [
            ("unknown-axis", 2 * 16384**2 // 8), ("unknown-axis", 0)]  # fmt: skip
        back = sr.Plan.from_lock(plan.lock())
        assert shard_bytes(back) == shard_bytes(plan)
        assert [one.kind for one in back.check().at_least("error")] == ["misfit"]
        state = plan.for_optimizer({"mu": {"w": self.WHOLE}})
        assert shard_bytes(state) == shard_bytes(plan)
        assert {one.kind for one in state.check().at_least("error")} == {"unknown-axis"}

    def test_an_axis_and_a_shape_that_do_not_fit_are_two_findings(self):
        exact = sr.Correction(indivisible="error")
        plan = sr.plan(
            {"w": array(6, 8)}, sr.Rules([("w", ("fsdp", "sp"))], correction=exact), MESH
        )
        found = {one.kind: one for one in plan.check().at_least("error")}
        assert found.keys() == {"unknown-axis", "misfit"}
        assert "the mesh has no axis" not in found["misfit"].message

    def test_declared(self):
        rules = [("w", ("fsdp", ("tp", "sp")))]
        assert only(findings({"w": self.WHOLE}, rules), "unknown-axis").level == "error"
        for plan, declared in (
            (sr.plan({"w": self.WHOLE}, rules, MESH), ["sp"]),
            (sr.plan({"w": self.WHOLE}, sr.Rules(rules, optional_axes=["sp"]), MESH), []),
        ):
            one = only(plan.check(optional_axes=declared), "correction")
            assert (one.level, one.bytes) == ("info", 0)
        assert plan.specs() == {"w": P("fsdp", "tp")}

    def test_declared_by_a_rule(self):
        """One rule may be for meshes of two kinds, while the axis is a mistake in another."""
        rules = [("w", sr.RuleSpec(("fsdp", "sp"), optional_axes=["sp"])), ("v", ("fsdp", "sp"))]
        found = findings({"w": self.WHOLE, "v": self.WHOLE}, rules)
        one = only(found, "unknown-axis")
        assert (one.rule, one.paths) == (1, ("v",))
        declared = only(found, "correction")
        assert (declared.rule, declared.level, declared.paths) == (0, "info", ("w",))
        assert "the mesh has no axis 'sp', which alone the spec is without" in declared.message
        state = sr.plan({"w": self.WHOLE}, rules, MESH).for_optimizer([{"mu": {"w": self.WHOLE}}])
        assert of_kind(state.check(), "unknown-axis") == []

    def test_of_axes_that_are_lost_together_only_those_declared_are_no_mistake(self):
        rules = [("w", sr.RuleSpec(("fsdp", ("sp", "ep")), optional_axes=["sp"]))]
        one = only(findings({"w": self.WHOLE}, rules), "unknown-axis")
        assert "no axis 'ep'" in one.message
        found = findings({"w": self.WHOLE}, rules, optional_axes=["ep"])
        assert of_kind(found, "unknown-axis") == []

    def test_not_of_a_rule_that_decides_nothing(self):
        found = findings({"w": self.WHOLE}, [("w", ("fsdp", "tp")), ("x", "ep")])
        assert [one.kind for one in found] == ["dead"]

    def test_explained(self):
        plan = sr.plan({"w": self.WHOLE}, [("w", ("fdsp", "tp"))], {"fsdp": 64, "tp": 8})
        told = str(plan.explain("w"))
        assert "did you mean 'fsdp'?" in told
        assert "(costs 66.1 MB on each device)" in told


class TestUncut:
    """A rule that forgets an axis which all others name."""

    TREE = {name: [array(4096, 4096)] * 8 for name in ("q", "k", "v", "o")}
    RULES = [("[qkv]", ("fsdp", "tp")), ("o", ("tp", "fsdp"))]

    def test_an_axis_forgotten(self):
        found = findings(self.TREE, [("[qkv]", ("fsdp", "tp")), ("o", ("tp",))])
        one = only(found, "uncut")
        assert (one.level, one.leaves, one.rule, one.paths) == ("warning", 8, 1, ("o/{0..7}",))
        assert "the mesh axis 'fsdp' could cut 8 leaves" in one.message
        assert one.bytes == 8 * (64 * MIB // 4 - 64 * MIB // 32)
        assert findings(self.TREE, self.RULES) == ()

    def test_of_most_leaves(self):
        found = findings(self.TREE, [("[qkv]", ("fsdp",)), ("o", ("tp", "fsdp"))])
        assert only(found, "uncut").leaves == 24

    def test_declared(self):
        rules = [("[qkv]", ("fsdp", "tp")), ("o", ("tp",))]
        assert findings(self.TREE, rules, replicated=["^o/"]) == ()

    def test_not_what_it_cannot_cut(self):
        tree = {**self.TREE, "o": [array(4100, 4095)] * 8}
        assert of_kind(findings(tree, [("[qkv]", ("fsdp", "tp")), ("o", ("tp",))]), "uncut") == []

    def test_an_axis_for_experts_says_nothing_of_matrices(self):
        tree = {**self.TREE, "experts": array(8, 4096, 4096)}
        mesh = {**MESH, "ep": 2}
        experts = ("experts", ("ep", "fsdp", "tp"))
        assert findings(tree, [experts, *self.RULES], mesh) == ()
        # But one for matrices does about experts.
        without = findings(tree, [("experts", ("ep", "fsdp")), *self.RULES], mesh)
        assert only(without, "uncut").paths == ("experts",)

    def test_zero1_says_nothing_of_parameters(self):
        tree = {"params": self.TREE, "opt_state": {"mu": self.TREE}}
        rules = [("opt_state.*[qkvo]", (("fsdp", "dp"), "tp")), ("[qkvo]", ("fsdp", "tp"))]
        assert findings(tree, rules, {**MESH, "dp": 2}) == ()

    def test_what_the_shape_refuses_is_a_correction(self):
        tree = {**self.TREE, "o": [array(4096, 4100)] * 8}
        found = findings(tree, self.RULES)
        assert {one.kind for one in found} == {"correction"}

    def test_what_is_replicated_is_told_as_that(self):
        found = findings(self.TREE, [("[qkv]", ("fsdp", "tp")), ("o", ())])
        assert {one.kind for one in found} == {"replicated"}

    def test_little_is_not_told(self):
        tree = {**self.TREE, "o": array(4096, 512)}
        assert findings(tree, [("[qkv]", ("fsdp", "tp")), ("o", ("tp",))]) == ()


class TestHalfHead:
    """6 KV heads on tp=4 passed without a word."""

    @staticmethod
    def tree(kv=6, **more):
        attention = {"q_proj": array(4096, 4096), "k_proj": array(4096, kv * 128), **more}
        return {"attn": {name: {"kernel": leaf} for name, leaf in attention.items()}}

    RULES = (("o_proj", ("tp", "fsdp")), ("norm", ()), ("proj", ("fsdp", "tp")))

    def test_by_its_size(self):
        rules = self.RULES[2:]
        assert of_kind(findings(self.tree(), rules), "half-head") == []
        one = only(findings(self.tree(), rules, head_dim=128), "half-head")
        assert (one.level, one.rule, one.paths) == ("warning", 0, ("attn/k_proj/kernel",))
        assert (
            "dim 1 of size 768, 6 heads of 128, is cut into parts of 192, 1.5 heads" in one.message
        )
        assert of_kind(findings(self.tree(kv=8), rules, head_dim=128), "half-head") == []

    def test_by_a_norm_beside_it(self):
        tree = self.tree(k_norm=array(128))
        assert only(findings(tree, self.RULES), "half-head").paths == ("attn/k_proj/kernel",)
        whole = self.tree(k_norm=array(768), q_norm=array(4096))  # of all heads together
        assert of_kind(findings(whole, self.RULES), "half-head") == []

    def test_units_keep_heads_whole(self):
        rules = [("proj", sr.RuleSpec(("fsdp", "tp"), units=(None, 128)))]
        assert of_kind(findings(self.tree(), rules, head_dim=128), "half-head") == []

    def test_of_torch(self):
        tree = {
            "self_attn.k_proj.weight": array(768, 4096),
            "self_attn.o_proj.weight": array(4096, 768),
        }
        rules = [("o_proj", ("fsdp", "tp")), ("proj", ("tp", "fsdp"))]
        assert only(findings(tree, rules[1:], head_dim=128), "half-head").leaves == 1
        assert (
            sum(one.leaves for one in of_kind(findings(tree, rules, head_dim=128), "half-head"))
            == 2
        )

    def test_heads_of_their_own(self):
        tree = {"attention": {"query": {"kernel": array(4096, 8, 128)}}}
        cut = findings(tree, [("query", ("fsdp", None, "tp"))], head_dim=128)
        assert "dim 2 of size 128, 1 head of 128" in only(cut, "half-head").message
        assert of_kind(findings(tree, [("query", ("fsdp", "tp"))], head_dim=128), "half-head") == []

    def test_weights_are_gathered_along_fsdp(self):
        rules = [("proj", ("tp", "fsdp"))]
        assert of_kind(findings(self.tree(), rules, head_dim=128), "half-head") == []

    def test_no_attention_is_found(self):
        one = only(findings({"w": LARGE}, SHARDED, head_dim=128), "half-head")
        assert "no path names projections of attention" in one.message


class TestNnxValue:
    """Paths of nnx end in `value`, and `query|key|value` won every leaf."""

    TREE = {name: {"kernel": {"value": LARGE}} for name in ("query", "mlp")}

    def test_a_pattern_that_matches_only_so(self):
        found = findings(self.TREE, [("query|key|value", ("fsdp", "tp"))])
        one = only(found, "nnx-value")
        assert (one.level, one.rule, one.leaves) == ("error", 0, 1)
        assert "matches 1 leaf only through the '/value' in which flax nnx lets" in one.message

    @pytest.mark.parametrize(
        "pattern", [".*", "kernel/value$", "(query|mlp|value)/kernel", "kernel"]
    )
    def test_not_others(self, pattern):
        assert findings(self.TREE, [(pattern, ("fsdp", "tp"))]).at_least("error") == ()

    def test_not_where_it_wins_nothing(self):
        found = findings(self.TREE, [("kernel", ("fsdp", "tp")), ("value", "tp")])
        assert of_kind(found, "nnx-value") == []

    def test_a_pattern_that_matches_some_leaves_only_so(self):
        attn = {name: {"kernel": {"value": LARGE}} for name in ("query", "value")}
        rules = [("attn.*value", ("fsdp", "tp")), ("kernel", ("tp", "fsdp"))]
        one = only(findings({"attn": attn, **self.TREE}, rules), "nnx-value")
        assert (one.level, one.rule, one.paths) == ("warning", 0, ("attn/query/kernel/value",))
        assert "1 leaf only through the '/value' in which flax nnx lets paths end" in one.message
        assert "use the dialect NNX" in one.fix

    def test_patterns_that_match_it_perhaps_on_purpose(self):
        tree = {**self.TREE, "norm": {"scale": {"value": LARGE}}}
        rules = [("kernel/v", ("fsdp", "tp")), ("scale/v", ("tp", "fsdp"))]
        told = of_kind(findings(tree, rules), "nnx-value")
        assert [(one.level, one.rule, one.leaves) for one in told] == [
            ("info", 0, 2),
            ("info", 1, 1),
        ]

    def test_patterns_that_spell_it_out(self):
        """As those do that stand for the leaves of a tree of specs."""
        for pattern in ("kernel/value$", "kernel/value"):
            assert findings(self.TREE, [(pattern, ("fsdp", "tp"))]) == ()
        specs = jax.tree.map(lambda _: P("fsdp", "tp"), self.TREE)
        assert findings(self.TREE, specs) == ()

    def test_patterns_that_end_before_it(self):
        rules = [("query/kernel$", "tp"), ("bias$", "tp"), ("kernel", ("fsdp", "tp"))]
        one = only(findings(self.TREE, rules), "nnx-value")
        assert (one.level, one.rule, one.paths) == ("warning", 0, ("query/kernel/value",))
        assert "matches 1 leaf only without the '/value' in which flax nnx lets" in one.message

    def test_the_paths_of_the_dialect_do_not_end_so(self):
        for pattern in ("query|key|value", "kernel/value$", "kernel$"):
            rules = sr.Rules([(pattern, ("fsdp", "tp")), (".*", ())], sr.dialects.NNX)
            assert of_kind(findings(self.TREE, rules), "nnx-value") == []

    def test_of_nnx_itself(self):
        nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
        model = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
        found = findings(nnx.state(model), [("query|key|value", ())])
        assert only(found, "nnx-value").leaves == 2


class TestRules:
    def test_dead(self):
        one = only(findings({"w": LARGE}, [*SHARDED, ("v", "tp")]), "dead")
        assert (one.level, one.rule, one.leaves, one.bytes, one.paths) == ("warning", 1, 0, 0, ())
        assert one.message == "rule 1 'v' -> P('tp') matches no leaf"
        assert of_kind(findings({"w": LARGE, "v": array(8)}, [*SHARDED, ("v", "tp")]), "dead") == []

    def test_dead_on_what_needs_a_rule(self):
        """A rule that only scalars match decides nothing."""
        assert only(findings({"w": LARGE, "v": array()}, [*SHARDED, ("v", "tp")]), "dead").rule == 1

    def test_shadowed(self):
        one = only(findings({"w": LARGE, "bw": LARGE}, [*SHARDED, ("bw", "tp")]), "shadowed")
        assert (one.level, one.rule, one.leaves) == ("warning", 1, 1)
        assert (
            one.message == "rule 1 'bw' -> P('tp') matches 1 leaf, but wins none: rule 0 came first"
        )
        assert one.fix == "move it before rule 0, or remove it"
        assert (
            of_kind(findings({"w": LARGE, "bw": LARGE}, [("bw", "tp"), *SHARDED]), "shadowed") == []
        )

    def test_a_catch_all_may_be_left_with_nothing(self):
        found = findings({"w": LARGE}, [*SHARDED, (".*", None)])
        assert found == ()

    def test_where_one_rule_alone_may_match_there_is_no_before(self):
        found = findings(
            {"a": LARGE}, sr.Rules([("a", ("fsdp", "tp")), ("a.*", None)], sr.dialects.KERAS)
        )
        assert only(found, "shadowed").fix == "make the patterns exclude each other, or remove it"


class TestSiblings:
    RULES = (("layers/[0-2]/w", ("fsdp", "tp")), ("w", ("tp", "fsdp")))

    def test_other_specs(self):
        one = only(findings({"layers": [{"w": LARGE}] * 5}, self.RULES), "siblings")
        assert (one.level, one.leaves, one.paths) == (
            "warning",
            5,
            ("layers/{0..2}/w", "layers/{3,4}/w"),
        )
        assert one.message == (
            "5 leaves that differ only in numbers get 2 specs, P('fsdp', 'tp') and P('tp', 'fsdp'), by rules 0, 1"
        )

    def test_none_at_all(self):
        one = only(findings({"layers": [{"w": LARGE}] * 5}, self.RULES[:1]), "siblings")
        assert "P('fsdp', 'tp') and none, by rule 0" in one.message

    def test_not_by_other_rules_alike(self):
        rules = [("layers/[0-2]/w", ("fsdp", "tp")), ("w", ("fsdp", "tp"))]
        assert of_kind(findings({"layers": [{"w": LARGE}] * 5}, rules), "siblings") == []

    def test_not_of_other_shapes_or_dtypes(self):
        for other in (array(1024, 4096), array(4096, 1024, dtype="bfloat16")):
            layers = [{"w": LARGE}] * 3 + [{"w": other}] * 2
            assert of_kind(findings({"layers": layers}, self.RULES), "siblings") == []

    def test_not_where_the_number_is_a_part_of_a_name(self):
        tree = {"w1": LARGE, "w2": LARGE}
        assert (
            of_kind(findings(tree, [("w1", ("fsdp", "tp")), ("w2", ("tp", "fsdp"))]), "siblings")
            == []
        )


class TestUnusedAxes:
    def test_an_axis(self):
        one = only(findings({"w": LARGE}, SHARDED, {"dp": 2, **MESH}), "unused-axis")
        assert one.level == "info"
        assert one.message == "the mesh axis 'dp' cuts no leaf: everything is held 2 times along it"

    def test_not_of_one_that_leaves_lose(self):
        """It is a correction, and another finding would say of a rule that names it to name it."""
        tree = {"w": [array(4096, 4095)] * 20}
        found = findings(tree, [("w", ("fsdp", "rows"))], {"fsdp": 8, "rows": 4})
        assert [one.kind for one in found] == ["correction"]

    def test_one_of_a_rule_for_no_leaf(self):
        tree, mesh = {"w": [LARGE] * 100}, {"dp": 4, **MESH}
        found = findings(tree, [*SHARDED, ("batch", "dp")], mesh)
        assert [(one.level, one.kind, one.rule) for one in found] == [
            ("warning", "dead", 1),
            ("info", "unused-axis", 1),
        ]
        assert "named only by rule 1 'batch' -> P('dp'), which no leaf meets" in found[1].message
        assert found[1].fix.startswith("correct the rule; or declare")

    def test_one_of_a_logical_rule_for_activations_is_one_note(self):
        tree, mesh = {"w": array(8192, 8192)}, {"dp": 4, "tp": 4}
        rules = sr.LogicalRules([("batch", "dp"), ("mlp", "tp"), ("embed", None)])
        plan = sr.plan(tree, rules, mesh, names={"w": ("embed", "mlp")})
        (one,) = plan.check()
        assert (one.level, one.kind, one.rule) == ("info", "unused-axis", 0)
        assert "named only by rule 0 'batch' -> 'dp', which no leaf meets" in one.message
        assert "data_axes=['dp']" in one.fix
        assert plan.check(data_axes=["dp"]) == ()
        # A name without a rule may be that of the rule without a leaf.
        unknown = sr.plan(tree, rules, mesh, names={"w": ("rows", "mlp")}).check()
        assert ("warning", "unused-axis") in [(one.level, one.kind) for one in unknown]

    def test_not_of_one_device(self):
        assert of_kind(findings({"w": LARGE}, SHARDED, {"dp": 1, **MESH}), "unused-axis") == []

    def test_a_mesh_three_times_as_large_that_holds_as_much(self):
        tree = {"w": [LARGE] * 100}
        assert findings(tree, SHARDED) == ()
        mesh = {"dp": 4, **MESH}
        one = only(findings(tree, SHARDED, mesh), "unused-axis")
        assert (one.level, one.bytes) == ("warning", 100 * 16 * MIB // 32 * 3 // 4)
        assert findings(tree, SHARDED, mesh, data_axes=["dp"]) == ()


FACTORS = {
    "up": {"kernel": array(64, 256), "lora_a": array(64, 8), "lora_b": array(8, 256)},
    "norm": array(64),
}


class TestCompanion:
    def found(self, tree, rules, companions, **options):
        return of_kind(
            sr.plan(tree, rules, MESH, companions=companions).check(**options), "companion"
        )

    def test_a_leaf_whose_base_no_rule_meets_falls_to_its_own_rule(self):
        tree = {"layers": {"wo": array(32, 64, 64), "wq": array(32, 64, 64)}}
        rules = [("layers/wo", ("fsdp", "tp")), (r"layers/\d+/wq", ("fsdp", "tp"))]
        plan = sr.plan(tree, rules, MESH, companions=[sr.stacked("layers")])
        assert plan.kind("layers/wo").spec[0] == "fsdp"
        one = only(plan.check(), "companion")
        assert (one.level, one.paths, one.leaves) == ("warning", ("layers/wo",), 1)
        assert one.bytes == plan.kind("layers/wo").device_bytes
        assert (
            "should follow a rule for 'layers/0/wo' and the like, but none meets that"
            in one.message
        )
        assert "what decides is rule 0, as if there were no companion" in one.message
        assert "add a rule that matches 'layers/0/wo'" in one.fix
        told = str(plan.explain("layers/wo"))
        assert (
            "companion      '(^|[./])layers([./]|$)' finds it; but no rule meets its base" in told
        )
        assert "layers/0/wo, so its own counts" in told
        told = str(plan.explain("layers/wq"))
        assert "companion      '(^|[./])layers([./]|$)' finds it\n" in told
        assert "follows        layers/0/wq" in told

    def test_that_no_rule_is_left_is_told_as_well(self):
        (one,) = self.found({"layers": {"wo": array(8, 8)}}, SHARDED[:0], [sr.stacked("layers")])
        assert "what decides is no rule" in one.message

    def test_all_layers_follow(self):
        tree = {"layers": {"wq": array(32, 64, 64)}, "norm": array(64)}
        rules = [(r"layers/\d+/wq", ("fsdp", "tp")), ("norm", ())]
        assert self.found(tree, rules, [sr.stacked("layers")]) == []

    def test_one_that_finds_nothing(self):
        tree = {"layers": {"wq": array(32, 64, 64)}}
        for mistyped in (sr.stacked("layer"), sr.Companion("wx$", "w", dims=(0, 1))):
            (one,) = self.found(tree, [("", "fsdp")], [sr.stacked("layers"), mistyped])
            assert (one.level, one.paths, one.leaves) == ("warning", (), 0)
            assert one.message == f"the companion {mistyped.pattern!r} finds no leaf"
        assert self.found(tree, [("", "fsdp")], [mistyped], levels={"companion": "off"}) == []

    def test_tables_are_asked_as_a_whole(self):
        tree = {"q": {"kernel": array(64, 64), "lora_a": array(64, 4)}}
        assert self.found(tree, [("kernel", "tp")], sr.LORA) == []
        (one,) = self.found(tree, [("kernel", "tp")], [*sr.LORA, *sr.QUANTIZED])
        assert one.message == "QUANTIZED finds no leaf"

    def test_companions_of_another_mesh_and_of_none(self):
        assert self.found({"w": LARGE}, SHARDED, []) == []
        tree = {"layers": {"wo": array(32, 64, 64)}}
        plan = sr.plan(tree, [("layers/wo", "tp")], MESH, companions=[sr.stacked("layers")])
        assert len(of_kind(plan.on_mesh({"tp": 2}).check(), "companion")) == 1
        assert of_kind(sr.Plan.from_lock(plan.lock()).check(), "companion") == []

    def test_a_rule_for_kernels_that_cuts_the_rank_of_lora(self):
        loose = [("up", P("fsdp", "tp")), ("norm", P())]
        (one,) = self.found(FACTORS, loose, [])
        assert (one.level, one.rule, one.bytes) == ("warning", 0, 0)
        assert set(one.paths) == {"up/lora_a", "up/lora_b"}
        assert "rule 0 'up' -> P('fsdp', 'tp') is for kernels" in one.message
        assert "it cuts their rank" in one.message
        assert (one.mend, one.mend in one.fix) == ("companions=shardrules.LORA", True)
        assert self.found(FACTORS, loose, sr.LORA) == []

    def test_factors_whose_rank_is_not_cut_or_that_have_a_rule_of_their_own(self):
        for rules in (
            [("up", P("fsdp", None)), ("norm", P())],  # cuts the rank of lora_b alone
            [("lora_b", P()), ("up", P("fsdp", None)), ("norm", P())],
            [("lora_", P("fsdp", "tp")), ("up", P("fsdp", "tp")), ("norm", P())],
        ):
            found = self.found(FACTORS, rules, [])
            expected = [("up/lora_b",)] if len(rules) == 2 else []
            assert [one.paths for one in found] == expected
        # qwix's names, whose dimensions are found by their sizes.
        of_qwix = {"kernel": array(64, 256), "kernel_lora_a": array(64, 8)}
        (one,) = self.found({"up": of_qwix}, [("up/kernel", P("fsdp", "tp"))], [])
        assert one.paths == ("up/kernel_lora_a",)
        alone = {"up": {"lora_a": array(64, 8)}}  # the kernel is in another tree
        assert self.found(alone, [("up", P("fsdp", "tp"))], [])[0].paths == ("up/lora_a",)

    def test_unmatched_leaves_that_a_table_would_find(self):
        tree = FACTORS | {"down": {"kernel": array(64, 8), "kernel_scale": array(1, 8)}}
        rules = [("kernel$", P("fsdp", "tp")), ("norm", P())]
        fix = only(findings(tree, rules), "unmatched").fix
        assert "; or give companions=shardrules.LORA: 2 of them then follow other" in fix
        assert "; or give companions=shardrules.QUANTIZED: 1 of them then follow other" in fix
        assert "companions" not in only(findings(tree, [("norm", P())]), "unmatched").fix
        other = {"up": {"kernel": array(64, 8), "lora_c": array(8, 8)}}
        assert "companions" not in only(findings(other, rules), "unmatched").fix


EVERYTHING = {
    "tree": {"w": array(4096, 1022), "layers": [{"v": LARGE}] * 4, "x": LARGE, "y": LARGE, "twice": LARGE, "z": LARGE,
             "far": LARGE, "part": [LARGE] * 32, "attn": {"k_proj": array(4096, 768)}, "off": LARGE, "nnx": {"value": array(8)}},
    "rules": [("value", ()), ("off", sr.RuleSpec(("fsdp", "tp"), memory_kind="unpinned_host")), ("k_proj", ("fsdp", "tp")), ("far", ("tp", "fdsp")), ("part", "fsdp"), ("^w", ("fsdp", "tp")),
              ("[01]/v", ("fsdp", "tp")), ("v", ("tp", "fsdp")), ("x", None), ("dead", "tp"), ("twice", ("tp", "tp")),
              ("layers/0", "tp"), ("z", ())],
    "mesh": {"dp": 2, **MESH},
    "head_dim": 128,
    "hbm": 1,
}  # fmt: skip


def everything(**options):
    return findings(**EVERYTHING, **options)


# Of a catch-all, of companions, and of logical rules, which have plans of their own.
ELSEWHERE = {"catch-all", "companion", "unknown-name", "unnamed", "taken"}


def test_levels():
    found = everything()
    assert {one.kind for one in found} == set(KINDS) - ELSEWHERE
    for kind in {one.kind for one in found}:
        for level in ("error", "warning", "info"):
            assert {one.level for one in of_kind(everything(levels={kind: level}), kind)} == {level}
        without = everything(levels={kind: "off"})
        assert list(without) == [one for one in found if one.kind != kind]


def test_the_worst_first():
    found = everything()
    order = [("error", "warning", "info").index(one.level) for one in found]
    assert order == sorted(order)
    for level in range(3):
        held = [one.bytes for one, at in zip(found, order, strict=True) if at == level]
        assert held == sorted(held, reverse=True)
    assert [one.level for one in found.at_least("error")] == ["error"] * order.count(0)
    assert len(found.at_least("warning")) == order.count(0) + order.count(1)
    assert found.at_least("info") == found
    assert (
        found.summary
        == f"{order.count(0)} errors, {order.count(1)} warnings, {order.count(2)} info"
    )


def test_choices_that_do_not_exist():
    with pytest.raises(ValueError, match="a kind of finding is 'silly'; it must be one of '"):
        everything(levels={"silly": "off"})
    with pytest.raises(
        ValueError, match="the level of 'dead' is 'fatal'; it must be one of 'error'"
    ):
        everything(levels={"dead": "fatal"})
    with pytest.raises(re.error, match=r"^replicated\[1\]: missing \), unterminated subpattern"):
        everything(replicated=["x", "("])


def test_json():
    found = everything()
    listed = json.loads(found.to_json())["findings"]
    assert [sr.types.Finding(**{**one, "paths": tuple(one["paths"])}) for one in listed] == list(
        found
    )
    assert json.loads(findings({"w": LARGE}, SHARDED).to_json()) == {
        "version": 1,
        "scope": "1 leaf, 1 rule, on fsdp=8,tp=4",
        "findings": [],
    }


def toolkit_data(text):
    """escapeData of @actions/core's command.ts."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def toolkit_property(text):
    """escapeProperty of the same."""
    return toolkit_data(text).replace(":", "%3A").replace(",", "%2C")


def test_github():
    tree = {"100%\r\nof: a, b::": LARGE, **{f"{c}/x": array(8) for c in "abcdefg"}}
    found = findings(tree, [("no, such: 5%", "tp")])
    lines = found.to_github("rules, v1:\n100%.py").split("\n")
    assert len(lines) == len(found) == 4
    commands = {"error": "error", "warning": "warning", "info": "notice"}
    for line, one in zip(lines, found, strict=True):
        # A name's line break would be one of the annotation.
        names = [text.replace("\r\n", r"\u000d\u000a") for text in one.paths[:5]]
        told = "\n".join([one.message, *names, one.fix])
        assert line == (
            f"::{commands[one.level]} file={toolkit_property('rules, v1:' + chr(10) + '100%.py')}"
            f",title=shardrules {one.kind}::{toolkit_data(told)}"
        )
    assert r"%25\u000d\u000aof: a, b::" in lines[0]
    assert found.to_github().startswith(
        "::error title=shardrules unmatched::no rule matches 8 leaves of 8%0A"
    )


def test_github_annotations_stand_at_the_line_of_the_rule():
    found = findings({"w": LARGE}, [("w", "tp"), ("gone", "tp"), ("v", "tp")])
    assert {one.rule for one in found} >= {1, 2}
    for line, one in zip(found.to_github("r.toml", [3, 7, 11]).split("\n"), found, strict=True):
        at = "" if one.rule is None else f",line={[3, 7, 11][one.rule]}"
        assert f" file=r.toml{at},title=shardrules {one.kind}::" in line
    assert "line=" not in found.to_github(None, [3, 7, 11])
    with pytest.raises(ValueError, match="lines: there are 1, and a finding is about rule 1"):
        found.to_github("r.toml", [3])


def test_many_paths_are_cut_short():
    (one, *_) = findings({f"{c}/x": array(8) for c in "abcdefg"}, [])
    lines = str(one).split("\n")
    assert [line.strip() for line in lines[1:-1]] == [
        "a/x",
        "b/x",
        "c/x",
        "d/x",
        "e/x",
        "... and 2 more patterns",
    ]


EASYDEL_V3 = "easydel__deepseek_v3-DeepseekV3Config-v0.2.0"
EASYDEL_MESH = {"dp": 1, "fsdp": 8, "ep": 1, "tp": 4, "sp": 1}
PAIRS = {
    "deepseek-v3-per-expert": (corpus.DEEPSEEK, EASYDEL_V3, sr.dialects.EFORMER, EASYDEL_MESH),
    "deepseek-v3-v2-rules": (corpus.DEEPSEEK, "easydel__deepseek_v2-DeepseekV2Config-v0.0.80", sr.dialects.EFORMER, EASYDEL_MESH),
    "easydel-deepseek-v3": ("easydel-deepseek-v3", EASYDEL_V3, sr.dialects.EFORMER, EASYDEL_MESH),
    "easydel-deepseek-v3-without-sp": ("easydel-deepseek-v3", EASYDEL_V3, sr.dialects.EFORMER, {"fsdp": 8, "tp": 4}),
    "easydel-deepseek-v3-fsdp-6": ("easydel-deepseek-v3", EASYDEL_V3, sr.dialects.EFORMER, {**EASYDEL_MESH, "fsdp": 6}),
    "easylm-llama": ("easylm-llama-3.1-405b", "EasyLM__llama", sr.dialects.EASYLM, {"dp": 1, "fsdp": 32, "mp": 8}),
    "easylm-gpt-j": ("flax-gpt-j-6b", "EasyLM-yizhongw__gptj", sr.dialects.EASYLM, {"dp": 1, "fsdp": 8, "mp": 4}),
    "easylm-gpt-j-mp-64": ("flax-gpt-j-6b", "EasyLM-yizhongw__gptj", sr.dialects.EASYLM, {"dp": 1, "fsdp": 8, "mp": 64}),
    "lwm-7b-scanned": ("lwm-7b-scanned", "LWM__llama-scan_layersTrue", sr.dialects.EASYLM, {"dp": 1, "fsdp": 8, "tp": 4, "sp": 1}),
    "jaxseq-t5": ("flax-t5-v1_1-xxl", "JAXSeq__T5", sr.dialects.KEYSTR, {"dp": 1, "fsdp": 8, "mp": 4}),
}  # fmt: skip


def plan_of(pair):
    model, rules, dialect, mesh = PAIRS[pair]
    tree = corpus.manifest(model).nested(lambda p: array(*p.shape, dtype=p.dtype))
    return sr.plan(tree, sr.Rules(corpus.rules(rules), dialect), mesh)


@pytest.mark.parametrize("pair", PAIRS)
def test_golden(pair):
    file, told = GOLDEN / f"{pair}.txt", str(plan_of(pair).check()) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(told, "utf-8")
    assert told == file.read_text("utf-8")


def test_golden_files_are_all_used():
    assert {file.stem for file in GOLDEN.iterdir()} == PAIRS.keys()


def test_the_catch_all_of_deepseek_comes_first():
    """EasyDeL's rules are for stacked experts; of the checkpoint's 58 * 256 experts none is sharded."""
    first = plan_of("deepseek-v3-per-expert").check()[0]
    assert (first.level, first.kind, first.leaves, first.bytes) == (
        "error", "catch-all", 58 * 256 * 3, 58 * 256 * 3 * 7168 * 2048 * 2)  # fmt: skip
    assert "44,544 leaves of 45,395" in first.message
    assert "rules 1, 7, 13, 14" in first.fix


def test_locks_find_what_needs_no_history():
    """A lock does not hold what was wanted, so it knows of no corrections; all else is the same."""
    bare = plan_of("easydel-deepseek-v3-without-sp")
    plan = bare.with_rules(sr.Rules(bare.rules, optional_axes=["sp", "ep"]))
    back = sr.Plan.from_lock(plan.lock())
    expected = {one for one in plan.check() if one.kind not in ("correction", "unknown-axis")}
    assert {one.kind for one in plan.check()} >= {"correction"}
    found = {one for one in back.check() if one.kind not in ("siblings", "unused-axis")}
    assert found == {one for one in expected if one.kind != "unused-axis"}


@pytest.mark.parametrize("dialect", ["EFORMER", "KERAS", "KEYSTR"])
def test_empty_trees_and_rules(dialect):
    dialect = replace(getattr(sr.dialects, dialect), name="x")
    for tree in ({}, {"w": LARGE}):
        found = sr.plan(tree, sr.Rules([], dialect), MESH).check()
        assert str(found).endswith(found.summary)
    assert len(fold([], None)) == 0


def refused_by_jax(spec, mesh, rank):
    try:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        jax.ShapeDtypeStruct((8,) * rank, "float32", sharding=sharding)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize(
    "spec",
    [
        P("auto"),
        P("nope"),
        P(("explicit", "nope")),
        P("auto", None, "explicit"),
        P("auto", None, None),
        *(
            P("auto", **{kind: {axis}})
            for kind in ("unreduced", "reduced")
            for axis in ("explicit", "nope")
        ),
        *(P(None, **{kind: {"auto"}}) for kind in ("unreduced", "reduced")),
    ],
    ids=str,
)
def test_what_jax_refuses_to_place_is_a_misfit(spec):
    types = jax.sharding.AxisType
    if len(spec) == 3 and jax.__version_info__ < (0, 8):
        pytest.skip("JAX 0.7 takes specs that are longer than the rank")
    mesh = jax.sharding.AbstractMesh(
        (2, 2), ("auto", "explicit"), axis_types=(types.Auto, types.Explicit)
    )
    kept = LibraryCorrection(absent="keep", rank="keep", pad=False)
    plan = sr.plan({"w": array(8, 8)}, sr.Rules([("w", spec)], correction=kept), mesh)
    found = [one for one in plan.check() if one.kind == "misfit"]
    assert bool(found) == refused_by_jax(spec, mesh, 2)
    assert all(one.level == "error" and one.rule == 0 and one.paths == ("w",) for one in found)
    what = r"cannot be (placed|applied to the shape \(8, 8\)): ."
    assert all(re.search(what, one.message) and one.fix for one in found)


def test_the_axes_of_a_dict_are_not_explicit():
    plan = sr.plan({"w": array(8, 8)}, [("w", P("fsdp", unreduced={"tp"}))], MESH)
    (one,) = (one for one in plan.check() if one.kind == "misfit")
    assert "'tp' is unreduced and is not Explicit" in one.message
    with pytest.raises(ValueError, match="(?s)cannot be sharded .* rule 0: 'w' .* is not Explicit"):
        plan.shardings()


def test_a_scale_is_not_to_be_padded():
    scale = sr.Companion("_scale$", "", dims=(0,))
    tree = {"w": array(6, 8), "w_scale": array(6)}
    plan = sr.plan(tree, [("w$", P("tp"))], MESH, companions=[scale])
    losses = {path: plan.kind(path).losses for path in tree}
    assert {path: one.fix.partition(", or let")[0] for path, (one,) in losses.items()} == {
        "w": "use fewer axes or pad the array",
        "w_scale": "use fewer axes",
    }


def test_each_kind_of_finding_is_registered_and_typed():
    assert set(KINDS) == set(get_args(CheckKind))


def test_a_check_is_one_function(monkeypatch):
    monkeypatch.setattr(check_context, "KINDS", dict(KINDS))
    monkeypatch.setattr(check_context, "CHECKS", checks := dict(check_context.CHECKS))
    monkeypatch.setattr(check, "CHECKS", checks)

    @check_context.check_of("toy", "info", "leaves of a single element")
    def toys(context):
        folded = context.folded([kind.shape == (1,) for kind in context.plan.kinds])
        yield check_context.finding("toy", "too small to matter", "leave it", folded)

    (found,) = of_kind(findings({"w": array(8, 8), "b": array(1)}, [("", ())]), "toy")
    assert (found.level, found.paths, found.leaves) == ("info", ("b",), 1)


def test_a_user_s_test_fails_on_findings_in_one_line():
    found = findings({"w": array(8, 8)}, [("k", "tp")])
    with pytest.raises(sr.FindingsError, match=r"error\[unmatched\]") as error:
        found.raise_for()
    assert error.value.findings == found.at_least("error")
    with pytest.raises(sr.FindingsError, match=r"warning\[dead\]"):
        found.raise_for("warning")
    assert findings({"w": array(8, 8)}, [("w", ("fsdp", "tp"))]).raise_for("info") is None


def test_what_is_lost_is_data_beside_its_words():
    """Which leaves lose alike was told by comparing and searching sentences."""
    tree = {"a": array(6, 8), "b": array(10, 8)}
    rules = [("a", P("tp", "sp")), ("b", P(("tpp", "fsdp"), None))]
    plan = sr.plan(tree, rules, MESH)
    a, b = (plan.kind(path).losses for path in tree)
    assert [(one.kind, one.dim, one.axes, one.meant, one.beside) for one in a] == [
        ("indivisible", 0, ("tp",), (), ()),
        ("absent", 1, ("sp",), (), ()),
    ]
    assert [(one.kind, one.dim, one.axes, one.meant, one.beside) for one in b] == [
        ("absent", 0, ("tpp",), ("tp",), ()),
        ("indivisible", 0, ("fsdp",), (), ()),
    ]
    assert all(one.message and one.fix for one in (*a, *b))


def test_the_kinds_of_status():
    exact = sr.Correction(indivisible="error")
    rules = sr.Rules(
        [("^a", P("tp")), ("[b]", P("tp")), ("b|c", P())],
        replace(sr.dialects.KERAS, correction=exact),
    )
    tree = {name: array(6) for name in ("a", "b", "c", "d")}
    plan = sr.plan(tree, rules, MESH)
    assert {path: plan.kind(path).status for path in tree} == {
        "a": "misfit", "b": "ambiguous", "c": "placed", "d": "placed"}  # fmt: skip
    kinds = {path: plan.kind(path) for path in tree}
    assert all((kind.spec is None) == (kind.status != "placed") for kind in kinds.values())
    assert kinds["a"].message == "dim 0 of size 6 is not divisible by tp=4"
    assert kinds["a"].fix.startswith("use fewer axes or pad the array")
    assert sr.plan(tree, [("a", None)], MESH).kind("d").status == "unmatched"


class TestMends:
    """An edit: what is done as it says mends the finding, and harms nothing; or there is none."""

    def test_a_rule(self):
        tree = {"w": LARGE, "x": [array(8, 2)] * 3}
        mend = only(findings(tree, SHARDED), "unmatched").mend
        assert mend == r"(r'x/\d+', P(...))"
        rule = eval(mend, {"P": lambda _: P()})
        assert findings(tree, [*SHARDED, rule]) == ()
        whole = only(findings({"w": LARGE, "x": LARGE}, [*SHARDED, (".*", P())]), "catch-all")
        assert whole.mend == "(r'x', P(...))"

    @pytest.mark.parametrize(
        ("more", "mend"),
        [
            ({"max": [array(8, 2)]}, r"(r'^x/\d+$', P(...))"),
            ({"x/7": array(8, 4)}, "(r'^x/(0|1|2)$', P(...))"),
            ({"max": [array(8, 2)], "x/7": array(8, 4)}, "(r'^x/(0|1|2)$', P(...))"),
        ],
    )
    def test_a_pattern_is_for_these_leaves_alone(self, more, mend):
        tree = {"w": LARGE, **{f"x/{n}": array(8, 2) for n in range(3)}, **more}
        rules = [*SHARDED, ("max", P()), ("x/7", P())]
        unmatched = only(findings(tree, rules), "unmatched")
        assert (unmatched.leaves, unmatched.mend) == (3, mend)

    @pytest.mark.parametrize(
        "dialect", [sr.dialects.KEYSTR, sr.dialects.KERAS, sr.dialects.NNX, sr.dialects.EASYLM]
    )
    def test_a_rule_is_in_the_dialect_of_the_others(self, dialect):
        tree = {"w": LARGE, "x": [{"value": array(8, 2)}] * 3}
        rules = sr.Rules([("w|.*w'.*", P("fsdp", "tp"))], replace(dialect, unmatched="error"))
        mend = only(sr.plan(tree, rules, MESH).check(), "unmatched").mend
        both = sr.Rules([*rules, eval(mend, {"P": lambda _: P()})], rules.dialect)
        assert not of_kind(sr.plan(tree, both, MESH).check(), "unmatched")

    def test_none_beside_a_rule_where_only_one_may_match(self):
        rules = sr.Rules([("w", P("fsdp", "tp")), ("x", P())], sr.dialects.KERAS)
        tree = {"w": LARGE, "x": LARGE}
        assert not only(sr.plan(tree, rules, MESH).check(), "replicated").mend

    @pytest.mark.parametrize("rules", [
        [("zz", P()), ("yy", P()), *SHARDED],
        [("w|v", P("fsdp", "tp")), ("v", P("tp", "fsdp"))],
    ])  # fmt: skip
    def test_none_that_takes_rules_away_or_moves_them(self, rules):
        """Several such edits, one after another, harmed rules that live."""
        assert not any(
            one.mend for one in findings({"w": LARGE, "v": LARGE}, rules) if one.rule is not None
        )

    def test_an_argument(self):
        plan = sr.plan({"w": LARGE}, [("w", ("fsdp", "sp"))], MESH)
        mend = only(plan.check(), "unknown-axis").mend
        assert mend == "optional_axes=['sp']"
        assert of_kind(plan.check(**eval(f"dict({mend})")), "unknown-axis") == []
        plan = sr.plan({"w": array(8, 8)}, [("w", "tp")], {"tp": 4, "dp": 2})
        mend = only(plan.check(), "unused-axis").mend
        assert mend == "data_axes=['dp']"
        assert plan.check(**eval(f"dict({mend})")) == ()

    def test_none_that_would_hide_a_mistake(self):
        misspelt = only(findings({"w": LARGE}, [("w", ("fdsp", "tp"))]), "unknown-axis").mend
        assert misspelt == "('w', P('fsdp', 'tp'))"
        assert findings({"w": LARGE}, [eval(misspelt, {"P": P})]) == ()
        forgotten = findings({"w": [LARGE] * 100}, SHARDED, {"dp": 4, **MESH})
        assert only(forgotten, "unused-axis").level == "warning"
        assert only(forgotten, "unused-axis").mend == r"(r'w/\d+', P(...))"

    @pytest.mark.parametrize(
        ("tree", "rules", "kind", "mend", "spec"),
        [
            ({"w": LARGE, "x": LARGE}, [*SHARDED, ("x", P())], "replicated", "(r'x', P(...))", P("fsdp", "tp")),
            ({"w": LARGE, "x": array(2**13, 2**13)}, [*SHARDED, ("x", P("fsdp"))], "uncut", "(r'x', P(...))", P("fsdp", "tp")),
            ({"w": LARGE, "x": [LARGE, LARGE]}, [*SHARDED, ("x/0", P("fsdp", "tp")), ("x/1", P("tp", "fsdp"))], "siblings", r"(r'x/\d+', P(...))", P("fsdp", "tp")),
        ],
    )  # fmt: skip
    def test_of_each_kind_mends_it(self, tree, rules, kind, mend, spec):
        found = only(findings(tree, rules), kind)
        assert found.mend == mend
        rules = [eval(mend, {"P": lambda _: spec}), *rules]
        assert of_kind(findings(tree, rules), kind) == []


def test_a_spec_longer_than_the_rank_ended_in_an_error_of_zip():
    rules = sr.Rules([("w", P("a", None, None))], correction=sr.Correction(rank="keep"))
    found = sr.plan({"w": array(2, 3)}, rules, {"a": 2, "dp": 2}).check()
    assert "the spec has 3 entries, the array 2 dimensions" in str(found)


def test_a_sharding_that_jax_refuses_was_at_most_a_warning():
    """Nothing corrects specs that go to JAX as they are; `shard` does, and with correction= it is said."""
    tree, specs, mesh = {"k": array(2, 64)}, {"k": P("tp", "fsdp")}, {"fsdp": 2, "tp": 4}
    (found,) = [one for one in sr.plan(tree, specs, mesh).check() if one.level == "error"]
    assert found.kind == "misfit"
    assert (
        "the tree's spec P('tp', 'fsdp'): dim 0 of size 2 is not divisible by tp=4" in found.message
    )
    assert sr.plan(tree, specs, mesh).specs() == {"k": P(None, "fsdp")}
    for plan in (
        sr.plan(tree, specs, mesh, correction=sr.Correction()),
        sr.plan(tree, [("k", ("tp", "fsdp"))], mesh),
    ):
        assert not plan.check().at_least("error")


def test_a_tree_of_specs_was_a_rule_of_two_hundred_characters():
    tree = {f"layer_{i}": array(4096, 4096) for i in range(40)}
    found = sr.plan(tree, dict.fromkeys(tree, P()), {"tp": 2}).check()
    assert found.at_least("warning")
    assert all("^layer" not in one.message for one in found)
    assert "the tree's spec P()" in str(found)


def test_kinds_are_those_that_checks_register():
    """If it fails: `python -m tests.support.check_kinds` writes them."""
    for file, text in check_kinds.written().items():
        assert file.read_text(encoding="utf-8") == text
    assert set(KINDS) == set(get_args(CheckKind))
