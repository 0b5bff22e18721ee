"""Lockfiles: what is read is what was written; whatever else is read is a FileError."""

from __future__ import annotations

import itertools
import json
import re
import time
import tracemalloc
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.rule_specs import LibraryCorrection, rule_spec
from shardrules._base.specs import entries_of
from tests.support import corpus
from tests.support.slow import MODELS
from tests.support.trees import array

MESH = {"dp": 2, "fsdp": 4, "tp": 2}


def plain(spec):
    """Entries in the form that newer versions of JAX give them."""
    axes = [(entry,) if isinstance(entry, str) else entry for entry in entries_of(spec)]
    return [(one or None) if isinstance(one, tuple) else one for one in axes]


def check_round_trip(plan):
    text = plan.lock()
    back = sr.Plan.from_lock(text)
    assert back.lock() == text
    assert back.fingerprint() == plan.fingerprint()
    assert list(back.axis_sizes.items()) == list(plan.axis_sizes.items())
    assert back.rules.dialect == plan.rules.dialect
    rows = dict(zip(back.paths, back.kind_of.tolist(), strict=True))
    assert rows.keys() == set(plan.paths)
    for path, kind in zip(plan.paths, plan.kind_of.tolist(), strict=True):
        a, b = plan.kinds[kind], back.kinds[rows[path]]
        assert (a.shape, str(a.dtype), a.rule) == (b.shape, str(b.dtype), b.rule)
        assert (a.status, a.message) == (b.status, b.message)
        assert (a.spec is None) == (b.spec is None)
        if a.spec is not None:
            assert plain(a.spec) == plain(b.spec)
    assert back.bytes_per_device()[:4] == plan.bytes_per_device()[:4]
    assert not plan.diff(back)
    return back


@pytest.mark.parametrize("model", MODELS)
def test_real_models(model):
    tree = corpus.manifest(model).flat(corpus.with_dtype)
    rules = corpus.rules("easydel__deepseek_v3-DeepseekV3Config-v0.2.0")
    plan = sr.plan(tree, rules, MESH)
    back = check_round_trip(plan)
    assert len(plan.lock().splitlines()) <= len(plan.rules) + 10 + min(len(plan), 70)
    if not any(kind.status != "placed" for kind in plan.kinds):
        assert back.specs() == plan.specs()


TREE = {
    "layers": [{"wq": array(16, 8), "wk": array(16, 2, dtype="bfloat16"), "b": array(7)} for _ in range(3)],
    "step": array(dtype="int32"),
    "name": "no array",
}


@pytest.mark.parametrize("dialect", ["EFORMER", "EASYLM", "SPECTRAX", "KERAS", "KEYSTR", "NNX"])
def test_dialects(dialect):
    rules = [(".*wq.*", P(("fsdp", "dp"), "tp")), (".*q", "dp"), ("layers/0/b", None), (".*wk.*", "tp"), (".*b.*", ())]
    plan = sr.plan(TREE, sr.Rules(rules, getattr(sr.dialects, dialect)), MESH)
    back = check_round_trip(plan)
    assert [pattern for pattern, _ in back.rules] == [pattern for pattern, _ in plan.rules]
    assert back.coverage == plan.coverage


def test_corrections_units_and_flags():
    rules = [
        ("wq", sr.RuleSpec((None, "tp"), sr.Correction(indivisible="prefix", pad=False), units=(None, 4))),
        (
            re.compile("WK", re.I | re.X),
            sr.RuleSpec(("fsdp", ("tp", "zz")), LibraryCorrection(absent="drop_axis"), optional_axes=["zz"]),
        ),
        (re.compile("(?s)b.?", re.A), P(None)),
        (re.compile("never", re.M), "tp"),
    ]
    dialect = replace(sr.dialects.EASYLM, name="mine", separator=":")
    plan = sr.plan(TREE, sr.Rules(rules, dialect), MESH)
    back = check_round_trip(plan)
    for (a, wanted), (b, found) in zip(plan.rules, back.rules, strict=True):
        assert re.compile(a).flags == re.compile(b).flags
        wanted, found = rule_spec(wanted), rule_spec(found)
        assert tuple(wanted.spec) == tuple(found.spec)
        assert replace(wanted, spec=None) == replace(found, spec=None)


