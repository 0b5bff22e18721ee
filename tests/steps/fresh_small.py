"""Four small steps, written after `verify` was tuned: towers, a recommender, an LSTM and a mixer.

They share one frame: what a family plans and constrains by name, which a fault changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.parts import abstract, cutter, mesh_of, train_step
from tests.steps.score import Built, Step

__all__ = ["STEPS"]

_Specs = Mapping[str, P | None]


class _Family(NamedTuple):
    """A model, and what is right for it."""

    shapes: Mapping[str, tuple[int, ...]]
    plan: _Specs
    """Of the parameters."""
    cuts: _Specs
    """Constraints by name."""
    batch: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and dtype; the first dimension is cut over fsdp."""
    loss: Callable[..., Any]
    """loss(params, batch, cut, **options), where cut(x, name) constrains."""


def _build(
    family: _Family,
    *,
    plan: _Specs | None = None,
    cuts: _Specs | None = None,
    batch: P = P("fsdp"),
    gradients: P | None = None,
    moments: P | None = None,
    metrics: Callable[..., Any] | None = None,
    donate: bool = True,
    returned: bool = True,
    **options: Any,
) -> Built:
    """Train with Adam, with what a fault changes of the plan and the constraints."""
    mesh = mesh_of(fsdp=4, tp=2)
    constrain, specs = cutter(mesh), {**family.cuts, **(cuts or {})}
    shapes = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in family.shapes.items()}
    rules = [(f"^{name}$", spec) for name, spec in {**family.plan, **(plan or {})}.items()]
    planned, tx = sr.plan(shapes, rules, mesh), optax.adam(1e-3)

    def loss(params: Any, batch: Any) -> Any:
        return family.loss(params, batch, lambda x, name: constrain(x, specs[name]), **options)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        if gradients is not None:
            grads = jax.tree.map(lambda leaf: constrain(leaf, gradients), grads)
        updates, state = tx.update(grads, state, params)
        told = None if metrics is None else metrics(kept)
        return optax.apply_updates(params, updates), state, (value, told)

    state, given = jax.eval_shape(tx.init, shapes), None
    if moments is not None:
        whole = NamedSharding(mesh, moments)
        as_given = partial(jax.ShapeDtypeStruct, sharding=whole)
        given = planned.abstract(), jax.tree.map(lambda s: as_given(s.shape, s.dtype), state)
    rows = {name: abstract(mesh, batch, *of_name) for name, of_name in family.batch.items()}
    return train_step(step, planned, state, rows, donate=donate, returned=returned, given=given)


_IN: Final = P("fsdp", "tp")
_OUT: Final = P("tp", "fsdp")
_ROWS: Final = P("fsdp")


def _towers(params: Any, batch: Any, cut: Any, local: bool = False) -> Any:
    """Contrast each image with the texts of all."""

    def tower(x: Any, name: str) -> Any:
        h = cut(jax.nn.gelu(x @ params[f"{name}_up"]), "hidden")
        y = cut(h @ params[f"{name}_down"], "features") @ params[f"{name}_out"]
        return cut(y / jnp.linalg.norm(y, axis=-1, keepdims=True), "embedding")

    images, texts = tower(batch["images"], "image"), tower(batch["texts"], "text")
    if local:  # the similarities of features before the last kernel
        images, texts = (jnp.tile(x, (1, 8)) for x in (images, texts))
    scores = cut(10 * images @ texts.T, "scores")
    return (jax.nn.logsumexp(scores, 1) - jnp.diagonal(scores)).mean(), scores


def _recommender(params: Any, batch: Any, cut: Any, hot: bool = False) -> Any:
    """Look numbers up in tables, let them interact, and guess a click."""
    dense = cut(jax.nn.relu(batch["dense"] @ params["bottom"]), "dense")
    if hot:
        rows = jax.nn.one_hot(batch["numbers"], 8192) @ cut(params["table"], "table")
    else:
        rows = cut(params["table"], "table")[batch["numbers"]]
    rows = cut(rows, "rows")
    all_rows = jnp.concatenate([dense[:, None], rows], 1)
    pairs = cut(jnp.einsum("bid,bjd->bij", all_rows, all_rows), "pairs")
    x = jnp.concatenate([dense, pairs.reshape(len(pairs), -1)], 1)
    h = cut(jax.nn.relu(x @ params["up"]), "hidden")
    guess = cut(h @ params["down"], "guess").sum(-1)
    return jnp.mean((guess - batch["clicks"]) ** 2), rows


