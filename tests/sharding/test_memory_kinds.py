"""Memory kinds: a NamedSharding sets one; with rules and specs an array keeps its own."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._sharding.leaf_rows import digest
from tests.support.contexts import needs_set_mesh

RULES = [("w", P("fsdp", "tp"))]
KINDS = [memory.kind for memory in jax.devices()[0].addressable_memories()]
DEFAULT = jax.devices()[0].default_memory().kind
needs_kinds = pytest.mark.skipif("pinned_host" not in KINDS, reason="this JAX has one kind alone")

functions = pytest.mark.parametrize("function", [sr.shard, sr.with_sharding_constraint])


def of_kind(mesh, kind, *entries):
    return NamedSharding(mesh, P(*entries), memory_kind=kind)


def placed(mesh, kind, *entries):
    array = np.arange(64, dtype="float32").reshape(8, 8)
    return jax.device_put(array, of_kind(mesh, kind, *entries))


@functions
def test_memory_kind_is_kept(function):
    device = jax.devices()[0]
    mesh = Mesh([device], ("tp",))
    for memory in device.addressable_memories():
        sharding = NamedSharding(mesh, P(None, "tp"), memory_kind=memory.kind)
        placed = function({"w": np.ones((2, 2), "float32")}, sharding)["w"]
        assert placed.sharding == NamedSharding(mesh, P(None, "tp"), memory_kind=memory.kind)


@functions
@pytest.mark.parametrize("kind", KINDS)
def test_what_says_nothing_about_memory_does_not_move_it(mesh, function, kind):
    for before in ((), ("fsdp", "tp"), ("tp",)):
        array = placed(mesh, kind, *before)
        for wanted in (RULES, P("fsdp", "tp"), {"w": P("fsdp", "tp")}):
            after = function({"w": array}, wanted, mesh)["w"]
            assert after.sharding == of_kind(mesh, kind, "fsdp", "tp")
            np.testing.assert_array_equal(after, array)


@functions
@pytest.mark.parametrize("kind", KINDS)
def test_an_array_of_one_device_stays_in_its_memory(mesh, function, kind):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3], memory_kind=kind)
    array = jax.device_put(np.ones((8, 8), "float32"), one)
    after = function({"w": array}, RULES, mesh)["w"]
    assert after.sharding == of_kind(mesh, kind, "fsdp", "tp")


@functions
@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", [None, *KINDS])
def test_a_named_sharding_moves_an_array_to_its_memory(mesh, function, before, after):
    moved = function(placed(mesh, before), of_kind(mesh, after, "fsdp", "tp"))
    assert moved.sharding == of_kind(mesh, after or DEFAULT, "fsdp", "tp")


@pytest.mark.parametrize("kind", KINDS)
def test_free_dimensions_keep_the_memory(mesh, kind):
    if kind == "unpinned_host" != DEFAULT:
        pytest.skip("JAX constrains nothing there")
    free = P(P.UNCONSTRAINED, "tp")
    after = sr.with_sharding_constraint(placed(mesh, kind), free, mesh)
    assert after.sharding.memory_kind == kind
    there = NamedSharding(mesh, free, memory_kind=kind)
    assert sr.with_sharding_constraint(placed(mesh, DEFAULT), there).sharding.memory_kind == kind


@needs_kinds
class TestInsideJit:
    @pytest.mark.parametrize("kind", ["device", "pinned_host"])
    def test_specs_do_not_move(self, mesh, kind):
        step = jax.jit(lambda x: sr.with_sharding_constraint(x, P("fsdp", "tp"), mesh))
        assert step(placed(mesh, kind)).sharding == of_kind(mesh, kind, "fsdp", "tp")

    def test_a_named_sharding_moves_to_the_host(self, mesh):
        there = of_kind(mesh, "pinned_host", "fsdp", "tp")
        step = jax.jit(lambda x: sr.with_sharding_constraint(2 * x, there))
        after = step(placed(mesh, "device"))
        assert after.sharding == there
        np.testing.assert_array_equal(after, 2 * np.arange(64).reshape(8, 8))

    @needs_set_mesh
    @pytest.mark.parametrize("types", ["Explicit Explicit", "Explicit Auto", "Manual Auto"])
    def test_on_axes_of_all_types(self, types):
        first, second = (getattr(jax.sharding.AxisType, name, None) for name in types.split())
        manual = first is jax.sharding.AxisType.Manual
        kinds = (second if manual else first, second)
        devices = np.array(jax.devices()[:8]).reshape(4, 2)
        mesh = Mesh(devices, ("a", "b"), axis_types=kinds)
        there = of_kind(mesh, "pinned_host", "a", "b")

        def step(x):
            return sr.with_sharding_constraint(2 * x, there)

        with jax.set_mesh(mesh):
            if manual:
                step = jax.shard_map(step, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
            after = jax.jit(step)(placed(mesh, "device", "a"))
        assert after.sharding == there

    def test_the_default_kind_leaves_an_array_where_it_is_as_in_jax(self, mesh):
        here = of_kind(mesh, None, "fsdp", "tp")
        for function in (sr.with_sharding_constraint, jax.lax.with_sharding_constraint):
            step = jax.jit(lambda x, function=function: function(x, here))
            after = step(placed(mesh, "pinned_host"))
            assert after.sharding == of_kind(mesh, "pinned_host", "fsdp", "tp")

    def test_a_kind_that_jax_does_not_have_there_is_refused(self, mesh):
        there = of_kind(mesh, "unpinned_host", "fsdp", "tp")
        with pytest.raises(
            ValueError, match="'unpinned_host' memory inside jit, where JAX has 'de"
        ):
            jax.jit(lambda x: sr.with_sharding_constraint(x, there))(placed(mesh, "device"))


@needs_kinds
def test_processes_that_differ_in_memory_differ_in_their_fingerprints(mesh):
    tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    prints = {
        kind: sr.fingerprint(tree, {"w": of_kind(mesh, kind, "fsdp", "tp")})
        for kind in (None, *KINDS)
    }
    assert len(set(prints.values())) == len(KINDS)
    assert prints[None] == prints[DEFAULT]
    assert prints[None] == sr.fingerprint(tree, sr.named_shardings(tree, RULES, dict(mesh.shape)))
    abstract = sr.resolve_mesh(dict(mesh.shape))
    for kind in (None, *KINDS):
        assert sr.fingerprint(tree, {"w": of_kind(abstract, kind, "fsdp", "tp")}) == prints[kind]


@needs_kinds
def test_state_on_the_host_is_fingerprinted_as_such(mesh, monkeypatch):
    """What `shard` compares between processes has the memory kinds of the arrays."""
    import shardrules._sharding.placement as placement

    class Recorded(placement.JointCall):
        def agree(self, rows):
            compared.append(rows())

    compared = []
    monkeypatch.setattr(placement, "JointCall", Recorded)
    for kind in ("device", "pinned_host"):
        sr.shard({"w": placed(mesh, kind)}, RULES, mesh)
    assert len(set(map(digest, compared))) == 2
