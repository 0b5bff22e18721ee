"""An encoder with a tied table for masked words in nnx, and an encoder-decoder in linen."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from tests.steps.blocks import entropy
from tests.steps.model import Case, Model

# An encoder

_WORDS: Final = 2048
_WIDTH: Final = 256
_HOLES: Final = 16


class _Layer(nnx.Module):
    """A layer of an encoder, its norms after its sums."""

    def __init__(self, rngs: nnx.Rngs):
        width, heads = _WIDTH, (8, _WIDTH // 8)
        self.qkv = nnx.LinearGeneral(width, (3, *heads), rngs=rngs)
        self.out = nnx.LinearGeneral(heads, width, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))

    def __call__(self, x: Any, mask: Any, case: Case) -> Any:
        qkv = self.qkv(x)
        q, k, v = (case.cut(qkv[:, :, i], "heads") for i in range(3))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        scores = case.cut(jnp.where(mask, scores, -1e9), "scores")
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        x = case.cut(self.norm1(x + self.out(mixed)), "residual")
        y = case.cut(jax.nn.gelu(self.up(x)), "hidden")
        return case.cut(self.norm2(x + self.down(y)), "residual")


class _Bert(nnx.Module):
    """An encoder whose logits are products with its table."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(_WORDS, _WIDTH, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((128, _WIDTH)))
        self.layers = nnx.List([_Layer(rngs) for _ in range(2)])
        self.transform = nnx.Linear(_WIDTH, _WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(_WIDTH, rngs=rngs)


def _bert() -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: _Bert(nnx.Rngs(0))))


def _bert_loss(case: Case, params: Any, batch: Any) -> Any:
    cut, model = case.cut, nnx.merge(_bert()[0], params)
    embedding = cut(model.table.embedding[...], "table")
    x = cut(embedding[batch["tokens"]] + model.positions[...], "residual")
    keep = cut(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), "dropout")
    x, segments = jnp.where(keep, x / 0.9, 0), batch["segments"]
    mask = (segments[:, :, None] == segments[:, None])[:, None]
    for layer in model.layers:

        def apply(x: Any, layer: Any = layer) -> Any:
            return layer(x, mask, case)

        x = case.recomputed(apply)(x)
    where, answers, length = batch["where"], batch["answers"], x.shape[1]
    if case.has("masked words are taken from the flattened batch"):
        offsets = where + length * jnp.arange(where.shape[0])[:, None]
        x = x.reshape(-1, _WIDTH)[offsets.reshape(-1)].reshape(-1, _HOLES, _WIDTH)
    elif case.has("logits of all positions"):
        answers = jax.vmap(lambda a, i: jnp.zeros(length, a.dtype).at[i].set(a))(answers, where)
    else:
        x = jnp.take_along_axis(x, where[..., None], axis=1)
    x = cut(x, "masked")
    if case.has("masked words are flattened for the transform"):
        x = x.reshape(-1, _WIDTH)
    y = model.norm(jax.nn.gelu(model.transform(x))).reshape(*answers.shape, _WIDTH)
    scores = cut(y @ embedding.T, "logits")
    kept = {"states": x, "logits": scores}
    if case.told == "accuracy":
        kept["accuracy"] = (cut(scores, "gathered").argmax(-1) == answers).mean()
    return entropy(scores, answers), kept


# An encoder-decoder


class _Attention(nn.Module):
    """Attention from x to y."""

    case: Case
    keys: str

    @nn.compact
    def __call__(self, x: Any, y: Any, bias: Any) -> Any:
        def heads(x: Any, name: str, place: str) -> Any:
            return self.case.cut(nn.DenseGeneral((8, 32), use_bias=False, name=name)(x), place)

        q, k, v = heads(x, "q", "heads"), heads(y, "k", self.keys), heads(y, "v", self.keys)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) + bias
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        return nn.DenseGeneral(x.shape[-1], (-2, -1), use_bias=False, name="o")(mixed)


