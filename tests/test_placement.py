"""shard and gather in one process; tests/test_processes.py has several."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.contexts import legacy

RULES = sr.Rules([("w", P("fsdp", "tp")), (".*", P())])


def tree():
    return {
        "w": np.arange(64, dtype="float32").reshape(8, 8),
        "w_odd": np.arange(21, dtype="int32").reshape(3, 7),
        "on_device": {"w": jnp.ones((8, 2))},
        "scalar": np.float32(2),
        "step": 3,
        "lr": 0.5,
        "none": None,
    }


def test_all_leaves_become_arrays_in_their_places(mesh):
    placed = sr.shard(tree(), RULES, mesh)
    expected = sr.named_shardings(tree(), RULES, mesh)
    assert jax.tree.structure(placed) == jax.tree.structure(tree())
    for array, sharding in zip(jax.tree.leaves(placed), jax.tree.leaves(expected), strict=True):
        assert isinstance(array, jax.Array)
        assert array.sharding == sharding
    assert placed["w"].addressable_shards[0].data.shape == (2, 4)
    assert placed["step"].dtype == jnp.asarray(3).dtype


def test_there_and_back(mesh):
    fetched = sr.gather(sr.shard(tree(), RULES, mesh))
    for got, sent in zip(jax.tree.leaves(fetched), jax.tree.leaves(tree()), strict=True):
        assert isinstance(got, (np.ndarray, np.generic))
        np.testing.assert_array_equal(got, np.asarray(sent))


def test_what_is_in_place_is_not_copied(mesh):
    placed = sr.shard(tree(), RULES, mesh)
    again = sr.shard(placed, RULES, mesh)
    pointer = [x["w"].addressable_shards[0].data.unsafe_buffer_pointer() for x in (placed, again)]
    assert pointer[0] == pointer[1]


def test_nothing_is_compiled(mesh):
    arrays = {f"w{i}": np.ones((8, 8 * (i + 1)), "float32") for i in range(20)}
    arrays |= {f"on_device/w{i}": jnp.asarray(array) for i, array in enumerate(arrays.values())}
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "compile" in event else None
    )
    fetched = sr.gather(sr.shard(arrays, RULES, mesh))
    resharded = sr.shard(sr.shard(arrays, RULES, mesh), [("w", P("tp"))], mesh)
    assert resharded["w0"].sharding.spec == P("tp", None)
    assert compiled == []
    jax.jit(lambda x: x + 1)(fetched["w0"])
    assert compiled  # the listener would have seen it


def test_specs_instead_of_rules(mesh):
    arrays = {"a": np.zeros(8), "b": jnp.zeros(8)}
    placed = sr.shard(arrays, {"a": P("tp"), "b": None}, mesh)
    assert placed["a"].sharding == NamedSharding(mesh, P("tp"))
    assert placed["b"] is arrays["b"]


def test_the_contexts_mesh(mesh):
    with legacy(mesh):
        assert sr.shard({"w": np.zeros((8, 8))}, RULES)["w"].sharding.mesh is mesh


@pytest.mark.parametrize(
    ("leaf", "shown"),
    [("text", "'text' (a str)"), (jax.ShapeDtypeStruct((8,), "int8"), "ShapeDtypeStruct(shape=(8,)")],
)  # fmt: skip
def test_what_cannot_be_placed(mesh, leaf, shown):
    with pytest.raises(TypeError) as caught:
        sr.shard({"a": {"w": leaf}}, RULES, mesh)
    assert "the leaf ['a']['w'] is " + shown in str(caught.value)


def test_a_mesh_without_devices():
    with pytest.raises(TypeError, match="arrays can be placed on a jax.sharding.Mesh of devices"):
        sr.shard({"w": np.zeros(8)}, RULES, {"fsdp": 4, "tp": 2})


def test_nothing_is_placed_if_something_cannot_be(mesh):
    strict = sr.Correction(indivisible="error")
    with pytest.raises(ValueError, match="w_odd  shape"):
        sr.shard(tree(), RULES, mesh, correction=strict)
