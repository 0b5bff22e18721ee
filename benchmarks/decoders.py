"""Steps of decoders in plain JAX, which the benchmarks of steps compile, solve and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

HEAD = 128
Params = dict[str, Any]
# Blocks of splash attention, and what is computed of one at once: the largest for which the default
# scoped memory is enough. MaxText's default on v5e and v5p are two kernels in the backward pass.
BLOCKS = {"v6e": (2048, 1024), "tpu7x": (2048, 1024), "v5e": (1024, 512), "v5p": (1024, 512)}
FUSED = ("v6e", "tpu7x")
STRIDE = 1009


def causal(_: Decoder, q: jax.Array, k: jax.Array, v: jax.Array, place: Any = None) -> jax.Array:
    """Attend causally, or to what a cache has until a place; several queries may share a key."""
    length = k.shape[1]
    mask = (
        jnp.tril(jnp.ones((length, length), bool)) if place is None else jnp.arange(length) <= place
    )
    groups = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("btgqk,bsgk->bgqts", groups, k).astype("float32") * q.shape[-1] ** -0.5
    chances = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1).astype(q.dtype)
    return jnp.einsum("bgqts,bsgk->btgqk", chances, v).reshape(*q.shape[:3], -1)


def splash(kind: str, step: Decoder, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend causally by the kernel for TPUs of a kind, each device for its sequences and heads."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        heads, length = q.shape[1:3]
        block, computed = (min(size, length) for size in BLOCKS[kind])
        is_fused = kind in FUSED
        sizes = kernels.BlockSizes(
            block_q=computed, block_kv=block, block_kv_compute=computed,
            block_q_dkv=computed, block_kv_dkv=block, block_kv_dkv_compute=computed,
            block_q_dq=None if is_fused else computed, block_kv_dq=None if is_fused else block,
            use_fused_bwd_kernel=is_fused,
        )  # fmt: skip
        mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
        make = kernels.make_splash_mha
        return jax.vmap(make(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes))(q, k, v)

    # Queries and keys are padded to what the kernel takes.
    q, k = (jnp.pad(a, [(0, 0)] * 3 + [(0, -a.shape[-1] % HEAD)]) for a in (q, k))
    spec = P(step.batch, step.tp)
    attend = jax.shard_map(attend, in_specs=spec, out_specs=spec, check_vma=False)
    return jnp.swapaxes(attend(*(jnp.swapaxes(a, 1, 2) for a in (q, k, v))), 1, 2)


def dropping(step: Decoder, x: jax.Array, w: Params) -> jax.Array:
    """Send tokens to experts that have room, by products with masks."""
    room = int(x.shape[1] * step.chosen * step.capacity / step.experts)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ w["router"]), step.chosen)
    is_of = jax.nn.one_hot(chosen, step.experts, dtype="int32")
    places = jnp.cumsum(is_of.reshape(len(x), -1, step.experts), 1).reshape(is_of.shape) * is_of
    # A token goes to an expert once at most.
    sent = jax.nn.one_hot(places.sum(2) - 1, room, dtype=x.dtype)
    combined = sent * jnp.einsum("btke,btk->bte", is_of.astype(x.dtype), weights)[..., None]
    ep = "ep" if "ep" in step.axes else None
    cut = partial(step.cut, first=ep, second=tuple(axis for axis in step.batch if axis != "ep"))
    y = cut(jnp.einsum("btd,btec->ebcd", x, sent))
    gate, up = (cut(jnp.einsum("ebcd,edf->ebcf", y, w["experts"][name])) for name in ("gate", "up"))
    y = cut(jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(gate) * up, w["experts"]["down"]))
    return step.cut(jnp.einsum("ebcd,btec->btd", y, combined))


def dropless(step: Decoder, x: jax.Array, w: Params) -> jax.Array:
    """Permute tokens to groups of equal size, one for each expert, and gather all experts."""
    specs = dict.fromkeys(("gate", "up"), P(None, "fsdp", step.tp)) | {
        "down": P(None, step.tp, "fsdp")
    }

    def of_device(x: jax.Array, router: jax.Array, kernels: Params) -> jax.Array:
        gathered = {
            name: jax.lax.all_gather(kernel, "fsdp", axis=specs[name].index("fsdp"), tiled=True)
            for name, kernel in kernels.items()
        }
        tokens = x.reshape(-1, step.width)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(tokens @ router), step.chosen)
        # The TPU's compiler takes minutes for a long sort: these stand for a permutation, and its
        # inverse, that depend on the router.
        order, back = (
            (jnp.arange(chosen.size) * STRIDE + chosen[end, end]) % chosen.size for end in (0, -1)
        )
        y = tokens[order // step.chosen].reshape(step.experts, -1, step.width)
        gate, up = (jnp.einsum("ecd,edf->ecf", y, gathered[name]) for name in ("gate", "up"))
        y = jnp.einsum("ecf,efd->ecd", jax.nn.silu(gate) * up, gathered["down"])
        y = y.reshape(-1, step.width)[back].reshape(len(tokens), -1, step.width)
        y = jnp.einsum("tkd,tk->td", y, weights)
        return (y if step.tp is None else jax.lax.psum(y, step.tp)).reshape(x.shape)

    rows = P(step.batch)
    experts = jax.shard_map(of_device, in_specs=(rows, P(), specs), out_specs=rows, check_vma=False)
    return experts(step.cut(x), w["router"], w["experts"])


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder, and how a step of it is cut; those of experts are 0 without them."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv: int
    vocab: int
    gated: bool = True
    experts: int = 0
    chosen: int = 0
    capacity: float = 0.0
    """Share of its tokens that an expert has room for; 0 if none is dropped."""
    shared: int = 0
    """Hidden size of the expert that all tokens go to."""
    dense: int = 0
    """Hidden size of every other layer's MLP, which has no experts."""
    latent: Sequence[int] = ()
    """Of latent attention: ranks of queries and of keys with values, and rotated size."""
    is_turned: bool = False
    """Whether heads are rotated by positions."""
    axes: Mapping[str, int] = field(default_factory=dict)
    length: int = 4096
    dtype: str = "float32"
    """Of the parameters; products are of bfloat16."""
    saved: Sequence[str] | None = ()
    """What is kept of each layer for the backward pass, by its names; None: everything."""
    attend: Callable[..., jax.Array] = causal
    send: Callable[..., jax.Array] | None = None
    """To experts; by default as `capacity` says."""

    @property
    def batch(self) -> tuple[str, ...]:
        """Axes that cut the sequences."""
        return tuple(axis for axis in self.axes if axis != "tp")

    @property
    def tp(self) -> str | None:
        """Axis that cuts heads and hidden sizes, if there is one."""
        return "tp" if "tp" in self.axes else None

    def cut(self, x: jax.Array, second: Any = None, third: Any = None, *, first: Any = ()) -> Any:
        """Constrain an activation, whose first dimension are sequences, unless it is given."""
        spec = P(self.batch if first == () else first, second, third)
        return jax.lax.with_sharding_constraint(x, spec) if self.axes else x

    @property
    def body(self) -> list[Params]:
        """Shapes of the layers that differ."""
        width, heads = self.width, self.heads
        both: Params = {"norm1": (width,), "norm2": (width,), "o": (heads, HEAD, width)}
        if self.latent:
            queries, values, turned = self.latent
            both |= {"q_a": (width, queries), "q": (queries, heads, HEAD + turned)}
            both |= {"kv_a": (width, values + turned)} | dict.fromkeys("kv", (values, heads, HEAD))
        else:
            both |= {"q": (width, heads, HEAD)} | dict.fromkeys("kv", (width, self.kv, HEAD))

        def mlp(hidden: int) -> Params:
            kernels = {"up": (width, hidden), "down": (hidden, width)}
            return kernels | ({"gate": (width, hidden)} if self.gated else {})

        layer = both | ({} if self.experts else {"mlp": mlp(self.hidden)})
        if self.experts:
            many = {name: (self.experts, *shape) for name, shape in mlp(self.hidden).items()}
            layer |= {"router": (width, self.experts), "experts": many}
            layer |= {"mlp": mlp(self.shared)} if self.shared else {}
        return [layer, both | {"mlp": mlp(self.dense)}] if self.dense else [layer]

    def stacks(self, count: int) -> Params:
        """Return the kernels of so many bodies, stacked."""
        body = {str(number): layer for number, layer in enumerate(self.body)}
        return arrays(body, self.dtype, (count,))

    @property
    def ends(self) -> Params:
        """The tables of the tokens and of the logits."""
        tables = {"embed": (self.vocab, self.width), "head": (self.width, self.vocab)}
        return arrays(tables, self.dtype)

    @property
    def params(self) -> Params:
        """All parameters."""
        return self.ends | {"layers": self.stacks(self.layers // len(self.body))}

    def rules(self) -> list[tuple[str, P]]:
        """Shard the stacks, as MaxText does for FSDP, tensor and expert parallelism."""
        fsdp: Any = "fsdp" if "ep" not in self.axes else ("fsdp", "ep")
        tp, ep = (axis if axis in self.axes else None for axis in ("tp", "ep"))
        return [
            ("norm|router", P(None, "fsdp")),
            ("experts/(up|gate)", P(None, ep, "fsdp", tp)),
            ("experts/down", P(None, ep, tp, "fsdp")),
            ("/(q_a|kv_a)$", P(None, fsdp)),
            ("/(q|k|v)$", P(None, fsdp, tp)),
            ("/o$", P(None, tp, None, fsdp)),
            ("up|gate", P(None, fsdp, tp)),
            ("down", P(None, tp, fsdp)),
            ("embed$", P(tp, fsdp)),
            ("head$", P(fsdp, tp)),
        ]

    def attention(self, x: jax.Array, w: Params, cache: Any, place: Any) -> tuple[jax.Array, Any]:
        """Attend to the sequence, or to a cache, which is written at a place."""
        if self.latent:
            size = self.latent[-1]
            q = jnp.einsum("btd,dhk->bthk", x @ w["q_a"], w["q"])
            compressed = x @ w["kv_a"]
            k, v = (jnp.einsum("btd,dhk->bthk", compressed[..., :-size], w[name]) for name in "kv")
            of_all = jnp.broadcast_to(compressed[..., None, -size:], (*k.shape[:-1], size))
            q = jnp.concatenate([q[..., :HEAD], rotated(q[..., HEAD:])], -1)
            k = jnp.concatenate([k, rotated(of_all)], -1)
        else:
            q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[name]) for name in "qkv")
            q, k = (rotated(q), rotated(k)) if self.is_turned else (q, k)
        q, k, v = (
            checkpoint_name(self.cut(a, None, self.tp), name)
            for a, name in zip((q, k, v), "qkv", strict=True)
        )
        if cache is not None:
            update = jax.lax.dynamic_update_slice
            k, v = cache = [
                update(*pair, (0, place, 0, 0)) for pair in zip(cache, (k, v), strict=True)
            ]
        mixed = self.attend(self, q, k, v) if place is None else self.attend(self, q, k, v, place)
        mixed = checkpoint_name(mixed, "context")
        return checkpoint_name(jnp.einsum("bthk,hkd->btd", mixed, w["o"]), "out"), cache

    def mlp(self, x: jax.Array, w: Params) -> jax.Array:
        """Apply an MLP, gated or not."""
        up = checkpoint_name(self.cut(x @ w["up"], None, self.tp), "up")
        if "gate" not in w:
            return checkpoint_name(jax.nn.gelu(up) @ w["down"], "down")
        gate = checkpoint_name(self.cut(x @ w["gate"], None, self.tp), "gate")
        return checkpoint_name((jax.nn.silu(gate) * up) @ w["down"], "down")

    def layer(self, x: jax.Array, row: Any, place: Any = None) -> tuple[jax.Array, Any]:
        """Apply one layer to x, with its kernels and a cache."""
        w, cache = jax.tree.map(lambda kernel: kernel.astype("bfloat16"), row[0]), row[1]
        with jax.named_scope("attention"):
            mixed, cache = self.attention(normed(x, w["norm1"]), w, cache, place)
            x = self.cut(x + mixed, None, self.tp)
        y = normed(x, w["norm2"])
        if "mlp" in w:
            with jax.named_scope("mlp"):
                x = x + self.mlp(y, w["mlp"])
        if "experts" in w:
            with jax.named_scope("experts"):
                x = x + (self.send or (dropping if self.capacity else dropless))(self, y, w)
        return self.cut(x, None, self.tp), cache

    def through(self, stacks: Params, x: jax.Array, cache: Any = None, place: Any = None) -> Any:
        """Scan over the layers, with what is saved of each; return x, and the caches."""
        layer: Any = partial(self.layer, place=place)
        if self.saved is not None:
            policy = jax.checkpoint_policies.save_only_these_names(*self.saved)
            layer = jax.checkpoint(layer, policy=policy)

        def body(x: jax.Array, row: Any) -> Any:
            w, cache = row
            for number in sorted(w):
                x, cache = layer(x, (w[number], cache))
            return x, cache

        return jax.lax.scan(body, x, (stacks, cache))

    def embedded(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Look tokens up."""
        with jax.named_scope("embedding"):
            return self.cut(params["embed"].astype("bfloat16")[tokens], None, self.tp)

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Return the logits of the next tokens, in float32."""
        with jax.named_scope("head"):
            logits = self.cut(normed(x, 1.0) @ params["head"].astype("bfloat16"), None, self.tp)
            return logits.astype("float32")

    def loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Return the cross entropy of tokens behind all layers."""
        x, _ = self.through(params["layers"], self.embedded(params, tokens))
        return entropy(self.logits(params, x), tokens)

    def planned(self, params: Params, mesh: Any) -> sr.Plan:
        """Plan parameters with Adam's moments."""
        moments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), params)
        return sr.plan({"params": params, "mu": moments, "nu": moments}, self.rules(), mesh)

    def tokens(self, mesh: Any, rows: int) -> jax.ShapeDtypeStruct:
        """Return the tokens of so many sequences for each device."""
        shape = rows * prod(self.axes.values()), self.length
        return jax.ShapeDtypeStruct(shape, "int32", sharding=NamedSharding(mesh, P(self.batch)))


