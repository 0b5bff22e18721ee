"""Other ways to train a decoder: LoRA on an int8 base, Muon, and a pipeline of stages."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.blocks import attend, block, decoder, entropy, rms_norm
from tests.steps.model import Case, Model, arrays, stacked

_WIDTH: Final = 256
_KERNELS: Final = {"qkv": (_WIDTH, 3 * _WIDTH), "o": (_WIDTH, _WIDTH), "up": (_WIDTH, 1024), "down": (1024, _WIDTH)}
_TABLES: Final = {"embed": (1024, _WIDTH), "head": (_WIDTH, 1024)}


def _thirds(qkv: Any) -> tuple[Any, ...]:
    """Return queries, keys and values of eight heads."""
    return tuple(x.reshape(*x.shape[:2], 8, -1) for x in jnp.split(qkv, 3, -1))


# LoRA


def _adapters(case: Case) -> Any:
    """Return adapters of rank 16."""
    shapes: dict[str, Any] = {
        name: {"a": (3, rows, 16), "b": (3, 16, columns)} for name, (rows, columns) in _KERNELS.items()
    }
    if case.has("all kernels are trained too"):
        shapes["kernels"] = {name: (3, *shape) for name, shape in _KERNELS.items()}
    return arrays(shapes)


def _base(case: Case, rules: Any) -> tuple[sr.Plan, ...]:
    int8, scales = stacked(3, _KERNELS, "int8"), stacked(3, {n: s[1:] for n, s in _KERNELS.items()})
    layers = {name: {"q8": int8[name], "scale": scales[name]} for name in _KERNELS}
    own = [("scale", P()), ("", P(None, "fsdp"))]
    return (sr.plan({**arrays(_TABLES), "layers": layers}, [*rules, *own], case.mesh),)


def _project(case: Case, x: Any, w: Any, ab: Any) -> Any:
    """Return x behind a kernel that is gathered as int8, and behind its adapter."""
    kernel, scale = w["q8"], w["scale"]
    if case.has("the base is dequantized before it is gathered"):
        kernel = case.cut(kernel.astype("float32") * scale, "base")
    elif case.has("the base is gathered as float32"):
        kernel = case.cut(kernel.astype("float32"), "base") * scale
    else:
        kernel = case.cut(kernel, "base").astype("float32") * scale
    if case.has("merged with adapters"):
        merged = case.cut(kernel + ab["a"] @ ab["b"], "merged")
        return x @ (case.cut(merged, "base") if "merged" in case.places else merged)
    return x @ kernel + (x @ ab["a"]) @ ab["b"]


def _lora_loss(case: Case, adapters: Any, batch: Any, frozen: Any) -> Any:
    layers = case.cut_all(frozen["layers"], "stack")
    if case.has("the base is dequantized whole before the loop"):
        whole = {n: w["q8"].astype("float32") * w["scale"][:, None] for n, w in layers.items()}
        layers = {n: {"q8": whole[n], "scale": jnp.ones_like(w["scale"])} for n, w in layers.items()}
    if "kernels" in adapters:
        layers = {n: {**w, "q8": w["q8"] + adapters["kernels"][n]} for n, w in layers.items()}

    def attention(case: Case, y: Any, both: Any) -> Any:
        q, k, v = _thirds(_project(case, y, *both["qkv"]))
        return _project(case, attend(case, q, k, v).reshape(y.shape), *both["o"])

    def perceptron(case: Case, y: Any, both: Any) -> Any:
        up = case.cut(jax.nn.gelu(_project(case, y, *both["up"])), "hidden")
        return _project(case, up, *both["down"])

    params = {**frozen, "layers": {n: (layers[n], adapters[n]) for n in _KERNELS}}
    layer = partial(block, attention=attention, perceptron=perceptron)
    value, kept = decoder(case, params, batch, layer, 1.0)
    # The merged base, for those who return it.
    return value, {**kept, "base": jax.tree.map(lambda w: w.astype("float32"), frozen["layers"])}


# Muon


def _muon(case: Case, plan: sr.Plan) -> optax.GradientTransformation:
    """Return Muon, whose devices orthogonalize whole matrices of a layer each."""
    shardings = plan.shardings()

    def planned(x: Any, sharding: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, sharding)

    def orthogonal(m: Any, sharding: Any) -> Any:
        """Return the polar factor of each matrix of a stack."""
        m = case.cut(m, "matrices")
        m = m / (jnp.linalg.norm(m, axis=(-2, -1), keepdims=True) + 1e-6)
        flip = m.shape[-2] > m.shape[-1]
        m = m.swapaxes(-1, -2) if flip else m

        def once(m: Any, _: Any) -> Any:
            if case.has("matrices are orthogonalized as planned"):
                m = case.cut(planned(m, sharding), "gathered")
            m = case.cut(m, "iterated")
            g = m @ m.swapaxes(-1, -2)
            m = 3.4445 * m + (-4.775 * g + 2.0315 * g @ g) @ m
            return case.cut(m, "iterated"), None

        count = 3 if case.has("fewer iterations") else 5
        if case.has("matrices are orthogonalized a layer at a time"):
            m = jax.lax.map(lambda one: jax.lax.scan(once, one, None, count)[0], m)
        else:
            m = jax.lax.scan(once, m, None, count)[0]
        return planned(m.swapaxes(-1, -2) if flip else m, sharding)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        if "gradients" not in case.places:
            grads = jax.tree.map(planned, grads, shardings)
        state = case.cut_all(jax.tree.map(lambda m, g: 0.95 * m + g, state, grads), "momentum")

        def direction(m: Any, sharding: Any) -> Any:
            return -1e-3 * (orthogonal(m, sharding) if m.ndim == 3 else jnp.sign(m))

        return jax.tree.map(direction, state, shardings), state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def _muon_loss(case: Case, params: Any, batch: Any) -> Any:
    def attention(case: Case, y: Any, w: Any) -> Any:
        return attend(case, *_thirds(y @ w["qkv"])).reshape(y.shape) @ w["o"]

    return decoder(case, params, batch, partial(block, attention=attention), 1.0)


# A pipeline


def _stages(case: Case, w: Any, x: Any) -> Any:
    """Return the outputs of the last of four stages; x: [micro-batch, row, length, width]."""
    stage, count, micro, has = jax.lax.axis_index("pp"), 4, len(x), case.has
    ring = [(i, (i + 1) % count) for i in range(count)]

    def regathered(w: Any) -> Any:
        w = jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, "pp", axis=0, tiled=True), w)
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, 2 * stage, 2, 0), w)

    def run(w: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + jax.nn.gelu(rms_norm(x, w["norm"]) @ w["up"]) @ w["down"], None

        return jax.lax.scan(layer, x, w)[0]

    def send(y: Any) -> Any:
        """Return what the stage before sends."""
        if has("all stages get the activations of all"):
            return jax.lax.all_gather(y, "pp")[(stage - 1) % count]
        if has("activations are sent by a sum"):
            spread = jnp.zeros((count, *y.shape), y.dtype).at[(stage + 1) % count].set(y)
            return jax.lax.psum(spread, "pp")[stage]
        if has("activations are sent back and forth"):
            y = jax.lax.ppermute(y, "pp", ring)
            y = jax.lax.ppermute(y, "pp", [(b, a) for a, b in ring])
        return jax.lax.ppermute(y, "pp", ring)

    w = regathered(w) if has("all stages' weights are gathered") else w
    run = case.recomputed(run)

    def tick(carry: Any, i: Any) -> Any:
        incoming, done = carry
        used = regathered(w) if has("weights are gathered in every tick") else w
        first = jax.lax.dynamic_index_in_dim(x, jnp.clip(i, 0, micro - 1), 0, False)
        y = run(used, jnp.where(stage == 0, first, incoming))
        at = jnp.clip(i - count + 1, 0, micro - 1)
        now = jax.lax.dynamic_index_in_dim(done, at, 0, False)
        kept = jnp.where((stage == count - 1) & (i >= count - 1), y, now)
        done = jax.lax.dynamic_update_index_in_dim(done, kept, at, 0)
        incoming = send(y)
        if has("outputs are summed in every tick"):
            done = jax.lax.psum(jnp.where(stage == count - 1, done, 0), "pp")
        return (incoming, done), None

    start = jnp.zeros_like(x[0]), jnp.zeros_like(x)
    (_, done), _ = jax.lax.scan(tick, start, jnp.arange(micro + count - 1))
    if has("outputs of all stages are gathered"):
        return jax.lax.all_gather(done, "pp")[-1]
    done = jnp.where(stage == count - 1, done, 0)
    if has("outputs are summed over the stages"):
        return jax.lax.psum(done, "pp")
    # Each stage gets a part of the rows for the head.
    return jax.lax.psum_scatter(done, "pp", scatter_dimension=2, tiled=True)


def _pipeline_loss(case: Case, params: Any, batch: Any) -> Any:
    x = case.cut(case.cut(params["embed"], "table")[batch["tokens"]], "residual")
    shape, batches = x.shape, case.place("parts")
    x = case.cut(x.reshape(-1, 8, *shape[1:]).swapaxes(0, 1), "parts")
    y = jax.shard_map(
        partial(_stages, case), mesh=case.mesh, in_specs=(P("pp"), batches),
        out_specs=case.place("results"), check_vma=False,
    )(params["layers"], x)  # fmt: skip
    y = case.cut(y.swapaxes(0, 1).reshape(shape), "states")
    scores = case.cut(y @ case.cut(params["head"], "head"), "logits")
    return entropy(scores, batch["targets"]), {"logits": scores, "states": y}


STEPS: Final = {
    "LoRA on an int8 base": Model(_lora_loss, _adapters, constants=_base),
    "Muon": Model(_muon_loss, optimizer=_muon),
    "a pipeline in shard_map": Model(_pipeline_loss, optimizer=lambda case, plan: optax.adam(1e-3)),
}
