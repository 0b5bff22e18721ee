"""Mixtures of experts: dispatched by einsum, exchanged by shard_map, and with micro-batches."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.blocks import attention, block, decoder
from tests.steps.model import Case, Model

_EXPERTS: Final = 8


def _route(case: Case, y: Any, router: Any) -> tuple[Any, Any]:
    """Return dispatch and weights, both [row, token, expert, slot]."""
    chances = jax.nn.softmax(y @ router)
    if case.has("the best experts by top_k"):
        picked = jax.nn.one_hot(jax.lax.top_k(chances, 2)[1], _EXPERTS).sum(-2)
    else:
        first = jax.nn.one_hot(chances.argmax(-1), _EXPERTS)
        picked = first + jax.nn.one_hot((chances * (1 - first)).argmax(-1), _EXPERTS)
    place = jnp.cumsum(picked, 1) * picked - 1
    dispatch = jax.nn.one_hot(place, int(1.25 * 2 * y.shape[1] / _EXPERTS))
    top = chances * picked
    return dispatch, dispatch * (top / top.sum(-1, keepdims=True))[..., None]


def _by_einsum(case: Case, y: Any, w: Any) -> Any:
    y = case.cut(y, "tokens")
    dispatch, weights = (case.cut(x, "routed") for x in _route(case, y, w["router"]))
    up, down = (case.cut(w[name], "experts") for name in ("experts_up", "experts_down"))
    if case.has("all experts compute all tokens"):
        z = jax.nn.silu(jnp.einsum("btd,edf->btef", y, up))
        return jnp.einsum("bted,bte->btd", jnp.einsum("btef,efd->bted", z, down), weights.sum(-1))
    x = case.cut(jnp.einsum("btec,btd->ebcd", dispatch, y), "dispatched")
    z = case.cut(jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", x, up)), "hidden")
    z = case.cut(jnp.einsum("ebcf,efd->ebcd", z, down), "dispatched")
    return case.cut(jnp.einsum("btec,ebcd->btd", weights, z), "combined")


def _by_exchange(case: Case, y: Any, w: Any) -> Any:
    has = case.has

    def mine(x: Any, dimension: int) -> Any:
        share = x.shape[dimension] // 4
        first = jax.lax.axis_index("ep") * share
        return jax.lax.dynamic_slice_in_dim(x, first, share, dimension)

    def whole(x: Any, dimension: int, axis: str = "ep") -> Any:
        return jax.lax.all_gather(x, axis, axis=dimension, tiled=True)

    def local(y: Any, router: Any, up: Any, down: Any) -> Any:
        if has("specs of experts are whole"):
            up, down = mine(up, 0), mine(down, 0)
        up, down = whole(up, 1, "fsdp"), whole(down, 2, "fsdp")
        if has("experts are gathered"):
            up, down = whole(up, 0), whole(down, 0)
        if has("tokens are gathered"):
            y = whole(y, 0)
        dispatch, weights = _route(case, y, router)
        x = jnp.einsum("btec,btd->ebcd", dispatch, y)
        if has("tokens are gathered"):
            x, weights = mine(x, 0), mine(weights, 2)
        elif has("slots are gathered"):
            x = mine(whole(x, 1), 0)
        elif not has("experts are gathered"):
            x = jax.lax.all_to_all(x, "ep", 0, 1, tiled=True)
        z = jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", x, up)), down)
        if has("outputs are gathered"):
            z = mine(whole(z, 0), 1)
        elif not has("tokens are gathered") and not has("experts are gathered"):
            z = jax.lax.all_to_all(z, "ep", 1, 0, tiled=True)
        z = jnp.einsum("btec,ebcd->btd", weights, z)
        if has("tokens are gathered"):
            z = mine(jax.lax.psum(z, "ep"), 0)
        if has("outputs are summed again"):
            first, rows = jax.lax.axis_index("ep") * z.shape[0], 4 * z.shape[0]
            spread = jnp.zeros((rows, *z.shape[1:]), z.dtype)
            spread = jax.lax.dynamic_update_slice_in_dim(spread, z, first, 0)
            z = mine(jax.lax.psum(spread, "ep"), 0)
        return z

    tokens: Any = case.place("sent")
    expert = None if has("specs of experts are whole") else "ep"
    specs = tokens, P(), P(expert, "fsdp"), P(expert, None, "fsdp")
    mapped = jax.shard_map(local, mesh=case.mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return mapped(y, w["router"], w["experts_up"], w["experts_down"])


# A Mixtral, whose gradients are of four micro-batches


def _turned(case: Case, q: Any, k: Any, v: Any) -> Any:
    length, size = q.shape[1], q.shape[-1]
    angles = jnp.arange(length)[:, None] / 10000 ** (jnp.arange(0, size, 2) / size)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]

    def turn(x: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    return jax.nn.dot_product_attention(turn(q), turn(k), v, is_causal=True)


def _mixture(case: Case, y: Any, w: Any) -> tuple[Any, Any]:
    """Return y behind experts, and how far their loads are from equal."""
    chances = jax.nn.softmax(y @ w["gate"])
    top, chosen = jax.lax.top_k(chances, 2)
    picked = jax.nn.one_hot(chosen, _EXPERTS)
    weights = (picked * (top / top.sum(-1, keepdims=True))[..., None]).sum(-2)
    picked = picked.sum(-2)
    place = jnp.cumsum(picked, 1) * picked - 1
    slots = int(1.25 * 2 * y.shape[1] / _EXPERTS)
    dispatch = case.cut(jax.nn.one_hot(place, slots), "routed")
    x = case.cut(jnp.einsum("btec,btd->ebcd", dispatch, y), "grouped")
    x = case.cut(x, "dispatched")
    w1, w2, w3 = (case.cut(w[name], "experts") for name in ("w1", "w2", "w3"))
    z = jnp.einsum("ebcd,edf->ebcf", x, w1), jnp.einsum("ebcd,edf->ebcf", x, w3)
    z = case.cut(jax.nn.silu(z[0]) * z[1], "hidden")
    z = case.cut(jnp.einsum("ebcf,efd->ebcd", z, w2), "dispatched")
    z = case.cut(z, "grouped")
    combine = case.cut(dispatch * weights[..., None], "routed")
    balance = _EXPERTS * (picked.mean((0, 1)) * chances.mean((0, 1))).sum()
    return jnp.einsum("btec,ebcd->btd", combine, z), balance


def _mixtral_loss(case: Case, params: Any, batch: Any) -> Any:
    balances = []

    def experts(case: Case, y: Any, w: Any) -> Any:
        is_one = case.has("all tokens of a micro-batch are one group")
        mixed, balance = _mixture(case, y.reshape(1, -1, y.shape[-1]) if is_one else y, w)
        balances.append(balance)
        mixed = mixed.reshape(y.shape)
        if "dropped" in case.places:
            kept = jax.random.bernoulli(jax.random.key(0), 0.9, y.shape)
            mixed = mixed * case.cut(kept, "dropped")
        return mixed

    def layer(case: Case, x: Any, w: Any) -> Any:
        w = {**w, **{name: w[f"{name}_proj"] for name in "qkvo"}}
        x, state = block(case, x, w, partial(attention, mix=_turned), experts)
        return x, (balances.pop(), state)

    value, kept = decoder(case, params, batch, layer)
    (balance, states), scores = kept["states"], kept["logits"]
    whole = jax.lax.with_sharding_constraint(scores, P()).argmax(-1)
    return value + 0.01 * balance.mean(), {"states": states, "logits": scores, "guesses": whole}


def _replicas(case: Case, plan: sr.Plan, differentiate: Any, params: Any, batch: Any) -> Any:
    """Return gradients that are summed over micro-batches of a replica, then over replicas."""
    is_early = case.has("gradients are summed over data in each micro-batch")
    specs = jax.tree.map(lambda sharding: sharding.spec, plan.shardings())

    def place(grads: Any) -> Any:
        if "sums" in case.places:
            return case.cut_all(grads, "sums")
        return jax.tree.map(jax.lax.with_sharding_constraint, grads, specs)

    def split(x: Any) -> Any:
        if case.has("micro-batches are the leading part"):
            return x.reshape(4, -1, x.shape[-1])
        return case.cut(x.reshape(-1, 4, x.shape[-1]).swapaxes(0, 1), "parts")

    def accumulate(params: Any, batch: Any) -> Any:
        if not is_early:
            params = jax.lax.pcast(params, "data", to="varying")
        params = case.cut_all(params, "gathered")

        def one(sums: Any, part: Any) -> Any:
            (value, kept), grads = differentiate(params, part)
            sums = jax.tree.map(jnp.add, sums, (value, grads))
            return (sums[0], place(sums[1])), kept

        zeros = place(jax.tree.map(jnp.zeros_like, params))
        zero = jax.lax.pcast(jnp.zeros(()), "data", to="varying")
        (value, grads), kept = jax.lax.scan(one, (zero, zeros), jax.tree.map(split, batch))
        grads = grads if is_early else jax.lax.pmean(grads, "data")
        return jax.lax.pmean(value, "data"), grads, kept

    out = (P(), P(), P(None, "data"))
    mapped = jax.shard_map(accumulate, in_specs=(P(), P("data")), out_specs=out, axis_names={"data"})
    value, grads, kept = mapped(params, batch)
    return (value, kept), grads


STEPS: Final = {
    "experts dispatched by einsum": Model(partial(decoder, block=partial(block, perceptron=_by_einsum))),
    "experts that exchange tokens in shard_map": Model(partial(decoder, block=partial(block, perceptron=_by_exchange))),
    "a Mixtral with accumulation": Model(_mixtral_loss, gradients=_replicas, in_context=True),
}
