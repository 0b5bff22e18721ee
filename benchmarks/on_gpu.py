"""Compares what `prove` and `trace` say of steps with one GPU: docs/pod.md has the table.

    JAX_PLATFORMS=cpu SHARDRULES_CACHE=off python -m benchmarks.on_gpu h100:1

This process proves the steps, as without a GPU. Each runs in another, which has it for itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from statistics import median
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.text import bytes_shown, seconds_shown
from tests.support.memory_steps import BIG, MOE, Pair, jitted

Made = tuple[Any, tuple[Any, ...]]
DEVICE: Final = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
# Of an H100's memory the second take 98 %, and the third 103 %.
DECODED, IMAGES = (32, 116, 123), (64, 156, 164)


def decoder(mesh: Mesh, dtype: str = "bfloat16", **options: Any) -> Made:
    """Return a step of a decoder, of those that are compared with the TPU's compiler."""
    return jitted(Pair("", "", dict(mesh.shape), is_lookup=True, dtype=dtype, **options), mesh)


def trained(mesh: Mesh, shapes: dict[str, Any], loss: Any, x: Any, dtype: str) -> Made:
    """Return a step of gradient descent with momentum."""
    tree = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    plan = sr.plan({"params": tree, "momentum": tree}, [(".*", ())], mesh)

    def step(state: Any, x: Any) -> Any:
        grads = jax.grad(loss)(state["params"], x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}

    batch = jax.ShapeDtypeStruct(x, dtype, sharding=NamedSharding(mesh, P("fsdp")))
    return jax.jit(step, donate_argnums=0, out_shardings=plan.shardings()), (plan, batch)


def vision(mesh: Mesh, rows: int, dtype: str = "bfloat16", attention: Any = "xla") -> Made:
    """Return a step of a vision transformer of 24 layers, behind its patches."""
    sizes = {"qkv": (1024, 3072), "out": (1024, 1024), "up": (1024, 4096), "down": (4096, 1024)}

    def layer(x: Any, w: Any) -> Any:
        q, k, v = jnp.moveaxis((x @ w["qkv"]).reshape(*x.shape[:2], 3, -1, 64), 2, 0)
        y = jax.nn.dot_product_attention(q, k, v, implementation=attention)
        x = x + y.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(layer, x, params)[0].astype("float32") ** 2)

    return trained(mesh, {n: (24, *s) for n, s in sizes.items()}, loss, (rows, 256, 1024), dtype)


def convolutions(mesh: Mesh, rows: int, dtype: str = "bfloat16") -> Made:
    """Return a step of a residual network of 8 blocks on patches of 4 x 4 pixels."""
    order = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    convolve: Any = partial(jax.lax.conv_general_dilated, **order)

    def loss(params: Any, x: Any) -> Any:
        x = convolve(x, params["patch"], (4, 4))
        for i in range(8):
            y = jax.nn.relu(convolve(x, params[f"a{i}"], (1, 1)))
            x = x + convolve(y, params[f"b{i}"], (1, 1))
        return jnp.mean(x.astype("float32") ** 2)

    shapes = {f"{name}{i}": (3, 3, 256, 256) for i in range(8) for name in "ab"}
    return trained(mesh, shapes | {"patch": (4, 4, 3, 256)}, loss, (rows, 224, 224, 3), dtype)


STEPS: Final = {
    "dense, recomputed": partial(decoder, rows=8, dtype="float32"),
    "dense, products saved": partial(decoder, rows=4, saves="products"),
    "dense, layers apart, all saved": partial(
        decoder, rows=8, dtype="float32", layers=4, is_scanned=False, saves="everything"
    ),
    "MoE": partial(decoder, rows=16, dtype="float32", **MOE),
    "forward": partial(decoder, rows=8, kind="forward"),
    **{f"decode, {n} sequences": partial(decoder, rows=n, kind="decode", **BIG) for n in DECODED},
    **{f"ViT, {n} images": partial(vision, rows=n) for n in IMAGES},
    "ViT, attention by cuDNN": partial(vision, rows=64, attention="cudnn"),
    "ViT, float32": partial(vision, rows=32, dtype="float32"),
    "convolutions": partial(convolutions, rows=256),
    "convolutions, float32": partial(convolutions, rows=128, dtype="float32"),
}


def prove(name: str, on: str) -> int:
    """Prove a step: return its peak."""
    topology = sr.Topology(on)
    step, args = STEPS[name](mesh := topology.mesh(fsdp=1))
    proof: Any = sr.prove(step, *args, on=mesh)
    return proof.memory.peak


def run(name: str) -> list[float]:
    """Run a step on the GPU: return the bytes that JAX allocates, and the time."""
    step, args = STEPS[name](mesh := Mesh(np.array(jax.devices()[:1]), ("fsdp",)))
    proof: Any = sr.prove(step, *args, on=mesh, time=True)
    compiled, seconds = proof.compiled, []
    values = [jax.tree.map(filled, a.abstract() if isinstance(a, sr.Plan) else a) for a in args]
    for _run in range(8):
        start = time.perf_counter()
        result = jax.block_until_ready(compiled(*values))
        seconds.append(time.perf_counter() - start)
        results = result if isinstance(result, tuple) else (result,)
        trees = {jax.tree.structure(r): r for r in results if not isinstance(r, jax.Array)}
        values = [trees.get(jax.tree.structure(value), value) for value in values]
        del result, results, trees  # or they would be there beside the next ones
    return [jax.devices()[0].memory_stats()["peak_bytes_in_use"], median(seconds[2:])]


def filled(leaf: Any) -> Any:
    """Return an array of numbers that differ, made where it is to lie."""

    def make() -> Any:
        numbers = jnp.sin(jax.lax.iota("float32", leaf.size)).reshape(leaf.shape)
        is_index = jnp.issubdtype(leaf.dtype, jnp.integer)
        return (abs(numbers) * 997 if is_index else numbers / 50).astype(leaf.dtype)

    return jax.block_until_ready(jax.jit(make, out_shardings=leaf.sharding)())


def main(on: str) -> None:
    """Print a row for each step; in brackets what is said by what is there."""
    print("| step | allocated | proved | measured |\n|---|--:|--:|--:|")
    for name in STEPS:
        command = [sys.executable, "-m", "benchmarks.on_gpu", on, name]
        done = subprocess.run(command, env=os.environ | DEVICE, capture_output=True, check=False)
        if done.returncode and b"RESOURCE_EXHAUSTED" not in done.stderr:
            raise SystemExit(done.stderr.decode())
        peak = prove(name, on)
        row = ["refused", bytes_shown(peak), ""]
        if not done.returncode:
            size, step = json.loads(done.stdout.splitlines()[-1])
            row[0], row[2] = bytes_shown(size), seconds_shown(step)
            row[1] += f" ({peak / size:.2f})"
        print("|", " | ".join([name, *row]), "|", flush=True)


if __name__ == "__main__":
    on, *names = sys.argv[1:]
    print(json.dumps(run(*names))) if names else main(on)
