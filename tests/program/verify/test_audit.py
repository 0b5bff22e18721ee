"""Live arrays against a plan: JAX says what devices hold, and `audit` says the same."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.trees import WITHOUT_ARRAYS, kinds_of_trees, trees_of_libraries
from tests.support.work import calls

SIZES = {"fsdp": 4, "tp": 2}
RULES = [("wq", ("fsdp", "tp")), ("wo", ("tp", "fsdp")), ("", ())]


def mesh_of(devices=None, axes=("fsdp", "tp"), shape=(4, 2)):
    devices = jax.devices()[:8] if devices is None else devices
    return Mesh(np.array(devices).reshape(shape), axes)


def host_tree():
    return {
        "layers": [
            {"wq": np.ones((64, 32), "float32"), "wo": np.ones((32, 64), "float32")}
            for _ in range(3)
        ],
        "norm": np.ones(32, "float32"),
    }


@pytest.fixture
def planned():
    """(a tree as it is planned, its plan)."""
    plan = sr.plan(host_tree(), RULES, mesh_of())
    return sr.shard(host_tree(), plan.shardings()), plan


def seen(tree, plan):
    """(level, kind, leaves) of each finding."""
    return [(one.level, one.kind, one.leaves) for one in sr.audit(tree, plan)]


def with_wq(tree, change):
    """The tree, with the first layer's wq changed."""
    first, *layers = tree["layers"]
    return {**tree, "layers": [{**first, "wq": change(first["wq"])}, *layers]}


def only(tree, plan):
    (found,) = sr.audit(tree, plan)
    assert "layers" in "".join(found.paths) or found.leaves != 1
    return found


class TestAsPlanned:
    def test_nothing_is_found(self, planned):
        assert sr.audit(*planned) == ()

    @pytest.mark.parametrize(
        "name", sorted({*kinds_of_trees(), *trees_of_libraries()} - WITHOUT_ARRAYS)
    )
    def test_trees_of_all_kinds(self, name):
        tree = {**kinds_of_trees(), **trees_of_libraries()}[name]
        plan = sr.plan(tree, [("", ("tp",))], mesh_of())
        shardings = plan.shardings()

        def placed(leaf, sharding):
            shape = getattr(leaf, "shape", None)
            is_array = shape is not None and hasattr(leaf, "dtype")
            return jax.device_put(np.zeros(shape, leaf.dtype), sharding) if is_array else leaf

        live = jax.tree.map(placed, tree, shardings)
        assert sr.audit(live, plan).at_least("warning") == ()
        assert sr.audit(live, plan.on_mesh(SIZES)).at_least("warning") == ()

    @pytest.mark.parametrize(
        ("planned", "found"),
        [
            (P("tp"), P(("tp",), None)),
            (P(("fsdp", "tp")), P(("fsdp", "one", "tp"))),
            (P(None, None), P()),
            (P(), P("one")),
        ],
        ids=str,
    )
    def test_what_cuts_alike_is_equal(self, planned, found):
        mesh = mesh_of(axes=("fsdp", "one", "tp"), shape=(4, 1, 2))
        array = jax.device_put(np.ones((8, 8)), NamedSharding(mesh, found))
        plan = sr.plan({"w": array}, [("w", planned)], mesh)
        assert sr.audit({"w": array}, plan) == ()
        other = mesh_of()  # without the axis of one device
        assert sr.audit({"w": array}, sr.plan({"w": array}, [("w", planned)], other)) == ()

    def test_one_device(self):
        mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
        tree = {"w": jnp.ones((8, 8)), "n": jax.device_put(np.ones(3), jax.devices()[0])}
        assert isinstance(tree["n"].sharding, SingleDeviceSharding)
        assert sr.audit(tree, sr.plan(tree, [("", "tp")], mesh)) == ()

    def test_random_keys(self):
        keys = jax.random.split(jax.random.key(0), 8)
        tree = {"key": jax.random.key(1), "keys": keys}
        plan = sr.plan(tree, [("keys", "tp")], mesh_of())
        assert seen(tree, plan) == [("error", "unplaced", 1), ("warning", "unplaced", 1)]
        assert sr.audit(jax.device_put(tree, plan.shardings()), plan) == ()

    def test_what_a_step_returns(self, planned):
        tree, plan = planned
        stepped = jax.jit(
            lambda t: jax.tree.map(lambda x: x * 2, t), out_shardings=plan.shardings()
        )
        assert sr.audit(stepped(tree), plan) == ()

    def test_axis_types(self, planned):
        tree, plan = planned
        types = (jax.sharding.AxisType.Explicit,) * 2
        explicit = Mesh(plan.mesh.devices, plan.mesh.axis_names, axis_types=types)
        assert sr.audit(sr.shard(tree, plan.on_mesh(explicit).shardings()), plan) == ()

    def test_uneven_cuts(self):
        """Abstract ones: JAX makes no such arrays."""
        keep = sr.Correction(indivisible="keep")
        plan = sr.plan(
            {"w": np.ones((6, 8))}, sr.Rules([("w", "fsdp")], correction=keep), mesh_of()
        )
        assert sr.audit(plan.abstract(), plan) == ()
        other = sr.plan({"w": np.ones((6, 8))}, [("w", "tp")], mesh_of()).abstract()
        (found,) = sr.audit(other, plan)
        assert (found.kind, found.bytes) == ("sharding", (3 - 2) * 64)
        (found,) = sr.audit(
            plan.abstract(), sr.plan({"w": np.ones((6, 8))}, [("w", "tp")], mesh_of())
        )
        assert (found.kind, found.bytes) == ("sharding", 3 * 64)

    def test_abstract_arrays(self, planned):
        _, plan = planned
        assert sr.audit(plan.abstract(), plan) == ()
        without = plan.on_mesh(SIZES)
        assert sr.audit(without.abstract(), plan) == ()
        assert sr.audit(without.abstract(), without) == ()

    def test_another_container(self, planned):
        """Found by their paths."""
        tree, plan = planned
        assert sr.audit({**tree, "layers": tuple(tree["layers"])}, plan) == ()
        assert sr.audit({**tree, "layers": dict(enumerate(tree["layers"]))}, plan) == ()
        assert sr.audit(tree, sr.Plan.from_lock(plan.lock()).on_mesh(mesh_of())) == ()


