"""Steps without attention: a linear recurrence, towers, a recommender, an LSTM and a mixer."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

from tests.steps.blocks import entropy, rms_norm
from tests.steps.model import Case, Model, arrays, stacked


def _adam(case: Case, plan: Any) -> optax.GradientTransformation:
    return optax.adam(1e-3)


# A linear recurrence


def _recurrent_shapes(case: Case) -> Any:
    width, inner, is_fused = 256, 512, case.has("one kernel into both branches, split after it")
    layer = {"into": (width, 2 * inner) if is_fused else (width, 2, inner), "taps": (4, inner)}
    layer |= {"decay": (inner,), "gate": (inner, 2), "out": (inner, width), "norm": (width,)}
    tables = arrays({"embed": (1024, width), "head": (width, 1024)})
    return {**tables, "layers": stacked(3, layer)}


def _recur(case: Case, a: Any, b: Any) -> Any:
    a, b = case.cut(a, "scanned"), case.cut(b, "scanned")
    if case.has("a loop over the sequence instead of a scan of it"):
        inputs = (a.swapaxes(0, 1), b.swapaxes(0, 1))
        first = jnp.zeros_like(b[:, 0])
        h = jax.lax.scan(lambda h, ab: (ab[0] * h + ab[1],) * 2, first, inputs)[1]
        return h.swapaxes(0, 1)

    def combine(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(combine, (a, b), axis=1)[1]


def _recurrent_loss(case: Case, params: Any, batch: Any) -> Any:
    cut = case.cut

    def layer(x: Any, w: Any) -> Any:
        w, length = case.cut_all(w, "kernels", 2), x.shape[1]
        y = rms_norm(x, w["norm"])
        if w["into"].ndim == 2:
            u, z = jnp.split(cut(y @ w["into"], "channels"), 2, axis=-1)
        else:
            both = jnp.einsum("btd,dce->cbte", y, w["into"])
            u, z = cut(both[0], "channels"), cut(both[1], "channels")
        padded = cut(jnp.pad(u, ((0, 0), (3, 0), (0, 0))), "padded")
        u = sum(padded[:, i : i + length] * w["taps"][i] for i in range(4))
        r, i = (jax.nn.sigmoid(u * w["gate"][:, k]) for k in range(2))
        a = jnp.exp(-8 * jax.nn.softplus(w["decay"]) * r)
        h = _recur(case, a, jnp.sqrt(1 - a**2 + 1e-6) * i * u)
        if case.has("channels are regrouped across tp"):  # each group takes from its neighbours
            h = h.reshape(*h.shape[:2], 8, -1).swapaxes(2, 3).reshape(h.shape)
        x = cut(x + cut(h * jax.nn.silu(z), "channels") @ w["out"], "residual")
        return x, h[:, -1] if case.told == "last" else case.keep(h, "states")

    x = cut(cut(params["embed"], "table")[batch["tokens"]], "residual")
    x, kept = jax.lax.scan(case.recomputed(layer), x, params["layers"])
    scores = cut(x @ cut(params["head"], "head"), "logits")
    value = entropy(scores, batch["targets"])
    if case.has("the targets are picked from flattened chances"):
        chances = jax.nn.log_softmax(scores).reshape(-1, scores.shape[-1])
        value = -chances[jnp.arange(chances.shape[0]), batch["targets"].reshape(-1)].mean()
    return value, {"states": kept, "last": kept}


# Contrastive towers


def _towers(case: Case, params: Any, batch: Any) -> Any:
    """Contrast each image with the texts of all."""

    def tower(x: Any, name: str) -> Any:
        h = case.cut(jax.nn.gelu(x @ params[f"{name}_up"]), "hidden")
        y = case.cut(h @ params[f"{name}_down"], "features") @ params[f"{name}_out"]
        return case.cut(y / jnp.linalg.norm(y, axis=-1, keepdims=True), "embedding")

    images, texts = tower(batch["images"], "image"), tower(batch["texts"], "text")
    if case.has("embeddings are repeated first"):
        images, texts = (jnp.tile(x, (1, 8)) for x in (images, texts))
    scores = case.cut(10 * images @ texts.T, "scores")
    value = (jax.nn.logsumexp(scores, 1) - jnp.diagonal(scores)).mean()
    return value, {"scores": scores}


# A recommender


def _recommender(case: Case, params: Any, batch: Any) -> Any:
    """Look numbers up in tables, let them interact, and guess a click."""
    dense = case.cut(jax.nn.relu(batch["dense"] @ params["bottom"]), "dense")
    table = case.cut(params["table"], "table")
    is_hot = case.has("the table is one-hot")
    rows = jax.nn.one_hot(batch["numbers"], 8192) @ table if is_hot else table[batch["numbers"]]
    rows = case.cut(rows, "rows")
    all_rows = jnp.concatenate([dense[:, None], rows], 1)
    pairs = case.cut(jnp.einsum("bid,bjd->bij", all_rows, all_rows), "pairs")
    x = jnp.concatenate([dense, pairs.reshape(len(pairs), -1)], 1)
    h = case.cut(jax.nn.relu(x @ params["up"]), "hidden")
    guess = case.cut(h @ params["down"], "guess").sum(-1)
    return jnp.mean((guess - batch["clicks"]) ** 2), {"rows": rows}


# An LSTM


def _lstm(case: Case, params: Any, batch: Any) -> Any:
    """Go over a sequence, a step at a time."""
    cut = case.cut
    kernel = cut(params["recurrent"], "recurrent")
    x = cut(jnp.einsum("btd,dgh->tbgh", batch["x"], params["input"]), "inputs")

    def cell(carry: Any, x: Any) -> Any:
        h, c = carry
        gates = cut(x + jnp.einsum("bh,hgk->bgk", h, kernel), "gates")
        i, f, o, g = (gates[:, n] for n in range(4))
        c = cut(jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g), "memory")
        return (cut(jax.nn.sigmoid(o) * jnp.tanh(c), "state"), c), cut(h, "kept")

    zeros = jnp.zeros((len(batch["x"]), 512))
    _, states = jax.lax.scan(case.recomputed(cell), (zeros, zeros), x)
    guess = cut(states @ params["head"], "logits")
    return (jax.nn.logsumexp(guess, -1) - guess[..., 0]).mean(), {"logits": guess}


# A mixer


def _mixer(case: Case, params: Any, batch: Any) -> Any:
    """Mix over places, then over channels, in three layers."""
    cut = case.cut

    def layer(x: Any, w: Any) -> Any:
        y = cut(jax.nn.gelu(jnp.einsum("bsd,sh->bhd", x, w["places"])), "mixed")
        x = cut(x + jnp.einsum("bhd,hs->bsd", y, w["back"]), "residual")
        y = cut(jax.nn.gelu(x @ w["up"]), "hidden")
        return cut(x + y @ w["down"], "residual"), None

    layers = {name: cut(params[name], "stack") for name in ("places", "back", "up", "down")}
    x = cut(batch["x"] @ params["first"], "residual")
    x, _ = jax.lax.scan(case.recomputed(layer), x, layers)
    guess = cut(x.mean(1) @ params["head"], "logits")
    return (jax.nn.logsumexp(guess, -1) - guess[..., 0]).mean(), {"states": x}


STEPS: Final = {
    "a linear recurrence": Model(_recurrent_loss, _recurrent_shapes, optimizer=_adam),
    "contrastive towers": Model(_towers, optimizer=_adam),
    "a recommender with a table": Model(_recommender, optimizer=_adam),
    "an LSTM": Model(_lstm, optimizer=_adam),
    "a mixer": Model(_mixer, optimizer=_adam),
}
