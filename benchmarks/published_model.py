"""Decoders of published runs in plain JAX: what `published_runs` compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
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


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder; those of experts are 0 without them."""

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

    @property
    def layers_of_body(self) -> int:
        """Layers that differ."""
        return 2 if self.dense else 1

    @property
    def matmul_parameters(self) -> int:
        """Parameters that multiply each token, with the head: of a model without experts."""
        attention = 2 * self.width * HEAD * (self.heads + self.kv)
        mlp = (3 if self.gated else 2) * self.width * self.hidden
        return self.layers * (attention + mlp) + self.width * self.vocab


@dataclass(frozen=True)
class Step:
    """Part of a step of a model, on the axes of a mesh."""

    model: Model
    length: int
    saved: Sequence[str]
    axes: Mapping[str, int]
    kind: str
    """Of TPUs, as a topology's name begins."""

    @property
    def batch(self) -> Any:
        """Axes that cut the sequences."""
        return tuple(axis for axis in self.axes if axis != "tp")

    @property
    def tp(self) -> str | None:
        """Axis that cuts heads and hidden sizes, if there is one."""
        return "tp" if "tp" in self.axes else None

    def cut(self, x: jax.Array, *spec: Any) -> jax.Array:
        """Constrain an activation, whose first dimension are sequences."""
        return jax.lax.with_sharding_constraint(x, P(self.batch, *spec))


def shapes(model: Model, repeats: int) -> Params:
    """Return the kernels of a body of layers, stacked."""
    width, heads, kv = model.width, model.heads, model.kv
    of_layer: Params = {"norm1": (width,), "norm2": (width,), "o": (heads, HEAD, width)}
    if model.latent:
        queries, values, rotated = model.latent
        of_layer |= {
            "q_a": (width, queries),
            "q": (queries, heads, HEAD + rotated),
            "kv_a": (width, values + rotated),
            "k": (values, heads, HEAD),
            "v": (values, heads, HEAD),
        }
    else:
        of_layer |= {"q": (width, heads, HEAD), "k": (width, kv, HEAD), "v": (width, kv, HEAD)}

    def mlp(hidden: int) -> Params:
        kernels = {"up": (width, hidden), "down": (hidden, width)}
        return kernels | ({"gate": (width, hidden)} if model.gated else {})

    layer = of_layer | ({"mlp": mlp(model.hidden)} if not model.experts else {})
    if model.experts:
        many = {name: (model.experts, *shape) for name, shape in mlp(model.hidden).items()}
        layer |= {"router": (width, model.experts), "experts": many}
        layer |= {"mlp": mlp(model.shared)} if model.shared else {}
    body = [layer, of_layer | {"mlp": mlp(model.dense)}] if model.dense else [layer]
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct((repeats, *shape), "float32"),
        {str(number): layer for number, layer in enumerate(body)},
        is_leaf=lambda node: isinstance(node, tuple),
    )


def shapes_of_ends(model: Model) -> Params:
    """Return the tables of the tokens and of the logits."""
    return {
        "embed": jax.ShapeDtypeStruct((model.vocab, model.width), "float32"),
        "head": jax.ShapeDtypeStruct((model.width, model.vocab), "float32"),
    }


def rules(axes: Mapping[str, int]) -> list[tuple[str, P]]:
    """Shard the stacks, as MaxText does for FSDP, tensor and expert parallelism."""
    fsdp = "fsdp" if "ep" not in axes else ("fsdp", "ep")
    tp, ep = (axis if axis in axes else None for axis in ("tp", "ep"))
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


def attention(step: Step, x: jax.Array, w: Params) -> jax.Array:
    """Attend causally, by splash attention."""
    model = step.model
    if model.latent:
        size = model.latent[-1]
        q = jnp.einsum("btd,dhk->bthk", x @ w["q_a"], w["q"])
        compressed = x @ w["kv_a"]
        k = jnp.einsum("btd,dhk->bthk", compressed[..., :-size], w["k"])
        v = jnp.einsum("btd,dhk->bthk", compressed[..., :-size], w["v"])
        of_all = jnp.broadcast_to(compressed[..., None, -size:], (*k.shape[:-1], size))
        # Queries and keys are padded to what the kernel takes.
        q = jnp.concatenate([q[..., :HEAD], rotated(q[..., HEAD:])], -1)
        k = jnp.concatenate([k, rotated(of_all)], -1)
        q, k = (jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, HEAD - size))) for a in (q, k))
    else:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[name]) for name in "qkv")
        if model.gated:
            q, k = rotated(q), rotated(k)
    q, k, v = (
        checkpoint_name(step.cut(a, None, step.tp), name)
        for a, name in zip((q, k, v), "qkv", strict=True)
    )
    spec = P(step.batch, step.tp)
    attend = jax.shard_map(
        partial(_attend, step.kind), in_specs=spec, out_specs=spec, check_vma=False
    )
    mixed = attend(*(jnp.swapaxes(a, 1, 2) for a in (q, k, v)))
    mixed = checkpoint_name(jnp.swapaxes(mixed, 1, 2), "context")
    return checkpoint_name(jnp.einsum("bthk,hkd->btd", mixed, w["o"]), "out")


