"""Steps of decoders in plain JAX, of all kinds; each row of `PAIRS` is one on a mesh of a slice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

BATCH_AXES = ("data", "fsdp", "ep")
Params = Any


@dataclass(frozen=True)
class Pair:
    """A step, and the mesh of a slice that it is compiled for."""

    name: str
    on: str
    mesh: dict[str, int]
    kind: str = "train"
    """"train", "forward", "decode" or "prefill"."""
    layers: int = 24
    width: int = 2048
    hidden: int = 8192
    heads: int = 16
    kv: int = 4
    vocab: int = 32768
    rows: int = 1
    """Sequences of a device."""
    length: int = 2048
    dtype: str = "float32"
    """Of the parameters; products are of bfloat16."""
    optimizer: str = "adam"
    """"adam", "sgd" or "muon"."""
    is_scanned: bool = True
    saves: str = "nothing"
    """Of each layer for the backward pass: "nothing", "products", or "everything"."""
    accumulate: int = 1
    experts: int = 0
    lora: int = 0
    """Rank of the adapters, which alone are trained."""
    is_donated: bool = True
    is_lookup: bool = False
    """Whether tokens look up rows, and are not one-hot."""
    clips: bool = False
    head: int = field(default=128)

    @property
    def batch(self) -> tuple[str, ...]:
        return tuple(axis for axis in BATCH_AXES if axis in self.mesh)

    @property
    def tp(self) -> str | None:
        return "tp" if "tp" in self.mesh else None

    @property
    def all_rows(self) -> int:
        return self.rows * math.prod(self.mesh[axis] for axis in self.batch)

    def cut(self, x: jax.Array, *spec: Any) -> jax.Array:
        """Constrain an activation, whose first dimension is the batch."""
        return jax.lax.with_sharding_constraint(x, P(self.batch, *spec))


def rules(pair: Pair) -> list[tuple[str, tuple[Any, ...]]]:
    fsdp = tuple(axis for axis in ("fsdp",) if axis in pair.mesh)
    tp, ep = pair.tp, "ep" if "ep" in pair.mesh else None
    rows: list[tuple[str, tuple[Any, ...]]] = [
        ("norm|router", ()),
        ("embed", (tp, fsdp)),
        ("(^|/)head", (fsdp, tp)),
        ("experts/(gate|up)", (ep, fsdp, tp)),
        ("experts/down", (ep, tp, fsdp)),
        ("lora.*_a", ()),
        ("lora.*_b", ()),
        ("/(q|k|v)$", (fsdp, tp, None)),
        ("/o$", (tp, None, fsdp)),
        ("gate|up", (fsdp, tp)),
        ("down", (tp, fsdp)),
    ]
    if pair.is_scanned:
        stacked = ("experts", "/(q|k|v)$", "/o$", "gate|up", "down")
        rows = [
            (pattern, (None, *spec)) if pattern.startswith(stacked) else (pattern, spec)
            for pattern, spec in rows
        ]
    return rows


def parameters(pair: Pair) -> Params:
    width, hidden, heads, kv = pair.width, pair.hidden, pair.heads, pair.kv
    mlp = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    layer: Params = {
        "norm1": (width,),
        "norm2": (width,),
        "attention": {
            "q": (width, heads, pair.head),
            "k": (width, kv, pair.head),
            "v": (width, kv, pair.head),
            "o": (heads, pair.head, width),
        },
    }
    if pair.experts:
        layer["router"] = (width, pair.experts)
        layer["experts"] = {name: (pair.experts, *shape) for name, shape in mlp.items()}
    else:
        layer["mlp"] = mlp
    stack = lambda layer: _stacked(layer, pair.layers) if pair.is_scanned else [layer] * pair.layers  # noqa: E731
    tree = {
        "embed": (pair.vocab, width),
        "head": (width, pair.vocab),
        "norm": (width,),
        "layers": stack(layer),
    }
    if pair.lora:
        adapters = {
            f"lora_{name}_{side}": (width, pair.lora)
            if side == "a"
            else (pair.lora, heads * pair.head)
            for name in ("q",)
            for side in "ab"
        }
        tree["lora"] = stack(adapters)
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, pair.dtype),
        tree,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def _stacked(layer: Params, count: int) -> Params:
    return jax.tree.map(
        lambda shape: (count, *shape), layer, is_leaf=lambda node: isinstance(node, tuple)
    )


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean = jnp.mean(jnp.square(x.astype("float32")), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype) * scale


def attention(
    pair: Pair, x: jax.Array, w: Params, lora: Params, cache: Any = None, place: Any = None
) -> tuple[jax.Array, Any]:
    q, k, v = (pair.cut(jnp.einsum("btd,dhk->bthk", x, w[name]), None, pair.tp) for name in "qkv")
    if lora:
        q = q + ((x @ lora["lora_q_a"]) @ lora["lora_q_b"]).reshape(q.shape)
    mask: Any = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    if cache is not None:
        k, v = (
            jax.lax.dynamic_update_slice(old, new, (0, place, 0, 0))
            for old, new in zip(cache, (k, v), strict=True)
        )
        cache = (k, v)
        mask = jnp.arange(k.shape[1]) <= place
    groups = q.reshape(*q.shape[:2], pair.kv, -1, pair.head)
    scores = jnp.einsum("btgqk,bsgk->bgqts", groups, k).astype("float32") * pair.head**-0.5
    scores = jnp.where(mask, scores, -1e30)
    chances = jax.nn.softmax(scores, -1).astype(x.dtype)
    mixed = jnp.einsum("bgqts,bsgk->btgqk", chances, v).reshape(q.shape)
    mixed = pair.cut(mixed, None, pair.tp)
    return jnp.einsum("bthk,hkd->btd", mixed, w["o"]), cache


def mlp(pair: Pair, x: jax.Array, w: Params) -> jax.Array:
    gate, up = (pair.cut(x @ w[name], None, pair.tp) for name in ("gate", "up"))
    return (jax.nn.silu(gate) * up) @ w["down"]


def experts(pair: Pair, x: jax.Array, router: jax.Array, w: Params) -> jax.Array:
    """Send tokens to experts that have room, by products with masks."""
    room = x.shape[1] * 2 // pair.experts
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), 2)
    is_of = jax.nn.one_hot(chosen, pair.experts, dtype="int32")
    places = jnp.cumsum(is_of.reshape(len(x), -1, pair.experts), 1).reshape(is_of.shape) * is_of
    sent = jax.nn.one_hot(places.sum(2) - 1, room, dtype=x.dtype)
    combined = sent * jnp.einsum("btke,btk->bte", is_of.astype(x.dtype), weights)[..., None]
    others = tuple(axis for axis in pair.batch if axis != "ep")
    ep = "ep" if "ep" in pair.mesh else None

    def cut(y: jax.Array, *rest: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(y, P(ep, others, *rest))

    y = cut(jnp.einsum("btd,btec->ebcd", x, sent))
    gate, up = (cut(jnp.einsum("ebcd,edf->ebcf", y, w[n]), None, pair.tp) for n in ("gate", "up"))
    y = cut(jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(gate) * up, w["down"]))
    return pair.cut(jnp.einsum("ebcd,btec->btd", y, combined))


def layer(
    pair: Pair, x: jax.Array, w: Params, lora: Params, cache: Any = None, place: Any = None
) -> tuple[jax.Array, Any]:
    w, lora = jax.tree.map(lambda kernel: kernel.astype("bfloat16"), (w, lora))
    mixed, cache = attention(pair, normed(x, w["norm1"]), w["attention"], lora, cache, place)
    x = pair.cut(x + mixed)
    y = normed(x, w["norm2"])
    y = experts(pair, y, w["router"], w["experts"]) if pair.experts else mlp(pair, y, w["mlp"])
    return pair.cut(x + y), cache


def decoder(
    pair: Pair, params: Params, tokens: jax.Array, cache: Any = None, place: Any = None
) -> tuple[jax.Array, Any]:
    """Apply embedding and layers."""
    embed = params["embed"].astype("bfloat16")
    if pair.is_lookup:
        x = jax.lax.with_sharding_constraint(embed, P())[tokens]
    else:
        x = jax.nn.one_hot(tokens, pair.vocab, dtype="bfloat16") @ embed
    x = pair.cut(x)
    policies = jax.checkpoint_policies

    def body(x: jax.Array, row: Any) -> tuple[jax.Array, Any]:
        w, lora, cache = row
        return layer(pair, x, w, lora, cache, place)

    if pair.saves != "everything":
        policy = (
            policies.dots_with_no_batch_dims_saveable
            if pair.saves == "products"
            else policies.nothing_saveable
        )
        body = jax.checkpoint(body, policy=policy)
    rows = params["layers"], params.get("lora"), cache
    if pair.is_scanned:
        x, cache = jax.lax.scan(body, x, rows)
    else:
        caches = []
        for i in range(pair.layers):
            w, lora, old = rows
            own = w[i], lora and lora[i], old and old[i]
            x, made = body(x, own)
            caches.append(made)
        cache = caches
    return normed(x, params["norm"].astype("bfloat16")), cache


def loss(pair: Pair, trained: Params, frozen: Params, tokens: jax.Array) -> jax.Array:
    params = {**frozen, **trained}
    x, _ = decoder(pair, params, tokens)
    logits = pair.cut(x @ params["head"].astype("bfloat16"), None, pair.tp).astype("float32")
    of_token = jnp.sum(jnp.where(tokens[..., None] == jnp.arange(pair.vocab), logits, 0), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - of_token)


def gradients(pair: Pair, trained: Params, frozen: Params, tokens: jax.Array) -> Params:
    if pair.accumulate == 1:
        return jax.grad(partial(loss, pair))(trained, frozen, tokens)
    parts = tokens.reshape(pair.accumulate, -1, pair.length)
    parts = jax.lax.with_sharding_constraint(parts, P(None, pair.batch))

    def add(total: Params, part: jax.Array) -> tuple[Params, None]:
        return jax.tree.map(
            jnp.add, total, jax.grad(partial(loss, pair))(trained, frozen, part)
        ), None

    zeros = jax.tree.map(jnp.zeros_like, trained)
    return jax.lax.scan(add, zeros, parts)[0]


def orthogonal(g: jax.Array) -> jax.Array:
    """Take Newton-Schulz steps, as Muon does, on a matrix or on a stack of them."""
    turned = g.shape[-2] > g.shape[-1]
    x = g.astype("bfloat16")
    x = x.swapaxes(-1, -2) if turned else x
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x.astype("float32")), (-1, -2), keepdims=True)) + 1e-7)
    x = x.astype("bfloat16")
    for _ in range(5):
        a = x @ x.swapaxes(-1, -2)
        b = -4.775 * a + 2.0315 * a @ a
        x = (3.4445 * x + b @ x).astype("bfloat16")
    return x.swapaxes(-1, -2) if turned else x


def updated(pair: Pair, state: Params, grads: Params) -> Params:
    params = state["params"]
    if pair.clips:
        norm = jnp.sqrt(
            sum(jnp.sum(jnp.square(g.astype("float32"))) for g in jax.tree.leaves(grads))
        )
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm).astype(g.dtype), grads)
    if pair.optimizer == "sgd":
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)}
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    if pair.optimizer == "muon":

        def moved(path: Any, p: jax.Array, m: jax.Array) -> jax.Array:
            if "mlp" not in jax.tree_util.keystr(path):
                return p - 1e-3 * jnp.sign(m)
            return p - 0.02 * orthogonal(m).astype(p.dtype)

        return {"params": jax.tree_util.tree_map_with_path(moved, params, mu), "mu": mu}
    nu = jax.tree.map(lambda n, g: 0.95 * n + 0.05 * g * g, state["nu"], grads)
    params = jax.tree.map(lambda p, m, n: p - 1e-4 * m / (jnp.sqrt(n) + 1e-8), params, mu, nu)
    return {"params": params, "mu": mu, "nu": nu}


def train(pair: Pair, state: Params, *rest: Any) -> Params:
    frozen, tokens = rest if pair.lora else ({}, *rest)
    return updated(pair, state, gradients(pair, state["params"], frozen, tokens))


def forward(pair: Pair, params: Params, tokens: jax.Array) -> jax.Array:
    x, _ = decoder(pair, params, tokens)
    logits = pair.cut(x @ params["head"].astype("bfloat16"), None, pair.tp).astype("float32")
    return jax.nn.log_softmax(logits).max(-1)


def decode(pair: Pair, params: Params, cache: Any, tokens: jax.Array, place: Any) -> Any:
    """Take the next token of each sequence, with a cache of keys and values."""
    x, cache = decoder(pair, params, tokens, cache, place)
    logits = pair.cut(x @ params["head"].astype("bfloat16"), None, pair.tp)
    return cache, jnp.argmax(logits, -1).astype("int32")


def jitted(pair: Pair, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """The step of a pair, and its arguments."""
    tree = parameters(pair)
    trained = {"lora": tree.pop("lora")} if pair.lora else tree
    of_batch = NamedSharding(mesh, P(pair.batch))
    tokens = jax.ShapeDtypeStruct((pair.all_rows, pair.length), "int32", sharding=of_batch)
    donated = (0,) if pair.is_donated else ()
    if pair.kind == "train":
        names = {"adam": ("params", "mu", "nu"), "muon": ("params", "mu"), "sgd": ("params",)}
        plan = sr.plan(dict.fromkeys(names[pair.optimizer], trained), rules(pair), mesh)
        frozen = (sr.plan(tree, rules(pair), mesh).abstract(),) if pair.lora else ()
        step = jax.jit(partial(train, pair), donate_argnums=donated, out_shardings=plan.shardings())
        return step, (plan, *frozen, tokens)
    plan = sr.plan(tree, rules(pair), mesh)
    if pair.kind == "forward":
        return jax.jit(partial(forward, pair)), (plan, tokens)
    shape, spec = (pair.all_rows, pair.length, pair.kv, pair.head), (pair.batch, None, pair.tp)
    stack = pair.layers if pair.is_scanned else None
    one = jax.ShapeDtypeStruct(
        shape if stack is None else (stack, *shape),
        "bfloat16",
        sharding=NamedSharding(mesh, P(*spec) if stack is None else P(None, *spec)),
    )
    cache = (one, one) if stack else [(one, one)] * pair.layers
    token = jax.ShapeDtypeStruct((pair.all_rows, 1), "int32", sharding=of_batch)
    place = jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(mesh, P()))
    step = jax.jit(partial(decode, pair), donate_argnums=(1,) if pair.is_donated else ())
    return step, (plan, cache, token, place)


SMALL = {"layers": 24, "width": 1024, "hidden": 4096, "heads": 8, "kv": 8}
MOE = {"experts": 8, "width": 1024, "hidden": 2048, "heads": 8, "kv": 8}
BIG = {"layers": 32, "width": 4096, "hidden": 14336, "heads": 32, "kv": 8}


def _pair(name: str, on: str, mesh: str, **options: Any) -> Pair:
    sizes = (axis.split("=") for axis in mesh.split(","))
    return Pair(name, on, {axis: int(size) for axis, size in sizes}, **options)


PAIRS = [
    _pair("dense", "v5e:4x4", "fsdp=16", rows=8),
    _pair("dense", "v5p:2x2x4", "fsdp=4,tp=4", rows=16),
    _pair("dense", "v6e:4x4", "fsdp=4,tp=4", rows=16),
    _pair("dense", "v5p:4x4x4", "fsdp=16,tp=4", rows=4, **BIG),
    _pair("dense", "v5e:4x4", "data=4,fsdp=4", rows=8, **SMALL),
    _pair("dense, products saved", "v5e:4x4", "fsdp=16", rows=4, saves="products"),
    _pair("dense, products saved", "v6e:4x4", "fsdp=4,tp=4", rows=8, saves="products"),
    _pair("dense, products saved", "v5p:4x4x4", "fsdp=16,tp=4", rows=2, saves="products", **BIG),
    _pair("dense, all saved", "v5p:2x2x4", "fsdp=16", rows=8, length=512, saves="everything"),
    _pair("dense, all saved", "v6e:4x4", "fsdp=4,tp=4", rows=8, length=512, saves="everything"),
    _pair("dense, layers apart", "v5e:4x4", "fsdp=16", layers=2, rows=8, is_scanned=False),
    _pair("dense, layers apart", "v5p:2x2x4", "fsdp=4,tp=4", layers=2, rows=16, is_scanned=False),
    _pair(
        "dense, layers apart, all saved",
        "v6e:4x4",
        "fsdp=16",
        layers=2,
        rows=8,
        is_scanned=False,
        saves="everything",
    ),
    _pair(
        "dense, layers apart, all saved",
        "v5e:4x4",
        "data=4,tp=4",
        rows=8,
        is_scanned=False,
        saves="everything",
        **{**SMALL, "layers": 2},
    ),
    _pair("dense, bfloat16", "v5e:4x4", "fsdp=16", rows=8, dtype="bfloat16"),
    _pair("dense, bfloat16", "v6e:4x4", "fsdp=8,tp=2", rows=16, dtype="bfloat16"),
    _pair("dense, not donated", "v6e:4x4", "fsdp=16", rows=16, is_donated=False),
    _pair(
        "dense, rows looked up, clipped", "v5e:4x4", "fsdp=16", rows=8, is_lookup=True, clips=True
    ),
    _pair(
        "dense, rows looked up, clipped",
        "v5p:2x2x4",
        "fsdp=4,tp=4",
        rows=16,
        is_lookup=True,
        clips=True,
    ),
    _pair("dense, 4 micro-batches", "v5e:4x4", "fsdp=16", rows=32, accumulate=4),
    _pair("dense, 4 micro-batches", "v5p:2x2x4", "fsdp=4,tp=4", rows=64, accumulate=4),
    _pair("dense, SGD", "v5e:4x4", "data=16", rows=8, optimizer="sgd", **SMALL),
    _pair("dense, SGD", "v6e:4x4", "fsdp=4,tp=4", rows=16, optimizer="sgd"),
    _pair("Muon", "v5e:4x4", "fsdp=16", rows=8, optimizer="muon"),
    _pair("Muon", "v5p:2x2x4", "fsdp=4,tp=4", rows=16, optimizer="muon"),
    _pair("LoRA", "v5e:4x4", "fsdp=16", rows=8, dtype="bfloat16", lora=16),
    _pair("LoRA", "v6e:4x4", "fsdp=4,tp=4", rows=16, dtype="bfloat16", lora=16),
    _pair("MoE", "v5e:4x4", "fsdp=4,ep=4", rows=8, **MOE),
    _pair("MoE", "v5p:2x2x4", "fsdp=2,ep=8", rows=16, **MOE),
    _pair("MoE", "v6e:4x4", "ep=4,tp=4", rows=16, **MOE),
    _pair("MoE, products saved", "v6e:4x4", "fsdp=4,ep=4", rows=8, saves="products", **MOE),
    _pair(
        "MoE, layers apart",
        "v5p:2x2x4",
        "fsdp=4,ep=4",
        rows=16,
        is_scanned=False,
        **{**MOE, "layers": 2},
    ),
    _pair("forward", "v5e:4x4", "fsdp=16", kind="forward", rows=8, dtype="bfloat16"),
    _pair("forward", "v6e:4x4", "fsdp=4,tp=4", kind="forward", rows=16, dtype="bfloat16"),
    _pair(
        "forward, layers apart",
        "v5p:2x2x4",
        "fsdp=4,tp=4",
        kind="forward",
        layers=2,
        rows=16,
        dtype="bfloat16",
        is_scanned=False,
    ),
    _pair("decode", "v5e:4x4", "data=4,tp=4", kind="decode", rows=64, dtype="bfloat16", **BIG),
    _pair("decode", "v6e:4x4", "data=2,tp=8", kind="decode", rows=128, dtype="bfloat16", **BIG),
    _pair(
        "decode, layers apart",
        "v5p:2x2x4",
        "data=4,tp=4",
        kind="decode",
        rows=128,
        dtype="bfloat16",
        is_scanned=False,
        **{**BIG, "layers": 2},
    ),
    _pair(
        "decode, not donated",
        "v5e:4x4",
        "data=4,tp=4",
        kind="decode",
        rows=32,
        dtype="bfloat16",
        is_donated=False,
        **BIG,
    ),
    _pair("dense", "v6e:8x8", "fsdp=64", rows=4, **BIG),
    _pair("forward", "v5p:2x2x4", "fsdp=16", kind="forward", rows=16, dtype="bfloat16"),
    _pair(
        "MoE, forward", "v5e:4x4", "fsdp=4,ep=4", kind="forward", rows=8, dtype="bfloat16", **MOE
    ),
    _pair("forward", "v6e:4x4", "fsdp=16", kind="forward", rows=16, dtype="bfloat16"),
    _pair("decode", "v5p:2x2x4", "data=4,tp=4", kind="decode", rows=256, dtype="bfloat16", **BIG),
    _pair(
        "decode, layers apart, not donated",
        "v6e:4x4",
        "data=4,tp=4",
        kind="decode",
        rows=64,
        dtype="bfloat16",
        is_scanned=False,
        is_donated=False,
        **{**BIG, "layers": 2},
    ),
]


# The estimate was made by looking at these.
def key(pair: Pair) -> str:
    """Name a pair as the tables do."""
    mesh = ",".join(f"{axis}={size}" for axis, size in pair.mesh.items())
    return f"{pair.name}, {pair.on}, {mesh}"