class TestAgainstDevices:
    """JAX's map of devices to their parts is the oracle."""

    ENTRIES = (None, "fsdp", "tp", ("fsdp", "tp"), ("tp", "fsdp"))
    SPECS = tuple(
        P(*pair)
        for pair in itertools.product(ENTRIES, ENTRIES)
        if "fsdp" not in str(pair[0]) or "fsdp" not in str(pair[1])
        if "tp" not in str(pair[0]) or "tp" not in str(pair[1])
    )

    def meshes(self):
        devices = jax.devices()[:8]
        return [
            mesh_of(),
            mesh_of(devices[::-1]),
            mesh_of(axes=("tp", "fsdp"), shape=(2, 4)),
            mesh_of(np.array(devices).reshape(2, 4).T),
            mesh_of([*devices[1:], devices[0]]),
        ]

    def test_all_specs_on_meshes(self):
        array = jax.ShapeDtypeStruct((8, 8), "float32")
        differ = 0
        for mesh in self.meshes():
            of_specs = [NamedSharding(mesh, spec) for spec in self.SPECS]
            tree = [jax.ShapeDtypeStruct((8, 8), "float32", sharding=one) for one in of_specs]
            for spec in self.SPECS[::2]:
                wanted = NamedSharding(self.meshes()[0], spec)
                plan = sr.plan([array] * len(tree), [("", spec)], wanted.mesh)
                wrong = {path for one in sr.audit(tree, plan) for path in paths_of(one, plan)}
                expected = {
                    str(i) for i, one in enumerate(of_specs)
                    if one.devices_indices_map((8, 8)) != wanted.devices_indices_map((8, 8))
                    # What every device holds whole is in another order of the devices, too.
                    or tuple(one.mesh.devices.flat) != tuple(wanted.mesh.devices.flat)
                }  # fmt: skip
                assert wrong == expected
                differ += len(wrong)
        assert 0 < differ < len(self.SPECS) ** 2 * len(self.meshes())

    def test_bytes(self):
        """Of arrays that are there, by their own shards."""
        mesh = mesh_of()
        for spec, wanted in itertools.product(self.SPECS, self.SPECS[::3]):
            array = jax.device_put(np.ones((16, 8), "float32"), NamedSharding(mesh, spec))
            plan = sr.plan({"w": array}, [("w", wanted)], mesh)
            held, planned = bytes_on_a_device(array), plan.bytes_per_device().max
            for found in sr.audit({"w": array}, plan):
                assert found.bytes == (held - planned if held > planned else planned) > 0
                assert f"{held} B on each device, planned {planned} B" in found.message


