"""Training steps of small transformers as real code writes them, and what their HLO sends.

Sizes are chosen so that the shape of an array tells what it is: no width, head count, sequence or
batch is another's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import permutations
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.computation import Shape
from shardrules._program.hlo import CollectiveOp, Hlo

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD, VOCAB = 96, 256, 4, 2, 40, 352
BATCH, SEQUENCE, LAYERS = 16, 36, 2
EXPERTS, EXPERT_HIDDEN, PER_TOKEN = 8, 224, 2
TOKENS = BATCH * SEQUENCE
DTYPE = "float32"

RULES = [
    ("embed", ("tp", "fsdp")),
    ("head", ("fsdp", "tp")),
    ("norm", ()),
    ("router", ()),
    ("experts/(gate|up)", (None, "ep", "fsdp", "tp")),
    ("experts/down", (None, "ep", "tp", "fsdp")),
    ("[qkv]/kernel", (None, "fsdp", "tp", None)),
    ("o/kernel", (None, "tp", None, "fsdp")),
    ("gate|up", (None, "fsdp", "tp")),
    ("down", (None, "tp", "fsdp")),
]
AXES = ("data", "fsdp", "ep", "tp")
BATCH_AXES = ("data", "fsdp", "ep")


Lookup = Literal["product", "gathered", "as held"]
Back = Literal["heads", "square", "transposed"]


class Model(NamedTuple):
    """How the step is written."""

    is_moe: bool = False
    is_scanned: bool = False
    """Whether layers are stacked, and a scan runs over them."""
    is_recomputed: bool = False
    """Whether the backward pass computes each layer's activations again."""
    is_grouped: bool = False
    """Whether there are fewer heads of keys and values than of queries."""
    is_sequence_parallel: bool = False
    """Whether the residual stream is cut by tp along the sequence."""
    accumulate: int = 1
    """Micro-batches, in a scan."""
    lookup: Lookup = "product"
    """How tokens read their table: as a product with one-hot vectors, by numbers from a table that
    is constrained to be "gathered", or from one "as held"."""
    back: Back = "heads"
    """The kernel behind attention: with a dimension of heads; square, since all heads are as wide as
    the residual stream; or square, and cut by tp along its output."""

    @property
    def head(self) -> int:
        return HEAD if self.back == "heads" else WIDTH // HEADS


def sizes_of(**axes: int) -> dict[str, int]:
    """A mesh of all axes, those that are not named with one device."""
    return {axis: axes.get(axis, 1) for axis in AXES}


def parameters(model: Model) -> Any:
    """The tree of the model's abstract parameters."""
    kv_heads = KV_HEADS if model.is_grouped else HEADS
    attention = {
        "q": {"kernel": (WIDTH, HEADS, model.head)},
        **{name: {"kernel": (WIDTH, kv_heads, model.head)} for name in "kv"},
        "o": {"kernel": (HEADS, HEAD, WIDTH) if model.back == "heads" else (WIDTH, WIDTH)},
    }
    mlp = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    hidden = EXPERT_HIDDEN
    experts = {"gate": (WIDTH, hidden), "up": (WIDTH, hidden), "down": (hidden, WIDTH)}
    moe = {
        "router": {"kernel": (WIDTH, EXPERTS)},
        "experts": {name: {"kernel": (EXPERTS, *shape)} for name, shape in experts.items()},
    }
    layer = {
        "attn_norm": {"scale": (WIDTH,)},
        "attn": attention,
        "mlp_norm": {"scale": (WIDTH,)},
        "mlp": moe if model.is_moe else {n: {"kernel": shape} for n, shape in mlp.items()},
    }
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    stacked = jax.tree.map(lambda shape: (LAYERS, *shape), layer, is_leaf=is_shape)
    tree = {
        "embed": {"embedding": (VOCAB, WIDTH)},
        "layers": stacked if model.is_scanned else [layer] * LAYERS,
        "norm": {"scale": (WIDTH,)},
        "head": {"kernel": (WIDTH, VOCAB)},
    }
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, DTYPE), tree, is_leaf=is_shape)


def rules(model: Model) -> list[tuple[str, tuple[Any, ...]]]:
    """`RULES`; where layers are not stacked, without their dimension."""
    back = (None, "fsdp", "tp") if model.back == "transposed" else (None, "tp", "fsdp")
    own = RULES if model.back == "heads" else [("o/kernel", back), *RULES]
    if model.is_scanned:
        return own
    return [(pattern, spec[1:] if spec[:1] == (None,) else spec) for pattern, spec in own]


