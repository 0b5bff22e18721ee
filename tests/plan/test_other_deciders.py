"""Plans whose leaves specs, shapes, shardings or another plan decide, and other functions that take a plan."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import corpus
from tests.support.plans import cuts, shard_bytes
from tests.support.trees import array

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
SIZES = {"fsdp": 2, "tp": 2}


def layers(count=3, dtype="float32", width=8):
    one = {"wq": array(width, 8, dtype=dtype), "norm": array(8, dtype=dtype)}
    return {"layers": [one] * count, "head": array(8, 4, dtype=dtype)}


RULES = [("wq", ("fsdp", "tp")), ("head", (None, "tp")), ("norm", ())]


class TestSpecs:
    def test_a_plan_of_a_plan_s_specs_is_the_same_plan(self):
        tree = corpus.manifest("easydel-deepseek-v3").nested(corpus.with_dtype)
        mesh = {"dp": 1, "fsdp": 4, "ep": 2, "tp": 4, "sp": 1}
        own = sr.plan(tree, [*corpus.rules("easydel__deepseek_v3-DeepseekV3Config-v0.2.0"), (".*", P())], mesh)
        found = sr.plan(tree, own.specs(), mesh)
        assert found.specs() == own.specs()
        assert shard_bytes(found) == shard_bytes(own)
        assert {kind.status for kind in found.kinds} == {"placed"}
        assert not found.coverage.dead
        assert not found.coverage.shadowed

    def test_each_leaf_has_the_spec_that_it_has_in_the_tree(self):
        tree = layers()
        specs = jax.tree.map(lambda leaf: P(), tree)
        specs["layers"][1]["wq"] = P("tp")
        specs["layers"][2]["wq"] = P(None, "fsdp")
        plan = sr.plan(tree, specs, SIZES)
        assert [tuple(plan.explain(f"layers/{i}/wq").kind.wanted) for i in range(3)] == [
            (), ("tp",), (None, "fsdp")]  # fmt: skip
        assert plan.specs() == jax.tree.map(lambda one: one.spec, sr.named_shardings(tree, specs, SIZES))

    def test_what_is_wrong_with_specs_is_found(self):
        specs = {"layers": P("tp", "tp"), "head": P("data")}
        good = {"layers": P("tp"), "head": P("tp")}
        for given, kinds in ((specs, {"misfit", "unknown-axis"}), (good, set())):
            found = sr.plan(layers(), given, SIZES).check()
            assert kinds == {one.kind for one in found if one.level == "error"}
        assert sum(shard_bytes(sr.plan(layers(), good, SIZES))) < 3 * 8 * 8 * 4

    def test_none_decides_nothing(self):
        specs = {"layers": P("tp"), "head": None}
        (found,) = sr.plan(layers(), specs, SIZES).check().at_least("error")
        assert (found.kind, found.paths) == ("unmatched", ("head",))
        with pytest.raises(TypeError, match="rules: no leaf has a spec"):
            sr.plan(layers(), None, SIZES)

    def test_rules_for_a_tree_of_another_structure_are_refused(self):
        with pytest.raises(ValueError, match=r"rules: the tree of specs does not fit.*'head'"):
            sr.plan(layers(), {"layers": P()}, SIZES)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        with pytest.raises(TypeError, match="for the leaf head the spec is .*SingleDeviceSharding"):
            sr.plan(layers(), {"layers": P(), "head": here}, SIZES)

    def test_the_mesh_and_the_memory_of_shardings_are_the_plan_s(self):
        tree = {"w": array(8, 8)}
        given = {"w": NamedSharding(MESH, P("fsdp", "tp"), memory_kind="pinned_host")}
        assert sr.plan(tree, given).mesh == MESH
        assert sr.plan(tree, given).shardings() == given
        assert shard_bytes(sr.plan(tree, given, {"fsdp": 8, "tp": 1})) == [32]
        other = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("tp",)), P())
        with pytest.raises(ValueError, match="mesh"):
            sr.plan(tree | {"v": array(8)}, given | {"v": other})

    def test_numbers_in_a_pattern_are_those_of_the_leaves(self):
        tree = {f"block{i}": array(8) for i in (*range(12), 20, 201)}
        specs = {path: P("tp" if path in ("block1", "block20") else "fsdp") for path in tree}
        rules = sr.plan(tree, specs, SIZES).rules
        assert len(rules) == 2
        assert sr.plan(tree, rules, SIZES).specs() == specs
        assert rules.first_match("block21") is None
        assert rules.first_match("x/block2") is None


class TestPlans:
    def test_other_dtypes_and_parts_of_the_tree_are_decided_as_well(self):
        plan = sr.plan(layers(), RULES, SIZES)
        half = sr.plan(layers(dtype="bfloat16"), plan)
        assert half.specs() == plan.specs()
        assert [2 * n for n in shard_bytes(half)] == shard_bytes(plan)
        part = {"layers": layers()["layers"][:1]}
        assert sr.plan(part, plan).paths == ["layers/0/wq", "layers/0/norm"]
        assert sr.named_shardings(part, plan)["layers"][0] == plan.shardings()["layers"][0]

    def test_on_another_mesh_it_decides_anew(self):
        plan = sr.plan(layers(), RULES, SIZES)
        wide = {"fsdp": 1, "tp": 8}
        assert sr.plan(layers(), plan, wide).fingerprint() == plan.on_mesh(wide).fingerprint()
        found = sr.plan(layers(), plan)
        assert found.on_mesh(wide).fingerprint() == plan.on_mesh(wide).fingerprint()
        shardings = sr.named_shardings(layers(), plan, wide)
        assert shardings == plan.on_mesh(wide).shardings()

    def test_a_leaf_that_the_plan_has_not_is_named_with_those_near_it(self):
        plan = sr.plan(layers(), RULES, SIZES)
        other = {"layers": [{"wk": array(8, 8)}] * 2, "head": array(8, 4)}
        for call in (sr.named_shardings, sr.plan):
            with pytest.raises(ValueError, match="2 leaves of the tree") as caught:
                call(other, plan)
            for part in ("layers/{0..1}/wk", "near it: layers/{0..2}/wq", "plan.for_optimizer(state)"):
                assert part.replace("{0..1}", "{0,1}") in str(caught.value)

    def test_a_leaf_of_another_shape_is_named(self):
        plan = sr.plan(layers(), RULES, SIZES)
        with pytest.raises(ValueError, match=r"layers/0/wq has the shape \(16, 8\), and is planned as \(8, 8\)"):
            sr.shard(layers(width=16), plan)

    def test_states_and_names_are_decided_by_their_plans(self):
        plan = sr.plan(layers(), RULES, SIZES)
        state = {"mu": layers(), "count": array()}
        of_state = plan.for_optimizer(state)
        assert sr.named_shardings(state, of_state) == of_state.shardings()
        assert sr.plan(state, of_state).specs() == of_state.specs()
        names = {"w": ("embed", None)}
        named = sr.plan({"w": array(8, 8)}, sr.LogicalRules([("embed", "tp")]), SIZES, names=names)
        again = sr.plan({"w": array(8, 8)}, named)
        assert again.specs() == named.specs()
        assert again.explain("w").kind.names == ("embed", None)


def test_companions_are_for_rules_of_paths_alone():
    tree, names = {"w": array(8)}, {"w": ("embed",)}
    for rules, more in (
        (P(), {}),
        (sr.plan(tree, [("w", "tp")], SIZES), {}),
        (sr.LogicalRules([("embed", "tp")]), {"names": names}),
    ):
        with pytest.raises(ValueError, match="companions are for rules of paths alone"):
            sr.plan(tree, rules, SIZES, companions=sr.LORA, **more)


def test_a_plan_says_how_a_spec_came_about():
    tree = {"w": array(2048, 2048), "odd": array(2049, 2049), "norm": array(2048)}
    plan = sr.plan(tree, [("", sr.fsdp("fsdp"))], {"fsdp": 8})
    assert [tuple(plan.explain(p).kind.wanted) for p in tree] == [(None, "fsdp"), (None, "fsdp"), ()]
    for path, text in {
        "w": "dim 1 is the largest that fsdp=8 divides",
        "odd": "dim 1 is the largest; fsdp=8 divides none",
        "norm": "leaves it alone: its 8.19 kB are less than min_bytes",
    }.items():
        assert text in str(plan.explain(path))


def test_a_large_leaf_that_no_dimension_divides_is_found():
    plan = sr.plan({"odd": array(4099, 4099)}, [(".*", sr.fsdp("fsdp"))], {"fsdp": 8})
    found = {finding.kind: finding for finding in plan.check(large=2**20)}
    warned = {kind for kind, one in found.items() if one.level == "warning"}
    assert warned == {"correction", "replicated"}
    assert "is not divisible by fsdp=8" in found["correction"].message
    assert found["correction"].bytes > 50 * 2**20


def test_each_mesh_of_a_sweep_has_its_own_dimensions():
    tree = {"w": array(9 * 64, 4096)}
    plan = sr.plan(tree, [(".*", sr.fsdp("fsdp"))], {"fsdp": 8})
    assert cuts(plan.on_mesh({"fsdp": 9}).specs()["w"]) == ("fsdp",)
    rows = plan.sweep([{"fsdp": 8}, {"fsdp": 9}, {"fsdp": 11}])
    assert [(row.mesh["fsdp"], row.corrections) for row in rows] == [(9, 0), (8, 0), (11, 1)]


def test_what_follows_a_base_is_cut_by_its_own_shape():
    tree = {"layers": {"w": array(8192, 64, 256)}, "k": {"kernel": array(64, 256), "kernel_scale": array(256)}}
    rules = [(r"layers/\d+/w|kernel", sr.fsdp("fsdp", min_bytes=4096, within=("tp",)))]
    companions = [sr.stacked("layers"), *sr.QUANTIZED]
    plan = sr.plan(tree, rules, {"fsdp": 8, "tp": 4}, companions=companions)
    found = jax.tree.map(cuts, plan.specs(), is_leaf=lambda node: isinstance(node, P))
    placed = sr.named_shardings(tree, plan)
    assert jax.tree.map(lambda one: cuts(one.spec), placed) == found
    # The stack is no dimension of the layer; the scale is too small, and has no dim 0 of the kernel.
    assert found["layers"]["w"] == (None, "tp", "fsdp")
    assert found["k"] == {"kernel": ("tp", "fsdp"), "kernel_scale": ()}
    assert "the rule of what it follows, dims (-, 0, 1)" in str(plan.explain("layers/w"))
