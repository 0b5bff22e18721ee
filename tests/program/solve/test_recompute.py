"""`solve(remat="choose")`: loops that recompute for their gradient, against `jax.checkpoint`."""

from __future__ import annotations

from functools import partial
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardrules as sr
from shardrules._program.solve.recompute import blocks_of, recomputed, subsets

STACKS = {"a": jax.ShapeDtypeStruct((4, 64, 256), "float32"),
          "b": jax.ShapeDtypeStruct((4, 256, 64), "float32")}  # fmt: skip
ROWS = 2**14
MESH = {"fsdp": 4, "tp": 2}


def layer(x, w):
    y = jnp.tanh(x @ w["a"]) * jax.nn.sigmoid(x @ w["a"])
    return x + y @ w["b"], jnp.max(y)


def loss(wrap, params, x):
    x, largest = jax.lax.scan(wrap(layer), x, params)
    return jnp.sum(x * x) + jnp.sum(largest)


def train(wrap, params, x):
    grads = jax.grad(partial(loss, wrap))(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def in_parts(wrap, params, x):
    """Sum the gradients of microbatches, in a loop around that over layers."""
    zeros = jax.tree.map(jnp.zeros_like, params)

    def turn(sums, x):
        return jax.tree.map(jnp.add, sums, jax.grad(partial(loss, wrap))(params, x)), None

    grads, _ = jax.lax.scan(turn, zeros, x.reshape(4, -1, 64))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def two(wrap, params, x):
    def both(params):
        y, largest = jax.lax.scan(wrap(layer), x, params)
        return loss(wrap, params, y / 2) + jnp.sum(largest)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(both)(params))


def traced(function=train, wrap=lambda layer: layer, rows=ROWS):
    jitted = jax.jit(partial(function, wrap), donate_argnums=0)
    return sr.trace(jitted, STACKS, jax.ShapeDtypeStruct((rows, 64), "float32"))


@pytest.mark.parametrize("function", [train, in_parts, two])
def test_a_loop_that_recomputes_is_that_of_checkpoint(function):
    step, checkpointed = traced(function), traced(function, jax.checkpoint)
    blocks = blocks_of(step)
    assert len(blocks) == (2 if function is two else 1)
    again = recomputed(step, blocks)
    assert again.flops == checkpointed.flops > step.flops
    assert again.memory().peak == checkpointed.memory().peak < step.memory().peak
    assert blocks_of(again) == blocks_of(checkpointed) == []
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=s.shape, scale=0.1) for name, s in STACKS.items()}
    params = jax.tree.map(partial(jnp.asarray, dtype="float32"), params)
    x = jnp.asarray(rng.normal(size=(64, 64)), "float32")
    small = traced(function, rows=64)
    made = recomputed(small, blocks_of(small))._function(params, x)
    for name, value in partial(function, lambda layer: layer)(params, x).items():
        np.testing.assert_allclose(made[name], value, rtol=2e-4, atol=2e-5)


def test_a_step_that_fits_only_recomputed_is_so_and_another_is_not():
    step = traced()
    free = sr.solve(step, MESH, hardware="v5p", remat="choose")
    assert [row.recomputes for row in free.remat] == [False]
    assert free.time.total == sr.solve(step, MESH, hardware="v5p").time.total
    least = sr.solve(traced(wrap=jax.checkpoint), MESH, hardware="v5p")
    room = least.memory.peak
    with pytest.raises(ValueError, match="remat='choose'"):
        sr.solve(step, MESH, hardware="v5p", hbm=room)
    tight = sr.solve(step, MESH, hardware="v5p", hbm=room, remat="choose")
    assert tight.memory.peak <= room < free.memory.peak
    (row,) = tight.remat
    assert row.recomputes
    assert f"{__name__.rpartition('.')[2]}.py:" in row.line
    assert "jax.lax.scan(jax.checkpoint(body), ...)" in str(tight)
    assert str(row) in tight.reasons


@pytest.mark.parametrize("share", [0.3, pytest.param(0.9, marks=pytest.mark.slow)])
def test_the_choice_is_the_best_of_all_variants(share):
    step = traced(two)
    blocks = blocks_of(step)
    most = sr.solve(step, MESH, hardware="v5p").memory.peak
    least = sr.solve(recomputed(step, blocks), MESH, hardware="v5p").memory.peak
    room = round(least + share * (most - least))
    times = {}
    for chosen in subsets(blocks):
        try:
            variant = recomputed(step, chosen)
            times[chosen] = sr.solve(variant, MESH, hardware="v5p", hbm=room).time.total
        except ValueError:
            times[chosen] = inf
    solution = sr.solve(step, MESH, hardware="v5p", hbm=room, remat="choose")
    assert len(times) == 4
    assert solution.time.total == pytest.approx(min(times.values()))
    assert solution.gap == 0
    chosen = tuple(b for b, row in zip(blocks, solution.remat, strict=True) if row.recomputes)
    assert times[chosen] == pytest.approx(min(times.values()))


def test_the_constrained_step_recomputes():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), tuple(MESH))
    room = sr.solve(traced(wrap=jax.checkpoint), mesh, hardware="v5p").memory.peak
    solution = sr.solve(traced(), mesh, hardware="v5p", hbm=room, remat="choose")
    args = (STACKS, jax.ShapeDtypeStruct((ROWS, 64), "float32"))
    with solution.constraints() as constrained:
        text = constrained.lower(*args).as_text(debug_info=True)
        made = constrained({n: jnp.ones(s.shape) / 256 for n, s in STACKS.items()},
                           jnp.ones((ROWS, 64)))  # fmt: skip
    assert "rematted_computation" in text
    assert all(jnp.isfinite(leaf).all() for leaf in made.values())


def test_what_is_no_choice_is_told():
    with pytest.raises(ValueError, match="remat is 'all'; it must be one of 'choose'"):
        sr.solve(traced(), MESH, hardware="v5p", remat="all")
    assert sr.solve(traced(wrap=jax.checkpoint), MESH, hardware="v5p", remat="choose").remat == ()
