"""`compat.tp_plan` against what transformers' own style classes do, recorded in tests/data."""

from __future__ import annotations

import gzip
import json

import jax
import pytest
from jax.sharding import PartitionSpec as P

from shardrules.compat import tp_plan
from tests.support.folders import DATA

RECORDED = json.loads(gzip.decompress((DATA / "tp_plans.json.gz").read_bytes()))
EP_PLANS = [name for name in RECORDED["plans"] if name.endswith("-ep")]


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def cut_by(spec, axis):
    """The dimension that the axis cuts, or None."""
    return tuple(spec).index(axis) if axis in tuple(spec) else None


@pytest.mark.parametrize("name", RECORDED["plans"])
def test_every_plan_cuts_what_transformers_cuts(name):
    plan = RECORDED["plans"][name]
    tree = {leaf: array(*(4,) * rank) for leaf, (rank, _) in plan["cuts"].items()}
    specs = tp_plan.match_tp_plan(plan["styles"], tree, axis="x")
    cuts = {leaf: [array.ndim, cut_by(specs[leaf], "x")] for leaf, array in tree.items()}
    assert cuts == plan["cuts"]


@pytest.mark.parametrize("name", EP_PLANS)
def test_expert_parallel_plans_do_not_replicate_the_experts(name):
    styles = RECORDED["plans"][name]["styles"]
    experts = [key for key, style in styles.items() if style == "grouped_gemm"]
    assert experts
    tree = {key.replace("*", "3"): array(8, 16, 32) for key in experts}
    specs = tp_plan.match_tp_plan({}, tree, ep_plan=styles)
    assert set(specs.values()) == {P("ep", None, None)}


@pytest.mark.parametrize("style", RECORDED["styles"])
def test_every_style_of_transformers_is_known(style):
    for parameter, cuts in RECORDED["styles"][style].items():
        for rank, cut in enumerate(cuts, start=1):
            if cut == "error":  # torch refuses to place it
                continue
            name = f"block.{parameter}"
            specs = tp_plan.match_tp_plan({"block": style}, {name: array(*(4,) * rank)})
            assert cut_by(specs[name], "tp") == cut, (parameter, rank)


def test_styles_of_older_versions_are_known():
    older = ["local_colwise", "local_rowwise", "local_packed_rowwise", "local", "gather"]
    older += ["ep_router", "megamoe_experts", "colwise_rep", "rowwise_rep"]
    specs = [
        tp_plan.match_tp_plan({"block": style}, {"block.weight": array(4, 4)}) for style in older
    ]
    cuts = [cut_by(spec["block.weight"], "tp") for spec in specs]
    assert cuts == [0, 1, 1, None, None, None, None, 0, 1]


def test_an_unknown_style_is_an_error():
    with pytest.raises(ValueError, match="'colwize' for 'layers.*.q_proj'") as error:
        tp_plan.match_tp_plan({"layers.*.q_proj": "colwize"}, {"layers.0.q_proj": array(4, 4)})
    assert "did you mean 'colwise'?" in str(error.value)
    assert "grouped_gemm" in str(error.value)
    with pytest.raises(ValueError, match="the style None for 'experts'"):
        tp_plan.match_tp_plan({}, {}, ep_plan={"experts": None})


def test_experts_of_an_expert_plan_have_nothing_of_the_other_plan():
    dense = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts_norm": "colwise",
    }
    experts = {
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts": "ep_dispatch_experts",
    }
    tree = {
        "model.layers.0.self_attn.q_proj.weight": array(8, 8),
        "model.layers.0.mlp.experts.gate_up_proj": array(8, 8, 8),
        "model.layers.0.mlp.experts.down_proj": array(8, 8, 8),
        "model.layers.0.mlp.experts_norm.weight": array(8),
    }
    specs = tp_plan.match_tp_plan(dense, tree, "model", ep_plan=experts, ep_axis=("dp", "tp"))
    assert [specs[name] for name in tree] == [
        P("tp", None), P(("dp", "tp"), None, None), P(), P("tp"),
    ]  # fmt: skip