def paths_of(finding, plan):
    """The paths that its folded ones stand for."""
    by_pattern = {
        one.pattern: one for one in sr.plan(plan.abstract(), plan.rules, plan.mesh).folded
    }
    listed = []
    for pattern in finding.paths:
        if pattern in by_pattern:
            listed += [plan.paths[row] for row in by_pattern[pattern].rows]
        else:
            listed += expanded(pattern)
    assert len(listed) == finding.leaves
    return listed


def expanded(pattern):
    """'{0..2,5}' as 0, 1, 2, 5."""
    for part in pattern.strip("{}").split(","):
        first, _, last = part.partition("..")
        yield from map(str, range(int(first), int(last or first) + 1))


def bytes_on_a_device(array):
    return max(shard.data.nbytes for shard in array.addressable_shards)


class TestFaults:
    def test_sharding(self, planned):
        tree, plan = planned
        wrong = with_wq(tree, lambda x: jax.device_put(x, NamedSharding(plan.mesh, P("tp"))))
        found = only(wrong, plan)
        assert (found.level, found.kind, found.paths) == ("error", "sharding", ("layers/0/wq",))
        assert "1 leaf is sharded as P('tp'), planned P('fsdp', 'tp')" in found.message
        assert "4.10 kB on each device, planned 1.02 kB" in found.message
        assert (found.bytes, found.rule) == (4096 - 1024, 0)
        assert "shardrules.shard(tree, plan.shardings())" in found.fix
        mended = sr.shard(wrong, plan.shardings())
        assert sr.audit(mended, plan) == ()

    def test_replicated_whole(self, planned):
        tree, plan = planned
        everywhere = jax.device_put(tree, NamedSharding(plan.mesh, P()))
        found = {one.paths: one.bytes for one in sr.audit(everywhere, plan)}
        assert found == {
            ("layers/{0..2}/wq",): 3 * (8192 - 1024),
            ("layers/{0..2}/wo",): 3 * (8192 - 1024),
        }

    def test_numpy_arrays(self, planned):
        _, plan = planned
        tree = host_tree()
        assert seen(tree, plan) == [
            ("error", "unplaced", 3),
            ("error", "unplaced", 3),
            ("warning", "unplaced", 1),
        ]
        assert "on no device" in sr.audit(tree, plan)[0].message

    def test_large_numpy_arrays_that_are_to_be_replicated(self):
        tree = {"w": np.broadcast_to(np.float32(1), (2**11, 2**11))}
        plan = sr.plan(tree, [("w", ())], mesh_of())
        assert seen(tree, plan) == [("error", "unplaced", 1)]

    def test_arrays_that_jax_put_somewhere(self, planned):
        tree, plan = planned
        found = only(with_wq(tree, lambda x: jnp.ones(x.shape, x.dtype)), plan)
        assert (found.level, found.kind) == ("error", "unplaced")
        assert "whole on a device that JAX chose" in found.message
        step = {"step": jnp.int32(0)}
        assert seen(step, sr.plan(step, [], mesh_of())) == [("warning", "unplaced", 1)]

    def test_numbers(self, planned):
        """As numbers in the plan they are for jit to place; in the place of an array they are not."""
        tree, plan = planned
        assert (
            sr.audit(tree | {"step": 3}, sr.plan(tree | {"step": 3}, plan.rules, plan.mesh)) == ()
        )
        plan = sr.plan({"step": jnp.int32(0)}, [], mesh_of())
        assert seen({"step": 3}, plan) == [("warning", "unplaced", 1)]
        tree, plan = planned
        assert seen(with_wq(tree, lambda _: 3.0), plan) == [
            ("error", "type", 1),
            ("error", "unplaced", 1),
        ]

    def test_one_device_of_eight(self, planned):
        tree, plan = planned
        found = only(with_wq(tree, lambda x: jax.device_put(x, jax.devices()[3])), plan)
        assert (found.level, found.kind) == ("error", "devices")
        assert "on 1 device; planned on fsdp=4,tp=2" in found.message

    def test_other_devices(self):
        here, there = jax.devices()[:4], jax.devices()[4:8]
        tree = {"w": jax.device_put(np.ones((8, 8)), NamedSharding(Mesh(there, ("tp",)), P("tp")))}
        plan = sr.plan(tree, [("w", "tp")], Mesh(here, ("tp",)))
        (found,) = sr.audit(tree, plan)
        assert (found.kind, found.level) == ("devices", "error")
        assert "on 4 other devices" in found.message

    def test_another_order_of_the_devices(self, planned):
        tree, plan = planned
        backwards = mesh_of(jax.devices()[:8][::-1])
        turned = jax.device_put(tree, plan.on_mesh(backwards).shardings())
        assert {(one.kind, one.level) for one in sr.audit(turned, plan)} == {("devices", "error")}
        wrong = with_wq(tree, lambda x: jax.device_put(x, NamedSharding(backwards, P("tp"))))
        assert {one.kind for one in sr.audit(wrong, plan)} == {"devices", "sharding"}

    def test_memory_that_was_not_planned(self, planned):
        tree, plan = planned
        moved = with_wq(
            tree, lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
        )
        found = only(moved, plan)
        assert (found.level, found.kind) == ("error", "memory-kind")
        assert "in pinned_host memory, planned in device memory" in found.message
        assert "RuleSpec(..., memory_kind='pinned_host')" in found.fix
        assert sr.audit(sr.shard(moved, plan.shardings()), plan) == ()

    def test_memory_that_was_planned(self, planned):
        tree, _ = planned
        rules = [("wq", sr.RuleSpec(("fsdp", "tp"), memory_kind="pinned_host")), *RULES[1:]]
        plan = sr.plan(tree, rules, mesh_of())
        (found,) = sr.audit(tree, plan)
        assert (found.kind, found.leaves, found.bytes) == ("memory-kind", 3, 3 * 1024)
        assert "in device memory, planned in pinned_host memory" in found.message
        assert sr.audit(sr.shard(tree, plan.shardings()), plan) == ()
        assert sr.audit(plan.abstract(), plan) == ()
        both = with_wq(tree, lambda x: jax.device_put(x, NamedSharding(plan.mesh, P())))
        assert {one.kind for one in sr.audit(both, plan)} == {"memory-kind", "sharding"}

    def test_another_dtype(self, planned):
        tree, plan = planned
        found = only(with_wq(tree, lambda x: x.astype("bfloat16")), plan)
        assert (found.level, found.kind) == ("error", "type")
        assert "bfloat16[64, 32], planned float32[64, 32]" in found.message

    def test_another_shape(self, planned):
        tree, plan = planned
        found = only(with_wq(tree, lambda x: x[:32]), plan)
        assert found.kind == "type"
        assert "float32[32, 32], planned float32[64, 32]" in found.message

    def test_types_that_jax_made_narrow(self):
        """Since jax_enable_x64 is not set."""
        host = {"step": np.int64(3), "w": np.ones((8, 8), "float64")}
        plan = sr.plan(host, [("w", "tp")], mesh_of())
        assert seen(sr.shard(host, plan.shardings()), plan) == [("info", "type", 1)] * 2
        other = {
            **sr.shard(host, plan.shardings()),
            "w": sr.shard(np.ones((8, 8), "int32"), P("tp"), plan.mesh),
        }
        assert ("error", "type", 1) in seen(other, plan)

    def test_donated_arrays(self, planned):
        tree, plan = planned
        tree["layers"][0]["wq"].delete()
        found = only(tree, plan)
        assert (found.level, found.kind, found.paths) == ("error", "deleted", ("layers/0/wq",))
        assert "what the call that they were donated to returned" in found.fix

    def test_abstract_arrays_without_shardings(self, planned):
        _, plan = planned
        tree = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, host_tree()))
        assert {(one.level, one.kind) for one in sr.audit(tree, plan)} == {("error", "unknown")}
        assert "nothing is known" in sr.audit(tree, plan)[0].message

    def test_leaves_without_a_place_in_the_plan(self, planned):
        tree, _ = planned
        odd = {**tree, "odd": tree["norm"][:31]}
        exact = sr.RuleSpec("tp", correction=sr.Correction(indivisible="error"))
        plan = sr.plan(odd, [*RULES[:2], ("odd", exact)], mesh_of())
        found = {one.paths: one for one in sr.audit(odd, plan)}
        assert {(one.level, one.kind) for one in found.values()} == {("error", "unplanned")}
        assert found["norm",].message == "the plan has no place for 1 leaf: no rule matches"
        assert "31" in found["odd",].message
        assert "plan.check()" in found["odd",].fix

    def test_all_faults_at_once(self, planned):
        tree, plan = planned
        tree["layers"][1]["wq"].delete()
        tree = with_wq(tree, np.asarray)
        tree["layers"][2]["wo"] = jnp.ones((3, 3))
        del tree["norm"]
        kinds = [one.kind for one in sr.audit(tree, plan)]
        assert sorted(kinds) == ["deleted", "structure", "type", "unplaced"]


