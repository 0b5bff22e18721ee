"""Plans of logical rules: where names come from, what leaves get, and each question of a plan."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import meta
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.rule_specs import LibraryCorrection
from shardrules.compat import flax_core_meta, flax_linen_spmd
from tests.plan.test_lock import check_round_trip

RULES = sr.LogicalRules([
    ("batch", "dp"), ("vocab", "tp"), ("embed", "fsdp"), ("mlp", "tp"), ("heads", "tp"), ("heads", "fsdp"), ("kv", None),
])  # fmt: skip
MESH = {"dp": 1, "fsdp": 2, "tp": 4}
ARRAYS = {
    "wte": ((512, 64), ("vocab", "embed")),
    "wi": ((64, 256), ("embed", "mlp")),
    "wq": ((64, 8, 16), ("embed", "heads", "kv")),
    "odd": ((6, 64), ("heads", "kv")),
}
SPECS = {"wte": P("tp", "fsdp"), "wi": P("fsdp", "tp"), "wq": P("fsdp", "tp", None), "odd": P("fsdp", None)}


def array(shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def beside():
    """(tree, names)."""
    return (
        {name: array(shape) for name, (shape, _) in ARRAYS.items()},
        {name: names for name, (_, names) in ARRAYS.items()},
    )


def boxed(box=nn.LogicallyPartitioned):
    return {name: box(array(shape), names) for name, (shape, names) in ARRAYS.items()}


def planned(mesh=MESH, rules=RULES):
    tree, names = beside()
    return sr.plan(tree, rules, mesh, names=names)


class TestWhereNamesComeFrom:
    @pytest.mark.parametrize("box", [nn.LogicallyPartitioned, meta.Partitioned, flax_core_meta.Partitioned])
    def test_boxes_of_flax_and_ours(self, box):
        assert sr.plan(boxed(box), RULES, MESH).specs() == SPECS

    @pytest.mark.parametrize("form", [tuple, list, lambda names: P(*names)])
    def test_a_tree_beside_in_another_order_of_keys(self, form):
        tree, names = beside()
        nested = {"a": {"b": tree["wte"]}, **tree}
        given = {**{key: form(names[key]) for key in reversed(names)}, "a": {"b": names["wte"]}}
        found = sr.plan(nested, RULES, MESH, names=given).specs()
        assert found == {"a": {"b": SPECS["wte"]}, **SPECS}

    def test_variables_of_nnx_hold_what_they_get(self):
        spellings = dict(zip(ARRAYS, ("out_sharding", "sharding", "sharding_names", "out_sharding"), strict=True))
        state = {name: variable(name, **{spellings[name]: ARRAYS[name][1]}) for name in ARRAYS}
        plan = sr.plan(state, RULES, MESH)
        assert sorted(plan.paths) == sorted(ARRAYS)
        specs = plan.specs()
        assert {name: variable.get_value() for name, variable in specs.items()} == SPECS

    def test_rules_of_a_variable_s_own_are_refused(self):
        own = {"out_sharding": ("embed", "mlp"), "sharding_rules": (("embed", "tp"),)}
        with pytest.raises(ValueError, match="sharding_rules of its own.*get_partition_spec"):
            sr.plan({"wi": variable("wi", **own)}, RULES, MESH)

    def test_by_path(self):
        tree, names = beside()
        nested = {"a": {"b": tree["wte"]}, "c": [tree["wi"], tree["wi"]]}
        given = {"a/b": names["wte"], "c/1": names["wi"]}
        plan = sr.plan(nested, RULES, MESH, names=given)
        assert plan.specs() == {"a": {"b": SPECS["wte"]}, "c": [P(), SPECS["wi"]]}

    def test_a_box_of_several_arrays_names_each(self):
        value = {"q": array((64, 256), "int8"), "scale": array((64, 1), "float32")}
        tree = {"w": nn.LogicallyPartitioned(value, ("embed", "mlp"))}
        assert sr.plan(tree, RULES, MESH).specs() == {"w": {"q": P("fsdp", "tp"), "scale": P("fsdp", None)}}


def variable(name, **metadata):
    made = nnx.Param(np.zeros(ARRAYS[name][0], "int8"))
    for key, value in metadata.items():
        made.set_metadata(key, value)
    return made


_, GIVEN = beside()
NO_NAMES = [
    # (names, what it raises, message); the tree is that of `beside`
    (None, TypeError, r"nothing in the tree has logical axis names.*names="),
    ({**GIVEN, "wtee": ("embed",)}, ValueError, r"names: 1 path of no leaf:\n.*near it: wte"),
    ({"b": GIVEN}, ValueError, "names: they do not fit the tree"),
    *(({**GIVEN, "wi": names}, (TypeError, ValueError), "names")
      for names in ("embed", 3, (("a", 3), None), [["embed"], [None]], {"a": 1})),
]  # fmt: skip


class TestWrongInput:
    @pytest.mark.parametrize(("names", "error", "message"), NO_NAMES, ids=range(len(NO_NAMES)))
    def test_what_is_no_names(self, names, error, message):
        with pytest.raises(error, match=message):
            sr.plan(beside()[0], RULES, MESH, names=names)

    def test_a_name_twice_is_a_misfit(self):
        plan = sr.plan({"w": array((8, 8))}, RULES, MESH, names={"w": ("embed", "embed")})
        (found,) = plan.check().at_least("error")
        assert found.kind == "misfit"
        assert "'embed' more than once" in found.message
        with pytest.raises(ValueError, match="'embed' more than once"):
            plan.specs()
        twice = sr.LogicalRules([("embed", "tp")], sr.dialects.FLAX_CORE)
        with pytest.raises(ValueError, match="used twice"):
            sr.plan({"w": array((8, 8))}, twice, MESH, names={"w": ("embed", "embed")}).specs()

    def test_names_without_logical_rules_are_refused(self):
        tree, names = beside()
        for call in (sr.plan, sr.named_shardings):
            with pytest.raises(TypeError, match="names: they are for LogicalRules"):
                call(tree, [(".*", None)], MESH, names=names)


def random_case(rng):
    axes = ["dp", "fsdp", "tp", "sp"]
    mesh = {axis: rng.choice([1, 2, 3, 4]) for axis in axes[: rng.choice([3, 4])]}
    names = ["a", "b", "c", "d", "e"]
    rules = [
        (rng.choice(names), rng.choice([None, rng.choice(axes), tuple(rng.sample(axes, 2))]))
        for _ in range(rng.randrange(1, 9))
    ]
    tree, given = {}, {}
    for number in range(6):
        rank = rng.randrange(4)
        tree[f"w{number}"] = array(tuple(rng.choice([1, 2, 6, 8, 12]) for _ in range(rank)))
        given[f"w{number}"] = tuple(rng.sample([*names, None], rank))
    return tree, rules, mesh, given


@pytest.mark.parametrize("dialect", [sr.dialects.LINEN, sr.dialects.MAXTEXT], ids=lambda one: one.name)
@pytest.mark.parametrize("indivisible", ["drop", "drop_axis", "prefix", "keep"])
def test_the_plan_of_names_gives_named_shardings(dialect, indivisible):
    rng = random.Random(indivisible + dialect.name)
    for _ in range(60):
        tree, rules, mesh, names = random_case(rng)
        absent = rng.choice(["drop", "drop_axis"])
        policy = LibraryCorrection(indivisible=indivisible, absent=absent)
        logical = sr.LogicalRules(rules, dialect, correction=policy)
        plan = sr.plan(tree, logical, mesh, names=names)
        shardings = plan.shardings()
        assert shardings == sr.named_shardings(tree, logical, mesh, names=names)


class TestQuestions:
    def test_the_table_has_names_and_rules(self):
        text = repr(planned())
        assert "vocab: 1, embed: 2" in text
        assert "P('tp', 'fsdp')" in text
        assert "embed: 2" in planned()._repr_html_()
        assert "vocab: 1, embed: 2" in planned().to_html()

    def test_an_explanation_has_each_rule_of_each_name(self):
        text = str(planned().explain("odd"))
        assert "dim 0 'heads': rule 4 -> 'tp' loses: its mesh axes do not divide the dimension" in text
        assert "dim 0 'heads': rule 5 -> 'fsdp' wins" in text
        assert "dim 1 'kv': rule 6 -> None wins" in text
        tried = planned().explain("wq").tried
        assert [(one.rule, one.dim, one.outcome, one.to) for one in tried] == [
            (2, 0, "wins", None), (4, 1, "wins", None), (5, 1, "dim taken", 4), (6, 2, "wins", None),
        ]  # fmt: skip
        absent = str(planned({"tp": 4}, sr.LogicalRules(RULES, optional_axes=["fsdp"])).explain("wi"))
        assert "dim 0 'embed': rule 2 -> 'fsdp' loses: the mesh lacks its mesh axes" in absent
        unknown = sr.plan({"w": array((8,))}, RULES, MESH, names={"w": ("embd",)})
        assert "dim 0 'embd': no rule is for it" in str(unknown.explain("w"))

    def test_a_leaf_without_names_has_no_rule_that_could_match(self):
        tree = {"w": array((8,)), "b": array((8,)), "step": 3}
        plan = sr.plan(tree, RULES, MESH, names={"w": ("embed",)})
        assert "it has no logical axis names, so no rule is for it" in str(plan.explain("b"))
        assert str(plan.explain("step")).startswith("step  not an array\n")
        state = plan.for_optimizer({"mu": {"w": array((8,))}, "count": array(())})
        assert "  derived        the parameter's, same shape\n" in str(state.explain("mu/w"))
        assert "rule" not in str(state.explain("count"))

    def test_coverage_counts_leaves_by_name(self):
        coverage = planned().coverage
        assert coverage.matched == (0, 1, 3, 1, 2, 2, 2)
        assert coverage.won == (0, 1, 3, 1, 1, 1, 2)
        assert coverage.dead == (0,)

    def test_a_sweep_and_another_mesh_are_new_plans(self):
        plan = planned()
        for row in plan.sweep():
            assert row.bytes == planned(row.mesh).bytes_per_device().max
            assert plan.on_mesh(row.mesh).fingerprint() == planned(row.mesh).fingerprint()

    @pytest.mark.parametrize(
        "dialect", [sr.dialects.LINEN, sr.dialects.MAXTEXT, sr.dialects.FLAX_CORE], ids=lambda one: one.name
    )
    def test_a_lock_holds_names_and_rules(self, dialect):
        once = [rule for rule in RULES if rule != ("heads", "fsdp")]
        rules = sr.LogicalRules([*once, (("a", "b"), ("tp", "fsdp"))], dialect)
        tree = {**beside()[0], "two": array((8, 8)), "count": array(())}
        names = {**beside()[1], "two": (("fsdp", "tp"), None)}
        plan = sr.plan(tree, rules, MESH, names=names)
        again = check_round_trip(plan)
        assert again.rules == plan.rules
        assert again.specs() == {**plan.specs()}
        assert sorted(repr(again).splitlines()) == sorted(repr(plan).splitlines())
        assert again.coverage.won == plan.coverage.won
        assert "the rules say" not in str(again.explain("wq"))
        assert "heads" in str(again.explain("wq"))

    def test_a_diff_tells_rules_apart(self):
        before = planned()
        other = sr.LogicalRules([(n, a) for n, a in RULES if n != "mlp"])
        found = before.diff(planned(rules=other))
        assert found.rules == ("- 'mlp' -> 'tp'",)
        assert [change.path for change in found] == ["wi"]
        assert not before.diff(planned())
        tree, _ = beside()
        assert before.diff(sr.plan(tree, [(".*", None)], MESH)).rules == ("paths or logical axis names decide",)
        others = before.diff(planned(rules=sr.LogicalRules(RULES, sr.dialects.MAXTEXT)))
        assert others.rules[0] == f"- name = {before.rules.dialect.name!r}"

    def test_an_optimizers_state_is_cut_as_its_parameters(self):
        import optax

        for tree, names in ((boxed(), None), beside()):
            plan = sr.plan(tree, RULES, MESH, names=names)
            state = plan.for_optimizer(jax.eval_shape(optax.adam(1e-3).init, tree))
            adam = state.specs()[0]
            assert adam.mu == adam.nu == SPECS
            assert adam.count == P()
            assert "unnamed" not in {one.kind for one in state.check()}


BIG, SMALL = (8192, 8192), (8, 8)
TWO_RULES = [("embed", "fdsp"), ("embed", "fsdp"), ("mlp", "tp")]
CHECKED = {
    # what: ({path: (shape, names)}, rules, [(kind, level, part of the message), ...] but for `dead`)
    "all in order": ({"w": (BIG, ("embed", "mlp"))}, RULES, []),
    "a misspelt name": ({"w": (BIG, ("embd", "mlp"))}, RULES, [
        ("unknown-name", "error", "no rule is for the name 'embd' of 1 leaf; did you mean 'embed'")]),
    "beside the right one": ({"w": (SMALL, ("embed", "mlp")), "v": (SMALL, ("embd", "mlp"))}, RULES, [
        ("unknown-name", "warning", "did you mean 'embed'?")]),
    "one that costs nothing": ({"w": (BIG, ("layers", "mlp"))}, RULES, [("unknown-name", "info", "'layers'")]),
    "much is replicated": ({"w": (BIG, ("layers", None))}, RULES, [
        ("unknown-name", "error", "1 leaf replicated: 134 MB"), ("replicated", "warning", "the names ('layers', None)")]),
    "large leaves without names": ({"w": (BIG, None), "v": (SMALL, ("embed", "mlp"))}, RULES, [
        ("unnamed", "error", "1 leaf of 2 without")]),
    "small ones": ({"w": ((8,), None), "b": ((), None), "v": (SMALL, ("embed", "mlp"))}, RULES, [
        ("unnamed", "info", "1 leaf of 3 without")]),
    "fewer names": ({"w": ((32, 64, 256), ("embed", "mlp"))}, RULES, [
        ("unnamed", "warning", "fewer names than dimensions, such as ('embed', 'mlp') for the shape (32, 64, 256)")]),
    "more names": ({"w": ((4096 * 4096,), ("embed", "mlp"))}, RULES, [("correction", "info", "the spec has 2 entries")]),
    "an absent axis, though another rule wins": ({"w": (BIG, ("embed", "mlp"))}, sr.LogicalRules(TWO_RULES), [
        ("unknown-axis", "error", "rule 0 'embed' -> 'fdsp'")]),
    "declared": ({"w": (BIG, ("embed", "mlp"))}, sr.LogicalRules(TWO_RULES, optional_axes=["fdsp"]), [("correction", "info", "'fdsp'")]),
    "what does not divide": ({"w": ((6, 2**24), ("heads", "kv"))}, RULES, [
        ("correction", "warning", "rule 4 'heads' -> 'tp': dim 0 of size 6 is not divisible")]),
    "replicated": ({"w": (BIG, ("kv", None))}, RULES, [("replicated", "warning", "the names ('kv', None)")]),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKED)
def test_findings(case):
    leaves, rules, expected = CHECKED[case]
    tree = {path: array(shape) for path, (shape, _) in leaves.items()}
    plan = sr.plan(tree, rules, MESH, names={path: names for path, (_, names) in leaves.items() if names})
    found = [one for one in plan.check() if one.kind != "unused-axis"]
    assert [(one.kind, one.level) for one in found] == [row[:2] for row in expected]
    assert all(part in one.message for one, (*_, part) in zip(found, expected, strict=True))
    declared = plan.check(replicated=list(tree), levels={"unknown-axis": "off"})
    assert bool(declared.at_least("error")) == (case == "a misspelt name")


def test_names_for_fewer_than_all_dimensions_are_told():
    """Flax's own example names the kernels of attention ('embed', 'kv'), and heads nowhere."""
    tree = {"q": array((1024, 16, 64)), "mlp": array((1024, 4096))}
    names = {"q": ("embed", "kv"), "mlp": ("embed", "mlp")}
    (fewer,) = sr.plan(tree, RULES, MESH, names=names).check()
    assert (fewer.kind, fewer.level, fewer.paths) == ("unnamed", "warning", ("q",))


