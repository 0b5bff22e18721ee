"""Compares solved layouts with FSDP, and with those that experts write, by the TPU's compiler.

    python -m benchmarks.solving                    # the table of docs/evidence.md
    python -m benchmarks.solving "Mixtral 8x7B"     # a row of it

It needs libtpu, and prints each row when it is known. A step is traced under an expert's layout, so
that this, as FSDP, is among the compiled candidates: all are priced by one rule.
"""

from __future__ import annotations

import sys
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
from shardrules._base.text import bytes_shown, seconds_shown

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
    inputs = step.cut(jnp.take_along_axis(x[:, None], tokens[..., None], 2))
    gate, up = (jnp.einsum("betd,edf->betf", inputs, w["experts"][name]) for name in ("gate", "up"))
    outputs = step.cut(jnp.einsum("betf,efd->betd", jax.nn.silu(gate) * up, w["experts"]["down"]))
    return jax.vmap(lambda t, m: jnp.zeros(x.shape[1:], x.dtype).at[t].add(m))(
        tokens.reshape(rows, -1), (outputs * weights[..., None]).reshape(rows, -1, width)
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


ROUTED = partial(Decoder, dtype="bfloat16", send=routed)
STEPS = {
    "Llama-3 8B": (ROUTED(32, 4096, 14336, 32, 8, 128256), "v5p:2x2x4"),
    "Qwen3-MoE 235B": (ROUTED(94, 4096, 1536, 64, 4, 151936, experts=128, chosen=8), "v5p:4x4x4"),
    "DeepSeek-V3-like": (
        ROUTED(58, 7168, 2048, 128, 128, 129280, experts=256, chosen=8), "v5p:8x8x8",
    ),
    "Mixtral 8x7B": (ROUTED(32, 4096, 14336, 32, 8, 32000, experts=8, chosen=2), "v5e:4x4"),
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


HEADS = ("step", "slice", "answer", "expert's", "FSDP", "sent", "predicted", "memory", "predicted")


def solved(name: str) -> list[str]:
    """Solve a step, which compiles the ten best; return a row of the table."""
    model, slice_ = STEPS[name]
    topology = sr.Topology(slice_)
    model, meshes = on_slice(model, topology), topology.meshes(AXES)
    answer, *others = sr.solve(traced(model, meshes[len(meshes) // 2]), topology).candidates
    by_name = {row.what: row.compiled for row in (answer, *others)}
    costs = (answer.compiled, by_name.get("as in the program"), by_name.get("FSDP"))
    both = [cost for cost in (answer.compiled, answer.predicted) if cost]
    return [
        f"{name}, {model.layers} layers",
        slice_,
        *(seconds_shown(cost.seconds) if cost else "" for cost in costs),
        *(bytes_shown(sum(cost.sent.values())) for cost in both),
        *(bytes_shown(cost.memory) for cost in both),
    ]


if __name__ == "__main__":
    print("|", " | ".join(HEADS), "|\n|---|---|" + "--:|" * (len(HEADS) - 2))
    for step_name in sys.argv[1:] or STEPS:
        print("|", " | ".join(solved(step_name)), "|", flush=True)
