"""Steps as teams write them, for 8 devices: what each sends by its jaxpr is compared with its HLO.

Each function takes a mesh and returns a jitted step and its arguments, the plan first. Sizes are
small, float32, and such that each array's shape tells what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

BATCH, LENGTH, WIDTH, HEADS, SIZE, HIDDEN, LAYERS = 16, 64, 96, 4, 40, 256, 2
Step = tuple[Any, tuple[Any, ...]]
Rules = list[tuple[str, Any]]


def mesh_of(sizes: Mapping[str, int]) -> Mesh:
    """A mesh of the first devices."""
    count = math.prod(sizes.values())
    return Mesh(np.array(jax.devices()[:count]).reshape(*sizes.values()), tuple(sizes))


def array(mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype: str = "float32") -> Any:
    """An abstract array that is cut by a spec."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def leaf(*shape: int, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def on(mesh: Mesh, x: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def manual(mesh: Mesh, function: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


LAYER = {
    **{name: leaf(LAYERS, WIDTH, HEADS, SIZE) for name in "qkv"},
    "o": leaf(LAYERS, HEADS, SIZE, WIDTH),
    "up": leaf(LAYERS, WIDTH, HIDDEN),
    "down": leaf(LAYERS, HIDDEN, WIDTH),
}
RULES: Rules = [
    ("[qkv]$", (None, "fsdp", "tp")),
    ("o$", (None, "tp", None, "fsdp")),
    ("up", (None, "fsdp", "tp")),
    ("down", (None, "tp", "fsdp")),
]


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(q.shape[-1])
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)


def layer_of(cut: Callable[..., Any], attend: Any = attention) -> Any:
    """A layer of attention and an MLP; `cut` constrains (array, spec of what is behind the batch)."""

    def layer(x: Any, w: Any) -> Any:
        x = cut(x)
        q, k, v = (cut(jnp.einsum("btd,dhk->bthk", x, w[n]), "tp") for n in "qkv")
        x = cut(x + cut(jnp.einsum("bthk,hkd->btd", attend(q, k, v), w["o"])))
        hidden = cut(jax.nn.relu(x @ w["up"]), "tp")
        return cut(x + cut(hidden @ w["down"])), None

    return layer


def cutter(mesh: Mesh, batch: Any, length: Any = None) -> Callable[..., Any]:
    def cut(x: Any, *rest: Any) -> Any:
        rest = tuple(axis if axis in mesh.axis_names else None for axis in rest)
        return on(mesh, x, batch, length, *rest)

    return cut


def trained(mesh: Mesh, plan: sr.Plan, loss: Any, *args: Any, update: Any = None) -> Step:
    """A step of gradient descent, or of another update, that gives the parameters their cuts."""
    update = update or (lambda p, g: p - 0.1 * g)

    def step(params: Any, *args: Any) -> Any:
        return jax.tree.map(update, params, jax.grad(loss)(params, *args))

    return jax.jit(step, donate_argnums=0, out_shardings=plan.shardings()), (plan, *args)


