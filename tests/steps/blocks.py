"""Parts of decoders in plain JAX, which constrain what a case has a place for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tests.steps.model import Case


def rms_norm(x: Any, scale: Any) -> Any:
    """Return x over its root mean square."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def entropy(scores: Any, targets: Any) -> Any:
    """Return the mean cross entropy, by products with one-hot targets."""
    hot = jax.nn.one_hot(targets, scores.shape[-1])
    return (jax.nn.logsumexp(scores, -1) - (scores * hot).sum(-1)).mean()


def causal(length: int) -> Any:
    """Return which keys a query may see."""
    return jnp.tril(jnp.ones((length, length), bool))


def attend(case: Case, q: Any, k: Any, v: Any, allowed: Any = None) -> Any:
    """Return attention of [row, token, head, feature]; several queries may share a key."""
    is_shared = q.shape[2] > k.shape[2]
    h, g = ("gr", "g") if is_shared else ("h", "h")
    queries = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]) if is_shared else q
    scores = jnp.einsum(f"bt{h}k,bs{g}k->b{h}ts", queries, k) * q.shape[-1] ** -0.5
    allowed = causal(q.shape[1]) if allowed is None else allowed
    weights = jax.nn.softmax(case.cut(jnp.where(allowed, scores, -1e9), "scores"))
    return jnp.einsum(f"b{h}ts,bs{g}k->bt{h}k", weights, v).reshape(q.shape)


def attention(case: Case, y: Any, w: Any, mix: Callable[..., Any] = attend) -> Any:
    """Return y behind queries, keys and values of heads, what `mix` makes of them, and o."""
    if "qkv" in w:
        q, k, v = jnp.einsum("btd,dchk->cbthk", y, w["qkv"])
    else:
        q, k, v = (jnp.einsum("btd,dhk->bthk", y, w[name]) for name in "qkv")
    q, k, v = case.cut(q, "heads"), case.cut(k, "keys", "heads"), case.cut(v, "keys", "heads")
    return jnp.einsum("bthk,hkd->btd", case.cut(mix(case, q, k, v), "mixed"), w["o"])


def perceptron(case: Case, y: Any, w: Any) -> Any:
    """Return y behind up and down, and a gate if there is one."""
    up = jax.nn.silu(y @ w["gate"]) * (y @ w["up"]) if "gate" in w else jax.nn.gelu(y @ w["up"])
    return case.cut(up, "hidden") @ w["down"]


def block(
    case: Case, x: Any, w: Any, attention: Callable[..., Any] = attention, perceptron: Callable[..., Any] = perceptron
) -> tuple[Any, Any]:
    """Return x behind a layer, for a scan."""
    w = case.cut_all(w, "kernels", 2)
    y = attention(case, rms_norm(x, w.get("norm1", 1.0)), w)
    x = case.cut(x + y, "residual")
    y = perceptron(case, rms_norm(x, w.get("norm2", 1.0)), w)
    x = case.cut(x + y, "residual")
    return x, case.keep(x, "states")


def decoder(
    case: Case, params: Any, batch: Any, block: Callable[..., Any] = block, norm: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Return the loss of a table, layers in a scan, and a head."""
    x = case.cut(case.cut(params["embed"], "table")[batch["tokens"]], "residual")
    layers = case.cut_all(params["layers"], "stack", 3)
    layer, kept = case.recomputed(partial(block, case)), None
    if case.has("layers are not scanned"):
        for i in range(len(jax.tree.leaves(layers)[0])):
            x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], layers))
    else:
        x, kept = jax.lax.scan(layer, x, layers)
    norm = params.get("norm", norm)
    x = x if norm is None else case.cut(rms_norm(x, norm), "last")
    targets = batch["targets"]
    if case.has("the loss is of a shifted sequence"):
        x, targets = x[:, :-1], targets[:, 1:]
    scores = case.cut(x @ case.cut(params["head"], "head"), "logits")
    return entropy(scores, targets), {"states": kept, "last": x, "logits": scores}
