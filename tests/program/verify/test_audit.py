"""Live arrays against a plan: JAX says what devices hold, and `audit` says the same."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.entered import entered
from tests.support.process_worker import enable_x64
from tests.support.trees import WITHOUT_ARRAYS, kinds_of_trees, trees_of_libraries

SIZES = {"fsdp": 4, "tp": 2}
RULES = [("wq", ("fsdp", "tp")), ("wo", ("tp", "fsdp")), ("", ())]
PINNED = [("wq", sr.RuleSpec(("fsdp", "tp"), memory_kind="pinned_host")), *RULES[1:]]


ALL = jax.devices()[:8]


def mesh_of(devices=ALL, axes=("fsdp", "tp"), shape=(4, 2), **options):
    return Mesh(np.array(devices).reshape(shape), axes, **options)


def backwards():
    return mesh_of(ALL[::-1])


EXPLICIT = mesh_of(axis_types=(jax.sharding.AxisType.Explicit,) * 2)


def host_tree():
    layer = {"wq": np.ones((64, 32), "float32"), "wo": np.ones((32, 64), "float32")}
    return {"layers": [dict(layer) for _ in range(3)], "norm": np.ones(32, "float32")}


@pytest.fixture
def planned():
    """(a tree as it is planned, its plan)."""
    plan = sr.plan(host_tree(), RULES, mesh_of())
    return sr.shard(host_tree(), plan.shardings()), plan


def put(spec, mesh=None):
    return lambda x: jax.device_put(x, NamedSharding(mesh or mesh_of(), spec))


def seen(tree, plan):
    """(level, kind, leaves) of each finding."""
    return [(one.level, one.kind, one.leaves) for one in sr.audit(tree, plan)]


def kinds(tree, plan):
    return {(one.level, one.kind) for one in sr.audit(tree, plan)}


def with_wq(tree, change):
    """The tree, with the first layer's wq changed."""
    first, *layers = tree["layers"]
    return {**tree, "layers": [{**first, "wq": change(first["wq"])}, *layers]}


# What is as planned


def test_what_is_as_planned_has_no_finding(planned):
    tree, plan = planned
    step = jax.jit(lambda t: jax.tree.map(lambda x: x * 2, t), out_shardings=plan.shardings())
    for one, of in [
        (tree, plan),
        (step(tree), plan),
        (sr.shard(tree, plan.on_mesh(EXPLICIT).shardings()), plan),
        (plan.abstract(), plan),
        # Another container: found by their paths.
        ({**tree, "layers": tuple(tree["layers"])}, plan),
        ({**tree, "layers": dict(enumerate(tree["layers"]))}, plan),
        (tree, sr.Plan.from_lock(plan.lock()).on_mesh(mesh_of())),
    ]:
        assert sr.audit(one, of) == ()


@pytest.mark.parametrize("name", sorted({*kinds_of_trees(), *trees_of_libraries()} - WITHOUT_ARRAYS))
def test_trees_of_all_kinds(name):
    tree = {**kinds_of_trees(), **trees_of_libraries()}[name]
    plan = sr.plan(tree, [("", ("tp",))], mesh_of())

    def placed(leaf, sharding):
        shape = getattr(leaf, "shape", None)
        is_array = shape is not None and hasattr(leaf, "dtype")
        return jax.device_put(np.zeros(shape, leaf.dtype), sharding) if is_array else leaf

    live = jax.tree.map(placed, tree, plan.shardings())
    assert sr.audit(live, plan).at_least("warning") == ()


@pytest.mark.parametrize(
    ("wanted", "found"),
    [(P("tp"), P(("tp",), None)), (P(("fsdp", "tp")), P(("fsdp", "one", "tp"))), (P(None, None), P()), (P(), P("one"))],
    ids=str,
)
def test_what_cuts_alike_is_equal(wanted, found):
    mesh = mesh_of(axes=("fsdp", "one", "tp"), shape=(4, 1, 2))
    array = jax.device_put(np.ones((8, 8)), NamedSharding(mesh, found))
    for other in (mesh, mesh_of()):  # the second is without the axis of one device
        assert sr.audit({"w": array}, sr.plan({"w": array}, [("w", wanted)], other)) == ()