def _attend(kind: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    heads, length = q.shape[1:3]
    block, computed = (min(size, length) for size in BLOCKS[kind])
    is_fused = kind in FUSED
    sizes = splash.BlockSizes(
        block_q=computed, block_kv=block, block_kv_compute=computed,
        block_q_dkv=computed, block_kv_dkv=block, block_kv_dkv_compute=computed,
        block_q_dq=None if is_fused else computed, block_kv_dq=None if is_fused else block,
        use_fused_bwd_kernel=is_fused,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    mixed: Any = jax.vmap(kernel)(q, k, v)
    return mixed


def mlp(step: Step, x: jax.Array, w: Params) -> jax.Array:
    """Apply an MLP, gated or not."""
    up = checkpoint_name(step.cut(x @ w["up"], None, step.tp), "up")
    if "gate" in w:
        gate = checkpoint_name(step.cut(x @ w["gate"], None, step.tp), "gate")
        hidden = jax.nn.silu(gate) * up
    else:
        hidden = jax.nn.gelu(up)
    return checkpoint_name(hidden @ w["down"], "down")


def dropping_experts(step: Step, x: jax.Array, w: Params) -> jax.Array:
    """Send tokens to experts that have room, by products with masks."""
    model, length = step.model, x.shape[1]
    room = int(length * model.chosen * model.capacity / model.experts)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ w["router"]), model.chosen)
    is_of = jax.nn.one_hot(chosen, model.experts, dtype="int32")
    places = jnp.cumsum(is_of.reshape(len(x), -1, model.experts), 1).reshape(is_of.shape) * is_of
    # A token goes to an expert once at most.
    sent = jax.nn.one_hot(places.sum(2) - 1, room, dtype=x.dtype)
    combined = sent * jnp.einsum("btke,btk->bte", is_of.astype(x.dtype), weights)[..., None]
    experts = w["experts"]
    ep = "ep" if "ep" in step.axes else None
    batch = tuple(axis for axis in step.batch if axis != "ep")

    def cut(y: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(y, P(ep, batch))

    y = cut(jnp.einsum("btd,btec->ebcd", x, sent))
    gate = cut(jnp.einsum("ebcd,edf->ebcf", y, experts["gate"]))
    up = cut(jnp.einsum("ebcd,edf->ebcf", y, experts["up"]))
    y = cut(jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(gate) * up, experts["down"]))
    return step.cut(jnp.einsum("ebcd,btec->btd", y, combined))


