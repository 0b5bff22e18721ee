"""A U-Net that predicts noise, and vision transformers under Adam and Muon, with averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.blocks import rms_norm
from tests.steps.model import Case, Model

# A diffusion U-Net


class _Conv(nn.Module):
    """A convolution whose kernel is gathered over fsdp where it is used."""

    features: int
    case: Case
    place: str = "kernels"
    size: int = 3
    strides: int = 1

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def gathered(x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
            kernel = self.case.cut(kernel, self.place)
            return jax.lax.conv_general_dilated(x, kernel, *args, **kwargs)

        return nn.Conv(
            self.features, (self.size, self.size), self.strides, use_bias=False, conv_general_dilated=gathered
        )(x)


class _ResBlock(nn.Module):
    """Two convolutions: channels over tp between them, whole after them."""

    features: int
    case: Case

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        case, features = self.case, self.features
        groups = 1 if case.has("groups of a norm across tp") else 8
        y = nn.silu(nn.GroupNorm(groups, use_bias=False)(x))
        y = _Conv(features, case, "columns", name="conv_in")(y)
        shift = nn.Dense(features, use_bias=False, name="time")(time)[:, None, None]
        y = nn.silu(nn.GroupNorm(groups, use_bias=False)(case.cut(y + shift, "inner")))
        y = case.cut(_Conv(features, case, "rows", name="conv_out")(y), "outer")
        if x.shape[-1] != features:
            x = _Conv(features, case, size=1, name="shortcut")(x)
        return case.cut(x + y, "outer")


class _UNet(nn.Module):
    """Two levels, with attention between them."""

    case: Case

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        case = self.case
        block: Any = _ResBlock if case.has("no remat") else nn.remat(_ResBlock)
        angles = time[:, None] * jnp.exp(-jnp.arange(32) / 8)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        time = nn.silu(nn.Dense(256, name="time")(waves))
        x = case.cut(_Conv(64, case, name="first")(x), "outer")
        x = block(64, case, name="down")(x, time)
        skip = case.cut(x, "skip")
        x = case.cut(_Conv(128, case, strides=2, name="halve")(x), "outer")
        x = block(128, case, name="middle")(x, time)
        flat = nn.LayerNorm()(x.reshape(x.shape[0], -1, x.shape[-1]))
        q, k, v = (nn.DenseGeneral((4, 32), use_bias=False, name=n)(flat) for n in "qkv")
        y = nn.dot_product_attention(q, case.cut(k, "keys"), case.cut(v, "keys"))
        y = nn.DenseGeneral(128, (-2, -1), use_bias=False, name="o")(y)
        x = case.cut(x + y.reshape(x.shape), "outer")
        x = jax.image.resize(x, (x.shape[0], 32, 32, 128), "nearest")
        x = jnp.concatenate([_Conv(64, case, name="double")(x), skip], -1)
        if case.has("channels are shuffled across the skip"):
            x = x.reshape(*x.shape[:3], 2, -1).swapaxes(3, 4).reshape(x.shape)
        x = block(64, case, name="up")(case.cut(x, "outer"), time)
        return _Conv(4, case, name="last")(x)


def _unet_shapes(case: Case) -> Any:
    inputs = jnp.zeros((32, 32, 32, 4)), jnp.zeros(32)
    return jax.eval_shape(_UNet(case).init, jax.random.key(0), *inputs)["params"]


def _unet_loss(case: Case, params: Any, batch: Any) -> Any:
    images, (first, second) = batch["images"], jax.random.split(batch["key"])
    time = case.cut(jax.random.uniform(first, (images.shape[0],)), "noise")
    noise = case.cut(jax.random.normal(second, images.shape), "noise")
    t = time[:, None, None, None]
    noisy = jnp.sqrt(1 - t) * images + jnp.sqrt(t) * noise
    guess = _UNet(case).apply({"params": params}, noisy, time)
    return (case.cut(guess - noise, "error") ** 2).mean(), {"predictions": guess}


# A vision transformer in linen


class _Block(nn.Module):
    """A layer of a vision transformer, for a scan."""

    case: Case

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        case, width = self.case, x.shape[-1]
        y = nn.LayerNorm()(x)
        q, k, v = (nn.DenseGeneral((8, 32), name=n)(y) for n in ("query", "key", "value"))
        y = nn.dot_product_attention(*(case.cut(leaf, "heads") for leaf in (q, k, v)))
        x = case.cut(x + nn.DenseGeneral(width, (-2, -1), name="out")(y), "tokens")
        y = nn.gelu(nn.Dense(1024, name="up")(nn.LayerNorm()(x)))
        x = case.cut(x + nn.Dense(width, name="down")(y), "tokens")
        return x, case.keep(x, "states")


class _ViT(nn.Module):
    """Patches by a convolution, a class token, and scanned layers."""

    case: Case

    @nn.compact
    def __call__(self, images: Any) -> Any:
        case = self.case
        x = nn.Conv(256, (4, 4), (4, 4), padding="VALID", name="patches")(images)
        x = case.cut(x.reshape(x.shape[0], -1, 256), "tokens")
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], 256))
        token = self.param("token", nn.initializers.zeros, (1, 1, 256))
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
        x = case.cut(x, "joined")
        layer: Any = _Block if case.has("no remat") else nn.remat(_Block, prevent_cse=False)
        scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, states = scanned(case, name="layers")(x, None)
        head = self.param("head", nn.initializers.zeros, (256, 1000))
        return nn.LayerNorm()(x)[:, 0] @ case.cut(head, "head"), states


def _vit_shapes(case: Case) -> Any:
    return jax.eval_shape(_ViT(case).init, jax.random.key(0), jnp.zeros((64, 32, 32, 3)))["params"]


def _vit_loss(case: Case, params: Any, batch: Any) -> Any:
    images = batch["images"]
    if case.told != "evaluation":
        images = _mixed(case, images)
    scores, states = _ViT(case).apply({"params": params}, images)
    scores = case.cut(scores, "logits")
    targets = case.cut(jax.nn.one_hot(batch["labels"], 1000), "labels")
    losses = optax.sigmoid_binary_cross_entropy(scores, targets).sum(-1)
    return losses.mean(), {"states": states}


def _mixed(case: Case, images: Any) -> Any:
    """Mix each image with another."""
    if case.has("mixup with the reversed batch"):
        return 0.8 * images + 0.2 * images[::-1]
    if case.has("mixup within each device"):
        parts = images.reshape(8, 8, *images.shape[1:])
        return 0.8 * images + 0.2 * parts[:, ::-1].reshape(images.shape)
    return images


# A vision transformer in equinox, under Muon


class _Transformer(eqx.Module):
    """Patches, their places, kernels and scales of all layers by names, and a head."""

    patch: eqx.nn.Conv2d
    places: Any
    blocks: dict[str, Any]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear


def _transformer() -> tuple[Any, Any]:
    def make(key: Any) -> Any:
        width, inner = 128, 512
        kernels = {"qkv": (3, width, width), "o": (width, width), "up": (width, inner)}
        kernels |= {"down": (inner, width), "norm1": (width,), "norm2": (width,)}
        return _Transformer(
            eqx.nn.Conv2d(3, width, 4, 4, key=key),
            jnp.zeros((64, width)),
            {name: jnp.zeros((8, *shape)) for name, shape in kernels.items()},
            eqx.nn.RMSNorm(width, use_bias=False),
            eqx.nn.Linear(width, 1024, use_bias=False, key=key),
        )

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    return eqx.partition(model, lambda leaf: hasattr(leaf, "shape"))


def _newton(x: Any) -> Any:
    """Return what is orthogonal and nearest to each of the matrices."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)

    def improve(_: Any, x: Any) -> Any:
        gram = x @ x.mT
        return 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x

    x = jax.lax.fori_loop(0, 5, improve, x)
    return x.mT if is_tall else x


