"""Decoders of equinox with its own jit, of nnx with its own jit, and of linen with logical axes."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.blocks import attend, entropy
from tests.steps.model import Case, Fault, Model, abstract, case_of, faults, free
from tests.steps.score import Built, Step

_WORDS: Final = 1024
_WIDTH: Final = 256
_INNER: Final = 1024
_HEADS: Final = 8
_LENGTH: Final = 64
_PARTS: Final = P("fsdp", None, "tp")
_PLACES: Final = {
    **dict.fromkeys(("batch", "residual"), P("fsdp")),
    **dict.fromkeys(("heads", "hidden", "logits"), _PARTS),
    "table": P("tp"),
}


def _zeros(tree: Any) -> Any:
    """Return arrays for abstract ones: jit of a library takes abstract arrays for constants."""
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), tree)


def _texts(case: Case, length: int) -> Any:
    tokens = abstract(case.mesh, case.place("batch") or P(), (64, length))
    return _zeros({"tokens": tokens, "targets": tokens})


# equinox


class _Layer(eqx.Module):
    """A layer of one sequence."""

    norm1: eqx.nn.RMSNorm
    norm2: eqx.nn.RMSNorm
    qkv: eqx.nn.Linear
    o: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        self.norm1, self.norm2 = (eqx.nn.RMSNorm(_WIDTH, use_bias=False) for _ in range(2))
        sizes = {"qkv": (_WIDTH, 3 * _WIDTH), "o": (_WIDTH, _WIDTH)}
        sizes |= {"up": (_WIDTH, _INNER), "down": (_INNER, _WIDTH)}
        for name, size in sizes.items():
            setattr(self, name, eqx.nn.Linear(*size, use_bias=False, key=key))


class _Decoder(eqx.Module):
    """A table, stacked layers and a head."""

    table: Any
    layers: _Layer
    head: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        self.table = jax.random.normal(key, (_WORDS, _WIDTH))
        self.layers = eqx.filter_vmap(_Layer)(jax.random.split(key, 2))
        self.head = eqx.nn.Linear(_WIDTH, _WORDS, use_bias=False, key=key)


def _equinox_layer(case: Case, static: Any, x: Any, w: Any) -> Any:
    cut, w = case.cut, case.cut_all(eqx.combine(w, static), "kernels")
    qkv = jnp.einsum("btd,nd->btn", jax.vmap(jax.vmap(w.norm1))(x), w.qkv.weight)
    if case.has("one kernel of queries, keys and values is split"):
        thirds = jnp.split(qkv, 3, -1)  # each is on other devices than its kernel's columns
    else:
        grouped = cut(qkv.reshape(*qkv.shape[:2], _HEADS, 3, -1), "grouped")
        thirds = [grouped[:, :, :, i] for i in range(3)]
    q, k, v = (cut(a.reshape(*a.shape[:2], _HEADS, -1), "heads") for a in thirds)
    y = attend(case, q, k, v).reshape(x.shape)
    x = cut(x + jnp.einsum("btn,dn->btd", y, w.o.weight), "residual")
    y = jax.vmap(jax.vmap(w.norm2))(x)
    y = cut(jax.nn.silu(jnp.einsum("btd,fd->btf", y, w.up.weight)), "hidden")
    return cut(x + jnp.einsum("btf,df->btd", y, w.down.weight), "residual"), None


def _equinox(wrong: str = "", rules: Any = (), told: str = "", **places: Any) -> Built:
    """Train it with filter_jit and Adam."""
    case = case_of({"fsdp": 4, "tp": 2}, {**_PLACES, "grouped": _PARTS}, places, wrong, told)
    shapes = eqx.filter_eval_shape(_Decoder, jax.random.key(0))
    arrays = eqx.filter(shapes, lambda leaf: hasattr(leaf, "shape"))
    rules = [
        *rules,
        ("norm", P()),
        ("table|head", P("tp", "fsdp")),
        ("qkv|up", P(None, "tp", "fsdp")),
        ("/o/|down", P(None, "fsdp", "tp")),
    ]
    plan = sr.plan(arrays, rules, case.mesh)
    tx = optax.adam(1e-3)
    moments = plan.for_optimizer(jax.eval_shape(tx.init, arrays))

    def loss(model: Any, batch: Any) -> Any:
        x = case.cut(case.cut(model.table, "table")[batch["tokens"]], "residual")
        dynamic, static = eqx.partition(model.layers, eqx.is_array)
        layer = partial(_equinox_layer, case, static)
        x, _ = jax.lax.scan(layer if case.has("no remat") else eqx.filter_checkpoint(layer), x, dynamic)
        scores = case.cut(jnp.einsum("btd,vd->btv", x, model.head.weight), "logits")
        kept = {"logits": scores}
        if told == "gathered":
            kept[told] = jax.lax.with_sharding_constraint(scores, NamedSharding(case.mesh, P()))
        elif told == "guesses":
            kept[told] = case.cut(scores, "residual").argmax(-1)
        return entropy(scores, batch["targets"]), kept.get(told)

    def step(model: Any, state: Any, batch: Any) -> Any:
        (value, kept), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, batch)
        updates, state = tx.update(case.cut_all(grads, "gradients"), state, model)
        model = eqx.apply_updates(model, updates)
        if not case.has("results are not constrained"):
            model = jax.lax.with_sharding_constraint(model, plan.shardings())
            state = jax.lax.with_sharding_constraint(state, moments.shardings())
        if told == "average":
            kept = case.cut_all(jax.tree.map(lambda p: 0.999 * p, model), "average")
        return model, state, (value, kept)

    params, state = _zeros((plan.abstract(), moments.abstract()))
    donated: Any = "none" if case.has("not donated") else "all"
    arguments = eqx.combine(params, shapes), state, _texts(case, _LENGTH)
    compiled = eqx.filter_jit(step, donate=donated).lower(*arguments).compile()
    specs = dict.fromkeys(("tokens", "targets"), case.place("batch"))
    case.asked.update(("gathered", "guesses", "average", "logits"))
    return case.built(compiled, (plan, moments, specs), (plan, moments, None))


_EQUINOX_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "one kernel of queries, keys and values is split", "no remat", "the residual is whole", "heads are whole",
        "hidden is whole over the batch", "logits are whole", "logits are whole over the batch",
        "the table is gathered", "kernels are gathered over tp", "gradients are whole", "logits are returned",
        "logits are gathered and returned",
    ),
    "no constraints": free(_PLACES),
    "no constraints, and the batch whole": {**free(_PLACES), "batch": P()},
    "the residual is cut over tp": {"residual": _PARTS},
    "hidden has its axes swapped": {"hidden": P("tp", None, "fsdp")},
    "kernels are planned as those of flax, transposed": {
        "rules": [("qkv|up", P(None, "fsdp", "tp")), ("/o/|down", P(None, "tp", "fsdp"))]
    },
    "rows are planned as columns": {"rules": [("/o/|down", P(None, "tp", "fsdp"))]},
    "nothing is donated": {"wrong": "not donated"},
    "an average of parameters is whole": {"told": "average", "average": P()},
    # These look wrong.
    **faults("results are not constrained", "the batch comes in whole"),
    "guesses of gathered logits": {"told": "guesses"},
}  # fmt: skip


# nnx


class _Block(nnx.Module):
    """A layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm1, self.norm2 = (nnx.RMSNorm(_WIDTH, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(_WIDTH, _WIDTH) for _ in range(4))
        self.up, self.down = linear(_WIDTH, _INNER), linear(_INNER, _WIDTH)

    def __call__(self, x: Any, case: Case) -> Any:
        y = self.norm1(x)
        q, k, v = (case.cut(f(y), "wide") for f in (self.q, self.k, self.v))
        q, k, v = (case.cut(a.reshape(*a.shape[:2], _HEADS, -1), "heads") for a in (q, k, v))
        x = case.cut(x + self.o(attend(case, q, k, v).reshape(y.shape)), "residual")
        y = case.cut(nnx.gelu(self.up(self.norm2(x))), "hidden")
        return case.cut(x + self.down(y), "residual")


class _Model(nnx.Module):
    """A table, layers one by one, and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(_WORDS, _WIDTH, rngs=rngs)
        self.layers = nnx.List([_Block(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(_WIDTH, rngs=rngs)
        self.head = nnx.Linear(_WIDTH, _WORDS, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Any, case: Case) -> Any:
        x = case.cut(case.cut(self.table.embedding[...], "table")[tokens], "residual")
        for layer in self.layers:

            def apply(layer: Any, x: Any) -> Any:
                return layer(x, case)

            x = (apply if case.has("no remat") else nnx.remat(apply))(layer, x)
        return case.cut(self.head(self.norm(x)), "logits")


def _nnx(wrong: Any = (), rules: Any = (), told: str = "", **places: Any) -> Built:
    """Train it with nnx.Optimizer and nnx.jit."""
    case = case_of({"fsdp": 4, "tp": 2}, {**_PLACES, "wide": _PARTS}, places, wrong, told)

    def create() -> Any:
        model = _Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(create)
    rules = [
        *rules,
        ("scale", P()),
        ("embedding", P("tp", "fsdp")),
        ("head|/([qkv]|up)/kernel", P("fsdp", "tp")),
        ("/(o|down)/kernel", P("tp", "fsdp")),
    ]
    plan = sr.plan(nnx.state(model), sr.Rules(rules, sr.dialects.NNX), case.mesh)
    plans = plan, plan.for_optimizer(nnx.state(optimizer))
    is_whole = case.has("the optimizer's state comes in whole")
    for part, planned in zip((model, optimizer), plans, strict=True):
        shardings = planned.shardings()
        if is_whole and part is optimizer:
            shardings = jax.tree.map(lambda _: NamedSharding(case.mesh, P()), shardings)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), nnx.state(part))
        nnx.update(part, jax.device_put(zeros, shardings))

    def whole(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(case.mesh, P()))

    def loss(model: Any, batch: Any) -> Any:
        scores = model(batch["tokens"], case)
        value = entropy(scores, batch["targets"])
        if case.has("parameters are gathered for a penalty"):
            params = jax.tree.leaves(nnx.state(model, nnx.Param))
            value += 1e-4 * sum((whole(p) ** 2).sum() for p in params)
        return value, whole(scores) if told == "gathered" else case.keep(scores, "logits")

    def train(model: Any, optimizer: Any, batch: Any) -> Any:
        (value, kept), grads = nnx.value_and_grad(loss, has_aux=True)(model, batch)
        optimizer.update(model, case.cut_all(grads, "gradients"))
        return value, kept

    states = tuple(nnx.StateSharding(planned.shardings()) for planned in plans)
    is_free = is_whole or case.has("no shardings for jit")
    donated = () if case.has("not donated") else (0, 1)
    donated = (0,) if case.has("the model alone is donated") else donated
    options = {} if is_free else {"in_shardings": (*states, None)}
    jitted = nnx.jit(train, donate_argnums=donated, **options)
    compiled = jitted.lower(model, optimizer, _texts(case, 2 * _LENGTH)).compile()
    specs = dict.fromkeys(("tokens", "targets"), case.place("batch"))
    case.asked.add("gathered")
    return case.built(compiled, (*plans, specs), None)


_NNX_FREE: Final = {**free(_PLACES), "wide": None}
_NNX_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "parameters are gathered for a penalty", "the optimizer's state comes in whole", "not donated",
        "the model alone is donated", "no remat", "the residual is whole", "hidden is whole", "logits are whole",
        "logits are whole over the batch", "logits are returned", "logits are gathered and returned",
        "gradients are whole",
    ),
    "no constraints": _NNX_FREE,
    "no constraints, and the batch whole": {**_NNX_FREE, "batch": P()},
    "the residual is cut over its width": {"residual": P(None, None, "fsdp")},
    "hidden is whole over tp": {"hidden": P("fsdp")},
    "heads are cut over their size": {"heads": P("fsdp", None, None, "tp")},
    "heads are whole over the batch": dict.fromkeys(("heads", "wide"), P(None, None, "tp")),
    "the table is cut over its width, and looked up so": {
        "rules": [("embedding", P(None, ("fsdp", "tp")))], "table": None,
    },
    "all kernels are columns": {"rules": [("/(o|down)/kernel", P("fsdp", "tp"))]},
    "columns and rows are swapped": {
        "rules": [("/([qkv]|up)/kernel", P("tp", "fsdp")), ("/(o|down)/kernel", P("fsdp", "tp"))],
    },
    "no shardings for jit, and no constraints": {**_NNX_FREE, "wrong": "no shardings for jit"},
    # These look wrong.
    **faults("the batch comes in whole"),
    "the head is cut over words alone": {"rules": [("head", P(None, ("fsdp", "tp")))]},
}  # fmt: skip


# linen

_LOGICAL: Final = {
    "batch": ("data", "fsdp"), "length": None, "heads": "tp", "mlp": "tp", "vocab": "tp", "embed": "fsdp",
    "features": None, "keys": None, "layers": None, "words": "tp",
}  # fmt: skip


class _LinenLayer(nn.Module):
    """A layer whose arrays have names of axes."""

    constrain: Any

    @nn.compact
    def __call__(self, x: Any, _: Any) -> tuple[Any, None]:
        name, heads = self.constrain or (lambda x, names: x), (_HEADS, _WIDTH // _HEADS)

        def dense(size: Any, names: tuple[str, ...], label: str, axis: Any = -1) -> Any:
            kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
            return nn.DenseGeneral(size, axis, use_bias=False, kernel_init=kernel, name=label)

        y = nn.RMSNorm()(x)
        q, k, v = (
            name(dense(heads, ("embed", "heads", "keys"), n)(y), ("batch", "length", "heads", "keys"))
            for n in "qkv"
        )  # fmt: skip
        y = attend(Case(None, {}), q, k, v)
        y = dense(_WIDTH, ("heads", "keys", "embed"), "o", (-2, -1))(y)
        x = name(x + y, ("batch", "length", "features"))
        y = nn.gelu(dense(_INNER, ("embed", "mlp"), "up")(nn.RMSNorm()(x)))
        y = name(y, ("batch", "length", "mlp"))
        y = dense(_WIDTH, ("mlp", "embed"), "down")(y)
        return name(x + y, ("batch", "length", "features")), None


class _Linen(nn.Module):
    """A table, scanned layers and a head."""

    case: Case

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        case = self.case
        mesh = None if case.has("constraints know no mesh") else case.mesh

        def named(part: str) -> Any:
            if case.has("no constraints at all") or case.has(f"{part} no constraints"):
                return None
            return partial(nn.with_logical_constraint, mesh=mesh)

        table = nn.with_logical_partitioning(nn.initializers.normal(), ("words", "embed"))
        embed = nn.Embed(_WORDS, _WIDTH, embedding_init=table, name="table")
        x = embed(tokens)
        if name := named("the table and what is looked up have"):
            x = name(embed.embedding, ("vocab", "features"))[tokens]
            x = name(x, ("batch", "length", "features"))
        block: Any = _LinenLayer if case.has("no remat") else nn.remat(_LinenLayer, prevent_cse=False)
        x, _ = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(named("layers have"), name="layers")(x, None)
        kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "vocab"))
        x = nn.Dense(_WORDS, use_bias=False, kernel_init=kernel, name="head")(nn.RMSNorm()(x))
        name = named("logits have")
        return name(x, ("batch", "length", "vocab")) if name else x


def _boxed(case: Case) -> Any:
    texts = jax.ShapeDtypeStruct((64, _LENGTH), "int32")
    return jax.eval_shape(_Linen(case).init, jax.random.key(0), texts)["params"]


def _linen_rules(edits: Any) -> list[tuple[str, P]]:
    """Return a rule for each parameter, by the names of its axes."""
    case = case_of({"data": 1}, {}, {}, "no constraints at all")
    names = nn.get_partition_spec(_boxed(case))
    specs = nn.logical_to_mesh(names, list({**_LOGICAL, **dict(edits)}.items()))
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, P))
    return [(f"^{jax.tree_util.keystr(path, simple=True, separator='/')}$", spec) for path, spec in leaves]


def _axes(case: Case, right: Any) -> dict[str, Any]:
    """Return the mesh axes of activations by name, as a case has them."""
    return {name: case.place(name) if name in case.places else axis for name, axis in right.items()}


def _linen_loss(case: Case, params: Any, batch: Any) -> Any:
    rules = list({**_axes(case, _LOGICAL), "batch": case.place("rows")}.items())
    with nn.logical_axis_rules(rules):
        scores = _Linen(case).apply({"params": params}, batch["tokens"])
    chances = case.cut(jax.nn.softmax(scores), "chances")
    return entropy(scores, batch["targets"]), {"logits": scores, "chances": chances}


_LINEN: Final = Model(
    mesh={"data": 2, "fsdp": 2, "tp": 2},
    shapes=lambda case: nn.unbox(_boxed(case)),
    rules=_linen_rules,
    places={"batch": P(("data", "fsdp")), "rows": ("data", "fsdp"), "chances": P("data")},
    batch=dict.fromkeys(("tokens", "targets"), (64, _LENGTH)),
    loss=_linen_loss,
    optimizer=lambda case, plan: optax.lion(1e-4),
)
_LINEN_FAULTS: Final[dict[str, Fault]] = {
    **faults(
        "constraints know no mesh", "the table and what is looked up have no constraints",
        "layers have no constraints", "not donated", "no remat", "gradients are whole", "logits are returned",
    ),
    "no constraints at all, and the batch whole": {"wrong": "no constraints at all", "batch": P()},
    "logits have no constraint": {"wrong": "logits have no constraints"},
    "no rule for the batch": {"rows": None},
    "the batch by data alone": {"rows": "data"},
    "the batch by fsdp alone": {"rows": "fsdp"},
    "the batch by data alone, and it comes in so": {"rows": "data", "batch": P("data")},
    "no rule for heads": {"heads": None},
    "no rule for the mlp": {"mlp": None},
    "no rule for the vocabulary": {"vocab": None},
    "one table of rules: features are cut as the parameters": {"rows": "data", "features": "fsdp"},
    "features are cut over tp": {"features": "tp"},
    "the sequence is cut over tp, and heads too": {"length": "tp", "heads": None, "mlp": None, "vocab": None},
    "parameters' mlp by fsdp, their width by tp": {"rules": [("mlp", "fsdp"), ("embed", "tp")]},
    "parameters' heads are whole": {"rules": [("heads", None)]},
    "parameters' layers are cut": {"rules": [("layers", "data"), ("embed", "fsdp")]},
    "chances are gathered and returned": {"told": "chances"},
    # These look wrong.
    **faults("no out_shardings", "gradients are clipped by their norm", "the batch comes in whole"),
    "the table is whole over tp": {"rules": [("words", None)]},
}  # fmt: skip

STEPS: Final = (
    Step("equinox with its own jit", _equinox, _EQUINOX_FAULTS, "tuned"),
    Step("linen with logical axes", _LINEN, _LINEN_FAULTS, "tuned"),
    Step("nnx with its own jit", _nnx, _NNX_FAULTS, "tuned"),
)
