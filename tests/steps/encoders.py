"""An encoder with a tied table for masked words in nnx, and an encoder-decoder in linen."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.steps.blocks import entropy
from tests.steps.model import Case, Fault, Model, faults, free
from tests.steps.score import Step

# An encoder

_WORDS: Final = 2048
_WIDTH: Final = 256
_HOLES: Final = 16
_PARTS: Final = P("fsdp", None, "tp")


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


_ENCODER: Final = Model(
    mesh={"fsdp": 4, "tp": 2},
    shapes=lambda case: _bert()[1],
    rules=[
        ("qkv/kernel", _PARTS),
        ("qkv/bias", P(None, "tp")),
        ("out/kernel", P("tp", None, "fsdp")),
        ("up/kernel", P("fsdp", "tp")),
        ("up/bias", P("tp")),
        ("down/kernel|table", P("tp", "fsdp")),
        ("transform/kernel", P("fsdp")),
        ("bias|scale|positions", P()),
    ],
    places={
        **dict.fromkeys(("batch", "residual", "masked", "dropout", "gathered"), P("fsdp")),
        **dict.fromkeys(("heads", "hidden", "logits"), _PARTS),
        "table": P("tp"),
    },
    batch={**dict.fromkeys(("tokens", "segments"), (32, 128)), **dict.fromkeys(("where", "answers"), (32, _HOLES))},
    loss=_bert_loss,
    optimizer=lambda case, plan: optax.adamw(1e-4),
)
_ENCODER_FREE: Final = dict.fromkeys(("residual", "heads", "hidden", "masked", "logits"))
_ENCODER_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "masked words are taken from the flattened batch", "not donated", "no remat", "the residual is whole",
        "hidden is whole over the batch", "logits are whole", "the table is gathered",
        "gradients are constrained to be whole", "moments are constrained to be whole",
    ),
    "no constraints": {**_ENCODER_FREE, "table": None},
    "no constraints, and the batch whole": {**_ENCODER_FREE, "batch": P()},
    "the residual is cut over tp": {"residual": _PARTS},
    "heads are whole over tp": {"heads": P("fsdp")},
    "heads are whole over the batch": {"heads": P(None, None, "tp")},
    "attention is cut over queries": {"scores": _PARTS},
    "attention's scores are whole over tp": {"scores": P("fsdp")},
    "logits of all positions, whole over tp": {"wrong": "logits of all positions", "logits": P("fsdp")},
    "logits are whole over tp": {"logits": P("fsdp")},
    "the table is cut over its width": {"rules": [("table", P("fsdp", "tp"))], "table": P(None, "tp")},
    "down is cut by columns": {"rules": [("down/kernel", P("fsdp", "tp"))]},
    "the dropout's mask is whole": {"dropout": P()},
    # These look wrong.
    **faults(
        "logits of all positions", "masked words are flattened for the transform", "the batch comes in whole",
    ),
    "masked words are whole": {"masked": P()},
    "the accuracy of gathered logits": {"told": "accuracy"},
    "masked words' states are returned": {"told": "states"},
    "logits are returned as they are cut": {"told": "logits"},
    "the dropout's mask is left to XLA": {"dropout": None},
}  # fmt: skip


# An encoder-decoder

_BATCH: Final = ("data", "fsdp")
_HEADS: Final = P(_BATCH, None, "tp")


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


_ENCODER_DECODER: Final = Model(
    mesh={"data": 2, "fsdp": 2, "tp": 2},
    shapes=_both_shapes,
    rules=[
        ("table", P("tp", "fsdp")),
        ("_bias", P(None, "tp")),
        ("scale", P()),
        ("([qkv]|gate|up)/kernel", P(None, "fsdp", "tp")),
        ("o/kernel", P(None, "tp", None, "fsdp")),
        ("down/kernel", P(None, "tp", "fsdp")),
    ],
    places={
        **dict.fromkeys(("batch", "residual", "encoded"), P(_BATCH)),
        **dict.fromkeys(("heads", "keys", "hidden", "logits"), _HEADS),
        **dict.fromkeys(("bias", "table"), P("tp")),
    },
    batch={"sources": (32, 128), "targets": (32, 64)},
    loss=_both_loss,
    optimizer=lambda case, plan: optax.adafactor(1e-3, min_dim_size_to_factor=64),
)
_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "no remat", "no remat of the decoder", "not donated", "gradients are constrained to be whole",
        "logits are returned",
    ),
    "no constraints": free(_ENCODER_DECODER.places),
    "no constraints, and the batch whole": {
        **dict.fromkeys(("residual", "heads", "keys", "hidden", "encoded", "logits")), "batch": P(),
    },
    "the residual is cut over tp": dict.fromkeys(("residual", "encoded"), _HEADS),
    "the residual is cut over data alone": dict.fromkeys(("residual", "encoded"), P("data")),
    "encoded states are whole": {"encoded": P()},
    "encoded states are whole over fsdp": {"encoded": P("data")},
    "encoded states are cut over tp": {"encoded": _HEADS},
    "keys and values of the encoder are whole over tp": {"keys": P(_BATCH)},
    "keys and values of the encoder are whole over the batch": {"keys": P(None, None, "tp")},
    "keys of the encoder are cut over the sequence": {"keys": P(_BATCH, "tp")},
    "heads are whole over tp": {"heads": P(_BATCH)},
    "hidden is whole over tp": {"hidden": P(_BATCH)},
    "hidden without the batch": {"hidden": P(None, None, "tp")},
    "logits are whole over tp": {"logits": P(_BATCH)},
    "logits without the batch": {"logits": P(None, None, "tp")},
    "the smoothed targets are whole": {"smoothed": P()},
    "the output of attention is cut by columns": {"rules": [("o/kernel", P(None, "fsdp", None, "tp"))]},
    "encoded states are returned": {"told": "encoded"},
    # These look wrong.
    **faults(
        "logits are picked by an index", "a loss of the norm of logits", "gradients are clipped by their norm",
        "the batch comes in whole",
    ),
    "the bias of positions is whole": {"bias": P()},
    "losses of all words are returned": {"told": "losses"},
}  # fmt: skip

STEPS: Final = (
    Step("an encoder of masked words", _ENCODER, _ENCODER_FAULTS, "fresh"),
    Step("an encoder-decoder", _ENCODER_DECODER, _FAULTS, "fresh"),
)
