"""Small random steps, whose spaces of choices can be searched by trying all."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import shardrules as sr

Params = dict[str, jax.Array]
SIZES = (512, 768, 1024, 4096)


def random_step(seed: int) -> sr.types.Step:
    """Trace a step of a few products, additions and sums, at times with a loop and gradients."""
    rng = random.Random(seed)
    tree, stages = _stages(rng)
    rows, width = rng.choice((64, 1024, 65536)), next(iter(tree.values())).shape[-2]

    def forward(params: Params, x: jax.Array) -> jax.Array:
        for stage in stages:
            x = stage(params, x)
        return jnp.sum(x * x)

    def train(params: Params, x: jax.Array) -> Any:
        grads = jax.grad(forward)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    step: Callable[..., Any] = train if rng.random() < 0.6 else forward
    if rng.random() < 0.5:
        step = jax.jit(step, donate_argnums=0 if step is train else ())
    shape = (rows, rng.choice((512, 768)), width) if rng.random() < 0.3 else (rows, width)
    return sr.trace(step, tree, jax.ShapeDtypeStruct(shape, "float32"))


def _stages(rng: random.Random) -> tuple[dict[str, Any], list[Callable[..., jax.Array]]]:
    tree: dict[str, Any] = {}
    stages: list[Callable[..., jax.Array]] = []
    width = rng.choice(SIZES)
    for place in range(rng.randint(1, 2)):
        hidden, name = rng.choice(SIZES), f"w{place}"
        kind = rng.choice(("product", "mlp", "loop", "gated", "norm"))
        if kind in ("product", "norm"):
            tree[name] = _leaf(width, hidden)
            stages.append(_product(name, is_normed=kind == "norm"))
            width = hidden
        elif kind == "loop":
            tree |= {name: _leaf(3, width, hidden), f"{name}b": _leaf(3, hidden, width)}
            stages.append(_loop(name, is_recomputed=rng.random() < 0.5))
        else:
            tree |= {name: _leaf(width, hidden), f"{name}b": _leaf(hidden, width)}
            if kind == "gated":
                tree[f"{name}c"] = _leaf(width, hidden)
            stages.append(_mlp(name, is_gated=kind == "gated"))
    return tree, stages


def _leaf(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


def _product(name: str, *, is_normed: bool) -> Callable[..., jax.Array]:
    def stage(params: Params, x: jax.Array) -> jax.Array:
        y = x @ params[name]
        return y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True)) if is_normed else jnp.tanh(y)

    return stage


def _mlp(name: str, *, is_gated: bool) -> Callable[..., jax.Array]:
    def stage(params: Params, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(x @ params[name])
        y = y * (x @ params[f"{name}c"]) if is_gated else y
        return x + y @ params[f"{name}b"]

    return stage


def _loop(name: str, *, is_recomputed: bool) -> Callable[..., jax.Array]:
    def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    def stage(params: Params, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(layer) if is_recomputed else layer
        return lax.scan(body, x, (params[name], params[f"{name}b"]))[0]

    return stage
