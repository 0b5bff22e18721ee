"""Memory of a step under a layout: what is counted once, twice or not at all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardrules as sr
from shardrules._program.solve.layout import Layout, StepArrays
from shardrules._program.solve.price import Price
from shardrules._program.solve.spread import LaidSpread

ROWS, WIDTH, TURNS = 256, 128, 8


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def memory(function, *args, donated=()):
    return memory_of(sr.trace(jax.jit(function, donate_argnums=donated), *args))


def memory_of(step):
    """Return the memory of a step on one device."""
    arrays = StepArrays(step._equations, step._roles, {})
    return Price(step, LaidSpread(arrays, Layout({})).of_step()).memory()


# What is counted once, twice, or not at all


def stacked_anew(cache, x):
    """Update a cache that a scan takes apart, and stacks again."""
    return lax.scan(lambda x, row: (x, row.at[0].set(x)), x, cache)[1]


def carried(cache, x):
    """Update a cache that a scan carries."""
    return lax.fori_loop(0, TURNS, lambda i, cache: cache.at[i, 0].set(x), cache)


@pytest.mark.parametrize(("step", "times"), [(stacked_anew, 2), (carried, 1)])
def test_only_a_carried_cache_is_updated_in_the_memory_that_is_donated(step, times):
    cache, x = array(TURNS, ROWS, WIDTH), array(WIDTH)
    size = TURNS * ROWS * WIDTH * 4
    rest = 3 * ROWS * WIDTH * 4
    assert times * size <= memory(step, cache, x, donated=0).peak <= times * size + rest
    # What is not donated is kept as well.
    assert 2 * size <= memory(step, cache, x).peak <= 2 * size + rest


def test_vectors_of_one_one_are_computed_where_they_are_multiplied():
    def looked_up(table, numbers):
        return jax.nn.one_hot(numbers, 4096, dtype="float32") @ table

    peak = memory(looked_up, array(4096, WIDTH), array(ROWS, dtype="int32")).peak
    assert peak < ROWS * 4096 * 4


def gradients(loss):
    def step(params, x):
        return jax.grad(lambda params: loss(params, x).sum())(params)

    return step


def test_the_gradient_of_relu_is_computed_in_the_place_of_its_operand():
    """The product that it masks is read by nothing else; one that is has a buffer of its own."""
    params = {"up": array(WIDTH, 8 * WIDTH), "down": array(8 * WIDTH, WIDTH)}
    size = ROWS * 8 * WIDTH * 4
    relu = gradients(lambda w, x: jax.nn.relu(x @ w["up"]) @ w["down"])
    rest = 3 * ROWS * WIDTH * 4 + 4 * 8 * WIDTH * WIDTH * 4
    assert size < memory(relu, params, array(ROWS, WIDTH)).peak <= size + rest

    def both(x, y):
        hidden, other = x @ x.T, y @ y.T
        return jnp.where(hidden > 0, other, 0.0) @ x, other @ y, hidden @ x

    square = ROWS * ROWS * 4
    assert memory(both, array(ROWS, 8), array(ROWS, 8)).peak >= 2 * square


ROW = "bt,bs->bts"
HEADS = "bht,bhs->bhts"


def chances(x, y, product):
    return jax.nn.softmax(jnp.einsum(product, x, y).astype("float32"), -1).astype("bfloat16")


def once(x, y, product):
    return jnp.einsum("...ts,...s->...t", chances(x, y, product), y)


def twice(x, y, product):
    read = chances(x, y, product)
    return jnp.einsum("...ts,...s->...t", read, y), jnp.einsum("...ts,...t->...s", read, x)


@pytest.mark.parametrize(
    ("step", "product", "shape", "width"),
    [(once, HEADS, (4, 4), 4), (twice, HEADS, (4, 4), 2), (once, ROW, (16,), 2)],
)
def test_a_softmax_of_heads_that_one_product_reads_is_as_wide_as_it_is_summed(
    step, product, shape, width
):
    x = array(*shape, 512, dtype="bfloat16")
    rows = memory(lambda x, y: step(x, y, product), x, x).buffers
    assert max(row.bytes for row in rows) == 16 * 512 * 512 * width


def gated(x, w):
    return jax.nn.silu(x @ w) * (x @ w * 2) @ w.T


def test_what_is_computed_element_by_element_takes_the_place_of_an_operand():
    x, w = array(ROWS, WIDTH), array(WIDTH, 4096)
    both = [row for row in memory(gated, x, w).buffers if row.bytes == ROWS * 4096 * 4]
    assert len(both) == 2


def test_gradients_of_weights_come_last_in_a_turn():
    def loss(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w["a"]) @ w["b"], None

        return jnp.sum(lax.scan(jax.checkpoint(layer), x, w)[0])

    w = {"a": array(TURNS, WIDTH, 4096), "b": array(TURNS, 4096, WIDTH)}
    wide = ROWS * 4096 * 4
    rows = memory(jax.grad(loss), w, array(ROWS, WIDTH)).buffers
    # The hidden array and its gradient wait for the products that give the weights' gradients.
    assert sum(row.bytes == wide and "transpose" in row.what for row in rows) == 2


def closing_over(size, given):
    weights = jnp.ones((size, size))
    return sr.trace(lambda x: x @ weights, jax.ShapeDtypeStruct((given, size), "float32"))


def test_arrays_that_a_step_closes_over_are_whole_on_each_device():
    step = closing_over(256, 8)
    memory = memory_of(step)
    assert (memory.buffers[0].what, memory.buffers[0].bytes) == ("constant", 4 * 256 * 256)
    assert memory.peak == 4 * (256 * 256 + 2 * 8 * 256)
    assert (memory.totals.arguments, memory.totals.peak) == (4 * 8 * 256, memory.peak)
    line = "the step closes over 262 kB of arrays, which are whole on each device: give them as arg"
    assert line in str(step)
    assert "closes over" not in str(closing_over(256, 512))  # a table beside what it is given
