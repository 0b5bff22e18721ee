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
from tests.steps.model import Case, Model, abstract, case_of
from tests.steps.table import Built, Row, Rules

_WORDS: Final = 1024
_WIDTH: Final = 256
_INNER: Final = 1024
_HEADS: Final = 8
_LENGTH: Final = 64


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


def _equinox(row: Row, rules: Rules = (), **fault: Any) -> Built:
    """Train it with filter_jit and Adam."""
    case = case_of(row, **fault)
    rules, told = [*rules, *row.rules], case.told
    shapes = eqx.filter_eval_shape(_Decoder, jax.random.key(0))
    arrays = eqx.filter(shapes, lambda leaf: hasattr(leaf, "shape"))
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


def _nnx(row: Row, rules: Rules = (), **fault: Any) -> Built:
    """Train it with nnx.Optimizer and nnx.jit."""
    case = case_of(row, **fault)
    rules, told = [*rules, *row.rules], case.told

    def create() -> Any:
        model = _Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(create)
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


# linen


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


def _linen_rules(own: Rules, edits: Rules) -> Rules:
    """Return a rule for each parameter, by the names of its axes."""
    case = Case(None, {}, ("no constraints at all",))
    names = nn.get_partition_spec(_boxed(case))
    specs = nn.logical_to_mesh(names, [(name, _axes(spec)) for name, spec in (dict(own) | dict(edits)).items()])
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, P))
    return [(f"^{jax.tree_util.keystr(path, simple=True, separator='/')}$", spec) for path, spec in leaves]


def _axes(spec: P | None) -> Any:
    """Return the mesh axes of a name."""
    return spec and spec[0]


def _linen_loss(case: Case, params: Any, batch: Any) -> Any:
    names = ("length", "heads", "mlp", "vocab", "embed", "features", "keys", "layers", "words")
    rules = [("batch", _axes(case.place("rows"))), *((name, _axes(case.place(name))) for name in names)]
    with nn.logical_axis_rules(rules):
        scores = _Linen(case).apply({"params": params}, batch["tokens"])
    chances = case.cut(jax.nn.softmax(scores), "chances")
    return entropy(scores, batch["targets"]), {"logits": scores, "chances": chances}


STEPS: Final = {
    "equinox with its own jit": _equinox,
    "linen with logical axes": Model(
        _linen_loss, lambda case: nn.unbox(_boxed(case)), _linen_rules, optimizer=lambda case, plan: optax.lion(1e-4)
    ),
    "nnx with its own jit": _nnx,
}
