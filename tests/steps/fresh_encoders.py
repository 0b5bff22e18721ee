"""An encoder with a tied table for masked words in nnx, and an encoder-decoder in linen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.parts import abstract, cutter, mesh_of, train_step
from tests.steps.score import Built, Step

__all__ = ["STEPS"]

_Cut = Callable[[Any, P | None], Any]


class _Layer(nnx.Module):
    """A layer of an encoder, its norms after its sums."""

    def __init__(self, width: int, count: int, inner: int, *, rngs: nnx.Rngs):
        self.count = count
        self.qkv = nnx.LinearGeneral(width, (3, count, width // count), rngs=rngs)
        self.out = nnx.LinearGeneral((count, width // count), width, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(width, inner, rngs=rngs)
        self.down = nnx.Linear(inner, width, rngs=rngs)
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x: Any, mask: Any, specs: dict[str, Any], cut: _Cut) -> Any:
        qkv = self.qkv(x)
        q, k, v = (cut(qkv[:, :, i], specs["heads"]) for i in range(3))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        scores = cut(jnp.where(mask, scores, -1e9), specs["scores"])
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        x = cut(self.norm1(x + self.out(mixed)), specs["residual"])
        y = cut(jax.nn.gelu(self.up(x)), specs["hidden"])
        return cut(self.norm2(x + self.down(y)), specs["residual"])


class _Bert(nnx.Module):
    """An encoder whose logits are products with its table."""

    def __init__(self, words: int, width: int, length: int, *, rngs: nnx.Rngs):
        self.table = nnx.Embed(words, width, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((length, width)))
        self.layers = nnx.List([_Layer(width, 8, 4 * width, rngs=rngs) for _ in range(2)])
        self.transform = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)


def _bert(
    *,
    batch: P = P("fsdp"),
    residual: P | None = P("fsdp"),
    heads: P | None = P("fsdp", None, "tp"),
    scores: P | None = None,
    hidden: P | None = P("fsdp", None, "tp"),
    masked: P | None = P("fsdp"),
    logits: P | None = P("fsdp", None, "tp"),
    table: P = P("tp", "fsdp"),
    looked_up: P | None = P("tp"),
    down: P = P("tp", "fsdp"),
    gradients: P | None = None,
    moments: P | None = None,
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    positions: str = "taken",
    dropout: P | None = P("fsdp"),
    measured: str = "",
    flattened: bool = False,
) -> Built:
    """Train an encoder to fill in masked words."""
    mesh = mesh_of(fsdp=4, tp=2)
    cut = cutter(mesh)
    words, width, length, holes = 2048, 256, 128, 16
    specs = {"residual": residual, "heads": heads, "scores": scores, "hidden": hidden}
    model = nnx.eval_shape(lambda: _Bert(words, width, length, rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(model)
    rules = [
        ("qkv/kernel", P("fsdp", None, "tp")),
        ("qkv/bias", P(None, "tp")),
        ("out/kernel", P("tp", None, "fsdp")),
        ("up/kernel", P("fsdp", "tp")),
        ("up/bias", P("tp")),
        ("down/kernel", down),
        ("table", table),
        ("transform/kernel", P("fsdp")),
        ("bias|scale|positions", P()),
    ]
    plan = sr.plan(shapes, rules, mesh)
    tx = optax.adamw(1e-4)

    def loss(params: Any, batch: Any) -> Any:
        model = nnx.merge(graph, params)
        embedding = cut(model.table.embedding[...], looked_up)
        x = embedding[batch["tokens"]] + model.positions[...]
        x = cut(x, residual)
        keep = cut(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), dropout)
        x = jnp.where(keep, x / 0.9, 0)
        segments = batch["segments"]
        mask = (segments[:, :, None] == segments[:, None])[:, None]
        for layer in model.layers:

            def apply(x: Any, layer: Any = layer) -> Any:
                return layer(x, mask, specs, cut)

            x = jax.checkpoint(apply)(x) if remat else apply(x)
        where, answers = batch["where"], batch["answers"]
        if positions == "taken":
            x = jnp.take_along_axis(x, where[..., None], axis=1)
        elif positions == "flattened":
            offsets = where + length * jnp.arange(where.shape[0])[:, None]
            x = x.reshape(-1, width)[offsets.reshape(-1)].reshape(-1, holes, width)
        elif positions == "all":
            answers = jax.vmap(lambda a, i: jnp.zeros(length, a.dtype).at[i].set(a))(answers, where)
        x = cut(x, masked)
        if flattened:
            x = x.reshape(-1, width)
        y = model.norm(jax.nn.gelu(model.transform(x))).reshape(*answers.shape, width)
        scores = cut(y @ embedding.T, logits)
        log_z = jax.nn.logsumexp(scores, -1)
        losses = log_z - (scores * jax.nn.one_hot(answers, words)).sum(-1)
        metrics = {
            "states": x,
            "logits": scores,
            "accuracy": (cut(scores, P("fsdp")).argmax(-1) == answers).mean(),
        }
        return losses.mean(), metrics.get(measured)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda leaf: cut(leaf, gradients), grads)
        updates, state = tx.update(grads, state, params)
        if moments is not None:
            state = jax.tree.map(lambda leaf: cut(leaf, moments), state)
        return optax.apply_updates(params, updates), state, (value, metrics)

    tokens, answers = abstract(mesh, batch, (32, length)), abstract(mesh, batch, (32, holes))
    inputs = {"tokens": tokens, "segments": tokens, "where": answers, "answers": answers}
    state = jax.eval_shape(tx.init, shapes)
    return train_step(step, plan, state, inputs, donate=donate, returned=returned)


_BERT_FAULTS: Final = {
    "no constraints": {
        "residual": None, "heads": None, "hidden": None, "masked": None, "logits": None, "looked_up": None,
    },
    "no constraints, and the batch whole": {
        "residual": None, "heads": None, "hidden": None, "masked": None, "logits": None, "batch": P(),
    },
    "the residual is whole": {"residual": P()},
    "the residual is cut over tp": {"residual": P("fsdp", None, "tp")},
    "heads are whole over tp": {"heads": P("fsdp")},
    "heads are whole over the batch": {"heads": P(None, None, "tp")},
    "attention is cut over queries": {"scores": P("fsdp", None, "tp")},
    "attention's scores are whole over tp": {"scores": P("fsdp")},
    "hidden is whole over the batch": {"hidden": P(None, None, "tp")},
    "masked words are taken from the flattened batch": {"positions": "flattened"},
    "logits of all positions, whole over tp": {"positions": "all", "logits": P("fsdp")},
    "logits are whole": {"logits": P()},
    "logits are whole over tp": {"logits": P("fsdp")},
    "the table is cut over its width": {"table": P("fsdp", "tp"), "looked_up": P(None, "tp")},
    "the table is gathered": {"looked_up": P()},
    "down is cut by columns": {"down": P("fsdp", "tp")},
    "gradients are constrained to be whole": {"gradients": P()},
    "moments are constrained to be whole": {"moments": P(), "returned": False},
    "the dropout's mask is whole": {"dropout": P()},
    "not donated": {"donate": False},
    "no remat": {"remat": False},
    # These look wrong.
    "the batch comes in whole": {"batch": P()},
    "masked words are whole": {"masked": P()},
    "logits of all positions": {"positions": "all"},
    "the accuracy of gathered logits": {"measured": "accuracy"},
    "masked words' states are returned": {"measured": "states"},
    "logits are returned as they are cut": {"measured": "logits"},
    "masked words are flattened for the transform": {"flattened": True},
    "the dropout's mask is left to XLA": {"dropout": None},
}  # fmt: skip


class _Attention(nn.Module):
    """Attention from x to y."""

    cut: _Cut
    heads: P | None
    keys: P | None

    @nn.compact
    def __call__(self, x: Any, y: Any, bias: Any) -> Any:
        q = self.cut(nn.DenseGeneral((8, 32), use_bias=False, name="q")(x), self.heads)
        k, v = (
            self.cut(nn.DenseGeneral((8, 32), use_bias=False, name=n)(y), self.keys) for n in "kv"
        )
        scores = jnp.einsum("bthd,bshd->bhts", q, k) + bias
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        return nn.DenseGeneral(x.shape[-1], (-2, -1), use_bias=False, name="o")(mixed)


class _Stack(nn.Module):
    """A layer of the encoder, or with attention to an encoder's states one of the decoder."""

    cut: _Cut
    specs: Any

    @nn.compact
    def __call__(self, x: Any, encoded: Any, bias: Any) -> Any:
        cut, specs = self.cut, self.specs

        def attention(name: str, keys: P | None) -> _Attention:
            return _Attention(cut, specs["heads"], keys, name=name)

        y = nn.RMSNorm()(x)
        x = cut(x + attention("own", specs["heads"])(y, y, bias), specs["residual"])
        if encoded is not None:
            y = attention("cross", specs["keys"])(nn.RMSNorm()(x), encoded, 0.0)
            x = cut(x + y, specs["residual"])
        y = nn.RMSNorm()(x)
        gate, up = (nn.Dense(512, use_bias=False, name=n)(y) for n in ("gate", "up"))
        y = cut(nn.gelu(gate) * up, specs["hidden"])
        y = nn.Dense(x.shape[-1], use_bias=False, name="down")(y)
        return cut(x + y, specs["residual"]), None