def _lstm(params: Any, batch: Any, cut: Any, remat: bool = True) -> Any:
    """Go over a sequence, a step at a time."""
    kernel = cut(params["recurrent"], "recurrent")
    x = cut(jnp.einsum("btd,dgh->tbgh", batch["x"], params["input"]), "inputs")

    def cell(carry: Any, x: Any) -> Any:
        h, c = carry
        gates = cut(x + jnp.einsum("bh,hgk->bgk", h, kernel), "gates")
        i, f, o, g = (gates[:, n] for n in range(4))
        c = cut(jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g), "memory")
        return (cut(jax.nn.sigmoid(o) * jnp.tanh(c), "state"), c), cut(h, "kept")

    zeros = jnp.zeros((len(batch["x"]), 512))
    _, states = jax.lax.scan(jax.checkpoint(cell) if remat else cell, (zeros, zeros), x)
    guess = cut(states @ params["head"], "logits")
    return (jax.nn.logsumexp(guess, -1) - guess[..., 0]).mean(), guess


def _mixer(params: Any, batch: Any, cut: Any, remat: bool = True, stacked: bool = False) -> Any:
    """Mix over places, then over channels, in three layers."""

    def layer(x: Any, w: Any) -> Any:
        y = cut(jax.nn.gelu(jnp.einsum("bsd,sh->bhd", x, w["places"])), "mixed")
        x = cut(x + jnp.einsum("bhd,hs->bsd", y, w["back"]), "residual")
        y = cut(jax.nn.gelu(x @ w["up"]), "hidden")
        return cut(x + y @ w["down"], "residual"), None

    layers = {name: params[name] for name in ("places", "back", "up", "down")}
    if stacked:
        layers = {name: cut(leaf, "stack") for name, leaf in layers.items()}
    x = cut(batch["x"] @ params["first"], "residual")
    x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, layers)
    guess = cut(x.mean(1) @ params["head"], "logits")
    return (jax.nn.logsumexp(guess, -1) - guess[..., 0]).mean(), x


_TOWERS: Final = _Family(
    {
        f"{tower}_{name}": shape
        for tower in ("image", "text")
        for name, shape in (("up", (512, 2048)), ("down", (2048, 512)), ("out", (512, 128)))
    },
    {"(image|text)_up": _IN, "(image|text)_down": _OUT, "(image|text)_out": P("fsdp")},
    {"hidden": _IN, "features": _ROWS, "embedding": _ROWS, "scores": _ROWS},
    {"images": ((512, 512), "float32"), "texts": ((512, 512), "float32")},
    _towers,
)
_RECOMMENDER: Final = _Family(
    {"bottom": (256, 128), "table": (8192, 128), "up": (417, 1024), "down": (1024, 128)},
    {"bottom": P("fsdp"), "table": P("tp"), "up": P(None, "tp"), "down": _OUT},
    {"dense": _ROWS, "table": None, "rows": _ROWS, "pairs": _ROWS, "hidden": _IN, "guess": _ROWS},
    {
        "dense": ((512, 256), "float32"),
        "numbers": ((512, 16), "int32"),
        "clicks": ((512,), "float32"),
    },
    _recommender,
)
_LSTM: Final = _Family(
    {"input": (256, 4, 512), "recurrent": (512, 4, 512), "head": (512, 1024)},
    {"input": P("fsdp", None, "tp"), "recurrent": P("fsdp", None, "tp"), "head": _IN},
    {
        "recurrent": P(None, None, "tp"),
        "inputs": P(None, "fsdp", None, "tp"),
        "gates": P("fsdp", None, "tp"),
        "memory": _IN,
        "state": _ROWS,
        "kept": _ROWS,
        "logits": P(None, "fsdp", "tp"),
    },
    {"x": ((64, 32, 256), "float32")},
    _lstm,
)
_MIXER: Final = _Family(
    {
        "first": (192, 256),
        "places": (3, 64, 256),
        "back": (3, 256, 64),
        "up": (3, 256, 1024),
        "down": (3, 1024, 256),
        "head": (256, 1024),
    },
    {
        "first": P("fsdp"),
        "places": P(None, None, ("tp", "fsdp")),
        "back": P(None, ("tp", "fsdp")),
        "up": P(None, "fsdp", "tp"),
        "down": P(None, "tp", "fsdp"),
        "head": _IN,
    },
    {"mixed": P("fsdp", "tp"), "residual": _ROWS, "hidden": P("fsdp", None, "tp"), "logits": _IN}
    | {"stack": P()},
    {"x": ((64, 64, 192), "float32")},
    _mixer,
)


def _free(family: _Family) -> dict[str, _Specs]:
    return {"cuts": dict.fromkeys(family.cuts)}


