"""Sweeps: each row is what a plan made for that mesh has; the factorizations are all there are."""

from __future__ import annotations

import itertools
from math import prod

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from examples import demo
from tests.support import corpus
from tests.support.trees import array


@pytest.mark.parametrize(
    ("count", "axes", "message"),
    [
        (8, ("a", "a"), "the axes of a mesh are names, each once"),
        (10**18, ("a", "b"), "a mesh of 1000000000000000000 devices; it can have at most 16,777,216"),
        (2**20, [f"x{i}" for i in range(12)], "at most 10,000 meshes"),
    ],
)
def test_factorizations_that_there_are_not(count, axes, message):
    plan = sr.plan({"w": array(8)}, [("w", "a")], {"a": 2})
    with pytest.raises(ValueError, match=message):
        plan.sweep(devices=count, axes=axes)
    with pytest.raises(ValueError, match="at most 10,000 meshes"):
        plan.sweep({"a": 2} for _ in itertools.count())


RULES = [("wq|kernel", (("fsdp", "sp"), "tp")), ("embed", ("tp", "fsdp")), (".*", None)]


@pytest.mark.parametrize("model", ["easydel-mixtral-8x22b", "easylm-llama-3.1-405b-trainstate", "flax-gpt2"])
def test_rows_are_those_of_fresh_plans(model):
    tree = corpus.manifest(model).nested(corpus.with_dtype)
    plan = sr.plan(tree, RULES, {"fsdp": 4, "tp": 2, "sp": 2})
    rows = plan.sweep(gradients="float32", hbm=100 * 10**9)
    sizes = itertools.product(range(1, 17), repeat=3)
    assert sorted(tuple(row.mesh.values()) for row in rows) == [each for each in sizes if prod(each) == 16]
    assert all(tuple(row.mesh) == ("fsdp", "tp", "sp") for row in rows)
    best, *others = rows
    margin = max(100 * 10**9, best.bytes) / 20
    assert all(best.bytes <= row.bytes + margin or row.fits < best.fits for row in others)
    for row in rows:
        fresh = sr.plan(tree, RULES, row.mesh)
        kinds = [fresh.kinds[kind] for kind in fresh.kind_of]
        assert row.devices == 16
        assert row.bytes == fresh.bytes_per_device(gradients="float32").max
        assert row.fits == (row.bytes <= 100 * 10**9)
        assert row.corrections == sum(bool(kind.losses) for kind in kinds)
        assert row.problems == 0


def test_meshes_of_ones_own():
    plan = sr.plan({"w": array(8, 8), "n": array(4)}, [("w", "tp"), ("n", ())], {"tp": 2})
    meshes = [{"tp": 8}, {"x": 3}, {"dp": 2, "tp": 4}, {"tp": 1}]
    rows = plan.sweep(meshes)
    ones = dict.fromkeys(("tp", "dp", "x"), 1)
    assert [row.mesh for row in rows] == [ones | mesh for mesh in ({"tp": 8}, {"dp": 2, "tp": 4}, {}, {"x": 3})]
    assert [row.bytes for row in rows] == [32 + 16, 64 + 16, 256 + 16, 256 + 16]
    assert [row.replicated for row in rows] == [16, 16, 272, 272]
    assert [row.corrections for row in rows] == [0, 0, 0, 0]
    assert [plan.on_mesh(row.mesh).bytes_per_device().max for row in rows] == [row.bytes for row in rows]
    (row,) = plan.sweep([{"tp": 8}], gradients=True, optimizer=("float32", "float32"))
    assert (row.replicated, row.bytes) == (4 * 16, 4 * (32 + 16))
    assert all(row.fits is None for row in rows)
    assert len(str(rows).splitlines()) == 5
    assert str(rows).splitlines()[1].startswith("tp=8,")
    assert plan.sweep([]) == ()


EASYDEL = "easydel__deepseek_v3-DeepseekV3Config-v0.2.0"
ADAM = {"gradients": "bfloat16", "optimizer": ("float32", "float32")}


@pytest.mark.parametrize(
    ("model", "rules", "axes", "best"),
    [
        # fsdp=512 leaves a vocabulary of 129,280 whole: 11 GB more on each device.
        (corpus.DEEPSEEK, [*demo.EXPERTS, *corpus.rules(EASYDEL)], ("fsdp", "tp"), (256, 2)),
        ("easydel-deepseek-v3", corpus.rules(EASYDEL), ("dp", "fsdp", "tp"), (1, 256, 2)),
        ("easylm-llama-3.1-405b", corpus.rules("EasyLM__llama"), ("dp", "fsdp", "mp"), (1, 512, 1)),
        ("flax-gpt-j-6b", corpus.rules("EasyLM-yizhongw__gptj"), ("dp", "fsdp", "mp"), (1, 512, 1)),
    ],
)
def test_what_differs_little_in_bytes_is_chosen_by_tensor_parallelism(model, rules, axes, best):
    """512 devices, nothing known but bytes. All of these rules cut by fsdp and a tensor axis alike.

    Tensor parallelism costs an all-reduce of activations in each layer, so it is the last resort
    of those who train: Llama 3.1 405B had 8 in a node of 8 (Llama team, 2024, table 4),
    DeepSeek-V3 none (DeepSeek-AI, 2024, section 3.2). Its 0.03 % fewer bytes are no reason.
    """
    mesh = dict.fromkeys((*axes, "sp", "ep"), 1)
    plan = sr.plan(corpus.manifest(model).nested(corpus.abstract), rules, mesh)
    rows = plan.sweep(devices=512, axes=axes, **ADAM)
    assert tuple(rows[0].mesh.values()) == (*best, 1, 1)
    least = min(row.bytes for row in rows)
    assert rows[0].bytes <= 1.05 * least


