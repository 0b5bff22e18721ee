"""What a training step sends: by hand, by brute force, and against the optimized HLO of real steps."""

from __future__ import annotations

import jax
import pytest

import shardrules as sr
from shardrules._planning.asking.collectives.schedule import Schedule
from shardrules._planning.asking.traffic import traffic
from shardrules._planning.data_axes import data_axes_among
from shardrules._planning.kinds import axes_named
from tests.support import step_traffic
from tests.support.step_traffic import CASES, COUNTED, compared


def sent(tree, rules, mesh, **more):
    """{(of, collective, axes): (count, payload)} of a step."""
    leaves = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    columns = sr.plan(leaves, rules, mesh)._columns
    schedule = Schedule(**{"tokens": 64, "batch_axes": data_axes_among(mesh), **more})
    rows = traffic(columns, schedule)
    return {(row.of, row.collective, row.axes): (row.count, row.payload) for row in rows}


NEWEST = (0, 10)
KERNEL = {"layers": [{"kernel": (512, 512)} for _ in range(4)]}
MIB = 2**20


def test_fsdp_gathers_twice_and_scatters_gradients():
    assert sent(KERNEL, [("kernel", "fsdp")], {"fsdp": 8}) == {
        ("params", "all-gather", ("fsdp",)): (8, 8 * MIB),
        ("gradients", "reduce-scatter", ("fsdp",)): (4, 4 * MIB),
    }


def test_the_cpu_backend_gathers_once_and_reduces_whole_gradients():
    assert sent(KERNEL, [("kernel", "fsdp")], {"fsdp": 8}, gathers=1, reduce="all-reduce") == {
        ("params", "all-gather", ("fsdp",)): (4, 4 * MIB),
        ("gradients", "all-reduce", ("fsdp",)): (4, 4 * MIB),
    }


def test_data_parallel_devices_reduce_what_fsdp_leaves_them():
    assert sent(KERNEL, [("kernel", "fsdp")], {"data": 2, "fsdp": 4}, gathers=1) == {
        ("params", "all-gather", ("fsdp",)): (4, 4 * MIB),
        ("gradients", "reduce-scatter", ("fsdp",)): (4, 4 * MIB),
        ("gradients", "all-reduce", ("data",)): (4, 1 * MIB),
    }


def test_what_tensor_axes_cut_is_gathered_without_them():
    rows = sent(KERNEL, [("kernel", ("fsdp", "tp"))], {"fsdp": 4, "tp": 2}, gathers=1)
    assert {key: row for key, row in rows.items() if key[0] in ("params", "gradients")} == {
        ("params", "all-gather", ("fsdp",)): (4, 2 * MIB),
        ("gradients", "reduce-scatter", ("fsdp",)): (4, 2 * MIB),
    }


def test_micro_batches_gather_and_reduce_each():
    once = sent(KERNEL, [("kernel", "fsdp")], {"data": 2, "fsdp": 4})
    four = sent(KERNEL, [("kernel", "fsdp")], {"data": 2, "fsdp": 4}, accumulate=4)
    assert four == {key: (4 * count, 4 * payload) for key, (count, payload) in once.items()}


def test_zero1_scatters_gradients_and_gathers_what_is_new():
    mesh = {"data": 8}
    assert sent(KERNEL, [("kernel", ())], mesh, zero1="data", gradients="bfloat16") == {
        ("params", "all-gather", ("data",)): (4, 4 * MIB),
        ("gradients", "reduce-scatter", ("data",)): (4, 2 * MIB),
    }


@pytest.mark.parametrize("shape", [(512, 512), (6,), (8,), (3, 5), (2, 12), (24, 1)])
@pytest.mark.parametrize("spec", [(), ("fsdp",), (None, "tp")])
def test_zero1_cuts_what_the_optimizer_plan_cuts(shape, spec):
    mesh = {"data": 4, "fsdp": 2, "tp": 1}
    params = {"kernel": jax.ShapeDtypeStruct(shape, "float32")}
    plan = sr.plan(params, [("kernel", spec[: len(shape)])], mesh)
    state = plan.for_optimizer({"mu": params}, zero1="data")
    is_cut = "data" in axes_named(state.specs()["mu"]["kernel"])
    rows = traffic(plan._columns, Schedule(tokens=64, batch_axes=("data", "fsdp"), zero1="data"))
    gathered = [row for row in rows if row.of == "params" and row.axes == ("data",)]
    assert bool(gathered) == is_cut


def test_a_shard_that_does_not_divide_is_rounded_up():
    rules = [("kernel", sr.RuleSpec(("fsdp",), correction=sr.Correction(indivisible="keep")))]
    rows = sent({"kernel": (10, 3)}, rules, {"fsdp": 4}, gathers=1)
    assert rows["params", "all-gather", ("fsdp",)] == (1, 4 * 3 * 3 * 4)


def test_integers_have_no_gradients():
    tree = {"step": jax.ShapeDtypeStruct((8,), "int32")}
    columns = sr.plan(tree, [("step", "fsdp")], {"fsdp": 8})._columns
    (row,) = traffic(columns, Schedule(tokens=64, batch_axes=("fsdp",), gathers=1))
    assert row.of == "params"


def test_the_optimizers_leaves_are_not_sent():
    state = {"opt_state": {"mu": KERNEL["layers"][0]}, "params": KERNEL["layers"][0]}
    assert sent(state, [("kernel", "fsdp")], {"fsdp": 8}, gathers=1) == sent(
        {"params": KERNEL["layers"][0]}, [("kernel", "fsdp")], {"fsdp": 8}, gathers=1
    )


def test_a_ring_sends_all_but_its_own_part():
    columns = sr.plan(
        {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}, [("kernel", "fsdp")], {"fsdp": 4}
    )._columns
    rows = traffic(columns, Schedule(tokens=64, batch_axes=("fsdp",), gathers=1))
    assert [(row.payload, row.sent) for row in rows] == [(256, 192), (256, 192)]
    assert rows.sent == 384
    assert rows.by_axes() == {("fsdp",): 384}
    whole = traffic(columns, Schedule(tokens=64, batch_axes=("fsdp",), reduce="all-reduce"))
    assert whole[-1].sent == 384


# Two that compile quickly; `make test-all` has them all.
QUICK = ("dense, scanned fsdp=4,tp=2", "MoE data=2,ep=4")
STEPS = [
    pytest.param(i, id=case.id, marks=() if case.id in QUICK else pytest.mark.slow)
    for i, case in enumerate(CASES)
]


@pytest.mark.parametrize("index", STEPS)
def test_a_step_sends_what_is_predicted(index):
    predicted, real = compared(index)
    counted = {key: payload for key, payload in real.items() if key[0] in COUNTED}
    assert (counted == predicted) == (not CASES[index].why)
    # What is sent for activations and not counted is little.
    of_activations = sum(n for key, n in real.items() if key[0] in ("activations", "experts"))
    assert sum(real.values()) - sum(counted.values()) <= 0.1 * of_activations


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < NEWEST, reason="the page has what newer XLAs send")
def test_the_page_has_the_table_of_all_steps():
    assert step_traffic.shown() == step_traffic.table()
