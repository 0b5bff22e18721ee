"""Proves a step of Llama 3.1 405B for 512 TPUs v5p, on a machine that has none of them.

    pip install '.[tpu]'  # in a clone
    shardrules prove examples.prove_405b:step_on --on v5p:8x8x8 --mesh fsdp=64,tp=8

`step_on` takes the mesh of described devices, and returns the step, its arguments, and what is
planned for its results. Run as a program, `make demo`'s last, it asks XLA for CPU where libtpu is
missing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

LAYERS, WIDTH, HIDDEN, HEADS, KV, SIZE, VOCAB = 126, 16384, 53248, 128, 8, 128, 128256
ROWS, LENGTH = 64, 4096
RULES = [
    ("embed", P("tp", "fsdp")),
    ("head", P("fsdp", "tp")),
    ("(q|k|v)$", P(None, "fsdp", "tp", None)),
    ("o$", P(None, "tp", None, "fsdp")),
    ("gate|up", P(None, "fsdp", "tp")),
    ("down", P(None, "tp", "fsdp")),
    ("norm", P()),
]


def parameters() -> dict[str, Any]:
    """Return the shapes: of each kernel one stack for all layers."""

    def stack(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((LAYERS, *shape), "bfloat16")

    layers = {
        "norm1": stack(WIDTH),
        "q": stack(WIDTH, HEADS, SIZE),
        "k": stack(WIDTH, KV, SIZE),
        "v": stack(WIDTH, KV, SIZE),
        "o": stack(HEADS, SIZE, WIDTH),
        "norm2": stack(WIDTH),
        "gate": stack(WIDTH, HIDDEN),
        "up": stack(WIDTH, HIDDEN),
        "down": stack(HIDDEN, WIDTH),
    }
    return {
        "embed": jax.ShapeDtypeStruct((VOCAB, WIDTH), "bfloat16"),
        "layers": layers,
        "norm": jax.ShapeDtypeStruct((WIDTH,), "bfloat16"),
        "head": jax.ShapeDtypeStruct((WIDTH, VOCAB), "bfloat16"),
    }


def cut(x: jax.Array, *spec: str | None) -> jax.Array:
    """Constrain an activation by the mesh that `shardrules.prove` compiles for."""
    return jax.lax.with_sharding_constraint(x, P(*spec))


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Scale by the root of the mean square."""
    mean = jnp.mean(jnp.square(x.astype("float32")), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype) * scale


def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """One layer, whose hidden activations are sharded by tp; rotations are left out."""
    y = normed(x, w["norm1"])
    q = cut(jnp.einsum("btd,dhk->bthk", y, w["q"]), "fsdp", None, "tp")
    k = cut(jnp.einsum("btd,dhk->bthk", y, w["k"]), "fsdp", None, "tp")
    v = cut(jnp.einsum("btd,dhk->bthk", y, w["v"]), "fsdp", None, "tp")
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = cut(x + jnp.einsum("bthk,hkd->btd", mixed, w["o"]), "fsdp")
    y = normed(x, w["norm2"])
    hidden = cut(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), "fsdp", None, "tp")
    return cut(x + hidden @ w["down"], "fsdp"), None


def loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Cross entropy of the next tokens."""
    x = cut(params["embed"][tokens], "fsdp")
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = cut(normed(x, params["norm"]) @ params["head"], "fsdp", None, "tp")
    logits = logits[:, :-1].astype("float32")
    of_next = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - of_next)


def train(state: dict[str, Any], tokens: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """Adam, without its corrections."""
    value, gradients = jax.value_and_grad(loss)(state["params"], tokens)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], gradients)
    nu = jax.tree.map(lambda n, g: 0.95 * n + 0.05 * g * g, state["nu"], gradients)
    params = jax.tree.map(
        lambda p, m, n: p - 1e-4 * m / (jnp.sqrt(n) + 1e-8), state["params"], mu, nu
    )
    return {"params": params, "mu": mu, "nu": nu}, value


def step_on(mesh: Mesh | AbstractMesh) -> tuple[Any, tuple[Any, ...], Any]:
    """Return the step, its arguments, and what is planned for its results."""
    params = parameters()
    plan = sr.plan({"params": params, "mu": params, "nu": params}, RULES, mesh)
    step = jax.jit(train, donate_argnums=0, out_shardings=(plan.shardings(), None))
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), "int32", sharding=NamedSharding(mesh, P("fsdp")))
    return step, (plan, tokens), (plan, None)


def main() -> None:
    """Print what the TPU's compiler makes of it; without libtpu, what XLA for CPU does."""
    sizes = {"fsdp": 64, "tp": 8}
    try:
        mesh = sr.Topology("v5p:8x8x8").mesh(sizes)
    except ImportError as error:
        print(error)
        types = (AxisType.Auto, AxisType.Auto)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    step, args, outputs = step_on(mesh)
    print(sr.prove(step, *args, on=mesh, outputs=outputs))


if __name__ == "__main__":
    main()