def arrays(tree: Any, dtype: str, lead: tuple[int, ...] = ()) -> Any:
    """Return abstract arrays for shapes."""
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    make = lambda shape: jax.ShapeDtypeStruct((*lead, *shape), dtype)  # noqa: E731
    return jax.tree.map(make, tree, is_leaf=is_shape)


def normed(x: jax.Array, scale: jax.Array | float) -> jax.Array:
    """Scale by the root of the mean square."""
    mean = jnp.mean(jnp.square(x.astype("float32")), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Rotate halves of the heads by the positions."""
    size = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * jnp.exp2(-jnp.arange(size) / 8.0)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the cross entropy, by products with one-hot targets."""
    is_token = tokens[..., None] == jnp.arange(logits.shape[-1])
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(is_token, logits, 0), -1))


def adam(state: Params, gradients: Any) -> Params:
    """Return the next state, without Adam's corrections."""
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], gradients)
    nu = jax.tree.map(lambda n, g: 0.95 * n + 0.05 * g * g, state["nu"], gradients)
    params = jax.tree.map(
        lambda p, m, n: (p - 1e-4 * m / (jnp.sqrt(n) + 1e-8)).astype(p.dtype),
        state["params"], mu, nu,
    )  # fmt: skip
    return {"params": params, "mu": mu, "nu": nu}


def trained(loss: Callable[..., jax.Array], state: Params, tokens: jax.Array) -> Params:
    """Take a step of Adam."""
    return adam(state, jax.grad(loss)(state["params"], tokens))
