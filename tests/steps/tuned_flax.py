"""Decoders of flax: linen with logical axes, and nnx with its own jit."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
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
_BATCH: Final = 64


def _cross_entropy(scores: Any, targets: Any) -> Any:
    hot = jax.nn.one_hot(targets, scores.shape[-1])
    return (jax.nn.logsumexp(scores, -1) - (scores * hot).sum(-1)).mean()


def _attend(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    allowed = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(allowed, scores, -1e9)), v)


# linen

_AXES: Final = {
    "batch": ("data", "fsdp"), "length": None, "heads": "tp", "mlp": "tp", "vocab": "tp", "embed": "fsdp",
    "features": None, "keys": None, "layers": None, "words": "tp",
}  # fmt: skip


class _Layer(nn.Module):
    """A layer whose arrays have names of axes."""

    named: bool
    mesh: Any

    @nn.compact
    def __call__(self, x: Any, _: Any) -> tuple[Any, None]:
        constrain = partial(nn.with_logical_constraint, mesh=self.mesh)
        name = constrain if self.named else lambda x, names: x
        init = nn.initializers.lecun_normal()

        def dense(size: Any, names: tuple[str, ...], label: str, axis: Any = -1) -> Any:
            kernel = nn.with_logical_partitioning(init, names)
            return nn.DenseGeneral(size, axis, use_bias=False, kernel_init=kernel, name=label)

        y = nn.RMSNorm()(x)
        heads = (_HEADS, _WIDTH // _HEADS)
        q, k, v = (
            name(
                dense(heads, ("embed", "heads", "keys"), n)(y), ("batch", "length", "heads", "keys")
            )
            for n in "qkv"
        )
        y = dense(_WIDTH, ("heads", "keys", "embed"), "o", (-2, -1))(_attend(q, k, v))
        x = name(x + y, ("batch", "length", "features"))
        y = nn.RMSNorm()(x)
        y = nn.gelu(dense(_INNER, ("embed", "mlp"), "up")(y))
        y = name(y, ("batch", "length", "mlp"))
        y = dense(_WIDTH, ("mlp", "embed"), "down")(y)
        return name(x + y, ("batch", "length", "features")), None


class _Decoder(nn.Module):
    """A table, scanned layers and a head."""

    remat: bool
    named: tuple[bool, bool, bool]
    mesh: Any

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        constrain = partial(nn.with_logical_constraint, mesh=self.mesh)
        table = nn.with_logical_partitioning(nn.initializers.normal(), ("words", "embed"))
        embed = nn.Embed(_WORDS, _WIDTH, embedding_init=table, name="table")
        x = embed(tokens)
        if self.named[0]:
            x = constrain(embed.embedding, ("vocab", "features"))[tokens]
            x = constrain(x, ("batch", "length", "features"))
        block: Any = nn.remat(_Layer, prevent_cse=False) if self.remat else _Layer
        x, _ = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(self.named[1], self.mesh, name="layers")(x, None)
        kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "vocab"))
        x = nn.Dense(_WORDS, use_bias=False, kernel_init=kernel, name="head")(nn.RMSNorm()(x))
        return constrain(x, ("batch", "length", "vocab")) if self.named[2] else x


def _linen(
    *,
    axes: Any = (),
    planned: Any = (),
    batch: P = P(("data", "fsdp")),
    named: tuple[bool, bool, bool] = (True, True, True),
    is_in_mesh: bool = True,
    remat: bool = True,
    donate: bool = True,
    returned: bool = True,
    gradients: P | None = None,
    measured: str = "",
    clipped: bool = False,
) -> Built:
    """Train it with Lion; `axes` are of activations, `planned` of parameters."""
    mesh = mesh_of(data=2, fsdp=2, tp=2)
    cut = cutter(mesh)
    model = _Decoder(remat, named, mesh if is_in_mesh else None)
    texts = jax.ShapeDtypeStruct((_BATCH, _LENGTH), "int32")
    boxed = jax.eval_shape(model.init, jax.random.key(0), texts)["params"]
    names = nn.get_partition_spec(boxed)
    logical = list({**_AXES, **dict(planned)}.items())
    specs = nn.logical_to_mesh(names, logical)
    plan = sr.plan(nn.unbox(boxed), [(".*", P())], mesh)
    rules = [
        (f"^{path}$", spec) for path, spec in zip(plan.paths, jax.tree.leaves(specs), strict=True)
    ]
    plan = sr.plan(nn.unbox(boxed), rules, mesh)
    tx = optax.lion(1e-4)
    activations = list({**_AXES, **dict(axes)}.items())

    def loss(params: Any, batch: Any) -> Any:
        scores = model.apply({"params": params}, batch["tokens"])
        value = _cross_entropy(scores, batch["targets"])
        whole = {"logits": scores, "chances": cut(jax.nn.softmax(scores), P("data"))}
        return value, whole.get(measured)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda g: cut(g, gradients), grads)
        if clipped:
            grads = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, kept)

    tokens = abstract(mesh, batch, texts.shape)
    state = jax.eval_shape(tx.init, nn.unbox(boxed))
    with nn.logical_axis_rules(activations):
        arrays = {"tokens": tokens, "targets": tokens}
        return train_step(step, plan, state, arrays, donate=donate, returned=returned)


_LINEN_FAULTS: Final = {
    "constraints know no mesh": {"is_in_mesh": False},
    "no constraints at all, and the batch whole": {"named": (False, False, False), "batch": P()},
    "the table and what is looked up have no constraints": {"named": (False, True, True)},
    "layers have no constraints": {"named": (True, False, True)},
    "logits have no constraint": {"named": (True, True, False)},
    "no rule for the batch": {"axes": {"batch": None}},
    "the batch by data alone": {"axes": {"batch": "data"}},
    "the batch by fsdp alone": {"axes": {"batch": "fsdp"}},
    "the batch by data alone, and it comes in so": {"axes": {"batch": "data"}, "batch": P("data")},
    "no rule for heads": {"axes": {"heads": None}},
    "no rule for the mlp": {"axes": {"mlp": None}},
    "no rule for the vocabulary": {"axes": {"vocab": None}},
    "one table of rules: features are cut as the parameters": {"axes": {"batch": "data", "features": "fsdp"}},
    "features are cut over tp": {"axes": {"features": "tp"}},
    "the sequence is cut over tp, and heads too": {"axes": {"length": "tp", "heads": None, "mlp": None, "vocab": None}},
    "parameters' mlp by fsdp, their width by tp": {"planned": {"mlp": "fsdp", "embed": "tp"}},
    "parameters' heads are whole": {"planned": {"heads": None}},
    "parameters' layers are cut": {"planned": {"layers": "data", "embed": "fsdp"}},
    "gradients are whole": {"gradients": P()},
    "logits are returned": {"measured": "logits"},
    "chances are gathered and returned": {"measured": "chances"},
    "not donated": {"donate": False},
    "no remat": {"remat": False},
    # These look wrong.
    "the table is whole over tp": {"planned": {"words": None}},
    "the batch comes in whole": {"batch": P()},
    "no out_shardings": {"returned": False},
    "gradients are clipped by their norm": {"clipped": True},
}  # fmt: skip


# nnx


class _Block(nnx.Module):
    """A layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm1, self.norm2 = (nnx.RMSNorm(_WIDTH, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(_WIDTH, _WIDTH) for _ in range(4))
        self.up, self.down = linear(_WIDTH, _INNER), linear(_INNER, _WIDTH)

    def __call__(self, x: Any, specs: Any, cut: Any) -> Any:
        y = self.norm1(x)
        q, k, v = (
            cut(f(y), specs["wide"]).reshape(*y.shape[:2], _HEADS, -1)
            for f in (self.q, self.k, self.v)
        )
        q, k, v = (cut(a, specs["heads"]) for a in (q, k, v))
        x = cut(x + self.o(_attend(q, k, v).reshape(y.shape)), specs["residual"])
        y = cut(nnx.gelu(self.up(self.norm2(x))), specs["hidden"])
        return cut(x + self.down(y), specs["residual"])


class _Model(nnx.Module):
    """Layers one by one, with a head tied to the table or not."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(_WORDS, _WIDTH, rngs=rngs)
        self.layers = nnx.List([_Block(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(_WIDTH, rngs=rngs)
        self.head = nnx.Linear(_WIDTH, _WORDS, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Any, specs: Any, cut: Any, remat: bool) -> Any:
        x = cut(cut(self.table.embedding[...], specs["table"])[tokens], specs["residual"])
        for layer in self.layers:

            def apply(layer: Any, x: Any) -> Any:
                return layer(x, specs, cut)

            x = nnx.remat(apply)(layer, x) if remat else apply(layer, x)
        return cut(self.head(self.norm(x)), specs["logits"])


_PLACES: Final = {
    "wide": P("fsdp", None, "tp"),
    "heads": P("fsdp", None, "tp"),
    "residual": P("fsdp"),
    "hidden": P("fsdp", None, "tp"),
    "logits": P("fsdp", None, "tp"),
    "table": P("tp"),
}


def _nnx(
    *,
    specs: Any = (),
    batch: P = P("fsdp"),
    remat: bool = True,
    donate: tuple[int, ...] = (0, 1),
    returned: bool = True,
    measured: str = "",
    moments: P | None = None,
    column: P = P("fsdp", "tp"),
    row: P = P("tp", "fsdp"),
    head: P = P("fsdp", "tp"),
    table: P = P("tp", "fsdp"),
    gradients: P | None = None,
    penalized: bool = False,
) -> Built:
    """Train it with nnx.Optimizer and nnx.jit."""
    mesh = mesh_of(fsdp=4, tp=2)
    cut = cutter(mesh)
    places = {**_PLACES, **dict(specs)}

    def create() -> Any:
        model = _Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(create)
    rules = [
        ("scale", P()),
        ("embedding", table),
        ("head", head),
        ("/([qkv]|up)/kernel", column),
        ("/(o|down)/kernel", row),
    ]
    plan = sr.plan(nnx.state(model), sr.Rules(rules, sr.dialects.NNX), mesh)
    plans = plan, plan.for_optimizer(nnx.state(optimizer))

    def place(part: Any, planned: Any, spec: P | None) -> None:
        shardings = planned.shardings()
        if spec is not None:
            shardings = jax.tree.map(lambda _: NamedSharding(mesh, spec), shardings)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), nnx.state(part))
        nnx.update(part, jax.device_put(zeros, shardings))

    place(model, plans[0], None)
    place(optimizer, plans[1], moments)

    def loss(model: Any, batch: Any) -> Any:
        scores = model(batch["tokens"], places, cut, remat)
        value = _cross_entropy(scores, batch["targets"])
        if penalized:
            value += 1e-4 * sum(
                (cut(p, P()) ** 2).sum() for p in jax.tree.leaves(nnx.state(model, nnx.Param))
            )
        return value, {"logits": scores, "whole": cut(scores, P())}.get(measured)

    def train(model: Any, optimizer: Any, batch: Any) -> Any:
        (value, kept), grads = nnx.value_and_grad(loss, has_aux=True)(model, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda g: cut(g, gradients), grads)
        optimizer.update(model, grads)
        return value, kept

    states = tuple(nnx.StateSharding(planned.shardings()) for planned in plans)
    options = {"in_shardings": (*states, None)} if returned and moments is None else {}
    tokens = jax.device_put(np.zeros((_BATCH, 2 * _LENGTH), "int32"), NamedSharding(mesh, batch))
    texts = {"tokens": tokens, "targets": tokens}
    jitted = nnx.jit(train, donate_argnums=donate, **options)
    compiled = jitted.lower(model, optimizer, texts).compile()
    return Built(compiled, (*plans, {"tokens": batch, "targets": batch}), None)


_NNX_FAULTS: Final = {
    "no constraints": {"specs": dict.fromkeys(_PLACES)},
    "no constraints, and the batch whole": {"specs": dict.fromkeys(_PLACES), "batch": P()},
    "the residual is whole": {"specs": {"residual": P()}},
    "the residual is cut over its width": {"specs": {"residual": P(None, None, "fsdp")}},
    "hidden is whole": {"specs": {"hidden": P()}},
    "hidden is whole over tp": {"specs": {"hidden": P("fsdp")}},
    "heads are cut over their size": {"specs": {"heads": P("fsdp", None, None, "tp")}},
    "heads are whole over the batch": {"specs": {"heads": P(None, None, "tp"), "wide": P(None, None, "tp")}},
    "logits are whole": {"specs": {"logits": P()}},
    "logits are whole over the batch": {"specs": {"logits": P(None, None, "tp")}},
    "logits are returned": {"measured": "logits"},
    "logits are gathered and returned": {"measured": "whole"},
    "the table is cut over its width, and looked up so": {
        "table": P(None, ("fsdp", "tp")), "specs": {"table": None},
    },
    "all kernels are columns": {"row": P("fsdp", "tp")},
    "columns and rows are swapped": {"row": P("fsdp", "tp"), "column": P("tp", "fsdp")},
    "parameters are gathered for a penalty": {"penalized": True},
    "gradients are whole": {"gradients": P()},
    "the optimizer's state comes in whole": {"moments": P()},
    "not donated": {"donate": ()},
    "the model alone is donated": {"donate": (0,)},
    "no remat": {"remat": False},
    "no shardings for jit, and no constraints": {"returned": False, "specs": dict.fromkeys(_PLACES)},
    # These look wrong.
    "the batch comes in whole": {"batch": P()},
    "the head is cut over words alone": {"head": P(None, ("fsdp", "tp"))},
}  # fmt: skip

STEPS: Final = (
    Step("linen with logical axes", _linen, _LINEN_FAULTS),
    Step("nnx with its own jit", _nnx, _NNX_FAULTS),
)
