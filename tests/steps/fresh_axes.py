"""A decoder on Explicit mesh axes, and a linear recurrence that is scanned over the sequence."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.parts import abstract, cutter, mesh_of, rms_norm, train_step
from tests.steps.score import Built, Step

__all__ = ["STEPS"]

_LAYERS: Final = 3
_WORDS: Final = 1024


def _shapes(layers: dict[str, tuple[int, ...]], width: int) -> Any:
    """Return abstract parameters: a table, a head, and stacked layers."""
    return {
        "embed": jax.ShapeDtypeStruct((_WORDS, width), "float32"),
        "head": jax.ShapeDtypeStruct((width, _WORDS), "float32"),
        "layers": {
            name: jax.ShapeDtypeStruct((_LAYERS, *shape), "float32")
            for name, shape in layers.items()
        },
    }


def _explicit(
    *,
    batch: P = P("fsdp"),
    residual: P = P("fsdp", None, None),
    heads: P = P("fsdp", None, "tp", None),
    hidden: P = P("fsdp", None, "tp"),
    logits: P = P("fsdp", None, "tp"),
    columns: P = P(None, "tp"),
    rows: P = P("tp", None),
    table: P = P(None, None),
    stacked: P | None = None,
    down: P = P(None, "tp", "fsdp"),
    gradients: P | None = None,
    gathered: P | None = None,
    returned_logits: bool = False,
    states: bool = False,
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    per_layer: bool = False,
    moments: bool = False,
) -> Built:
    """Train a decoder with FSDP and tensor parallelism in Explicit mode."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    reshard = jax.sharding.reshard
    width, count, size, inner, length = 256, 8, 32, 1024, 128
    tx = optax.adamw(1e-3)
    kernels = dict.fromkeys("qkv", (width, count, size))
    kernels |= {"o": (count, size, width), "up": (width, inner), "down": (inner, width)}
    shapes = _shapes({**kernels, "norm1": (width,), "norm2": (width,)}, width)
    rules = [
        ("norm", P()),
        ("embed", P(None, ("fsdp", "tp"))),
        ("head", P("fsdp", "tp")),
        ("/[qkv]$", P(None, "fsdp", "tp")),
        ("/o$", P(None, "tp", None, "fsdp")),
        ("up", P(None, "fsdp", "tp")),
        ("down", down),
    ]
    plan = sr.plan(shapes, rules, mesh)

    def attend(y: Any, w: Any) -> Any:
        q, k, v = (
            jnp.einsum("btd,dhk->bthk", y, reshard(w[name], P(*columns, None)), out_sharding=heads)
            for name in "qkv"
        )
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * size**-0.5
        allowed = jnp.arange(length) <= jnp.arange(length)[:, None]
        mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(allowed, scores, -1e9)), v)
        o = reshard(w["o"], P(rows[0], None, None))
        return jnp.einsum("bthk,hkd->btd", mixed, o, out_sharding=residual)

    def loss(params: Any, batch: Any) -> Any:
        tokens, targets = batch["tokens"], batch["targets"]
        x = reshard(params["embed"], table).at[tokens].get(out_sharding=residual)

        def layer(x: Any, w: Any) -> Any:
            x = x + attend(rms_norm(x, w["norm1"]), w)
            y = rms_norm(x, w["norm2"])
            up = reshard(w["up"], columns)
            y = jax.nn.silu(jnp.einsum("btd,df->btf", y, up, out_sharding=hidden))
            y = jnp.einsum("btf,fd->btd", y, reshard(w["down"], rows), out_sharding=residual)
            x = x + y
            return x, x if states else (x**2).mean() if per_layer else None

        layers = params["layers"]
        if stacked is not None:
            layers = {name: reshard(w, stacked) if w.ndim == 3 else w for name, w in layers.items()}
        x, kept = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, layers)
        head = reshard(params["head"], columns)
        scores = jnp.einsum("btd,dv->btv", x, head, out_sharding=logits)
        if gathered is not None:
            scores = reshard(scores, gathered)
        picked = (scores * (targets[..., None] == jnp.arange(_WORDS))).sum(-1)
        losses = jax.nn.logsumexp(scores, -1) - picked
        return losses.mean(), (kept, scores if returned_logits else None)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda leaf: reshard(leaf, gradients), grads)
            grads = jax.tree.map(
                lambda leaf, p: reshard(leaf, jax.typeof(p).sharding), grads, params
            )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, metrics)

    tokens = abstract(mesh, batch, (16, length))
    state = jax.eval_shape(tx.init, shapes)
    given = None
    if moments:
        spread = NamedSharding(mesh, P())
        replicated = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spread), state
        )
        given = plan.abstract(), replicated
    with jax.set_mesh(mesh):
        return train_step(
            step,
            plan,
            state,
            {"tokens": tokens, "targets": tokens},
            donate=donate,
            returned=returned,
            given=given,
        )


