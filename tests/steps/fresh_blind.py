"""A mixture of experts with accumulation, a transformer under Muon, and serving in chunks.

Their faults were written without a look at what `verify` finds in them.
"""

from __future__ import annotations

from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.parts import abstract, mesh_of, rms_norm, train_step
from tests.steps.score import Built, Step

__all__ = ["STEPS"]


def _cut(x: Any, spec: Any) -> Any:
    """Constrain x on the mesh of the context, whose manual axes are left out of the spec."""
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


def _stacked(layers: int, shapes: dict[str, tuple[int, ...]], dtype: Any = "float32") -> Any:
    return {n: jax.ShapeDtypeStruct((layers, *shape), dtype) for n, shape in shapes.items()}


def _whole(mesh: Any, tree: Any) -> Any:
    """Return abstract arrays that are replicated."""
    return jax.tree.map(lambda leaf: abstract(mesh, P(), leaf.shape, leaf.dtype), tree)


def _slips(*names: str) -> dict[str, dict[str, Any]]:
    """Return faults that the step knows by their names."""
    return {name: {"wrong": name} for name in names}


# A Mixtral

_LOCAL: Final = ("fsdp", "expert")
_MOE_PLACES: Final = {
    **dict.fromkeys(("residual", "heads", "routed", "logits"), P(_LOCAL)),
    "grouped": P(None, _LOCAL),  # expert, sequence, slot, feature
    **dict.fromkeys(("dispatched", "hidden"), P("expert", "fsdp")),
}
_ROUTED: Final = ("dispatched", "hidden")


