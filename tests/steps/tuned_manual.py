"""Steps in shard_map: a pipeline of stages, and attention by a ring."""

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

_WIDTH: Final = 256
_INNER: Final = 512
_WORDS: Final = 512
_LENGTH: Final = 64


def _float32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "float32")


def _pipeline(
    *,
    batch: P = P("data"),
    mode: str = "",
    sends: str = "activations",
    outputs: str = "last",
    reduced: str = "once",
    weights: P = P("pp"),
    tables: P = P(None, "pp"),
    logits: P | None = P("data", None, "pp"),
    residual: P | None = P("data"),
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    gradients: P | None = None,
    measured: str = "",
) -> Built:
    """Train perceptrons in four stages of two layers, by GPipe's schedule."""
    mesh, micro = mesh_of(data=2, pp=4), 8
    cut = cutter(mesh)
    layers = {
        "up": _float32(8, _WIDTH, _INNER),
        "down": _float32(8, _INNER, _WIDTH),
        "norm": _float32(8, _WIDTH),
    }
    shapes = {"embed": _float32(_WORDS, _WIDTH), "layers": layers, "head": _float32(_WIDTH, _WORDS)}
    rules = [("layers", weights), ("embed|head", tables)]
    plan = sr.plan(shapes, rules, mesh)
    tx = optax.adam(1e-3)

    def layer(x: Any, w: Any) -> Any:
        return x + jax.nn.gelu(rms_norm(x, w["norm"]) @ w["up"]) @ w["down"], None

    def stages(w: Any, x: Any) -> Any:
        """Return the outputs of the last stage; x: [micro-batch, row, length, width]."""
        stage, count = jax.lax.axis_index("pp"), 4
        ring = [(i, (i + 1) % count) for i in range(count)]
        if mode == "all stages' weights are gathered":
            w = jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, "pp", axis=0, tiled=True), w)
            w = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, 2 * stage, 2, 0), w)

        def run(w: Any, x: Any) -> Any:
            return jax.lax.scan(layer, x, w)[0]

        run = jax.checkpoint(run) if remat else run

        def tick(carry: Any, i: Any) -> Any:
            incoming, done = carry
            if mode == "weights are gathered in every tick":
                used = jax.tree.map(
                    lambda leaf: jax.lax.all_gather(leaf, "pp", axis=0, tiled=True), w
                )
                used = jax.tree.map(
                    lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, 2 * stage, 2, 0), used
                )
            else:
                used = w
            first = jax.lax.dynamic_index_in_dim(x, jnp.clip(i, 0, micro - 1), 0, False)
            y = run(used, jnp.where(stage == 0, first, incoming))
            at = jnp.clip(i - count + 1, 0, micro - 1)
            now = jax.lax.dynamic_index_in_dim(done, at, 0, False)
            kept = jnp.where((stage == count - 1) & (i >= count - 1), y, now)
            done = jax.lax.dynamic_update_index_in_dim(done, kept, at, 0)
            if sends == "everything":
                every = jax.lax.all_gather(y, "pp")
                incoming = every[(stage - 1) % count]
            elif sends == "a sum":
                spread = jnp.zeros((count, *y.shape), y.dtype).at[(stage + 1) % count].set(y)
                incoming = jax.lax.psum(spread, "pp")[stage]
            elif sends == "outputs too":
                incoming, done = (
                    jax.lax.ppermute(y, "pp", ring),
                    jax.lax.psum(jnp.where(stage == count - 1, done, 0), "pp"),
                )
            elif sends == "twice":
                incoming = jax.lax.ppermute(
                    jax.lax.ppermute(y, "pp", ring), "pp", [(b, a) for a, b in ring]
                )
                incoming = jax.lax.ppermute(incoming, "pp", ring)
            else:
                incoming = jax.lax.ppermute(y, "pp", ring)
            return (incoming, done), None

        zeros = jnp.zeros_like(x[0])
        (_, done), _ = jax.lax.scan(tick, (zeros, jnp.zeros_like(x)), jnp.arange(micro + count - 1))
        if outputs == "gathered":
            return jax.lax.all_gather(done, "pp")[-1]
        done = jnp.where(stage == count - 1, done, 0)
        if outputs == "summed":
            return jax.lax.psum(done, "pp")
        # Each stage gets a part of the rows for the head.
        return jax.lax.psum_scatter(done, "pp", scatter_dimension=2, tiled=True)

    def loss(params: Any, batch: Any) -> Any:
        x = cut(cut(params["embed"], P())[batch["tokens"]], residual)
        x = cut(x.reshape(-1, micro, _LENGTH, _WIDTH).swapaxes(0, 1), P(None, "data"))
        inside = jax.tree.map(lambda _: P("pp"), params["layers"])
        out = P(None, "data") if outputs != "last" else P(None, "data", "pp")
        y = jax.shard_map(
            stages, mesh=mesh, in_specs=(inside, P(None, "data")), out_specs=out, check_vma=False
        )(params["layers"], x)
        place = P("data", None, "pp") if outputs == "last" else logits and P("data")
        y = cut(
            y.swapaxes(0, 1).reshape(-1, _LENGTH, _WIDTH),
            P("data", "pp") if outputs == "last" else place,
        )
        scores = y @ cut(params["head"], P())
        scores = cut(
            scores, P("data", "pp") if outputs == "last" and logits is not None else logits
        )
        hot = jax.nn.one_hot(batch["targets"], _WORDS)
        value = (jax.nn.logsumexp(scores, -1) - (scores * hot).sum(-1)).mean()
        return value, {"logits": scores, "states": y}.get(measured)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda g: cut(g, gradients), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, kept)

    tokens = abstract(mesh, batch, (64, _LENGTH))
    arrays = {"tokens": tokens, "targets": tokens}
    return train_step(
        step, plan, jax.eval_shape(tx.init, shapes), arrays, donate=donate, returned=returned
    )


