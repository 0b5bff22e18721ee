"""Plans of specs that are made from shapes; tests/test_shape_specs.py has the specs themselves."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.trees import array

MIB = 2**20


def cuts(spec):
    """The entries without trailing None."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def test_a_plan_says_how_a_spec_came_about():
    tree = {"w": array(2048, 2048), "odd": array(2049, 2049), "norm": array(2048)}
    plan = sr.plan(tree, [("", sr.fsdp("fsdp"))], {"fsdp": 8})
    assert [tuple(plan.kind(p).wanted) for p in tree] == [(None, "fsdp"), (None, "fsdp"), ()]
    for path, text in {
        "w": "dim 1 is the largest that fsdp=8 divides",
        "odd": "dim 1 is the largest; fsdp=8 divides none",
        "norm": "leaves it alone: its 8.19 kB are less than min_bytes",
    }.items():
        assert text in str(plan.explain(path))


def test_a_large_leaf_that_no_dimension_divides_is_found():
    plan = sr.plan({"odd": array(4099, 4099)}, [(".*", sr.fsdp("fsdp"))], {"fsdp": 8})
    found = {finding.kind: finding for finding in plan.check(large=MIB)}
    warned = {kind for kind, one in found.items() if one.level == "warning"}
    assert warned == {"correction", "replicated"}
    assert "is not divisible by fsdp=8" in found["correction"].message
    assert found["correction"].bytes > 50 * MIB


def test_each_mesh_of_a_sweep_has_its_own_dimensions():
    tree = {"w": array(9 * 64, 4096)}
    plan = sr.plan(tree, [(".*", sr.fsdp("fsdp"))], {"fsdp": 8})
    assert cuts(plan.on_mesh({"fsdp": 9}).specs()["w"]) == ("fsdp",)
    rows = plan.sweep([{"fsdp": 8}, {"fsdp": 9}, {"fsdp": 11}])
    assert [(row.mesh["fsdp"], row.corrections) for row in rows] == [(9, 0), (8, 0), (11, 1)]


def is_spec(node):
    return isinstance(node, P)


def test_what_follows_a_base_is_cut_by_its_own_shape():
    tree = {"layers": {"w": array(8192, 64, 256)}, "k": {"kernel": array(64, 256), "kernel_scale": array(256)}}
    rules = [(r"layers/\d+/w|kernel", sr.fsdp("fsdp", min_bytes=4096, within=("tp",)))]
    companions = [sr.stacked("layers"), *sr.QUANTIZED]
    plan = sr.plan(tree, rules, {"fsdp": 8, "tp": 4}, companions=companions)
    found = jax.tree.map(cuts, plan.specs(), is_leaf=is_spec)
    placed = sr.named_shardings(tree, plan)
    assert jax.tree.map(lambda one: cuts(one.spec), placed) == found
    # The stack is no dimension of the layer; the scale is too small, and has no dim 0 of the kernel.
    assert found["layers"]["w"] == (None, "tp", "fsdp")
    assert found["k"] == {"kernel": ("tp", "fsdp"), "kernel_scale": ()}
    assert "the rule of what it follows, dims (-, 0, 1)" in str(plan.explain("layers/w"))