def _mixtral(wrong: str = "", rules: Any = (), **specs: P | None) -> Built:
    """Train a decoder of two experts for each token, with gradients of four micro-batches."""
    mesh = mesh_of(data=2, fsdp=2, expert=2)
    places: dict[str, Any] = {**_MOE_PLACES, **specs}
    count, words, width, inner, length = 8, 2048, 128, 256, 64
    heads, keys, size, steps = 4, 2, 32, 4
    shapes = {
        "embed_tokens": jax.ShapeDtypeStruct((words, width), "float32"),
        "layers": _stacked(2, {
            "input_norm": (width,), "post_norm": (width,),
            "q_proj": (width, heads, size), "k_proj": (width, keys, size),
            "v_proj": (width, keys, size), "o_proj": (heads, size, width),
            "gate": (width, count), "w1": (count, width, inner), "w3": (count, width, inner),
            "w2": (count, inner, width),
        }),
        "norm": jax.ShapeDtypeStruct((width,), "float32"),
        "lm_head": jax.ShapeDtypeStruct((width, words), "float32"),
    }  # fmt: skip
    rules = [
        *rules, ("norm|gate", P()), ("embed_tokens", P(None, _LOCAL)), ("lm_head", P(_LOCAL)),
        ("[qkv]_proj", P(None, _LOCAL)), ("o_proj", P(None, None, None, _LOCAL)),
        ("w[123]", P(None, "expert", "fsdp")),
    ]  # fmt: skip
    plan = sr.plan(shapes, rules, mesh)
    inside = jax.tree.map(lambda s: s.spec, plan.shardings())
    tx = optax.adamw(1e-3)

    def attend(y: Any, w: Any) -> Any:
        q, k, v = (
            _cut(jnp.einsum("btd,dhk->bthk", y, w[f"{n}_proj"]), places["heads"]) for n in "qkv"
        )
        angles = jnp.arange(length)[:, None] / 10000 ** (jnp.arange(0, size, 2) / size)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]

        def turn(x: Any) -> Any:
            a, b = jnp.split(x, 2, -1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        mixed = jax.nn.dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return jnp.einsum("bthk,hkd->btd", mixed, w["o_proj"])

    def moe(y: Any, w: Any) -> Any:
        chances = jax.nn.softmax(y @ w["gate"])
        top, chosen = jax.lax.top_k(chances, 2)
        picked = jax.nn.one_hot(chosen, count)
        weights = (picked * (top / top.sum(-1, keepdims=True))[..., None]).sum(-2)
        picked = picked.sum(-2)
        slots = int(1.25 * 2 * y.shape[1] / count)
        place = jnp.cumsum(picked, 1) * picked - 1
        dispatch = _cut(jax.nn.one_hot(place, slots), places["routed"])
        x = _cut(jnp.einsum("btec,btd->ebcd", dispatch, y), places["grouped"])
        x = _cut(x, places["dispatched"])
        w1, w2, w3 = (_cut(w[n], places.get("experts")) for n in ("w1", "w2", "w3"))
        z = jnp.einsum("ebcd,edf->ebcf", x, w1), jnp.einsum("ebcd,edf->ebcf", x, w3)
        z = _cut(jax.nn.silu(z[0]) * z[1], places["hidden"])
        z = _cut(jnp.einsum("ebcf,efd->ebcd", z, w2), places["dispatched"])
        z = _cut(z, places["grouped"])
        combine = _cut(dispatch * weights[..., None], places["routed"])
        balance = count * (picked.mean((0, 1)) * chances.mean((0, 1))).sum()
        return jnp.einsum("btec,ebcd->btd", combine, z), balance

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        x = _cut(params["embed_tokens"][tokens], places["residual"])

        def layer(x: Any, w: Any) -> Any:
            x = _cut(x + attend(rms_norm(x, w["input_norm"]), w), places["residual"])
            y = rms_norm(x, w["post_norm"])
            if wrong == "all tokens of a micro-batch are one group":
                y, balance = moe(y.reshape(1, -1, width), w)
                y = y.reshape(x.shape)
            else:
                y, balance = moe(y, w)
            if "dropped" in places:
                kept = jax.random.bernoulli(jax.random.key(0), 0.9, y.shape)
                y = y * _cut(kept, places["dropped"])
            return _cut(x + y, places["residual"]), (balance, x)

        layer = layer if wrong == "no remat" else jax.checkpoint(layer)
        x, (balance, states) = jax.lax.scan(layer, x, params["layers"])
        scores = _cut(rms_norm(x, params["norm"]) @ params["lm_head"], places["logits"])
        losses = jax.nn.logsumexp(scores, -1) - (scores * jax.nn.one_hot(targets, words)).sum(-1)
        metrics = {
            "states of each layer are returned": states,
            "logits of all micro-batches are returned": scores,
            "guesses of gathered logits are returned": _cut(scores, P()).argmax(-1),
        }
        return losses.mean() + 0.01 * balance.mean(), metrics.get(wrong)

    def accumulate(params: Any, batch: Any) -> Any:
        """Return sums over the micro-batches of one replica, then the mean of replicas."""
        is_early = wrong == "gradients are summed over data in each micro-batch"
        if not is_early:
            params = jax.lax.pcast(params, "data", to="varying")
        params = jax.tree.map(lambda p: _cut(p, places.get("gathered")), params)

        def split(x: Any) -> Any:
            if wrong == "micro-batches are the leading part":
                return x.reshape(steps, -1, length)
            x = x.reshape(-1, steps, length).swapaxes(0, 1)
            return _cut(x, places.get("micro", P(None, _LOCAL)))

        def one(sums: Any, batch: Any) -> Any:
            (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, *batch)
            sums = jax.tree.map(jnp.add, sums, (value, grads))
            return (sums[0], place(sums[1])), metrics

        def place(grads: Any) -> Any:
            return jax.tree.map(lambda g, s: _cut(g, places.get("sums", s)), grads, inside)

        zeros = place(jax.tree.map(jnp.zeros_like, params))
        zero = jax.lax.pcast(jnp.zeros(()), "data", to="varying")
        parts = split(batch["tokens"]), split(batch["targets"])
        sums, metrics = jax.lax.scan(one, (zero, zeros), parts)
        mean, grads = sums[0], sums[1] if is_early else jax.lax.pmean(sums[1], "data")
        return jax.lax.pmean(mean, "data"), grads, metrics

    specs_in, specs_out = (P(), P("data")), (P(), P(), P(None, "data"))
    replicas = jax.shard_map(
        accumulate, in_specs=specs_in, out_specs=specs_out, axis_names={"data"}
    )

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads, metrics = replicas(params, batch)
        grads = jax.tree.map(lambda g: _cut(g, places.get("gradients")), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, metrics)

    tokens = abstract(mesh, places.get("batch", P(("data", *_LOCAL))), (64, length))
    batch, state = {"tokens": tokens, "targets": tokens}, jax.eval_shape(tx.init, shapes)
    given = (plan.abstract(), _whole(mesh, state)) if wrong == "moments come in whole" else None
    with jax.set_mesh(mesh):
        return train_step(step, plan, state, batch, donate=wrong != "not donated", given=given)


_MIXTRAL_FAULTS: Final = {
    **_slips(
        "gradients are summed over data in each micro-batch",
        "all tokens of a micro-batch are one group", "moments come in whole", "not donated",
        "no remat", "logits of all micro-batches are returned",
        "guesses of gathered logits are returned", "states of each layer are returned",
    ),
    "no constraints": dict.fromkeys(_MOE_PLACES),
    "no constraints, micro-batches are the leading part": {
        "wrong": "micro-batches are the leading part", **dict.fromkeys(_MOE_PLACES),
    },
    "micro-batches are cut instead of their sequences": {
        "micro": P(_LOCAL), **dict.fromkeys(_MOE_PLACES),
    },
    "dispatched tokens are not constrained": dict.fromkeys(("grouped", "dispatched", "hidden")),
    "dispatched tokens stay with their sequences": dict.fromkeys(_ROUTED, P(None, _LOCAL)),
    "dispatched tokens lose the batch": dict.fromkeys(_ROUTED, P("expert")),
    "dispatched tokens are whole": dict.fromkeys(_ROUTED, P()),
    "hidden of experts is cut over features": {"hidden": P("expert", None, None, "fsdp")},
    "experts and the batch have their axes swapped": dict.fromkeys(_ROUTED, P("fsdp", "expert")),
    "dispatch is cut over experts": {"routed": P("fsdp", None, "expert")},
    "experts are planned to be whole over expert": {"rules": [("w[123]", P(None, None, "fsdp"))]},
    "experts are planned on the wrong axes": {"rules": [("w[123]", P(None, "fsdp", "expert"))]},
    "experts are planned over layers": {"rules": [("w[123]", P("expert", "fsdp"))]},
    "experts are gathered over expert": {"experts": P()},
    "attention and the table are planned to be whole": {"rules": [("proj|embed|head", P())]},
    "the residual is whole": {"residual": P()},
    "the residual is cut over fsdp alone": {"residual": P("fsdp")},
    "the residual is cut over features": {"residual": P("fsdp", None, "expert")},
    "logits are whole over the batch": {"logits": P()},
    "logits are cut over words by an axis of the batch": {"logits": P("fsdp", None, "expert")},
    "weights are gathered before the micro-batches": {"gathered": P()},
    "sums of gradients are whole": {"sums": P()},
    "gradients are whole for the update": {"gradients": P()},
    "masks of dropout are whole": {"dropped": P()},
    # These look wrong.
    "masks of dropout are cut": {"dropped": P(_LOCAL)},
    "the batch comes in whole": {"batch": P()},
}  # fmt: skip

# A vision transformer

_VIT_PLACES: Final = {
    "residual": P("fsdp"),
    "heads": P(None, "fsdp", None, "tp"),
    "hidden": P("fsdp", None, "tp"),
    "logits": P("fsdp", "tp"),
    "stacks": P(("fsdp", "tp")),
    "pooled": P("fsdp"),
}


class _Transformer(eqx.Module):
    """Patches, their places, kernels and scales of all layers by names, and a head."""

    patch: eqx.nn.Conv2d
    places: Any
    blocks: dict[str, Any]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear


def _newton(x: Any) -> Any:
    """Return what is orthogonal and nearest to each of the matrices."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)

    def improve(_: Any, x: Any) -> Any:
        gram = x @ x.mT
        return 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x

    x = jax.lax.fori_loop(0, 5, improve, x)
    return x.mT if is_tall else x


def _vision(wrong: str = "", rules: Any = (), **specs: P | None) -> Built:
    """Train a classifier of images with Muon, with an average of its parameters."""
    mesh = mesh_of(fsdp=4, tp=2)
    places: dict[str, Any] = {**_VIT_PLACES, **specs}
    layers, width, inner, heads, classes, images = 8, 128, 512, 4, 1024, (64, 3, 32, 32)

    def make(key: Any) -> Any:
        kernels = {"qkv": (3, width, width), "o": (width, width), "up": (width, inner)}
        kernels |= {"down": (inner, width), "norm1": (width,), "norm2": (width,)}
        return _Transformer(
            eqx.nn.Conv2d(3, width, 4, 4, key=key),
            jnp.zeros((64, width)),
            {name: jnp.zeros((layers, *shape)) for name, shape in kernels.items()},
            eqx.nn.RMSNorm(width, use_bias=False),
            eqx.nn.Linear(width, classes, use_bias=False, key=key),
        )

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    shapes, static = eqx.partition(model, lambda leaf: hasattr(leaf, "shape"))
    rules = [
        *rules, ("norm|patch|places", P()), ("head", P("tp", "fsdp")),
        ("qkv", P(None, None, "fsdp", "tp")), ("up", P(None, "fsdp", "tp")),
        ("/o$|down", P(None, "tp", "fsdp")),
    ]  # fmt: skip
    plan = sr.plan(shapes, rules, mesh)
    shardings = plan.shardings()
    labels = jax.tree.map(lambda x: "muon" if len(x.shape) > 2 else "adam", shapes)
    labels = eqx.tree_at(lambda model: model.patch.weight, labels, "adam")
    masked = optax.MaskedNode()
    own = jax.tree.map(lambda s, label: s if label == "muon" else masked, shardings, labels)

    def orthogonal(g: Any, sharding: Any) -> Any:
        """Cut g over layers, an axis at a time; XLA replicates what two axes leave at once."""
        half = P("fsdp", *(axis if axis == "tp" else None for axis in sharding.spec[1:]))
        step = None if wrong == "matrices are resharded at once" else places.get("half", half)
        x = g if wrong == "matrices are resharded in float32" else g.astype("bfloat16")
        x = _cut(_cut(x, step), places["stacks"]).astype("bfloat16")
        x = (
            jax.lax.map(_newton, x)
            if wrong == "matrices are orthogonalised in turn"
            else _newton(x)
        )
        x = x.astype("float32") if wrong == "matrices are resharded in float32" else x
        x = _cut(_cut(_cut(x, places["stacks"]), step), places.get("updates"))
        return _cut(x, sharding).astype(g.dtype)

    def average(updates: Any, kept: Any, params: Any = None) -> Any:
        new = optax.apply_updates(params, updates)
        old = jax.tree.map(lambda x: _cut(x, places.get("averages")), kept)
        return updates, jax.tree.map(lambda a, b: 0.999 * a + 0.001 * b, old, new)

    muon = optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.stateless(lambda updates, _: jax.tree.map(orthogonal, updates, own)),
        optax.scale(-0.02),
    )
    tx = optax.chain(
        optax.partition({"muon": muon, "adam": optax.adam(1e-3)}, labels),
        optax.GradientTransformation(lambda params: params, average),
    )

    def layer(x: Any, w: Any) -> Any:
        w = jax.tree.map(lambda leaf: _cut(leaf, places.get("kernels")), w)
        qkv = jnp.einsum("btd,cde->cbte", rms_norm(x, w["norm1"]), w["qkv"])
        q, k, v = _cut(qkv.reshape(*qkv.shape[:3], heads, -1), places["heads"])
        y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ w["o"]
        x = x + checkpoint_name(_cut(y, places["residual"]), "summed")
        y = jax.nn.gelu(_cut(rms_norm(x, w["norm2"]) @ w["up"], places["hidden"])) @ w["down"]
        x = x + checkpoint_name(_cut(y, places["residual"]), "summed")
        return _cut(x, places["residual"]), x

    policy = jax.checkpoint_policies.save_only_these_names("summed")
    is_again = wrong == "sums over tp are computed again"
    kept = jax.checkpoint(layer, policy=None if is_again else policy)

    def loss(params: Any, batch: Any) -> Any:
        model, images = eqx.combine(params, static), batch["images"]
        if "noise" in places:
            noise = jax.random.normal(jax.random.key(0), images.shape)
            images = images + 0.1 * _cut(noise, places["noise"])
        if wrong == "images are mixed across the batch":
            images = 0.7 * images + 0.3 * images[::-1]
        x = jax.vmap(model.patch)(images).reshape(images.shape[0], width, -1).mT
        x = _cut(x + model.places, places["residual"])
        x, states = jax.lax.scan(layer if wrong == "no remat" else kept, x, model.blocks)
        x = _cut(rms_norm(x, model.norm.weight).mean(1), places["pooled"])
        scores = _cut(x @ model.head.weight.T, places["logits"])
        smooth = 0.9 * jax.nn.one_hot(batch["labels"], classes) + 0.1 / classes
        metrics = {
            "states of each layer are returned": states,
            "gathered logits are returned": _cut(scores, P()),
            "logits are returned": scores,
        }
        return (jax.nn.logsumexp(scores, -1) - (scores * smooth).sum(-1)).mean(), metrics.get(wrong)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        grads = jax.tree.map(lambda g: _cut(g, places.get("gradients")), grads)
        grads = jax.tree.map(_cut, grads, shardings)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    spec, state = places.get("batch", P("fsdp")), jax.eval_shape(tx.init, shapes)
    batch = {"images": abstract(mesh, spec, images, "float32")}
    batch["labels"] = abstract(mesh, spec, images[:1])
    names, moments = ("moments", "averages"), plan.for_optimizer(state).abstract()
    given = tuple(
        _whole(mesh, x) if wrong == f"{name} come in whole" else x
        for name, x in zip(names, moments, strict=True)
    )
    with jax.set_mesh(mesh):
        return train_step(
            step, plan, state, batch, given=(plan.abstract(), given),
            donate=wrong != "not donated", returned=wrong != "no out_shardings",
        )  # fmt: skip


_VISION_FAULTS: Final = {
    **_slips(
        "matrices are resharded at once", "matrices are resharded in float32",
        "matrices are orthogonalised in turn", "sums over tp are computed again",
        "images are mixed across the batch", "no remat", "states of each layer are returned",
        "gathered logits are returned", "moments come in whole", "averages come in whole",
        "not donated",
    ),
    "no constraints": dict.fromkeys((*_VIT_PLACES, "half")),
    "matrices are orthogonalised as they are cut": {"stacks": None, "half": None},
    "matrices are orthogonalised whole": {"stacks": P()},
    "matrices are cut over fsdp alone": {"stacks": P("fsdp")},
    "updates are gathered": {"updates": P()},
    "averages are whole where they are computed": {"averages": P()},
    "gradients are constrained to be whole": {"gradients": P()},
    "kernels are gathered over tp": {"kernels": P()},
    "the residual is whole": {"residual": P()},
    "the residual is cut over features": {"residual": P("fsdp", None, "tp")},
    "heads are whole over tp": {"heads": P(None, "fsdp")},
    "heads are cut over tokens": {"heads": P(None, "fsdp", "tp")},
    "hidden is whole over the batch": {"hidden": P(None, None, "tp")},
    "hidden is whole over tp": {"hidden": P("fsdp")},
    "logits are whole": {"logits": P()},
    "blocks are planned over layers": {"rules": [("qkv|/o$|up|down", P(("fsdp", "tp")))]},
    "the second kernel is planned as the first": {"rules": [("down", P(None, "fsdp", "tp"))]},
    "kernels are planned to be whole": {"rules": [("qkv|/o$|up|down", P())]},
    "kernels are whole over fsdp": {
        "rules": [("qkv", P(None, None, None, "tp")), ("up", P(None, None, "tp")), ("/o$|down", P(None, "tp"))],
    },
    "the batch comes in whole": {"batch": P()},
    # These look wrong.
    "noise is whole": {"noise": P()},
    "logits are returned": {"wrong": "logits are returned"},
    "no out_shardings": {"wrong": "no out_shardings"},
}  # fmt: skip

# Serving

_CHUNK_PLACES: Final = {
    **dict.fromkeys(("heads", "read", "written"), P("dp", None, None, "tp")),
    **dict.fromkeys(("hidden", "logits"), P("dp", None, None, "tp")),
    "residual": P("dp"),
}


def _chunk(wrong: str = "", rules: Any = (), **specs: P | None) -> Built:
    """Read a chunk of a prompt in each slot into pages of a cache, and guess what comes next."""
    mesh = mesh_of(dp=2, tp=4)
    places: dict[str, Any] = {**_CHUNK_PLACES, **specs}
    layers, words, width, inner, heads, keys, size = 4, 4096, 256, 1024, 8, 4, 32
    groups, slots, pages, page = 2, 8, 16, 16  # of a group of slots on dp; of a slot; tokens
    kernels: dict[str, Any] = dict.fromkeys("kv", (width, keys, size))
    kernels |= {"q": (width, heads, size)}
    kernels |= {"o": (heads, size, width), "gate": (width, inner), "up": (width, inner)}
    kernels |= {"down": (inner, width), "norm1": (width,), "norm2": (width,)}
    weights = {
        "embed": jax.ShapeDtypeStruct((words, width), "bfloat16"),
        "layers": _stacked(layers, kernels, "bfloat16"),
        "head": jax.ShapeDtypeStruct((width, words), "bfloat16"),
    }
    rules = [
        *rules, ("norm", P()), ("embed", P("tp")), ("head", P(None, "tp")),
        ("/[qkv]$|gate|up", P(None, None, "tp")), ("/o$|down", P(None, "tp")),
    ]  # fmt: skip
    plan = sr.plan(weights, rules, mesh)
    shape = (layers, groups, slots * pages, page, keys, size)
    pool = dict.fromkeys("kv", jax.ShapeDtypeStruct(shape, "bfloat16"))
    spec = places.get("cache", P(None, "dp", None, None, "tp"))
    cache = sr.plan(pool, [("[kv]", spec)], mesh)

    def attend(q: Any, k: Any, v: Any, start: Any) -> Any:
        """Attend from a chunk that begins at start to all of a slot's pages."""
        if wrong == "keys and values are repeated for queries":
            k, v = (_cut(jnp.repeat(x, heads // keys, 3), places["read"]) for x in (k, v))
        q = q.reshape(*q.shape[:3], k.shape[3], -1, size)
        allowed = jnp.arange(pages * page) <= (start[..., None] + jnp.arange(page))[..., None]
        scores = jnp.einsum("gstkhd,gsukd->gskhtu", q, k).astype("float32") * size**-0.5
        if "mask" in places:
            mask = jnp.broadcast_to(allowed[:, :, None, None], scores.shape)
            scores = scores + _cut(jnp.where(mask, 0, -1e9), places["mask"])
        scores = jax.nn.softmax(jnp.where(allowed[:, :, None, None], scores, -1e9))
        y = jnp.einsum("gskhtu,gsukd->gstkhd", scores.astype(v.dtype), v)
        return y.reshape(*y.shape[:3], heads, size)

    def serve(weights: Any, cache: Any, batch: Any) -> Any:
        table, start = batch["table"], batch["start"]  # [group, slot, page]; [group, slot]
        current = jnp.take_along_axis(table, start[..., None] // page, -1)[..., 0]
        if wrong == "the cache is widened":
            cache = jax.tree.map(lambda x: x.astype("float32"), cache)

        def write(pool: Any, i: Any, new: Any) -> Any:
            new = _cut(new.astype(pool.dtype), places["written"])
            old = jax.lax.dynamic_index_in_dim(pool, i, keepdims=False)
            new = jax.vmap(lambda o, at, n: o.at[at].set(n))(old, current, new)
            return jax.lax.dynamic_update_index_in_dim(pool, new, i, 0)

        def read(pool: Any, i: Any) -> Any:
            pool = jax.lax.dynamic_index_in_dim(pool, i, keepdims=False)
            if wrong == "pages are looked up in all groups":
                offsets = jnp.arange(groups)[:, None, None] * pool.shape[1]
                found = pool.reshape(-1, *pool.shape[2:])[table + offsets]
            else:
                found = jax.vmap(lambda p, at: p[at])(pool, table)
            return _cut(found.reshape(groups, slots, -1, keys, size), places["read"])

        x = _cut(_cut(weights["embed"], places.get("table"))[batch["tokens"]], places["residual"])

        def layer(carry: Any, inputs: Any) -> Any:
            x, pools = carry
            w, i = inputs
            y = rms_norm(x, w["norm1"])
            q, k, v = (
                _cut(jnp.einsum("gstd,dhk->gsthk", y, w[name]), places["heads"]) for name in "qkv"
            )
            pools = {"k": write(pools["k"], i, k), "v": write(pools["v"], i, v)}
            y = attend(q, read(pools["k"], i), read(pools["v"], i), start).astype(x.dtype)
            x = _cut(x + jnp.einsum("gsthk,hkd->gstd", y, w["o"]), places["residual"])
            y = rms_norm(x, w["norm2"])
            y = _cut(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), places["hidden"])
            x = _cut(x + y @ w["down"], places["residual"])
            return (x, pools), x

        w = jax.tree.map(lambda leaf: _cut(leaf, places.get("weights")), weights["layers"])
        if wrong == "layers are unrolled and their caches stacked":
            parts = []
            for i in range(layers):
                own = {name: x[i : i + 1] for name, x in cache.items()}
                (x, own), _ = layer((x, own), (jax.tree.map(lambda leaf, i=i: leaf[i], w), 0))
                parts.append(own)
            cache = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
            states = x
        else:
            (x, cache), states = jax.lax.scan(layer, (x, cache), (w, jnp.arange(layers)))
        is_whole = wrong == "logits of all tokens of the chunk are computed"
        x = x if is_whole else x[:, :, -1:]
        scores = _cut((x @ weights["head"]).astype("float32"), places["logits"])[:, :, -1]
        if "noise" in places:
            noise = jax.random.gumbel(jax.random.key(0), scores.shape)
            scores = scores + _cut(noise, places["noise"])
        best = scores.argmax(-1)
        if wrong == "the greedy token is a top_k of one":
            best = jax.lax.top_k(scores, 1)[1][..., 0]
        if wrong == "the greedy token is of sorted logits":
            best = jnp.argsort(scores, -1)[..., -1]
        cache = jax.tree.map(lambda x: x.astype("bfloat16"), cache)
        kept = {
            "states of each layer are returned": states,
            "chances are returned whole": _cut(jax.nn.softmax(scores), P()),
        }
        return cache, scores, best, kept.get(wrong)

    spec = places.get("batch", P("dp"))
    sizes = {"tokens": (page,), "table": (pages,), "start": ()}
    batch = {n: abstract(mesh, spec, (groups, slots, *size)) for n, size in sizes.items()}
    with jax.set_mesh(mesh):
        out = None if wrong == "no out_shardings" else (cache.shardings(), None, None, None)
        donated = () if wrong == "the cache is not donated" else 1
        jitted = jax.jit(serve, donate_argnums=donated, out_shardings=out)
        compiled = jitted.lower(plan.abstract(), cache.abstract(), batch).compile()
    inputs = (plan, cache, dict.fromkeys(batch, spec))
    return Built(compiled, inputs, (cache, None, None, None))


_CHUNK_FAULTS: Final = {
    **_slips(
        "keys and values are repeated for queries", "the cache is widened",
        "pages are looked up in all groups", "layers are unrolled and their caches stacked",
        "logits of all tokens of the chunk are computed", "the greedy token is a top_k of one",
        "the greedy token is of sorted logits", "states of each layer are returned",
        "chances are returned whole", "the cache is not donated",
    ),
    "no constraints": dict.fromkeys(_CHUNK_PLACES),
    "the cache is planned whole over tp": {"cache": P(None, "dp")},
    "the cache is planned whole over dp": {"cache": P(None, None, None, None, "tp")},
    "the cache is planned over pages": {"cache": P(None, "dp", "tp")},
    "the cache is planned over places in pages": {"cache": P(None, "dp", None, "tp")},
    "the cache is planned over layers": {"cache": P("dp", None, None, None, "tp")},
    "pages are read whole over tp": {"read": P("dp")},
    "pages are read whole over dp": {"read": P(None, None, None, "tp")},
    "pages are read cut over tokens": {"read": P("dp", None, "tp")},
    "new keys and values are whole": {"written": P()},
    "heads are whole over tp": {"heads": P("dp")},
    "hidden is whole over tp": {"hidden": P("dp")},
    "the residual is whole": {"residual": P()},
    "the residual is cut over features": {"residual": P("dp", None, None, "tp")},
    "logits are whole": {"logits": P()},
    "the table of words is gathered": {"table": P()},
    "masks are whole": {"mask": P()},
    "weights are gathered before the layers": {"weights": P()},
    "weights are planned over dp too": {
        "rules": [("/[qkv]$|gate|up", P(None, "dp", "tp")), ("/o$", P(None, "tp", None, "dp")), ("down", P(None, "tp", "dp"))],
    },
    "down is planned as a column": {"rules": [("down", P(None, None, "tp"))]},
    "the head is planned by rows": {"rules": [("head", P("tp"))]},
    "weights are planned to be whole": {"rules": [("/[qkvo]$|gate|up|down", P())]},
    "the table and the head are planned to be whole": {"rules": [("embed|head", P())]},
    "noise is whole": {"noise": P()},
    # These look wrong.
    "no out_shardings": {"wrong": "no out_shardings"},
    "the batch comes in whole": {"batch": P()},
}  # fmt: skip

STEPS: Final = (
    Step("a Mixtral with accumulation", _mixtral, _MIXTRAL_FAULTS),
    Step("a vision transformer under Muon", _vision, _VISION_FAULTS),
    Step("serving in chunks", _chunk, _CHUNK_FAULTS),
)
