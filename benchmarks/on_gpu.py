"""Compares what `prove` and `trace` say of steps with one GPU.

    JAX_PLATFORMS=cpu SHARDRULES_CACHE=off python -m benchmarks.on_gpu h100:1

This process proves the steps, as without a GPU. Each runs in another, which has it for itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
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

Made = tuple[Any, tuple[Any, ...]]
DEVICE: Final = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
# Of an H100's memory the second take 98 %, and the third 103 %.
DECODED, IMAGES = (32, 116, 123), (64, 156, 164)


MOE: Final = {"experts": 8, "width": 1024, "hidden": 2048, "heads": 8, "kv": 8}
BIG: Final = {"layers": 32, "width": 4096, "hidden": 14336, "heads": 32, "kv": 8}
HEAD: Final = 128


@dataclass(frozen=True)
class Decoder:
    """A decoder, and what a step does with it."""

    rows: int
    kind: str = "train"
    """"train", "forward" or "decode"."""
    dtype: str = "bfloat16"
    """Of the parameters; products are of bfloat16."""
    layers: int = 24
    width: int = 2048
    hidden: int = 8192
    heads: int = 16
    kv: int = 4
    vocab: int = 32768
    length: int = 2048
    experts: int = 0
    is_scanned: bool = True
    saves: str = "nothing"
    """Of each layer for the backward pass: "nothing", "products", or "everything"."""

    def shapes(self) -> Any:
        """Return abstract parameters; the layers are stacked, or a list."""
        width, hidden = self.width, self.hidden
        kernels = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        layer: Any = {"norm1": (width,), "norm2": (width,), "q": (width, self.heads, HEAD)}
        layer |= dict.fromkeys("kv", (width, self.kv, HEAD)) | {"o": (self.heads, HEAD, width)}
        if self.experts:
            layer |= {"router": (width, self.experts)}
            kernels = {name: (self.experts, *shape) for name, shape in kernels.items()}
        layer |= kernels
        stack = {name: (self.layers, *shape) for name, shape in layer.items()}
        tree = {
            "embed": (self.vocab, width),
            "head": (width, self.vocab),
            "norm": (width,),
            "layers": stack if self.is_scanned else [layer] * self.layers,
        }
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, self.dtype),
            tree,
            is_leaf=lambda node: isinstance(node, tuple),
        )

    def attention(self, x: Any, w: Any, cache: Any, place: Any) -> tuple[Any, Any]:
        """Attend causally, or to what a cache has until a place."""
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[name]) for name in "qkv")
        mask: Any = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
        if cache is not None:
            k, v = cache = tuple(
                jax.lax.dynamic_update_slice(old, new, (0, place, 0, 0))
                for old, new in zip(cache, (k, v), strict=True)
            )
            mask = jnp.arange(k.shape[1]) <= place
        groups = q.reshape(*q.shape[:2], self.kv, -1, HEAD)
        scores = jnp.einsum("btgqk,bsgk->bgqts", groups, k).astype("float32") * HEAD**-0.5
        chances = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1).astype(x.dtype)
        mixed = jnp.einsum("bgqts,bsgk->btgqk", chances, v).reshape(q.shape)
        return jnp.einsum("bthk,hkd->btd", mixed, w["o"]), cache

    def mlp(self, x: Any, w: Any) -> Any:
        """Apply a gated MLP, or experts that have room, by products with masks."""
        if not self.experts:
            return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
        room = x.shape[1] * 2 // self.experts
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ w["router"]), 2)
        is_of = jax.nn.one_hot(chosen, self.experts, dtype="int32")
        places = jnp.cumsum(is_of.reshape(len(x), -1, self.experts), 1).reshape(is_of.shape) * is_of
        sent = jax.nn.one_hot(places.sum(2) - 1, room, dtype=x.dtype)
        combined = sent * jnp.einsum("btke,btk->bte", is_of.astype(x.dtype), weights)[..., None]
        y = jnp.einsum("btd,btec->ebcd", x, sent)
        gate, up = (jnp.einsum("ebcd,edf->ebcf", y, w[name]) for name in ("gate", "up"))
        y = jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(gate) * up, w["down"])
        return jnp.einsum("ebcd,btec->btd", y, combined)

    def __call__(self, params: Any, tokens: Any, cache: Any = None, place: Any = None) -> Any:
        """Return logits, and the cache."""

        def layer(x: Any, row: Any) -> Any:
            w, cache = jax.tree.map(lambda kernel: kernel.astype("bfloat16"), row[0]), row[1]
            mixed, cache = self.attention(normed(x, w["norm1"]), w, cache, place)
            x = x + mixed
            return x + self.mlp(normed(x, w["norm2"]), w), cache

        policies = jax.checkpoint_policies
        policy = {
            "products": policies.dots_with_no_batch_dims_saveable,
            "nothing": policies.nothing_saveable,
        }.get(self.saves)
        layer = jax.checkpoint(layer, policy=policy) if policy else layer
        x = params["embed"].astype("bfloat16")[tokens]
        if self.is_scanned:
            x, cache = jax.lax.scan(layer, x, (params["layers"], cache))
        else:
            for w in params["layers"]:
                x, _ = layer(x, (w, None))
        x = normed(x, params["norm"].astype("bfloat16"))
        return x @ params["head"].astype("bfloat16"), cache

    def loss(self, params: Any, tokens: Any) -> Any:
        """Return the cross entropy."""
        logits = self(params, tokens)[0].astype("float32")
        is_token = tokens[..., None] == jnp.arange(self.vocab)
        of_token = jnp.sum(jnp.where(is_token, logits, 0), -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - of_token)


def normed(x: Any, scale: Any) -> Any:
    """Divide by the root of the mean square."""
    mean = jnp.mean(jnp.square(x.astype("float32")), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype) * scale


def decoder(mesh: Mesh, **options: Any) -> Made:
    """Return a step of a decoder: of Adam, forward, or of the next token of each sequence."""
    model = Decoder(**options)

    def abstract(*shape: int, dtype: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def train(state: Any, tokens: Any) -> Any:
        grads = jax.grad(model.loss)(state["params"], tokens)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
        nu = jax.tree.map(lambda n, g: 0.95 * n + 0.05 * g * g, state["nu"], grads)

        def update(p: Any, m: Any, n: Any) -> Any:
            return p - 1e-4 * m / (jnp.sqrt(n) + 1e-8)

        return {"params": jax.tree.map(update, state["params"], mu, nu), "mu": mu, "nu": nu}

    def forward(params: Any, tokens: Any) -> Any:
        return jax.nn.log_softmax(model(params, tokens)[0].astype("float32")).max(-1)

    def decode(params: Any, cache: Any, tokens: Any, place: Any) -> Any:
        logits, cache = model(params, tokens, cache, place)
        return cache, jnp.argmax(logits, -1).astype("int32")

    tree, tokens = model.shapes(), abstract(model.rows, model.length)
    if model.kind == "train":
        plan = sr.plan(dict.fromkeys(("params", "mu", "nu"), tree), [(".*", ())], mesh)
        return jax.jit(train, donate_argnums=0, out_shardings=plan.shardings()), (plan, tokens)
    plan = sr.plan(tree, [(".*", ())], mesh)
    if model.kind == "forward":
        return jax.jit(forward), (plan, tokens)
    sizes = (model.layers, model.rows, model.length, model.kv, HEAD)
    cache = (abstract(*sizes, dtype="bfloat16"),) * 2
    step = jax.jit(decode, donate_argnums=1)
    return step, (plan, cache, abstract(model.rows, 1), abstract())


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
