"""Mixtures of experts: dispatched by einsum, and exchanged by shard_map."""

from __future__ import annotations

from functools import partial
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
_WIDTH: Final = 128
_INNER: Final = 512
_EXPERTS: Final = 8
_LAYERS: Final = 2
_HEADS: Final = 4
_LENGTH: Final = 64
_BATCH: Final = ("fsdp", "ep")


def _shapes() -> Any:
    layers = {
        "norm1": (_WIDTH,),
        "norm2": (_WIDTH,),
        "qkv": (_WIDTH, 3, _HEADS, _WIDTH // _HEADS),
        "o": (_HEADS, _WIDTH // _HEADS, _WIDTH),
        "router": (_WIDTH, _EXPERTS),
        "experts_up": (_EXPERTS, _WIDTH, _INNER),
        "experts_down": (_EXPERTS, _INNER, _WIDTH),
    }
    return {
        "embed": jax.ShapeDtypeStruct((_WORDS, _WIDTH), "float32"),
        "layers": {
            name: jax.ShapeDtypeStruct((_LAYERS, *shape), "float32")
            for name, shape in layers.items()
        },
        "norm": jax.ShapeDtypeStruct((_WIDTH,), "float32"),
        "head": jax.ShapeDtypeStruct((_WIDTH, _WORDS), "float32"),
    }


def _moe(
    *,
    exchange: str = "",
    batch: P = P(_BATCH),
    residual: P | None = P(_BATCH),
    dispatched: P | None = P("ep", "fsdp"),
    hidden: P | None = P("ep", "fsdp"),
    combined: P | None = P(_BATCH),
    routed: P | None = P(_BATCH),
    tokens_spec: P | None = None,
    logits: P | None = P(_BATCH),
    experts: P | None = None,
    up: P = P(None, "ep", "fsdp"),
    down: P = P(None, "ep", None, "fsdp"),
    gradients: P | None = None,
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    metrics: str = "",
    dense: bool = False,
    sorted_: bool = False,
    length: int = _LENGTH,
) -> Built:
    """Train a decoder with two experts for each token."""
    mesh = mesh_of(fsdp=2, ep=4)
    cut = cutter(mesh)
    shapes = _shapes()
    rules = [
        ("norm", P()),
        ("router", P()),
        ("embed|head", P(None, _BATCH)),
        ("qkv", P(None, _BATCH)),
        ("/o$", P(None, None, None, _BATCH)),
        ("experts_up", up),
        ("experts_down", down),
    ]
    plan = sr.plan(shapes, rules, mesh)
    tx = optax.adamw(1e-3)

    def route(y: Any, router: Any, rows: int) -> tuple[Any, Any]:
        """Return dispatch and weights, both [row, token, expert, slot]."""
        chances = jax.nn.softmax(y @ router)
        if sorted_:
            picked = jax.nn.one_hot(jax.lax.top_k(chances, 2)[1], _EXPERTS).sum(-2)
        else:
            first = jax.nn.one_hot(chances.argmax(-1), _EXPERTS)
            picked = first + jax.nn.one_hot((chances * (1 - first)).argmax(-1), _EXPERTS)
        mask, top = picked, chances * picked
        place = jnp.cumsum(mask, 1) * mask - 1
        dispatch = jax.nn.one_hot(place, rows)
        weights = top / top.sum(-1, keepdims=True)
        return dispatch, dispatch * weights[..., None]

    def by_einsum(y: Any, w: Any) -> Any:
        y = cut(y, tokens_spec)
        rows = int(1.25 * 2 * length / _EXPERTS)
        dispatch, weights = route(y, w["router"], rows)
        dispatch, weights = cut(dispatch, routed), cut(weights, routed)
        up, down = cut(w["experts_up"], experts), cut(w["experts_down"], experts)
        if dense:
            z = jnp.einsum("btef,efd->bted", jax.nn.silu(jnp.einsum("btd,edf->btef", y, up)), down)
            return jnp.einsum("bted,bte->btd", z, weights.sum(-1))
        x = cut(jnp.einsum("btec,btd->ebcd", dispatch, y), dispatched)
        z = cut(jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", x, up)), hidden)
        z = cut(jnp.einsum("ebcf,efd->ebcd", z, down), dispatched)
        return cut(jnp.einsum("btec,ebcd->btd", weights, z), combined)

    def by_exchange(y: Any, w: Any) -> Any:
        rows = int(1.25 * 2 * length / _EXPERTS)
        several = _EXPERTS // 4

        def mine(x: Any, dimension: int) -> Any:
            share = x.shape[dimension] // 4
            return jax.lax.dynamic_slice_in_dim(
                x, jax.lax.axis_index("ep") * share, share, dimension
            )

        def whole(x: Any, dimension: int, axis: str = "ep") -> Any:
            return jax.lax.all_gather(x, axis, axis=dimension, tiled=True)

        def local(y: Any, router: Any, up: Any, down: Any) -> Any:
            if exchange == "specs of experts are whole":
                up, down = mine(up, 0), mine(down, 0)
            up, down = whole(up, 1, "fsdp"), whole(down, 2, "fsdp")
            if exchange == "experts are gathered":
                up, down = whole(up, 0), whole(down, 0)
            if exchange == "tokens are gathered":
                y = whole(y, 0)
            dispatch, weights = route(y, router, rows)
            x = jnp.einsum("btec,btd->ebcd", dispatch, y)
            if exchange == "tokens are gathered":
                x, weights = mine(x, 0), mine(weights, 2)
            elif exchange == "slots are gathered":
                x = mine(whole(x, 1), 0)
            elif exchange != "experts are gathered":
                x = jax.lax.all_to_all(x, "ep", 0, 1, tiled=True)
            assert x.shape[0] in (several, _EXPERTS)
            z = jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", x, up)), down)
            if exchange == "outputs are gathered":
                z = mine(whole(z, 0), 1)
            elif exchange not in ("tokens are gathered", "experts are gathered"):
                z = jax.lax.all_to_all(z, "ep", 1, 0, tiled=True)
            z = jnp.einsum("btec,ebcd->btd", weights, z)
            if exchange == "tokens are gathered":
                z = mine(jax.lax.psum(z, "ep"), 0)
            if exchange == "outputs are summed again":
                first = jax.lax.axis_index("ep") * z.shape[0]
                spread = jnp.zeros((4 * z.shape[0], *z.shape[1:]), z.dtype)
                z = mine(
                    jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(spread, z, first, 0), "ep"), 0
                )
            return z

        expert = None if exchange == "specs of experts are whole" else "ep"
        tokens = P("fsdp") if exchange == "specs of tokens are whole over ep" else P(_BATCH)
        specs = tokens, P(), P(expert, "fsdp"), P(expert, None, "fsdp")
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
        return mapped(y, w["router"], w["experts_up"], w["experts_down"])

    def layer(x: Any, w: Any) -> Any:
        q, k, v = jnp.einsum("btd,dchk->cbthk", rms_norm(x, w["norm1"]), w["qkv"])
        scores = jnp.einsum("bthk,bshk->bhts", q, k)
        allowed = jnp.tril(jnp.ones((length, length), bool))
        mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(allowed, scores, -1e9)), v)
        x = cut(x + jnp.einsum("bthk,hkd->btd", mixed, w["o"]), residual)
        y = rms_norm(x, w["norm2"])
        y = by_exchange(y, w) if exchange else by_einsum(y, w)
        return cut(x + y, residual), y if metrics == "states" else None

    def loss(params: Any, batch: Any) -> Any:
        x = cut(cut(params["embed"], P())[batch["tokens"]], residual)
        x, kept = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params["layers"])
        guesses = cut(rms_norm(x, params["norm"]) @ cut(params["head"], P()), logits)
        hot = jax.nn.one_hot(batch["targets"], _WORDS)
        value = (jax.nn.logsumexp(guesses, -1) - (guesses * hot).sum(-1)).mean()
        return value, {"states": kept, "logits": guesses}.get(metrics)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda g: cut(g, gradients), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, kept)

    tokens = abstract(mesh, batch, (64, length))
    texts = {"tokens": tokens, "targets": tokens}
    state = jax.eval_shape(tx.init, shapes)
    return train_step(step, plan, state, texts, donate=donate, returned=returned)


