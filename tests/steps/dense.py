"""Dense decoders in plain JAX: on Auto and Explicit axes, accumulating, and cut over the sequence."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

import shardrules as sr
from tests.steps.blocks import attend, attention, block, causal, decoder, perceptron, rms_norm
from tests.steps.model import Case, Model

# A Llama


def _mix(case: Case, q: Any, k: Any, v: Any) -> Any:
    if case.has("queries, keys and values are merged and split"):
        size = q.shape[-1]
        q, k, v = (x.reshape(*x.shape[:2], -1) for x in (q, k, v))
        at = [q.shape[-1], q.shape[-1] + k.shape[-1]]
        parts = jnp.split(jnp.concatenate([q, k, v], -1), at, -1)
        q, k, v = (x.reshape(*x.shape[:2], -1, size) for x in parts)
    return attend(case, q, k, v)


def _gated(case: Case, y: Any, w: Any) -> Any:
    if not case.has("gate and up are merged and split"):
        return perceptron(case, y, w)
    gate, up = jnp.split(y @ jnp.concatenate([w["gate"], w["up"]], 1), 2, -1)
    return case.cut(jax.nn.silu(gate) * up, "hidden") @ w["down"]


def _llama_loss(case: Case, params: Any, batch: Any) -> Any:
    layer = partial(block, attention=partial(attention, mix=_mix), perceptron=_gated)
    value, kept = decoder(case, params, batch, layer)
    scores, targets = kept["logits"], batch["targets"]
    if case.has("the loss is of gathered logits"):
        chances = jax.nn.log_softmax(case.cut(scores, "batch"))
        value = -jnp.take_along_axis(chances, targets[..., None], -1).mean()
    return value, {**kept, "hits": scores.argmax(-1) == targets}


# Accumulated gradients


def _accumulated(case: Case, plan: sr.Plan, differentiate: Any, params: Any, batch: Any) -> Any:
    """Return gradients of four micro-batches, summed as planned."""

    def place(tree: Any) -> Any:
        if "sums" in case.places:
            return case.cut_all(tree, "sums")
        return jax.lax.with_sharding_constraint(tree, plan.shardings())

    def micro(total: Any, part: Any) -> Any:
        (value, _), grads = differentiate(params, part)
        return place(jax.tree.map(jnp.add, total, grads)), value

    def parts(x: Any) -> Any:
        if case.has("micro-batches of consecutive rows"):  # they are on one device
            return x.reshape(4, -1, x.shape[-1])
        return case.cut(x.reshape(-1, 4, x.shape[-1]).swapaxes(0, 1), "parts")

    zeros = place(jax.tree.map(jnp.zeros_like, params))
    grads, values = jax.lax.scan(micro, zeros, jax.tree.map(parts, batch))
    return (values.mean(), None), jax.tree.map(lambda g: g / 4, grads)


# Explicit axes


def _explicit_loss(case: Case, params: Any, batch: Any) -> Any:
    place = case.place
    columns, rows = place("columns"), place("rows")

    def attend(y: Any, w: Any) -> Any:
        q, k, v = (
            jnp.einsum("btd,dhk->bthk", y, reshard(w[n], P(*columns, None)), out_sharding=place("heads")) for n in "qkv"
        )
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        scores = jax.nn.softmax(jnp.where(causal(q.shape[1]), scores, -1e9))
        mixed = jnp.einsum("bhts,bshk->bthk", scores, v)
        o = reshard(w["o"], P(rows[0], None, None))
        return jnp.einsum("bthk,hkd->btd", mixed, o, out_sharding=place("residual"))

    def layer(x: Any, w: Any) -> Any:
        x = x + attend(rms_norm(x, w["norm1"]), w)
        y, up = rms_norm(x, w["norm2"]), reshard(w["up"], columns)
        y = jax.nn.silu(jnp.einsum("btd,df->btf", y, up, out_sharding=place("hidden")))
        down = reshard(w["down"], rows)
        x = x + jnp.einsum("btf,fd->btd", y, down, out_sharding=place("residual"))
        return x, case.keep(x, "states") if case.told != "means" else (x**2).mean()

    table = reshard(params["embed"], place("table"))
    x = table.at[batch["tokens"]].get(out_sharding=place("residual"))
    layers = params["layers"]
    if place("stack") is not None:
        layers = {n: reshard(w, place("stack")) if w.ndim == 3 else w for n, w in layers.items()}
    x, kept = jax.lax.scan(case.recomputed(layer), x, layers)
    head = reshard(params["head"], columns)
    scores = jnp.einsum("btd,dv->btv", x, head, out_sharding=place("logits"))
    if place("gathered") is not None:
        scores = reshard(scores, place("gathered"))
    picked = (scores * (batch["targets"][..., None] == jnp.arange(1024))).sum(-1)
    value = (jax.nn.logsumexp(scores, -1) - picked).mean()
    return value, {"logits": scores, "states": kept, "means": kept}


def _explicit_gradients(case: Case, plan: sr.Plan, differentiate: Any, params: Any, batch: Any) -> Any:
    values, grads = differentiate(params, batch)
    if case.has("gradients are resharded to be whole"):
        grads = jax.tree.map(lambda g: reshard(g, P()), grads)
        grads = jax.tree.map(lambda g, p: reshard(g, jax.typeof(p).sharding), grads, params)
    return values, grads


# Cut over the sequence: keys are gathered


def _merged(case: Case, y: Any, w: Any) -> Any:
    if not case.has("rows and tokens are merged"):
        return perceptron(case, y, w)
    merged = y.reshape(-1, y.shape[-1])
    return (jax.nn.gelu(merged @ w["up"]) @ w["down"]).reshape(y.shape)


def _long_attention(case: Case, y: Any, w: Any) -> Any:
    q, k, v = ((y @ w[name]).reshape(*y.shape[:2], -1, 32) for name in "qkv")
    if case.has("keys in a zigzag before they are gathered"):  # for a better balance
        k, v = (jnp.concatenate([x[:, ::2], x[:, 1::2]], 1) for x in (k, v))
    q = case.cut(q.reshape(*q.shape[:2], 2, -1, 32), "queries").reshape(q.shape)
    if "repeated" in case.places:
        k, v = (jnp.repeat(case.cut(x, "repeated"), 4, axis=2) for x in (k, v))
    k, v = case.cut(k, "keys"), case.cut(v, "keys")
    return attend(case, q, k, v).reshape(y.shape) @ w["o"]


def _long_loss(case: Case, params: Any, batch: Any) -> Any:
    layer = partial(block, attention=_long_attention, perceptron=_merged)
    _, kept = decoder(case, params, batch, layer)
    scores, targets = kept["logits"], batch["targets"]
    if case.has("logits are shifted instead of targets"):
        scores, targets = scores[:, :-1], batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean(), kept


# Cut over the sequence: keys go around


def _ring(case: Case, q: Any, k: Any, v: Any) -> Any:
    """Return attention of each device's queries to all keys, by the running maximum."""
    if case.has("attention without a ring"):
        return attend(case, q, k, v)
    around, specs = [(i, (i + 1) % 4) for i in range(4)], case.place("ring")
    is_gathered, is_cut = case.has("keys and values are gathered"), specs == P("fsdp", "sp")

    def local(q: Any, k: Any, v: Any) -> Any:
        here, (rows, length, count, size) = jax.lax.axis_index("sp"), q.shape
        at = here * length + jnp.arange(length) if is_cut else jnp.arange(length)

        def part(q: Any, k: Any, v: Any, first: Any) -> Any:
            scores = jnp.einsum("bthk,bshk->bhts", q, k) * size**-0.5
            scores = jnp.where(first + jnp.arange(k.shape[1]) <= at[:, None], scores, -1e9)
            most = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - most)
            return jnp.einsum("bhts,bshk->bhtk", weights, v), most, weights.sum(-1, keepdims=True)

        if is_gathered:
            k, v = (jax.lax.all_gather(a, "sp", axis=1, tiled=True) for a in (k, v))
        if is_gathered or not is_cut:
            mixed, _, total = part(q, k, v, 0)
            return (mixed / total).swapaxes(1, 2)

        def turn(carry: Any, i: Any) -> Any:
            k, v, mixed, most, total = carry
            y, high, weight = part(q, k, v, ((here - i) % 4) * k.shape[1])
            higher = jnp.maximum(most, high)
            old, new = jnp.exp(most - higher), jnp.exp(high - higher)
            mixed, total = mixed * old + y * new, total * old + weight * new
            if case.has("outputs are sent back and forth"):
                back = [(b, a) for a, b in around]
                mixed = jax.lax.ppermute(jax.lax.ppermute(mixed, "sp", around), "sp", back)
            if case.has("keys are gathered in every turn"):
                k, v = (jax.lax.all_gather(a, "sp")[(here - 1) % 4] for a in (k, v))
            else:
                k, v = (jax.lax.ppermute(a, "sp", around) for a in (k, v))
            return (k, v, mixed, higher, total), None

        one, zeros = (rows, count, length, 1), jnp.zeros((rows, count, length, size))
        start = (k, v, zeros, jnp.full(one, -1e9), jnp.zeros(one))
        (_, _, mixed, _, total), _ = jax.lax.scan(case.recomputed(turn), start, jnp.arange(4))
        return (mixed / total).swapaxes(1, 2)

    return jax.shard_map(local, mesh=case.mesh, in_specs=(specs,) * 3, out_specs=specs, check_vma=False)(q, k, v)


def _ring_loss(case: Case, params: Any, batch: Any) -> Any:
    layer = partial(block, attention=partial(attention, mix=_ring), perceptron=_merged)
    return decoder(case, params, batch, layer)


STEPS: Final = {
    "a Llama in plain JAX": Model(_llama_loss),
    "accumulated gradients": Model(_llama_loss, gradients=_accumulated),
    "attention by a ring": Model(_ring_loss),
    "a decoder on Explicit axes": Model(_explicit_loss, gradients=_explicit_gradients, is_explicit=True),
    "a decoder cut over the sequence": Model(_long_loss),
}
