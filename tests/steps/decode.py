"""Decoding with a cache of keys and values: by a scan, with int8 weights, and of chunks in pages."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.blocks import attend, rms_norm
from tests.steps.model import Case, abstract, arrays, case_of, serving_step, stacked
from tests.steps.table import Built, Row, Rules

# A scan over words


def _scan(row: Row, rules: Rules = (), **fault: Any) -> Built:
    """Decode four words."""
    case = case_of(row, **fault)
    cut, rows, length, queries, keys, size = case.cut, 32, 256, 8, 4, 32
    plan = sr.plan(row.shapes, [*rules, *row.rules], case.mesh)
    caches = arrays(dict.fromkeys("kv", (3, rows, length, keys, size)))
    cached = sr.plan(caches, [("", case.place("cache"))], case.mesh)

    def write(old: Any, new: Any, at: Any) -> Any:
        if case.has("the cache is written by a mask"):
            hot = (jnp.arange(length) == at)[None, :, None, None]
            return cut(jnp.where(hot, new, old), "written")
        if case.has("the cache is shifted"):
            return cut(jnp.concatenate([old[:, 1:], new], 1), "written")
        return cut(jax.lax.dynamic_update_slice_in_dim(old, new, at, 1), "written")

    def layer(x: Any, parts: Any, at: Any) -> Any:
        w, held = case.cut_all(parts[0], "kernels"), parts[1]
        y = rms_norm(x, 1.0)
        q, k, v = (cut(jnp.einsum("btd,dhk->bthk", y, w[n]), "heads") for n in "qkv")
        held = {"k": write(held["k"], k, at), "v": write(held["v"], v, at)}
        k, v = (cut(held[n].astype("float32"), "used") for n in "kv")
        if case.has("the cache is gathered as bfloat16"):
            k, v = (cut(a.astype("bfloat16"), "residual") for a in (k, v))
        if case.has("keys are repeated for queries"):
            k, v = (jnp.repeat(a, queries // keys, 2) for a in (k, v))
        mixed = attend(case, q, k, v, jnp.arange(length) <= at)
        x = cut(x + jnp.einsum("bthk,hkd->btd", cut(mixed, "mixed"), w["o"]), "residual")
        y = cut(jax.nn.gelu(rms_norm(x, 1.0) @ w["up"]), "hidden")
        return cut(x + y @ w["down"], "residual"), held

    def decode(params: Any, held: Any, batch: Any) -> Any:
        def word(carry: Any, _: Any) -> Any:
            held, tokens, at = carry
            x = cut(params["embed"][tokens], "residual")
            x, held = jax.lax.scan(lambda x, w: layer(x, w, at), x, (params["layers"], held))
            scores = cut(rms_norm(x, 1.0) @ params["head"], "logits")
            best = scores.argmax(-1)
            return (held, best, at + 1), (best, case.keep(scores, "logits"))

        start = held, batch["tokens"], batch["at"]
        (held, *_), (words, kept) = jax.lax.scan(word, start, None, 4)
        return held, (words, kept)

    batch = {"tokens": abstract(case.mesh, case.place("batch") or P(), (rows, 1)), "at": abstract(case.mesh, P(), ())}
    return serving_step(case, decode, plan, cached, batch, 1)


# A prompt, then a loop over words, with int8 weights

_WIDTH: Final = 512
_KERNELS: Final = {
    "q": (_WIDTH, 512), "k": (_WIDTH, 256), "v": (_WIDTH, 256), "o": (512, _WIDTH),
    "gate": (_WIDTH, 1024), "up": (_WIDTH, 1024), "down": (1024, _WIDTH),
}  # fmt: skip


def _int8_weights() -> Any:
    """Return abstract weights: int8 kernels with a scale for each output, stacked by layers."""
    int8, scales = stacked(2, _KERNELS, "int8"), stacked(2, {n: s[1:] for n, s in _KERNELS.items()})
    layers = {name: {"q8": int8[name], "scale": scales[name]} for name in _KERNELS}
    head = {"q8": arrays((_WIDTH, 2048), "int8"), "scale": arrays((2048,))}
    norms = stacked(2, dict.fromkeys(("norm1", "norm2"), (_WIDTH,)))
    tables = arrays({"embed": (2048, _WIDTH), "norm": (_WIDTH,)})
    return {**tables, "layers": {**norms, **layers}, "head": head}


def _product(case: Case, x: Any, weight: Any) -> Any:
    if "q8" not in weight:
        return x @ weight["w"]
    if "dequantized" in case.places:
        return x @ case.cut(weight["q8"].astype(x.dtype) * weight["scale"], "dequantized")
    return (x @ weight["q8"].astype(x.dtype)) * weight["scale"]


def _int8(row: Row, rules: Rules = (), **fault: Any) -> Built:
    """Prefill a prompt, then decode greedily in a loop."""
    case = case_of(row, **fault)
    cut, rows, prompt, length, queries, keys, size = case.cut, 16, 64, 512, 8, 4, 64
    held = queries if case.has("keys and values are repeated before the cache") else keys

    def attention(q: Any, k: Any, v: Any, start: Any) -> Any:
        """Attend from positions that begin at start to all of the cache."""
        q = q.reshape(*q.shape[:2], held, -1, size)
        allowed = jnp.arange(length) <= start + jnp.arange(q.shape[1])[:, None]
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) * size**-0.5
        if "mask" in case.places:
            bias = jnp.broadcast_to(jnp.where(allowed, 0, -1e9), scores.shape)
            scores = scores + cut(bias, "mask")
        else:
            scores = jnp.where(allowed, scores, -1e9)
        mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores), v)
        return mixed.reshape(*mixed.shape[:2], queries * size)

    def forward(weights: Any, cache: Any, tokens: Any, start: Any) -> Any:
        x = cut(jnp.take(cut(weights["embed"], "table"), tokens, axis=0), "residual")

        def write(cache: Any, new: Any) -> Any:
            new = jnp.repeat(new, held // keys, axis=2) if held > keys else new
            return cut(jax.lax.dynamic_update_slice(cache, new, (0, start, 0, 0)), "written")

        def layer(x: Any, inputs: Any) -> Any:
            w, k, v = inputs
            y = rms_norm(x, w["norm1"])

            def heads(name: str) -> Any:
                return cut(_product(case, y, w[name]).reshape(*y.shape[:2], -1, size), "heads")

            q, k, v = heads("q"), write(k, heads("k")), write(v, heads("v"))
            mixed = attention(q, cut(k, "read"), cut(v, "read"), start)
            x = cut(x + _product(case, mixed, w["o"]), "residual")
            y = rms_norm(x, w["norm2"])
            hidden = jax.nn.silu(_product(case, y, w["gate"])) * _product(case, y, w["up"])
            x = cut(x + _product(case, hidden, w["down"]), "residual")
            return x, (k, v, case.keep(x, "states"))

        layers = weights["layers"]
        if case.has("all layers are dequantized before the scan"):
            whole = {n: layers[n]["q8"].astype(x.dtype) * layers[n]["scale"][:, None] for n in _KERNELS}
            layers = {**layers, **{name: {"w": w} for name, w in whole.items()}}
        x, (k, v, states) = jax.lax.scan(layer, x, (layers, cache["k"], cache["v"]))
        x = x if case.told == "scores" else x[:, -1:]
        scores = cut(_product(case, rms_norm(x, weights["norm"]), weights["head"]), "logits")
        return {"k": k, "v": v}, scores[:, -1], states, case.keep(scores, "scores")

    def generate(weights: Any, cache: Any, tokens: Any) -> Any:
        is_cast = case.has("the cache comes out in another dtype")
        cache = jax.tree.map(lambda x: x.astype("float32"), cache) if is_cast else cache
        cache, scores, states, everything = forward(weights, cache, tokens, 0)

        def next_token(step: Any, carry: Any) -> Any:
            cache, token, out = carry
            cache, scores, *_ = forward(weights, cache, token[:, None], prompt + step)
            token = scores.argmax(-1)
            return cache, token, out.at[:, step].set(token)

        start = cache, scores.argmax(-1), jnp.zeros((rows, 4), "int32")
        cache, _, out = jax.lax.fori_loop(0, 4, next_token, start)
        cache = jax.tree.map(lambda x: x.astype("bfloat16"), cache) if is_cast else cache
        return cache, out, states, everything

    plan = sr.plan(_int8_weights(), [*rules, *row.rules], case.mesh)
    shapes = arrays(dict.fromkeys("kv", (2, rows, length, held, size)))
    cache = sr.plan(shapes, [("[kv]", case.place("cache"))], case.mesh)
    tokens = abstract(case.mesh, case.place("batch") or P(), (rows, prompt))
    return serving_step(case, generate, plan, cache, tokens, 3)


# Chunks of prompts, into pages


def _chunk(row: Row, rules: Rules = (), **fault: Any) -> Built:
    """Read a chunk of a prompt in each slot into pages of a cache, and guess what comes next."""
    case = case_of(row, **fault)
    cut, layers, width, inner, heads, keys, size = case.cut, 4, 256, 1024, 8, 4, 32
    groups, slots, pages, page = 2, 8, 16, 16  # of a group of slots on dp; of a slot; tokens
    kernels: dict[str, Any] = dict.fromkeys("kv", (width, keys, size))
    kernels |= {"q": (width, heads, size), "o": (heads, size, width)}
    kernels |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    kernels |= dict.fromkeys(("norm1", "norm2"), (width,))
    tables = arrays({"embed": (4096, width), "head": (width, 4096)}, "bfloat16")
    plan = sr.plan({**tables, "layers": stacked(layers, kernels, "bfloat16")}, [*rules, *row.rules], case.mesh)
    shape = (layers, groups, slots * pages, page, keys, size)
    cache = sr.plan(arrays(dict.fromkeys("kv", shape), "bfloat16"), [("", case.place("cache"))], case.mesh)

    def attend(q: Any, k: Any, v: Any, start: Any) -> Any:
        """Attend from a chunk that begins at start to all of a slot's pages."""
        if case.has("keys and values are repeated for queries"):
            k, v = (cut(jnp.repeat(x, heads // keys, 3), "read") for x in (k, v))
        q = q.reshape(*q.shape[:3], k.shape[3], -1, size)
        allowed = jnp.arange(pages * page) <= (start[..., None] + jnp.arange(page))[..., None]
        scores = jnp.einsum("gstkhd,gsukd->gskhtu", q, k).astype("float32") * size**-0.5
        if "mask" in case.places:
            mask = jnp.broadcast_to(allowed[:, :, None, None], scores.shape)
            scores = scores + cut(jnp.where(mask, 0, -1e9), "mask")
        scores = jax.nn.softmax(jnp.where(allowed[:, :, None, None], scores, -1e9))
        y = jnp.einsum("gskhtu,gsukd->gstkhd", scores.astype(v.dtype), v)
        return y.reshape(*y.shape[:3], heads, size)

    def serve(weights: Any, cache: Any, batch: Any) -> Any:
        table, start = batch["table"], batch["start"]  # [group, slot, page]; [group, slot]
        current = jnp.take_along_axis(table, start[..., None] // page, -1)[..., 0]
        if case.has("the cache is widened"):
            cache = jax.tree.map(lambda x: x.astype("float32"), cache)

        def write(pool: Any, i: Any, new: Any) -> Any:
            new = cut(new.astype(pool.dtype), "written")
            old = jax.lax.dynamic_index_in_dim(pool, i, keepdims=False)
            new = jax.vmap(lambda o, at, n: o.at[at].set(n))(old, current, new)
            return jax.lax.dynamic_update_index_in_dim(pool, new, i, 0)

        def read(pool: Any, i: Any) -> Any:
            pool = jax.lax.dynamic_index_in_dim(pool, i, keepdims=False)
            if case.has("pages are looked up in all groups"):
                offsets = jnp.arange(groups)[:, None, None] * pool.shape[1]
                found = pool.reshape(-1, *pool.shape[2:])[table + offsets]
            else:
                found = jax.vmap(lambda p, at: p[at])(pool, table)
            return cut(found.reshape(groups, slots, -1, keys, size), "read")

        def layer(carry: Any, inputs: Any) -> Any:
            (x, pools), (w, i) = carry, inputs
            y = rms_norm(x, w["norm1"])
            q, k, v = (cut(jnp.einsum("gstd,dhk->gsthk", y, w[n]), "heads") for n in "qkv")
            pools = {"k": write(pools["k"], i, k), "v": write(pools["v"], i, v)}
            y = attend(q, read(pools["k"], i), read(pools["v"], i), start).astype(x.dtype)
            x = cut(x + jnp.einsum("gsthk,hkd->gstd", y, w["o"]), "residual")
            y = rms_norm(x, w["norm2"])
            y = cut(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), "hidden")
            x = cut(x + y @ w["down"], "residual")
            return (x, pools), x

        x = cut(cut(weights["embed"], "table")[batch["tokens"]], "residual")
        w = case.cut_all(weights["layers"], "weights")
        if case.has("layers are unrolled and their caches stacked"):
            parts = []
            for i in range(layers):
                own = {name: pool[i : i + 1] for name, pool in cache.items()}
                (x, own), states = layer((x, own), (jax.tree.map(lambda a, i=i: a[i], w), 0))
                parts.append(own)
            cache = jax.tree.map(lambda *pools: jnp.concatenate(pools), *parts)
        else:
            (x, cache), states = jax.lax.scan(layer, (x, cache), (w, jnp.arange(layers)))
        is_whole = case.has("logits of all tokens of the chunk are computed")
        x = x if is_whole else x[:, :, -1:]
        scores = cut((x @ weights["head"]).astype("float32"), "logits")[:, :, -1]
        if "noise" in case.places:
            scores = scores + cut(jax.random.gumbel(jax.random.key(0), scores.shape), "noise")
        if case.has("the greedy token is a top_k of one"):
            best = jax.lax.top_k(scores, 1)[1][..., 0]
        elif case.has("the greedy token is of sorted logits"):
            best = jnp.argsort(scores, -1)[..., -1]
        else:
            best = scores.argmax(-1)
        cache = jax.tree.map(lambda pool: pool.astype("bfloat16"), cache)
        kept = case.keep(states, "states")
        case.asked.add("chances")
        if case.told == "chances":
            kept = jax.lax.with_sharding_constraint(jax.nn.softmax(scores), P())
        return cache, scores, best, kept

    sizes = {"tokens": (page,), "table": (pages,), "start": ()}
    spec = case.place("batch") or P()
    batch = {n: abstract(case.mesh, spec, (groups, slots, *size)) for n, size in sizes.items()}
    with jax.set_mesh(case.mesh):
        return serving_step(case, serve, plan, cache, batch, 3)


STEPS: Final = {"decoding with a KV cache": _scan, "decode with int8 weights": _int8, "serving in chunks": _chunk}