def test_what_the_plan_leaves_to_xla_may_be_cut_in_any_way():
    plan = sr.plan({"w": np.ones((8, 8))}, [("w", P("fsdp", P.UNCONSTRAINED))], mesh_of())
    for spec, told in ((P("fsdp"), []), (P("fsdp", "tp"), []), (P("tp", "fsdp"), ["sharding"])):
        assert [one.kind for one in sr.audit({"w": put(spec)(np.ones((8, 8)))}, plan)] == told


def test_one_device():
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    tree = {"w": jnp.ones((8, 8)), "n": jax.device_put(np.ones(3), jax.devices()[0])}
    plan = sr.plan(tree, [("", "tp")], mesh)
    assert (findings := sr.audit(tree, plan, values=True)) == ()
    assert findings.scope == "2 leaves, on tp=1; copies of 0 leaves compared"


def test_random_keys():
    tree = {"key": jax.random.key(1), "keys": jax.random.split(jax.random.key(0), 8)}
    plan = sr.plan(tree, [("keys", "tp")], mesh_of())
    assert seen(tree, plan) == [("error", "unplaced", 1), ("warning", "unplaced", 1)]
    assert sr.audit(jax.device_put(tree, plan.shardings()), plan) == ()


def test_uneven_cuts():
    """Abstract ones: JAX makes no such arrays."""
    keep = sr.Correction(indivisible="keep")
    tree = {"w": np.ones((6, 8))}
    rows = sr.plan(tree, sr.Rules([("w", "fsdp")], correction=keep), mesh_of())
    halves = sr.plan(tree, [("w", "tp")], mesh_of())
    assert sr.audit(rows.abstract(), rows) == ()
    for live, plan, size in ((halves, rows, (3 - 2) * 64), (rows, halves, 3 * 64)):
        (found,) = sr.audit(live.abstract(), plan)
        assert (found.kind, found.bytes) == ("sharding", size)


# Against devices: JAX's map of devices to their parts is the oracle.

ENTRIES = (None, "fsdp", "tp", ("fsdp", "tp"), ("tp", "fsdp"))
SPECS = tuple(
    P(*pair)
    for pair in itertools.product(ENTRIES, ENTRIES)
    if not any(axis in str(pair[0]) and axis in str(pair[1]) for axis in SIZES)
)


