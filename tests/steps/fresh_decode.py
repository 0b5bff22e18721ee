"""Inference with int8 weights and a KV cache, and training cut over the sequence by jit alone."""

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

_LAYERS: Final = 2
_WIDTH: Final = 512
_HEADS: Final = (8, 4, 64)  # queries, keys and values, size
_HIDDEN: Final = 1024
_WORDS: Final = 2048
_BATCH: Final = 16
_PROMPT: Final = 64
_LENGTH: Final = 512
_NEW: Final = 4


def _int8_weights() -> Any:
    """Return abstract weights: int8 kernels with a scale for each output, stacked by layers."""
    queries, keys, size = _HEADS
    kernels = {
        "q": (_WIDTH, queries * size),
        "k": (_WIDTH, keys * size),
        "v": (_WIDTH, keys * size),
        "o": (queries * size, _WIDTH),
        "gate": (_WIDTH, _HIDDEN),
        "up": (_WIDTH, _HIDDEN),
        "down": (_HIDDEN, _WIDTH),
    }

    def quantized(rows: int, columns: int) -> Any:
        return {
            "q8": jax.ShapeDtypeStruct((_LAYERS, rows, columns), "int8"),
            "scale": jax.ShapeDtypeStruct((_LAYERS, columns), "float32"),
        }

    return {
        "embed": jax.ShapeDtypeStruct((_WORDS, _WIDTH), "float32"),
        "layers": {
            "norm1": jax.ShapeDtypeStruct((_LAYERS, _WIDTH), "float32"),
            "norm2": jax.ShapeDtypeStruct((_LAYERS, _WIDTH), "float32"),
            **{name: quantized(*shape) for name, shape in kernels.items()},
        },
        "norm": jax.ShapeDtypeStruct((_WIDTH,), "float32"),
        "head": {
            "q8": jax.ShapeDtypeStruct((_WIDTH, _WORDS), "int8"),
            "scale": jax.ShapeDtypeStruct((_WORDS,), "float32"),
        },
    }


