"""`Step.largest_batch`, against steps that are traced anew with the batch that it gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

WIDTH, LENGTH = 64, 32


def traced(rows, steps=1):
    """Trace a step that accumulates gradients of so many rows on two devices."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    tree = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")}
    plan = sr.plan(tree, [("w", "fsdp")], mesh)

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"]) @ params["w"])

    def train(params, x):
        parts = x.reshape(steps, -1, LENGTH, WIDTH)
        parts = jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, P(None, "fsdp")))

        def add(sums, part):
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, part)), None

        sums, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        return jax.tree.map(lambda p, g: p - g, params, sums)

    sharding = NamedSharding(mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((rows, LENGTH, WIDTH), "float32", sharding=sharding)
    return sr.trace(jax.jit(train, donate_argnums=0), plan, x), plan


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("hbm", [3 * 10**5, 10**6, 7 * 10**6])
def test_the_batch_fits_and_the_next_does_not(hbm, steps):
    step, plan = traced(8, steps)
    rows = step.largest_batch(plan, hbm)
    assert rows > 0
    assert rows % (2 * steps) == 0
    for more, fits in ((0, True), (2 * steps, False)):
        again, there = traced(rows + more, steps)
        assert (again.memory(there).peak <= hbm) == fits


def test_what_does_not_fit_with_any_batch():
    step, plan = traced(8)
    assert step.largest_batch(plan, 1000) == 0


def test_a_step_without_a_batch():
    tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
    step = sr.trace(lambda params: params["w"] * 2, plan)
    with pytest.raises(ValueError, match="no argument but the model's has a batch"):
        step.largest_batch(plan, 10**9)
    for nothing in (0, 0.5, -1, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match=f"hbm is {nothing}.*; it must be a number of bytes"):
            step.largest_batch(plan, nothing)


def test_frozen_weights_have_no_batch():
    """Adapters are trained beside a base that is no plan: its first dimension is not the batch."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")  # noqa: E731
    plan = sr.plan({"a": shape(64, 4), "b": shape(4, 128)}, [(".*", ())], {"data": 2})
    frozen = {"embed": shape(96, 64), "up": shape(64, 128), "down": shape(128, 64)}

    def train(adapters, frozen, x):
        def loss(adapters):
            y = jax.nn.one_hot(x, 96) @ frozen["embed"]
            y = jax.nn.relu(y @ frozen["up"] + (y @ adapters["a"]) @ adapters["b"])
            return jnp.sum((y @ frozen["down"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, adapters, jax.grad(loss)(adapters))

    def rows_of(count):
        x = jax.ShapeDtypeStruct((count, 16), "int32")
        return sr.trace(train, plan, frozen, x)

    step = rows_of(8)
    rows = step.largest_batch(plan, 2**24)
    assert 8 < rows < 2**20
    assert rows_of(rows).memory(plan).peak <= 2**24 < rows_of(rows + 1).memory(plan).peak


def test_rows_that_are_concatenated_are_as_many():
    """As the chosen and the rejected answers of preference losses are."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")  # noqa: E731
    plan = sr.plan({"up": shape(64, 256), "down": shape(256, 64)}, [(".*", ())], {"data": 2})

    def loss(params, chosen, rejected):
        x = jnp.concatenate([chosen, rejected])
        y = jnp.tanh(x @ params["up"]) @ params["down"]
        return jnp.sum(y[: len(chosen)] * y[len(chosen) :])

    def step(rows):
        return sr.trace(jax.grad(loss), plan, shape(rows, 64), shape(rows, 64))

    room = 4 * 10**6
    peak = step(step(8).largest_batch(plan, room)).memory().peak
    assert 0.97 * room < peak < 1.03 * room


def test_rows_of_one_device_are_as_many():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    plan = sr.plan({"up": jax.ShapeDtypeStruct((64, 256), "float32")}, [(".*", ())], mesh)
    mapped = jax.shard_map(
        lambda w, x: jnp.sin(jnp.tanh(x @ w) @ w.T), mesh=mesh, in_specs=(P(), P("data")),
        out_specs=P("data"),
    )  # fmt: skip

    def step(rows):
        x = jax.ShapeDtypeStruct((rows, 64), "float32", sharding=NamedSharding(mesh, P("data")))
        return sr.trace(lambda params, x: jnp.sum(mapped(params["up"], x)), plan, x)

    room = 4 * 10**6
    peak = step(step(8).largest_batch(plan, room)).memory().peak
    assert 0.97 * room < peak <= room