def dropless_experts(step: Step, x: jax.Array, w: Params) -> jax.Array:
    """Permute tokens to groups of equal size, one for each expert, and gather all experts."""
    model, tp = step.model, step.tp
    specs = {
        "gate": P(None, "fsdp", tp), "up": P(None, "fsdp", tp), "down": P(None, tp, "fsdp"),
    }  # fmt: skip

    def of_device(x: jax.Array, router: jax.Array, kernels: Params) -> jax.Array:
        gathered = {
            name: jax.lax.all_gather(kernel, "fsdp", axis=specs[name].index("fsdp"), tiled=True)
            for name, kernel in kernels.items()
        }
        tokens = x.reshape(-1, model.width)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(tokens @ router), model.chosen)
        # The TPU's compiler takes minutes for a long sort: these stand for a permutation, and its
        # inverse, that depend on the router.
        order = (jnp.arange(chosen.size) * STRIDE + chosen[0, 0]) % chosen.size
        back = (jnp.arange(chosen.size) * STRIDE + chosen[-1, -1]) % chosen.size
        y = tokens[order // model.chosen].reshape(model.experts, -1, model.width)
        gate = jnp.einsum("ecd,edf->ecf", y, gathered["gate"])
        up = jnp.einsum("ecd,edf->ecf", y, gathered["up"])
        y = jnp.einsum("ecf,efd->ecd", jax.nn.silu(gate) * up, gathered["down"])
        y = y.reshape(-1, model.width)[back]
        y = jnp.einsum("tkd,tk->td", y.reshape(len(tokens), -1, model.width), weights)
        return (y if tp is None else jax.lax.psum(y, tp)).reshape(x.shape)

    experts = jax.shard_map(
        of_device, in_specs=(P(step.batch), P(), specs), out_specs=P(step.batch), check_vma=False
    )
    return experts(step.cut(x), w["router"], w["experts"])


def layer(step: Step, x: jax.Array, w: Params) -> jax.Array:
    """Apply one layer."""
    w = jax.tree.map(lambda kernel: kernel.astype("bfloat16"), w)
    with jax.named_scope("attention"):
        x = step.cut(x + attention(step, normed(x, w["norm1"]), w), None, step.tp)
    y = normed(x, w["norm2"])
    added: list[jax.Array] = []
    if "mlp" in w:
        with jax.named_scope("mlp"):
            added.append(mlp(step, y, w["mlp"]))
    if "experts" in w:
        with jax.named_scope("experts"):
            send = dropping_experts if step.model.capacity else dropless_experts
            added.append(send(step, y, w))
    return step.cut(sum(added, x), None, step.tp)


def layers(step: Step, params: Params, x: jax.Array) -> jax.Array:
    """Scan over the layers, with what is saved of each."""
    policy = jax.checkpoint_policies.save_only_these_names(*step.saved)

    def body(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        for number in sorted(w):
            x = jax.checkpoint(partial(layer, step), policy=policy)(x, w[number])
        return x, None

    return jax.lax.scan(body, x, params)[0]


def loss_of_layers(step: Step, params: Params, x: jax.Array) -> jax.Array:
    """Apply the layers; the sum stands for what follows."""
    return jnp.sum(layers(step, params, x).astype("float32"))


def loss_of_ends(step: Step, params: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """Embed the tokens, and take the cross entropy of x in the place of what the layers made."""
    head, embed = (params[name].astype("bfloat16") for name in ("head", "embed"))
    with jax.named_scope("embedding"):
        one_hot = jax.nn.one_hot(tokens, step.model.vocab, dtype="bfloat16")
        x = x + step.cut(step.cut(one_hot, None, step.tp) @ embed, None, step.tp)
    with jax.named_scope("head"):
        logits = step.cut(normed(x, 1.0) @ head, None, step.tp)
        logits = logits.astype("float32")
        of_token = jnp.sum(
            jnp.where(tokens[..., None] == jnp.arange(logits.shape[-1]), logits, 0), -1
        )
        return jnp.mean(jax.nn.logsumexp(logits, -1) - of_token)


def train(loss: Callable[..., jax.Array], state: Params, x: jax.Array, *rest: jax.Array) -> Any:
    """Take a step of Adam, and return the gradient that goes on as well."""
    gradients, going_on = jax.grad(loss, argnums=(0, 1))(state["params"], x, *rest)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], gradients)
    nu = jax.tree.map(lambda n, g: 0.95 * n + 0.05 * g * g, state["nu"], gradients)
    params = jax.tree.map(
        lambda p, m, n: p - 1e-4 * m / (jnp.sqrt(n) + 1e-8), state["params"], mu, nu
    )
    return {"params": params, "mu": mu, "nu": nu}, going_on


def jitted_on(
    mesh: Any, step: Step, loss: Callable[..., jax.Array], params: Params, rows: int
) -> tuple[Any, sr.Plan, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return a step of Adam, and its arguments: the plan of its state, inputs, and tokens."""
    plan = sr.plan({"params": params, "mu": params, "nu": params}, rules(step.axes), mesh)
    shape = rows * prod(step.axes.values()), step.length
    by_batch = NamedSharding(mesh, P(step.batch, None, step.tp))
    x = jax.ShapeDtypeStruct((*shape, step.model.width), "bfloat16", sharding=by_batch)
    tokens = jax.ShapeDtypeStruct(shape, "int32", sharding=NamedSharding(mesh, P(step.batch)))
    jitted = jax.jit(
        partial(train, partial(loss, step)),
        donate_argnums=0,
        out_shardings=(plan.shardings(), by_batch),
    )
    return jitted, plan, x, tokens