def _muon(case: Case, plan: sr.Plan) -> optax.GradientTransformation:
    shapes, shardings, wsc = _transformer()[0], plan.shardings(), jax.lax.with_sharding_constraint
    labels = jax.tree.map(lambda x: "muon" if len(x.shape) > 2 else "adam", shapes)
    labels = eqx.tree_at(lambda model: model.patch.weight, labels, "adam")
    masked, is_wide = optax.MaskedNode(), case.has("matrices are resharded in float32")
    own = jax.tree.map(lambda s, label: s if label == "muon" else masked, shardings, labels)
    newton: Callable[[Any], Any] = _newton
    if case.has("matrices are orthogonalised in turn"):
        newton = lambda x: jax.lax.map(_newton, x)  # noqa: E731

    def orthogonal(g: Any, sharding: Any) -> Any:
        """Cut g over layers, an axis at a time; XLA replicates what two axes leave at once."""

        def halved(x: Any) -> Any:
            half = P("fsdp", *(axis if axis == "tp" else None for axis in sharding.spec[1:]))
            return case.cut(x, "half") if "half" in case.places else wsc(x, half)

        x = g if is_wide else g.astype("bfloat16")
        x = newton(case.cut(halved(x), "stacks").astype("bfloat16"))
        x = halved(case.cut(x.astype("float32") if is_wide else x, "stacks"))
        return wsc(case.cut(x, "updates"), sharding).astype(g.dtype)

    muon = optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.stateless(lambda updates, _: jax.tree.map(orthogonal, updates, own)),
        optax.scale(-0.02),
    )
    return optax.partition({"muon": muon, "adam": optax.adam(1e-3)}, labels)


