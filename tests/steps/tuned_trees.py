"""Decoders of other trees of parameters: equinox with its own jit, and haliax with named axes."""

from __future__ import annotations

from typing import Any, Final

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.parts import abstract, cutter, mesh_of, train_step
from tests.steps.score import Built, Step

__all__ = ["STEPS"]

_WORDS: Final = 1024
_WIDTH: Final = 256
_INNER: Final = 1024
_HEADS: Final = 8
_LENGTH: Final = 64
_LAYERS: Final = 2


# equinox


class _Layer(eqx.Module):
    """A layer of one sequence."""

    norm1: eqx.nn.RMSNorm
    norm2: eqx.nn.RMSNorm
    qkv: eqx.nn.Linear
    o: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 4)
        self.norm1, self.norm2 = (eqx.nn.RMSNorm(_WIDTH, use_bias=False) for _ in range(2))
        sizes = {
            "qkv": (_WIDTH, 3 * _WIDTH),
            "o": (_WIDTH, _WIDTH),
            "up": (_WIDTH, _INNER),
            "down": (_INNER, _WIDTH),
        }
        for k, (name, size) in zip(keys, sizes.items(), strict=True):
            setattr(self, name, eqx.nn.Linear(*size, use_bias=False, key=k))


class _Decoder(eqx.Module):
    """A table, stacked layers and a head."""

    table: Any
    layers: _Layer
    head: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        first, second, third = jax.random.split(key, 3)
        self.table = jax.random.normal(first, (_WORDS, _WIDTH))
        self.layers = eqx.filter_vmap(_Layer)(jax.random.split(second, _LAYERS))
        self.head = eqx.nn.Linear(_WIDTH, _WORDS, use_bias=False, key=third)


_PLACES: Final = {
    "residual": P("fsdp"),
    "heads": P("fsdp", None, "tp"),
    "hidden": P("fsdp", None, "tp"),
    "logits": P("fsdp", None, "tp"),
    "table": P("tp"),
}