@pytest.mark.filterwarnings("error::DeprecationWarning")
class TestStructure:
    def test_missing_and_extra_leaves(self, planned):
        tree, plan = planned
        changed = {**tree, "head": tree["norm"]}
        del changed["norm"]
        extra, missing = sorted(sr.audit(changed, plan), key=lambda one: one.message)
        assert extra.paths == ("head",)
        assert missing.paths == ("norm",)
        assert {one.kind for one in (extra, missing)} == {"structure"}
        assert "1 array of the tree is not in the plan" in extra.message
        assert "the tree lacks 1 array of the plan" in missing.message

    def test_none_in_the_place_of_an_array(self, planned):
        tree, plan = planned
        found = only(with_wq(tree, lambda _: None), plan)
        assert (found.kind, found.paths) == ("structure", ("layers/0/wq",))

    def test_a_tree_in_the_place_of_an_array(self, planned):
        tree, plan = planned
        found = sr.audit(with_wq(tree, lambda x: {"q": x, "scale": tree["norm"]}), plan)
        assert [one.kind for one in found] == ["structure"] * 2
        assert {("layers/0/wq",), ("layers/0/wq/q", "layers/0/wq/scale")} == {
            one.paths for one in found
        }

    def test_the_whole_state_for_a_plan_of_parameters(self, planned):
        tree, plan = planned
        found = sr.audit({"params": tree, "step": jnp.int32(0)}, plan)
        assert [one.kind for one in found] == ["structure"] * 2
        assert all("under 'params' in the tree" in one.fix for one in found)
        assert sr.audit(tree, plan) == ()

    def test_a_part_of_what_was_planned(self, planned):
        tree, plan = planned
        found = sr.audit(tree["layers"], plan)
        assert all("under 'layers' in the plan" in one.fix for one in found)

    def test_functions_and_strings_are_no_arrays(self):
        tree = {"w": np.ones(8, "float32"), "act": jax.nn.relu, "name": "x"}
        plan = sr.plan(tree, [("w", "tp")], mesh_of())
        live = {**tree, "w": jax.device_put(tree["w"], plan.shardings()["w"])}
        assert sr.audit(live, plan) == ()
        assert sr.audit({"w": live["w"]}, plan) == ()
        assert sr.audit({**live, "more": "text"}, plan) == ()
        assert seen({**live, "w": "text", "act": 3}, plan) == [("error", "type", 1)]
        assert seen({**live, "act": live["w"]}, plan) == [("error", "type", 1)]

    def test_another_models_plan(self, planned):
        tree, _ = planned
        plan = sr.plan({"model": {"w": np.ones((8, 8))}}, [("w", "tp")], mesh_of())
        found = sr.audit(tree, plan)
        assert [one.kind for one in found] == ["structure"] * 2
        assert sum(one.leaves for one in found) == 8
        with pytest.raises(sr.FindingsError, match="structure"):
            found.raise_for()