class _Both(nn.Module):
    """An encoder and a decoder of scanned layers, with one table."""

    cut: _Cut
    specs: Any
    remat: tuple[bool, bool]

    @nn.compact
    def __call__(self, sources: Any, targets: Any) -> Any:
        cut, specs = self.cut, self.specs
        table = self.param("table", nn.initializers.normal(), (1024, 256))
        looked_up = cut(table, specs["looked_up"])

        def bias(name: str, length: int, causal: bool) -> Any:
            buckets = self.param(name, nn.initializers.normal(), (32, 8))
            apart = jnp.arange(length) - jnp.arange(length)[:, None]
            bias = buckets[jnp.clip(apart + 16, 0, 31)].transpose(2, 0, 1)
            bias = cut(bias, specs["bias"])
            return jnp.where(apart <= 0, bias, -1e9) if causal else bias

        def stack(name: str, remat: bool, x: Any, encoded: Any, bias: Any) -> Any:
            block = nn.remat(_Stack, prevent_cse=False) if remat else _Stack
            scanned = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=2,
            )
            return scanned(cut, specs, name=name)(x, encoded, bias)[0]

        x = cut(looked_up[sources], specs["residual"])
        x = stack("encoder", self.remat[0], x, None, bias("encoder_bias", x.shape[1], False))
        encoded = cut(nn.RMSNorm(name="encoder_norm")(x), specs["encoded"])
        y = cut(looked_up[targets], specs["residual"])
        y = stack("decoder", self.remat[1], y, encoded, bias("decoder_bias", y.shape[1], True))
        scores = nn.RMSNorm(name="decoder_norm")(y) @ looked_up.T
        return cut(scores, specs["logits"]), encoded