def _equinox(
    *,
    specs: Any = (),
    batch: P = P("fsdp"),
    columns: P = P(None, "tp", "fsdp"),
    rows: P = P(None, "fsdp", "tp"),
    donate: str = "all",
    remat: bool = True,
    gradients: P | None = None,
    kernels: P | None = None,
    placed: bool = True,
    in_place: bool = True,
    measured: str = "",
    ema: P | None = None,
) -> Built:
    """Train it with filter_jit and Adam."""
    mesh = mesh_of(fsdp=4, tp=2)
    cut = cutter(mesh)
    places = {**_PLACES, **dict(specs)}
    shapes = eqx.filter_eval_shape(_Decoder, jax.random.key(0))
    arrays = eqx.filter(shapes, lambda leaf: hasattr(leaf, "shape"))
    rules = [
        ("norm", P()),
        ("table", P("tp", "fsdp")),
        ("head", P("tp", "fsdp")),
        ("qkv|up", columns),
        ("/o/|down", rows),
    ]
    plan = sr.plan(arrays, rules, mesh)
    tx = optax.adam(1e-3)
    moments = plan.for_optimizer(jax.eval_shape(tx.init, arrays))

    def layer(x: Any, w: Any) -> Any:
        if kernels is not None:
            w = jax.tree.map(lambda leaf: cut(leaf, kernels), w)
        y = jax.vmap(jax.vmap(w.norm1))(x)
        qkv = jnp.einsum("btd,nd->btn", y, w.qkv.weight)
        q, k, v = (cut(a.reshape(*a.shape[:2], _HEADS, -1), places["heads"]) for a in _thirds(qkv))
        scores = jnp.einsum("bthk,bshk->bhts", q, k)
        scores = jnp.where(jnp.tril(jnp.ones((_LENGTH, _LENGTH), bool)), scores, -1e9)
        y = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v).reshape(x.shape)
        x = cut(x + jnp.einsum("btn,dn->btd", y, w.o.weight), places["residual"])
        y = jax.vmap(jax.vmap(w.norm2))(x)
        y = cut(jax.nn.silu(jnp.einsum("btd,fd->btf", y, w.up.weight)), places["hidden"])
        return cut(x + jnp.einsum("btf,df->btd", y, w.down.weight), places["residual"]), None

    def _thirds(qkv: Any) -> Any:
        if not in_place:
            return jnp.split(qkv, 3, -1)  # each third is on other devices than its kernel's columns
        grouped = qkv.reshape(*qkv.shape[:2], _HEADS, 3, -1)
        return (cut(grouped, P("fsdp", None, "tp"))[:, :, :, i] for i in range(3))

    def loss(model: Any, batch: Any) -> Any:
        x = cut(cut(model.table, places["table"])[batch["tokens"]], places["residual"])
        dynamic, static = eqx.partition(model.layers, eqx.is_array)

        def body(x: Any, w: Any) -> Any:
            return layer(x, eqx.combine(w, static))

        x, _ = jax.lax.scan(eqx.filter_checkpoint(body) if remat else body, x, dynamic)
        scores = cut(jnp.einsum("btd,vd->btv", x, model.head.weight), places["logits"])
        hot = jax.nn.one_hot(batch["targets"], _WORDS)
        value = (jax.nn.logsumexp(scores, -1) - (scores * hot).sum(-1)).mean()
        kept = {
            "logits": scores,
            "whole": cut(scores, P()),
            "guesses": cut(scores, P("fsdp")).argmax(-1),
        }
        return value, kept.get(measured)

    def step(model: Any, state: Any, batch: Any) -> Any:
        (value, kept), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda g: cut(g, gradients), grads)
        updates, state = tx.update(grads, state, model)
        model = eqx.apply_updates(model, updates)
        if placed:
            model = jax.lax.with_sharding_constraint(model, plan.shardings())
            state = jax.lax.with_sharding_constraint(state, moments.shardings())
        if ema is not None:
            kept = jax.tree.map(lambda p: cut(0.999 * p, ema), model)
        return model, state, (value, kept)

    tokens = abstract(mesh, batch, (64, _LENGTH))
    # filter_jit takes abstract arrays for constants.
    given = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        (plan.abstract(), moments.abstract(), {"tokens": tokens, "targets": tokens}),
    )
    arguments = (eqx.combine(given[0], shapes), *given[1:])
    compiled = eqx.filter_jit(step, donate=donate).lower(*arguments).compile()
    return Built(
        compiled, (plan, moments, {"tokens": batch, "targets": batch}), (plan, moments, None)
    )


_EQUINOX_FAULTS: Final = {
    "no constraints": {"specs": dict.fromkeys(_PLACES)},
    "no constraints, and the batch whole": {"specs": dict.fromkeys(_PLACES), "batch": P()},
    "the residual is whole": {"specs": {"residual": P()}},
    "the residual is cut over tp": {"specs": {"residual": P("fsdp", None, "tp")}},
    "heads are whole": {"specs": {"heads": P()}},
    "hidden has its axes swapped": {"specs": {"hidden": P("tp", None, "fsdp")}},
    "hidden is whole over the batch": {"specs": {"hidden": P(None, None, "tp")}},
    "logits are whole": {"specs": {"logits": P()}},
    "logits are whole over the batch": {"specs": {"logits": P(None, None, "tp")}},
    "the table is gathered": {"specs": {"table": P()}},
    "one kernel of queries, keys and values is split": {"in_place": False},
    "kernels are planned as those of flax, transposed": {
        "columns": P(None, "fsdp", "tp"), "rows": P(None, "tp", "fsdp"),
    },
    "rows are planned as columns": {"rows": P(None, "tp", "fsdp")},
    "kernels are gathered over tp": {"kernels": P()},
    "gradients are whole": {"gradients": P()},
    "nothing is donated": {"donate": "none"},
    "no remat": {"remat": False},
    "an average of parameters is whole": {"ema": P()},
    "logits are returned": {"measured": "logits"},
    "logits are gathered and returned": {"measured": "whole"},
    # These look wrong.
    "guesses of gathered logits": {"measured": "guesses"},
    "the batch comes in whole": {"batch": P()},
    "results are not constrained": {"placed": False},
}  # fmt: skip