def mean_square(layer: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    return loss


def ring(mesh: Mesh) -> Step:
    """Context parallel: keys and values go round a ring, along the sequence."""
    count = mesh.shape["sp"]
    pairs = [(i, (i + 1) % count) for i in range(count)]

    def around(q: Any, k: Any, v: Any) -> Any:
        def turn(carry: Any, _: Any) -> Any:
            k, v, made, top, total = carry
            scores = jnp.einsum("bqhk,bshk->bhqs", q, k)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            scale = jnp.exp(top - new_top)
            made = made * scale[..., None] + jnp.einsum("bhqs,bshk->bhqk", weights, v)
            total = total * scale + weights.sum(-1)
            k, v = (lax.ppermute(x, "sp", pairs) for x in (k, v))
            return (k, v, made, new_top, total), None

        rows, length, heads, size = q.shape
        zeros = jnp.zeros((rows, heads, length))
        start = (k, v, jnp.zeros((rows, heads, length, size)), zeros - 1e30, zeros)
        (_, _, made, _, total), _ = lax.scan(turn, start, None, length=count)
        return jnp.moveaxis(made / total[..., None], 1, 2)

    spec = P("fsdp", "sp")
    layer = layer_of(cutter(mesh, "fsdp", "sp"), manual(mesh, around, (spec,) * 3, spec))
    plan = sr.plan(LAYER, RULES, mesh)
    x = array(mesh, (BATCH, LENGTH, WIDTH), "fsdp", "sp")
    return trained(mesh, plan, mean_square(layer), x)


def heads_exchanged(mesh: Mesh) -> Step:
    """Context parallel: an all-to-all gives each device whole sequences of its heads, and back."""

    def exchange(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (lax.all_to_all(x, "sp", 2, 1, tiled=True) for x in (q, k, v))
        return lax.all_to_all(attention(q, k, v), "sp", 1, 2, tiled=True)

    spec = P("fsdp", "sp")
    layer = layer_of(cutter(mesh, "fsdp", "sp"), manual(mesh, exchange, (spec,) * 3, spec))
    plan = sr.plan(LAYER, RULES, mesh)
    x = array(mesh, (BATCH, LENGTH, WIDTH), "fsdp", "sp")
    return trained(mesh, plan, mean_square(layer), x)


def keys_gathered(mesh: Mesh) -> Step:
    """Context parallel without code by device: keys and values are whole, queries are cut."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        k, v = (on(mesh, x, "fsdp") for x in (k, v))
        return on(mesh, attention(q, k, v), "fsdp", "sp")

    layer = layer_of(cutter(mesh, "fsdp", "sp"), attend)
    plan = sr.plan(LAYER, RULES, mesh)
    x = array(mesh, (BATCH, LENGTH, WIDTH), "fsdp", "sp")
    return trained(mesh, plan, mean_square(layer), x)


def pipeline(mesh: Mesh, micro: int = 8) -> Step:
    """Stages of layers, in code by device; micro-batches go from stage to stage."""
    stages = mesh.shape["pp"]
    pairs = [(i, i + 1) for i in range(stages - 1)]
    tree = {"up": leaf(stages, WIDTH, HIDDEN), "down": leaf(stages, HIDDEN, WIDTH)}
    plan = sr.plan(tree, [(".*", "pp")], mesh)

    def stages_of(params: Any, x: Any) -> Any:
        w = jax.tree.map(lambda p: p[0], params)
        place = lax.axis_index("pp")
        batches = x.reshape(micro, -1, LENGTH, WIDTH)

        def turn(carry: Any, i: Any) -> Any:
            state, made = carry
            first = lax.dynamic_index_in_dim(batches, jnp.minimum(i, micro - 1), 0, False)
            state = jnp.where(place == 0, first, state)
            state = state + jax.nn.relu(state @ w["up"]) @ w["down"]
            at = jnp.maximum(i - stages + 1, 0)
            made = lax.dynamic_update_index_in_dim(made, state, at, 0)
            return (lax.ppermute(state, "pp", pairs), made), None

        start = (jnp.zeros_like(batches[0]), jnp.zeros_like(batches))
        (_, made), _ = lax.scan(turn, start, jnp.arange(micro + stages - 1))
        is_last = place == stages - 1
        return lax.psum(jnp.where(is_last, jnp.mean(made**2), 0.0), "pp")[None]

    run = manual(mesh, stages_of, (P("pp"), P("data")), P("data"))

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(run(params, x))

    x = array(mesh, (8 * BATCH, LENGTH, WIDTH), "data")
    return trained(mesh, plan, loss, x)


def accumulated(mesh: Mesh, micro: int = 4) -> Step:
    """Gradients of micro-batches are added up, each cut as its parameter."""
    plan = sr.plan(LAYER, RULES, mesh)
    whole = mean_square(layer_of(cutter(mesh, "fsdp")))

    def loss(params: Any, x: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            grads = jax.grad(whole)(params, x)
            grads = jax.tree.map(lax.with_sharding_constraint, grads, plan.shardings())
            return jax.tree.map(jnp.add, total, grads), None

        batches = on(mesh, x.reshape(micro, -1, LENGTH, WIDTH), None, "fsdp")
        return lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]

    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, loss(params, x))

    x = array(mesh, (4 * BATCH, LENGTH, WIDTH), "fsdp")
    return jax.jit(step, donate_argnums=0, out_shardings=plan.shardings()), (plan, x)


def muon(mesh: Mesh) -> Step:
    """Newton and Schulz's iterations on the gradients of matrices, as they are cut."""
    tree = {"up": LAYER["up"], "down": LAYER["down"]}
    plan = sr.plan(tree, RULES, mesh)

    def layer(x: Any, w: Any) -> Any:
        x = on(mesh, x, "fsdp")
        hidden = on(mesh, jax.nn.relu(x @ w["up"]), "fsdp", None, "tp")
        return on(mesh, x + on(mesh, hidden @ w["down"], "fsdp"), "fsdp"), None

    def update(p: Any, g: Any) -> Any:
        turned = g.shape[-2] > g.shape[-1]
        x = jnp.swapaxes(g, -1, -2) if turned else g
        x = x / (jnp.sqrt(jnp.sum(x * x, (-1, -2), keepdims=True)) + 1e-7)
        for _ in range(3):
            a = x @ jnp.swapaxes(x, -1, -2)
            b = -4.775 * a + 2.0315 * a @ a
            x = 3.4445 * x + b @ x
        return p - 0.1 * (jnp.swapaxes(x, -1, -2) if turned else x)

    x = array(mesh, (BATCH, LENGTH, WIDTH), "fsdp")
    return trained(mesh, plan, mean_square(layer), x, update=update)


def lora(mesh: Mesh, dtype: str = "float32") -> Step:
    """Adapters are trained, the base is frozen; of int8 it has scales."""
    rank = 8
    base = {
        "up": leaf(LAYERS, WIDTH, HIDDEN, dtype=dtype),
        "down": leaf(LAYERS, HIDDEN, WIDTH, dtype=dtype),
    }
    scales = {"up": leaf(LAYERS, 1, HIDDEN), "down": leaf(LAYERS, 1, WIDTH)}
    adapters = {
        "up": {"a": leaf(LAYERS, WIDTH, rank), "b": leaf(LAYERS, rank, HIDDEN)},
        "down": {"a": leaf(LAYERS, HIDDEN, rank), "b": leaf(LAYERS, rank, WIDTH)},
    }
    frozen = {"base": base, "scales": scales} if dtype == "int8" else {"base": base}
    rules = [
        ("scales/up", (None, None, "tp")),
        ("scales/down", (None, None, None)),
        ("up/a", (None, "fsdp", None)),
        ("up/b", (None, None, "tp")),
        ("down/a", (None, "tp", None)),
        ("down/b", (None, None, "fsdp")),
        *RULES,
    ]
    plan = sr.plan({"frozen": frozen, "adapters": adapters}, rules, mesh)
    held = plan.shardings()["adapters"]

    def product(x: Any, w: Any, name: str) -> Any:
        kernel = w["frozen"]["base"][name]
        if "scales" in w["frozen"]:
            kernel = kernel.astype("float32") * w["frozen"]["scales"][name]
        adapter = w["adapters"][name]
        return x @ kernel + (x @ adapter["a"]) @ adapter["b"]

    def layer(x: Any, w: Any) -> Any:
        hidden = on(mesh, jax.nn.relu(product(x, w, "up")), "fsdp", None, "tp")
        return on(mesh, x + on(mesh, product(hidden, w, "down"), "fsdp"), "fsdp"), None

    def loss(adapters: Any, frozen: Any, x: Any) -> Any:
        params = {"frozen": frozen, "adapters": adapters}
        return jnp.mean(lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params["adapters"], params["frozen"], x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params["adapters"], grads)

    x = array(mesh, (BATCH, LENGTH, WIDTH), "fsdp")
    return jax.jit(step, out_shardings=held), (plan, x)


def lora_int8(mesh: Mesh) -> Step:
    return lora(mesh, "int8")


def masters(mesh: Mesh, dtype: str = "float16") -> Step:
    """Masters of float32, which are cast before they are used, and so gathered in 16 bits."""
    plan = sr.plan(LAYER, RULES, mesh)
    layer = layer_of(cutter(mesh, "fsdp"))

    def cast(x: Any, w: Any) -> Any:
        return layer(x, jax.tree.map(lambda p: p.astype(dtype), w))

    x = array(mesh, (BATCH, LENGTH, WIDTH), "fsdp", dtype=dtype)
    return trained(mesh, plan, mean_square(cast), x)


def zero1(mesh: Mesh) -> Step:
    """Adam, whose moments are cut by data while the parameters are whole."""
    state = {"params": LAYER, "m": LAYER, "v": LAYER}
    plan = sr.plan(state, [("params", ()), (".*", (None, "data"))], mesh)
    held = plan.shardings()
    loss = mean_square(layer_of(cutter(mesh, "data")))

    def step(state: Any, x: Any) -> Any:
        grads = jax.grad(loss)(state["params"], x)
        grads = jax.tree.map(lax.with_sharding_constraint, grads, held["m"])
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["v"], grads)
        params = jax.tree.map(
            lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-8), state["params"], m, v
        )
        return {"params": params, "m": m, "v": v}

    x = array(mesh, (BATCH, LENGTH, WIDTH), "data")
    return jax.jit(step, donate_argnums=0, out_shardings=held), (plan, x)


