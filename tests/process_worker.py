"""One of several JAX processes on loopback, as tests/test_processes.py starts them.

GPT-2 with EasyDeL's rules is placed on a mesh over all processes, stepped, laid out anew and
gathered; then the processes disagree on purpose. What was found goes to a JSON file.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests import corpus

RULES = "easydel__gpt2-GPT2Config-v0.2.0"
TOKENS = 32
VOCABULARY = 3141


def make_state():
    """GPT-2 with one layer, each dimension a sixteenth; its vocabulary of 3141 divides nowhere.

    The values are small integers: sums of their products are exact in float32, in whatever order
    and on however many devices they are added. So the same bits are a fair demand.
    """
    rng = np.random.default_rng(11)
    every = corpus.manifest("flax-gpt2")
    kept = [p for p in every.parameters if "/h/" not in p.name or "/h/0/" in p.name]
    params = every._replace(parameters=tuple(kept)).nested(
        lambda p: rng.integers(-2, 3, [dim // 16 for dim in p.shape]).astype("float32")
    )
    first = params["transformer"]["h"]["0"]
    first["ln_1"] = jax.tree.map(jnp.asarray, first["ln_1"])
    first["mlp"]["c_fc"]["kernel"] = jnp.asarray(first["mlp"]["c_fc"]["kernel"], "bfloat16")
    return {
        "params": params,
        "step": 3,
        "rate": 0.5,
        "weak": jnp.full((8, 2), 2.0),
        "done": np.bool_(False),
        "seen": np.arange(8),
        "key": jax.random.key(7),
    }


@jax.custom_vjp
def small(x):
    """Rounded into [-2, 2], and the gradient, too: the next products stay exact."""
    return jnp.clip(jnp.round(x / 16), -2, 2)


small.defvjp(lambda x: (small(x), None), lambda _, g: (small(g),))


def forward(params, tokens, constrain):
    model = params["transformer"]
    x = model["wte"]["embedding"][tokens] + model["wpe"]["embedding"][:TOKENS]
    x = constrain(x, P("fsdp", "tp"))
    for layer in model["h"].values():
        y = x * layer["ln_1"]["scale"] + layer["ln_1"]["bias"]
        qkv = y @ layer["attn"]["c_attn"]["kernel"].T + layer["attn"]["c_attn"]["bias"]
        # Three do not divide by tp: that axis is left out.
        qkv = constrain(small(qkv).reshape(TOKENS, 3, -1), P("fsdp", "tp", "sp"))
        q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
        x = x + small(small(q @ k.T) @ v @ layer["attn"]["c_proj"]["kernel"].T)
        h = small(x @ layer["mlp"]["c_fc"]["kernel"].T)
        h = constrain(h, [("", P("fsdp", ("sp", "tp")))])
        x = x + small(h @ layer["mlp"]["c_proj"]["kernel"].T)
    return x @ model["wte"]["embedding"].T


def step(state, tokens, constrain):
    def loss(params):
        logits = forward(params, tokens, constrain)
        return logits.sum(), logits

    (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
    params = jax.tree.map(lambda p, g: p - small(g), state["params"], gradients)
    changed = {
        "params": constrain(params, corpus.rules(RULES)),
        "step": state["step"] + 1,
        # float32 if numbers were placed as float32 rather than as numbers
        "rate": state["rate"] * jnp.bfloat16(3),
        "weak": state["weak"] * jnp.ones(2, "bfloat16"),
    }
    return {"logits": logits, "state": {**state, **changed}}


def tokens():
    return np.arange(TOKENS, dtype="int32") * 97 % VOCABULARY


def digests(tree):
    """{path: dtype, shape and a digest of the bits}."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        bits = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        found[jax.tree_util.keystr(path)] = f"{array.dtype} {array.shape} {bits}"
    return found


@functools.cache
def unsharded():
    """What the processes must find, by one device and without shardrules."""
    stepped = jax.jit(step, static_argnums=2)(make_state(), tokens(), lambda x, _: x)
    return digests({**stepped, "placed": jax.tree.map(jnp.asarray, make_state())})


def make_mesh(axes=("fsdp", "sp", "tp"), devices=None):
    return Mesh(np.array(devices or jax.devices()).reshape(-1, 2, 2), axes)


def in_context(mesh):
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else mesh


