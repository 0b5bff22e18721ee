"""Plan.check: what the rows of `test_check_table.py` do not say: several plans, dialects, texts, levels, order.

The findings on real models are compared with tests/data/golden. `UPDATE_GOLDEN=1 python -m pytest
tests/plan/test_check.py` writes them anew; read the difference.
"""

from __future__ import annotations

import os
import re
import time

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.rule_specs import LibraryCorrection
from shardrules._plan.check_context import KINDS
from shardrules._plan.fold import fold
from tests.plan.test_check_table import LARGE, MESH, MIB, SHARDED, WHOLE, array
from tests.support import corpus
from tests.support.folders import DATA
from tests.support.plans import shard_bytes

GOLDEN = DATA / "golden"


def findings(tree, rules, mesh=MESH, **options):
    return sr.plan(tree, rules, mesh).check(**options)


def of_kind(found, kind):
    return [one for one in found if one.kind == kind]


def only(found, kind):
    (one,) = of_kind(found, kind)
    return one


def test_the_error_of_specs_has_what_is_unmatched_and_what_does_not_fit():
    rules = [("w", sr.RuleSpec(("fsdp", "tp"), sr.Correction(indivisible="error")))]
    plan = sr.plan({"w": array(8, 6), "x": array(2)}, rules, MESH)
    with pytest.raises(ValueError, match=r"(?s)error\[misfit\]: rule 0 .*\n    w\n.*\nerror\[unmatched\]: no rule"):
        plan.specs()


class TestDeclared:
    def test_a_declared_pattern_is_no_backtracking_one(self):
        name = "a" * 5_000
        tree = {f"{name}!": LARGE, f"{name}": LARGE}
        begin = time.monotonic()
        rules = [*SHARDED, (".*", ())]
        one = only(findings(tree, rules, replicated=["(a+)+$"]), "catch-all")
        assert time.monotonic() - begin < 10  # `re` takes 2**5000 steps
        assert one.paths == (f"{name}!",)

    PATTERNS = ("x/y", "^x", "y$", r"\['x'\]", "X", re.compile("X", re.I), "(?=x)x/", r"(.)\1", "a|^$", r"\.", "x y")

    @pytest.mark.parametrize(
        "dialect", [sr.dialects.EFORMER, sr.dialects.KEYSTR, sr.dialects.KERAS], ids=lambda d: d.name
    )
    @pytest.mark.parametrize("pattern", PATTERNS, ids=str)
    def test_declared_patterns_are_searched_in_the_paths_of_any_dialect(self, dialect, pattern):
        tree = {"x": {"y": LARGE, "x y": [LARGE] * 2}, "z": {"xx": LARGE, "aa.b": LARGE}}
        plan = sr.plan(tree, sr.Rules([(".*", ())], dialect), MESH)
        found = plan.check(replicated=[pattern])
        told = {path for one in found if one.kind in ("catch-all", "replicated") for path in one.paths}
        left = [path for path in plan.paths if not re.search(pattern, path)]
        assert told == {one.pattern for one in fold(left, np.zeros(len(left), np.int32))}


def test_a_state_inherits_what_a_threshold_exempts():
    params = {f"w{i}": array(1000, 1000, dtype="bfloat16") for i in range(8)} | {"big": LARGE}
    plan = sr.plan(params, [(".*", sr.fsdp("fsdp", min_bytes=3 * MIB))], {"fsdp": 64})
    state = {"mu": jax.tree.map(lambda leaf: array(*leaf.shape), params)}
    assert [one.level for one in plan.for_optimizer(state).check()] == ["info"]


@pytest.mark.parametrize(("size", "policy", "parts"), [(8, "prefix", 8), (4, "drop_axis", 4)])
def test_the_advised_correction_keeps_what_is_said(size, policy, parts):
    rules = sr.Rules([("w", (("fsdp", "tp"),))], correction=sr.Correction(indivisible=policy))
    kind = sr.plan({"w": array(size, 16)}, rules, MESH).explain("w").kind
    assert kind.device_bytes * parts == kind.bytes