def _decode(
    *,
    cache_spec: P = P(None, "data", None, "tp"),
    read: P | None = None,
    written: P | None = None,
    heads: P | None = P("data", None, "tp"),
    residual: P | None = P("data"),
    logits: P | None = P("data", None, "tp"),
    output: P = P(None, "tp", None),
    prompt: P = P("data"),
    donate: bool = True,
    returned: bool = True,
    dequantized: P | None = None,
    first: bool = False,
    every_position: bool = False,
    cache_dtype: str | None = None,
    mask: bool = False,
    one_hot: bool = False,
    inspected: bool = False,
    repeated: bool = False,
    table: P | None = None,
) -> Built:
    """Prefill a prompt, then decode greedily in a loop."""
    mesh = mesh_of(data=2, tp=4)
    cut = cutter(mesh)
    queries, keys, size = _HEADS
    kept = queries if repeated else keys

    def product(x: Any, weight: Any) -> Any:
        if "q8" not in weight:
            return x @ weight["w"]
        if dequantized is not None:
            return x @ cut(weight["q8"].astype(x.dtype) * weight["scale"], dequantized)
        return (x @ weight["q8"].astype(x.dtype)) * weight["scale"]

    def attend(q: Any, k: Any, v: Any, start: Any) -> Any:
        """Attend from positions that begin at start to all of the cache."""
        q = q.reshape(*q.shape[:2], kept, -1, size)
        allowed = jnp.arange(_LENGTH) <= start + jnp.arange(q.shape[1])[:, None]
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) * size**-0.5
        if mask:
            bias = jnp.broadcast_to(jnp.where(allowed, 0, -1e9), scores.shape)
            scores = scores + cut(bias, P())
        else:
            scores = jnp.where(allowed, scores, -1e9)
        mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores), v)
        return mixed.reshape(*mixed.shape[:2], queries * size)

    def write(cache: Any, new: Any, start: Any) -> Any:
        if repeated:
            new = jnp.repeat(new, queries // keys, axis=2)
        if one_hot:
            at = jax.nn.one_hot(start + jnp.arange(new.shape[1]), _LENGTH, dtype=new.dtype)
            holes = 1 - at.sum(0)[:, None, None]
            return cut(cache * holes + jnp.einsum("btkd,ts->bskd", new, at), written)
        return cut(jax.lax.dynamic_update_slice(cache, new, (0, start, 0, 0)), written)

    def forward(weights: Any, cache: Any, tokens: Any, start: Any) -> Any:
        x = cut(jnp.take(cut(weights["embed"], table), tokens, axis=0), residual)

        def layer(x: Any, inputs: Any) -> Any:
            w, k, v = inputs
            y = rms_norm(x, w["norm1"])
            split = (*y.shape[:2], -1, size)
            q = cut(product(y, w["q"]).reshape(split), heads)
            k = write(k, cut(product(y, w["k"]).reshape(split), heads), start)
            v = write(v, cut(product(y, w["v"]).reshape(split), heads), start)
            mixed = attend(q, cut(k, read), cut(v, read), start)
            x = cut(x + product(mixed, w["o"]), residual)
            y = rms_norm(x, w["norm2"])
            hidden = jax.nn.silu(product(y, w["gate"])) * product(y, w["up"])
            x = cut(x + product(hidden, w["down"]), residual)
            return x, (k, v, x if inspected else None)

        layers = weights["layers"]
        if first:
            layers = {
                name: {"w": w["q8"].astype(x.dtype) * w["scale"][:, None]}
                if "norm" not in name
                else w
                for name, w in layers.items()
            }
        x, (k, v, states) = jax.lax.scan(layer, x, (layers, cache["k"], cache["v"]))
        if not every_position:
            x = x[:, -1:]
        scores = cut(product(rms_norm(x, weights["norm"]), weights["head"]), logits)
        return {"k": k, "v": v}, scores[:, -1], states, scores

    def generate(weights: Any, cache: Any, prompt: Any) -> Any:
        if cache_dtype:
            cache = jax.tree.map(lambda x: x.astype("float32"), cache)
        cache, scores, states, everything = forward(weights, cache, prompt, 0)
        token = scores.argmax(-1)

        def next_token(step: Any, carry: Any) -> Any:
            cache, token, out = carry
            cache, scores, *_ = forward(weights, cache, token[:, None], _PROMPT + step)
            token = scores.argmax(-1)
            return cache, token, out.at[:, step].set(token)

        out = jnp.zeros((_BATCH, _NEW), "int32")
        cache, _, out = jax.lax.fori_loop(0, _NEW, next_token, (cache, token, out))
        if cache_dtype:
            cache = jax.tree.map(lambda x: x.astype(cache_dtype), cache)
        return cache, out, states, everything if every_position else None

    rules = [
        ("embed", P("tp")),
        ("head/q8", P(None, "tp")),
        ("head/scale", P("tp")),
        ("norm", P()),
        ("layers/o/q8", output),
        ("layers/o/scale", P()),
        ("down/q8", P(None, "tp")),
        ("down/scale", P()),
        ("q8", P(None, None, "tp")),
        ("scale", P(None, "tp")),
    ]
    plan = sr.plan(_int8_weights(), rules, mesh)
    shape = jax.ShapeDtypeStruct((_LAYERS, _BATCH, _LENGTH, kept, size), "float32")
    cache = sr.plan({"k": shape, "v": shape}, [("[kv]", cache_spec)], mesh)
    tokens = abstract(mesh, prompt, (_BATCH, _PROMPT))
    out_shardings = (cache.shardings(), None, None, None) if returned else None
    jitted = jax.jit(generate, donate_argnums=1 if donate else (), out_shardings=out_shardings)
    compiled = jitted.lower(plan.abstract(), cache.abstract(), tokens).compile()
    return Built(compiled, (plan, cache, prompt), (cache, None, None, None))


_DECODE_FAULTS: Final = {
    "the cache is gathered over tp where it is read": {"read": P("data")},
    "the cache is gathered over data where it is read": {"read": P(None, None, "tp")},
    "the cache is not donated": {"donate": False},
    "the cache is whole over tp": {"cache_spec": P(None, "data")},
    "the cache is whole over data": {"cache_spec": P(None, None, None, "tp")},
    "the cache is cut over its positions instead of heads": {"cache_spec": P(None, "data", "tp")},
    "the new cache is constrained to positions": {"written": P("data", "tp")},
    "weights are dequantized, then gathered": {"dequantized": P()},
    "all layers are dequantized before the scan": {"first": True},
    "logits of each position are gathered": {"every_position": True, "logits": P("data")},
    "the output projection is cut by columns": {"output": P(None, None, "tp")},
    "the residual is cut over tp after each layer": {"residual": P("data", None, "tp")},
    "residual whole over data": {"residual": P()},
    "heads are gathered before attention": {"heads": P("data")},
    "the mask is materialized": {"mask": True},
    "the last logits are gathered": {"logits": P("data")},
    "each layer's states are returned": {"inspected": True},
    "keys and values are repeated before the cache": {"repeated": True},
    "the embedding table is gathered": {"table": P()},
    "the cache comes out in another dtype": {"cache_dtype": "bfloat16"},
    # These look wrong.
    "the prompt comes in whole": {"prompt": P()},
    "no out_shardings": {"returned": False},
    "logits of each position are returned as they are cut": {"every_position": True},
}


def _long_context(
    *,
    batch: P = P("data", "seq"),
    residual: P | None = P("data", "seq"),
    queries: P | None = P("data", "seq"),
    keys: P | None = P("data"),
    keys_before: P | None = None,
    logits: P | None = P("data", "seq"),
    table: P | None = P(),
    kernels: P = P(None, ("data", "seq")),
    gathered: P | None = P(),
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    repeated: bool = False,
    shifted: bool = False,
    flipped: bool = False,
    gradients: P | None = None,
    inspected: bool = False,
    flattened: bool = False,
    moments: P | None = None,
) -> Built:
    """Train a decoder whose tokens are cut over batch and sequence, the weights over both axes."""
    mesh = mesh_of(data=2, seq=4)
    cut = cutter(mesh)
    width, heads, groups, size, hidden, words, length = 256, 8, 2, 32, 512, 1024, 512
    tx = optax.adamw(1e-3)
    layer_shapes = {
        "q": (width, heads * size),
        "k": (width, groups * size),
        "v": (width, groups * size),
        "o": (heads * size, width),
        "up": (width, hidden),
        "down": (hidden, width),
        "norm1": (width,),
        "norm2": (width,),
    }
    shapes = {
        "embed": jax.ShapeDtypeStruct((words, width), "float32"),
        "head": jax.ShapeDtypeStruct((width, words), "float32"),
        "layers": {
            name: jax.ShapeDtypeStruct((_LAYERS, *shape), "float32")
            for name, shape in layer_shapes.items()
        },
    }
    plan = sr.plan(shapes, [("norm", P()), ("layers", kernels), ("", P(("data", "seq")))], mesh)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q = cut(q.reshape(*q.shape[:2], groups, -1, size), queries)
        if repeated:
            k, v = (jnp.repeat(cut(x, keys_before), heads // groups, axis=2) for x in (k, v))
            q = q.reshape(*q.shape[:2], heads, 1, size)
        k, v = cut(k, keys), cut(v, keys)
        allowed = jnp.arange(length) <= jnp.arange(length)[:, None]
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) * size**-0.5
        mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(jnp.where(allowed, scores, -1e9)), v)
        return mixed.reshape(*mixed.shape[:2], heads * size)

    def loss(params: Any, batch: Any) -> Any:
        tokens, targets = batch["tokens"], batch["targets"]
        x = cut(cut(params["embed"], table)[tokens], residual)

        def layer(x: Any, w: Any) -> Any:
            w = {name: cut(leaf, gathered if leaf.ndim == 2 else None) for name, leaf in w.items()}
            y = rms_norm(x, w["norm1"])
            split = (*y.shape[:2], groups, size)
            k, v = (y @ w["k"]).reshape(split), (y @ w["v"]).reshape(split)
            if flipped:  # positions in a zigzag, for a better balance
                k, v = (jnp.concatenate([x[:, ::2], x[:, 1::2]], 1) for x in (k, v))
            x = cut(x + attend(y @ w["q"], k, v) @ w["o"], residual)
            y = rms_norm(x, w["norm2"])
            if flattened:
                y = y.reshape(-1, width)
            x = cut(x + (jax.nn.silu(y @ w["up"]) @ w["down"]).reshape(x.shape), residual)
            return x, x if inspected else None

        x, states = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params["layers"])
        scores = cut(x @ cut(params["head"], table), logits)
        if shifted:
            scores, targets = scores[:, :-1], tokens[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
        return losses.mean(), states

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, states), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda leaf: cut(leaf, gradients), grads)
        updates, state = tx.update(grads, state, params)
        if moments is not None:
            state = jax.tree.map(lambda leaf: cut(leaf, moments), state)
        return optax.apply_updates(params, updates), state, (value, states)

    tokens = abstract(mesh, batch, (8, length))
    return train_step(
        step,
        plan,
        jax.eval_shape(tx.init, shapes),
        {"tokens": tokens, "targets": tokens},
        donate=donate,
        returned=returned,
    )


