"""Prices of `solve` by hand: how long collectives take, and which arrays are alive together."""

from __future__ import annotations

import dataclasses
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardrules as sr
from shardrules._program.solve.spread import Machine

# Round numbers: 100 GB/s inside a node of 8, 10 GB/s between them.
NODE = sr.Hardware("node", {"bfloat16": 1e14}, 10**12, 1e12, "NVLink", 1e11, 8, 1e10)
PAYLOAD = 2**30


def seconds(mesh, axes, hardware):
    """The seconds of an all-gather of so many bytes over some axes."""
    machine = Machine(hardware, mesh)
    return machine.seconds("all-gather", axes, machine.sent("all-gather", axes, PAYLOAD))


def test_a_ring_sends_all_but_its_own_part_and_of_a_sum_twice_that():
    sent = Machine(NODE, {"dp": 2, "tp": 4}).sent
    assert sent("all-reduce", ["tp"], PAYLOAD) == 2 * PAYLOAD * 3 / 4
    assert sent("all-gather", ["dp"], PAYLOAD) == PAYLOAD / 2


@pytest.mark.parametrize(
    ("mesh", "inside"),
    [
        ({"fsdp": 64}, {"fsdp": 8}),
        ({"fsdp": 8, "tp": 8}, {"fsdp": 1, "tp": 8}),
        ({"fsdp": 16, "tp": 4}, {"fsdp": 2, "tp": 4}),
        ({"tp": 4, "fsdp": 16}, {"tp": 1, "fsdp": 8}),
        ({"fsdp": 12}, {"fsdp": 6}),
    ],
)
def test_bytes_between_nodes_are_counted_device_by_device(mesh, inside):
    """An all-gather in two steps, between nodes and then inside of them, played through.

    Each device has a shard; it gets those of its peers in other nodes, then all of its own node's.
    """
    devices, near = prod(mesh.values()), prod(inside.values())
    shard = PAYLOAD / devices
    between = (devices // near - 1) * shard
    within = (near - 1) * shard * (devices // near)
    assert between + within == (devices - 1) * shard
    found = seconds(mesh, list(mesh), NODE)
    assert found == pytest.approx(max(between / 1e10, within / 1e11))


def test_the_torus_gives_each_mesh_axis_a_dimension_and_the_largest_the_rest():
    torus = dataclasses.replace(NODE, link="ICI", link_devices=4096, torus_dimensions=3)
    sent = {
        tuple(mesh.values()): seconds(mesh, ["fsdp"], torus) / (1 - 1 / mesh["fsdp"])
        for mesh in ({"fsdp": 64, "dp": 1}, {"fsdp": 64, "dp": 8}, {"fsdp": 2, "dp": 1})
    }
    whole = PAYLOAD / 1e11
    # All three dimensions; two, beside dp; and one, as two devices have no more.
    assert sent[64, 1] == pytest.approx(whole)
    assert sent[64, 8] == pytest.approx(whole * 3 / 2)
    assert sent[2, 1] == pytest.approx(whole * 3)


# Memory

ROWS, WIDTH, HIDDEN, LAYERS = 256, 128, 1024, 8


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def memory(function, *args, donated=(), **sizes):
    """Return the bytes that a device is predicted to need, of one or of a mesh."""
    step = sr.trace(jax.jit(function, donate_argnums=donated), *args)
    return sr.solve(step, sizes or {"x": 1}, hardware="v5p", hbm=10**15).memory


@pytest.mark.parametrize(("donated", "times"), [((), 2), ((0,), 1)])
def test_results_take_the_memory_of_what_is_donated(donated, times):
    assert memory(lambda w: w * 2, array(ROWS, WIDTH), donated=donated) == times * ROWS * WIDTH * 4


def test_what_is_computed_where_it_is_read_takes_no_memory():
    w, x = array(WIDTH, HIDDEN), array(ROWS, WIDTH)
    rest = 4 * (2 * WIDTH * HIDDEN + 2 * ROWS * WIDTH)
    step = lambda w, x: jnp.tanh(jnp.sin(x @ w) * 2) @ w.T  # noqa: E731
    assert memory(step, w, x) <= rest + 4 * ROWS * HIDDEN
    hot = lambda table, rows: jax.nn.one_hot(rows, 4096) @ table  # noqa: E731
    assert memory(hot, array(4096, WIDTH), array(ROWS, dtype="int32")) < ROWS * 4096 * 4


def loss(kind, w, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    if kind == "unrolled":
        for i in range(LAYERS):
            x, _ = layer(x, w[i])
        return jnp.sum(x)
    layer = jax.checkpoint(layer) if kind == "checkpoint" else layer
    return jnp.sum(lax.scan(layer, x, w)[0])


@pytest.mark.parametrize(("kind", "kept"), [("scan", 2), ("checkpoint", 1), ("unrolled", 1)])
def test_what_the_backward_pass_reads_is_alive(kind, kept):
    """Inputs of all layers, and without recomputation what tanh gives, or what it is made of."""
    step = jax.grad(lambda w, x: loss(kind, w, x))
    rows = 64 * ROWS
    needed = memory(step, array(LAYERS, WIDTH, WIDTH), array(rows, WIDTH))
    of_layer = rows * WIDTH * 4
    # JAX 0.10 keeps a few arrays more of each layer than 0.12.
    assert kept * LAYERS * of_layer <= needed <= (kept * LAYERS + 12) * of_layer


def test_arrays_that_a_step_closes_over_are_whole_on_each_device():
    weights = jnp.ones((256, 256))
    step = sr.trace(lambda x: x @ weights, array(8, 256))
    assert sr.solve(step, {"x": 1}, hardware="v5p").memory == 4 * (256 * 256 + 2 * 8 * 256)


def test_it_is_about_what_the_compiler_needs():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    step = sr.trace(
        jax.jit(jax.grad(lambda w, x: loss("scan", w, x))),
        array(LAYERS, WIDTH, WIDTH),
        array(64 * ROWS, WIDTH),
        on=mesh,
    )
    rows = sr.solve(step, mesh, hardware="v5p").candidates
    assert len(rows) > 2
    ratios = [row.predicted.memory / row.compiled.memory for row in rows]
    assert min(ratios) > 0.6
    assert max(ratios) < 1.2
