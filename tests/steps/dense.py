"""Dense decoders in plain JAX: on Auto and Explicit axes, accumulating, and cut over the sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

import shardrules as sr
from tests.steps.blocks import attend, attention, block, causal, decoder, perceptron, rms_norm
from tests.steps.model import Case, Fault, Model, arrays, faults, stacked
from tests.steps.score import Step

_PARTS: Final = P("fsdp", None, "tp")


# A Llama


def _llama_shapes(case: Case) -> Any:
    width, inner, heads, keys, size = 256, 768, 8, 4, 32
    layer = {"norm1": (width,), "norm2": (width,), "q": (width, heads, size)}
    layer |= dict.fromkeys("kv", (width, keys, size)) | {"o": (heads, size, width)}
    layer |= dict.fromkeys(("gate", "up"), (width, inner)) | {"down": (inner, width)}
    tables = arrays({"embed": (2048, width), "norm": (width,), "head": (width, 2048)})
    return {**tables, "layers": stacked(3, layer)}


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


_LLAMA: Final = Model(
    mesh={"fsdp": 4, "tp": 2},
    shapes=_llama_shapes,
    rules=[
        ("norm", P()),
        ("embed", P("tp", "fsdp")),
        ("head", P("fsdp", "tp")),
        ("/[qkv]$", P(None, "fsdp", "tp")),
        ("/o$", P(None, "tp", None, "fsdp")),
        ("gate|up", P(None, "fsdp", "tp")),
        ("down", P(None, "tp", "fsdp")),
    ],
    places={
        **dict.fromkeys(("batch", "residual"), P("fsdp")),
        **dict.fromkeys(("heads", "keys", "mixed", "hidden", "logits"), _PARTS),
        "table": P("tp"),
        "head": P(None, "tp"),
    },
    batch=dict.fromkeys(("tokens", "targets"), (32, 128)),
    loss=_llama_loss,
)
_NOTHING: Final = dict.fromkeys(("residual", "heads", "keys", "mixed", "hidden", "logits"))
_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "queries, keys and values are merged and split", "gate and up are merged and split",
        "the loss is of gathered logits", "moments come in whole", "not donated", "no remat",
        "remat that saves everything", "the residual is whole", "hidden is whole over the batch", "logits are whole",
        "logits are whole over the batch", "logits are returned", "gradients are whole",
    ),
    "no constraints": {**_NOTHING, "table": None},
    "no constraints but of the table": _NOTHING,
    "no constraints, and the batch whole": {**_NOTHING, "batch": P(), "table": None},
    "the residual alone is not constrained": {"residual": None, "table": None},
    "the residual is cut over tp instead of the batch": {"residual": P("tp")},
    "the residual's width is cut over tp": {"residual": _PARTS},
    "the residual's width is cut over fsdp": {"residual": P(None, None, "fsdp")},
    "hidden is whole over tp": {"hidden": P("fsdp")},
    "hidden has its axes swapped": {"hidden": P("tp", None, "fsdp")},
    "heads are whole over tp": dict.fromkeys(("heads", "keys", "mixed"), P("fsdp")),
    "keys are whole over tp": {"keys": P("fsdp")},
    "keys are cut over the sequence": {"keys": P("fsdp", "tp")},
    "scores are cut over the sequence": {"scores": P("fsdp", None, None, "tp")},
    "scores are whole over tp": {"scores": P("fsdp")},
    "logits are whole over tp": {"logits": P("fsdp")},
    "the last states are whole": {"last": P()},
    "logits are returned whole": {"told": "logits", "logits": P()},
    "states of layers are returned": {"told": "states"},
    "kernels are gathered over tp too": {"kernels": P()},
    "the stack is gathered before the loop": {"stack": P(None, None, "tp")},
    "the stack is gathered whole before the loop": {"stack": P()},
    "the output of attention is transposed": {"rules": [("/o$", P(None, "fsdp", None, "tp"))]},
    "up is transposed": {"rules": [("gate|up", P(None, "tp", "fsdp"))]},
    "the head is transposed": {"rules": [("head", P("tp", "fsdp"))]},
    "an average of parameters is whole": {"told": "average", "average": P()},
    "not donated, nor out_shardings": {"wrong": ("not donated", "no out_shardings")},
    "evaluation in the same step": {"told": "evaluation"},
    # These look wrong.
    **faults(
        "layers are not scanned", "no out_shardings", "the batch comes in whole",
        "the table is looked up as it is cut",
    ),
    "hits are returned": {"told": "hits"},
}  # fmt: skip


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


_ACCUMULATING: Final = replace(
    _LLAMA,
    batch=dict.fromkeys(("tokens", "targets"), (64, 128)),
    places={**_LLAMA.places, "parts": P(None, "fsdp")},
    gradients=_accumulated,
)
_BOTH: Final = ("data", "fsdp")
_ON_DATA: Final = {
    "mesh": {"data": 2, "fsdp": 2, "tp": 2}, "batch": P(_BOTH), "parts": P(None, _BOTH),
}  # fmt: skip
_ACCUMULATING_FAULTS: Final[dict[str, Fault]] = {
    "gradients are summed over data in every micro-batch": {
        **_ON_DATA, **dict.fromkeys(_NOTHING, P(_BOTH, None, "tp")), "residual": P(_BOTH),
    },
    "the batch is cut over data, activations are not": _ON_DATA,
    "sums are not constrained": {"sums": None},
    "sums are whole": {"sums": P()},
    "sums are whole, and what is returned is not constrained": {
        "sums": P(), "wrong": "no out_shardings",
    },
    "micro-batches are whole": {"parts": P()},
    "micro-batches are whole, and activations not constrained": {
        **_NOTHING, "parts": P(), "table": None,
    },
    "micro-batches are cut over tp": {"parts": P(None, "tp")},
    "micro-batches of consecutive rows, and activations not constrained": {
        **_NOTHING, "wrong": "micro-batches of consecutive rows", "table": None,
    },
    "kernels are gathered whole before the loops": {"stack": P()},
    **{
        name: _FAULTS[name]
        for name in (
            "the residual is whole", "hidden is whole over tp", "logits are whole",
            "logits are whole over the batch", "the last states are whole", "up is transposed",
            "gradients are whole", "not donated", "no remat",
        )
    },
    # These look wrong.
    **faults("micro-batches of consecutive rows"),
    "the batch comes in whole": {"batch": P(), "parts": P(None)},
}  # fmt: skip


# Explicit axes


def _explicit_shapes(case: Case) -> Any:
    width, count, size, inner = 256, 8, 32, 1024
    layer: dict[str, Any] = dict.fromkeys("qkv", (width, count, size))
    layer |= {"o": (count, size, width), "up": (width, inner), "down": (inner, width)}
    layer |= dict.fromkeys(("norm1", "norm2"), (width,))
    tables = arrays({"embed": (1024, width), "head": (width, 1024)})
    return {**tables, "layers": stacked(3, layer)}


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


_WHOLE: Final = P(None, None, None)
_EXPLICIT: Final = Model(
    mesh={"fsdp": 4, "tp": 2},
    shapes=_explicit_shapes,
    rules=[
        ("norm", P()),
        ("embed", P(None, ("fsdp", "tp"))),
        ("head", P("fsdp", "tp")),
        ("/[qkv]$|up", P(None, "fsdp", "tp")),
        ("/o$", P(None, "tp", None, "fsdp")),
        ("down", P(None, "tp", "fsdp")),
    ],
    places={
        "batch": P("fsdp"),
        "residual": P("fsdp", None, None),
        "heads": P("fsdp", None, "tp", None),
        **dict.fromkeys(("hidden", "logits"), _PARTS),
        "columns": P(None, "tp"),
        "rows": P("tp", None),
        "table": P(None, None),
    },
    batch=dict.fromkeys(("tokens", "targets"), (16, 128)),
    loss=_explicit_loss,
    gradients=_explicit_gradients,
    is_explicit=True,
)
_EXPLICIT_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "gradients are resharded to be whole", "not donated", "no remat", "moments come in whole",
        "states of each layer are returned", "logits are returned", "the batch comes in whole",
    ),
    "weights are resharded to be whole": {"columns": P(None, None), "rows": P(None, None)},
    "up is gathered over tp too, and down": {"columns": P(None, "tp"), "rows": P(None, None)},
    "activations come out whole": {"residual": _WHOLE},
    "activations over batch come out whole, heads too": {
        "residual": _WHOLE, "heads": P(None, None, "tp", None), "hidden": P(None, None, "tp"),
    },
    "heads are whole over tp": {"heads": P("fsdp", None, None, None)},
    "hidden is whole over tp": {"hidden": P("fsdp", None, None)},
    "hidden is whole over fsdp": {"hidden": P(None, None, "tp")},
    "the residual is cut over tp": {"residual": _PARTS},
    "logits come out whole over tp": {"logits": P("fsdp", None, None)},
    "logits come out whole": {"logits": _WHOLE},
    "logits over batch are gathered for the loss": {"gathered": P(None, None, "tp")},
    "the stack is gathered before the scan": {"stack": P(None, None, "tp")},
    "the stack is gathered whole before the scan": {"stack": _WHOLE},
    "down is planned as a column": {"rules": [("down", P(None, "fsdp", "tp"))]},
    # These look wrong.
    **faults("no out_shardings"),
    "a mean of each layer": {"told": "means"},
    "the table is gathered over fsdp alone": {"table": P(None, "tp")},
}  # fmt: skip


# Cut over the sequence: keys are gathered


def _merged(case: Case, y: Any, w: Any) -> Any:
    if not case.has("rows and tokens are merged"):
        return perceptron(case, y, w)
    merged = y.reshape(-1, y.shape[-1])
    return (jax.nn.gelu(merged @ w["up"]) @ w["down"]).reshape(y.shape)


def _long_shapes(case: Case) -> Any:
    width, heads, groups, size, inner = 256, 8, 2, 32, 512
    layer = {"q": (width, heads * size), "o": (heads * size, width), "up": (width, inner)}
    layer |= dict.fromkeys("kv", (width, groups * size)) | {"down": (inner, width)}
    layer |= dict.fromkeys(("norm1", "norm2"), (width,))
    tables = arrays({"embed": (1024, width), "head": (width, 1024)})
    return {**tables, "layers": stacked(2, layer)}


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


_TOKENS: Final = P("data", "seq")
_LONG: Final = Model(
    mesh={"data": 2, "seq": 4},
    shapes=_long_shapes,
    rules=[("norm", P()), ("layers", P(None, ("data", "seq"))), ("", P(("data", "seq")))],
    places={
        **dict.fromkeys(("batch", "residual", "queries", "logits"), _TOKENS),
        "keys": P("data"),
        **dict.fromkeys(("kernels", "table", "head"), P()),
    },
    batch=dict.fromkeys(("tokens", "targets"), (8, 512)),
    loss=_long_loss,
)
_LONG_NOTHING: Final = dict.fromkeys(("residual", "queries", "logits", "keys"))
_LONG_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "no remat", "not donated", "keys in a zigzag before they are gathered",
        "gradients are constrained to be whole", "states of each layer are returned",
    ),
    "activations without the sequence axis": dict.fromkeys(("residual", "queries", "logits"), P("data")),
    "tokens without the sequence axis, no constraints": {**_LONG_NOTHING, "batch": P("data")},
    "tokens whole, no constraints": {**_LONG_NOTHING, "batch": P()},
    "no constraints": {**_LONG_NOTHING, "kernels": None, "table": None, "head": None},
    "queries are gathered too": {"queries": P("data")},
    "keys are gathered over data too": {"keys": P()},
    "keys and values are repeated before they are gathered": {"repeated": _TOKENS},
    "attention over heads: all-to-all instead of a gather": {"queries": P("data", None, "seq")},
    "logits whole over the sequence": {"logits": P("data")},
    "logits over the vocabulary": {"logits": P("data", None, "seq")},
    "weights are planned on data alone": {"rules": [("norm", P()), ("layers", P(None, "data"))]},
    "moments are whole inside": {"moments": P(), "wrong": "no out_shardings"},
    "tokens are flattened for the MLP": {"wrong": "rows and tokens are merged"},
    # These look wrong.
    **faults("logits are shifted instead of targets"),
    "the batch comes in whole over the sequence": {"batch": P("data")},
    "no constraint on the residual": {"residual": None},
    "weights are multiplied as they are cut": {"kernels": None},
    "the table is looked up as it is cut": {"table": None, "head": None},
}  # fmt: skip


# Cut over the sequence: keys go around


def _ring_shapes(case: Case) -> Any:
    width, inner, count, size = 128, 512, 4, 32
    layer = {"qkv": (width, 3, count, size), "o": (count, size, width), "up": (width, inner)}
    layer |= {"down": (inner, width), "norm1": (width,), "norm2": (width,)}
    tables = arrays({"embed": (512, width), "head": (width, 512)})
    return {**tables, "layers": stacked(2, layer)}


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


_TURNS: Final = P("fsdp", "sp")
_RING: Final = Model(
    mesh={"fsdp": 2, "sp": 4},
    shapes=_ring_shapes,
    rules=[("norm", P()), ("/o$", P(None, None, None, ("fsdp", "sp"))), ("", P(None, ("fsdp", "sp")))],
    places={
        **dict.fromkeys(("batch", "residual", "heads", "hidden", "logits", "ring"), _TURNS),
        **dict.fromkeys(("table", "head"), P()),
    },
    batch=dict.fromkeys(("tokens", "targets"), (16, 512)),
    loss=_ring_loss,
)
_RING_NOTHING: Final = ("residual", "heads", "hidden", "logits")
_RING_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "keys and values are gathered", "keys are gathered in every turn", "outputs are sent back and forth",
        "attention without a ring", "not donated", "no remat", "gradients are whole", "logits are returned",
    ),
    "scores are cut over keys": {
        "wrong": "attention without a ring", "scores": P("fsdp", None, None, "sp"),
    },
    "specs of the ring forget the sequence": {"ring": P("fsdp")},
    "specs of the ring forget the batch": {"ring": P(None, "sp"), "wrong": "keys and values are gathered"},
    "the sequence is forgotten in the residual": {"residual": P("fsdp")},
    "the sequence is forgotten everywhere but in the ring": dict.fromkeys(_RING_NOTHING, P("fsdp")),
    "the batch is forgotten in the residual": {"residual": P(None, "sp")},
    "heads are cut in place of the sequence": {"heads": P("fsdp", None, "sp")},
    "hidden is cut over its width": {"hidden": P("fsdp", None, "sp")},
    "logits are whole over the sequence": {"logits": P("fsdp")},
    "logits are cut over words": {"logits": P("fsdp", None, "sp")},
    "no constraints": dict.fromkeys(_RING_NOTHING),
    "the loss is of a shifted sequence": {"wrong": "the loss is of a shifted sequence", "logits": None},
    "rows and length are merged for the mlp": {"wrong": "rows and tokens are merged"},
    "kernels are cut over sp alone": {
        "rules": [("norm", P()), ("/o$", P(None, None, None, ("fsdp", "sp"))), ("layers/", P(None, "sp"))],
    },
    "states are returned": {"told": "last"},
    # These look wrong.
    **faults("no out_shardings", "the batch comes in whole"),
}  # fmt: skip

STEPS: Final = (
    Step("a Llama in plain JAX", _LLAMA, _FAULTS, "tuned"),
    Step("accumulated gradients", _ACCUMULATING, _ACCUMULATING_FAULTS, "tuned"),
    Step("attention by a ring", _RING, _RING_FAULTS, "tuned"),
    Step("a decoder on Explicit axes", _EXPLICIT, _EXPLICIT_FAULTS, "fresh"),
    Step("a decoder cut over the sequence", _LONG, _LONG_FAULTS, "fresh"),
)