# haliax


def _dot(x: Any, y: Any, axis: Any) -> Any:
    """Return hax.dot, which some versions of haliax do not have on a new JAX."""
    contracted = axis if isinstance(axis, tuple) else (axis,)
    axes = list(dict.fromkeys((*x.axes, *y.axes)))
    kept = [a for a in axes if a not in contracted]
    x_, y_, out = (
        "".join(chr(97 + axes.index(a)) for a in part) for part in (x.axes, y.axes, kept)
    )
    return hax.named(jnp.einsum(f"{x_},{y_}->{out}", x.array, y.array), kept)


_AXES: Final = {"batch": "fsdp", "embed": None, "mlp": "tp", "heads": "tp", "vocab": "tp"}
_STORED: Final = {"embed": "fsdp", "mlp": "tp", "heads": "tp", "vocab": "tp"}


def _haliax(
    *,
    axes: Any = (),
    stored: Any = (),
    batch: P = P("fsdp"),
    constrained: tuple[str, ...] = ("lookup", "residual", "hidden", "heads", "logits"),
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    gradients: P | None = None,
    measured: str = "",
    compute: Any = (),
    mask: bool = False,
) -> Built:
    """Train stacked layers of named arrays; `axes` are of activations, `stored` of parameters."""
    mesh = mesh_of(fsdp=4, tp=2)
    cut = cutter(mesh)
    places = {**_AXES, **dict(axes)}
    of_parameters = {**_STORED, **dict(stored)}
    sizes = hax.make_axes(
        batch=64,
        pos=_LENGTH,
        embed=_WIDTH,
        mlp=_INNER,
        heads=_HEADS,
        size=32,
        vocab=_WORDS,
        layer=2,
    )
    batch_, pos, embed, mlp, heads, size, vocab, depth = sizes
    keys = pos.alias("keys")

    def named(*names: Any) -> Any:
        return jax.eval_shape(lambda: hax.zeros(names))

    shapes = {
        "table": named(vocab, embed),
        "head": named(embed, vocab),
        "layers": {
            "q": named(depth, embed, heads, size),
            "k": named(depth, embed, heads, size),
            "v": named(depth, embed, heads, size),
            "o": named(depth, heads, size, embed),
            "up": named(depth, embed, mlp),
            "down": named(depth, mlp, embed),
            "scale": named(depth, embed),
        },
    }
    rules = sr.LogicalRules({"layer": None, "size": None, **of_parameters}, sr.dialects.HALIAX)
    plan = sr.plan(shapes, rules, mesh)
    tx = optax.adamw(1e-3)

    def shard(x: Any, name: str) -> Any:
        return shard_by(x, places) if name in constrained else x

    def shard_by(x: Any, where: Any) -> Any:
        return hax.named(cut(x.array, P(*(where.get(a.name) for a in x.axes))), x.axes)

    def layer(x: Any, w: Any) -> Any:
        if compute:
            w = {k: shard_by(v, dict(compute)) for k, v in w.items()}
        y = x * hax.rsqrt(hax.mean(x * x, embed) + 1e-6) * w["scale"]
        q, k, v = (
            shard(_dot(y, w[n], axis=embed).rearrange((batch_, pos, heads, size)), "heads")
            for n in "qkv"
        )
        k, v = k.rename({"pos": "keys"}), v.rename({"pos": "keys"})
        scores = _dot(q, k, axis=size).rearrange((batch_, heads, pos, keys))
        allowed = hax.arange(keys).broadcast_axis(pos) <= hax.arange(pos)
        if mask:  # a mask for each row and head
            allowed = allowed.broadcast_axis(heads).broadcast_axis(batch_)
            bias = hax.where(allowed, 0.0, -1e9).rearrange((batch_, heads, pos, keys))
            scores = scores + hax.named(cut(bias.array, P()), bias.axes)
        else:
            scores = hax.where(allowed, scores, -1e9)
        mixed = _dot(hax.nn.softmax(scores, keys), v, axis=keys)
        x = shard(
            x + _dot(mixed, w["o"], axis=(heads, size)).rearrange((batch_, pos, embed)), "residual"
        )
        y = shard(hax.nn.gelu(_dot(x, w["up"], axis=embed)).rearrange((batch_, pos, mlp)), "hidden")
        return shard(x + _dot(y, w["down"], axis=mlp).rearrange((batch_, pos, embed)), "residual")

    def loss(params: Any, batch: Any) -> Any:
        tokens, targets = (hax.named(batch[n], (batch_, pos)) for n in ("tokens", "targets"))
        table = shard(params["table"], "lookup")
        x = shard(table.take(vocab, tokens).rearrange((batch_, pos, embed)), "residual")
        apply = jax.checkpoint(layer) if remat else layer
        x = hax.fold(apply, depth)(x, params["layers"])
        scores = _dot(x, params["head"], axis=embed).rearrange((batch_, pos, vocab))
        scores = shard(scores, "logits")
        hot = hax.nn.one_hot(targets, vocab)
        value = hax.nn.logsumexp(scores, vocab) - hax.sum(scores * hot, vocab)
        return hax.mean(value).scalar(), {"logits": scores.array}.get(measured)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda g: cut(g, gradients), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, kept)

    tokens = abstract(mesh, batch, (64, _LENGTH))
    state = jax.eval_shape(tx.init, shapes)
    arrays = {"tokens": tokens, "targets": tokens}
    # What is planned for a named array is a leaf; what jit takes is one with names.
    parts = ((shapes, plan), (state, plan.for_optimizer(state)))
    given = tuple(
        jax.tree.unflatten(jax.tree.structure(part), jax.tree.leaves(planned.abstract()))
        for part, planned in parts
    )
    return train_step(step, plan, state, arrays, donate=donate, returned=returned, given=given)