MESHES = {
    "the same": mesh_of(),
    "backwards": backwards(),
    "names swapped": mesh_of(axes=("tp", "fsdp"), shape=(2, 4)),
    "transposed": mesh_of(np.array(ALL).reshape(2, 4).T),
    "turned": mesh_of([*ALL[1:], ALL[0]]),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_all_specs_on_meshes(mesh):
    mesh, seen = MESHES[mesh], set()
    for spec, planned in itertools.product(SPECS, SPECS[::2]):
        live, wanted = NamedSharding(mesh, spec), NamedSharding(mesh_of(), planned)
        tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32", sharding=live)}
        is_same = live.devices_indices_map((8, 8)) == wanted.devices_indices_map((8, 8))
        # What every device holds whole is in another order of the devices, too.
        is_same &= tuple(mesh.devices.flat) == tuple(wanted.mesh.devices.flat)
        assert (sr.audit(tree, sr.plan(tree, [("", planned)], wanted.mesh)) == ()) == is_same
        seen.add(is_same)
    assert False in seen


def test_bytes_are_those_of_the_shards():
    for spec, wanted in itertools.product(SPECS, SPECS[::3]):
        array = put(spec)(np.ones((16, 8), "float32"))
        plan = sr.plan({"w": array}, [("w", wanted)], mesh_of())
        held = max(shard.data.nbytes for shard in array.addressable_shards)
        size = plan.bytes_per_device().max
        for found in sr.audit({"w": array}, plan):
            assert found.bytes == (held - size if held > size else size) > 0
            assert f"{held} B on each device, planned {size} B" in found.message


# Faults


def half_of_the_devices(x):
    return put(P("tp"), Mesh(jax.devices()[4:8], ("tp",)))(x)


PARTS = "1 leaf is sharded as P('tp'), planned P('fsdp', 'tp'): 4.10 kB on each device, planned 1.02 kB"
FAULTS = {
    "sharding": (put(P("tp")), "sharding", 4096 - 1024, PARTS),
    "replicated": (put(P()), "sharding", 8192 - 1024, "sharded as P()"),
    "on no device": (np.asarray, "unplaced", 1024, "on no device"),
    "JAX chose": (lambda x: jnp.ones(x.shape, x.dtype), "unplaced", 8192 - 1024, "whole on a device that JAX chose"),
    "one device": (lambda x: jax.device_put(x, jax.devices()[3]), "devices", 8192 - 1024, "on device 3, planned on fsdp"),
    "other devices": (half_of_the_devices, "devices", 2048 - 1024, "on devices 4, 5, 6, 7, planned on fsdp=4,tp=2"),
    "another order": (put(P(("fsdp", "tp")), backwards()), "devices", 1024, "on the plan's devices in another order"),
    "memory": (lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), "memory-kind", 1024,
               "in pinned_host memory, planned in device memory"),
    "dtype": (lambda x: x.astype("bfloat16"), "type", 1024, "bfloat16[64, 32], planned float32[64, 32]"),
    "shape": (lambda x: x[:32], "type", None, "float32[32, 32], planned float32[64, 32]"),
    "deleted": (lambda x: x.delete() or x, "deleted", 1024, "deleted, by donation or by hand"),
    "None": (lambda _: None, "structure", 1024, "the tree lacks 1 array of the plan"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_a_fault_of_one_array_is_told_and_mended(planned, name):
    tree, plan = planned
    change, kind, size, message = FAULTS[name]
    wrong = with_wq(tree, change)
    (found,) = sr.audit(wrong, plan)
    assert (found.level, found.kind, found.paths) == ("error", kind, ("layers/0/wq",))
    assert message in found.message
    assert size is None or found.bytes == size
    if "shardrules.shard(" in found.fix:
        assert sr.audit(sr.shard(wrong, plan.shardings()), plan) == ()


def test_two_faults_of_one_array(planned):
    tree, plan = planned
    pinned = sr.plan(tree, PINNED, mesh_of())
    assert seen(tree, pinned) == [("error", "memory-kind", 3)]
    assert sr.audit(sr.shard(tree, pinned.shardings()), pinned) == sr.audit(pinned.abstract(), pinned) == ()
    for wrong, of, expected in [
        (with_wq(tree, lambda _: 3.0), plan, {"type", "unplaced"}),
        (with_wq(tree, put(P())), pinned, {"memory-kind", "sharding"}),
        (with_wq(tree, lambda x: {"q": x, "scale": tree["norm"]}), plan, {"structure"}),
    ]:
        assert {kind for _, kind in kinds(wrong, of)} == expected


def test_many_arrays_are_one_finding_by_rule(planned):
    tree, plan = planned
    found = {one.paths: (one.bytes, one.rule) for one in sr.audit(put(P())(tree), plan)}
    of_each = {f"layers/{{0..2}}/{w}": (3 * (8192 - 1024), i) for i, w in enumerate(("wq", "wo"))}
    assert found == {(path,): row for path, row in of_each.items()}
    assert kinds(jax.device_put(tree, plan.on_mesh(backwards()).shardings()), plan) == {("error", "devices")}
    older = sr.plan(tree, [("wq", ("fsdp", "tp")), ("wo", ("fsdp", "tp")), ("", ())], mesh_of())
    (found,) = sr.audit(tree, older)  # a tree that an older list of rules placed
    assert (found.kind, found.paths, found.rule) == ("sharding", ("layers/{0..2}/wo",), 1)


def test_what_is_in_no_place_is_a_warning_if_it_is_small_and_replicated(planned):
    _, plan = planned
    both = [("error", "unplaced", 3)] * 2
    assert seen(host_tree(), plan) == [*both, ("warning", "unplaced", 1)]
    assert seen(jax.tree.map(jnp.asarray, host_tree()), plan) == [*both, ("warning", "unplaced", 1)]
    large = {"w": np.broadcast_to(np.float32(1), (2**11, 2**11))}
    assert seen(large, sr.plan(large, [("w", ())], mesh_of())) == [("error", "unplaced", 1)]
    of_step = sr.plan({"step": jnp.int32(0)}, [], mesh_of())
    assert seen({"step": jnp.int32(0)}, of_step) == seen({"step": 3}, of_step) == [("warning", "unplaced", 1)]
    with_number = {**planned[0], "step": 3}  # in the plan, too: for jit to place
    assert sr.audit(with_number, sr.plan(with_number, plan.rules, plan.mesh)) == ()


def test_types_that_jax_made_narrow():
    """Since jax_enable_x64 is not set."""
    host = {"step": np.int64(3), "w": np.ones((8, 8), "float64")}
    plan = sr.plan(host, [("w", "tp")], mesh_of())
    live = sr.shard(host, plan.shardings())
    assert sr.audit(live, plan) == ()
    other = {**live, "w": sr.shard(np.ones((8, 8), "int32"), P("tp"), plan.mesh)}
    assert ("error", "type", 1) in seen(other, plan)
    with enable_x64(True):
        assert {kind for _, kind in kinds(live, plan)} == {"type"}


def test_leaves_without_a_place_in_the_plan(planned):
    tree, _ = planned
    odd = {**tree, "odd": tree["norm"][:31]}
    exact = sr.RuleSpec("tp", correction=sr.Correction(indivisible="error"))
    plan = sr.plan(odd, [*RULES[:2], ("odd", exact)], mesh_of())
    found = {one.paths: one for one in sr.audit(odd, plan)}
    assert kinds(odd, plan) == {("error", "unplanned")}
    assert found["norm",].message == "1 leaf is without a place in the plan: no rule matches"
    assert "31" in found["odd",].message
    assert "plan.check()" in found["odd",].fix


def test_missing_and_extra_leaves(planned):
    tree, plan = planned
    changed = {**tree, "head": tree["norm"], "name": "x"}
    del changed["norm"]
    extra, missing = sorted(sr.audit(changed, plan), key=lambda one: one.message)
    assert [(one.kind, one.paths, one.bytes) for one in (extra, missing)] == [
        ("structure", ("head",), 128), ("structure", ("norm",), 128)
    ]  # fmt: skip
    assert "the tree has 1 array that the plan lacks" in extra.message


def test_functions_and_strings_are_no_arrays():
    tree = {"w": np.ones(8, "float32"), "act": jax.nn.relu, "name": "x"}
    plan = sr.plan(tree, [("w", "tp")], mesh_of())
    live = {**tree, "w": jax.device_put(tree["w"], plan.shardings()["w"])}
    for right in (live, {"w": live["w"]}, {**live, "more": "text"}):
        assert sr.audit(right, plan) == ()
    for wrong in ({**live, "w": "text", "act": 3}, {**live, "act": live["w"]}):
        assert seen(wrong, plan) == [("error", "type", 1)]


# Values: the bits of the shards that JAX has are the oracle.


def copies(of_device, spec, mesh=None, **named):
    """An array of which each device has its part of a value of its own."""
    sharding = NamedSharding(mesh or mesh_of(), spec, **named)
    parts = sharding.devices_indices_map(of_device[0].shape).items()
    shards = [
        jax.device_put(value[index], SingleDeviceSharding(device, **named))
        for (device, index), value in zip(parts, of_device, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(of_device[0].shape, sharding, shards)


def plan_of(array):
    kind = array.sharding.memory_kind
    spec = sr.RuleSpec(array.sharding.spec, memory_kind=kind if kind == "pinned_host" else None)
    return sr.plan({"w": array}, [("w", spec)], array.sharding.mesh)


def told(array):
    """What audit says of an array that is as planned."""
    return sr.audit({"w": array}, plan_of(array), values=True)


def unlike_devices(array):
    """Numbers of the devices whose bits are not those of the first one with the same part."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    first, unlike = {}, []
    for shard in sorted(array.addressable_shards, key=lambda shard: shard.device.id):
        bits = np.asarray(jax.random.key_data(shard.data) if is_key else shard.data).tobytes()
        if first.setdefault(str(shard.index), bits) != bits:
            unlike.append(shard.device.id)
    return unlike


DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "uint4", "bool", "complex64",
          "key", "one key")  # fmt: skip


def made(dtype, number):
    if dtype == "one key":
        return jax.random.key(number)
    if dtype == "key":
        return jax.random.split(jax.random.key(number), (8, 4))
    return jnp.full((8, 4), number % 2 if dtype == "bool" else number, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_that_differ_are_told(dtype):
    for spec in [P()] if dtype == "one key" else [P(), P("tp"), P(None, "fsdp"), P(("tp", "fsdp"))]:
        assert told(copies([made(dtype, 1)] * 8, spec)) == ()
        unlike = copies([made(dtype, number) for number in range(8)], spec)
        expected = unlike_devices(unlike)
        findings = told(unlike)
        assert [(one.level, one.kind, one.paths) for one in findings] == [("error", "differs", ("w",))] * bool(expected)
        for finding in findings:
            assert f" {', '.join(map(str, expected))} ha" in finding.message
        assert sr.audit({"w": unlike}, plan_of(unlike)) == ()  # off by default
    assert bool(expected) == (dtype == "one key")  # cut by all axes, there are no copies


def test_which_devices_and_which_axis():
    zeros, ones = np.zeros((8, 4), "float32"), np.ones((8, 4), "float32")
    for values, spec, text in (
        (range(8), P(), "along fsdp and tp: devices 1, 2, 3, 4, 5, 6, 7 have other values than the first copy"),
        ((0, 1) * 4, P(), "along tp: devices 1, 3, 5, 7 have other values"),
        ((0, 0, 0, 1, 0, 0, 0, 0), P("tp"), "along fsdp: device 3 has other values"),
        ((1, 0, 0, 1, 0, 0, 0, 0), P("fsdp"), "along tp: devices 1, 3 have other values"),
        ((1, 0, 0, 0, 0, 0, 0, 0), P(None, "tp"), "along fsdp: devices 2, 4, 6 have other values"),
    ):
        for memory in (None, "pinned_host"):
            array = copies([zeros + ones * value for value in values], spec, memory_kind=memory)
            (finding,) = told(array)
            assert text in finding.message


def bits(values):
    return np.array(values, "uint32").view("float32")


UNLIKE_BITS = {
    "sums of which are equal, as of 2**32": (np.full(512, 1.0, "float32"), np.full(512, 2.0, "float32")),
    "in another order": (np.arange(8.0), np.arange(8.0)[::-1]),
    "two swapped": (np.array([1.0, 2, 3]), np.array([2.0, 1, 3])),
    "zero and minus zero": (np.zeros(4, "float32"), -np.zeros(4, "float32")),
    "NaNs of other bits": (bits([0x7FC00000] * 4), bits([0x7FC00001] * 4)),
    "the least number": (bits([0] * 4), bits([0, 0, 0, 1])),
    "a scalar": (np.float32(1), np.float32(np.nextafter(np.float32(1), np.float32(2)))),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE_BITS)
def test_values_are_compared_by_their_bits(name):
    pair = [jnp.asarray(value, "float32") for value in UNLIKE_BITS[name]]
    for value in pair:
        assert told(copies([value] * 8, P())) == ()
    (finding,) = told(copies([*pair, *pair[:1] * 6], P()))
    assert "device 1 has other values" in finding.message


def test_wide_numbers():
    with enable_x64(True):
        for dtype, change in itertools.product(("float64", "int64"), (1, 2**40)):  # in either half
            value = np.full((8, 4), 2**41, "int64")
            pair = [jnp.asarray(each.view(dtype)) for each in (value, value + change)]
            assert told(copies(pair[:1] * 8, P("fsdp"))) == ()
            assert [one.kind for one in told(copies(pair * 4, P("fsdp")))] == ["differs"]


def test_values_of_arrays_that_are_not_as_planned():
    """Those on the devices of the mesh are compared, whatever else is said of them."""
    values = [np.full((8, 4), number, "float32") for number in range(8)]
    unlike, offloaded = copies(values, P("tp")), copies(values, P("fsdp"), memory_kind="pinned_host")
    plan = sr.plan({"w": unlike}, [("w", "fsdp")], mesh_of())
    for array, kind in ((unlike, "sharding"), (offloaded, "memory-kind")):
        findings = sr.audit({"w": array}, plan, values=True)
        assert {one.kind for one in findings} == {kind, "differs"}
        assert findings.scope.endswith("; copies of 1 leaf compared")
    deleted = jax.device_put(unlike, plan.shardings()["w"])
    deleted.delete()
    on_others = copies(values, P("fsdp"), backwards())
    for array in (deleted, on_others, jnp.ones((8, 4)), np.ones((8, 4)), *plan.abstract().values(), None):
        findings = sr.audit({"w": array}, plan, values=True)
        assert findings == sr.audit({"w": array}, plan)
        assert findings.scope.endswith("; copies of 0 leaves compared")


def test_values_in_any_context():
    values = [np.full((8, 4), number, "float32") for number in range(8)]
    of_either = [copies(values, P("fsdp"), mesh) for mesh in (mesh_of(), EXPLICIT)]
    for context in (mesh_of(), EXPLICIT, mesh_of(jax.devices()[:2], ("x",), (2,))):
        with jax.set_mesh(context):
            assert [[one.kind for one in told(array)] for array in of_either] == [["differs"]] * 2


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this JAX has no sums that are yet to be taken")
def test_parts_of_a_sum_are_no_copies():
    values = np.arange(64, dtype="float32").reshape(8, 8)
    x, y = (put(spec, EXPLICIT)(values) for spec in (P(None, "tp"), P("tp", None)))
    product = partial(jnp.einsum, "ij,jk->ik", out_sharding=P(None, None, unreduced={"tp"}))
    with jax.set_mesh(EXPLICIT):
        parts = {"w": jax.jit(product)(x, y)}
    findings = sr.audit(parts, sr.plan(parts, [("w", ())], EXPLICIT), values=True)
    assert [one.kind for one in findings] == ["sharding"]
    assert findings.scope.endswith("; copies of 0 leaves compared")


def test_misuse(planned):
    tree, plan = planned
    with pytest.raises(ValueError, match=r"fsdp=4,tp=2 has no devices .*plan\.on_mesh\(mesh\)"):
        sr.audit(tree, plan.on_mesh(SIZES))
    with pytest.raises(TypeError, match="plan is .*it must be a Plan"):
        sr.audit(tree, plan.shardings())
    with pytest.raises(TypeError, match="call it outside"):
        jax.jit(lambda t: sr.audit(t, plan) and t)(tree)
    assert kinds(plan.on_mesh(SIZES).abstract(), plan) == {("error", "unknown")}


def test_the_cost_is_per_kind_and_not_per_leaf():
    """One read of all the leaves, not a few calls for each of them."""

    def calls(layers):
        tree = {str(i): {"w": np.ones((8, 8), "float32")} for i in range(layers)}
        plan = sr.plan(tree, [("w", "tp")], mesh_of())
        placed = sr.shard(tree, plan.shardings())
        with entered() as rows:
            sr.audit(placed, plan)
        return len(rows)

    assert calls(510) - calls(10) <= 60  # of this project's functions; 23 were entered