class _Stack(nn.Module):
    """A layer of the encoder, or with attention to an encoder's states one of the decoder."""

    case: Case

    @nn.compact
    def __call__(self, x: Any, encoded: Any, bias: Any) -> Any:
        case = self.case
        y = nn.RMSNorm()(x)
        x = case.cut(x + _Attention(case, "heads", name="own")(y, y, bias), "residual")
        if encoded is not None:
            y = _Attention(case, "keys", name="cross")(nn.RMSNorm()(x), encoded, 0.0)
            x = case.cut(x + y, "residual")
        y = nn.RMSNorm()(x)
        gate, up = (nn.Dense(512, use_bias=False, name=n)(y) for n in ("gate", "up"))
        y = case.cut(nn.gelu(gate) * up, "hidden")
        y = nn.Dense(x.shape[-1], use_bias=False, name="down")(y)
        return case.cut(x + y, "residual"), None


class _Both(nn.Module):
    """An encoder and a decoder of scanned layers, with one table."""

    case: Case

    @nn.compact
    def __call__(self, sources: Any, targets: Any) -> Any:
        case = self.case
        table = self.param("table", nn.initializers.normal(), (1024, 256))
        table = case.cut(table, "table")

        def bias(name: str, length: int, is_causal: bool) -> Any:
            buckets = self.param(name, nn.initializers.normal(), (32, 8))
            apart = jnp.arange(length) - jnp.arange(length)[:, None]
            bias = buckets[jnp.clip(apart + 16, 0, 31)].transpose(2, 0, 1)
            bias = case.cut(bias, "bias")
            return jnp.where(apart <= 0, bias, -1e9) if is_causal else bias

        def stack(name: str, x: Any, encoded: Any, bias: Any) -> Any:
            is_kept = case.has("no remat") or case.has(f"no remat of the {name}")
            scanned = nn.scan(
                _Stack if is_kept else nn.remat(_Stack, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=2,
            )
            return scanned(case, name=name)(x, encoded, bias)[0]

        x = case.cut(table[sources], "residual")
        x = stack("encoder", x, None, bias("encoder_bias", x.shape[1], False))
        encoded = case.cut(nn.RMSNorm(name="encoder_norm")(x), "encoded")
        y = case.cut(table[targets], "residual")
        y = stack("decoder", y, encoded, bias("decoder_bias", y.shape[1], True))
        scores = nn.RMSNorm(name="decoder_norm")(y) @ table.T
        return case.cut(scores, "logits"), encoded


def _both_shapes(case: Case) -> Any:
    texts = (jax.ShapeDtypeStruct((32, length), "int32") for length in (128, 64))
    return jax.eval_shape(_Both(case).init, jax.random.key(0), *texts)["params"]


def _both_loss(case: Case, params: Any, batch: Any) -> Any:
    targets = batch["targets"]
    shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
    scores, encoded = _Both(case).apply({"params": params}, batch["sources"], shifted)
    log_z = jax.nn.logsumexp(scores, -1)
    if case.has("logits are picked by an index"):
        chosen = jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
    else:
        soft = 0.9 * jax.nn.one_hot(targets, 1024) + 0.1 / 1024
        chosen = (scores * case.cut(soft, "smoothed")).sum(-1)
    value = (log_z - chosen).mean()
    if case.has("a loss of the norm of logits"):
        value += 1e-4 * (log_z**2).mean()
    return value, {"encoded": encoded, "logits": scores, "losses": log_z - chosen}


STEPS: Final = {
    "an encoder of masked words": Model(
        _bert_loss, lambda case: _bert()[1], optimizer=lambda case, plan: optax.adamw(1e-4)
    ),
    "an encoder-decoder": Model(
        _both_loss, _both_shapes, optimizer=lambda case, plan: optax.adafactor(1e-3, min_dim_size_to_factor=64)
    ),
}