_LONG_FAULTS: Final = {
    "activations without the sequence axis": {"residual": P("data"), "queries": P("data"), "logits": P("data")},
    "tokens without the sequence axis, no constraints": {
        "batch": P("data"), "residual": None, "queries": None, "logits": None, "keys": None,
    },
    "tokens whole, no constraints": {
        "batch": P(), "residual": None, "queries": None, "logits": None, "keys": None,
    },
    "no constraints": {"residual": None, "queries": None, "logits": None, "keys": None, "gathered": None, "table": None},
    "queries are gathered too": {"queries": P("data")},
    "keys are gathered over data too": {"keys": P()},
    "keys and values are repeated before they are gathered": {"repeated": True, "keys_before": P("data", "seq")},
    "attention over heads: all-to-all instead of a gather": {"queries": P("data", None, "seq"), "keys": P("data")},
    "logits whole over the sequence": {"logits": P("data")},
    "logits over the vocabulary": {"logits": P("data", None, "seq")},
    "no remat": {"remat": False},
    "not donated": {"donate": False},
    "weights are planned on data alone": {"kernels": P(None, "data")},
    "gradients are constrained to be whole": {"gradients": P()},
    "moments are whole inside": {"moments": P(), "returned": False},
    "keys in a zigzag before they are gathered": {"flipped": True},
    "states of each layer are returned": {"inspected": True},
    "tokens are flattened for the MLP": {"flattened": True},
    # These look wrong.
    "the batch comes in whole over the sequence": {"batch": P("data")},
    "no constraint on the residual": {"residual": None},
    "logits are shifted instead of targets": {"shifted": True},
    "weights are multiplied as they are cut": {"gathered": None},
    "the table is looked up as it is cut": {"table": None},
}  # fmt: skip

STEPS: Final = (
    Step("decode with int8 weights", _decode, _DECODE_FAULTS),
    Step("a decoder cut over the sequence", _long_context, _LONG_FAULTS),
)
