"""Steps whose executables have the collectives that HLO knows, in plain JAX on abstract arrays.

Each function takes a mesh and returns a jitted function and its abstract arguments. They need no
library but JAX.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Step = tuple[Any, tuple[Any, ...]]


def train(
    mesh: Mesh,
    constrained: bool = True,
    layers: int = 3,
    width: int = 512,
    hidden: int = 2048,
    heads: int = 8,
    head: int = 64,
    vocab: int = 4096,
    batch: int = 16,
    length: int = 256,
) -> Step:
    """Adam on a transformer with scanned and recomputed layers, over fsdp and tp; donated."""

    def array(dtype: str, shape: tuple[int, ...], *spec: Any) -> Any:
        return _abstract(mesh, shape, dtype, *spec)

    def weight(shape: tuple[int, ...], *spec: Any) -> Any:
        return array("float32", (layers, *shape), None, *spec)

    def constrain(x: Any, *spec: Any) -> Any:
        return _constrain(mesh, x, *spec) if constrained else x

    params = {
        "embed": array("float32", (vocab, width), "tp", "fsdp"),
        "head": array("float32", (width, vocab), "fsdp", "tp"),
        "norm": array("float32", (width,)),
        "layers": {
            "norm1": weight((width,)),
            "norm2": weight((width,)),
            **{n: weight((width, heads, head), "fsdp", "tp", None) for n in ("q", "k", "v")},
            "o": weight((heads, head, width), "tp", None, "fsdp"),
            **{n: weight((width, hidden), "fsdp", "tp") for n in ("gate", "up")},
            "down": weight((hidden, width), "tp", "fsdp"),
        },
    }
    state = {"params": params, "m": params, "v": params, "count": array("int32", ())}
    ids = array("int32", (batch, length), "fsdp")

    def layer(h: Any, p: Any) -> Any:
        p = jax.tree.map(lambda w: w.astype("bfloat16"), p)
        x = _norm(h, p["norm1"])
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
        scores = jnp.einsum("bqhk,bshk->bhqs", q, k).astype("float32") / math.sqrt(head)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
        heads_out = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores).astype(h.dtype), v)
        h = constrain(h + jnp.einsum("bqhk,hkd->bqd", heads_out, p["o"]), "fsdp", None, None)
        x = _norm(h, p["norm2"])
        y = constrain(jax.nn.silu(x @ p["gate"]) * (x @ p["up"]), "fsdp", None, "tp")
        return constrain(h + y @ p["down"], "fsdp", None, None), None

    def loss(params: Any, read: Any, target: Any) -> Any:
        h = constrain(params["embed"].astype("bfloat16")[read], "fsdp", None, None)
        h, _ = jax.lax.scan(jax.checkpoint(layer), h, params["layers"])
        logits = _norm(h, params["norm"]) @ params["head"].astype("bfloat16")
        logits = constrain(logits, "fsdp", None, "tp").astype("float32")
        hit = jnp.where(jnp.arange(vocab) == target[..., None], logits, 0).sum(-1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - hit)

    def step(state: Any, read: Any, target: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], read, target)
        count = state["count"] + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["v"], grads)
        t = count.astype("float32")

        def updated(p: Any, m: Any, v: Any) -> Any:
            return p - 1e-3 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.95**t)) + 1e-8)

        return {
            "params": jax.tree.map(updated, state["params"], m, v),
            "m": m,
            "v": v,
            "count": count,
        }, value

    out = (_shardings(state), NamedSharding(mesh, P()))
    return jax.jit(step, donate_argnums=0, out_shardings=out), (state, ids, ids)


def mlp(mesh: Mesh, layers: int = 3, width: int = 2048, batch: int = 4096) -> Step:
    """Forward pass of square layers, weights and batch over fsdp."""
    weights = [_abstract(mesh, (width, width), "float32", "fsdp")] * layers

    def forward(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return x

    return jax.jit(forward), (weights, _abstract(mesh, (batch, width), "float32", "fsdp"))


def windowed(mesh: Mesh, layers: int = 2, width: int = 4096, hidden: int = 16384) -> Step:
    """Gradient step of scanned layers so large that gathers are loops of permutes; donated."""
    weights = (
        _abstract(mesh, (layers, width, hidden), "float32", None, "fsdp"),
        _abstract(mesh, (layers, hidden, width), "float32", None, None, "fsdp"),
    )

    def layer(h: Any, w: Any) -> Any:
        up, down = (x.astype("bfloat16") for x in w)
        y = _constrain(mesh, jax.nn.relu(h @ up), "fsdp", None)
        return _constrain(mesh, y @ down, "fsdp", None), None

    def loss(weights: Any, x: Any) -> Any:
        h, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
        return jnp.mean(h.astype("float32") ** 2)

    return _descent(loss, weights), (
        weights,
        _abstract(mesh, (8 * width, width), "bfloat16", "fsdp"),
    )


def sequence_parallel(mesh: Mesh, layers: int = 3, width: int = 2048, hidden: int = 8192) -> Step:
    """Forward pass of scanned layers, the residual stream cut by tp along the sequence."""
    weights = (
        _abstract(mesh, (layers, width, hidden), "bfloat16", None, None, "tp"),
        _abstract(mesh, (layers, hidden, width), "bfloat16", None, "tp"),
    )

    def layer(h: Any, w: Any) -> Any:
        y = _constrain(mesh, jax.nn.relu(h @ w[0]), "fsdp", None, "tp")
        return _constrain(mesh, y @ w[1], "fsdp", "tp", None), None

    def forward(weights: Any, x: Any) -> Any:
        return jax.lax.scan(layer, x, weights)[0]

    return jax.jit(forward), (weights, _abstract(mesh, (2, width, width), "bfloat16", "fsdp", "tp"))


def accumulate(mesh: Mesh, micro: int = 4, layers: int = 3, width: int = 512) -> Step:
    """Gradient step that reduces the gradients in each of its micro-batches; scans in a scan."""
    weights = (
        _abstract(mesh, (layers, width, 2 * width), "bfloat16", None, "fsdp"),
        _abstract(mesh, (layers, 2 * width, width), "bfloat16", None, None, "fsdp"),
    )

    def layer(h: Any, w: Any) -> Any:
        h = _constrain(mesh, h, "fsdp")
        return h + jax.nn.relu(h @ w[0]) @ w[1], None

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(layer, x, weights)[0].astype("float32") ** 2)

    def step(weights: Any, batches: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), batches)
        return jax.tree.map(lambda w, g: w - g, weights, total)

    batches = _abstract(mesh, (micro, width, width), "bfloat16", None, "fsdp")
    return jax.jit(step, donate_argnums=0, out_shardings=_shardings(weights)), (weights, batches)


def experts(mesh: Mesh, ragged: bool = False, width: int = 512, tokens: int = 2048) -> Step:
    """Experts over ep, tokens exchanged by all_to_all in shard_map, or by ragged_all_to_all."""
    count = mesh.shape["ep"]
    weights = {
        "router": _abstract(mesh, (width, count), "float32"),
        "up": _abstract(mesh, (count, width, 2 * width), "bfloat16", "ep"),
        "down": _abstract(mesh, (count, 2 * width, width), "bfloat16", "ep"),
    }
    x = _abstract(mesh, (tokens, width), "bfloat16", "ep")

    def exchanged(weights: Any, x: Any) -> Any:
        gate = jax.nn.softmax(x.astype("float32") @ weights["router"])
        expert = jnp.argmax(gate, -1)
        room = 2 * x.shape[0] // count
        place = jnp.cumsum(jax.nn.one_hot(expert, count, dtype="int32"), 0)
        place = place[jnp.arange(x.shape[0]), expert] - 1
        sent = jnp.zeros((count, room, width), x.dtype).at[expert, place].set(x, mode="drop")
        got = jax.lax.all_to_all(sent, "ep", 0, 1, tiled=True)
        y = jax.nn.relu(jnp.einsum("ecd,edf->ecf", got, weights["up"]))
        y = jnp.einsum("ecf,efd->ecd", y, weights["down"])
        back = jax.lax.all_to_all(y, "ep", 1, 0, tiled=True)
        back = back.at[expert, place].get(mode="fill", fill_value=0)
        return back * gate.max(-1, keepdims=True).astype(x.dtype)

    def ragged_exchanged(weights: Any, x: Any) -> Any:
        expert = jnp.argmax(x.astype("float32") @ weights["router"], -1)
        sizes = jnp.bincount(expert, length=count).astype("int32")
        matrix = jax.lax.all_gather(sizes, "ep")
        me = jax.lax.axis_index("ep")
        got = jax.lax.ragged_all_to_all(
            x[jnp.argsort(expert)],
            jnp.zeros((2 * x.shape[0], width), x.dtype),
            (jnp.cumsum(sizes) - sizes).astype("int32"),
            sizes,
            (jnp.cumsum(matrix, 0) - matrix)[me].astype("int32"),
            matrix[:, me],
            axis_name="ep",
        )
        return (jax.nn.relu(got @ weights["up"][0]) @ weights["down"][0])[: x.shape[0]] + x

    specs = ({"router": P(), "up": P("ep"), "down": P("ep")}, P("ep"))
    return _manual(mesh, ragged_exchanged if ragged else exchanged, specs, P("ep")), (weights, x)


def ring(mesh: Mesh, batch: int = 2, length: int = 2048, heads: int = 8, head: int = 128) -> Step:
    """Ring attention: keys and values go around sp in a scan."""
    count = mesh.shape["sp"]
    array = _abstract(mesh, (batch, length, heads, head), "bfloat16", None, "sp")

    def attention(q: Any, k: Any, v: Any) -> Any:
        pairs = [(i, (i + 1) % count) for i in range(count)]

        def turn(carry: Any, _: Any) -> Any:
            k, v, out, top, total = carry
            scores = jnp.einsum("bqhk,bshk->bhqs", q, k).astype("float32")
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            scale = jnp.exp(top - new_top)
            out = out * scale[..., None]
            out = out + jnp.einsum("bhqs,bshk->bhqk", weights.astype(v.dtype), v)
            total = total * scale + weights.sum(-1)
            k, v = (jax.lax.ppermute(x, "sp", pairs) for x in (k, v))
            return (k, v, out, new_top, total), None

        b, t, h, d = q.shape
        zeros = jnp.zeros((b, h, t))
        start = (k, v, jnp.zeros((b, h, t, d)), zeros - 1e30, zeros)
        (_, _, out, _, total), _ = jax.lax.scan(turn, start, None, length=count)
        return (out / total[..., None]).astype(q.dtype)

    specs = (P(None, "sp"),) * 3
    return _manual(mesh, attention, specs, P(None, None, "sp")), (array, array, array)


def branches(mesh: Mesh, width: int = 1024) -> Step:
    """Collectives in branches of switch and cond, in a while_loop of unknown length, in fori_loop."""

    def step(i: Any, x: Any) -> Any:
        def gathered(x: Any) -> Any:
            return jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)[: x.shape[0]] * 2

        y = jax.lax.switch(i, [lambda x: x, lambda x: jax.lax.psum(x, "tp"), gathered], x)
        y = jax.lax.cond(i > 5, lambda y: jax.lax.pmean(y @ y.T, "tp") @ y, lambda y: y * 3, y)
        y = jax.lax.while_loop(
            lambda y: jnp.max(y) > 1e-3, lambda y: jax.lax.psum(y * 0.1, "tp"), y
        )
        y = jax.lax.fori_loop(2, 9, lambda k, y: jax.lax.psum(y, "fsdp") * 0.25 + k, y)
        return jax.lax.psum_scatter(y, "fsdp", scatter_dimension=1, tiled=True)

    specs = (P(), P("fsdp", "tp"))
    arguments = (
        _abstract(mesh, (), "int32"),
        _abstract(mesh, (width, width), "float32", *specs[1]),
    )
    return _manual(mesh, step, specs, P("fsdp", "tp")), arguments


def decode(
    mesh: Mesh, layers: int = 4, width: int = 1024, batch: int = 16, room: int = 1024
) -> Step:
    """One token for each sequence, with a donated cache of keys and values."""
    heads, head = 16, 64

    def weight(shape: tuple[int, ...], *spec: Any) -> Any:
        return _abstract(mesh, (layers, *shape), "bfloat16", None, *spec)

    weights = {
        "qkv": weight((width, 3, heads, head), None, None, "tp"),
        "o": weight((heads, head, width), "tp"),
        "up": weight((width, 4 * width), None, "tp"),
        "down": weight((4 * width, width), "tp"),
    }
    cache = (weight((batch, room, heads, head), "fsdp", None, "tp"),) * 2
    x = _abstract(mesh, (batch, width), "bfloat16", "fsdp")

    def step(weights: Any, cache: Any, x: Any, place: Any) -> Any:
        def layer(h: Any, xs: Any) -> Any:
            w, keys, values = xs
            q, k, v = jnp.moveaxis(jnp.einsum("bd,dnhk->bnhk", h, w["qkv"]), 1, 0)
            keys = jax.lax.dynamic_update_slice(keys, k[:, None], (0, place, 0, 0))
            values = jax.lax.dynamic_update_slice(values, v[:, None], (0, place, 0, 0))
            scores = jnp.einsum("bhk,bthk->bht", q, keys).astype("float32")
            scores = jax.nn.softmax(jnp.where(jnp.arange(room) <= place, scores, -1e30))
            out = jnp.einsum("bht,bthk->bhk", scores.astype(h.dtype), values)
            h = h + jnp.einsum("bhk,hkd->bd", out, w["o"])
            return h + jax.nn.relu(h @ w["up"]) @ w["down"], (keys, values)

        return jax.lax.scan(layer, x, (weights, *cache))

    jitted = jax.jit(step, donate_argnums=1, out_shardings=(x.sharding, _shardings(cache)))
    return jitted, (weights, cache, x, _abstract(mesh, (), "int32"))


def _abstract(mesh: Mesh, shape: tuple[int, ...], dtype: str, *spec: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def _constrain(mesh: Mesh, x: Any, *spec: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def _norm(x: Any, scale: Any) -> Any:
    wide = x.astype("float32")
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def _descent(loss: Any, weights: Any) -> Any:
    def step(weights: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    return jax.jit(step, donate_argnums=0, out_shardings=_shardings(weights))


def _manual(mesh: Mesh, function: Any, in_specs: Any, out_specs: Any) -> Any:
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(mapped)
