"""Compares solved layouts with those that experts write, for the same steps and slices.

    python -m benchmarks.solving                        # all steps and slices
    python -m benchmarks.solving --models DiT-XL --on v5p:4x4x4

It needs libtpu for the slices. docs/solve.md has what it prints.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

TOPOLOGIES = ("v5p:4x4x4", "v5p:8x8x8", "v6e:8x8", "v5e:16x16")
AXES = ("fsdp", "tp")
HEAD = 128
Params = dict[str, Any]
Cut = Callable[[Any, str], Any]
"""Constrains an array by what it is: "stream", "hidden", "heads", "experts" or "logits"."""


@dataclass(frozen=True)
class Model:
    """Sizes of a step; those of experts, words and heads are 0 without them."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv: int
    words: int
    length: int
    rows: int
    """Sequences of a step on all devices."""
    experts: int = 0
    chosen: int = 0
    is_causal: bool = True
    has_scan: bool = False
    """Whether tokens are mixed by a linear recurrence, as in Mamba, and not by attention."""


MODELS = {
    "Llama-3 8B": Model(32, 4096, 14336, 32, 8, 128256, 8192, 256),
    "Llama-3 70B": Model(80, 8192, 28672, 64, 8, 128256, 8192, 256),
    "Llama-3 405B": Model(126, 16384, 53248, 128, 8, 128256, 8192, 256),
    "Mixtral 8x7B": Model(32, 4096, 14336, 32, 8, 32000, 4096, 256, experts=8, chosen=2),
    "DeepSeek-V3-like": Model(58, 7168, 2048, 128, 128, 129280, 4096, 256, experts=256, chosen=8),
    "Qwen3-MoE 235B": Model(94, 4096, 1536, 64, 4, 151936, 4096, 256, experts=128, chosen=8),
    "Gemma 9B": Model(42, 3584, 14336, 16, 8, 256000, 8192, 256),
    "ViT-22B": Model(48, 6144, 24576, 48, 48, 0, 256, 4096, is_causal=False),
    "DiT-XL": Model(28, 1152, 4608, 9, 9, 0, 1024, 256, is_causal=False),
    "Mamba-like 2.8B": Model(64, 2560, 5120, 0, 0, 50280, 4096, 256, has_scan=True),
}


def shapes(model: Model) -> Params:
    """Return the parameters, in bfloat16; layers are stacked."""

    def leaf(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, "bfloat16")

    n, width, hidden = model.layers, model.width, model.hidden
    layers: Params = {"norm": {"scale": leaf(n, width)}}
    if model.has_scan:
        layers["mixer"] = {
            "in": leaf(n, width, hidden),
            "decay": leaf(n, hidden),
            "gate": leaf(n, width, hidden),
            "out": leaf(n, hidden, width),
        }
    else:
        queries, keys = model.heads * HEAD, model.kv * HEAD
        layers["attention"] = {"q": leaf(n, width, queries), "k": leaf(n, width, keys),
                               "v": leaf(n, width, keys), "o": leaf(n, queries, width)}  # fmt: skip
        many = (model.experts,) if model.experts else ()
        layers["experts" if many else "mlp"] = {
            "up": leaf(n, *many, width, hidden),
            "gate": leaf(n, *many, width, hidden),
            "down": leaf(n, *many, hidden, width),
        }
    if model.experts:
        layers["router"] = {"kernel": leaf(n, width, model.experts)}
    ends: Params = {"norm": {"scale": leaf(width)}}
    if model.words:
        ends |= {"embed": leaf(model.words, width), "head": leaf(width, model.words)}
    return {"layers": layers, "ends": ends}