_EXPLICIT_FAULTS: Final = {
    "weights are resharded to be whole": {"columns": P(None, None), "rows": P(None, None)},
    "up is gathered over tp too, and down": {"columns": P(None, "tp"), "rows": P(None, None)},
    "activations come out whole": {"residual": P(None, None, None)},
    "activations over batch come out whole, heads too": {
        "residual": P(None, None, None), "heads": P(None, None, "tp", None), "hidden": P(None, None, "tp"),
    },
    "heads are whole over tp": {"heads": P("fsdp", None, None, None)},
    "hidden is whole over tp": {"hidden": P("fsdp", None, None)},
    "hidden is whole over fsdp": {"hidden": P(None, None, "tp")},
    "the residual is cut over tp": {"residual": P("fsdp", None, "tp")},
    "logits come out whole over tp": {"logits": P("fsdp", None, None)},
    "logits come out whole": {"logits": P(None, None, None)},
    "logits over batch are gathered for the loss": {"gathered": P(None, None, "tp")},
    "the stack is gathered before the scan": {"stacked": P(None, None, "tp")},
    "the stack is gathered whole before the scan": {"stacked": P(None, None, None)},
    "gradients are resharded to be whole": {"gradients": P()},
    "states of each layer are returned": {"states": True},
    "logits are returned": {"returned_logits": True},
    "not donated": {"donate": False},
    "no remat": {"remat": False},
    "moments come in whole": {"moments": True},
    "down is planned as a column": {"down": P(None, "fsdp", "tp")},
    "the batch comes in whole": {"batch": P()},
    # These look wrong.
    "no out_shardings": {"returned": False},
    "a mean of each layer": {"per_layer": True},
    "the table is gathered over fsdp alone": {"table": P(None, "tp")},
}  # fmt: skip