def experts(mesh: Mesh, count: int = 8) -> Step:
    """Tokens go to their experts and back by all-to-all, in code by device."""
    tree = {
        "router": leaf(LAYERS, WIDTH, count),
        "up": leaf(LAYERS, count, WIDTH, HIDDEN),
        "down": leaf(LAYERS, count, HIDDEN, WIDTH),
    }
    rules = [
        ("router", ()),
        ("up", (None, "ep", "fsdp")),
        ("down", (None, "ep", None, "fsdp")),
    ]
    plan = sr.plan(tree, rules, mesh)
    batch = ("fsdp", "ep")

    def of_device(x: Any, router: Any, up: Any, down: Any) -> Any:
        tokens = x.reshape(-1, WIDTH)
        room = 2 * len(tokens) // count
        chances = jax.nn.softmax(tokens @ router)
        weight, chosen = lax.top_k(chances, 1)
        mask = jax.nn.one_hot(chosen[:, 0], count)
        place = (jnp.cumsum(mask, 0) * mask - 1).astype("int32")
        dispatch = jax.nn.one_hot(place, room)
        sent = jnp.einsum("tec,td->ecd", dispatch, tokens)
        sent = lax.all_to_all(sent, "ep", 0, 1, tiled=True)
        made = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", sent, up)), down)
        back = lax.all_to_all(made, "ep", 1, 0, tiled=True)
        return (jnp.einsum("tec,ecd->td", dispatch, back) * weight).reshape(x.shape)

    specs = (P(batch), P(), P("ep"), P("ep"))
    run = manual(mesh, of_device, specs, P(batch))

    def layer(x: Any, w: Any) -> Any:
        return on(mesh, x + run(x, w["router"], w["up"], w["down"]), batch), None

    x = array(mesh, (BATCH, LENGTH, WIDTH), batch)
    return trained(mesh, plan, mean_square(layer), x)


