"""A diffusion U-Net of convolutions, and a vision transformer with averaged parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.parts import abstract, cutter, mesh_of
from tests.steps.score import Built, Step

__all__ = ["STEPS"]

_BATCH: Final = ("data", "fsdp")
_Cut = Callable[[Any, P | None], Any]


class _Conv(nn.Module):
    """A convolution whose kernel is gathered over fsdp where it is used."""

    features: int
    cut: _Cut
    kernel: P | None = P()
    size: int = 3
    strides: int = 1

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def gathered(x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
            return jax.lax.conv_general_dilated(x, self.cut(kernel, self.kernel), *args, **kwargs)

        return nn.Conv(
            self.features,
            (self.size, self.size),
            self.strides,
            use_bias=False,
            conv_general_dilated=gathered,
        )(x)


class _ResBlock(nn.Module):
    """Two convolutions: channels over tp between them, whole after them."""

    features: int
    cut: _Cut
    columns: P | None
    rows: P | None
    inner: P | None
    outer: P | None
    groups: int = 8

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        y = nn.silu(nn.GroupNorm(self.groups, use_bias=False)(x))
        y = _Conv(self.features, self.cut, self.columns, name="conv_in")(y)
        y = self.cut(
            y + nn.Dense(self.features, use_bias=False, name="time")(time)[:, None, None],
            self.inner,
        )
        y = nn.silu(nn.GroupNorm(self.groups, use_bias=False)(y))
        y = self.cut(_Conv(self.features, self.cut, self.rows, name="conv_out")(y), self.outer)
        if x.shape[-1] != self.features:
            x = _Conv(self.features, self.cut, size=1, name="shortcut")(x)
        return self.cut(x + y, self.outer)


class _UNet(nn.Module):
    """Two levels, with attention between them."""

    cut: _Cut
    block: Callable[..., Any]
    outer: P | None
    keys: P | None
    skip: P | None
    mixed: bool

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        cut, outer = self.cut, self.outer
        angles = time[:, None] * jnp.exp(-jnp.arange(32) / 8)
        time = nn.silu(
            nn.Dense(256, name="time")(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        )
        x = cut(_Conv(64, cut, name="first")(x), outer)
        x = self.block(64, name="down")(x, time)
        skip = cut(x, self.skip)
        x = cut(_Conv(128, cut, strides=2, name="halve")(x), outer)
        x = self.block(128, name="middle")(x, time)
        flat = nn.LayerNorm()(x.reshape(x.shape[0], -1, x.shape[-1]))
        q, k, v = (nn.DenseGeneral((4, 32), use_bias=False, name=n)(flat) for n in "qkv")
        y = nn.dot_product_attention(q, cut(k, self.keys), cut(v, self.keys))
        y = nn.DenseGeneral(128, (-2, -1), use_bias=False, name="o")(y)
        x = cut(x + y.reshape(x.shape), outer)
        x = jax.image.resize(x, (x.shape[0], 32, 32, 128), "nearest")
        x = jnp.concatenate([_Conv(64, cut, name="double")(x), skip], -1)
        if self.mixed:
            x = x.reshape(*x.shape[:3], 2, -1).swapaxes(3, 4).reshape(x.shape)
        x = self.block(64, name="up")(cut(x, outer), time)
        return _Conv(4, cut, name="last")(x)


def _unet(
    *,
    batch: P = P(_BATCH),
    inner: P | None = P(_BATCH, None, None, "tp"),
    outer: P | None = P(_BATCH),
    columns: P | None = P(None, None, None, "tp"),
    rows: P | None = P(None, None, "tp"),
    keys: P | None = P(_BATCH, None, "tp"),
    skip: P | None = P(_BATCH),
    groups: int = 8,
    conv_out: P = P(None, None, "tp", "fsdp"),
    noise: P | None = P(_BATCH),
    error: P | None = None,
    gradients: P | None = None,
    averages: P | None = None,
    moments: P | None = None,
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    mixed: bool = False,
    predictions: bool = False,
    flattened: bool = False,
    norms: bool = False,
) -> Built:
    """Train a U-Net to predict noise, with an average of its parameters."""
    mesh = mesh_of(data=2, fsdp=2, tp=2)
    cut = cutter(mesh)
    block = partial(
        nn.remat(_ResBlock) if remat else _ResBlock,
        cut=cut, columns=columns, rows=rows, inner=inner, outer=outer, groups=groups,
    )  # fmt: skip
    model = _UNet(cut, block, outer, keys, skip, mixed)
    tx = optax.adamw(1e-4)
    images = (32, 32, 32, 4)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(images), jnp.zeros(32))[
        "params"
    ]
    rules = [
        ("conv_in/.*kernel", P(None, None, "fsdp", "tp")),
        ("conv_out/.*kernel", conv_out),
        ("(first|last)/.*kernel", P()),
        ("(halve|double|shortcut)/.*kernel", P(None, None, "fsdp")),
        ("[a-z]/time/kernel", P(None, "tp")),
        ("[a-z]/(time|GroupNorm_1)/(scale|bias)", P("tp")),
        ("[qkv]/kernel", P("fsdp", "tp")),
        ("o/kernel", P("tp", None, "fsdp")),
        ("", P()),
    ]
    plan = sr.plan(shapes, rules, mesh)
    state = {"params": shapes, "ema": shapes, "opt": jax.eval_shape(tx.init, shapes)}
    plans = {"params": plan, "ema": plan, "opt": plan.for_optimizer(state["opt"])}

    def loss(params: Any, images: Any, key: Any) -> Any:
        first, second = jax.random.split(key)
        time = cut(jax.random.uniform(first, (images.shape[0],)), noise)
        eps = cut(jax.random.normal(second, images.shape), noise)
        t = time[:, None, None, None]
        guess = model.apply({"params": params}, jnp.sqrt(1 - t) * images + jnp.sqrt(t) * eps, time)
        return (cut(guess - eps, error) ** 2).mean(), guess

    def step(state: Any, images: Any, key: Any) -> Any:
        (value, guess), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], images, key)
        if gradients is not None:
            grads = jax.tree.map(lambda leaf: cut(leaf, gradients), grads)
        if flattened:
            flat, unravel = ravel_pytree(grads)
            grads = unravel(flat / jnp.maximum(1, jnp.linalg.norm(flat)))
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = jax.tree.map(lambda e, p: cut(0.99 * e + 0.01 * p, averages), state["ema"], params)
        if moments is not None:
            opt = jax.tree.map(lambda leaf: cut(leaf, moments), opt)
        metrics = (
            value,
            guess if predictions else None,
            optax.global_norm(grads) if norms else None,
        )
        return {"params": params, "ema": ema, "opt": opt}, metrics

    shardings = {name: p.shardings() for name, p in plans.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    jitted = jax.jit(
        step,
        donate_argnums=0 if donate else (),
        out_shardings=(shardings, None) if returned else None,
    )
    arguments = {name: p.abstract() for name, p in plans.items()}
    compiled = jitted.lower(arguments, abstract(mesh, batch, images, "float32"), key).compile()
    planned = jax.tree.map(lambda s: s.spec, shardings)
    return Built(compiled, (planned, batch, None), (planned, None))


_UNET_FAULTS: Final = {
    "no constraints": {"inner": None, "outer": None, "keys": None, "skip": None},
    "no constraints, and the batch whole": {
        "inner": None, "outer": None, "keys": None, "skip": None, "batch": P(), "noise": None,
    },
    "kernels as they are cut": {"columns": None, "rows": None},
    "kernels are gathered over tp": {"columns": P(), "rows": P()},
    "channels are whole between the convolutions": {"inner": P(_BATCH)},
    "activations are cut over tp after each block": {"outer": P(_BATCH, None, None, "tp")},
    "activations are cut over the height": {"outer": P(_BATCH, "tp")},
    "channels without the batch": {"inner": P(None, None, None, "tp")},
    "the batch is cut over data alone": {"outer": P("data"), "inner": P("data", None, None, "tp")},
    "the skip is whole": {"skip": P()},
    "the second convolution is cut as the first": {"conv_out": P(None, None, "fsdp", "tp")},
    "keys and values are whole over the batch": {"keys": P(None, None, "tp")},
    "the error is gathered": {"error": P()},
    "gradients are constrained to be whole": {"gradients": P()},
    "averages are constrained to be whole": {"averages": P(), "returned": False},
    "moments are constrained to be whole": {"moments": P(), "returned": False},
    "gradients are clipped as one vector": {"flattened": True},
    "channels are shuffled across the skip": {"mixed": True, "outer": P(_BATCH, None, None, "tp")},
    "not donated": {"donate": False},
    "no remat": {"remat": False},
    # These look wrong.
    "noise is whole": {"noise": P()},
    "predictions are returned": {"predictions": True},
    "the images come in whole": {"batch": P()},
    "groups of a norm across tp": {"groups": 1},
    "a norm of all gradients": {"norms": True},
}  # fmt: skip


class _Block(nn.Module):
    """A layer of a vision transformer, for a scan."""

    cut: _Cut
    tokens: P | None
    heads: P | None
    inspected: bool

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        y = nn.LayerNorm()(x)
        q, k, v = (nn.DenseGeneral((8, 32), name=n)(y) for n in ("query", "key", "value"))
        q, k, v = (self.cut(leaf, self.heads) for leaf in (q, k, v))
        x = x + nn.DenseGeneral(x.shape[-1], (-2, -1), name="out")(
            nn.dot_product_attention(q, k, v)
        )
        x = self.cut(x, self.tokens)
        y = nn.Dense(x.shape[-1], name="down")(
            nn.gelu(nn.Dense(1024, name="up")(nn.LayerNorm()(x)))
        )
        x = self.cut(x + y, self.tokens)
        return x, x if self.inspected else None


class _ViT(nn.Module):
    """Patches by a convolution, a class token, and scanned layers."""

    cut: _Cut
    tokens: P | None
    heads: P | None
    joined: P | None
    head: P | None
    remat: bool
    inspected: bool
    classes: int = 1000

    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.Conv(256, (4, 4), (4, 4), padding="VALID", name="patches")(images)
        x = self.cut(x.reshape(x.shape[0], -1, 256), self.tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], 256))
        token = self.param("token", nn.initializers.zeros, (1, 1, 256))
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
        x = self.cut(x, self.joined)
        layer = nn.remat(_Block, prevent_cse=False) if self.remat else _Block
        scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, states = scanned(self.cut, self.tokens, self.heads, self.inspected, name="layers")(
            x, None
        )
        head = self.param("head", nn.initializers.zeros, (256, self.classes))
        return nn.LayerNorm()(x)[:, 0] @ self.cut(head, self.head), states


def _vit(
    *,
    batch: P = P("data"),
    tokens: P | None = P("data"),
    heads: P | None = P("data"),
    joined: P | None = P("data"),
    head: P | None = P(),
    logits: P | None = P("data"),
    layers: P = P(None, "data"),
    averages: P | None = None,
    average_in: P | None = None,
    gradients: P | None = None,
    moments: P | None = None,
    cast: bool = False,
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    inspected: bool = False,
    mixup: str = "",
    flattened: bool = False,
    evaluated: bool = False,
    measured: bool = False,
    labels: P | None = None,
    distance: bool = False,
) -> Built:
    """Train a classifier by FSDP over one axis, with adam and averaged parameters."""
    mesh = mesh_of(data=8)
    cut = cutter(mesh)
    model = _ViT(cut, tokens, heads, joined, head, remat, inspected)
    tx = optax.adam(1e-3)
    images = (64, 32, 32, 3)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(images))["params"]
    rules = [
        ("layers/.*kernel", layers),
        ("layers", P()),
        ("positions|token|LayerNorm|bias", P()),
        ("patches/kernel", P(None, None, None, "data")),
        ("head$", P("data")),
    ]
    plan = sr.plan(shapes, rules, mesh)
    opt = jax.eval_shape(tx.init, shapes)
    moments_plan = plan.for_optimizer(opt)

    def loss(params: Any, images: Any, targets: Any) -> Any:
        scores, states = model.apply({"params": params}, images)
        scores = cut(scores, logits)
        targets = cut(jax.nn.one_hot(targets, 1000), labels) if targets.ndim == 1 else targets
        return optax.sigmoid_binary_cross_entropy(scores, targets).sum(-1).mean(), states

    def step(state: Any, batch: Any) -> Any:
        images, targets = batch["images"], batch["labels"]
        params, ema, opt = state["params"], state["ema"], state["opt"]
        if mixup:
            twin = (
                images[::-1]
                if mixup == "batch"
                else images.reshape(8, 8, *images.shape[1:])[:, ::-1].reshape(images.shape)
            )
            images = 0.8 * images + 0.2 * twin
        (value, states), grads = jax.value_and_grad(loss, has_aux=True)(params, images, targets)
        if gradients is not None:
            grads = jax.tree.map(lambda leaf: cut(leaf, gradients), grads)
        if flattened:
            flat, unravel = ravel_pytree(grads)
            grads = unravel(flat / jnp.maximum(1, jnp.linalg.norm(flat)))
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        if moments is not None:
            opt = jax.tree.map(lambda leaf: cut(leaf, moments), opt)
        ema = jax.tree.map(lambda e, p: cut(0.999 * e + 0.001 * p, averages), ema, params)
        metrics = {"loss": value, "states": states}
        if evaluated:
            metrics["eval"] = loss(ema, batch["images"], targets)[0]
        if measured:
            metrics["norms"] = jax.tree.map(jnp.linalg.norm, (grads, params, updates))
        if distance:
            metrics["distance"] = optax.global_norm(jax.tree.map(jnp.subtract, params, ema))
        if cast:
            ema = jax.tree.map(lambda e: e.astype("bfloat16"), ema)
        return {"params": params, "ema": ema, "opt": opt}, metrics

    plans = {"params": plan, "ema": plan, "opt": moments_plan}
    shardings = {name: p.shardings() for name, p in plans.items()}
    arguments = {name: p.abstract() for name, p in plans.items()}
    if average_in is not None:
        spread = NamedSharding(mesh, average_in)
        arguments["ema"] = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spread), shapes
        )
    jitted = jax.jit(
        step,
        donate_argnums=0 if donate else (),
        out_shardings=(shardings, None) if returned else None,
    )
    inputs = {
        "images": abstract(mesh, batch, images, "float32"),
        "labels": abstract(mesh, batch, images[:1]),
    }
    compiled = jitted.lower(arguments, inputs).compile()
    planned = jax.tree.map(lambda s: s.spec, shardings)
    return Built(compiled, (planned, {"images": batch, "labels": batch}), (planned, None))


_VIT_FAULTS: Final = {
    "no constraints": {"tokens": None, "heads": None, "joined": None, "logits": None},
    "no constraints, and the batch whole": {
        "tokens": None, "heads": None, "joined": None, "logits": None, "batch": P(),
    },
    "tokens are whole": {"tokens": P()},
    "tokens are cut over their width": {"tokens": P(None, None, "data")},
    "tokens with the class token are whole": {"joined": P()},
    "heads are cut instead of the batch": {"heads": P(None, None, "data")},
    "heads are whole": {"heads": P()},
    "averages come out whole": {"averages": P(), "returned": False},
    "averages come in whole": {"average_in": P()},
    "averages come out in another dtype": {"cast": True},
    "gradients are constrained to be whole": {"gradients": P()},
    "moments are constrained to be whole": {"moments": P(), "returned": False},
    "gradients are clipped as one vector": {"flattened": True},
    "averages are evaluated in the same step": {"evaluated": True},
    "layers are planned whole": {"layers": P()},
    "not donated": {"donate": False},
    "no remat": {"remat": False},
    "states of each layer are returned": {"inspected": True},
    "the batch comes in whole": {"batch": P()},
    # These look wrong.
    "the head as it is cut": {"head": None},
    "logits are gathered": {"logits": P()},
    "mixup with the reversed batch": {"mixup": "batch"},
    "layers are cut over another dimension": {"layers": P(None, None, "data")},
    "mixup within each device": {"mixup": "device"},
    "norms of each leaf": {"measured": True},
    "the labels' one-hot is whole": {"labels": P()},
    "the distance to the averages": {"distance": True},
}  # fmt: skip

STEPS: Final = (
    Step("a diffusion U-Net", _unet, _UNET_FAULTS),
    Step("a vision transformer", _vit, _VIT_FAULTS),
)
