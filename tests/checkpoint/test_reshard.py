"""`reshard`: the same bits elsewhere, within the bound; and with the renames that `load` takes."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._checkpoint import reshard as moving
from tests.checkpoint.test_load import bits, mesh_of

RULES = [("w", ("fsdp", "tp")), ("", ())]
KEY = jax.random.key(1)


def tree():
    return {
        "layers": [{"w": np.arange(64, dtype="float32").reshape(8, 8) + i, "b": np.ones(8)} for i in range(4)],
        "step": 3,
        "key": KEY,
    }  # fmt: skip


def on(devices, shape, axes=("fsdp", "tp")):
    return Mesh(np.array([jax.devices()[i] for i in devices]).reshape(shape), axes)


MESHES = {
    "the same devices": on(range(8), (2, 4)),
    "another order": on([3, 1, 2, 0, 7, 6, 5, 4], (2, 4)),
    "some of them": on(range(4), (2, 2)),
    "overlapping": on([2, 3, 4, 5], (2, 2)),
    "one": on([5], (1, 1)),
    "others": on(range(4, 8), (2, 2)),
}


@pytest.mark.parametrize("most", ["2 GB", 256, 100])
@pytest.mark.parametrize("to", MESHES)
def test_to_another_mesh(to, most):
    start = on(range(4), (2, 2)) if to == "others" else on(range(8), (4, 2))
    placed = sr.shard(tree(), RULES, start)
    moved = sr.reshard(placed, RULES, MESHES[to], max_bytes_in_flight=most)
    expected = sr.shard(tree(), RULES, MESHES[to])
    for one, other in zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True):
        assert (one.sharding, one.dtype) == (other.sharding, other.dtype)
        data = jax.random.key_data if one.dtype == KEY.dtype else np.asarray
        assert bits(data(one)) == bits(data(other))


def live_bytes():
    """Of all arrays on several devices, without a look at their parts, which would be arrays too."""
    gc.collect()
    return sum(
        int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize * len(array.sharding.device_set)
        for array in jax.live_arrays()
        if not array.is_deleted() and len(array.sharding.device_set) > 1
    )


def test_peak_memory_is_within_the_bound(monkeypatch):
    """With donation, arrays on devices never take more than they took, and a batch."""
    each, count = 1 << 16, 16
    params = {f"w{i}": np.full((each // 512, 128), i, "float32") for i in range(count)}
    placed = sr.shard(params, [("w", ("fsdp", "tp"))], on(range(8), (4, 2)))
    start, peaks, put = live_bytes(), [], moving.put

    def count_put(leaves, shardings):
        made = jax.block_until_ready(put(leaves, shardings))
        assert sum(array.nbytes for array in made) <= 3 * each
        peaks.append(live_bytes())
        return made

    monkeypatch.setattr(moving, "put", count_put)
    moved = sr.reshard(placed, [("w", ("tp", "fsdp"))], on(range(8), (4, 2)), donate=True, max_bytes_in_flight=3 * each)
    assert len(peaks) == 6
    assert max(peaks) <= start + 3 * each
    assert all(array.is_deleted() for array in placed.values())
    assert all(bits(moved[name]) == bits(array) for name, array in params.items())


def test_donated_arrays_that_stay_are_not_deleted():
    placed = sr.shard({"w": np.ones((8, 8)), "v": np.ones(8)}, P("fsdp"), mesh_of())
    moved = sr.reshard(placed, {"w": P("fsdp"), "v": P("tp")}, mesh_of(), donate=True)
    assert bits(moved["w"]) == bits(np.ones((8, 8), "float32"))
    assert not moved["w"].is_deleted()


@pytest.mark.parametrize("most", ["2 GB", 16384])
@pytest.mark.parametrize("is_buffer", [False, True])
def test_one_array_under_two_paths_is_not_lost_when_donated(most, is_buffer):
    """Tied weights, or an average that begins as the parameters themselves; also in batches."""
    array = np.arange(64 * 64, dtype="float32").reshape(64, 64)
    x = jax.device_put(array, jax.NamedSharding(mesh_of(), P("fsdp")))
    other = jax.device_put(x, jax.NamedSharding(mesh_of(), P("fsdp", None))) if is_buffer else x
    y = jax.device_put(array + 1, jax.NamedSharding(mesh_of(), P("fsdp")))
    rules = [("a", P("fsdp")), ("", P(("fsdp", "tp")))]
    moved = sr.reshard({"a": x, "b": other, "c": y}, rules, mesh_of(), donate=True, max_bytes_in_flight=most)
    assert {name: bits(each) for name, each in moved.items()} == {
        "a": bits(array), "b": bits(array), "c": bits(array + 1),
    }  # fmt: skip
    assert y.is_deleted()


@pytest.mark.parametrize("where", ["devices", "host"])
@pytest.mark.parametrize("renames", [[], [sr.Rename("w", "v")], [sr.Rename("w", "v", "a b -> b a")]])
def test_a_finite_value_does_not_become_infinite(where, renames):
    array = np.full((8, 8), 1e6, "float32")
    tree = {"w": array if where == "host" else jax.device_put(array)}
    with pytest.raises(ValueError, match="finite value would become inf"):
        sr.reshard(tree, P("fsdp"), mesh_of(), dtype="float16", renames=renames)
    infinite = {"w": np.full((8, 8), np.inf, "float32")}
    moved = sr.reshard(infinite, P("fsdp"), mesh_of(), dtype="float16", renames=renames)
    assert np.isposinf(np.asarray(*moved.values(), "float32")).all()
    with pytest.raises(ValueError, match="or an integer another one"):
        sr.reshard({"w": np.full((8, 8), 2**40)}, P("fsdp"), mesh_of(), renames=renames)


@pytest.mark.parametrize("to", ["all", "half"])
@pytest.mark.parametrize("context", ["auto", "explicit"])
def test_stacked_on_explicit_axes_and_saved_back(tmp_path, to, context):
    """JAX wanted a sharding of each operation."""
    arrays = {f"l.{i}.w": np.arange(64, dtype="float32").reshape(8, 8) + i for i in range(4)}
    meshes = {
        name: Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        for name, mesh in {"all": mesh_of(), "half": on(range(4), (2, 2))}.items()
    }
    stack = [sr.Rename("l.{i}.w", "w", "out in -> i in out")]
    with jax.set_mesh(meshes["all"] if context == "explicit" else mesh_of()):
        placed = sr.shard(arrays, P("fsdp", "tp"), meshes["all"])
        moved = sr.reshard(placed, P(None, "tp"), meshes[to], renames=stack)
        assert moved["w"].sharding == jax.NamedSharding(meshes[to], P(None, "tp", None))
        assert bits(moved["w"]) == bits(np.stack([array.T for array in arrays.values()]))
        sr.save(moved, tmp_path / "m", renames=stack)
    again = sr.load(tmp_path / "m", P(), mesh_of())
    assert all(bits(again[name]) == bits(array) for name, array in arrays.items())


@pytest.mark.parametrize("donate", [False, True])
def test_stacked_into_a_plan_and_taken_apart(donate):
    """From a trainer's tree to a sampler's: other names, structure, dtype, mesh."""
    arrays = {f"layers.{i}.w": np.arange(64, dtype="float32").reshape(8, 8) + i for i in range(4)}
    placed = sr.shard({**arrays, "norm": np.ones(8, "float32")}, P(), on(range(4), (2, 2)))
    sampler = {
        "layers": {"w": jax.ShapeDtypeStruct((4, 8, 8), jnp.bfloat16)},
        "norm": jax.ShapeDtypeStruct((8,), jnp.bfloat16),
    }
    plan = sr.plan(sampler, [("w", (None, None, "tp")), ("", ())], on([4, 5, 6, 7], (1, 4)))
    stack = sr.Rename("layers.{i}.w", "layers/w", "out in -> i in out")
    stacked = sr.reshard(placed, plan, renames=[stack], donate=donate)
    assert placed["layers.0.w"].is_deleted() == donate
    assert jax.tree.map(lambda x: x.sharding, stacked) == plan.shardings()
    expected = np.stack([array.T for array in arrays.values()]).astype(jnp.bfloat16)
    assert bits(stacked["layers"]["w"]) == bits(expected)
    apart = sr.Rename("layers/w", "layers.{i}.w", "i in out -> out in")
    again = sr.reshard(stacked, P(), mesh_of(), renames=[apart], donate=donate)
    for name, array in arrays.items():
        assert bits(again[name]) == bits(array.astype(jnp.bfloat16)), name


def test_specs_are_those_that_the_plan_writes():
    """jit compiles again for a sharding that is the same and written in another way."""
    arrays, names = {"w": np.ones((4, 4), "float32")}, {"w": ("embed", "mlp")}
    plan = sr.plan(arrays, sr.LogicalRules([("embed", None), ("mlp", None)]), mesh_of(), names=names)
    assert sr.reshard(arrays, plan)["w"].sharding == plan.shardings()["w"]
    assert plan.shardings()["w"].spec == P(None, None) != P()


def test_arrays_of_a_planned_tree_are_not_looked_for_by_their_paths():
    """Two of one path were refused, and a call where nothing moves took three times as long."""
    arrays = {"a/b": np.ones((4, 4), "float32"), "a": {"b": np.zeros((4, 4), "float32")}}
    moved = sr.reshard(arrays, sr.plan(arrays, RULES, mesh_of()))
    assert (bits(moved["a/b"]), bits(moved["a"]["b"])) == (bits(arrays["a/b"]), bits(arrays["a"]["b"]))


def test_what_does_not_fit_a_plan():
    plan = sr.plan({"w": jax.ShapeDtypeStruct((8, 4), "float32"), "v": np.ones(3)}, RULES, mesh_of())
    with pytest.raises(ValueError, match="the tree: 3 problems with the arrays") as info:
        sr.reshard({"w": np.ones((8, 8), "float32"), "x": np.ones(2, "float32")}, plan)
    assert "w: unlike the tree, which wants float32[8, 4]: the array is float32[8, 8]" in str(info.value)
    assert "v: missing" in str(info.value)
    assert "x: left over" in str(info.value)


def test_the_shardings_of_another_tree():
    """As when an RL trainer sends its weights to a sampler that runs already."""
    halved = sr.reshard(tree(), RULES, mesh_of(), dtype=jnp.bfloat16)
    assert (halved["layers"][0]["w"].dtype, halved["step"].dtype) == (jnp.bfloat16, jnp.asarray(3).dtype)
    placed = sr.shard(tree(), RULES, on(range(4), (2, 2)))
    sampled = sr.shard(tree(), RULES, on(range(4, 8), (4, 1)))
    shardings = jax.tree.map(lambda x: x.sharding, sampled)
    moved = sr.reshard(placed, shardings)
    assert jax.tree.map(lambda x: x.sharding, moved) == shardings
    assert bits(moved["layers"][1]["w"]) == bits(tree()["layers"][1]["w"])
    with pytest.raises(TypeError, match=r"rules must be .* jax.tree.map\(lambda x: x.sharding, it\) as rules"):
        sr.reshard(placed, sampled)
