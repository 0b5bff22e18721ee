"""`trace` of one step as each framework writes it: the same dimensions, roles and products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr

ROWS, WIDTH, HIDDEN = 24, 64, 160
X = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
optax = pytest.importorskip("optax", reason="optax is not installed")
ADAM = optax.adam(1e-3)


def mean_square(apply, x):
    return jnp.mean((x + apply(x)) ** 2)


def adam_step(loss):
    def train(params, state, x):
        updates, state = ADAM.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(train, donate_argnums=(0, 1))


def plain():
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}

    def loss(params, x):
        return mean_square(lambda x: jax.nn.relu(x @ params["up"]) @ params["down"], x)

    return adam_step(loss), (params, jax.eval_shape(ADAM.init, params), X)


def nnx():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    if not hasattr(nnx, "Pytree"):
        pytest.skip("modules of this flax are no trees for JAX")

    def make():
        rngs = nnx.Rngs(0)
        layers = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]
        up, down = (nnx.Linear(*sizes, use_bias=False, rngs=rngs) for sizes in layers)
        model = nnx.Sequential(up, nnx.relu, down)
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, x):
        grads = nnx.grad(lambda model: mean_square(model, x))(model)
        optimizer.update(model, grads)

    return train, (*nnx.eval_shape(make), X)


def nnx_in_a_pair():
    """`step((model, optimizer), x)`, which was traced as if it computed nothing."""
    step, (model, optimizer, x) = nnx()
    from flax import nnx as library

    return library.jit(lambda state, x: step(*state, x)), ((model, optimizer), x)


def equinox():
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    model = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, use_bias=False, use_final_bias=False, key=jax.random.key(0))
    state = ADAM.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def train(model, state, x):
        grads = eqx.filter_grad(lambda model: mean_square(jax.vmap(model), x))(model)
        updates, state = ADAM.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state

    return train, (model, state, X)


@pytest.mark.parametrize("make", [plain, nnx_in_a_pair, equinox])
def test_a_step_is_read_alike_whoever_has_written_it(make):
    step, args = make()
    traced = sr.trace(step, *args)
    assert not traced.unmodelled
    classes = {(row.role, row.size): len(row.arrays) for row in traced.dimensions if row.size > 1}
    # Both kernels, both moments of each, and the inputs.
    assert classes["model width", WIDTH] == 7
    assert classes["hidden", HIDDEN] == 6
    assert classes["batch", ROWS] == 1
    products = sum(row.flops for row in traced.work if row.operation == "dot_general")
    # Forward, and the gradients of both kernels and of what is between them.
    assert products == 5 * 2 * ROWS * WIDTH * HIDDEN