class TestPlansWithoutDevices:
    def test_the_arrays_own_mesh_counts(self, planned):
        tree, plan = planned
        for without in (plan.on_mesh(SIZES), sr.Plan.from_lock(plan.lock())):
            (found,) = sr.audit(tree, without)
            assert (found.level, found.kind) == ("info", "devices")
            assert "fsdp=4,tp=2 has no devices" in found.message
            assert "plan.on_mesh(mesh)" in found.fix
            wrong = with_wq(tree, lambda x: jax.device_put(x, NamedSharding(plan.mesh, P())))
            found = sr.audit(wrong, without)[0]
            assert (found.kind, found.bytes) == ("sharding", 8192 - 1024)
            assert "plan.on_mesh(mesh).shardings()" in found.fix

    def test_an_abstract_mesh(self, planned):
        tree, plan = planned
        without = plan.on_mesh(plan.mesh.abstract_mesh)
        assert isinstance(without.mesh, AbstractMesh)
        assert seen(tree, without) == [("info", "devices", 0)]

    def test_axes_in_another_order_are_the_arrays_affair(self, planned):
        tree, plan = planned
        other = plan.on_mesh(mesh_of(axes=("tp", "fsdp"), shape=(2, 4)))
        turned = jax.device_put(tree, other.shardings())
        assert seen(turned, plan.on_mesh(SIZES)) == [("info", "devices", 0)]

    def test_two_orders_of_the_devices(self, planned):
        """Most arrays are on the first mesh."""
        tree, plan = planned
        backwards = mesh_of(jax.devices()[:8][::-1])
        other = with_wq(
            tree, lambda x: jax.device_put(x, NamedSharding(backwards, P("fsdp", "tp")))
        )
        assert seen(other, plan.on_mesh(SIZES)) == [("error", "devices", 1), ("info", "devices", 0)]

    def test_another_mesh(self, planned):
        tree, plan = planned
        eight = jax.device_put(tree, NamedSharding(Mesh(jax.devices()[:8], ("x",)), P("x")))
        found = sr.audit(eight, plan.on_mesh(SIZES))
        assert {one.kind for one in found.at_least("error")} == {"sharding"}
        assert "P('x') on x=8" in found[0].message
        four = jax.device_put(tree, NamedSharding(Mesh(jax.devices()[:4], ("fsdp",)), P("fsdp")))
        assert {(one.level, one.kind) for one in sr.audit(four, plan.on_mesh(SIZES))} == {
            ("error", "devices")
        }

    def test_shardings_without_a_mesh(self):
        """Of the devices in their order."""
        tree = {"w": jnp.ones((8, 8))}
        plan = sr.plan(tree, [("w", "tp")], {"tp": 1})
        assert seen(tree, plan) == [("info", "devices", 0)]

    def test_abstract_arrays_on_another_abstract_mesh(self, planned):
        _, plan = planned
        other = plan.on_mesh({"fsdp": 2, "tp": 4}).abstract()
        for one in (plan, plan.on_mesh(SIZES)):
            found = sr.audit(other, one).at_least("error")
            assert {finding.kind for finding in found} == {"devices"}
            assert "fsdp=2,tp=4; planned on fsdp=4,tp=2" in found[0].message