def decode(mesh: Mesh, room: int = 128) -> Step:
    """One token for each sequence, with int8 weights and a cache of keys and values."""
    tree = jax.tree.map(lambda x: leaf(*x.shape, dtype="int8"), LAYER)
    scales = jax.tree.map(lambda x: leaf(*x.shape[:-1], 1), LAYER)
    plan = sr.plan(
        {"kernels": tree, "scales": scales},
        [
            ("scales/o", (None, "tp")),
            ("scales/[qkv]", (None, None, "tp")),
            ("scales/down", (None, "tp")),
            ("scales/up", ()),
            ("[qkv]$", (None, None, "tp")),
            ("o$", (None, "tp")),
            ("up", (None, None, "tp")),
            ("down", (None, "tp")),
        ],
        mesh,
    )
    cache = (array(mesh, (LAYERS, BATCH, room, HEADS, SIZE), None, "data", None, "tp"),) * 2

    def step(params: Any, cache: Any, x: Any, place: Any) -> Any:
        def layer(x: Any, xs: Any) -> Any:
            w, keys, values = xs
            w = jax.tree.map(lambda k, s: k.astype("float32") * s, w["kernels"], w["scales"])
            q, k, v = (jnp.einsum("bd,dhk->bhk", x, w[n]) for n in "qkv")
            keys = lax.dynamic_update_slice(keys, k[:, None], (0, place, 0, 0))
            values = lax.dynamic_update_slice(values, v[:, None], (0, place, 0, 0))
            scores = jnp.einsum("bhk,bthk->bht", q, keys)
            scores = jax.nn.softmax(jnp.where(jnp.arange(room) <= place, scores, -1e30))
            x = x + jnp.einsum("bhk,hkd->bd", jnp.einsum("bht,bthk->bhk", scores, values), w["o"])
            return x + jax.nn.relu(x @ w["up"]) @ w["down"], (keys, values)

        return lax.scan(layer, x, (params, *cache))

    x = array(mesh, (BATCH, WIDTH), "data")
    out = (x.sharding, jax.tree.map(lambda c: c.sharding, cache))
    jitted = jax.jit(step, donate_argnums=1, out_shardings=out)
    return jitted, (plan, cache, x, jax.ShapeDtypeStruct((), "int32"))