def normed(x: Any, scale: Any) -> Any:
    """Divide by the root of the mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attention(model: Model, cut: Cut, w: Params, x: Any) -> Any:
    """Mix tokens by attention with grouped heads."""
    rows, length, _ = x.shape
    q = cut((x @ w["q"]).reshape(rows, length, model.kv, -1, HEAD), "heads")
    k = cut((x @ w["k"]).reshape(rows, length, model.kv, HEAD), "heads")
    v = cut((x @ w["v"]).reshape(rows, length, model.kv, HEAD), "heads")
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k)
    if model.is_causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores), v)
    return mixed.reshape(rows, length, -1) @ w["o"]


def recurrence(cut: Cut, w: Params, x: Any) -> Any:
    """Mix tokens by a linear recurrence of each channel."""
    inputs = cut(x @ w["in"], "hidden")
    decay = jax.nn.sigmoid(w["decay"])

    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    _, states = jax.lax.associative_scan(
        combine, (jnp.broadcast_to(decay, inputs.shape), inputs), axis=1
    )
    return (states * jax.nn.silu(cut(x @ w["gate"], "hidden"))) @ w["out"]


def mlp(cut: Cut, w: Params, x: Any) -> Any:
    """Apply a gated MLP."""
    return (jax.nn.silu(cut(x @ w["gate"], "hidden")) * cut(x @ w["up"], "hidden")) @ w["down"]


def experts(model: Model, cut: Cut, w: Params, router: Any, x: Any) -> Any:
    """Send each token to some experts, each with room for its share of the tokens of a sequence."""
    rows, length, _ = x.shape
    room = -(-length * model.chosen // model.experts)
    chances = jax.nn.softmax(x @ router)
    weights, tokens = jax.lax.top_k(chances.swapaxes(1, 2), room)
    taken = jnp.take_along_axis(x[:, None], tokens[..., None], 2)
    taken = cut(taken, "experts")
    hidden = jnp.einsum("betd,edf->betf", taken, w["up"])
    hidden = hidden * jax.nn.silu(jnp.einsum("betd,edf->betf", taken, w["gate"]))
    made = cut(jnp.einsum("betf,efd->betd", hidden, w["down"]), "experts") * weights[..., None]
    return jax.vmap(lambda t, m: jnp.zeros(x.shape[1:], x.dtype).at[t].add(m))(
        tokens.reshape(rows, -1), made.reshape(rows, -1, x.shape[-1])
    )


def loss(model: Model, cut: Cut, params: Params, data: Any) -> Any:
    """Apply all layers; with words the cross entropy of the next ones."""
    ends = params["ends"]
    x = cut(ends["embed"][data] if model.words else data, "stream")

    def layer(x: Any, w: Params) -> Any:
        y = normed(x, w["norm"]["scale"])
        if model.has_scan:
            return cut(x + recurrence(cut, w["mixer"], y), "stream"), None
        x = cut(x + attention(model, cut, w["attention"], y), "stream")
        y = normed(x, w["norm"]["scale"])
        if model.experts:
            made = experts(model, cut, w["experts"], w["router"]["kernel"], y)
        else:
            made = mlp(cut, w["mlp"], y)
        return cut(x + made, "stream"), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    x = normed(x, ends["norm"]["scale"])
    if not model.words:
        return jnp.mean(jnp.square(x))
    logits = cut(x @ ends["head"], "logits")
    of_next = jnp.take_along_axis(logits, jnp.roll(data, -1, 1)[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - of_next)


def train(model: Model, cut: Cut, state: Params, data: Any) -> Params:
    """Update the parameters by Adam."""
    params = state["params"]
    grads = jax.grad(partial(loss, model, cut))(params, data)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], grads)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["second"], grads)
    updated = jax.tree.map(
        lambda p, m, v: (p - 1e-4 * m / (jnp.sqrt(v) + 1e-8)).astype(p.dtype), params, first, second
    )
    return {"params": updated, "first": first, "second": second}


# Megatron's columns and rows over tp, the other side over fsdp, as in MaxText's default rules
# (embed: fsdp; heads, mlp, vocab: tensor; experts: expert, here over fsdp) and EasyDeL's models.
WEIGHTS = [
    ("embed$", ("tp", "fsdp")),
    ("head$", ("fsdp", "tp")),
    ("router|norm|decay", ()),
    ("experts/(up|gate)", (None, "fsdp", None, "tp")),
    ("experts/down", (None, "fsdp", "tp", None)),
    ("/(o|out|down)$", (None, "tp", "fsdp")),
    (".*", (None, "fsdp", "tp")),
]
# EasyDeL keeps experts whole on each device of fsdp, and cuts their sides.
EASYDEL = [("experts/(up|gate)", (None, None, "fsdp", "tp")),
           ("experts/down", (None, None, "tp", "fsdp")), *WEIGHTS]  # fmt: skip
ACTIVATIONS = {
    "stream": P("fsdp"),
    "hidden": P("fsdp", None, "tp"),
    "heads": P("fsdp", None, "tp"),
    "experts": P("fsdp"),
    "logits": P("fsdp", None, "tp"),
}
FSDP = [("norm|decay", ()), ("embed$|head$", (AXES,)), (".*", (None, AXES))]
EXPERTS: dict[str, list[tuple[Any, Mapping[str, Any]]]] = {
    "MaxText": [(WEIGHTS, {**ACTIVATIONS, "experts": P(None, "fsdp")})],
    "EasyDeL": [(EASYDEL, ACTIVATIONS)],
    # Chapter "training": FSDP over all devices while the batch suffices, else mixed with tp.
    "scaling book": [(FSDP, dict.fromkeys(ACTIVATIONS, P(AXES))), (WEIGHTS, ACTIVATIONS)],
}


def traced(
    model: Model, sizes: Mapping[str, int], rules: Any, activations: Mapping[str, Any]
) -> tuple[sr.types.Step, sr.Plan]:
    """Trace the step on a mesh, with the constraints of an expert or without any."""
    automatic = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic)

    def cut(x: Any, what: str) -> Any:
        spec = activations.get(what)
        return x if spec is None else with_sharding_constraint(x, fitting(spec, x.shape, sizes))

    params = shapes(model)
    moments = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, "float32"), params)
    plan = sr.plan({"params": params, "first": moments, "second": moments}, rules, mesh)
    rows, length = model.rows, model.length
    shape, dtype = (
        ((rows, length), "int32") if model.words else ((rows, length, model.width), "bfloat16")
    )
    batch = activations.get("stream", P())
    data = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, batch))
    jitted = jax.jit(partial(train, model, cut), donate_argnums=0)
    return sr.trace(jitted, plan, data), plan


def fitting(spec: Any, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Any:
    """Leave out the axes that do not divide a dimension, such as tp and few KV heads."""
    entries = []
    for size, entry in zip(shape, (*spec, *[None] * len(shape)), strict=False):
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        while size % prod(sizes[axis] for axis in axes):
            axes = axes[:-1]
        entries.append(axes or None)
    return P(*entries)


@dataclass(frozen=True)
class Row:
    """Seconds of a step and bytes of a device, of a layout on its best mesh."""

    seconds: float
    bytes: int
    mesh: Mapping[str, int]
    fits: bool


def expert_row(model: Model, topology: sr.Topology, name: str) -> Row:
    """Return the best row of an expert's layout among the meshes that exist."""
    rows = []
    for sizes, (rules, activations) in product(topology.meshes(AXES), EXPERTS[name]):
        step, plan = traced(model, sizes, rules, activations)
        seconds = plan.step_time(step=step, hardware=topology.hardware).total
        memory = step.memory().peak
        rows.append(Row(seconds, memory, sizes, memory <= topology.hardware.memory_bytes))
    return min(rows, key=lambda row: (not row.fits, row.seconds))