_PIPELINE_FAULTS: Final = {
    "all stages' weights are gathered": {"mode": "all stages' weights are gathered"},
    "weights are gathered in every tick": {"mode": "weights are gathered in every tick"},
    "all stages get the activations of all": {"sends": "everything"},
    "activations are sent by a sum": {"sends": "a sum"},
    "outputs are summed in every tick": {"sends": "outputs too"},
    "activations are sent back and forth": {"sends": "twice"},
    "outputs are summed over the stages": {"outputs": "summed"},
    "outputs of all stages are gathered": {"outputs": "gathered"},
    "layers are planned to be whole": {"weights": P()},
    "layers are cut by data": {"weights": P("data")},
    "layers are cut over their width": {"weights": P(None, "pp")},
    "gradients are whole": {"gradients": P()},
    "the batch is whole in the pipeline": {"residual": P()},
    "logits are whole": {"logits": P(), "outputs": "summed"},
    "logits are returned": {"measured": "logits"},
    "states are returned": {"measured": "states"},
    "not donated": {"donate": False},
    "no remat": {"remat": False},
    # These look wrong.
    "the batch comes in whole": {"batch": P()},
    "no out_shardings": {"returned": False},
}  # fmt: skip


def _ring(
    *,
    batch: P = P("fsdp", "sp"),
    mode: str = "ring",
    residual: P | None = P("fsdp", "sp"),
    heads: P | None = P("fsdp", "sp"),
    hidden: P | None = P("fsdp", "sp"),
    logits: P | None = P("fsdp", "sp"),
    specs: P = P("fsdp", "sp"),
    kernels: P = P(None, ("fsdp", "sp")),
    gradients: P | None = None,
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    measured: str = "",
    shifted: bool = False,
    flattened: bool = False,
) -> Built:
    """Train a decoder whose sequence is cut."""
    mesh = mesh_of(fsdp=2, sp=4)
    cut = cutter(mesh)
    count, size, length = 4, 32, 512
    width = count * size
    layers = {
        "qkv": _float32(2, width, 3, count, size),
        "o": _float32(2, count, size, width),
        "up": _float32(2, width, _INNER),
        "down": _float32(2, _INNER, width),
        "norm1": _float32(2, width),
        "norm2": _float32(2, width),
    }
    shapes = {"embed": _float32(_WORDS, width), "layers": layers, "head": _float32(width, _WORDS)}
    rules = [
        ("norm", P()),
        ("/o$", P(None, None, None, ("fsdp", "sp"))),
        ("layers/", kernels),
        (".*", P(None, ("fsdp", "sp"))),
    ]
    plan = sr.plan(shapes, rules, mesh)
    tx = optax.adamw(1e-3)
    around = [(i, (i + 1) % 4) for i in range(4)]

    def attend(q: Any, k: Any, v: Any) -> Any:
        """Return attention of a device's queries to all keys, by the running maximum."""
        here = jax.lax.axis_index("sp")
        rows = q.shape[1]
        at = here * rows + jnp.arange(rows)

        def part(q: Any, k: Any, v: Any, first: Any) -> Any:
            scores = jnp.einsum("bthk,bshk->bhts", q, k) * size**-0.5
            scores = jnp.where(first + jnp.arange(k.shape[1]) <= at[:, None], scores, -1e9)
            most = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - most)
            return jnp.einsum("bhts,bshk->bhtk", weights, v), most, weights.sum(-1, keepdims=True)

        if mode == "keys and values are gathered":
            k, v = (jax.lax.all_gather(a, "sp", axis=1, tiled=True) for a in (k, v))
        if specs != P("fsdp", "sp"):
            at = jnp.arange(rows)
        if mode == "keys and values are gathered" or specs != P("fsdp", "sp"):
            mixed, _, total = part(q, k, v, 0)
            return (mixed / total).swapaxes(1, 2)

        def turn(carry: Any, i: Any) -> Any:
            k, v, mixed, most, total = carry
            y, high, weight = part(q, k, v, ((here - i) % 4) * k.shape[1])
            higher = jnp.maximum(most, high)
            old, new = jnp.exp(most - higher), jnp.exp(high - higher)
            mixed, total = mixed * old + y * new, total * old + weight * new
            if mode == "queries are sent too":
                mixed = jax.lax.ppermute(
                    jax.lax.ppermute(mixed, "sp", around), "sp", [(b, a) for a, b in around]
                )
            if mode == "all is gathered in every turn":
                ks, vs = jax.lax.all_gather(k, "sp"), jax.lax.all_gather(v, "sp")
                k, v = ks[(here - 1) % 4], vs[(here - 1) % 4]
            else:
                k, v = (jax.lax.ppermute(a, "sp", around) for a in (k, v))
            return (k, v, mixed, higher, total), None

        rows_ = (q.shape[0], count, rows)
        zeros = jnp.zeros((*rows_, size)), jnp.full((*rows_, 1), -1e9), jnp.zeros((*rows_, 1))
        body = jax.checkpoint(turn) if remat else turn
        (_, _, mixed, _, total), _ = jax.lax.scan(body, (k, v, *zeros), jnp.arange(4))
        return (mixed / total).swapaxes(1, 2)

    ring = jax.shard_map(attend, mesh=mesh, in_specs=(specs,) * 3, out_specs=specs, check_vma=False)

    def plain(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * size**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        if mode == "scores are cut over keys":
            scores = cut(scores, P("fsdp", None, None, "sp"))
        return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)

    def layer(x: Any, w: Any) -> Any:
        q, k, v = jnp.einsum("btd,dchk->cbthk", rms_norm(x, w["norm1"]), w["qkv"])
        q, k, v = (cut(a, heads) for a in (q, k, v))
        y = plain(q, k, v) if mode in ("plain", "scores are cut over keys") else ring(q, k, v)
        x = cut(x + jnp.einsum("bthk,hkd->btd", y, w["o"]), residual)
        y = rms_norm(x, w["norm2"])
        if flattened:  # rows and their parts merged
            y = y.reshape(-1, width)
        y = jax.nn.gelu(y @ w["up"])
        y = (y if flattened else cut(y, hidden)) @ w["down"]
        return cut(x + y.reshape(x.shape), residual), None

    def loss(params: Any, batch: Any) -> Any:
        tokens, targets = batch["tokens"], batch["targets"]
        x = cut(cut(params["embed"], P())[tokens], residual)
        x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params["layers"])
        if shifted:
            x, targets = x[:, :-1], targets[:, 1:]
        scores = cut(x @ cut(params["head"], P()), None if shifted else logits)
        hot = jax.nn.one_hot(targets, _WORDS)
        value = (jax.nn.logsumexp(scores, -1) - (scores * hot).sum(-1)).mean()
        return value, {"logits": scores, "states": x}.get(measured)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda g: cut(g, gradients), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, kept)

    tokens = abstract(mesh, batch, (16, length))
    arrays = {"tokens": tokens, "targets": tokens}
    return train_step(
        step, plan, jax.eval_shape(tx.init, shapes), arrays, donate=donate, returned=returned
    )