def _planned(case: Case, plan: sr.Plan, differentiate: Any, params: Any, batch: Any) -> Any:
    values, grads = differentiate(params, batch)
    grads = case.cut_all(grads, "whole_gradients")
    return values, jax.tree.map(jax.lax.with_sharding_constraint, grads, plan.shardings())


def _muon_loss(case: Case, params: Any, batch: Any) -> Any:
    cut, model, images = case.cut, eqx.combine(params, _transformer()[1]), batch["images"]
    if "noise" in case.places:
        noise = jax.random.normal(jax.random.key(0), images.shape)
        images = images + 0.1 * cut(noise, "noise")
    if case.has("images are mixed across the batch"):
        images = 0.7 * images + 0.3 * images[::-1]

    def layer(x: Any, w: Any) -> Any:
        w = case.cut_all(w, "kernels")
        qkv = jnp.einsum("btd,cde->cbte", rms_norm(x, w["norm1"]), w["qkv"])
        q, k, v = cut(qkv.reshape(*qkv.shape[:3], 4, -1), "heads")
        y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ w["o"]
        x = x + checkpoint_name(cut(y, "residual"), "summed")
        y = jax.nn.gelu(cut(rms_norm(x, w["norm2"]) @ w["up"], "hidden")) @ w["down"]
        x = x + checkpoint_name(cut(y, "residual"), "summed")
        return cut(x, "residual"), x

    policy = jax.checkpoint_policies.save_only_these_names("summed")
    is_again = case.has("sums over tp are computed again")
    kept = case.recomputed(layer, policy=None if is_again else policy)
    x = jax.vmap(model.patch)(images)
    x = cut(x.reshape(*x.shape[:2], -1).mT + model.places, "residual")
    x, states = jax.lax.scan(kept, x, model.blocks)
    x = cut(rms_norm(x, model.norm.weight).mean(1), "pooled")
    scores = cut(x @ model.head.weight.T, "logits")
    smooth = 0.9 * jax.nn.one_hot(batch["labels"], 1024) + 0.1 / 1024
    value = (jax.nn.logsumexp(scores, -1) - (scores * smooth).sum(-1)).mean()
    whole = jax.lax.with_sharding_constraint(scores, P())
    return value, {"states": states, "logits": scores, "gathered": whole}


STEPS: Final = {
    "a diffusion U-Net": Model(
        _unet_loss, _unet_shapes, optimizer=lambda case, plan: optax.adamw(1e-4), is_averaged=True
    ),
    "a vision transformer": Model(
        _vit_loss, _vit_shapes, optimizer=lambda case, plan: optax.adam(1e-3), is_averaged=True
    ),
    "a vision transformer under Muon": Model(
        _muon_loss,
        lambda case: _transformer()[0],
        optimizer=_muon,
        gradients=_planned,
        is_averaged=True,
        in_context=True,
    ),
}