class TestMisuse:
    def test_a_tree_that_an_older_rule_list_placed(self, planned):
        tree, _ = planned
        plan = sr.plan(tree, [("wq", ("fsdp", "tp")), ("wo", ("fsdp", "tp")), ("", ())], mesh_of())
        (found,) = sr.audit(tree, plan)
        assert (found.kind, found.paths, found.rule) == ("sharding", ("layers/{0..2}/wo",), 1)
        assert "P('tp', 'fsdp'), planned P('fsdp', 'tp')" in found.message

    def test_an_optimizers_state_that_does_not_follow(self, planned):
        """Made by `init` on the parameters outside of jit, without out_shardings."""
        optax = pytest.importorskip("optax")
        tree, plan = planned
        optimizer = optax.adam(1e-3)
        state = optimizer.init(tree)
        state_plan = plan.for_optimizer(jax.eval_shape(optimizer.init, tree))
        replicated = jax.device_put(state, NamedSharding(plan.mesh, P()))
        found = sr.audit(replicated, state_plan)
        assert {one.kind for one in found} == {"sharding"}
        # Two moments for each of six matrices.
        assert sum(one.leaves for one in found) == 12
        init = jax.jit(optimizer.init, out_shardings=state_plan.shardings())
        assert sr.audit(init(tree), state_plan) == ()
        with pytest.raises(sr.FindingsError):
            sr.audit(state, plan).raise_for()  # the plan of the parameters

    def test_inside_jit(self, planned):
        tree, plan = planned
        with pytest.raises(TypeError, match="call it outside"):
            jax.jit(lambda t: sr.audit(t, plan) and t)(tree)

    def test_what_is_no_plan(self, planned):
        tree, plan = planned
        for given in (RULES, plan.shardings(), None):
            with pytest.raises(TypeError, match="plan is .*it must be a Plan"):
                sr.audit(tree, given)

    def test_names_are_made_safe(self):
        name = "::error::\x1b[31m"
        tree = {name: np.ones((8, 8), "float32")}
        text = str(sr.audit(tree, sr.plan(tree, [("", "tp")], mesh_of())))
        assert "\x1b" not in text
        assert "\\u001b[31m" in text


