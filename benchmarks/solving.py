"""Compares solved layouts with FSDP, and with those that experts write, by the TPU's compiler.

    python -m benchmarks.solving solving.jsonl                # all steps and slices
    python -m benchmarks.solving solving.jsonl --models DiT-XL --on v5p:4x4x4
    python -m benchmarks.solving solving.jsonl --table

Each row is added to the file when it is known, and what the file has is not done again. It needs
libtpu. A step is traced under an expert's layout, so that this, as FSDP, is among the compiled
candidates: all are priced by one rule.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

TOPOLOGIES = ("v5e:4x4", "v6e:4x4", "v5p:2x2x4", "v5p:4x4x4")
TOKENS = 4096
"""Of a device in a step."""
STATE = 0.4
"""Of the memory of all devices, what parameters and the optimizer's state may take; a step has so
many layers."""
BYTES = 10
"""Of a parameter, in bfloat16, with two moments in float32."""
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
    rows: int = 1
    """Sequences of a step on all devices."""
    experts: int = 0
    chosen: int = 0
    is_causal: bool = True
    has_scan: bool = False
    """Whether tokens are mixed by a linear recurrence, as in Mamba, and not by attention."""


MODELS = {
    "Llama-3 8B": Model(32, 4096, 14336, 32, 8, 128256, 4096),
    "Llama-3 70B": Model(80, 8192, 28672, 64, 8, 128256, 4096),
    "Llama-3 405B": Model(126, 16384, 53248, 128, 8, 128256, 4096),
    "Mixtral 8x7B": Model(32, 4096, 14336, 32, 8, 32000, 4096, experts=8, chosen=2),
    "DeepSeek-V3-like": Model(58, 7168, 2048, 128, 128, 129280, 4096, experts=256, chosen=8),
    "Qwen3-MoE 235B": Model(94, 4096, 1536, 64, 4, 151936, 4096, experts=128, chosen=8),
    "Gemma 9B": Model(42, 3584, 14336, 16, 8, 256000, 4096),
    "ViT-22B": Model(48, 6144, 24576, 48, 48, 0, 256, is_causal=False),
    "DiT-XL": Model(28, 1152, 4608, 9, 9, 0, 1024, is_causal=False),
    "Mamba-like 2.8B": Model(64, 2560, 5120, 0, 0, 50280, 4096, has_scan=True),
}


def on_slice(model: Model, topology: sr.Topology) -> Model:
    """Return the step of so many tokens for each device, with the layers that there is room for."""
    devices = topology.device_count
    room = STATE * devices * topology.hardware.memory_bytes / BYTES

    def parameters(layers: int) -> int:
        leaves = jax.tree.leaves(shapes(replace(model, layers=layers)))
        return sum(prod(leaf.shape) for leaf in leaves)

    once = parameters(1)
    many = int((room - once) / (parameters(2) - once)) + 1
    rows = devices * max(1, TOKENS // model.length)
    return replace(model, layers=max(1, min(model.layers, many)), rows=rows)


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
# (embed: fsdp; heads, mlp, vocab: tensor), EasyDeL's models and the scaling book.
MIXED = [
    ("embed$", ("tp", "fsdp")),
    ("head$", ("fsdp", "tp")),
    ("router|norm|decay", ()),
    ("experts/(up|gate)", (None, None, "fsdp", "tp")),
    ("experts/down", (None, None, "tp", "fsdp")),
    ("/(o|out|down)$", (None, "tp", "fsdp")),
    (".*", (None, "fsdp", "tp")),
]
ACTIVATIONS = {
    "stream": P("fsdp"),
    "hidden": P("fsdp", None, "tp"),
    "heads": P("fsdp", None, "tp"),
    "experts": P("fsdp"),
    "logits": P("fsdp", None, "tp"),
}


def traced(model: Model, sizes: Mapping[str, int]) -> sr.types.Step:
    """Trace the step on a mesh, with the constraints of an expert."""
    automatic = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic)

    def cut(x: Any, what: str) -> Any:
        return with_sharding_constraint(x, fitting(ACTIVATIONS[what], x.shape, sizes))

    params = shapes(model)
    moments = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, "float32"), params)
    plan = sr.plan({"params": params, "first": moments, "second": moments}, MIXED, mesh)
    shape = (model.rows, model.length) if model.words else (model.rows, model.length, model.width)
    dtype, cuts = "int32" if model.words else "bfloat16", NamedSharding(mesh, P("fsdp"))
    data = jax.ShapeDtypeStruct(shape, dtype, sharding=cuts)
    return sr.trace(jax.jit(partial(train, model, cut), donate_argnums=0), plan, data)


def fitting(spec: Any, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Any:
    """Leave out the axes that do not divide a dimension, such as tp and few KV heads."""
    entries = []
    for size, entry in zip(shape, (*spec, *[None] * len(shape)), strict=False):
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        while size % prod(sizes[axis] for axis in axes):
            axes = axes[:-1]
        entries.append(axes or None)
    return P(*entries)


def solved(name: str, slice_: str, limit: float) -> dict[str, Any]:
    """Solve a step, which compiles the ten best."""
    topology = sr.Topology(slice_)
    model = on_slice(MODELS[name], topology)
    meshes = topology.meshes(AXES)
    step = traced(model, meshes[len(meshes) // 2])
    begin = time.perf_counter(), time.process_time()
    solution = sr.solve(step, topology, time_limit=limit)
    took = time.perf_counter() - begin[0], time.process_time() - begin[1]
    candidates = [
        row._asdict()
        | {side: cost and cost._asdict() | {"sent": cost.sent_in_all}
           for side, cost in (("predicted", row.predicted), ("compiled", row.compiled))}
        for row in solution.candidates
    ]  # fmt: skip
    return {
        "wall": took[0],
        "processor": took[1],
        "layers": model.layers,
        "gap": solution.gap,
        "rules": len(solution.rules),
        "candidates": candidates,
    }


def known(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Read the results that there are; of two the last."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["step"], row["slice"]): row for row in rows}


def run(options: argparse.Namespace) -> None:
    """Solve what the file does not have."""
    for slice_ in options.on:
        for name in options.models:
            if (name, slice_) in known(options.file):
                continue
            try:
                row = solved(name, slice_, options.limit)
            except ValueError as error:  # nothing fits: a row of the table
                row = {"error": str(error).partition("\n")[0]}
            with options.file.open("a") as out:
                out.write(json.dumps({"step": name, "slice": slice_, **row}) + "\n")
            print(f"{name} {slice_}: {row.get('wall', 0):.0f} s {row.get('error', '')}", flush=True)


HEADS = ("step", "slice", "layers", "mesh", "seconds to solve", "gap", "answer",
         "the best by prediction", "as in the program", "FSDP", "sent", "predicted", "memory",
         "predicted")  # fmt: skip


def table(options: argparse.Namespace) -> None:
    """Print answers, beside the best by prediction, the expert's layout and FSDP, as compiled."""
    print("|", " | ".join(HEADS), "|\n|---|---|--:|---|" + "--:|" * (len(HEADS) - 4))
    for (name, slice_), row in known(options.file).items():
        if "error" in row:
            print("|", " | ".join([name, slice_, "", row["error"], *[""] * 10]), "|")
            continue
        answer, *_ = row["candidates"]
        whats = {each["what"]: each["compiled"] for each in row["candidates"]}
        cells = [name, slice_, str(row["layers"]), "x".join(map(str, answer["mesh"].values()))]
        cells += [f"{row['wall']:.0f}", f"{row['gap']:.1%}"]
        shown = (answer["compiled"], *(whats.get(what) for what in HEADS[7:10]))
        cells += [f"{cost['seconds']:.3g} s" if cost else "" for cost in shown]
        for what in ("sent", "memory"):
            cells += [f"{answer[side][what] / 1e9:.3g} GB" for side in ("compiled", "predicted")]
        print("|", " | ".join(cells), "|")


def main() -> int:
    """Solve what is missing in the file, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="JSON lines, one for each row")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--on", nargs="*", default=list(TOPOLOGIES))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a search")
    parser.add_argument("--table", action="store_true", help="print the table")
    options = parser.parse_args()
    if options.table:
        table(options)
    else:
        run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
