"""A Llama in plain JAX, with scanned and recomputed layers, also with accumulated gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.parts import abstract, cutter, mesh_of, rms_norm, train_step
from tests.steps.score import Built, Step

__all__ = ["STEPS"]

_WORDS: Final = 2048
_WIDTH: Final = 256
_INNER: Final = 768
_HEADS: Final = (8, 4, 32)  # queries, keys and values, size
_LAYERS: Final = 3
_LENGTH: Final = 128


def _shapes() -> Any:
    queries, keys, size = _HEADS
    layers = {
        "norm1": (_WIDTH,),
        "norm2": (_WIDTH,),
        "q": (_WIDTH, queries, size),
        "k": (_WIDTH, keys, size),
        "v": (_WIDTH, keys, size),
        "o": (queries, size, _WIDTH),
        "gate": (_WIDTH, _INNER),
        "up": (_WIDTH, _INNER),
        "down": (_INNER, _WIDTH),
    }
    float32 = partial(jax.ShapeDtypeStruct, dtype="float32")
    return {
        "embed": float32((_WORDS, _WIDTH)),
        "layers": {name: float32((_LAYERS, *shape)) for name, shape in layers.items()},
        "norm": float32((_WIDTH,)),
        "head": float32((_WIDTH, _WORDS)),
    }


def _llama(
    *,
    axes: tuple[tuple[str, int], ...] = (("fsdp", 4), ("tp", 2)),
    batch: P = P("fsdp"),
    residual: P | None = P("fsdp"),
    heads: P | None = P("fsdp", None, "tp"),
    keys: P | None = P("fsdp", None, "tp"),
    scores: P | None = None,
    hidden: P | None = P("fsdp", None, "tp"),
    last: P | None = None,
    logits: P | None = P("fsdp", None, "tp"),
    looked_up: P | None = P("tp"),
    kernels: P | None = None,
    stacked: P | None = None,
    o: P = P(None, "tp", None, "fsdp"),
    up: P = P(None, "fsdp", "tp"),
    head: P = P("fsdp", "tp"),
    embed: P = P("tp", "fsdp"),
    moments: P | None = None,
    gradients: P | None = None,
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    policy: Any = None,
    metrics: str = "",
    picked: bool = False,
    merged: bool = False,
    fused: bool = False,
    evaluated: bool = False,
    accumulate: int = 1,
    accumulator: P | str | None = "planned",
    split: str = "",
    unrolled: bool = False,
    ema: P | None = None,
) -> Built:
    """Train it with AdamW."""
    mesh = mesh_of(**dict(axes))
    cut = cutter(mesh)
    queries, count, size = _HEADS
    rows = batch
    shapes = _shapes()
    rules = [
        ("norm", P()),
        ("embed", embed),
        ("head", head),
        ("/[qkv]$", P(None, "fsdp", "tp")),
        ("/o$", o),
        ("gate|up", up),
        ("down", P(None, "tp", "fsdp")),
    ]
    plan = sr.plan(shapes, rules, mesh)
    tx = optax.adamw(1e-3)

    def attend(y: Any, w: Any) -> Any:
        q = cut(jnp.einsum("btd,dhk->bthk", y, w["q"]), heads)
        k, v = (cut(jnp.einsum("btd,dhk->bthk", y, w[name]), keys) for name in "kv")
        if merged:
            q, k, v = (x.reshape(*x.shape[:2], -1) for x in (q, k, v))
            q, k, v = jnp.split(
                jnp.concatenate([q, k, v], -1), [queries * size, (queries + count) * size], -1
            )
            q, k, v = (x.reshape(*x.shape[:2], -1, size) for x in (q, k, v))
        q = q.reshape(*q.shape[:2], count, queries // count, size)
        weights = jnp.einsum("btgrk,bsgk->bgrts", q, k) * size**-0.5
        allowed = jnp.tril(jnp.ones((_LENGTH, _LENGTH), bool))
        weights = jax.nn.softmax(cut(jnp.where(allowed, weights, -1e9), scores))
        mixed = jnp.einsum("bgrts,bsgk->btgrk", weights, v)
        mixed = cut(mixed.reshape(*mixed.shape[:2], queries, size), heads)
        return jnp.einsum("bthk,hkd->btd", mixed, w["o"])

    def layer(x: Any, w: Any) -> Any:
        if kernels is not None:
            w = {name: cut(leaf, kernels) if leaf.ndim > 1 else leaf for name, leaf in w.items()}
        x = cut(x + attend(rms_norm(x, w["norm1"]), w), residual)
        y = rms_norm(x, w["norm2"])
        if fused:
            gate, y = jnp.split(y @ jnp.concatenate([w["gate"], w["up"]], 1), 2, -1)
        else:
            gate, y = y @ w["gate"], y @ w["up"]
        y = cut(jax.nn.silu(gate) * y, hidden)
        return cut(x + y @ w["down"], residual), x if metrics == "states" else None

    def forward(params: Any, tokens: Any) -> Any:
        x = cut(cut(params["embed"], looked_up)[tokens], residual)
        layers = params["layers"]
        if stacked is not None:
            layers = {n: cut(w, stacked) if w.ndim > 2 else w for n, w in layers.items()}
        apply = jax.checkpoint(layer, policy=policy) if remat else layer
        if unrolled:
            for i in range(_LAYERS):
                x, kept = apply(x, jax.tree.map(lambda w, i=i: w[i], layers))
        else:
            x, kept = jax.lax.scan(apply, x, layers)
        x = cut(rms_norm(x, params["norm"]), last)
        return cut(x @ cut(params["head"], P(None, "tp")), logits), kept

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        guesses, kept = forward(params, tokens)
        log_z = jax.nn.logsumexp(guesses, -1)
        if picked:
            chances = jax.nn.log_softmax(cut(guesses, P("fsdp")))
            value = -jnp.take_along_axis(chances, targets[..., None], -1).mean()
        else:
            value = (log_z - (guesses * jax.nn.one_hot(targets, _WORDS)).sum(-1)).mean()
        returned = {"states": kept, "logits": guesses, "correct": guesses.argmax(-1) == targets}
        return value, returned.get(metrics)

    differentiate = jax.value_and_grad(loss, has_aux=True)

    def accumulated(params: Any, batch: Any) -> Any:
        specs = jax.tree.map(lambda s: s.spec, plan.shardings())
        where = specs if accumulator == "planned" else jax.tree.map(lambda _: accumulator, specs)

        def place(tree: Any) -> Any:
            return jax.tree.map(cut, tree, where)

        def micro(total: Any, part: Any) -> Any:
            (value, _), grads = differentiate(params, *part)
            return place(jax.tree.map(jnp.add, total, grads)), value

        def parts(x: Any) -> Any:
            if split == "rows":  # consecutive rows: they are on one device
                return x.reshape(accumulate, -1, _LENGTH)
            x = x.reshape(-1, accumulate, _LENGTH).swapaxes(0, 1)
            return cut(x, {"whole": P(), "over tp": P(None, "tp")}.get(split, P(None, *rows)))

        texts = tuple(parts(batch[name]) for name in ("tokens", "targets"))
        grads, values = jax.lax.scan(micro, place(jax.tree.map(jnp.zeros_like, params)), texts)
        return (values.mean(), None), jax.tree.map(lambda g: g / accumulate, grads)

    def step(params: Any, state: Any, batch: Any) -> Any:
        if accumulate > 1:
            (value, kept), grads = accumulated(params, batch)
        else:
            (value, kept), grads = differentiate(params, batch["tokens"], batch["targets"])
        if gradients is not None:
            grads = jax.tree.map(lambda g: cut(g, gradients), grads)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if evaluated:
            kept = loss(params, batch["tokens"], batch["targets"])[0]
        if ema is not None:
            kept = jax.tree.map(lambda p: cut(0.99 * p, ema), params)
        return params, state, (value, kept)

    state = jax.eval_shape(tx.init, shapes)
    given = None
    if moments is not None:
        sharding = NamedSharding(mesh, moments)
        given = (
            plan.abstract(),
            jax.tree.map(
                lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), state
            ),
        )
    tokens = abstract(mesh, batch, (64 if accumulate > 1 else 32, _LENGTH))
    texts = {"tokens": tokens, "targets": tokens}
    return train_step(step, plan, state, texts, donate=donate, returned=returned, given=given)


_NOTHING: Final = {"residual": None, "heads": None, "keys": None, "hidden": None, "logits": None}
_FAULTS: Final = {
    "no constraints": {**_NOTHING, "looked_up": None},
    "no constraints but of the table": _NOTHING,
    "no constraints, and the batch whole": {**_NOTHING, "batch": P(), "looked_up": None},
    "the residual alone is not constrained": {"residual": None, "looked_up": None},
    "the residual is whole": {"residual": P()},
    "the residual is cut over tp instead of the batch": {"residual": P("tp")},
    "the residual's width is cut over tp": {"residual": P("fsdp", None, "tp")},
    "the residual's width is cut over fsdp": {"residual": P(None, None, "fsdp")},
    "hidden is whole over tp": {"hidden": P("fsdp")},
    "hidden is whole over the batch": {"hidden": P(None, None, "tp")},
    "hidden has its axes swapped": {"hidden": P("tp", None, "fsdp")},
    "heads are whole over tp": {"heads": P("fsdp"), "keys": P("fsdp")},
    "keys are whole over tp": {"keys": P("fsdp")},
    "keys are cut over the sequence": {"keys": P("fsdp", "tp")},
    "scores are cut over the sequence": {"scores": P("fsdp", None, None, "tp")},
    "scores are whole over tp": {"scores": P("fsdp")},
    "queries, keys and values are merged and split": {"merged": True},
    "gate and up are merged and split": {"fused": True},
    "logits are whole": {"logits": P()},
    "logits are whole over tp": {"logits": P("fsdp")},
    "logits are whole over the batch": {"logits": P(None, None, "tp")},
    "the loss is of gathered logits": {"picked": True},
    "the last states are whole": {"last": P()},
    "logits are returned whole": {"metrics": "logits", "logits": P()},
    "logits are returned": {"metrics": "logits"},
    "states of layers are returned": {"metrics": "states"},
    "kernels are gathered over tp too": {"kernels": P()},
    "the stack is gathered before the loop": {"stacked": P(None, None, "tp")},
    "the stack is gathered whole before the loop": {"stacked": P()},
    "the output of attention is transposed": {"o": P(None, "fsdp", None, "tp")},
    "up is transposed": {"up": P(None, "tp", "fsdp")},
    "the head is transposed": {"head": P("tp", "fsdp")},
    "gradients are whole": {"gradients": P()},
    "moments come in whole": {"moments": P()},
    "an average of parameters is whole": {"ema": P()},
    "not donated": {"donate": False},
    "not donated, nor out_shardings": {"donate": False, "returned": False},
    "no remat": {"remat": False},
    "remat that saves everything": {"policy": jax.checkpoint_policies.everything_saveable},
    "evaluation in the same step": {"evaluated": True},
    # These look wrong.
    "the batch comes in whole": {"batch": P()},
    "no out_shardings": {"returned": False},
    "hits are returned": {"metrics": "correct"},
    "layers are not scanned": {"unrolled": True},
    "the table is looked up as it is cut": {"looked_up": None},
}  # fmt: skip

_BOTH: Final = ("data", "fsdp")
_ACCUMULATING: Final = {
    "gradients are summed over data in every micro-batch": {
        "axes": (("data", 2), ("fsdp", 2), ("tp", 2)), "batch": P(_BOTH), "residual": P(_BOTH),
        **{name: P(_BOTH, None, "tp") for name in ("heads", "keys", "hidden", "logits")},
    },
    "the batch is cut over data, activations are not": {
        "axes": (("data", 2), ("fsdp", 2), ("tp", 2)), "batch": P(_BOTH),
    },
    "sums are not constrained": {"accumulator": None},
    "sums are whole": {"accumulator": P()},
    "sums are whole, and what is returned is not constrained": {"accumulator": P(), "returned": False},
    "micro-batches are whole": {"split": "whole"},
    "micro-batches are whole, and activations not constrained": {
        "split": "whole", "residual": None, "looked_up": None, "heads": None, "keys": None, "hidden": None,
        "logits": None,
    },
    "micro-batches are cut over tp": {"split": "over tp"},
    "micro-batches of consecutive rows, and activations not constrained": {
        "split": "rows", "residual": None, "looked_up": None, "heads": None, "keys": None, "hidden": None,
        "logits": None,
    },
    "kernels are gathered whole before the loops": {"stacked": P()},
    **{
        name: _FAULTS[name]
        for name in (
            "the residual is whole",
            "hidden is whole over tp",
            "logits are whole",
            "logits are whole over the batch",
            "the last states are whole",
            "up is transposed",
            "gradients are whole",
            "not donated",
            "no remat",
        )
    },
    # These look wrong.
    "micro-batches of consecutive rows": {"split": "rows"},
    "the batch comes in whole": {"batch": P()},
}  # fmt: skip

STEPS: Final = (
    Step("a Llama in plain JAX", _llama, _FAULTS),
    Step("accumulated gradients", partial(_llama, accumulate=4), _ACCUMULATING),
)