def test_specs_that_are_made_from_shapes():
    rules = [
        ("wq", sr.fsdp(("dp", "fsdp"), min_bytes=0, min_rank=2, within=P(None, None, "tp"))),
        (".*", sr.RuleSpec(sr.fsdp("fsdp"), units=(2,))),
    ]
    plan = sr.plan(TREE, rules, MESH)
    back = check_round_trip(plan)
    assert back.rules[0][1] == rules[0][1]
    assert back.rules[1][1] == rules[1][1]
    stricter = [rules[0], (".*", sr.RuleSpec(sr.fsdp("fsdp", min_rank=3), units=(2,)))]
    assert sr.plan(TREE, stricter, MESH).diff(back).rules == (
        "- '.*' -> fsdp('fsdp', min_bytes=4194304, min_rank=3), units=(2,)",
        "+ '.*' -> fsdp('fsdp', min_bytes=4194304), units=(2,)",
    )


def test_problems_are_locked_too():
    rules = sr.Rules([("layers", P("tp", "tp"))], replace(sr.dialects.EASYLM, scalars="none"))
    plan = sr.plan(TREE, rules, MESH)
    back = check_round_trip(plan)
    told = {(one.kind, one.leaves, one.paths) for one in plan.check() if one.level == "error"}
    assert {kind for kind, _, _ in told} == {"unmatched", "misfit"}
    assert {(one.kind, one.leaves, one.paths) for one in back.check() if one.level == "error"} == told


TAGS = [{"unreduced": {"tp"}}, {"reduced": {"tp"}}, {"unreduced": {"tp"}, "reduced": {"sp"}}]


@pytest.mark.parametrize("tags", TAGS, ids=str)
def test_unreduced_and_reduced_axes(tags):
    tree, mesh = {"w": array(4, 4), "v": array(4)}, MESH | {"sp": 1}
    plan, without = (
        sr.plan(tree, [("w", P("dp", None, **given)), ("v", P(None, **given))], mesh) for given in (tags, {})
    )
    assert without.fingerprint() != plan.fingerprint()
    assert f"{next(iter(tags))}=['tp']" in str(without.diff(plan))
    with pytest.raises(ValueError, match=r"a file cannot hold P\('dp', None, .*=\['tp'\]"):
        plan.lock()


def test_the_kind_of_reduction_that_is_left():
    kinds = getattr(jax.sharding, "UnreducedKind", None)
    if kinds is None:
        pytest.skip("this JAX has no kinds of reductions")
    summed, largest = (P("dp", unreduced={"tp"}, unreduced_kind=kinds[n]) for n in ("sum", "max"))
    plan = sr.plan({"w": array(4, 4)}, [("w", largest)], MESH)
    other = sr.plan({"w": array(4, 4)}, [("w", summed)], MESH)
    assert other.fingerprint() != plan.fingerprint()


HOSTILE = ["{", "}", "{{0}}", "{0..9}", "a{1}b", '"', "'", "\\", "\\0", "\0", "\n", "\r\n", "\t(4,)\tfloat32\tP()\n",
           "é", "\ud800", "\U0001f600", "٣", "007", "9" * 30, "-1", "", " ", "%2C", "</script>"]  # fmt: skip


@example(dict.fromkeys(HOSTILE, 4))
@given(st.dictionaries(st.lists(st.sampled_from([*HOSTILE, "0", "1", "2", "w"]), max_size=4).map("".join),
                       st.integers(1, 3), max_size=12))  # fmt: skip
def test_any_names(sizes):
    check_round_trip(sr.plan({name: array(size) for name, size in sizes.items()}, [("[0w]", "tp")], {"tp": 2}))


@pytest.mark.parametrize(
    ("path", "pattern", "axis"), [("a\ud83d\ude00", "", "tp"), ("a", "\ud83d\ude00", "tp"), ("a", "", "\ud83d\ude00")]
)
def test_adjacent_lone_surrogates_are_refused(path, pattern, axis):
    """JSON's reader makes one character of them: the lock would not come back."""
    plan = sr.plan({path: array(8)}, [(pattern, axis), (".*", ())], {axis: 2})
    with pytest.raises(ValueError, match="a lock cannot hold adjacent lone surrogates"):
        plan.lock()


def test_files(tmp_path):
    plan = sr.plan(TREE, [("", "tp")], MESH)
    text = plan.lock(tmp_path / "plan.lock")
    assert (tmp_path / "plan.lock").read_text("utf-8") == text
    for given_as in (tmp_path / "plan.lock", str(tmp_path / "plan.lock"), text, "\n " + text):
        assert sr.Plan.from_lock(given_as).fingerprint() == plan.fingerprint()