_HALIAX_FAULTS: Final = {
    "activations are not sharded": {"constrained": ()},
    "activations are not sharded, nor is the batch": {"constrained": (), "batch": P()},
    "the residual alone is sharded": {"constrained": ("residual",)},
    "no axis for the batch": {"axes": {"batch": None}},
    "no axis for the mlp": {"axes": {"mlp": None}},
    "no axis for heads": {"axes": {"heads": None}},
    "no axis for the vocabulary": {"axes": {"vocab": None}},
    "one mapping for both": {"axes": {"batch": None, "embed": "fsdp"}},
    "the width over tp": {"axes": {"embed": "tp", "mlp": None, "heads": None, "vocab": None}},
    "the sequence over tp": {"axes": {"pos": "tp", "mlp": None, "heads": None, "vocab": None}},
    "the batch over both": {"axes": {"batch": ("fsdp", "tp"), "mlp": None, "heads": None, "vocab": None}},
    "axes are swapped": {"axes": {"batch": "tp", "mlp": "fsdp", "heads": "fsdp", "vocab": "fsdp"}},
    "parameters' axes are swapped": {"stored": {"embed": "tp", "mlp": "fsdp", "heads": "fsdp", "vocab": "fsdp"}},
    "layers are gathered whole": {"compute": (("none", None),)},
    "the mask is whole": {"mask": True},
    "gradients are whole": {"gradients": P()},
    "logits are returned": {"measured": "logits"},
    "not donated": {"donate": False},
    "no remat": {"remat": False},
    # These look wrong.
    "the batch comes in whole": {"batch": P()},
    "no out_shardings": {"returned": False},
}  # fmt: skip

STEPS: Final = (
    Step("equinox with its own jit", _equinox, _EQUINOX_FAULTS),
    Step("haliax with named axes", _haliax, _HALIAX_FAULTS),
)
