"""Steps of other optimizers and modes: LoRA on an int8 base, Muon, accumulation, and decoding."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.parts import abstract, cutter, mesh_of, rms_norm, train_step
from tests.steps.score import Built, Step

__all__ = ["STEPS"]

_WORDS: Final = 1024
_WIDTH: Final = 256
_INNER: Final = 1024
_LENGTH: Final = 64
_LAYERS: Final = 3


def _array(*shape: int, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _entropy(scores: Any, targets: Any) -> Any:
    hot = jax.nn.one_hot(targets, _WORDS)
    return (jax.nn.logsumexp(scores, -1) - (scores * hot).sum(-1)).mean()


def _attend(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((q.shape[1],) * 2, bool)), scores, -1e9)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)


_KERNELS: Final = {
    "qkv": (_WIDTH, 3 * _WIDTH),
    "o": (_WIDTH, _WIDTH),
    "up": (_WIDTH, _INNER),
    "down": (_INNER, _WIDTH),
}


def _lora(
    *,
    batch: P = P("fsdp"),
    residual: P | None = P("fsdp"),
    hidden: P | None = P("fsdp"),
    logits: P | None = P("fsdp"),
    mode: str = "",
    base: P = P(None, "fsdp"),
    small: P = P(),
    moved: bool = False,
    table: P | None = P(),
    gradients: P | None = None,
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    measured: str = "",
    trained: str = "",
) -> Built:
    """Train adapters of rank 16; the base is int8, gathered a layer at a time."""
    mesh = mesh_of(fsdp=8)
    cut = cutter(mesh)
    frozen = {
        "embed": _array(_WORDS, _WIDTH),
        "head": _array(_WIDTH, _WORDS),
        "layers": {
            name: {"q8": _array(_LAYERS, *shape, dtype="int8"), "scale": _array(_LAYERS, shape[1])}
            for name, shape in _KERNELS.items()
        },
    }
    adapters = {
        name: {"a": _array(_LAYERS, shape[0], 16), "b": _array(_LAYERS, 16, shape[1])}
        for name, shape in _KERNELS.items()
    }
    if trained == "all":
        adapters["kernels"] = {n: _array(_LAYERS, *shape) for n, shape in _KERNELS.items()}
    rules = [("scale", P()), ("q8", base), ("embed|head", P(None, "fsdp"))]
    constants = sr.plan(frozen, rules, mesh)
    plan = sr.plan(adapters, [("kernels", P(None, "fsdp")), (".*", small)], mesh)
    tx = optax.adamw(1e-3)

    def project(x: Any, w: Any, ab: Any) -> Any:
        kernel = w["q8"]
        if mode == "dequantized before the gather":
            kernel = cut(kernel.astype("float32") * w["scale"], P())
        elif mode == "gathered as float32":
            kernel = cut(kernel.astype("float32"), P()) * w["scale"]
        elif mode == "as XLA likes":
            kernel = kernel.astype("float32") * w["scale"]
        else:
            kernel = cut(kernel, P()).astype("float32") * w["scale"]
        if mode == "merged":
            return x @ (kernel + ab["a"] @ ab["b"])
        if mode == "merged and sharded":
            return x @ cut(cut(kernel + ab["a"] @ ab["b"], P("fsdp")), P())
        return x @ kernel + (x @ ab["a"]) @ ab["b"]

    def layer(x: Any, both: Any) -> Any:
        w, ab = both
        q, k, v = (
            a.reshape(*a.shape[:2], 8, -1)
            for a in jnp.split(project(_norm(x), w["qkv"], ab["qkv"]), 3, -1)
        )
        x = cut(x + project(_attend(q, k, v).reshape(x.shape), w["o"], ab["o"]), residual)
        y = cut(jax.nn.gelu(project(_norm(x), w["up"], ab["up"])), hidden)
        return cut(x + project(y, w["down"], ab["down"]), residual), None

    def _norm(x: Any) -> Any:
        return rms_norm(x, 1.0)

    def loss(adapters: Any, frozen: Any, batch: Any) -> Any:
        x = cut(cut(frozen["embed"], table)[batch["tokens"]], residual)
        layers = frozen["layers"]
        if mode == "the stack is gathered":
            layers = jax.tree.map(lambda w: cut(w, P()), layers)
        if mode == "the stack is dequantized":
            layers = {
                n: {
                    "q8": w["q8"].astype("float32") * w["scale"][:, None],
                    "scale": jnp.ones_like(w["scale"]),
                }
                for n, w in layers.items()
            }
        if trained == "all":
            layers = {n: {**w, "q8": w["q8"] + adapters["kernels"][n]} for n, w in layers.items()}
        body = jax.checkpoint(layer) if remat else layer
        stacked = {n: ab for n, ab in adapters.items() if n != "kernels"}
        x, _ = jax.lax.scan(body, x, (layers, stacked))
        scores = cut(_norm(x) @ cut(frozen["head"], P()), logits)
        return _entropy(scores, batch["targets"]), {"logits": scores}.get(measured)

    def step(adapters: Any, state: Any, frozen: Any, batch: Any) -> Any:
        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(adapters, frozen, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda g: cut(g, gradients), grads)
        updates, state = tx.update(grads, state, adapters)
        if moved:  # the merged base is returned
            kept = jax.tree.map(lambda w: w.astype("float32"), frozen["layers"])
        return optax.apply_updates(adapters, updates), state, (value, kept)

    tokens = abstract(mesh, batch, (64, _LENGTH))
    state = jax.eval_shape(tx.init, adapters)
    arrays = {"tokens": tokens, "targets": tokens}
    return train_step(
        step, plan, state, arrays, donate=donate, returned=returned, constants=(constants,)
    )


_LORA_FAULTS: Final = {
    **{
        f"the base is {how}": {"mode": mode}
        for how, mode in {
            "dequantized before it is gathered": "dequantized before the gather",
            "gathered as float32": "gathered as float32",
            "not constrained": "as XLA likes",
            "gathered whole before the loop": "the stack is gathered",
            "dequantized whole before the loop": "the stack is dequantized",
            "merged with adapters, and sharded again": "merged and sharded",
        }.items()
    },
    "the base is planned to be whole": {"base": P()},
    "the base is cut over layers": {"base": P("fsdp"), "mode": "as XLA likes"},
    "the residual is whole": {"residual": P()},
    "no constraints": {"residual": None, "hidden": None, "logits": None, "mode": "as XLA likes", "table": None},
    "no constraints, and the batch whole": {
        "residual": None, "hidden": None, "logits": None, "mode": "as XLA likes", "batch": P(), "table": None,
    },
    "hidden is cut over its width": {"hidden": P(None, None, "fsdp")},
    "hidden is whole": {"hidden": P()},
    "logits are whole": {"logits": P()},
    "logits are cut over words": {"logits": P(None, None, "fsdp")},
    "the table is not gathered, nor the residual cut": {"table": None, "residual": None},
    "all kernels are trained too": {"trained": "all"},
    "the base is returned as float32": {"moved": True},
    "logits are returned": {"measured": "logits"},
    "not donated": {"donate": False},
    "no remat": {"remat": False},
    # These look wrong.
    "merged with adapters": {"mode": "merged"},
    "adapters are sharded": {"small": P(None, None, "fsdp")},
    "gradients are whole": {"gradients": P()},
    "the batch comes in whole": {"batch": P()},
    "no out_shardings": {"returned": False},
}  # fmt: skip


def _muon(
    *,
    batch: P = P("fsdp"),
    residual: P | None = P("fsdp"),
    hidden: P | None = P("fsdp"),
    logits: P | None = P("fsdp"),
    newton: str = "spread",
    iterations: int = 5,
    gradients: P | None = None,
    momentum: P | None = None,
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    kernels: P | None = None,
    measured: str = "",
) -> Built:
    """Train stacks of four layers; each device orthogonalizes whole matrices of some layers."""
    mesh = mesh_of(fsdp=8)
    cut = cutter(mesh)
    layers = {name: _array(8, *shape) for name, shape in _KERNELS.items()}
    shapes = {"embed": _array(_WORDS, _WIDTH), "layers": layers, "head": _array(_WIDTH, _WORDS)}
    plan = sr.plan(shapes, [("layers", P(None, "fsdp")), ("embed|head", P(None, "fsdp"))], mesh)
    specs = jax.tree.map(lambda s: s.spec, plan.shardings())

    def layer(x: Any, w: Any) -> Any:
        if kernels is not None:
            w = jax.tree.map(lambda leaf: cut(leaf, kernels), w)
        q, k, v = (
            a.reshape(*a.shape[:2], 8, -1) for a in jnp.split(rms_norm(x, 1.0) @ w["qkv"], 3, -1)
        )
        x = cut(x + _attend(q, k, v).reshape(x.shape) @ w["o"], residual)
        y = cut(jax.nn.gelu(rms_norm(x, 1.0) @ w["up"]), hidden)
        return cut(x + y @ w["down"], residual), None

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        x = cut(cut(params["embed"], P())[tokens], residual)
        x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params["layers"])
        scores = cut(rms_norm(x, 1.0) @ cut(params["head"], P()), logits)
        return _entropy(scores, targets), {"logits": scores}.get(measured)

    def orthogonal(m: Any, spec: P) -> Any:
        """Return the polar factor of each matrix of a stack."""
        if newton == "spread":  # a whole matrix of a layer for each device
            m = cut(m, P("fsdp"))
        elif newton == "whole":
            m = cut(m, P())
        m = m / (jnp.linalg.norm(m, axis=(-2, -1), keepdims=True) + 1e-6)
        flip = m.shape[-2] > m.shape[-1]
        m = m.swapaxes(-1, -2) if flip else m
        a, b, c = 3.4445, -4.775, 2.0315

        def once(m: Any, _: Any) -> Any:
            if newton == "spread":
                m = cut(m, P("fsdp"))
            elif newton == "constrained as planned":
                m = cut(m, spec)
            elif newton == "gathered in every iteration":
                m = cut(cut(m, spec), P())
            g = m @ m.swapaxes(-1, -2)
            m = a * m + (b * g + c * g @ g) @ m
            return cut(m, P("fsdp")) if newton == "spread" else m, None

        if newton == "a layer at a time":
            m = jax.lax.map(lambda one: jax.lax.scan(once, one, None, iterations)[0], m)
        else:
            m = jax.lax.scan(once, m, None, iterations)[0]
        return cut(m.swapaxes(-1, -2) if flip else m, spec)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(
            params, batch["tokens"], batch["targets"]
        )
        if gradients is not None:
            grads = jax.tree.map(lambda g: cut(g, gradients), grads)
        else:
            grads = jax.tree.map(cut, grads, specs)
        state = jax.tree.map(lambda m, g: 0.95 * m + g, state, grads)
        if momentum is not None:
            state = jax.tree.map(lambda m: cut(m, momentum), state)
        updates = jax.tree.map(
            lambda m, spec: orthogonal(m, spec) if m.ndim == 3 else jnp.sign(m), state, specs
        )
        params = jax.tree.map(lambda p, u: p - 1e-3 * u, params, updates)
        return params, state, (value, kept)

    tokens = abstract(mesh, batch, (64, _LENGTH))
    arrays = {"tokens": tokens, "targets": tokens}
    return train_step(step, plan, shapes, arrays, donate=donate, returned=returned)


_MUON_FAULTS: Final = {
    **{
        f"matrices are {how}": {"newton": mode}
        for how, mode in {
            "whole on all devices": "whole",
            "left to XLA": "as XLA likes",
            "orthogonalized as planned": "constrained as planned",
            "gathered in every iteration": "gathered in every iteration",
            "orthogonalized a layer at a time": "a layer at a time",
        }.items()
    },
    "gradients are whole": {"gradients": P()},
    "momentum is whole": {"momentum": P(), "returned": False},
    "momentum is whole inside": {"momentum": P()},
    "momentum is cut over layers": {"momentum": P("fsdp"), "returned": False},
    "no constraints": {"residual": None, "hidden": None, "logits": None},
    "no constraints, and the batch whole": {"residual": None, "hidden": None, "logits": None, "batch": P()},
    "the residual is whole": {"residual": P()},
    "hidden is cut over its width": {"hidden": P(None, None, "fsdp")},
    "logits are whole": {"logits": P()},
    "logits are cut over words": {"logits": P(None, None, "fsdp")},
    "logits are returned": {"measured": "logits"},
    "not donated": {"donate": False},
    "no remat": {"remat": False},
    # These look wrong.
    "kernels are gathered by a constraint": {"kernels": P()},
    "the batch comes in whole": {"batch": P()},
    "no out_shardings": {"returned": False},
    "fewer iterations": {"iterations": 3},
}  # fmt: skip


def _decode(
    *,
    batch: P = P("data"),
    cache: P = P(None, "data", None, "tp"),
    inside: P | None = P("data", None, "tp"),
    used: P | None = None,
    heads: P | None = P("data", None, "tp"),
    hidden: P | None = P("data", None, "tp"),
    residual: P | None = P("data"),
    logits: P | None = P("data", None, "tp"),
    guess: P | None = None,
    o: P = P(None, "tp"),
    up: P = P(None, None, "tp"),
    kernels: P | None = None,
    tables: P = P(None, "tp"),
    donate: bool = True,
    returned: bool = True,
    written: str = "at one place",
    measured: str = "",
    repeated: bool = False,
    steps: int = 4,
    upcast: bool = False,
) -> Built:
    """Decode some words by a scan, with a KV cache, on data and tp."""
    mesh = mesh_of(data=2, tp=4)
    cut = cutter(mesh)
    queries, count, size, length, rows = 8, 4, 32, 256, 32
    shapes = {
        "embed": _array(_WORDS, _WIDTH),
        "head": _array(_WIDTH, _WORDS),
        "layers": {
            "q": _array(_LAYERS, _WIDTH, queries, size),
            "k": _array(_LAYERS, _WIDTH, count, size),
            "v": _array(_LAYERS, _WIDTH, count, size),
            "o": _array(_LAYERS, queries, size, _WIDTH),
            "up": _array(_LAYERS, _WIDTH, _INNER),
            "down": _array(_LAYERS, _INNER, _WIDTH),
        },
    }
    rules = [
        ("/[qkv]$", P(None, None, "tp")),
        ("/o$", o),
        ("up", up),
        ("down", P(None, "tp")),
        ("head", tables),
        ("embed", P()),
    ]
    plan = sr.plan(shapes, rules, mesh)
    caches = {n: _array(_LAYERS, rows, length, count, size) for n in "kv"}
    cached = sr.plan(caches, [(".*", cache)], mesh)

    def layer(x: Any, parts: Any, at: Any) -> Any:
        w, held = parts
        if kernels is not None:
            w = jax.tree.map(lambda leaf: cut(leaf, kernels), w)
        y = rms_norm(x, 1.0)
        q, k, v = (cut(jnp.einsum("btd,dhk->bthk", y, w[n]), heads) for n in "qkv")

        def write(old: Any, new: Any) -> Any:
            if written == "by a mask":
                hot = (jnp.arange(length) == at)[None, :, None, None]
                return cut(jnp.where(hot, new, old), inside)
            if written == "by concatenation":
                return cut(jnp.concatenate([old[:, 1:], new], 1), inside)
            return cut(jax.lax.dynamic_update_slice_in_dim(old, new, at, 1), inside)

        held = {"k": write(held["k"], k), "v": write(held["v"], v)}
        k, v = (cut(held[n].astype("float32"), used) for n in "kv")
        if upcast:
            k, v = (cut(a.astype("bfloat16"), P("data")) for a in (k, v))
        if repeated:
            k, v = (jnp.repeat(a, queries // count, 2) for a in (k, v))
            q = q[:, :, :, None]
        else:
            q = q.reshape(*q.shape[:2], count, queries // count, size)
        scores = jnp.einsum("btgrk,bsgk->bgrts", q, k) * size**-0.5
        weights = jax.nn.softmax(jnp.where(jnp.arange(length) <= at, scores, -1e9))
        mixed = jnp.einsum("bgrts,bsgk->btgrk", weights, v).reshape(rows, 1, queries, size)
        x = cut(x + jnp.einsum("bthk,hkd->btd", cut(mixed, heads), w["o"]), residual)
        y = cut(jax.nn.gelu(rms_norm(x, 1.0) @ w["up"]), hidden)
        return cut(x + y @ w["down"], residual), held

    def decode(params: Any, held: Any, batch: Any) -> Any:
        def word(carry: Any, _: Any) -> Any:
            held, tokens, at = carry
            x = cut(params["embed"][tokens], residual)
            x, held = jax.lax.scan(
                lambda x, parts: layer(x, parts, at), x, (params["layers"], held)
            )
            scores = cut(rms_norm(x, 1.0) @ params["head"], logits)
            best = cut(scores, guess).argmax(-1)
            return (held, best, at + 1), (best, scores if measured == "logits" else None)

        (held, *_), (words, kept) = jax.lax.scan(
            word, (held, batch["tokens"], batch["at"]), None, steps
        )
        return held, (words, kept, held["k"][-1] if measured == "cache" else None)

    tokens, at = abstract(mesh, batch, (rows, 1)), abstract(mesh, P(), ())
    shardings = (cached.shardings(), None) if returned else None
    jitted = jax.jit(decode, donate_argnums=(1,) if donate else (), out_shardings=shardings)
    lowered = jitted.lower(plan.abstract(), cached.abstract(), {"tokens": tokens, "at": at})
    return Built(lowered.compile(), (plan, cached, {"tokens": batch, "at": P()}), (cached, None))


_DECODE_FAULTS: Final = {
    "the cache is whole over tp": {"cache": P(None, "data"), "inside": P("data")},
    "the cache is whole over the batch": {"cache": P(None, None, None, "tp"), "inside": P(None, None, "tp")},
    "the cache is whole": {"cache": P(), "inside": P()},
    "the cache is cut over its length": {"cache": P(None, "data", "tp"), "inside": P("data", "tp")},
    "the cache is constrained to be whole inside": {"inside": P("data")},
    "the cache is constrained to be whole over the batch inside": {"inside": P(None, None, "tp")},
    "keys and values are gathered to be used": {"used": P("data")},
    "keys and values are used whole": {"used": P()},
    "keys and values are cut over the length to be used": {"used": P("data", "tp")},
    "heads are whole": {"heads": P("data")},
    "heads are whole over the batch": {"heads": P(None, None, "tp")},
    "the cache is cut over the size of heads": {
        "cache": P(None, "data", None, None, "tp"), "inside": P("data", None, None, "tp"),
    },
    "kernels are gathered": {"kernels": P()},
    "the kernel of up is cut as that of down": {"up": P(None, "tp")},
    "the output of attention is cut by columns": {"o": P(None, None, None, "tp")},
    "logits are whole": {"logits": P()},
    "logits are whole over tp": {"logits": P("data")},
    "the head is cut as that of a row": {"tables": P("tp")},
    "the residual is whole": {"residual": P()},
    "hidden is whole": {"hidden": P()},
    "logits of all words are returned": {"measured": "logits"},
    "the cache is not donated": {"donate": False},
    "the cache is gathered as bfloat16": {"upcast": True},
    # These look wrong.
    "the cache is written by a mask": {"written": "by a mask"},
    "the cache is shifted": {"written": "by concatenation"},
    "keys are repeated for queries": {"repeated": True},
    "words come in whole": {"batch": P()},
    "no out_shardings": {"returned": False},
    "no constraints": {"inside": None, "heads": None, "hidden": None, "residual": None, "logits": None},
}  # fmt: skip

STEPS: Final = (
    Step("LoRA on an int8 base", _lora, _LORA_FAULTS),
    Step("Muon", _muon, _MUON_FAULTS),
    Step("decoding with a KV cache", _decode, _DECODE_FAULTS),
)