class TestBoxes:
    def boxed(self, array):
        from flax.linen import LogicallyPartitioned

        return {"mlp": {"wi": LogicallyPartitioned(array, ("embed", "mlp"))}}

    def test_boxes_of_flax(self):
        pytest.importorskip("flax")
        rules = sr.LogicalRules([("embed", "fsdp"), ("mlp", "tp")])
        host = np.ones((8, 16), "float32")
        plan = sr.plan(self.boxed(host), rules, mesh_of())
        placed = jax.device_put(host, NamedSharding(plan.mesh, P("fsdp", "tp")))
        assert sr.audit(self.boxed(placed), plan) == ()
        assert sr.audit({"mlp": {"wi": placed}}, plan) == ()
        assert sr.audit({"mlp": ({"wi": placed})}, plan) == ()
        assert seen(self.boxed(host), plan) == [("error", "unplaced", 1)]
        extra = {**self.boxed(placed), "more": placed}
        assert seen(extra, plan) == [("error", "structure", 1)]

    def test_states_of_nnx(self):
        pytest.importorskip("flax")
        from flax import nnx

        class Model(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(8, 16, rngs=rngs)

        state = nnx.state(Model(nnx.Rngs(0)))
        plan = sr.plan(state, [("kernel", ("fsdp", "tp")), ("", ())], mesh_of())
        found = sr.audit(state, plan)
        assert {(one.level, one.kind) for one in found} == {
            ("error", "unplaced"),
            ("warning", "unplaced"),
        }
        assert sr.audit(sr.shard(state, plan.shardings()), plan) == ()


def test_the_cost_is_per_kind_and_not_per_leaf():
    """Of Python's functions, and of the core's; reading an array's fields is one call each."""

    def made(layers):
        tree = {str(i): {"w": np.ones((8, 8), "float32")} for i in range(layers)}
        plan = sr.plan(tree, [("w", "tp")], mesh_of())
        return sr.shard(tree, plan.shardings()), plan

    few, many = (calls(partial(sr.audit, *made(layers))) for layers in (10, 510))
    assert many - few <= 500 * 6