def solved_row(model: Model, topology: sr.Topology, limit: float) -> tuple[Row, Any, float]:
    """Return the row of the solution, itself, and the seconds that it took."""
    meshes = topology.meshes(AXES)
    step, _ = traced(model, meshes[len(meshes) // 2], WEIGHTS, {})
    begin = time.perf_counter()
    solution = sr.solve(step, topology, time_limit=limit)
    took = time.perf_counter() - begin
    sizes = dict(solution.plan.axis_sizes)
    return Row(solution.time.total, solution.memory.peak, sizes, True), solution, took


def cell(row: Row) -> str:
    """Return seconds with the mesh; what does not fit in brackets."""
    text = f"{row.seconds:.2f} s, {row.mesh['fsdp']}x{row.mesh['tp']}"
    return text if row.fits else f"({text})"


def rows(models: list[str], topologies: list[str], limit: float) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each step on each slice."""
    for name in models:
        for slice_ in topologies:
            topology = sr.Topology(slice_)
            others = {expert: expert_row(MODELS[name], topology, expert) for expert in EXPERTS}
            fitting_rows = [row.seconds for row in others.values() if row.fits]
            try:
                mine, solution, took = solved_row(MODELS[name], topology, limit)
            except (ValueError, TimeoutError) as error:
                cells = [str(error).partition("\n")[0], "", "", "", ""]
            else:
                ratio = f"{mine.seconds / min(fitting_rows):.2f}" if fitting_rows else "alone fits"
                gap, rules = f"{solution.gap:.1%}", str(len(solution.rules))
                cells = [cell(mine), ratio, gap, f"{took:.0f} s", rules]
            yield (name, slice_, *map(cell, others.values()), *cells)


HEADS = ("step", "slice", *EXPERTS, "solved", "to the best", "gap", "in", "rules")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--on", nargs="*", default=list(TOPOLOGIES))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a solution")
    args = parser.parse_args()
    print("|", " | ".join(HEADS), "|\n|---|---|" + "--:|" * (len(HEADS) - 2), flush=True)
    for row in rows(args.models, args.on, args.limit):
        print("|", " | ".join(row), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
