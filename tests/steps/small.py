"""Steps without attention: a linear recurrence, towers, a recommender, an LSTM and a mixer."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from tests.steps.blocks import entropy, rms_norm
from tests.steps.model import Case, Fault, Model, arrays, faults, free, stacked
from tests.steps.score import Step

_ROWS: Final = P("fsdp")
_IN: Final = P("fsdp", "tp")
_OUT: Final = P("tp", "fsdp")
_LAST: Final = P("fsdp", None, "tp")


def _adam(case: Case, plan: Any) -> optax.GradientTransformation:
    return optax.adam(1e-3)


# A linear recurrence

_BATCH: Final = ("data", "fsdp")


def _recurrent_shapes(case: Case) -> Any:
    width, inner, is_fused = 256, 512, case.has("one kernel into both branches, split after it")
    layer = {"into": (width, 2 * inner) if is_fused else (width, 2, inner), "taps": (4, inner)}
    layer |= {"decay": (inner,), "gate": (inner, 2), "out": (inner, width), "norm": (width,)}
    tables = arrays({"embed": (1024, width), "head": (width, 1024)})
    return {**tables, "layers": stacked(3, layer)}


def _recur(case: Case, a: Any, b: Any) -> Any:
    a, b = case.cut(a, "scanned"), case.cut(b, "scanned")
    if case.has("a loop over the sequence instead of a scan of it"):
        inputs = (a.swapaxes(0, 1), b.swapaxes(0, 1))
        first = jnp.zeros_like(b[:, 0])
        h = jax.lax.scan(lambda h, ab: (ab[0] * h + ab[1],) * 2, first, inputs)[1]
        return h.swapaxes(0, 1)

    def combine(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(combine, (a, b), axis=1)[1]


def _recurrent_loss(case: Case, params: Any, batch: Any) -> Any:
    cut = case.cut

    def layer(x: Any, w: Any) -> Any:
        w, length = case.cut_all(w, "kernels", 2), x.shape[1]
        y = rms_norm(x, w["norm"])
        if w["into"].ndim == 2:
            u, z = jnp.split(cut(y @ w["into"], "channels"), 2, axis=-1)
        else:
            both = jnp.einsum("btd,dce->cbte", y, w["into"])
            u, z = cut(both[0], "channels"), cut(both[1], "channels")
        padded = cut(jnp.pad(u, ((0, 0), (3, 0), (0, 0))), "padded")
        u = sum(padded[:, i : i + length] * w["taps"][i] for i in range(4))
        r, i = (jax.nn.sigmoid(u * w["gate"][:, k]) for k in range(2))
        a = jnp.exp(-8 * jax.nn.softplus(w["decay"]) * r)
        h = _recur(case, a, jnp.sqrt(1 - a**2 + 1e-6) * i * u)
        if case.has("channels are regrouped across tp"):  # each group takes from its neighbours
            h = h.reshape(*h.shape[:2], 8, -1).swapaxes(2, 3).reshape(h.shape)
        x = cut(x + cut(h * jax.nn.silu(z), "channels") @ w["out"], "residual")
        return x, h[:, -1] if case.told == "last" else case.keep(h, "states")

    x = cut(cut(params["embed"], "table")[batch["tokens"]], "residual")
    x, kept = jax.lax.scan(case.recomputed(layer), x, params["layers"])
    scores = cut(x @ cut(params["head"], "head"), "logits")
    value = entropy(scores, batch["targets"])
    if case.has("the targets are picked from flattened chances"):
        chances = jax.nn.log_softmax(scores).reshape(-1, scores.shape[-1])
        value = -chances[jnp.arange(chances.shape[0]), batch["targets"].reshape(-1)].mean()
    return value, {"states": kept, "last": kept}


_RECURRENCE: Final = Model(
    mesh={"data": 2, "fsdp": 2, "tp": 2},
    shapes=_recurrent_shapes,
    rules=[
        ("norm", P()),
        ("embed", _OUT),
        ("head", _IN),
        ("into", P(None, "fsdp", None, "tp")),
        ("taps", P(None, None, "tp")),
        ("decay|gate", P(None, "tp")),
        ("out", P(None, "tp", "fsdp")),
    ],
    places={
        **dict.fromkeys(("batch", "residual"), P(_BATCH)),
        **dict.fromkeys(("channels", "logits"), P(_BATCH, None, "tp")),
        "table": P("tp"),
        "head": P(None, "tp"),
    },
    batch=dict.fromkeys(("tokens", "targets"), (64, 32)),
    loss=_recurrent_loss,
    optimizer=_adam,
)
_RECURRENCE_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "no remat", "not donated", "channels are regrouped across tp", "logits are whole over the batch",
        "gradients are constrained to be whole", "states of each layer are returned",
    ),
    "no constraints": dict.fromkeys(("residual", "channels", "logits")),
    "no constraints, and the batch whole": {
        "residual": None, "channels": None, "logits": None, "batch": P(),
    },
    "the recurrence is cut over the sequence": {"scanned": P(_BATCH, "tp")},
    "channels are gathered for the recurrence": {"scanned": P(_BATCH)},
    "channels without the batch": {"channels": P(None, None, "tp")},
    "channels on the wrong axis": {"channels": P("data", None, ("fsdp", "tp"))},
    "the residual is cut over tp": {"residual": P(_BATCH, None, "tp")},
    "the residual is cut over data alone": {"residual": P("data")},
    "logits are gathered": {"logits": P(_BATCH)},
    "one kernel into both branches, split after it": {
        "wrong": "one kernel into both branches, split after it",
        "rules": [("into", P(None, "fsdp", "tp"))],
    },
    "the projection out is cut by columns": {"rules": [("out", P(None, "fsdp", "tp"))]},
    "weights are gathered over tp": {"kernels": P()},
    "the padded sequence is cut over tp": {"padded": P(_BATCH, "tp")},
    # These look wrong.
    **faults(
        "the targets are picked from flattened chances", "a loop over the sequence instead of a scan of it",
        "the batch comes in whole", "the table is looked up as it is cut",
    ),
    "the last state of each layer is returned": {"told": "last"},
    "the decay is whole": {"rules": [("decay", P())]},
}  # fmt: skip


# Contrastive towers


def _towers(case: Case, params: Any, batch: Any) -> Any:
    """Contrast each image with the texts of all."""

    def tower(x: Any, name: str) -> Any:
        h = case.cut(jax.nn.gelu(x @ params[f"{name}_up"]), "hidden")
        y = case.cut(h @ params[f"{name}_down"], "features") @ params[f"{name}_out"]
        return case.cut(y / jnp.linalg.norm(y, axis=-1, keepdims=True), "embedding")

    images, texts = tower(batch["images"], "image"), tower(batch["texts"], "text")
    if case.has("embeddings are repeated first"):
        images, texts = (jnp.tile(x, (1, 8)) for x in (images, texts))
    scores = case.cut(10 * images @ texts.T, "scores")
    value = (jax.nn.logsumexp(scores, 1) - jnp.diagonal(scores)).mean()
    return value, {"scores": scores}


_KERNELS: Final = {"up": (512, 2048), "down": (2048, 512), "out": (512, 128)}
_TOWERS: Final = Model(
    mesh={"fsdp": 4, "tp": 2},
    shapes=lambda case: arrays({f"{of}_{name}": shape for of in ("image", "text") for name, shape in _KERNELS.items()}),
    rules=[("_up", _IN), ("_down", _OUT), ("_out", _ROWS)],
    places={"hidden": _IN, **dict.fromkeys(("batch", "features", "embedding", "scores"), _ROWS)},
    batch=dict.fromkeys(("images", "texts"), ((512, 512), "float32")),
    loss=_towers,
    optimizer=_adam,
)


# A recommender


def _recommender(case: Case, params: Any, batch: Any) -> Any:
    """Look numbers up in tables, let them interact, and guess a click."""
    dense = case.cut(jax.nn.relu(batch["dense"] @ params["bottom"]), "dense")
    table = case.cut(params["table"], "table")
    is_hot = case.has("the table is one-hot")
    rows = jax.nn.one_hot(batch["numbers"], 8192) @ table if is_hot else table[batch["numbers"]]
    rows = case.cut(rows, "rows")
    all_rows = jnp.concatenate([dense[:, None], rows], 1)
    pairs = case.cut(jnp.einsum("bid,bjd->bij", all_rows, all_rows), "pairs")
    x = jnp.concatenate([dense, pairs.reshape(len(pairs), -1)], 1)
    h = case.cut(jax.nn.relu(x @ params["up"]), "hidden")
    guess = case.cut(h @ params["down"], "guess").sum(-1)
    return jnp.mean((guess - batch["clicks"]) ** 2), {"rows": rows}


_RECOMMENDER: Final = Model(
    mesh={"fsdp": 4, "tp": 2},
    shapes=lambda case: arrays({"bottom": (256, 128), "table": (8192, 128), "up": (417, 1024), "down": (1024, 128)}),
    rules=[("bottom", _ROWS), ("table", P("tp")), ("up", P(None, "tp")), ("down", _OUT)],
    places={"hidden": _IN, **dict.fromkeys(("batch", "dense", "rows", "pairs", "guess"), _ROWS)},
    batch={"dense": ((512, 256), "float32"), "numbers": (512, 16), "clicks": ((512,), "float32")},
    loss=_recommender,
    optimizer=_adam,
)


# An LSTM


def _lstm(case: Case, params: Any, batch: Any) -> Any:
    """Go over a sequence, a step at a time."""
    cut = case.cut
    kernel = cut(params["recurrent"], "recurrent")
    x = cut(jnp.einsum("btd,dgh->tbgh", batch["x"], params["input"]), "inputs")

    def cell(carry: Any, x: Any) -> Any:
        h, c = carry
        gates = cut(x + jnp.einsum("bh,hgk->bgk", h, kernel), "gates")
        i, f, o, g = (gates[:, n] for n in range(4))
        c = cut(jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g), "memory")
        return (cut(jax.nn.sigmoid(o) * jnp.tanh(c), "state"), c), cut(h, "kept")

    zeros = jnp.zeros((len(batch["x"]), 512))
    _, states = jax.lax.scan(case.recomputed(cell), (zeros, zeros), x)
    guess = cut(states @ params["head"], "logits")
    return (jax.nn.logsumexp(guess, -1) - guess[..., 0]).mean(), {"logits": guess}


_LSTM: Final = Model(
    mesh={"fsdp": 4, "tp": 2},
    shapes=lambda case: arrays({"input": (256, 4, 512), "recurrent": (512, 4, 512), "head": (512, 1024)}),
    rules=[("input|recurrent", _LAST), ("head", _IN)],
    places={
        "recurrent": P(None, None, "tp"),
        "inputs": P(None, "fsdp", None, "tp"),
        "gates": _LAST,
        "memory": _IN,
        **dict.fromkeys(("batch", "state", "kept"), _ROWS),
        "logits": P(None, "fsdp", "tp"),
    },
    batch={"x": ((64, 32, 256), "float32")},
    loss=_lstm,
    optimizer=_adam,
)


# A mixer


def _mixer_shapes(case: Case) -> Any:
    layer = {"places": (64, 256), "back": (256, 64), "up": (256, 1024), "down": (1024, 256)}
    return {**arrays({"first": (192, 256), "head": (256, 1024)}), **stacked(3, layer)}


def _mixer(case: Case, params: Any, batch: Any) -> Any:
    """Mix over places, then over channels, in three layers."""
    cut = case.cut

    def layer(x: Any, w: Any) -> Any:
        y = cut(jax.nn.gelu(jnp.einsum("bsd,sh->bhd", x, w["places"])), "mixed")
        x = cut(x + jnp.einsum("bhd,hs->bsd", y, w["back"]), "residual")
        y = cut(jax.nn.gelu(x @ w["up"]), "hidden")
        return cut(x + y @ w["down"], "residual"), None

    layers = {name: cut(params[name], "stack") for name in ("places", "back", "up", "down")}
    x = cut(batch["x"] @ params["first"], "residual")
    x, _ = jax.lax.scan(case.recomputed(layer), x, layers)
    guess = cut(x.mean(1) @ params["head"], "logits")
    return (jax.nn.logsumexp(guess, -1) - guess[..., 0]).mean(), {"states": x}


_MIXER: Final = Model(
    mesh={"fsdp": 4, "tp": 2},
    shapes=_mixer_shapes,
    rules=[
        ("first", _ROWS),
        ("places", P(None, None, ("tp", "fsdp"))),
        ("back", P(None, ("tp", "fsdp"))),
        ("up", P(None, "fsdp", "tp")),
        ("down", P(None, "tp", "fsdp")),
        ("head", _IN),
    ],
    places={**dict.fromkeys(("mixed", "logits"), _IN), **dict.fromkeys(("batch", "residual"), _ROWS), "hidden": _LAST},
    batch={"x": ((64, 64, 192), "float32")},
    loss=_mixer,
    optimizer=_adam,
)

_ALL: Final[dict[str, Fault]] = {
    **faults("not donated", "moments come in whole", "gradients are whole"),
}  # fmt: skip
_TOWER_FAULTS: Final[dict[str, Fault]] = {
    **faults("embeddings are repeated first"),
    **_ALL,
    "no constraints": free(_TOWERS.places),
    "no constraints, and the batch whole": {**free(_TOWERS.places), "batch": P()},
    "hidden is whole over tp": {"hidden": _ROWS},
    "hidden is whole over the batch": {"hidden": P(None, "tp")},
    "features are whole": {"features": P()},
    "features are cut over their width": {"features": P(None, "fsdp")},
    "embeddings are whole": {"embedding": P()},
    "scores are whole": {"scores": P()},
    "the last kernels are cut over their results": {"rules": [("_out", P(None, "tp"))]},
    "up and down are swapped": {"rules": [("_up", _OUT), ("_down", _IN)]},
    "scores are returned whole": {"told": "scores", "scores": P()},
}  # fmt: skip
_RECOMMENDER_FAULTS: Final[dict[str, Fault]] = {
    **faults("the table is one-hot"),
    **_ALL,
    "no constraints": free(_RECOMMENDER.places),
    "the table is made whole": {"table": P()},
    "the table is planned whole": {"rules": [("table", P())]},
    "rows are whole over the batch": {"rows": P()},
    "rows are cut over tp": {"rows": P("tp")},
    "pairs are whole over the batch": {"pairs": P()},
    "hidden is whole over the batch": {"hidden": P(None, "tp")},
    "hidden is whole over tp": {"hidden": _ROWS},
    "the kernel up is cut along its sum": {"rules": [("down", _IN)]},
    "rows are returned whole": {"told": "rows", "rows": P()},
}  # fmt: skip
_LSTM_FAULTS: Final[dict[str, Fault]] = {
    **faults("no remat", "logits are whole over the batch", "logits are returned"),
    **_ALL,
    "no constraints": free(_LSTM.places),
    "the recurrent kernel is gathered in each step": {"recurrent": None},
    "the recurrent kernel is whole": {"recurrent": P()},
    "gates are whole over the batch": {"gates": P(None, None, "tp")},
    "gates are whole over tp": {"gates": _ROWS},
    "the state is whole over the batch": {"state": P(None, "tp")},
    "the memory is whole": {"memory": P()},
    "inputs are whole over the batch": {"inputs": P(None, None, None, "tp")},
    "inputs are cut over time": {"inputs": _ROWS},
    "logits are whole over tp": {"logits": P(None, "fsdp")},
}  # fmt: skip
_MIXER_FAULTS: Final[dict[str, Fault]] = {
    **faults("no remat", "the residual is whole", "hidden is whole over the batch"),
    **_ALL,
    "no constraints": free(_MIXER.places),
    "the residual is cut over places": {"residual": P(None, "fsdp")},
    "the residual is cut over channels": {"residual": _LAST},
    "kernels are cut by fsdp before tp": {
        "rules": [("places", P(None, None, ("fsdp", "tp"))), ("back", P(None, ("fsdp", "tp")))],
    },
    "mixed places are whole over tp": {"mixed": _ROWS},
    "mixed places are whole over the batch": {"mixed": P(None, "tp")},
    "hidden is whole over tp": {"hidden": _ROWS},
    "up and down are swapped": {
        "rules": [("up", P(None, "tp", "fsdp")), ("down", P(None, "fsdp", "tp"))],
    },
    "the stacks are whole before the loop": {"stack": P()},
    "states are returned whole": {"told": "states", "residual": P()},
}  # fmt: skip

STEPS: Final = (
    Step("a linear recurrence", _RECURRENCE, _RECURRENCE_FAULTS, "fresh"),
    Step("contrastive towers", _TOWERS, _TOWER_FAULTS, "small"),
    Step("a recommender with a table", _RECOMMENDER, _RECOMMENDER_FAULTS, "small"),
    Step("an LSTM", _LSTM, _LSTM_FAULTS, "small"),
    Step("a mixer", _MIXER, _MIXER_FAULTS, "small"),
)
