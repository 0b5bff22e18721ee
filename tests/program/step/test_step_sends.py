"""What steps send by their jaxprs, and by what the CPU's compiler makes of them."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import page_table, step_table
from tests.support.step_table import CASES

PAGE_VERSION = (0, 12)
# Some that compile quickly; `make test-all` has them all.
QUICK = (
    "dense, scanned fsdp=4,tp=2",
    "dense, square output transposed tp=4",
    "MoE data=2,ep=4",
    "ring attention fsdp=2,sp=4",
    "pipeline data=2,pp=4",
    "Muon fsdp=4,tp=2",
    "decode data=2,tp=4",
    "fewer heads of keys fsdp=2,tp=4",
)
STEPS = [
    pytest.param(i, id=case.id, marks=() if case.id in QUICK else pytest.mark.slow)
    for i, case in enumerate(CASES)
]


def test_the_quick_ones_are_there():
    assert {case.id for case in CASES}.issuperset(QUICK)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLAs choose other collectives")
@pytest.mark.parametrize("index", STEPS)
def test_a_step_sends_what_its_jaxpr_says(index):
    """In all within 5 %, each collective over the same axes within 10 %; or the page says why not."""
    differences = list(step_table.differences(*step_table.compared(index)))
    assert bool(differences) == (CASES[index].id in step_table.WHY), differences


@pytest.mark.skipif(jax.__version_info__[:2] < (0, 10), reason="older JAX traces other jaxprs")
@pytest.mark.parametrize("index", STEPS)
def test_a_step_sends_between_tpus_what_its_jaxpr_says(index):
    """By what the TPU's compiler made of it; or the page says why not."""
    differences = list(step_table.differences(*step_table.compared_on_tpu(index)))
    assert bool(differences) == (CASES[index].id in step_table.WHY_ON_TPU), differences


def sent(tree, update, mesh, **options):
    plan = sr.plan({"params": tree, "moment": moments(tree)}, [(".*", "fsdp")], mesh)
    x = jax.ShapeDtypeStruct((4096, 512), "bfloat16", sharding=NamedSharding(mesh, P("fsdp")))

    def train(state, x):
        grads = jax.grad(lambda params, x: (jax.nn.relu(x @ params["up"]) @ params["down"]).sum())
        return update(state, grads(state["params"], x))

    step = sr.trace(jax.jit(train, donate_argnums=0, **options), plan, x)
    return {(row.of, row.collective): row.sent for row in step.traffic()}


def moments(tree):
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, "float32"), tree)


def momentum(state, grads):
    moment = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["moment"], grads)
    params = jax.tree.map(lambda p, m: (p - 0.1 * m).astype(p.dtype), state["params"], moment)
    return {"params": params, "moment": moment}


def test_gradients_are_added_in_parts_for_moments_of_another_dtype():
    """Also where nothing says how results are sharded: as if they were as the arguments."""
    mesh = jax.make_mesh((8,), ("fsdp",))
    tree = {name: jax.ShapeDtypeStruct((512, 512), "bfloat16") for name in ("up", "down")}
    by_kind = sent(tree, momentum, mesh)
    assert by_kind["gradients", "reduce-scatter"] == 2 * 512 * 512 * 2 * 7 // 8
    assert ("gradients", "all-reduce") not in by_kind
    assert by_kind == sent(tree, momentum, mesh, out_shardings=NamedSharding(mesh, P("fsdp")))


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__[:2] != PAGE_VERSION, reason="the page's rows are of JAX 0.12"
)
def test_the_page_has_the_table_of_all_steps():
    assert page_table.shown(step_table.PAGE) == step_table.table(
        step_table.compared, step_table.WHY
    )


def test_the_page_has_the_table_of_steps_on_tpus():
    """Behind the tests of its rows, which trace the steps anew."""
    table = page_table.shown(step_table.PAGE, "steps on TPUs").splitlines()
    assert len(table) == 2 + len(CASES)
    reasons = {row.split("|")[-2].strip() for row in table[2:]} - {""}
    assert reasons == set(step_table.WHY_ON_TPU.values())
