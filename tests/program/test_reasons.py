"""Reasons that programs by hand show; `verify/test_verify_steps.py` has those of whole steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.causes import REASONS

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tp"))


def array(shape, *spec):
    return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(MESH, P(*spec)))


def constrained(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def reasons(compiled, inputs):
    return {row.kind: row.reason for row in sr.inspect(compiled, inputs).collectives}


def test_a_cache_that_is_updated_and_then_gathered_is_told():
    """The gathered copy is not what is returned."""

    def decode(kernel, cache, x, place):
        new = jax.lax.dynamic_update_slice(cache, (x @ kernel)[:, None], (0, place, 0))
        cache = constrained(new, "data", None, "tp")
        whole = constrained(cache, "data")
        weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", x, whole))
        return cache, jnp.einsum("bt,btd->bd", weights, whole)

    cache = array((8, 512, 256), "data", None, "tp")
    step = jax.jit(decode, donate_argnums=1, out_shardings=(cache.sharding, None))
    args = (array((256, 256), None, "tp"), cache, array((8, 256), "data"))
    compiled = step.lower(*args, jax.ShapeDtypeStruct((), "int32")).compile()
    inputs = (P(None, "tp"), P("data", None, "tp"), None, None)
    assert reasons(compiled, inputs)["all-gather"] == REASONS["cache"].text
    findings = sr.verify(compiled, inputs, large=2**16)
    assert any(REASONS["cache"].text in finding.message for finding in findings)


def gradient_step(loss, params, batch):
    def step(params, batch):
        gradients = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return jax.jit(step, donate_argnums=0).lower(params, batch).compile()


def test_layers_that_the_step_stacks_are_no_micro_batches():
    def loss(params, x):
        stack = jnp.stack([params[f"layer{i}"] for i in range(4)])
        return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0] ** 2).mean()

    params = {f"layer{i}": array((256, 256)) for i in range(4)}
    compiled = gradient_step(loss, params, array((64, 256), "data"))
    assert reasons(compiled, (P(), None))["all-reduce"] == REASONS["gradient"].text


def test_micro_batches_that_sum_in_each_trip_are_told():
    def step(kernel, x):
        def micro(total, rows):
            gradient = jax.grad(lambda w: (jnp.tanh(rows @ w) ** 2).mean())(kernel)
            return constrained(total + gradient), None

        rows = constrained(x.reshape(4, 64, 256), None, "data")
        return kernel - jax.lax.scan(micro, jnp.zeros_like(kernel), rows)[0]

    args = (array((256, 256)), array((256, 256), "data"))
    compiled = jax.jit(step, donate_argnums=0).lower(*args).compile()
    assert REASONS["microbatch"].text in reasons(compiled, (P(), None)).values()