def _recurrence(
    *,
    batch: P = P(("data", "fsdp")),
    residual: P | None = P(("data", "fsdp")),
    channels: P | None = P(("data", "fsdp"), None, "tp"),
    scanned: P | None = None,
    logits: P | None = P(("data", "fsdp"), None, "tp"),
    outward: P = P(None, "tp", "fsdp"),
    gathered: P | None = None,
    donate: bool = True,
    returned: bool = True,
    remat: bool = True,
    fused: bool = False,
    blocks: bool = False,
    sequential: bool = False,
    gradients: P | None = None,
    states: bool = False,
    decay: P = P(None, "tp"),
    picked: bool = False,
    final: bool = False,
    table: P | None = P("tp"),
    halo: P | None = None,
    mixed: bool = False,
) -> Built:
    """Train gated linear recurrences, with a short convolution before each."""
    mesh = mesh_of(data=2, fsdp=2, tp=2)
    cut = cutter(mesh)
    width, inner, length, taps = 256, 512, 32, 4
    tx = optax.adam(1e-3)
    kernels = {
        "into": (width, 2 * inner) if fused else (width, 2, inner),
        "taps": (taps, inner),
        "decay": (inner,),
        "gate": (inner, 2),
        "out": (inner, width),
        "norm": (width,),
    }
    shapes = _shapes(kernels, width)
    rules = [
        ("norm", P()),
        ("embed", P("tp", "fsdp")),
        ("head", P("fsdp", "tp")),
        ("into", P(None, "fsdp", "tp") if fused else P(None, "fsdp", None, "tp")),
        ("taps", P(None, None, "tp")),
        ("decay", decay),
        ("gate", P(None, "tp")),
        ("out", outward),
    ]
    plan = sr.plan(shapes, rules, mesh)

    def combine(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    def recur(a: Any, b: Any) -> Any:
        a, b = cut(a, scanned), cut(b, scanned)
        if sequential:
            first = jnp.zeros_like(b[:, 0])
            inputs = (a.swapaxes(0, 1), b.swapaxes(0, 1))
            h = jax.lax.scan(lambda h, ab: (ab[0] * h + ab[1],) * 2, first, inputs)[1]
            return h.swapaxes(0, 1)
        return jax.lax.associative_scan(combine, (a, b), axis=1)[1]

    def layer(x: Any, w: Any) -> Any:
        if gathered is not None:
            w = {name: cut(leaf, gathered if leaf.ndim > 1 else None) for name, leaf in w.items()}
        y = rms_norm(x, w["norm"])
        if fused:
            u, z = jnp.split(cut(y @ w["into"], channels), 2, axis=-1)
        else:
            both = jnp.einsum("btd,dce->cbte", y, w["into"])
            u, z = cut(both[0], channels), cut(both[1], channels)
        padded = cut(jnp.pad(u, ((0, 0), (taps - 1, 0), (0, 0))), halo)
        u = sum(padded[:, i : i + length] * w["taps"][i] for i in range(taps))
        r, i = (jax.nn.sigmoid(u * w["gate"][:, k]) for k in range(2))
        a = jnp.exp(-8 * jax.nn.softplus(w["decay"]) * r)
        h = recur(a, jnp.sqrt(1 - a**2 + 1e-6) * i * u)
        if mixed:  # channels in groups, of which each takes from its neighbours
            h = h.reshape(*h.shape[:2], 8, -1).swapaxes(2, 3).reshape(h.shape)
        y = cut(h * jax.nn.silu(z), channels) @ w["out"]
        x = cut(x + y, residual)
        return x, h if states else h[:, -1] if final else None

    def loss(params: Any, batch: Any) -> Any:
        tokens, targets = batch["tokens"], batch["targets"]
        x = cut(cut(params["embed"], table)[tokens], residual)
        x, kept = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params["layers"])
        scores = cut(x @ cut(params["head"], P(None, "tp")), logits)
        if picked:
            chances = jax.nn.log_softmax(scores).reshape(-1, _WORDS)
            return -chances[jnp.arange(chances.shape[0]), targets.reshape(-1)].mean(), kept
        log_z = jax.nn.logsumexp(scores, -1)
        return (log_z - (scores * jax.nn.one_hot(targets, _WORDS)).sum(-1)).mean(), kept

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda leaf: cut(leaf, gradients), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, kept)

    tokens = abstract(mesh, batch, (64, length))
    return train_step(
        step,
        plan,
        jax.eval_shape(tx.init, shapes),
        {"tokens": tokens, "targets": tokens},
        donate=donate,
        returned=returned,
    )


_RECURRENCE_FAULTS: Final = {
    "no constraints": {"residual": None, "channels": None, "logits": None},
    "no constraints, and the batch whole": {
        "residual": None, "channels": None, "logits": None, "batch": P(),
    },
    "the recurrence is cut over the sequence": {"scanned": P(("data", "fsdp"), "tp")},
    "channels are gathered for the recurrence": {"scanned": P(("data", "fsdp"))},
    "channels without the batch": {"channels": P(None, None, "tp")},
    "channels on the wrong axis": {"channels": P("data", None, ("fsdp", "tp"))},
    "the residual is cut over tp": {"residual": P(("data", "fsdp"), None, "tp")},
    "the residual is cut over data alone": {"residual": P("data")},
    "logits are gathered": {"logits": P(("data", "fsdp"))},
    "logits are whole over the batch": {"logits": P(None, None, "tp")},
    "one kernel into both branches, split after it": {"fused": True},
    "the projection out is cut by columns": {"outward": P(None, "fsdp", "tp")},
    "weights are gathered over tp": {"gathered": P()},
    "no remat": {"remat": False},
    "not donated": {"donate": False},
    "gradients are constrained to be whole": {"gradients": P()},
    "states of each layer are returned": {"states": True},
    "the padded sequence is cut over tp": {"halo": P(("data", "fsdp"), "tp")},
    "channels are regrouped across tp": {"mixed": True},
    # These look wrong.
    "the batch comes in whole": {"batch": P()},
    "the last state of each layer is returned": {"final": True},
    "the decay is whole": {"decay": P()},
    "the targets are picked from flattened chances": {"picked": True},
    "a loop over the sequence instead of a scan of it": {"sequential": True},
    "the table is looked up as it is cut": {"table": None},
}  # fmt: skip

STEPS: Final = (
    Step("a decoder on Explicit axes", _explicit, _EXPLICIT_FAULTS),
    Step("a linear recurrence", _recurrence, _RECURRENCE_FAULTS),
)