_ALL: Final = ("data", "fsdp")


def _encoder_decoder(
    *,
    batch: P = P(_ALL),
    residual: P | None = P(_ALL),
    heads: P | None = P(_ALL, None, "tp"),
    keys: P | None = P(_ALL, None, "tp"),
    hidden: P | None = P(_ALL, None, "tp"),
    encoded: P | None = P(_ALL),
    logits: P | None = P(_ALL, None, "tp"),
    bias: P | None = P("tp"),
    looked_up: P | None = P("tp"),
    o: P = P(None, "tp", None, "fsdp"),
    remat: tuple[bool, bool] = (True, True),
    donate: bool = True,
    returned: bool = True,
    gradients: P | None = None,
    measured: str = "",
    smoothed: P | None = None,
    picked: bool = False,
    z_loss: bool = False,
    clipped: bool = False,
    adam: bool = False,
) -> Built:
    """Train a T5 with adafactor."""
    mesh = mesh_of(data=2, fsdp=2, tp=2)
    cut = cutter(mesh)
    specs = {
        "residual": residual, "heads": heads, "keys": keys, "hidden": hidden, "encoded": encoded,
        "logits": logits, "bias": bias, "looked_up": looked_up,
    }  # fmt: skip
    model = _Both(cut, specs, remat)
    tx = optax.adam(1e-3) if adam else optax.adafactor(1e-3, min_dim_size_to_factor=64)
    texts = jax.ShapeDtypeStruct((32, 128), "int32"), jax.ShapeDtypeStruct((32, 64), "int32")
    shapes = jax.eval_shape(model.init, jax.random.key(0), *texts)["params"]
    rules = [
        ("table", P("tp", "fsdp")),
        ("_bias", P(None, "tp")),
        ("scale", P()),
        ("[qkv]/kernel", P(None, "fsdp", "tp")),
        ("o/kernel", o),
        ("(gate|up)/kernel", P(None, "fsdp", "tp")),
        ("down/kernel", P(None, "tp", "fsdp")),
    ]
    plan = sr.plan(shapes, rules, mesh)

    def loss(params: Any, batch: Any) -> Any:
        sources, targets = batch["sources"], batch["targets"]
        shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
        scores, encoded = model.apply({"params": params}, sources, shifted)
        log_z = jax.nn.logsumexp(scores, -1)
        if picked:
            chosen = jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
        else:
            soft = 0.9 * jax.nn.one_hot(targets, 1024) + 0.1 / 1024
            chosen = (scores * cut(soft, smoothed)).sum(-1)
        value = (log_z - chosen).mean() + (1e-4 * (log_z**2).mean() if z_loss else 0)
        metrics = {"encoded": encoded, "logits": scores, "losses": log_z - chosen}
        return value, metrics.get(measured)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda leaf: cut(leaf, gradients), grads)
        if clipped:
            grads = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, metrics)

    inputs = {
        "sources": abstract(mesh, batch, texts[0].shape),
        "targets": abstract(mesh, batch, texts[1].shape),
    }
    state = jax.eval_shape(tx.init, shapes)
    return train_step(step, plan, state, inputs, donate=donate, returned=returned)