def check_parts(tree, shardings):
    """Each device has its part and no more; returns how many arrays are in parts."""
    in_parts = 0
    for array, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
        assert array.sharding == sharding
        assert {shard.device for shard in array.addressable_shards} == set(jax.local_devices())
        part = sharding.shard_shape(array.shape)
        assert {shard.data.shape for shard in array.addressable_shards} == {part}
        in_parts += part != array.shape
    return in_parts


def agree():
    state, rules, mesh = make_state(), sr.Rules(corpus.rules(RULES)), make_mesh()
    shardings = sr.named_shardings(state, rules, mesh)
    embedding = shardings["params"]["transformer"]["wte"]["embedding"]
    assert embedding.spec == P(None, "tp")
    with in_context(mesh):
        placed = sr.shard(state, rules)
        assert check_parts(placed, shardings) == 5
        stepped = jax.jit(step, static_argnums=2)(
            placed, sr.shard(tokens(), P("fsdp")), sr.with_sharding_constraint
        )
    gathered = sr.gather({**stepped, "placed": placed})
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(gathered["logits"]))
    laid_out_anew(
        placed["params"]["transformer"], gathered["placed"]["params"]["transformer"], mesh
    )
    return {"fingerprint": sr.fingerprint(state, shardings), "digests": digests(gathered)}


def laid_out_anew(model, wanted, mesh):
    """Arrays that are global already, to other specs and another order of the devices."""

    def some(of):
        return {"wte": of["wte"], "attn": of["h"]["0"]["attn"]}

    model, wanted = some(model), some(wanted)
    again = sr.shard(model, corpus.rules(RULES), mesh)
    pairs = zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True)
    assert all(new is old for new, old in pairs)
    rules = [("embedding|kernel", P(("tp", "sp"), None)), ("", P("fsdp"))]
    for other in (mesh, make_mesh(("sp", "tp", "fsdp"), jax.devices()[::-1])):
        moved = sr.shard(model, rules, other)
        check_parts(moved, sr.named_shardings(model, rules, other))
        assert digests(sr.gather(moved)) == digests(wanted)
    # Outside of jit, of arrays on this host and of global ones.
    host = np.arange(64.0, dtype="float32").reshape(8, 8)
    kernel = model["attn"]["c_proj"]["kernel"]
    tree = [host, jnp.asarray(host), kernel]
    constrained = sr.with_sharding_constraint(tree, P("tp", "fsdp"), mesh)
    check_parts(constrained, [NamedSharding(mesh, P("tp", "fsdp"))] * 3)
    wanted = [host, host, wanted["attn"]["c_proj"]["kernel"]]
    assert digests(sr.gather(constrained)) == digests(wanted)


def disagree():
    """{case: the error}; process 1 is the odd one in each."""
    odd = jax.process_index() == 1
    tree = {"a": np.ones((8, 8), "float32"), "b": np.ones(8, "float32")}
    rules, mesh = [("a", P("fsdp")), ("b", P())], make_mesh()
    cases = {
        "rule": (tree, [("a", P("tp")), ("b", P())], mesh),
        "axes": (tree, rules, make_mesh(("sp", "tp", "fsdp"))),
        "devices": (tree, rules, make_mesh(devices=jax.devices()[::-1])),
        "shape": ({**tree, "b": np.ones(16, "float32")}, rules, mesh),
        "no rule": (tree, rules[:1], mesh),
        "no array": ({**tree, "b": "text"}, rules, mesh),
    }
    errors = {}
    for case, arguments in cases.items():
        try:
            sr.shard(*(arguments if odd else (tree, rules, mesh)))
        except (RuntimeError, TypeError, ValueError) as error:
            errors[case] = f"{type(error).__name__}: {error}"
    # A mesh of this process's devices is nobody else's business: the others would not answer.
    if odd:
        own = sr.shard(tree, rules, make_mesh(devices=jax.local_devices()))
        assert digests(sr.gather(own)) == digests(tree)
    assert digests(sr.gather(sr.shard(tree, rules, mesh))) == digests(tree)
    return {"errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["agree", "disagree"])
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{args.port}", args.processes, args.index, initialization_timeout=60
        )
    assert jax.process_count() == args.processes
    found = {"agree": agree, "disagree": disagree}[args.task]()
    args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