def test_findings_about_names_have_no_rule_to_stand_at():
    (found,) = (one for one in sr.plan({"w": array(BIG)}, RULES, MESH, names={"w": ("kv", None)}).check() if one.paths)
    assert found.rule is None
    assert sr.types.Findings([found]).to_github("r.toml", [1]).startswith("::warning file=r.toml,title=shardrules repl")


NAMED = {
    "flax": lambda x, names: meta.Partitioned(x, names),
    "ours": lambda x, names: flax_linen_spmd.LogicallyPartitioned(x, names),
    "nnx": lambda x, names: nnx.Param(x, out_sharding=names, eager_sharding=False),
}


NAMED_PAIRS = [("batch", "fsdp"), ("heads", "tp"), ("embed", "fsdp")]


@pytest.mark.parametrize("box", NAMED)
def test_a_plan_of_boxes_takes_no_names_for_patterns(box):
    leaf = array((8, 8))
    tree = {"embed": {"kernel": NAMED[box](leaf, ("embed", "heads"))}, "b": leaf}
    with pytest.raises(TypeError, match=r"for the logical axis names.*LogicalRules.*unbox"):
        sr.plan(tree, NAMED_PAIRS, MESH)


@pytest.mark.parametrize(
    "rules", [[("kernel", "tp"), ("embed", None)], [*NAMED_PAIRS, (".*", None)], [("kernel", "tp")]]
)
def test_a_plan_of_boxes_takes_patterns(rules):
    tree = {"kernel": meta.Partitioned(array((8, 8)), ("embed", "mlp"))}
    assert len(sr.plan(tree, rules, MESH).paths) == 1
