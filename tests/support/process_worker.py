"""One of several JAX processes on loopback, as tests/place/test_processes.py starts them.

A small model is placed on a mesh over all processes, stepped, laid out anew and gathered; then the processes
disagree on purpose. What was found goes to a JSON file.
"""

import functools
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._place import processes as coordination

RULES = [("embedding", P(("fsdp", "sp"), "tp")), ("kernel", P("fsdp", ("sp", "tp"))), ("bias", P("tp")), (".*", P())]
TOKENS = 32
VOCABULARY = 3141


def make_state():
    """A model whose vocabulary divides nowhere, and beside it leaves of each kind.

    The values are small integers: sums of their products are exact in float32, in whatever order
    and on however many devices they are added. So the same bits are a fair demand.
    """
    rng = np.random.default_rng(11)

    def integers(*shape):
        return rng.integers(-2, 3, shape).astype("float32")

    return {
        "params": {
            "embedding": integers(VOCABULARY, 48),
            "scale": jnp.asarray(integers(64)),
            "up": {"kernel": jnp.asarray(integers(64, 96), "bfloat16"), "bias": integers(96)},
            "down": {"kernel": integers(96, 48)},
        },
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
    x = constrain(params["embedding"][tokens], P("fsdp", "tp"))
    # Three do not divide by tp: that axis is left out.
    q, k, v = jnp.moveaxis(constrain(x.reshape(TOKENS, 3, -1), P("fsdp", "tp", "sp")), 1, 0)
    y = jnp.concatenate([small(small(q @ k.T) @ v), x], 1) * params["scale"]
    h = constrain(small(y @ params["up"]["kernel"] + params["up"]["bias"]), [("", P("fsdp", ("sp", "tp")))])
    return (x + small(h @ params["down"]["kernel"])) @ params["embedding"].T


def step(state, tokens, constrain):
    def loss(params):
        logits = forward(params, tokens, constrain)
        return logits.sum(), logits

    (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
    params = jax.tree.map(lambda p, g: p - small(g), state["params"], gradients)
    changed = {
        "params": constrain(params, RULES),
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


def enable_x64(on):
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(on)
    from jax.experimental import enable_x64

    return enable_x64(on)


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
    state, rules, mesh = make_state(), sr.Rules(RULES), make_mesh()
    shardings = sr.named_shardings(state, rules, mesh)
    assert shardings["params"]["embedding"].spec == P(None, "tp")
    with jax.set_mesh(mesh):
        placed = sr.shard(state, rules)
        assert check_parts(placed, shardings) == 4
        stepped = jax.jit(step, static_argnums=2)(placed, sr.shard(tokens(), P("fsdp")), sr.with_sharding_constraint)
    gathered = sr.gather({**stepped, "placed": placed})
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(gathered["logits"]))
    laid_out_anew(placed["params"], gathered["placed"]["params"], mesh)
    return {"fingerprint": sr.plan(state, rules, mesh).fingerprint(), "digests": digests(gathered)}


def parts_in_memory(array):
    shards = array.addressable_shards
    return {(part.device, part.data.unsafe_buffer_pointer()) for part in shards}


def laid_out_anew(model, wanted, mesh):
    """Arrays that are global already, to other specs and another order of the devices."""
    pairs = zip(jax.tree.leaves(sr.shard(model, RULES, mesh)), jax.tree.leaves(model), strict=True)
    assert all(new is old for new, old in pairs)
    rules = [("embedding|kernel", P(("tp", "sp"), None)), ("", P("fsdp"))]
    for other in (mesh, make_mesh(("sp", "tp", "fsdp"), jax.devices()[::-1])):
        moved = sr.shard(model, rules, other)
        check_parts(moved, sr.named_shardings(model, rules, other))
        assert digests(sr.gather(moved)) == digests(wanted)
    placed = sr.shard(MATRIX, P("fsdp"), mesh)
    tied = {"a": P("tp"), "b": P(None, "fsdp")}
    before = parts_in_memory(placed)
    given_up = sr.shard(dict.fromkeys(tied, placed), tied, mesh, donate=True)
    after = set().union(*map(parts_in_memory, given_up.values()))
    assert placed.is_deleted() == before.isdisjoint(after)  # a part may be one of the results'
    assert digests(sr.gather(given_up)) == digests(dict.fromkeys(tied, MATRIX))
    # Outside of jit, of arrays on this host and of global ones.
    host = np.arange(64.0, dtype="float32").reshape(8, 8)
    tree = [host, jnp.asarray(host), model["down"]["kernel"]]
    constrained = sr.with_sharding_constraint(tree, P("tp", "fsdp"), mesh)
    check_parts(constrained, [NamedSharding(mesh, P("tp", "fsdp"))] * 3)
    assert digests(sr.gather(constrained)) == digests([host, host, wanted["down"]["kernel"]])


@jax.tree_util.register_pytree_node_class
class Raises:
    """A part of a tree that raises when it is looked at."""

    def __init__(self, error):
        self.error = error

    def tree_flatten(self):
        raise self.error

    @classmethod
    def tree_unflatten(cls, _, __):
        raise NotImplementedError


MATRIX = np.arange(64, dtype="float32").reshape(8, 8)
TREE = {"a": MATRIX, "b": np.arange(8, dtype="float32")}
RULES_OF_TREE = [("a", P("fsdp")), ("b", P())]


def sharding(mesh):
    """Makes calls of `shard` that place the tree, but for what is said otherwise."""

    def shard(tree=TREE, specs=RULES_OF_TREE, on_mesh=mesh):
        return lambda: sr.shard(tree, specs, on_mesh)

    return shard


def failures(mesh):
    """{case: (what the odd process does, where all others place the tree; how its own error starts)}."""
    shard, another = sharding(mesh), {"a": NamedSharding(mesh, P("fsdp"))}
    return {
        "no rule": (shard(specs=RULES_OF_TREE[:1]), "ValueError: Partition rule not found"),
        "no array": (shard({**TREE, "b": "text"}), "TypeError: the leaf ['b'] is 'text'"),
        "no mesh": (shard(on_mesh=None), "ValueError: no mesh"),
        "another tree": (shard(specs=another, on_mesh=None), "ValueError: rules: the tree of specs does not fit"),
        "constraint": (
            lambda: sr.with_sharding_constraint(TREE, RULES_OF_TREE[:1], mesh), "ValueError: Partition rule not found"),
        "gather": (lambda: sr.gather(Raises(ValueError("no gathering\nhere"))), "ValueError: no gathering"),
        "SystemExit": (shard({**TREE, "b": Raises(SystemExit(3))}), "SystemExit: 3"),
        "KeyboardInterrupt": (shard({**TREE, "b": Raises(KeyboardInterrupt())}), "KeyboardInterrupt"),
    }  # fmt: skip


PLACED = "float32[8, 8] for P('fsdp', None) on fsdp={n},sp=2,tp=2"
VECTOR = "float32[8] for P() on fsdp={n},sp=2,tp=2"


def differences(mesh, placed):
    """{case: (what the odd process does, where all others place the tree; where, what they have there, and it)}."""
    axes, order, shard = mesh.axis_names, jax.devices(), sharding(mesh)
    host = NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host")
    explicit = Mesh(mesh.devices, axes, axis_types=(jax.sharding.AxisType.Explicit,) * len(axes))

    def with_x64():
        with enable_x64(True):
            return sr.shard({**TREE, "b": TREE["b"].astype("float64")}, RULES_OF_TREE, mesh)

    return {
        "rule": (shard(specs=[("a", P("tp")), ("b", P())]), "['a']", PLACED, PLACED.replace("fsdp'", "tp'")),
        "axes": (shard(on_mesh=make_mesh(("sp", "tp", "fsdp"))), "['a']", PLACED, PLACED.replace("fsdp={n},sp=2,tp=2", "sp={n},tp=2,fsdp=2")),
        "devices": (
            shard(on_mesh=make_mesh(devices=order[::-1])), "the order of the mesh's devices", "{order}", "{backwards}"),
        "shape": (shard({**TREE, "b": np.ones(16, "float32")}), "['b']", VECTOR, VECTOR.replace("[8]", "[16]")),
        "dtype": (shard({**TREE, "b": np.ones(8, "int32")}), "['b']", VECTOR, VECTOR.replace("float", "int")),
        "x64": (with_x64, "['b']", VECTOR, VECTOR.replace("32", "64")),
        "weak type": (shard({**TREE, "b": jnp.full(8, 2.0)}), "['b']", VECTOR, VECTOR.replace("] for", "] weakly typed for")),
        "global": (shard({**TREE, "a": placed}), "['a']", PLACED, PLACED.replace("for", "spread as") + " for"),
        "empty tree": (shard({}), "leaf 0 of the tree", "['a'] " + PLACED, "no such leaf"),
        "no specs": (shard(specs=None), "['a']", PLACED, "float32[8, 8], which stays"),
        "memory": (shard(specs={"a": host, "b": NamedSharding(mesh, P())}), "['a']", PLACED, PLACED.replace(" on", " memory=pinned_host on")),
        "axis types": (shard(on_mesh=explicit), "['a']", PLACED, PLACED + " Explicit=fsdp,sp,tp"),
    }  # fmt: skip


def calls_of_others(mesh, placed):
    """{case: (what the odd process calls, where all others call `shard`; its name)}."""
    return {
        "constrained": (lambda: sr.with_sharding_constraint(TREE, RULES_OF_TREE, mesh), "with_sharding_constraint"),
        "gathered": (lambda: sr.gather(placed), "gather"),
    }


def raised(call):
    try:
        call()
    except BaseException as error:  # KeyboardInterrupt, too
        return f"{type(error).__name__}: {error}"
    return None


def has_own_parts(placed):
    """Whether this process's devices have their parts of MATRIX; without another program to run."""
    return all(np.array_equal(np.asarray(shard.data), MATRIX[shard.index]) for shard in placed.addressable_shards)


def disagree():
    """[odd process, case, the error, whether the next call is right]; each process odd in turn."""
    mesh, me = make_mesh(), jax.process_index()

    def place():
        return sr.shard(TREE, RULES_OF_TREE, mesh)["a"]

    placed, found = place(), []
    for odd in (0, 1):
        for case, (call, *_) in {
            **failures(mesh),
            **differences(mesh, placed),
            **calls_of_others(mesh, placed),
        }.items():
            error = raised(call if me == odd else place)
            found.append([odd, case, error, has_own_parts(place())])
    # All alike: an error of each, or none.
    for case, (call, _) in failures(mesh).items():
        found.append([None, case, raised(call), has_own_parts(place())])
    audited = {case: outcome(call) for case, call in audits(mesh, placed).items()}
    assert sr.shard({}, RULES_OF_TREE, mesh) == {}
    keys = [key for key, _ in client().key_value_dir_get("shardrules")]
    devices = [device.id for device in jax.devices()]
    return {"found": found, "audited": audited, "keys": keys, "devices": devices}


def audits(mesh, placed):
    """{case: an audit by all processes, of which process 1 has something else}."""
    plan, is_odd = sr.plan(TREE, RULES_OF_TREE, mesh), jax.process_index() == 1
    right = {"a": placed, "b": sr.shard(TREE["b"], P(), mesh)}
    wrong = {**right, "a": sr.shard(MATRIX, P("tp"), mesh)}
    other = sr.plan(TREE, [("a", P("sp")), ("b", P())], mesh)
    own = Mesh(np.array(jax.local_devices()), ("fsdp",))
    alone = sr.plan({"a": MATRIX}, RULES_OF_TREE, own)

    def audit(tree=right, odd_tree=right, odd_plan=plan, **named):
        return lambda: sr.audit(*((odd_tree, odd_plan) if is_odd else (tree, plan)), **named)

    def own_copies(**memory):  # each process has filled in its own
        whole = NamedSharding(mesh, P(), **memory)
        return jax.make_array_from_callback((8,), whole, lambda _: np.full(8, is_odd, "float32"))

    own_device = {**right, "b": jax.device_put(TREE["b"], jax.local_devices()[0])}
    unlike = {**right, "b": own_copies()}
    on_host = {**right, "b": own_copies(memory_kind="pinned_host")}
    return {
        "as planned": audit(),
        "all wrong": audit(wrong, wrong),
        "on a device of each": audit(own_device, own_device),
        "sharding": audit(odd_tree=wrong),
        "host": audit(odd_tree={**right, "b": TREE["b"]}),
        "missing": audit(odd_tree={"b": right["b"]}),
        "extra": audit(odd_tree={**right, "c": TREE["b"]}),
        "plan": audit(odd_plan=other),
        "no plan": audit(odd_plan=None),
        "values": audit(values=True),
        "values that differ": audit(unlike, unlike, values=True),
        "values on the host that differ": audit(on_host, on_host, values=True),
        "values of one": audit(**({"values": True} if is_odd else {})),
        "alone": lambda: is_odd and sr.audit({"a": sr.shard(MATRIX, P("fsdp"), own)}, alone),
    }


def outcome(call):
    try:
        return [f"{one.kind} {' '.join(one.paths)}" for one in call() or ()]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def client():
    from jax._src import distributed

    return distributed.global_state.client


def wait():
    """What those get who wait for a process that does something of its own, or is interrupted."""
    mesh, me = make_mesh(), jax.process_index()
    own = Mesh(np.array(jax.local_devices()), ("fsdp",))
    found, log = [], []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logging.getLogger("shardrules").addHandler(handler)
    coordination._QUIET_SECONDS = 0.5
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def place():
        return sr.shard(TREE, RULES_OF_TREE, mesh)["a"]

    def together(name):
        client().wait_at_barrier(name, 60_000)

    for odd in (0, 1):
        # On its own, as often as it likes; the others need not know if they do not wait.
        if me == odd:
            alone = sr.shard(TREE, [("", P("fsdp"))], own)
            assert has_own_parts(alone["a"])
            assert np.array_equal(sr.gather(alone)["a"], MATRIX)
            assert has_own_parts(sr.with_sharding_constraint(MATRIX, P("fsdp"), own))
            assert raised(lambda: sr.shard(TREE, [], own)).startswith("ValueError")
        assert has_own_parts(place())
        os.environ["SHARDRULES_WAIT_SECONDS"] = "1.5"
        if me == odd:
            sr.shard(TREE, [("", P("fsdp"))], own)
            together(f"given up {odd}")
            late = raised(place)
        else:
            late = raised(place)
            together(f"given up {odd}")
        del os.environ["SHARDRULES_WAIT_SECONDS"]
        found.append([odd, "late", late, has_own_parts(place())])
        if me == odd:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
            error = raised(place)
            together(f"interrupted {odd}")
        else:
            together(f"interrupted {odd}")
            error = raised(place)
        found.append([odd, "interrupted", error, has_own_parts(place())])
    # At its end process 1 tells the others, before JAX waits for them there.
    return {"found": found, "left": None if me == 1 else raised(place), "log": log}


def end_early():
    """Process 1 ends before its first call, as if its model could not be made."""
    if jax.process_index() == 1:
        return None
    mesh, start = make_mesh(), time.monotonic()
    error = raised(lambda: sr.shard(TREE, RULES_OF_TREE, mesh))
    return {"error": error, "seconds": time.monotonic() - start}


def main(tasks) -> None:
    """Of the arguments: a task's name, the numbers of processes, of the port and of this one, and a file."""
    task, *numbers, out = sys.argv[1:]
    processes, port, index = map(int, numbers)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, index, initialization_timeout=60)
    assert jax.process_count() == processes
    Path(out).write_text(json.dumps(tasks[task]()))


if __name__ == "__main__":
    main({"agree": agree, "disagree": disagree, "wait": wait, "end_early": end_early})