_BOTH: Final = {
    "the residual is whole": {"residual": P()},
    "the batch is cut over fsdp alone": {
        "residual": P("fsdp"), "combined": P("fsdp"), "routed": P("fsdp"), "batch": P("fsdp"), "logits": P("fsdp"),
    },
    "experts are planned without ep": {"up": P(None, None, "fsdp"), "down": P(None, None, None, "fsdp")},
    "experts' kernels are cut over other dimensions": {
        "up": P(None, None, _BATCH), "down": P(None, None, None, _BATCH),
    },
    "logits are whole": {"logits": P()},
    "logits are whole over ep": {"logits": P("fsdp")},
    "gradients are whole": {"gradients": P()},
    "not donated": {"donate": False},
    "no remat": {"remat": False},
    "outputs of experts are returned": {"metrics": "states"},
    "logits are returned": {"metrics": "logits"},
    # These look wrong.
    "no out_shardings": {"returned": False},
    "the batch comes in whole": {"batch": P()},
}  # fmt: skip
_EINSUM: Final = {
    "no constraints": {
        "residual": None, "dispatched": None, "hidden": None, "combined": None, "routed": None, "logits": None,
    },
    "no constraints of experts": {"dispatched": None, "hidden": None, "combined": None, "routed": None},
    "dispatched tokens are not constrained": {"dispatched": None, "hidden": None},
    "dispatched tokens are cut over the batch": {
        "dispatched": P(None, _BATCH), "hidden": P(None, _BATCH),
    },
    "dispatched tokens are whole over fsdp": {"dispatched": P("ep"), "hidden": P("ep")},
    "dispatched tokens are whole": {"dispatched": P(), "hidden": P()},
    "dispatched tokens have the axes swapped": {"dispatched": P("fsdp", "ep"), "hidden": P("fsdp", "ep")},
    "hidden is whole over fsdp": {"hidden": P("ep")},
    "the router's masks are whole": {"routed": P()},
    "the router's masks are cut over experts": {"routed": P("fsdp", None, "ep")},
    "tokens are gathered for the router": {"tokens_spec": P()},
    "tokens are gathered over ep for the router": {"tokens_spec": P("fsdp")},
    "combined tokens are whole": {"combined": P()},
    "experts are gathered": {"experts": P()},
    "experts are gathered over ep": {"experts": P(None, "fsdp")},
    "all experts compute all tokens": {"dense": True},
    "the best experts by top_k": {"sorted_": True},
    **_BOTH,
}  # fmt: skip

_EXCHANGED: Final = {
    **{
        mode: {"exchange": mode}
        for mode in (
            "experts are gathered",
            "tokens are gathered",
            "slots are gathered",
            "outputs are gathered",
            "outputs are summed again",
            "specs of experts are whole",
            "specs of tokens are whole over ep",
        )
    },
    **{name: switches for name, switches in _BOTH.items() if name != "logits are returned"},
    "no constraints": {"residual": None, "logits": None},
}

STEPS: Final = (
    Step("experts dispatched by einsum", _moe, _EINSUM),
    Step(
        "experts that exchange tokens in shard_map",
        partial(_moe, exchange="all-to-all"),
        _EXCHANGED,
    ),
)