_ALL: Final[Mapping[str, Mapping[str, Any]]] = {
    "not donated": {"donate": False},
    "gradients are whole": {"gradients": P()},
    "moments come in whole": {"moments": P()},
}
_FAULTS: Final[Mapping[str, tuple[_Family, Mapping[str, Mapping[str, Any]]]]] = {
    "contrastive towers": (
        _TOWERS,
        {
            **_ALL,
            "no constraints": _free(_TOWERS),
            "no constraints, and the batch whole": {**_free(_TOWERS), "batch": P()},
            "hidden is whole over tp": {"cuts": {"hidden": _ROWS}},
            "hidden is whole over the batch": {"cuts": {"hidden": P(None, "tp")}},
            "features are whole": {"cuts": {"features": P()}},
            "features are cut over their width": {"cuts": {"features": P(None, "fsdp")}},
            "embeddings are whole": {"cuts": {"embedding": P()}},
            "scores are whole": {"cuts": {"scores": P()}},
            "the last kernels are cut over their results": {
                "plan": {"(image|text)_out": P(None, "tp")}
            },
            "up and down are swapped": {
                "plan": {"(image|text)_up": _OUT, "(image|text)_down": _IN}
            },
            "embeddings are repeated first": {"local": True},
            "scores are returned whole": {"metrics": lambda x: x, "cuts": {"scores": P()}},
        },
    ),
    "a recommender with a table": (
        _RECOMMENDER,
        {
            **_ALL,
            "no constraints": _free(_RECOMMENDER),
            "the table is made whole": {"cuts": {"table": P()}},
            "the table is planned whole": {"plan": {"table": P()}},
            "the table is one-hot": {"hot": True},
            "rows are whole over the batch": {"cuts": {"rows": P()}},
            "rows are cut over tp": {"cuts": {"rows": P("tp")}},
            "pairs are whole over the batch": {"cuts": {"pairs": P()}},
            "hidden is whole over the batch": {"cuts": {"hidden": P(None, "tp")}},
            "hidden is whole over tp": {"cuts": {"hidden": _ROWS}},
            "the kernel up is cut along its sum": {"plan": {"down": _IN}},
            "rows are returned whole": {"metrics": lambda x: x, "cuts": {"rows": P()}},
        },
    ),
    "an LSTM": (
        _LSTM,
        {
            **_ALL,
            "no constraints": _free(_LSTM),
            "the recurrent kernel is gathered in each step": {"cuts": {"recurrent": None}},
            "the recurrent kernel is whole": {"cuts": {"recurrent": P()}},
            "gates are whole over the batch": {"cuts": {"gates": P(None, None, "tp")}},
            "gates are whole over tp": {"cuts": {"gates": _ROWS}},
            "the state is whole over the batch": {"cuts": {"state": P(None, "tp")}},
            "the memory is whole": {"cuts": {"memory": P()}},
            "inputs are whole over the batch": {"cuts": {"inputs": P(None, None, None, "tp")}},
            "inputs are cut over time": {"cuts": {"inputs": P("fsdp")}},
            "logits are whole over the batch": {"cuts": {"logits": P(None, None, "tp")}},
            "logits are whole over tp": {"cuts": {"logits": P(None, "fsdp")}},
            "logits are returned": {"metrics": lambda x: x},
            "no remat": {"remat": False},
        },
    ),
    "a mixer": (
        _MIXER,
        {
            **_ALL,
            "no constraints": _free(_MIXER),
            "the residual is whole": {"cuts": {"residual": P()}},
            "the residual is cut over places": {"cuts": {"residual": P(None, "fsdp")}},
            "the residual is cut over channels": {"cuts": {"residual": P("fsdp", None, "tp")}},
            "kernels are cut by fsdp before tp": {
                "plan": {"places": P(None, None, ("fsdp", "tp")), "back": P(None, ("fsdp", "tp"))}
            },
            "mixed places are whole over tp": {"cuts": {"mixed": _ROWS}},
            "mixed places are whole over the batch": {"cuts": {"mixed": P(None, "tp")}},
            "hidden is whole over tp": {"cuts": {"hidden": _ROWS}},
            "hidden is whole over the batch": {"cuts": {"hidden": P(None, None, "tp")}},
            "up and down are swapped": {
                "plan": {"up": P(None, "tp", "fsdp"), "down": P(None, "fsdp", "tp")}
            },
            "the stacks are whole before the loop": {"stacked": True},
            "states are returned whole": {"metrics": lambda x: x, "cuts": {"residual": P()}},
            "no remat": {"remat": False},
        },
    ),
}  # fmt: skip

STEPS: Final = tuple(
    Step(name, partial(_build, family), faults) for name, (family, faults) in _FAULTS.items()
)