_ENCODER_DECODER_FAULTS: Final = {
    "no constraints": dict.fromkeys(("residual", "heads", "keys", "hidden", "encoded", "logits", "bias", "looked_up")),
    "no constraints, and the batch whole": {
        "batch": P(), "residual": None, "heads": None, "keys": None, "hidden": None, "encoded": None, "logits": None,
    },
    "the residual is cut over tp": {"residual": P(_ALL, None, "tp"), "encoded": P(_ALL, None, "tp")},
    "the residual is cut over data alone": {"residual": P("data"), "encoded": P("data")},
    "encoded states are whole": {"encoded": P()},
    "encoded states are whole over fsdp": {"encoded": P("data")},
    "encoded states are cut over tp": {"encoded": P(_ALL, None, "tp")},
    "keys and values of the encoder are whole over tp": {"keys": P(_ALL)},
    "keys and values of the encoder are whole over the batch": {"keys": P(None, None, "tp")},
    "keys of the encoder are cut over the sequence": {"keys": P(_ALL, "tp")},
    "heads are whole over tp": {"heads": P(_ALL)},
    "hidden is whole over tp": {"hidden": P(_ALL)},
    "hidden without the batch": {"hidden": P(None, None, "tp")},
    "logits are whole over tp": {"logits": P(_ALL)},
    "logits without the batch": {"logits": P(None, None, "tp")},
    "the smoothed targets are whole": {"smoothed": P()},
    "the output of attention is cut by columns": {"o": P(None, "fsdp", None, "tp")},
    "no remat": {"remat": (False, False)},
    "no remat of the decoder": {"remat": (True, False)},
    "not donated": {"donate": False},
    "gradients are constrained to be whole": {"gradients": P()},
    "encoded states are returned": {"measured": "encoded"},
    "logits are returned": {"measured": "logits"},
    # These look wrong.
    "the batch comes in whole": {"batch": P()},
    "the bias of positions is whole": {"bias": P()},
    "logits are picked by an index": {"picked": True},
    "a loss of the norm of logits": {"z_loss": True},
    "gradients are clipped by their norm": {"clipped": True},
    "losses of all words are returned": {"measured": "losses"},
}  # fmt: skip

STEPS: Final = (
    Step("an encoder of masked words", _bert, _BERT_FAULTS),
    Step("an encoder-decoder", _encoder_decoder, _ENCODER_DECODER_FAULTS),
)
