"""Compares solved layouts with FSDP, and with those that experts write, by the TPU's compiler.

    python -m benchmarks.solving                                  # the table of docs/evidence.md
    python -m benchmarks.solving --steps "Mixtral 8x7B" --on v5e:4x4

It needs libtpu, and prints each row when it is known. A step is traced under an expert's layout, so
that this, as FSDP, is among the compiled candidates: all are priced by one rule.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks.decoders import Decoder, Params, trained

STATE = 0.4
"""Of the memory of all devices, what parameters and the optimizer's state may take; a step has so
many layers."""
BYTES = 10
"""Of a parameter, in bfloat16, with two moments in float32."""
AXES = ("fsdp", "tp")


def routed(step: Decoder, x: jax.Array, w: Params) -> jax.Array:
    """Send each token to some experts, each with room for its share of the tokens of a sequence."""
    rows, length, width = x.shape
    room = -(-length * step.chosen // step.experts)
    weights, tokens = jax.lax.top_k(jax.nn.softmax(x @ w["router"]).swapaxes(1, 2), room)
    taken = step.cut(jnp.take_along_axis(x[:, None], tokens[..., None], 2))
    gate, up = (jnp.einsum("betd,edf->betf", taken, w["experts"][name]) for name in ("gate", "up"))
    made = step.cut(jnp.einsum("betf,efd->betd", jax.nn.silu(gate) * up, w["experts"]["down"]))
    return jax.vmap(lambda t, m: jnp.zeros(x.shape[1:], x.dtype).at[t].add(m))(
        tokens.reshape(rows, -1), (made * weights[..., None]).reshape(rows, -1, width)
    )


class Recurrent(Decoder):
    """Layers that mix tokens by a linear recurrence of each channel, as in Mamba."""

    @property
    def body(self) -> list[Params]:
        """Shapes of a layer."""
        both = dict.fromkeys(("gate", "up"), (self.width, self.hidden))
        ends: Params = {"norm1": (self.width,), "norm2": (self.width,), "decay": (self.hidden,)}
        return [ends | both | {"down": (self.hidden, self.width)}]

    def attention(self, x: jax.Array, w: Params, cache: Any, place: Any) -> tuple[jax.Array, Any]:
        """Mix the tokens of each sequence."""
        inputs, decay = self.cut(x @ w["up"], None, self.tp), jax.nn.sigmoid(w["decay"])

        def combine(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        pairs = jnp.broadcast_to(decay, inputs.shape), inputs
        _, states = jax.lax.associative_scan(combine, pairs, axis=1)
        return (states * jax.nn.silu(self.cut(x @ w["gate"], None, self.tp))) @ w["down"], cache

    def rules(self) -> list[tuple[str, P]]:
        """Shard the decays like what they are of."""
        return [("decay", P(None, self.tp)), *super().rules()]


MADE = partial(Decoder, dtype="bfloat16", send=routed)
STEPS = {
    "Llama-3 8B": (MADE(32, 4096, 14336, 32, 8, 128256), "v5p:2x2x4"),
    "Qwen3-MoE 235B": (MADE(94, 4096, 1536, 64, 4, 151936, experts=128, chosen=8), "v5p:4x4x4"),
    "DeepSeek-V3-like": (
        MADE(58, 7168, 2048, 128, 128, 129280, experts=256, chosen=8), "v5p:8x8x8",
    ),
    "Mixtral 8x7B": (MADE(32, 4096, 14336, 32, 8, 32000, experts=8, chosen=2), "v5e:4x4"),
    "Mamba-like 2.8B": (Recurrent(64, 2560, 5120, 0, 0, 50280, dtype="bfloat16"), "v5e:4x4"),
}  # fmt: skip


def on_slice(step: Decoder, topology: sr.Topology) -> Decoder:
    """Return a decoder with the layers that there is room for."""
    room = STATE * topology.device_count * topology.hardware.memory_bytes / BYTES
    once, twice = (
        sum(prod(leaf.shape) for leaf in jax.tree.leaves(replace(step, layers=layers).params))
        for layers in (1, 2)
    )
    return replace(step, layers=min(step.layers, int((room - once) / (twice - once)) + 1))


def traced(step: Decoder, axes: dict[str, int]) -> sr.types.Step:
    """Trace a step of Adam on a mesh, with the constraints of an expert, a sequence a device."""
    automatic = (AxisType.Auto,) * len(axes)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=automatic)
    step = replace(step, axes=axes)
    jitted = jax.jit(partial(trained, step.loss), donate_argnums=0)
    return sr.trace(jitted, step.planned(step.params, mesh), step.tokens(mesh, 1))


HEADS = ("step", "slice", "layers", "mesh", "clock", "processor", "gap", "answer",
         "the best by prediction", "as in the program", "FSDP", "sent", "predicted", "memory",
         "predicted")  # fmt: skip


def solved(name: str, slice_: str) -> list[str]:
    """Solve a step, which compiles the ten best; return a row of the table."""
    topology = sr.Topology(slice_)
    model, meshes = on_slice(STEPS[name][0], topology), topology.meshes(AXES)
    step = traced(model, meshes[len(meshes) // 2])
    begin = time.perf_counter(), time.process_time()
    solution = sr.solve(step, topology)
    took = time.perf_counter() - begin[0], time.process_time() - begin[1]
    answer, *_ = solution.candidates
    by_name = {row.what: row.compiled for row in solution.candidates}
    cells = [name, slice_, str(model.layers), "x".join(map(str, answer.mesh.values()))]
    cells += [f"{took[0]:.0f} s", f"{took[1]:.0f} s", f"{solution.gap:.1%}"]
    costs = (answer.compiled, *map(by_name.get, HEADS[8:11]))
    cells += [f"{cost.seconds:.3g} s" if cost else "" for cost in costs]
    both = [cost for cost in (answer.compiled, answer.predicted) if cost]
    cells += [f"{sum(cost.sent.values()) / 1e9:.3g} GB" for cost in both]
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
