"""The order of meshes by `Plan.sweep(step=)`, and by what the TPU's compiler makes of the step.

`python -m benchmarks.sweep_order` compiles each model for each mesh of each topology, which takes
minutes, and prints the rows and how many pairs of meshes are in the compiler's order. It needs
libtpu. `--models 2 --topologies 1` takes the first of each alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

TOPOLOGIES = ("v5e:2x4", "v6e:2x4", "v5p:2x2x2", "v5e:4x4")
# Times that differ by less are no order.
TIE = 0.05
RULES = [
    ("embed", ("tp", "fsdp")),
    ("head", ("fsdp", "tp")),
    ("router", (None, "fsdp")),
    ("experts/(gate|up)", (None, None, "fsdp", "tp")),
    ("experts/down", (None, None, "tp", "fsdp")),
    ("/(o|down)", (None, "tp", "fsdp")),
    ("layers", (None, "fsdp", "tp")),
]


class Model(NamedTuple):
    """Sizes of a decoder."""

    name: str
    width: int = 2048
    hidden: int = 5632
    heads: int = 16
    kv_heads: int = 16
    words: int = 32000
    length: int = 2048
    rows: int = 16
    experts: int = 0

    @property
    def size(self) -> int:
        """Of a head."""
        return self.width // self.heads


MODELS = (
    Model("dense"),
    Model("grouped heads", kv_heads=4),
    Model("wide", width=4096, hidden=11008, heads=32, kv_heads=8, length=1024),
    Model("experts", hidden=2048, experts=8, length=1024),
    Model("long", length=8192, rows=8),
    Model("small, large vocabulary", width=1024, hidden=2816, heads=8, kv_heads=8, words=128256),
)
LAYERS = 2


class Row(NamedTuple):
    """A model on a mesh: seconds by the sweep, and by the compiler."""

    model: str
    topology: str
    mesh: dict[str, int]
    estimated: float
    compiled: float


def tree_of(model: Model) -> Any:
    """Return the parameters as shapes."""

    def leaf(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    kernels = {"gate": (model.width, model.hidden), "up": (model.width, model.hidden)}
    kernels["down"] = (model.hidden, model.width)
    of_kv = (LAYERS, model.width, model.kv_heads * model.size)
    layers = {
        "q": leaf(LAYERS, model.width, model.width),
        "k": leaf(*of_kv),
        "v": leaf(*of_kv),
        "o": leaf(LAYERS, model.width, model.width),
    }
    if model.experts:
        layers["router"] = leaf(LAYERS, model.width, model.experts)
        made = {n: leaf(LAYERS, model.experts, *shape) for n, shape in kernels.items()}
        layers["experts"] = made
    else:
        layers |= {name: leaf(LAYERS, *shape) for name, shape in kernels.items()}
    return {
        "embed": leaf(model.words, model.width),
        "head": leaf(model.width, model.words),
        "layers": layers,
    }


def traced_on(model: Model, mesh: Any) -> sr.types.Step:
    """Trace a step of gradient descent on a mesh."""
    plan = sr.plan(tree_of(model), RULES, mesh)
    mesh = jax.tree.leaves(plan.shardings())[0].mesh

    def on(x: Any, *spec: Any) -> Any:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def mlp(x: Any, w: Any) -> Any:
        return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    def experts(x: Any, w: Any) -> Any:
        chances = jax.nn.softmax((x @ w["router"]).astype("float32")).astype(x.dtype)
        w = w["experts"]
        hidden = jax.nn.silu(jnp.einsum("btd,edh->beth", x, w["gate"]))
        hidden = hidden * jnp.einsum("btd,edh->beth", x, w["up"])
        return jnp.einsum("beth,ehd,bte->btd", hidden, w["down"], chances)

    def layer(x: Any, w: Any) -> Any:
        rows, length, _ = x.shape
        q = (x @ w["q"]).reshape(rows, length, model.kv_heads, -1, model.size)
        k, v = ((x @ w[n]).reshape(rows, length, model.kv_heads, model.size) for n in "kv")
        chances = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k))
        x = x + jnp.einsum("bkgts,bskd->btkgd", chances, v).reshape(x.shape) @ w["o"]
        x = on(x, "fsdp")
        return on(x + (experts if model.experts else mlp)(x, w), "fsdp"), None

    def loss(params: Any, tokens: Any) -> Any:
        x = on(params["embed"][tokens[:, :-1]], "fsdp")
        x, _ = lax.scan(jax.checkpoint(layer), x, params["layers"])
        logits = on(x @ params["head"], "fsdp", None, "tp").astype("float32")
        of_next = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - of_next)

    def train(params: Any, tokens: Any) -> Any:
        grads = jax.grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    spec = NamedSharding(mesh, P("fsdp"))
    tokens = jax.ShapeDtypeStruct((model.rows, model.length + 1), "int32", sharding=spec)
    jitted = jax.jit(train, donate_argnums=0, out_shardings=plan.shardings())
    return sr.trace(jitted, plan, tokens)


def compared(model: Model, topology: str) -> Iterator[Row]:
    """Yield a row for each mesh that the compiler does not refuse."""
    plan = sr.plan(tree_of(model), RULES, {"fsdp": 1, "tp": 1})
    rows = plan.sweep(devices=topology, step=partial(traced_on, model), prove=100)
    for row in rows:
        if row.time is not None and row.compiled not in (None, float("inf")):
            yield Row(model.name, topology, row.mesh, row.time.total, row.compiled or 0.0)


def in_order(rows: list[Row]) -> tuple[int, int]:
    """Return how many pairs of meshes of a model and topology are in order, of how many."""
    right = total = 0
    for first, second in combinations(rows, 2):
        if abs(first.compiled - second.compiled) > TIE * min(first.compiled, second.compiled):
            total += 1
            right += (first.estimated < second.estimated) == (first.compiled < second.compiled)
    return right, total


def main() -> None:
    """Print a row for each model and topology."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=len(MODELS))
    parser.add_argument("--topologies", type=int, default=len(TOPOLOGIES))
    options = parser.parse_args()
    sums = [0, 0]
    for topology in TOPOLOGIES[: options.topologies]:
        for model in MODELS[: options.models]:
            rows = list(compared(model, topology))
            right, total = in_order(rows)
            sums = [sums[0] + right, sums[1] + total]
            times = "; ".join(
                f"{','.join(map(str, row.mesh.values()))}: {row.estimated * 1e3:.1f}, "
                f"{row.compiled * 1e3:.1f} ms"
                for row in rows
            )
            print(f"| {model.name} | {topology} | {times} | {right} of {total} |", flush=True)
    print(f"{sums[0]} of {sums[1]} pairs in order")


if __name__ == "__main__":
    main()