@pytest.mark.parametrize("name", ["missing.lock", "", "\0", "x" * 5000, "\ud800", "[]", "null", "a directory"])
def test_files_that_cannot_be_read(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a directory").mkdir()
    with pytest.raises(sr.FileError, match="neither a lock nor a file with one") as caught:
        sr.Plan.from_lock(name)
    assert len(str(caught.value)) < 20_000
    (tmp_path / "latin1").write_bytes(b"{\xff}")
    with pytest.raises(sr.FileError, match="latin1: byte 1: this is not UTF-8"):
        sr.Plan.from_lock(tmp_path / "latin1")


def test_a_locked_plan_is_for_its_mesh_alone():
    back = sr.Plan.from_lock(sr.plan(TREE, [("", "tp")], MESH).lock())
    assert back.on_mesh(MESH).fingerprint() == back.fingerprint()
    for other in ({"tp": 2}, dict(reversed(MESH.items()))):
        with pytest.raises(ValueError, match="a locked plan is for the mesh"):
            back.on_mesh(other)


PAIR, PAIR_RULES = {"wq": array(8, 8), "b": array(8)}, [("wq", ("fsdp", "tp")), ("", "tp")]


def plan_of(tree=PAIR, rules=PAIR_RULES, mesh=MESH):
    return sr.plan(tree, rules, mesh)


def test_a_fingerprint_changes_with_what_counts_alone():
    others = [
        plan_of({"wq": array(8, 8), "c": array(8)}), plan_of({"wq": array(8, 8)}),
        plan_of({**PAIR, "wq": array(8, 4)}), plan_of({**PAIR, "b": array(8, dtype="int32")}), plan_of({**PAIR, "b": 3}),
        plan_of(rules=[("wq", "tp"), ("", "tp")]), plan_of(mesh={**MESH, "fsdp": 2}), plan_of(mesh={**MESH, "x": 1}),
        plan_of(mesh=dict(reversed(MESH.items()))),
        # A name cannot pass for another leaf.
        plan_of({"a": array(4), "b": array(4)}, [("", ())]), plan_of({"a\t(4,)\tfloat32\tP()\nb": array(4)}, [("", ())]),
        plan_of({"'a'\t(4,)\tfloat32\tP()\n'b'": array(4)}, [("", ())]),
    ]  # fmt: skip
    assert len({each.fingerprint() for each in (plan_of(), *others)}) == len(others) + 1
    same = [
        plan_of(dict(reversed(PAIR.items()))), plan_of({"wq": np.ones((8, 8), "float32"), "b": np.zeros(8, "float32")}),
        plan_of(rules=[("never", None), *PAIR_RULES]), plan_of(rules=[("wq", P("fsdp", "tp")), ("", P("tp"))]),
    ]  # fmt: skip
    assert {each.fingerprint() for each in same} == {plan_of().fingerprint()}


class TestDiff:
    def test_nothing(self):
        diff = plan_of().diff(plan_of(dict(reversed(PAIR.items()))))
        assert not diff
        assert str(diff) == "no differences"
        assert (len(diff), diff.mesh, diff.bytes) == (0, (MESH, MESH), (32 + 16, 32 + 16))
        assert not plan_of({}).diff(plan_of({}))

    def test_added_removed_and_changed(self):
        layers = {f"layers/{i}/wq": array(8, 8) for i in range(4)}
        before = plan_of({**layers, "gone": array(4), "same": array(2)})
        new = {**layers, "same": array(2), "new/0": array(6), "new/1": array(6)}
        after = plan_of(new, [("wq", ("fsdp",)), *PAIR_RULES])
        diff = before.diff(after)
        found = {(c.path, c.leaves, c.before is None, c.after is None) for c in diff}
        assert found == {("layers/{0..3}/wq", 4, False, False), ("gone", 1, False, True), ("new/{0,1}", 2, True, False)}
        # Each wq has 8*8*4/8 = 32 bytes on a device before, and twice as many after.
        assert diff.bytes == (4 * 32 + 8 + 4, 4 * 64 + 4 + 2 * 12)
        assert sorted(str(diff).splitlines()) == [
            "+ 'wq' -> P('fsdp')",
            "+ new/{0,1}  (6,)  float32  P('tp')",
            "- gone  (4,)  float32  P('tp')",
            "7 leaves changed; 140 B -> 284 B on the fullest device",
            "rules:",
            "~ layers/{0..3}/wq  P('fsdp', 'tp') -> P('fsdp', None)  (+128 B on each device)",
        ]
        back = {(c.path, c.leaves, c.before is None, c.after is None) for c in after.diff(before)}
        assert back == {(path, leaves, new, gone) for path, leaves, gone, new in found}

    WQ = "'wq' -> P('fsdp', 'tp')"
    OTHER_RULES = (
        ([PAIR_RULES[0], ("b", "tp")], ["- '' -> P('tp')", "+ 'b' -> P('tp')"]),
        ([PAIR_RULES[0], (re.compile("", re.I), "tp")], ["- '' -> P('tp')", "+ '(?i)' -> P('tp')"]),
        ([PAIR_RULES[0], ("never", "dp"), ("", "tp")], ["+ 'never' -> P('dp')"]),
        ([("x", None), *PAIR_RULES, ("y", None)], ["+ 'x' -> P()", "+ 'y' -> P()"]),
        ([("wq", sr.RuleSpec(("fsdp", "tp"), units=(2, None))), ("", "tp")], [f"- {WQ}", f"+ {WQ}, units=(2, None)"]),
        ([("wq", sr.RuleSpec(("fsdp", "tp"), optional_axes=["tp"])), ("", "tp")], [f"- {WQ}", f"+ {WQ}, optional_axes=('tp',)"]),
        ([(f"x{i}", None) for i in range(2000)] + PAIR_RULES, [*(f"+ 'x{i}' -> P()" for i in range(40)), "... and 1,960 more lines"]),
        (sr.Rules(PAIR_RULES, replace(sr.dialects.EFORMER, name="mine")), ["- name = 'eformer'", "+ name = 'mine'"]),
    )  # fmt: skip

    @pytest.mark.parametrize(("rules", "told"), OTHER_RULES, ids=range(8))
    def test_the_rules_alone(self, rules, told):
        """Other rules that give all leaves the same were no difference."""
        before, after = plan_of(), plan_of(rules=rules)
        last = "0 leaves changed; 48 B -> 48 B on the fullest device"
        for diff in (before.diff(after), sr.Plan.from_lock(before.lock()).diff(after)):
            assert diff
            assert str(diff) == "\n".join(["rules:", *told, last])

    def test_a_spec_with_none_at_its_end_was_another_spec(self):
        """`shardrules diff` exited with 1 where nothing differed."""
        forms = [P("fsdp"), P(("fsdp",), None), "fsdp", ("fsdp",), (("fsdp",),), ("fsdp", ())]
        for pad, spec in itertools.product([True, False], forms):
            given = [sr.Rules([("wq", each)], correction=sr.Correction(pad=pad)) for each in (P("fsdp", None), spec)]
            one, other = (plan_of({"wq": array(8, 8)}, rules) for rules in given)
            assert not one.diff(other)
            assert one.fingerprint() == other.fingerprint()
            assert len(check_round_trip(other).kinds[0].spec) == len(other.kinds[0].spec)

    def test_a_change_says_whether_anything_moves(self):
        tree, mesh = {"w": array(8, 8)}, {"fsdp": 4, "sp": 1}
        before, same, other = (sr.plan(tree, [("w", spec)], mesh) for spec in ("fsdp", ("fsdp", "sp"), (None, "fsdp")))
        (change,) = before.diff(same)
        assert change.moves is False
        assert "(+0 B on each device; nothing moves)" in str(change)
        assert not before.transfer(same)
        assert [row.moves for row in before.diff(other)] == [True]
        there = sr.plan(tree, [("w", ("fsdp", "sp"))], {"fsdp": 2, "sp": 1})
        assert [row.moves for row in before.diff(there)] == [True]
        assert [row.moves for row in before.diff(sr.plan({}, [], mesh))] == [None]

    @pytest.mark.parametrize(
        ("other", "rules", "told"),
        [
            (array(4, 8), PAIR_RULES, "(8, 8) -> (4, 8)  (-16 B on each device)"),
            (array(8, 8, dtype="bfloat16"), PAIR_RULES, "float32 -> bfloat16  (-16 B on each device)"),
            (array(8, 7), PAIR_RULES, "(8, 8) -> (8, 7)  P('fsdp', 'tp') -> P('fsdp', None)  (+24 B on each device)"),
            (array(8, 8), [], "P('fsdp', 'tp') -> unmatched  (+224 B on each device)"),
        ],
    )  # fmt: skip
    def test_what_differs_of_a_leaf(self, other, rules, told):
        (change,) = plan_of({"wq": array(8, 8)}).diff(plan_of({"wq": other}, rules))
        assert str(change) == f"~ wq  {told}"

    def test_the_mesh_alone(self):
        diff = plan_of().diff(plan_of(mesh={"dp": 1, "fsdp": 8, "tp": 1}))
        assert (bool(diff), len(diff), diff.columns) == (True, 0, {})
        assert "dp=2,fsdp=4,tp=2 -> dp=1,fsdp=8,tp=1" in str(diff).splitlines()[0]
        assert plan_of().diff(plan_of(mesh=dict(reversed(MESH.items()))))


LOCK = sr.plan(TREE, [
    ("wq", sr.RuleSpec(("fsdp", "tp"), sr.Correction(), (None, 2))), (re.compile("b", re.I), "tp"), (".*", (("fsdp", "dp"), None)),
], MESH).lock()  # fmt: skip


def at(content, place):
    for key in place:
        content = content[key]
    return content


def edited(*keys_and_value):
    """The lock with a value at keys; ... removes what is there."""
    content, (*keys, last, value) = json.loads(LOCK), keys_and_value
    if value is ...:
        del at(content, keys)[last]
    else:
        at(content, keys)[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    "text",
    [
        edited("rules", 0, "pattern", "wk"),
        edited("leaves", 1, "rule", 0),
        edited("leaves", 1, "path", "other"),
        edited("leaves", 1, "problem", "unmatched"),
        edited("dialect", "correction", "rank", "keep"),
        edited("mesh", "tp", 4),
        edited("min_size", 8),
        edited("digest", None),
        edited("rules", [*json.loads(LOCK)["rules"], ["x", []]]),
        edited("mesh", {"fsdp": 4, "tp": 2, "dp": 2}),
    ],
)
def test_what_was_changed_by_hand(text):
    assert sr.Plan.from_lock(json.dumps(json.loads(LOCK))).lock() == LOCK  # in one line, as tools write it
    with pytest.raises(sr.FileError, match="its digest is that of another lock: it was changed"):
        sr.Plan.from_lock(text)


BOMBS = ["{0..99999999999}", "{0..9999999}", "{0..9}" * 30, "{0..999999}" + "x" * 100_000, "{0..99999," * 1 + "0..99999," * 999 + "1}",
         "{0..99999999999999999999999999}", "{" + "9" * 5000 + "}", "{" * 99_999, "{1}" * 50_000 + "{"]  # fmt: skip


@pytest.mark.parametrize("pattern", BOMBS, ids=range(len(BOMBS)))
def test_patterns_that_stand_for_too_much(pattern):
    text = edited("leaves", 0, "path", pattern)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(sr.FileError) as caught:
            sr.Plan.from_lock(text)
        assert tracemalloc.get_traced_memory()[1] < 100e6
        assert time.process_time() - start < 5
    finally:
        tracemalloc.stop()
    assert "leaves[0]" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("most", "pattern"), [("{0..9}" + "x" * 10**6, "{0..9}" + "x" * 10**7), ("{0..899999}", "{0..999999}")]
)
def test_paths_that_are_too_long_together(most, pattern):
    """A million of them may be read, or a few of megabytes: their text is what fills memory."""
    with pytest.raises(sr.FileError, match="more leaves than a lock may have"):
        sr.Plan.from_lock(edited("leaves", 0, "path", pattern))
    alone = json.loads(LOCK)["leaves"][:1]
    many = [{**alone[0], "path": f"a{letter}/{{0..399999}}"} for letter in "xyz"]
    with pytest.raises(sr.FileError, match=r"leaves\[2\]: .* more leaves than a lock may have"):
        sr.Plan.from_lock(edited("leaves", many))
    with pytest.raises(sr.FileError, match="its digest is that of another lock"):
        sr.Plan.from_lock(edited("leaves", [{**alone[0], "path": most}]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (edited("format", "shardrules lock 2"), "its format is '.*2' .*, and this reads 'shardrules lock 3'"),
        (edited("messh", {}), "key 'messh' is unknown; did you mean 'mesh'"),
        (edited("digest", ...), "digest is missing"),
        (edited("format", ...), "its format is None"),
        (edited("mesh", ...), "mesh is missing"),
        (edited("mesh", "tp", 0), "the size of the mesh axis 'tp' is 0"),
        (edited("mesh", {}), "a mesh without axes"),
        (edited("mesh", "tp", 10**12), "a mesh of 8000000000000 devices"),
        (edited("mesh", {f"a{i}": 1 for i in range(200)}), "a mesh of 200 axes"),
        (edited("mesh", [["tp", 2]]), "mesh is .*; write a table of axes"),
        (edited("rules", {}), "rules is {} .*; write a list"),
        (edited("min_size", -8), "min_size is -8 .*; write a number of elements"),
        (edited("dialect", None), "dialect: it is None"),
        (edited("dialect", "keys", "other"), "keys is 'other'"),
        (edited("dialect", "separator", 5), "separator is 5"),
        (edited("dialect", "more", 5), "dialect: key 'more' is unknown"),
        (edited("dialect", "name", []), "name is "),
        (edited("dialect", "match", []), "match is empty"),
        (edited("leaves", {}), "leaves is {} .*; write a list"),
        (edited("leaves", 1, 5), r"leaves\[1\]: it is 5 .*; write a table"),
        (edited("leaves", 1, "rule", 3), r"leaves\[1\]: there is no rule 3"),
        (edited("leaves", 1, "rule", -1), r"leaves\[1\]: there is no rule -1"),
        (edited("leaves", 1, "rule", True), r"leaves\[1\]: rule is True .*; write the number of a rule"),
        (
            edited("leaves", 1, {**json.loads(LOCK)["leaves"][1], "names": ["embed", None], "rules": [0]}),
            r"leaves\[1\]: there is not one rule, or null, for each name",
        ),
        (edited("leaves", 1, "shape", "44"), "shape is '44' .*; write a list of sizes"),
        (edited("leaves", 1, "shape", [4, -4]), "is negative"),
        (edited("leaves", 1, "shape", [2**62, 2**62]), "more bytes than can be counted"),
        (edited("leaves", 1, "dtype", "float7"), "float7"),
        (edited("leaves", 1, "dtype", {"a": 1}), "dtype is .*; write a text"),
        (edited("leaves", 1, "shape", None), "a leaf that is no array has the dtype 'bfloat16'"),
        (edited("leaves", 1, "spec", None), "a leaf has a spec, or a problem"),
        (edited("leaves", 1, "spec", {"entries": ["dp"]}), "spec: key 'entries' is unknown"),
        (edited("leaves", 1, "spec", [3]), r"leaves\[1\]: entry 0 of spec is 3"),
        (edited("leaves", 1, "spec", ["tp", "tp"]), r"leaves\[1\]: .* names an axis twice"),
        (edited("leaves", 1, "path", 3), "path is 3 .*; write a text"),
        (edited("leaves", 1, "path", "{3..1}"), "no numbers are 3..1"),
        (edited("leaves", 1, "path", "{1..2..3}"), "leaves"),
        *(
            (edited("leaves", 1, "path", path), "braces make no sense from character")
            for path in ("{1..2", "{", "}", "a{b}", "1}", "{}", "{,1}", "}{", "{{}", "{-1}", "{１}")
        ),
        (edited("leaves", 1, "memory_kind", "pinned_hsot"), "leaves.*memory_kind is 'pinned_hsot'.*'pinned_host'"),
        (edited("rules", 0, "memory_kind", "pinned_hsot"), "rule.*memory_kind is 'pinned_hsot'.*'pinned_host'"),
        (edited("leaves", 1, "color", "red"), r"leaves\[1\]: key 'color' is unknown"),
        (edited("leaves", 1, "path", "layers/{0,1}/b"), "two of its patterns stand for the same path"),
    ],
    ids=lambda value: value[:50] if value[0] != "{" else "",
)
def test_what_is_no_lock(text, message):
    with pytest.raises(sr.FileError, match=message) as caught:
        sr.Plan.from_lock(text)
    assert str(caught.value).startswith("the lock: ")
    first, *_ = str(caught.value).splitlines()
    assert first.endswith("; make the lock again with Plan.lock or shardrules plan --lock")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"format": 1}',
        "{" + '"a":{' * 100_000,
        '{"a": ' + "[" * 100_000,
        '{"a": ' + "1" * 5000 + "}",
        edited("mesh", "tp", float("nan")),
        edited("leaves", 1, "shape", [4, float("inf")]),
        LOCK.replace('"mesh": {', '"mesh": [], "mesh": {', 1),  # Python's reader takes the last, a reviewer the first
        *(LOCK[:end] for end in range(1, len(LOCK) - 2, 47)),
    ],
)
def test_what_is_no_json(text):
    with pytest.raises(sr.FileError, match="^the lock: "):
        sr.Plan.from_lock(text)