def jitted(model: Model, sizes: Mapping[str, int]) -> tuple[Any, sr.Plan, Any]:
    """A training step on this mesh, the plan of its parameters, and the abstract tokens."""
    devices = prod(sizes.values())
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(*sizes.values()), tuple(sizes))
    tree = parameters(model)
    plan = sr.plan(tree, rules(model), mesh)
    held = plan.shardings()
    tokens = NamedSharding(mesh, P(BATCH_AXES))
    ids = jax.ShapeDtypeStruct((BATCH, SEQUENCE), "int32", sharding=tokens)

    def step(params: Any, read: Any, wanted: Any) -> Any:
        gradients = _gradients(params, read, wanted, model, mesh)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    made = jax.jit(step, in_shardings=(held, tokens, tokens), out_shardings=held, donate_argnums=0)
    return made, plan, ids


def compiled(model: Model, sizes: Mapping[str, int]) -> tuple[sr.Plan, Hlo]:
    """The plan of a training step on this mesh, and the optimized HLO of the step."""
    made, plan, ids = jitted(model, sizes)
    return plan, Hlo(made.lower(plan.abstract(), ids, ids).compile().as_text())


def _gradients(params: Any, read: Any, wanted: Any, model: Model, mesh: Mesh) -> Any:
    """The sum over the micro-batches, each gradient cut as its parameter is."""
    if model.accumulate == 1:
        return jax.grad(_loss)(params, read, wanted, model, mesh)
    cut = NamedSharding(mesh, P(None, BATCH_AXES))
    batches = [
        jax.lax.with_sharding_constraint(ids.reshape(model.accumulate, -1, SEQUENCE), cut)
        for ids in (read, wanted)
    ]

    def add(total: Any, batch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.grad(_loss)(params, *batch, model, mesh)), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]