def test_a_small_part_of_the_memory_is_no_reason_for_tensor_parallelism():
    """GPT-2 takes 1.5 GB with all of Adam's state: on devices of 96 GB it is trained data-parallel."""
    tree = corpus.manifest("flax-gpt2").nested(corpus.abstract)
    rules = corpus.rules("easydel__gpt2-GPT2Config-v0.2.0")
    plan = sr.plan(tree, rules, {"dp": 8, "tp": 1})
    assert plan.sweep(**ADAM)[0].mesh == {"dp": 1, "tp": 8}
    assert plan.sweep(**ADAM, hbm=96 * 10**9)[0].mesh == {"dp": 8, "tp": 1}
    # Where it matters, bytes decide.
    assert plan.sweep(**ADAM, hbm=2 * 10**9)[0].mesh == {"dp": 1, "tp": 8}


def test_of_equal_bytes_and_tensor_parallelism_fewer_corrections_win():
    tree = {"w": array(80, 80), "n": array(3), "m": array(4)}
    plan = sr.plan(tree, [("w", "tp"), ("n|m", "dp")], {"tp": 2, "dp": 1})
    rows = plan.sweep([{"tp": 2, "dp": 2}, {"tp": 2, "dp": 1}])
    assert [(row.mesh["dp"], row.corrections) for row in rows] == [(1, 0), (2, 1)]
    assert rows[0].bytes > rows[1].bytes


def test_meshes_that_do_not_fit_or_leave_leaves_without_a_spec_come_last():
    rules = [("w", sr.RuleSpec(("tp",), sr.Correction(indivisible="error"))), ("v", ("dp",))]
    plan = sr.plan({"w": array(6), "v": array(64)}, rules, {"tp": 2})
    rows = plan.sweep([{"tp": 4, "dp": 64}, {"tp": 2}, {"tp": 2, "dp": 2}], hbm=140)
    assert [(row.problems, row.fits) for row in rows] == [(0, True), (0, False), (1, True)]


def test_other_devices_and_axes():
    plan = sr.plan({"w": array(8)}, [("w", "tp")], {"dp": 2, "tp": 2})
    assert {tuple(row.mesh.items()) for row in plan.sweep()} == {
        (("dp", a), ("tp", b)) for a, b in [(1, 4), (2, 2), (4, 1)]}  # fmt: skip
    assert {tuple(row.mesh.items()) for row in plan.sweep(devices=3, axes=["tp", "x"])} == {
        (("tp", 1), ("x", 3), ("dp", 1)), (("tp", 3), ("x", 1), ("dp", 1))}  # fmt: skip


def test_the_plan_of_a_state_is_put_on_each_mesh():
    tree = {"w": array(8, 8)}
    plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
    moved = plan.for_optimizer({"mu": tree}, memory_kind="pinned_host")
    rows = plan.sweep([{"tp": 2}, {"tp": 8}], optimizer=moved)
    assert [(row.bytes, row.host_bytes) for row in rows] == [(32, 32), (128, 128)]
    same = plan.sweep([{"tp": 2}], optimizer=plan.for_optimizer({"mu": tree}))
    assert same == plan.sweep([{"tp": 2}], optimizer=["float32"])


def test_axes_are_proposed_that_few_heads_share():
    """Of fsdp and tp alone no mesh cuts 8 heads over 16 devices."""
    heads = {"wk": jax.ShapeDtypeStruct((4096, 8, 128), "bfloat16")}
    rules = sr.Rules([("wk", P("fsdp", "tp"))], correction=sr.Correction(indivisible="prefix"))
    rows = sr.plan(heads, rules, {"fsdp": 2, "tp": 16}).sweep([{"fsdp": 2, "tp": 16}, {"fsdp": 1, "tp": 32}])
    (note,) = rows.notes
    assert note.startswith("few heads on tp=16: put kv=8, rep=2 in the mesh in place of tp=16: ")
    assert note in str(rows[:1])
    shared = sr.plan(heads, rules.with_axes({"tp": ("kv", "rep")}), {"fsdp": 2, "kv": 8, "rep": 2})
    assert shared.sweep([{"fsdp": 2, "kv": 8, "rep": 2}, {"fsdp": 4, "kv": 8, "rep": 1}]).notes == []