_RING_FAULTS: Final = {
    "keys and values are gathered": {"mode": "keys and values are gathered"},
    "keys are gathered in every turn": {"mode": "all is gathered in every turn"},
    "outputs are sent back and forth": {"mode": "queries are sent too"},
    "attention without a ring": {"mode": "plain"},
    "scores are cut over keys": {"mode": "scores are cut over keys"},
    "specs of the ring forget the sequence": {"specs": P("fsdp")},
    "specs of the ring forget the batch": {"specs": P(None, "sp"), "mode": "keys and values are gathered"},
    "the sequence is forgotten in the residual": {"residual": P("fsdp")},
    "the sequence is forgotten everywhere but in the ring": {
        "residual": P("fsdp"), "heads": P("fsdp"), "hidden": P("fsdp"), "logits": P("fsdp"),
    },
    "the batch is forgotten in the residual": {"residual": P(None, "sp")},
    "heads are cut in place of the sequence": {"heads": P("fsdp", None, "sp")},
    "hidden is cut over its width": {"hidden": P("fsdp", None, "sp")},
    "logits are whole over the sequence": {"logits": P("fsdp")},
    "logits are cut over words": {"logits": P("fsdp", None, "sp")},
    "no constraints": {"residual": None, "heads": None, "hidden": None, "logits": None},
    "the loss is of a shifted sequence": {"shifted": True},
    "rows and length are merged for the mlp": {"flattened": True},
    "kernels are cut over sp alone": {"kernels": P(None, "sp")},
    "gradients are whole": {"gradients": P()},
    "logits are returned": {"measured": "logits"},
    "states are returned": {"measured": "states"},
    "not donated": {"donate": False},
    "no remat": {"remat": False},
    # These look wrong.
    "the batch comes in whole": {"batch": P()},
    "no out_shardings": {"returned": False},
}  # fmt: skip

STEPS: Final = (
    Step("a pipeline in shard_map", _pipeline, _PIPELINE_FAULTS),
    Step("attention by a ring", _ring, _RING_FAULTS),
)