def _loss(params: Any, read: Any, wanted: Any, model: Model, mesh: Mesh) -> Any:
    def on(x: Any, *spec: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    stream = (BATCH_AXES, "tp") if model.is_sequence_parallel else (BATCH_AXES,)

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        h = on(on(_norm(x, p["attn_norm"]), *stream), BATCH_AXES)
        x = on(x + on(_attention(h, p["attn"], on), *stream), *stream)
        h = on(on(_norm(x, p["mlp_norm"]), *stream), BATCH_AXES)
        made = _moe(h, p["mlp"], on) if model.is_moe else _mlp(h, p["mlp"], on)
        return on(x + on(made, *stream), *stream), None

    x = on(_looked_up(read, params["embed"]["embedding"], model, on), BATCH_AXES)
    x = on(x, *stream)
    if model.is_recomputed:
        layer = jax.checkpoint(layer)
    if model.is_scanned:
        x, _ = jax.lax.scan(layer, x, params["layers"])
    else:
        for p in params["layers"]:
            x, _ = layer(x, p)
    x = on(on(_norm(x, params["norm"]), *stream), BATCH_AXES)
    logits = on(x @ params["head"]["kernel"], BATCH_AXES, None, "tp")
    told = (logits * jax.nn.one_hot(wanted, VOCAB, dtype=DTYPE)).sum(-1)
    return (jax.nn.logsumexp(logits, -1) - told).mean()


def _looked_up(read: Any, table: Any, model: Model, on: Any) -> Any:
    if model.lookup == "product":
        return jax.nn.one_hot(read, VOCAB, dtype=DTYPE) @ table
    return (on(table, "tp", None) if model.lookup == "gathered" else table)[read]


def _norm(x: Any, p: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def _attention(x: Any, p: Any, on: Any) -> Any:
    heads = {}
    for name in "qkv":
        made = jnp.einsum("bsw,whd->bshd", x, p[name]["kernel"])
        if made.shape[2] < HEADS:
            made = jnp.repeat(on(made, BATCH_AXES), HEADS // made.shape[2], 2)
        heads[name] = on(made, BATCH_AXES, None, "tp")
    q, k, v = heads.values()
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5, -1)
    read = on(jnp.einsum("bhst,bthd->bshd", weights, v), BATCH_AXES, None, "tp")
    if p["o"]["kernel"].ndim == 2:
        return on(read.reshape(*read.shape[:2], -1) @ p["o"]["kernel"], BATCH_AXES)
    return on(jnp.einsum("bshd,hdw->bsw", read, p["o"]["kernel"]), BATCH_AXES)


def _mlp(x: Any, p: Any, on: Any) -> Any:
    hidden = jax.nn.silu(x @ p["gate"]["kernel"]) * (x @ p["up"]["kernel"])
    return on(on(hidden, BATCH_AXES, None, "tp") @ p["down"]["kernel"], BATCH_AXES)


def _moe(x: Any, p: Any, on: Any) -> Any:
    """Experts of a capacity for each sequence, with dispatch and combination as products."""
    capacity = SEQUENCE * PER_TOKEN // EXPERTS
    chances = jax.nn.softmax(x @ p["router"]["kernel"])
    weight, chosen = jax.lax.top_k(chances, PER_TOKEN)
    mask = jax.nn.one_hot(chosen, EXPERTS, dtype=DTYPE).reshape(BATCH, -1, EXPERTS)
    place = (
        (jnp.cumsum(mask, 1) * mask - 1)
        .astype("int32")
        .reshape(BATCH, SEQUENCE, PER_TOKEN, EXPERTS)
    )
    sent = jax.nn.one_hot(place, capacity, dtype=DTYPE)
    dispatch = on(jax.lax.stop_gradient(sent.sum(2)), BATCH_AXES)
    combine = on((sent * weight[..., None, None]).sum(2), BATCH_AXES)
    kernels = p["experts"]
    others = tuple(axis for axis in BATCH_AXES if axis != "ep")
    h = on(jnp.einsum("bsw,bsec->ebcw", x, dispatch), None, BATCH_AXES)
    h = on(h, "ep", others)
    gate, up = (jnp.einsum("ebcw,ewf->ebcf", h, kernels[name]["kernel"]) for name in ("gate", "up"))
    hidden = on(jax.nn.silu(gate) * up, "ep", others, None, "tp")
    made = on(jnp.einsum("ebcf,efw->ebcw", hidden, kernels["down"]["kernel"]), "ep", others)
    made = on(made, None, BATCH_AXES)
    return on(jnp.einsum("ebcw,bsec->bsw", made, combine), BATCH_AXES)


Key = tuple[str, str, tuple[str, ...]]


def sent(hlo: Hlo, model: Model, sizes: Mapping[str, int]) -> Counter[Key]:
    """{(of, collective, axes): payload} of a step, as `Transmission` has it."""
    found: Counter[Key] = Counter()
    for one in hlo.collectives:
        assert one.times is not None
        for shape in one.results if one.kind == "all-gather" else one.operands:
            of = _of(shape, one, model, sizes)
            axes = one.groups.axes(sizes)
            found[of, one.kind, axes] += shape.bytes * one.times
    return found


def _of(shape: Shape, one: CollectiveOp, model: Model, sizes: Mapping[str, int]) -> str:
    """What an array of this shape is, as `Transmission.of` has it; or what no model counts."""
    if not shape.dtype.startswith("f"):
        return "numbers of tokens"
    if WIDTH not in shape.dims and one.kind == "all-reduce" and prod(shape.dims) <= TOKENS:
        return "statistics"
    if shape.dims in _parameter_shapes(model, sizes):
        return "params" if one.kind == "all-gather" else "gradients"
    if EXPERTS in shape.dims and shape.dims[-1] == EXPERTS:
        return "router"
    return "experts" if one.kind == "all-to-all" and model.is_moe else "activations"


def _parameter_shapes(model: Model, sizes: Mapping[str, int]) -> set[tuple[int, ...]]:
    """The shapes that parameters may have on a device, of one layer or of all, in any layout."""
    whole = {leaf.shape for leaf in jax.tree.leaves(parameters(model))}
    if model.is_scanned:
        whole |= {shape[1:] for shape in whole if shape[0] == LAYERS}
    return {
        turned for shape in whole for cut in _cuts(shape, sizes) for turned in permutations(cut)
    }


def _cuts(shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    devices = prod(sizes.values())
    parts = [n for n in range(1, devices + 1) if devices % n == 0 and shape[0] % n == 0]
    for rest in _cuts(shape[1:], sizes):
        yield from ((shape[0] // n, *rest) for n in parts)
