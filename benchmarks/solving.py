"""Compares solved layouts with FSDP, and with those that experts write, by the TPU's compiler.

    python -m benchmarks.solving                                  # the table of docs/solve.md
    python -m benchmarks.solving --steps "Mixtral 8x7B" --on v5e:4x4

It needs libtpu, and prints each row when it is known. A step is traced under an expert's layout, so
that this, as FSDP, is among the compiled candidates: all are priced by one rule.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.blocks import attention, block, decoder, perceptron, rms_norm
from tests.steps.model import Case, arrays, stacked

LENGTH = 4096
"""Tokens of a sequence; each device has one."""
STATE = 0.4
"""Of the memory of all devices, what parameters and the optimizer's state may take; a step has so
many layers."""
BYTES = 10
"""Of a parameter, in bfloat16, with two moments in float32."""
AXES = ("fsdp", "tp")
HEAD = 128


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder; of experts 0 without them, of heads 0 with a recurrence."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv: int
    words: int
    experts: int = 0
    chosen: int = 0


STEPS = {
    "Llama-3 8B": (Sizes(32, 4096, 14336, 32, 8, 128256), "v5p:2x2x4"),
    "Qwen3-MoE 235B": (Sizes(94, 4096, 1536, 64, 4, 151936, 128, 8), "v5p:4x4x4"),
    "DeepSeek-V3-like": (Sizes(58, 7168, 2048, 128, 128, 129280, 256, 8), "v5p:8x8x8"),
    "Mixtral 8x7B": (Sizes(32, 4096, 14336, 32, 8, 32000, 8, 2), "v5e:4x4"),
    "Mamba-like 2.8B": (Sizes(64, 2560, 5120, 0, 0, 50280), "v5e:4x4"),
}
# Megatron's columns and rows over tp, the other side over fsdp, as in MaxText's default rules
# (embed: fsdp; heads, mlp, vocab: tensor), EasyDeL's models and the scaling book.
RULES = [
    ("embed$", ("tp", "fsdp")),
    ("head$", ("fsdp", "tp")),
    ("router|norm|decay", ()),
    ("/[kv]$", (None, "fsdp")),
    ("experts_(up|gate)", (None, None, "fsdp", "tp")),
    ("experts_down", (None, None, "tp", "fsdp")),
    ("/o$", (None, "tp", None, "fsdp")),
    ("/(out|down)$", (None, "tp", "fsdp")),
    (".*", (None, "fsdp", "tp")),
]
PLACES = {
    "residual": P("fsdp"),
    "hidden": P("fsdp", None, "tp"),
    "heads": P("fsdp", None, "tp"),
    "keys": None,
    "dispatched": P("fsdp"),
    "logits": P("fsdp", None, "tp"),
}


def on_slice(sizes: Sizes, topology: sr.Topology) -> Sizes:
    """Return a decoder with the layers that there is room for."""
    room = STATE * topology.device_count * topology.hardware.memory_bytes / BYTES
    once, twice = (
        sum(prod(leaf.shape) for leaf in jax.tree.leaves(shapes(replace(sizes, layers=layers))))
        for layers in (1, 2)
    )
    return replace(sizes, layers=min(sizes.layers, int((room - once) / (twice - once)) + 1))


def shapes(sizes: Sizes) -> Any:
    """Return the parameters, in bfloat16; layers are stacked."""
    width, hidden = sizes.width, sizes.hidden
    layer: dict[str, tuple[int, ...]] = {"norm1": (width,), "norm2": (width,)}
    if sizes.heads:
        layer |= {"q": (width, sizes.heads, HEAD), "o": (sizes.heads, HEAD, width)}
        layer |= dict.fromkeys("kv", (width, sizes.kv, HEAD))
    else:
        layer |= {"into": (width, hidden), "turn": (width, hidden), "out": (hidden, width)}
        layer |= {"decay": (hidden,)}
    if sizes.experts:
        layer |= dict.fromkeys(("experts_up", "experts_gate"), (sizes.experts, width, hidden))
        layer |= {"experts_down": (sizes.experts, hidden, width), "router": (width, sizes.experts)}
    elif sizes.heads:
        layer |= dict.fromkeys(("up", "gate"), (width, hidden)) | {"down": (hidden, width)}
    ends = {"embed": (sizes.words, width), "norm": (width,), "head": (width, sizes.words)}
    return arrays(ends, "bfloat16") | {"layers": stacked(sizes.layers, layer, "bfloat16")}


def recurrent(case: Case, x: Any, w: Any) -> tuple[Any, Any]:
    """Mix tokens by a linear recurrence of each channel, as in Mamba; for a scan."""
    y = rms_norm(x, w["norm1"])
    inputs, decay = case.cut(y @ w["into"], "hidden"), jax.nn.sigmoid(w["decay"])

    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    pairs = jnp.broadcast_to(decay, inputs.shape), inputs
    _, states = jax.lax.associative_scan(combine, pairs, axis=1)
    mixed = states * jax.nn.silu(case.cut(y @ w["turn"], "hidden"))
    return case.cut(x + mixed @ w["out"], "residual"), None


def routed(chosen: int, case: Case, x: Any, w: Any) -> Any:
    """Send each token to some experts, each with room for its share of the tokens of a sequence."""
    rows, length, width = x.shape
    room = -(-length * chosen // w["router"].shape[-1])
    weights, tokens = jax.lax.top_k(jax.nn.softmax(x @ w["router"]).swapaxes(1, 2), room)
    taken = jnp.take_along_axis(x[:, None], tokens[..., None], 2)
    taken = case.cut(taken, "dispatched")
    hidden = jnp.einsum("betd,edf->betf", taken, w["experts_up"])
    hidden = hidden * jax.nn.silu(jnp.einsum("betd,edf->betf", taken, w["experts_gate"]))
    made = case.cut(jnp.einsum("betf,efd->betd", hidden, w["experts_down"]), "dispatched")
    return jax.vmap(lambda t, m: jnp.zeros(x.shape[1:], x.dtype).at[t].add(m))(
        tokens.reshape(rows, -1), (made * weights[..., None]).reshape(rows, -1, width)
    )


def traced(sizes: Sizes, axis_sizes: dict[str, int]) -> sr.types.Step:
    """Trace a step of Adam on a mesh, with the constraints of an expert."""
    automatic = (AxisType.Auto,) * len(axis_sizes)
    mesh = AbstractMesh(tuple(axis_sizes.values()), tuple(axis_sizes), axis_types=automatic)
    case: Any = Case(mesh, PLACES)  # type: ignore[arg-type]
    perceptrons = partial(routed, sizes.chosen) if sizes.experts else perceptron
    layer = partial(block, attention=attention, perceptron=perceptrons)

    def loss(params: Any, tokens: Any) -> Any:
        batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)}
        return decoder(case, params, batch, layer if sizes.heads else recurrent)[0]

    def train(state: Any, tokens: Any) -> Any:
        params, grads = state["params"], jax.grad(loss)(state["params"], tokens)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], grads)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["second"], grads)
        step = jax.tree.map(lambda m, v: 1e-4 * m / (jnp.sqrt(v) + 1e-8), first, second)
        params = jax.tree.map(lambda p, s: (p - s).astype(p.dtype), params, step)
        return {"params": params, "first": first, "second": second}

    params = shapes(sizes)
    moments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), params)
    plan = sr.plan({"params": params, "first": moments, "second": moments}, RULES, mesh)
    rows, cuts = prod(axis_sizes.values()), NamedSharding(mesh, P("fsdp"))
    tokens = jax.ShapeDtypeStruct((rows, LENGTH), "int32", sharding=cuts)
    return sr.trace(jax.jit(train, donate_argnums=0), plan, tokens)


HEADS = ("step", "slice", "layers", "mesh", "clock", "processor", "gap", "answer",
         "the best by prediction", "as in the program", "FSDP", "sent", "predicted", "memory",
         "predicted")  # fmt: skip


def solved(name: str, slice_: str) -> list[str]:
    """Solve a step, which compiles the ten best; return a row of the table."""
    topology = sr.Topology(slice_)
    sizes = on_slice(STEPS[name][0], topology)
    meshes = topology.meshes(AXES)
    step = traced(sizes, meshes[len(meshes) // 2])
    begin = time.perf_counter(), time.process_time()
    solution = sr.solve(step, topology)
    took = time.perf_counter() - begin[0], time.process_time() - begin[1]
    answer, *_ = solution.candidates
    by_name = {row.what: row.compiled for row in solution.candidates}
    cells = [name, slice_, str(sizes.layers), "x".join(map(str, answer.mesh.values()))]
    cells += [f"{took[0]:.0f} s", f"{took[1]:.0f} s", f"{solution.gap:.1%}"]
    costs = (answer.compiled, *map(by_name.get, HEADS[8:11]))
    cells += [f"{cost.seconds:.3g} s" if cost else "" for cost in costs]
    both = [cost for cost in (answer.compiled, answer.predicted) if cost]
    cells += [f"{cost.sent_in_all / 1e9:.3g} GB" for cost in both]
    return cells + [f"{cost.memory / 1e9:.3g} GB" for cost in both]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", nargs="*", choices=STEPS, default=list(STEPS))
    parser.add_argument("--on", help="a slice, in place of that of each step")
    options = parser.parse_args()
    print("|", " | ".join(HEADS), "|\n|---|---|--:|---|" + "--:|" * (len(HEADS) - 4))
    for name in options.steps:
        print("|", " | ".join(solved(name, options.on or STEPS[name][1])), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
