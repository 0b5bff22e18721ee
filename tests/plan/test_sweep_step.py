"""`Plan.sweep(step=)`: only meshes that the step is for, ranked by its time, or by the compiler."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._place.mesh import as_mesh
from tests.support import step_suite

WIDTH, HEADS, SIZE, ROWS = 256, 4, 32, 16
TREE = {name: jax.ShapeDtypeStruct((WIDTH, HEADS * SIZE), "bfloat16") for name in "qkv"}
TREE["o"] = jax.ShapeDtypeStruct((HEADS * SIZE, WIDTH), "bfloat16")
RULES = [("[qkv]", ("fsdp", "tp")), ("o", ("tp", "fsdp"))]


def attention(params, x):
    def loss(params):
        q, k, v = ((x @ params[n]).reshape(*x.shape[:2], HEADS, SIZE) for n in "qkv")
        chances = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        mixed = jnp.einsum("bhts,bshd->bthd", chances, v).reshape(*x.shape[:2], -1)
        return jnp.mean(lax.with_sharding_constraint(x + mixed @ params["o"], P("fsdp")) ** 2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def traced_on(mesh):
    plan = sr.plan(TREE, RULES, mesh)
    mesh = jax.tree.leaves(plan.shardings())[0].mesh
    x = jax.ShapeDtypeStruct((ROWS, 64, WIDTH), "bfloat16", sharding=NamedSharding(mesh, P("fsdp")))
    step = jax.jit(attention, donate_argnums=0, out_shardings=plan.shardings())
    return sr.trace(step, plan, x)


PLAN = sr.plan(TREE, RULES, {"fsdp": 8, "tp": 4})


def test_meshes_without_a_row_for_each_device_or_that_cut_heads_are_left_out():
    rows = PLAN.sweep(devices=32, step=traced_on({"fsdp": 8, "tp": 4}), hardware="v5p")
    assert {tuple(row.mesh.values()) for row in rows} == {(8, 4), (16, 2)}
    why = {tuple(mesh.values()): text for mesh, text in rows.left_out}
    assert why[32, 1] == "inputs/1: 16 rows cannot be cut into 32 parts by fsdp"
    assert "4 heads of 32, is cut into 8 parts by tp" in why[4, 8]
    assert set(why) == {(32, 1), (4, 8), (2, 16), (1, 32)}
    assert "left out fsdp=32,tp=1: inputs/1: 16 rows" in str(rows)


def test_a_function_of_the_mesh_is_traced_on_each():
    by_step = PLAN.sweep(devices=16, step=traced_on({"fsdp": 8, "tp": 4}), hardware="v5p")
    by_function = PLAN.sweep(devices=16, step=traced_on, hardware="v5p")
    assert [row.mesh for row in by_function] == [row.mesh for row in by_step]
    assert [row.time for row in by_function] == [row.time for row in by_step]
    assert all(row.compiled is None for row in by_function)


def test_ties_are_ranked_by_memory():
    rows = PLAN.sweep(devices=8, step=traced_on, hardware="v5p")
    tied = [row for row in rows if row.time.total <= 1.05 * rows[0].time.total]
    assert [row.bytes for row in tied] == sorted(row.bytes for row in tied)


def ring_on(mesh):
    """Context parallel in code by device, which is another on each mesh."""
    plan = sr.plan({"w": jax.ShapeDtypeStruct((64, 64), "float32")}, [("w", "data")], mesh)
    mesh = jax.tree.leaves(plan.shardings())[0].mesh
    count = mesh.shape["sp"]

    def around(x):
        return lax.fori_loop(
            0,
            count,
            lambda _, y: lax.ppermute(y, "sp", [(i, (i + 1) % count) for i in range(count)]),
            x,
        )

    turn = jax.shard_map(around, mesh=mesh, in_specs=P("data", "sp"), out_specs=P("data", "sp"))
    x = jax.ShapeDtypeStruct((16, 64, 64), "float32", sharding=NamedSharding(mesh, P("data", "sp")))
    return sr.trace(lambda params, x: turn(x @ params["w"]), plan, x)


def test_code_by_device_is_swept_with_a_function_of_the_mesh():
    plan = sr.plan(
        {"w": jax.ShapeDtypeStruct((64, 64), "float32")}, [("w", "data")], {"data": 2, "sp": 4}
    )
    rows = plan.sweep(devices=8, step=ring_on, hardware="v5p")
    assert {tuple(row.mesh.values()) for row in rows} == {(1, 8), (2, 4), (4, 2), (8, 1)}
    sent = {row.mesh["sp"]: ring_on(row.mesh).traffic().by_axes().get(("sp",), 0) for row in rows}
    assert sent[1] == 0
    # Each of the turns sends what a device has: an eighth of the array.
    assert sent[8] == 4 * sent[2] == 8 * 16 * 64 * 64 * 4 // 8
    with pytest.raises(ValueError, match="trace the step on that mesh"):
        plan.sweep(devices=8, step=ring_on({"data": 2, "sp": 4}), hardware="v5p")


def experts_on(mesh):
    """Experts in code by device, on an axis of their own that cuts the batch as well."""
    step, arguments = step_suite.experts(mesh)
    return sr.trace(step, *arguments)


def test_experts_are_swept_by_an_axis_of_their_own():
    plan = experts_on(as_mesh({"fsdp": 2, "ep": 4})).plan
    rows = plan.sweep(devices=8, step=experts_on, hardware="v5p")
    assert {tuple(row.mesh.values()) for row in rows} == {(8, 1), (4, 2), (2, 4), (1, 8)}
    exchanged, gathered = {}, {}
    for row in rows:
        traffic = row_traffic(row, experts_on)
        exchanged[row.mesh["ep"]] = sum(t.sent for t in traffic if t.collective == "all-to-all")
        gathered[row.mesh["ep"]] = sum(t.sent for t in traffic if t.of == "params")
    # A device sends what goes to the others: of n parts of its tokens, n - 1.
    assert exchanged[1] == 0
    assert exchanged[8] / exchanged[2] == pytest.approx((7 / 8) / (1 / 2), rel=0.01)
    assert exchanged[4] / exchanged[2] == pytest.approx((3 / 4) / (1 / 2), rel=0.01)
    # It gathers the experts that it has, from those that have other parts of them.
    assert gathered[8] < gathered[4] < gathered[2] < gathered[1]
    assert rows[0].mesh == {"fsdp": 1, "ep": 8}


def test_meshes_on_which_the_step_cannot_be_traced_are_left_out():
    plan = experts_on(as_mesh({"fsdp": 2, "ep": 4})).plan
    rows = plan.sweep(devices=16, step=experts_on, hardware="v5p")
    assert {row.mesh["ep"] for row in rows} == {1, 2, 4, 8}
    why = {mesh["ep"]: text for mesh, text in rows.left_out}
    assert set(why) == {16}
    assert "the step cannot be traced there: " in why[16]
    with pytest.raises((ValueError, TypeError), match="divi"):
        plan.sweep([{"fsdp": 1, "ep": 16}], step=experts_on, hardware="v5p")


STAGES, MICRO, WIDE, TOKENS = 8, 4, 4096, 2**14


def pipeline_on(mesh):
    """Stages of a pipeline in code by device; micro-batches go from one to the next."""
    kernels = jax.ShapeDtypeStruct((STAGES, WIDE, WIDE), "bfloat16")
    plan = sr.plan({"w": kernels}, [("w", "pp")], mesh)
    mesh = jax.tree.leaves(plan.shardings())[0].mesh
    stages = mesh.shape["pp"]
    on_to = [(i, i + 1) for i in range(stages - 1)]

    def run(w, x):
        batches = x.reshape(MICRO, -1, WIDE)

        def turn(state, i):
            first = lax.dynamic_index_in_dim(batches, jnp.minimum(i, MICRO - 1), 0, False)
            state = jnp.where(lax.axis_index("pp") == 0, first, state)
            state = lax.scan(lambda y, w: (y @ w, None), state, w)[0]
            return lax.ppermute(state, "pp", on_to), state

        _, states = lax.scan(turn, batches[0] * 0, jnp.arange(MICRO + stages - 1))
        return lax.psum(jnp.where(lax.axis_index("pp") == stages - 1, states.sum(), 0), "pp")[None]

    staged = step_suite.manual(mesh, run, (P("pp"), P("data")), P("data"))
    x = jax.ShapeDtypeStruct((TOKENS, WIDE), "bfloat16", sharding=NamedSharding(mesh, P("data")))
    return sr.trace(lambda params, x: staged(params["w"], x).sum(), plan, x)


def test_pipelines_are_swept_with_their_bubble_and_their_sends():
    plan = pipeline_on(as_mesh({"data": 2, "pp": 4})).plan
    rows = plan.sweep(devices=8, step=pipeline_on, hardware="v5p")
    assert {tuple(row.mesh.values()) for row in rows} == {(8, 1), (4, 2), (2, 4), (1, 8)}
    busy = {row.mesh["pp"]: row.time.compute for row in rows}
    for stages in (2, 4, 8):
        # Each stage also waits for the stages before it.
        bubble = (MICRO + stages - 1) / MICRO
        assert busy[stages] / busy[1] == pytest.approx(bubble, rel=0.01)
        permuted = [
            t
            for row in rows
            if row.mesh["pp"] == stages
            for t in row_traffic(row, pipeline_on)
            if t.collective == "collective-permute"
        ]
        state = TOKENS * stages // 8 // MICRO * WIDE * 2
        assert sum(t.sent for t in permuted) == (MICRO + stages - 1) * state
    assert rows[0].mesh["pp"] == 1
    left = plan.sweep(devices=16, step=pipeline_on, hardware="v5p").left_out
    assert [mesh["pp"] for mesh, _ in left] == [16]


def row_traffic(row, step_on):
    step = step_on(as_mesh(row.mesh))
    return step.plan.traffic(step=step)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"devices": 8, "step": traced_on, "prove": 1}, ValueError, "prove: give the topology"),
        (
            {"devices": 8, "step": lambda mesh: 3},
            TypeError,
            "what the function of the mesh returns",
        ),
        ({"devices": 8, "step": 3}, TypeError, "step is 3"),
        (
            {"devices": 8, "step": traced_on, "tokens": 8},
            ValueError,
            "tokens is given beside step=",
        ),
    ],
)
def test_what_cannot_be_swept_is_told(arguments, error, message):
    with pytest.raises(error, match=message):
        PLAN.sweep(**arguments)


def test_all_rows_make_a_plan_and_a_step():
    rows = PLAN.sweep(devices=16, step=traced_on, hardware="v5p")
    for row in rows:
        step = traced_on(row.mesh)
        assert prod(row.mesh.values()) == 16
        assert row.bytes == step.memory().peak
        assert row.time.total == step.plan.step_time(step=step, hardware="v5p").total
