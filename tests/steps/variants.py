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
from tests.steps.model import Case, Fault, Model, arrays, faults, stacked
from tests.steps.score import Step

_WIDTH: Final = 256
_KERNELS: Final = {"qkv": (_WIDTH, 3 * _WIDTH), "o": (_WIDTH, _WIDTH), "up": (_WIDTH, 1024), "down": (1024, _WIDTH)}
_TABLES: Final = {"embed": (1024, _WIDTH), "head": (_WIDTH, 1024)}
_BATCH: Final = dict.fromkeys(("tokens", "targets"), (64, 64))


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


_LORA: Final = Model(
    mesh={"fsdp": 8},
    shapes=_adapters,
    rules=[("kernels", P(None, "fsdp")), ("", P())],
    places={
        **dict.fromkeys(("batch", "residual", "hidden", "logits"), P("fsdp")),
        **dict.fromkeys(("base", "table", "head"), P()),
    },
    batch=_BATCH,
    loss=_lora_loss,
    constants=_base,
)
_FREE: Final = dict.fromkeys(("residual", "hidden", "logits"))
_LORA_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "the base is dequantized before it is gathered", "the base is gathered as float32",
        "the base is dequantized whole before the loop", "all kernels are trained too", "not donated", "no remat",
        "the residual is whole", "hidden is whole", "logits are whole", "logits are returned",
    ),
    "the base is not constrained": {"base": None},
    "the base is gathered whole before the loop": {"stack": P()},
    "the base is merged with adapters, and sharded again": {
        "wrong": "merged with adapters", "merged": P("fsdp"),
    },
    "the base is planned to be whole": {"rules": [("q8", P())]},
    "the base is cut over layers": {"rules": [("q8", P("fsdp"))], "base": None},
    "no constraints": {**_FREE, "base": None, "table": None},
    "no constraints, and the batch whole": {**_FREE, "base": None, "table": None, "batch": P()},
    "hidden is cut over its width": {"hidden": P(None, None, "fsdp")},
    "logits are cut over words": {"logits": P(None, None, "fsdp")},
    "the table is not gathered, nor the residual cut": {"table": None, "residual": None},
    "the base is returned as float32": {"told": "base"},
    # These look wrong.
    **faults(
        "merged with adapters", "no out_shardings", "gradients are whole", "the batch comes in whole",
    ),
    "adapters are sharded": {"rules": [("/[ab]$", P(None, None, "fsdp"))]},
}  # fmt: skip


# Muon


def _muon_shapes(case: Case) -> Any:
    return {**arrays(_TABLES), "layers": stacked(8, _KERNELS)}


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


_MUON: Final = Model(
    mesh={"fsdp": 8},
    shapes=_muon_shapes,
    rules=[("", P(None, "fsdp"))],
    places={
        **dict.fromkeys(("batch", "residual", "hidden", "logits"), P("fsdp")),
        **dict.fromkeys(("matrices", "iterated"), P("fsdp")),
        **dict.fromkeys(("table", "head"), P()),
    },
    batch=_BATCH,
    loss=_muon_loss,
    optimizer=_muon,
)
_MATRICES: Final[dict[str, None]] = dict.fromkeys(("matrices", "iterated"))
_MUON_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "not donated", "no remat", "gradients are whole", "the residual is whole", "logits are whole",
        "logits are returned",
    ),
    **{
        name: {"wrong": name, **_MATRICES}
        for name in (
            "matrices are orthogonalized as planned",
            "matrices are orthogonalized a layer at a time",
        )
    },
    "matrices are gathered in every iteration": {
        **_MATRICES, "wrong": "matrices are orthogonalized as planned", "gathered": P(),
    },
    "matrices are whole on all devices": {"matrices": P(), "iterated": None},
    "matrices are left to XLA": _MATRICES,
    "momentum is whole": {"momentum": P(), "wrong": "no out_shardings"},
    "momentum is whole inside": {"momentum": P()},
    "momentum is cut over layers": {"momentum": P("fsdp"), "wrong": "no out_shardings"},
    "no constraints": _FREE,
    "no constraints, and the batch whole": {**_FREE, "batch": P()},
    "hidden is cut over its width": {"hidden": P(None, None, "fsdp")},
    "logits are cut over words": {"logits": P(None, None, "fsdp")},
    # These look wrong.
    **faults("no out_shardings", "fewer iterations", "the batch comes in whole"),
    "kernels are gathered by a constraint": {"kernels": P()},
}  # fmt: skip


# A pipeline


def _pipeline_shapes(case: Case) -> Any:
    width, inner, words = 256, 512, 512
    layer = {"up": (width, inner), "down": (inner, width), "norm": (width,)}
    return {**arrays({"embed": (words, width), "head": (width, words)}), "layers": stacked(8, layer)}


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


_PIPELINE: Final = Model(
    mesh={"data": 2, "pp": 4},
    shapes=_pipeline_shapes,
    rules=[("layers", P("pp")), ("", P(None, "pp"))],
    places={
        **dict.fromkeys(("batch", "residual"), P("data")),
        "parts": P(None, "data"),
        "results": P(None, "data", "pp"),
        **dict.fromkeys(("states", "logits"), P("data", "pp")),
        **dict.fromkeys(("table", "head"), P()),
    },
    batch=_BATCH,
    loss=_pipeline_loss,
    optimizer=lambda case, plan: optax.adam(1e-3),
)
_WHOLE_RESULTS: Final = {
    "results": P(None, "data"), "states": P("data"), "logits": P("data", None, "pp"),
}  # fmt: skip
_PIPELINE_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "all stages' weights are gathered", "weights are gathered in every tick",
        "all stages get the activations of all", "activations are sent by a sum", "outputs are summed in every tick",
        "activations are sent back and forth", "not donated", "no remat", "gradients are whole",
        "logits are returned",
    ),
    **{
        name: {"wrong": name, **_WHOLE_RESULTS}
        for name in ("outputs are summed over the stages", "outputs of all stages are gathered")
    },
    "layers are planned to be whole": {"rules": [("layers", P())]},
    "layers are cut by data": {"rules": [("layers", P("data"))]},
    "layers are cut over their width": {"rules": [("layers", P(None, "pp"))]},
    "the batch is whole in the pipeline": {"residual": P()},
    "logits are whole": {
        **_WHOLE_RESULTS, "wrong": "outputs are summed over the stages",
        **dict.fromkeys(("states", "logits"), P()),
    },
    "states are returned": {"told": "states"},
    # These look wrong.
    **faults("no out_shardings", "the batch comes in whole"),
}  # fmt: skip

STEPS: Final = (
    Step("LoRA on an int8 base", _LORA, _LORA_FAULTS, "tuned"),
    Step("Muon", _MUON, _MUON_FAULTS, "tuned"),
    Step("a pipeline in shard_map", _PIPELINE, _PIPELINE_FAULTS, "tuned"),
)
