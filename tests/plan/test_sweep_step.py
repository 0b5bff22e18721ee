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
from tests.support.hlo_steps import shard_map

WIDTH, HEADS, SIZE, ROWS = 256, 4, 32, 16
TREE = {name: jax.ShapeDtypeStruct((WIDTH, HEADS * SIZE), "bfloat16") for name in "qkv"}
TREE["o"] = jax.ShapeDtypeStruct((HEADS * SIZE, WIDTH), "bfloat16")
RULES = [("[qkv]", ("fsdp", "tp")), ("o", ("tp", "fsdp"))]

pytestmark = pytest.mark.skipif(
    not hasattr(jax.sharding, "use_abstract_mesh"), reason="this JAX has no use_abstract_mesh"
)


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

    turn = shard_map(around, mesh=mesh, in_specs=P("data", "sp"), out_specs=P("data", "sp"))
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