@pytest.mark.parametrize(("heads", "unit", "parts"), [(4, 1, 4), (2, 128, 2), (6, 1, 2), (12, 64, 4)])
def test_who_follows_the_advice_shares_heads_on_purpose(heads, unit, parts):
    spec = sr.RuleSpec((None, "tp"), units=(None, unit))
    tree, mesh = {"w": array(64, heads * unit)}, {"kv": parts, "rep": 8 // parts}
    fix = only(findings(tree, [("w", spec)], {"tp": 8}, large=1), "correction").fix
    axes = {"tp": ("kv", "rep")}
    advised = f"put kv={parts}, rep={8 // parts} in the mesh in place of tp=8: rules.with_axes({axes})"
    assert f"{advised} and Correction(indivisible='prefix')" in fix
    correction = sr.Correction(indivisible="prefix")
    rules = sr.Rules(sr.Rules([("w", spec)]).with_axes(axes), correction=correction)
    plan = sr.plan(tree, rules, mesh)
    assert plan.explain("w").kind.spec == (None, "kv")
    if parts == heads:
        plan.check(large=1).raise_for("warning")


def test_an_absent_axis_takes_those_beside_it():
    rules = [("w", (("fsdp", "sp"), "tp")), ("v", ("tp", ("sp", "fsdp"))), ("x", ("tp", "sp"))]
    tree = {"w": LARGE, "v": LARGE, "x": LARGE}
    found = {}
    for absent in ("drop", "drop_axis"):
        given = sr.Rules(rules, correction=LibraryCorrection(absent=absent), optional_axes=["sp"])
        found[absent] = of_kind(sr.plan(tree, given, MESH).check(), "correction")
    # w and v have a 4th of their 16 MiB on a device, and could have a 32nd.
    with_it, without = found["drop"]
    assert (with_it.bytes, with_it.rule, with_it.leaves) == (2 * (4 * MIB - MIB // 2), None, 2)
    assert with_it.message.startswith(
        "rules 0, 1: the mesh has no axis 'sp', so 'fsdp' beside it is dropped too; costs 7"
    )
    assert without.message == "rule 2 'x' -> P('tp', 'sp'): the mesh has no axis 'sp'; costs nothing"
    assert (without.rule, without.bytes, without.level) == (2, 0, "info")
    assert [one.bytes for one in (*found["drop_axis"], *of_kind(findings(tree, rules), "unknown-axis"))] == [0, 0]


class TestUnknownAxis:
    """An axis that the mesh lacks passed as two notes that "cost nothing"."""

    LLAMA = {"fsdp": 64, "tp": 8}

    def test_the_plan_gives_no_specs(self):
        rules = [("w", ("fdsp", "tp"))]
        plan = sr.plan({"w": WHOLE}, rules, self.LLAMA)
        told = r"(?s)rule 0 'w' -> P\('fdsp', 'tp'\): .*mean 'fsdp'.*\n    w\n"
        for refused in (plan.specs, plan.shardings, plan.abstract):
            with pytest.raises(ValueError, match=told):
                refused()
        for right in ([("w", ("fsdp", "tp"))], [("w", sr.RuleSpec("fdsp", optional_axes=["fdsp"]))]):
            sr.plan({"w": WHOLE}, right, self.LLAMA).shardings()
        # As eformer drops the axis.
        dropping = sr.Rules(rules, correction=LibraryCorrection(absent="drop"))
        assert sr.plan({"w": WHOLE}, dropping, self.LLAMA).specs() == {"w": P(None, "tp")}

    def test_bytes_are_counted_without_the_axis_alone(self):
        """What is misspelt would cost that much; the rest of the rule is meant as it stands."""
        rules = [("w", (("fsdp", "spp"), "tpp"))]
        plan = sr.plan({"w": WHOLE}, rules, {"fsdp": 4, "tp": 2})
        assert shard_bytes(plan) == [2 * 16384**2 // 4]
        assert [(one.kind, one.bytes) for one in plan.check()] == [
            ("unknown-axis", 2 * 16384**2 // 8), ("unknown-axis", 0)]  # fmt: skip
        back = sr.Plan.from_lock(plan.lock())
        assert shard_bytes(back) == shard_bytes(plan)
        assert [one.kind for one in back.check().at_least("error")] == ["misfit"]
        state = plan.for_optimizer({"mu": {"w": WHOLE}})
        assert shard_bytes(state) == shard_bytes(plan)
        assert {one.kind for one in state.check().at_least("error")} == {"unknown-axis"}


def test_the_value_of_nnx_itself():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    model = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    found = findings(nnx.state(model), [("query|key|value", ())])
    assert only(found, "nnx-value").leaves == 2


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
ELSEWHERE = {"catch-all", "companion", "unknown-name", "unnamed"}


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
    assert found.summary == f"{order.count(0)} errors, {order.count(1)} warnings, {order.count(2)} info"


def test_a_declared_pattern_that_is_none_is_told():
    with pytest.raises(re.error, match=r"^replicated\[1\]: missing \), unterminated subpattern"):
        everything(replicated=["x", "("])


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
    assert found.to_github().startswith("::error title=shardrules unmatched::no rule matches 8 leaves of 8%0A")


def test_github_annotations_stand_at_the_line_of_the_rule():
    found = findings({"w": LARGE}, [("w", "tp"), ("gone", "tp"), ("v", "tp")])
    lines = found.to_github("r.toml", [3, 7, 11]).split("\n")
    assert [("file=r.toml,line=7," in line, "file=r.toml,line=11," in line) for line in lines] == [
        (one.rule == 1, one.rule == 2) for one in found]  # fmt: skip
    assert "line=" not in found.to_github(None, [3, 7, 11])
    with pytest.raises(ValueError, match="lines: there are 1, and a finding is about rule 1"):
        found.to_github("r.toml", [3])


def test_many_paths_are_cut_short():
    (one, *_) = findings({f"{c}/x": array(8) for c in "abcdefg"}, [])
    lines = str(one).split("\n")
    assert [line.strip() for line in lines[1:-1]] == ["a/x", "b/x", "c/x", "d/x", "e/x", "... and 2 more patterns"]


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
        *(P("auto", **{kind: {axis}}) for kind in ("unreduced", "reduced") for axis in ("explicit", "nope")),
        *(P(None, **{kind: {"auto"}}) for kind in ("unreduced", "reduced")),
    ],
    ids=str,
)
def test_what_jax_refuses_to_place_is_a_misfit(spec):
    types = jax.sharding.AxisType
    if len(spec) == 3 and jax.__version_info__ < (0, 8):
        pytest.skip("JAX 0.7 takes specs that are longer than the rank")
    mesh = jax.sharding.AbstractMesh((2, 2), ("auto", "explicit"), axis_types=(types.Auto, types.Explicit))
    kept = LibraryCorrection(absent="keep", rank="keep", pad=False)
    found = of_kind(sr.plan({"w": array(8, 8)}, sr.Rules([("w", spec)], correction=kept), mesh).check(), "misfit")
    assert bool(found) == refused_by_jax(spec, mesh, 2)
    assert all((one.level, one.rule, one.paths) == ("error", 0, ("w",)) for one in found)
    assert all("cannot be applied to the shape (8, 8): " in one.message and one.fix for one in found)


def test_a_scale_is_not_to_be_padded():
    scale = sr.Companion("_scale$", "", dims=(0,))
    tree = {"w": array(6, 8), "w_scale": array(6)}
    plan = sr.plan(tree, [("w$", P("tp"))], MESH, companions=[scale])
    losses = {path: plan.explain(path).kind.losses for path in tree}
    assert {path: one.fix.partition(", or ")[0] for path, (one,) in losses.items()} == {
        "w": "use fewer axes or pad the array",
        "w_scale": "use fewer axes",
    }


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
    tree, rules = {"a": array(6, 8), "b": array(10, 8)}, [("a", P("tp", "sp")), ("b", P(("tpp", "fsdp"), None))]
    plan = sr.plan(tree, rules, MESH)
    assert {path: [tuple(one)[:5] for one in plan.explain(path).kind.losses] for path in tree} == {
        "a": [("indivisible", 0, ("tp",), (), ()), ("absent", 1, ("sp",), (), ())],
        "b": [("absent", 0, ("tpp",), ("tp",), ()), ("indivisible", 0, ("fsdp",), (), ())],
    }
    # Of 320 bytes tp=4 would leave 80, and fsdp=8 40.
    assert [one.bytes for one in plan.explain("b").kind.losses] == [240, 280]


def test_a_sharding_that_jax_refuses_was_at_most_a_warning():
    """Nothing corrects specs that go to JAX as they are; `shard` does, and with correction= it is said."""
    tree, specs, mesh = {"k": array(2, 64)}, {"k": P("tp", "fsdp")}, {"fsdp": 2, "tp": 4}
    (found,) = [one for one in sr.plan(tree, specs, mesh).check() if one.level == "error"]
    assert found.kind == "misfit"
    assert "the tree's spec P('tp', 'fsdp'): dim 0 of size 2 is not divisible by tp=4" in found.message
    assert sr.plan(tree, specs, mesh).specs() == {"k": P(None, "fsdp")}
    for plan in (sr.plan(tree, specs, mesh, correction=sr.Correction()), sr.plan(tree, [("k", ("tp", "fsdp"))], mesh)):
        assert not plan.check().at_least("error")


def test_a_tree_of_specs_was_a_rule_of_two_hundred_characters():
    tree = {f"layer_{i}": array(4096, 4096) for i in range(40)}
    found = sr.plan(tree, dict.fromkeys(tree, P()), {"tp": 2}).check()
    assert found.at_least("warning")
    assert all("^layer" not in one.message for one in found)
    assert "the tree's spec P()" in str(found)
