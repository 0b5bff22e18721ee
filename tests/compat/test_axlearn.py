"""`compat.axlearn`: specs with a memory kind, and hints inside shard_map, as AXLearn describes them."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import axlearn

FREE = P.UNCONSTRAINED
has_types_of_axes = pytest.mark.skipif(
    not hasattr(jax, "shard_map"), reason="this JAX has no types of axes"
)


@pytest.fixture(autouse=True)
def in_force(mesh):
    """The mesh is that of `with mesh:`, as in AXLearn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield


def inside(mesh, manual, function, x=None):
    """function(x) in a shard_map over these axes of the mesh."""
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=set(manual), check_vma=False
    )
    return jax.jit(mapped).lower(jnp.ones((8, 8)) if x is None else x).as_text()


def test_a_spec_has_its_memory_kind(mesh):
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    for kind in (None, *kinds):
        spec = axlearn.TensorSpec((8,), "float32", P("tp"), kind)
        assert spec.sharding == NamedSharding(mesh, P("tp"), memory_kind=kind)
    assert axlearn.TensorSpec((8,)).sharding.spec == P()


def test_a_tree_of_specs_is_planned():
    specs = {"w": axlearn.TensorSpec((512, 512), jnp.dtype("float32"))}
    plan = sr.plan(specs, [("w", ("fsdp", "tp"))], {"fsdp": 4, "tp": 2})
    assert plan.specs()["w"] == P("fsdp", "tp")
    assert plan.total_bytes == 2**20


def test_an_optimizers_state_goes_to_the_host():
    spec = axlearn.TensorSpec((8,), "float32", P("fsdp"), "device")
    specs = {"trace": {"w": spec, "wo": spec}, "count": axlearn.TensorSpec(())}
    moved = axlearn.copy_partition(specs, pattern=".*/w", memory_kind="pinned_host")
    kinds = jax.tree.map(lambda one: one.memory_kind, moved)
    assert kinds == {"trace": {"w": "pinned_host", "wo": "device"}, "count": None}
    assert moved["trace"]["w"].mesh_axes == P("fsdp")
    same = axlearn.copy_partition(specs, memory_kind="pinned_host")
    assert same == specs
    assert same["trace"]["w"] is not spec


def test_arrays_are_constrained(mesh):
    x = jnp.ones((8, 8))
    for function in (axlearn.maybe_shard, axlearn.with_sharding_constraint):
        found = jax.jit(lambda x, f=function: f({"x": x}, P("fsdp", "tp")))(x)["x"]
        assert found.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "tp")), 2)
        assert function(x, None) is x
        with pytest.raises(ValueError, match="not divisible by fsdp=4"):
            function(jnp.ones((6, 8)), P("fsdp"))
    found = axlearn.maybe_shard(x, (None, "fsdp"))
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "fsdp")), 2)


@has_types_of_axes
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P("fsdp", "tp"), '[{?}, {"tp"}]'),
        (P(("fsdp", "tp"), None), '[{"tp"}, {}]'),
        (P(("dp", "fsdp"), "tp"), '[{"dp"}, {"tp"}]'),
        (P("fsdp", None), "[{?}, {}]"),
        (P(FREE, "tp"), '[{?}, {"tp"}]'),
    ],
)
def test_dimensions_of_manual_axes_are_unconstrained(mesh, spec, expected):
    text = inside(mesh, {"fsdp"}, lambda x: axlearn.maybe_shard(x, spec))
    assert f"sharding_constraint %arg1 <@mesh, {expected}>" in text, text


@has_types_of_axes
def test_where_all_axes_are_manual_nothing_is_constrained(mesh):
    text = inside(mesh, mesh.axis_names, lambda x: axlearn.maybe_shard(x, P("fsdp")))
    assert "sharding_constraint" not in text


@has_types_of_axes
def test_a_parameter_is_not_sharded_by_a_manual_axis(mesh):
    with pytest.raises(ValueError, match="names 'fsdp', over which a shard_map runs"):
        inside(mesh, {"fsdp"}, lambda x: axlearn.with_sharding_constraint(x, P("fsdp", "tp")))


@has_types_of_axes
def test_specs_for_a_nested_shard_map(mesh):
    found = []

    def body(x):
        specs = P("fsdp", "tp"), P(("fsdp", "tp"), FREE), P(("fsdp", "dp", "tp"), "other")
        found.extend(map(axlearn.manual_axes_to_none, specs))
        return x

    inside(mesh, {"fsdp"}, body)
    assert found == [P(None, "tp"), P("tp", FREE), P(("dp", "tp"), None)]


def test_on_one_device_nothing_is_done():
    x, one = np.ones(3), jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tp",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with one:
            assert axlearn.maybe_shard(x, P("tp")) is x
            assert axlearn.with_sharding_constraint(x, P("tp")) is x