def uneven(mesh: Mesh, heads: int = 6) -> Step:
    """6 heads, which 4 devices cannot share evenly: the kernels are cut inside a head."""
    tree = {
        **{name: leaf(LAYERS, WIDTH, heads * SIZE) for name in "qkv"},
        "o": leaf(LAYERS, heads * SIZE, WIDTH),
    }
    plan = sr.plan(tree, [("[qkv]", (None, "fsdp", "tp")), ("o", (None, "tp", "fsdp"))], mesh)

    def layer(x: Any, w: Any) -> Any:
        x = on(mesh, x, "fsdp")
        q, k, v = ((x @ w[n]).reshape(*x.shape[:2], heads, SIZE) for n in "qkv")
        mixed = attention(q, k, v).reshape(*x.shape[:2], -1)
        return on(mesh, x + on(mesh, mixed @ w["o"], "fsdp"), "fsdp"), None

    x = array(mesh, (BATCH, LENGTH, WIDTH), "fsdp")
    return trained(mesh, plan, mean_square(layer), x)


def grouped(mesh: Mesh, kv_heads: int = 2, group: int = 4) -> Step:
    """Fewer heads of keys and values than devices: all kernels are cut alike."""
    tree = {
        "q": leaf(LAYERS, WIDTH, kv_heads * group * SIZE),
        "k": leaf(LAYERS, WIDTH, kv_heads * SIZE),
        "v": leaf(LAYERS, WIDTH, kv_heads * SIZE),
        "o": leaf(LAYERS, kv_heads * group * SIZE, WIDTH),
    }
    plan = sr.plan(tree, [("[qkv]", (None, "fsdp", "tp")), ("o", (None, "tp", "fsdp"))], mesh)

    def layer(x: Any, w: Any) -> Any:
        x = on(mesh, x, "fsdp")
        q = (x @ w["q"]).reshape(*x.shape[:2], kv_heads, group, SIZE)
        k, v = ((x @ w[n]).reshape(*x.shape[:2], kv_heads, SIZE) for n in "kv")
        chances = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k))
        mixed = jnp.einsum("bkgts,bskd->btkgd", chances, v).reshape(*x.shape[:2], -1)
        return on(mesh, x + on(mesh, mixed @ w["o"], "fsdp"), "fsdp"), None

    x = array(mesh, (BATCH, LENGTH, WIDTH), "fsdp")
    return trained(mesh, plan, mean_square(layer), x)


class Case(NamedTuple):
    """A step on a mesh."""

    name: str
    step: Callable[[Mesh], Step]
    sizes: dict[str, int]


CASES = [
    Case("ring attention", ring, {"fsdp": 2, "sp": 4, "tp": 1}),
    Case("heads exchanged", heads_exchanged, {"fsdp": 2, "sp": 4, "tp": 1}),
    Case("keys gathered", keys_gathered, {"fsdp": 2, "sp": 4, "tp": 1}),
    Case("pipeline", pipeline, {"data": 2, "pp": 4}),
    Case("accumulated", accumulated, {"fsdp": 4, "tp": 2}),
    Case("Muon", muon, {"fsdp": 4, "tp": 2}),
    Case("LoRA", lora, {"fsdp": 4, "tp": 2}),
    Case("LoRA on int8", lora_int8, {"fsdp": 4, "tp": 2}),
    Case("masters cast", masters, {"fsdp": 4, "tp": 2}),
    Case("ZeRO-1", zero1, {"data": 8}),
    Case("experts", experts, {"fsdp": 2, "ep": 4}),
    Case("decode", decode, {"data": 2, "tp": 4}),
    Case("uneven heads", uneven, {"fsdp": 2, "tp": 4}),
    Case("fewer heads of keys", grouped, {"fsdp": 2, "tp": 4}),
    Case("fewer heads of keys", grouped, {"fsdp": 1, "tp": 8}),
]
