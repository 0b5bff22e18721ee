"""Compares what `prove` says of steps of decoders with one GPU.

    JAX_PLATFORMS=cpu SHARDRULES_CACHE=off python -m benchmarks.on_gpu h100:1

This process proves the steps, as without a GPU. Each runs in another, which has it for itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks.decoders import HEAD, Decoder, Params, trained
from shardrules._base.text import bytes_shown

StepAndArguments = tuple[Any, tuple[Any, ...]]
DEVICE: Final = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
DENSE: Final = partial(Decoder, 24, 2048, 8192, 16, 4, 32768, length=2048)
BIG: Final = partial(Decoder, 32, 4096, 14336, 32, 8, 32768, length=2048, saved=None)
MOE: Final = partial(
    Decoder, 24, 1024, 2048, 8, 8, 32768, length=2048, experts=8, chosen=2, capacity=1.0
)
PRODUCTS: Final = ("q", "k", "v", "out", "up", "gate", "down")


def train(step: Decoder, rows: int, mesh: Mesh) -> StepAndArguments:
    """Return a step of Adam."""
    plan = step.planned(step.params, mesh)
    jitted = jax.jit(partial(trained, step.loss), donate_argnums=0, out_shardings=plan.shardings())
    return jitted, (plan, abstract(mesh, rows, step.length))


def decode(step: Decoder, rows: int, mesh: Mesh) -> StepAndArguments:
    """Return the next token of each sequence, and the cache with it."""

    def run(params: Params, cache: Any, tokens: Any, place: Any) -> Any:
        x, cache = step.through(params["layers"], step.embedded(params, tokens), cache, place)
        return cache, jnp.argmax(step.logits(params, x), -1).astype("int32")

    sizes = step.layers, rows, step.length, step.kv, HEAD
    cache = [abstract(mesh, *sizes, dtype="bfloat16")] * 2
    plan = sr.plan(step.params, [(".*", ())], mesh)
    return jax.jit(run, donate_argnums=1), (plan, cache, abstract(mesh, rows, 1), abstract(mesh))


def abstract(mesh: Mesh, *shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    """Return an abstract array that is whole."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))


# Of an H100's memory the second of those that decode takes 98 %, and the third 103 %.
STEPS: Final = {
    "dense, recomputed": partial(train, DENSE(), 8),
    "dense, products saved": partial(train, DENSE(dtype="bfloat16", saved=PRODUCTS), 4),
    "dense, all saved": partial(train, DENSE(saved=None), 1),
    "MoE": partial(train, MOE(), 16),
    **{f"decode, {n} sequences": partial(decode, BIG(dtype="bfloat16"), n) for n in (32, 116, 123)},
}


def prove(name: str, on: str) -> int:
    """Prove a step: return its peak."""
    topology = sr.Topology(on)
    step, args = STEPS[name](mesh := topology.mesh(fsdp=1))
    proof: Any = sr.prove(step, *args, on=mesh)
    return proof.memory.peak


def run(name: str) -> int:
    """Run a step on the GPU twice: return the bytes that JAX allocates at most."""
    step, args = STEPS[name](mesh := Mesh(np.array(jax.devices()[:1]), ("fsdp",)))
    proof: Any = sr.prove(step, *args, on=mesh, time=True)
    values = [jax.tree.map(filled, a.abstract() if isinstance(a, sr.Plan) else a) for a in args]
    for _run in range(2):
        result = jax.block_until_ready(proof.compiled(*values))
        results = result if isinstance(result, tuple) else (result,)
        trees = {jax.tree.structure(r): r for r in results if not isinstance(r, jax.Array)}
        values = [trees.get(jax.tree.structure(value), value) for value in values]
        del result, results, trees  # or they would be there beside the next ones
    return int(jax.devices()[0].memory_stats()["peak_bytes_in_use"])


def filled(leaf: Any) -> Any:
    """Return an array of numbers that differ, made where it is to lie."""

    def make() -> Any:
        numbers = jnp.sin(jax.lax.iota("float32", leaf.size)).reshape(leaf.shape)
        is_index = jnp.issubdtype(leaf.dtype, jnp.integer)
        return (abs(numbers) * 997 if is_index else numbers / 50).astype(leaf.dtype)

    return jax.block_until_ready(jax.jit(make, out_shardings=leaf.sharding)())


def main(on: str) -> None:
    """Print a row for each step; in brackets what is proved by what is allocated."""
    print("| step | allocated | proved |\n|---|--:|--:|")
    for name in STEPS:
        command = [sys.executable, "-m", "benchmarks.on_gpu", on, name]
        done = subprocess.run(command, env=os.environ | DEVICE, capture_output=True, check=False)
        if done.returncode and b"RESOURCE_EXHAUSTED" not in done.stderr:
            raise SystemExit(done.stderr.decode())
        peak, allocated, ratio = prove(name, on), "refused", ""
        if not done.returncode:
            size = int(done.stdout.splitlines()[-1])
            allocated, ratio = bytes_shown(size), f" ({peak / size:.2f})"
        print(f"| {name} | {allocated} | {bytes_shown(peak)}{ratio} |", flush=True)


if __name__ == "__main__":
    on, *names = sys.argv[1:]
    print(run(*names)) if names else main(on)
