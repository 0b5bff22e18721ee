"""A decoder-only transformer in flax, trained on 8 host devices, sharded by one rule list.

It learns to copy: the second half of each sequence repeats the first. Run it with
`python examples/train_transformer.py`; it needs flax, optax and a JAX with `jax.set_mesh`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardrules as sr

VOCAB, LENGTH, BATCH = 32, 16, 64
MODEL, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 4, 2, 16, 2

# The first rule whose pattern is found in a path decides. The path of an Adam moment ends with its
# parameter's, so these rules shard the optimizer state too. Its step count, a scalar, needs none.
RULES = sr.Rules(
    [
        ("tokens/embedding", P(("fsdp", "tp"), None)),  # (vocabulary, model)
        ("(query|key|value)/kernel", P("fsdp", "tp", None)),  # (model, heads, head_dim)
        ("out/kernel", P("tp", None, "fsdp")),  # (heads, head_dim, model)
        ("(up|logits)/kernel", P("fsdp", "tp")),
        ("down/kernel", P("tp", "fsdp")),
        ("scale|positions", P()),
    ]
)
# Activations have no paths. They get specs where they are made: (batch, length, ...).
RESIDUAL = P("fsdp", None, None)
PER_HEAD = P("fsdp", None, "tp", None)
HIDDEN = P("fsdp", None, "tp")


class Block(nn.Module):
    """Grouped-query attention and an MLP, each with a norm before it and a residual connection."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def heads(count: int, name: str) -> nn.Module:
            return nn.DenseGeneral((count, HEAD_DIM), use_bias=False, name=name)

        y = nn.RMSNorm(name="attention_norm")(x)
        qkv = (heads(HEADS, "query")(y), heads(KV_HEADS, "key")(y), heads(KV_HEADS, "value")(y))
        # One spec for all three. It is corrected if tp does not divide the KV heads.
        q, k, v = sr.with_sharding_constraint(qkv, PER_HEAD)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        y = nn.DenseGeneral(MODEL, axis=(-2, -1), use_bias=False, name="out")(y)
        x = sr.with_sharding_constraint(x + y, RESIDUAL)

        y = nn.Dense(4 * MODEL, use_bias=False, name="up")(nn.RMSNorm(name="mlp_norm")(x))
        y = sr.with_sharding_constraint(nn.gelu(y), HIDDEN)
        y = nn.Dense(MODEL, use_bias=False, name="down")(y)
        return sr.with_sharding_constraint(x + y, RESIDUAL)


class Transformer(nn.Module):
    """Tokens to logits."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = self.param("positions", nn.initializers.normal(0.1), (LENGTH, MODEL))
        x = nn.Embed(VOCAB, MODEL, name="tokens")(tokens) + positions[: tokens.shape[1]]
        x = sr.with_sharding_constraint(x, RESIDUAL)
        for layer in range(LAYERS):
            x = Block(name=f"block_{layer}")(x)
        x = nn.RMSNorm(name="norm")(x)
        return nn.Dense(VOCAB, use_bias=False, name="logits")(x)


class State(NamedTuple):
    """The state that training changes and that is sharded."""

    params: Any
    optimizer: Any


MODULE = Transformer()
OPTIMIZER = optax.adamw(3e-3, weight_decay=1e-4)


def init(key: jax.Array) -> State:
    """Return the state before the first step."""
    params = MODULE.init(key, jnp.zeros((BATCH, LENGTH), jnp.int32))["params"]
    return State(params, OPTIMIZER.init(params))


def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
    """Cross-entropy of the second half, each token predicted from those before it."""
    logits = MODULE.apply({"params": params}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses[:, LENGTH // 2 - 1 :].mean()


def train_step(state: State, key: jax.Array) -> tuple[State, jax.Array]:
    """Return one step on a new random batch; also its loss."""
    half = jax.random.randint(key, (BATCH, LENGTH // 2), 0, VOCAB)
    tokens = sr.with_sharding_constraint(jnp.concatenate([half, half], axis=1), P("fsdp"))
    loss, gradients = jax.value_and_grad(loss_of)(state.params, tokens)
    updates, optimizer = OPTIMIZER.update(gradients, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), optimizer), loss


def train(steps: int, fsdp: int, tp: int) -> tuple[State, list[float]]:
    """Return the state after the steps, on a mesh of fsdp * tp host devices; and the losses."""
    devices = jax.devices("cpu")[: fsdp * tp]
    mesh = jax.make_mesh((fsdp, tp), ("fsdp", "tp"), (AxisType.Auto,) * 2, devices=devices)
    with jax.set_mesh(mesh):  # from here on, no function needs a mesh argument
        # From shapes alone, parameters and optimizer state are decided in one call; the arrays are
        # then sharded from the start.
        shardings = sr.named_shardings(jax.eval_shape(init, jax.random.key(0)), RULES)
        state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
        step = jax.jit(train_step, out_shardings=(shardings, None), donate_argnums=0)
        losses = []
        for key in jax.random.split(jax.random.key(1), steps):
            state, loss = step(state, key)
            losses.append(float(loss))
    return state, losses


def print_shardings(params: Any) -> None:
    """Return per parameter, the rule's spec and what the array has.

    Layers after the first left out.
    """
    wanted = jax.tree.leaves(sr.match_partition_rules(RULES, params))
    for (path, array), spec in zip(jax.tree.leaves_with_path(params), wanted, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        got = array.sharding.spec
        corrected = "" if got == spec else f"  corrected from {spec}"
        if "block_" not in name or "block_0" in name:
            print(f"{name:28} {array.shape!s:12} {got}{corrected}")


def main(steps: int = 40) -> tuple[State, list[float]]:
    """Train on 8 host devices, prints what was decided and the losses, and returns them."""
    jax.config.update("jax_num_cpu_devices", 8)
    state, losses = train(steps, fsdp=2, tp=4)
    print_shardings(state.params)
    for name in ("mu", "nu"):
        moments = optax.tree_utils.tree_get(state.optimizer, name)
        same = jax.tree.map(lambda p, m: p.sharding == m.sharding, state.params, moments)
        print(f"Adam's {name} sharded as the parameters: {all(jax.tree.leaves(same))}")
    for step, loss in enumerate(losses):
        print(f"step {step:2}  loss {loss:.4f}")
    return state, losses


if __name__ == "__main__":
    main()
