"""What `dtype` converts, what keeps its own, and random keys: by `load`, `reshard` and `shard`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.checkpoint.test_load import bits, mesh_of
from tests.plan.test_lock import check_round_trip

FLOAT8 = ml_dtypes.float8_e4m3fn
NO_FLOATS = ["int8", "int32", "uint16", "int4", "float4_e2m1fn", "bool", "complex64", "float8_e8m0fnu"]  # fmt: skip


DOORS = {"load": sr.load, "shard": sr.shard, "reshard": sr.reshard}


class TestIntegersAreNoWeights:
    @pytest.mark.parametrize("door", DOORS)
    @pytest.mark.parametrize("dtype", [*NO_FLOATS, "bfloat16", "float16", "float32", FLOAT8, jnp.bfloat16])
    def test_a_dtype_for_all_floats_is_one(self, save, door, dtype):
        weights = {"w": np.full((8, 8), 0.02, "float32")}
        make = partial(DOORS[door], save(weights) if door == "load" else weights, P(), mesh_of(), dtype=dtype)
        if dtype in NO_FLOATS:
            with pytest.raises(ValueError, match="dtype is .*, and must be a float, such as 'bf"):
                make()
        else:
            assert bits(make()["w"]) == bits(weights["w"].astype(np.dtype(dtype)))

    def test_a_rename_makes_no_floats_integers(self, save):
        arrays = {"w": np.full((8, 8), 0.02, "float32")}
        for door, source in ((sr.load, save(arrays)), (sr.reshard, sr.shard(arrays, P(), mesh_of()))):
            with pytest.raises(ValueError, match=r"'w' is float32, and its Rename has dtype='int8', to"):
                door(source, P(), mesh_of(), renames=[sr.Rename("w", "v", dtype="int8")])

    @pytest.mark.parametrize(
        ("value", "of", "to"), [(-1, "int8", "uint8"), (300, "int32", "int8"), (200, "uint8", "int8")]
    )
    def test_an_integer_that_its_dtype_lacks_is_an_error(self, save, value, of, to):
        with pytest.raises(sr.FileError, match="^n: a finite value would become infinite, or an integer another"):
            sr.load(save({"n": np.array([1, value], of)}), P(), mesh_of(), renames=[sr.Rename("n", "n", dtype=to)])

    def test_a_rename_makes_integers_integers_and_floats_codes(self, save):
        path = save({"n": np.arange(8, dtype="int32"), "w": np.ones(8, "float32")})
        renames = [sr.Rename("n", "n", dtype="int8"), sr.Rename("w", "w", dtype=FLOAT8)]
        loaded = sr.load(path, P(), mesh_of(), renames=renames)
        assert {name: str(array.dtype) for name, array in loaded.items()} == {"n": "int8", "w": "float8_e4m3fn"}


class TestWhatSaysItsOwnDtype:
    def test_a_rename_does(self, save):
        arrays = {"router.bias": np.full(8, 1.001, "float32"), "w": np.ones((8, 8), "float32")}
        renames = [sr.Rename("{p}.bias", "{p}.bias", dtype="float32")]
        expected = {"router.bias": "float32", "w": "bfloat16"}
        loaded = sr.load(save(arrays), P(), mesh_of(), dtype="bfloat16", renames=renames)
        assert {name: str(array.dtype) for name, array in loaded.items()} == expected
        assert bits(loaded["router.bias"]) == bits(arrays["router.bias"])
        moved = sr.reshard(arrays, P(), mesh_of(), dtype="bfloat16", renames=renames)
        assert {name: str(array.dtype) for name, array in moved.items()} == expected

    def test_scales_beside_codes_stay_as_they_are(self, save):
        arrays = {
            "up.weight": np.ones((8, 8), FLOAT8),
            "up.weight_scale_inv": np.full((1, 1), 1.001, "float32"),
            "down.weight": np.ones((8, 8), "int8"),
            "down.input_scale": np.full(1, 1.001, "float32"),
            "norm.scale": np.ones(8, "float32"),
            "mask.on": np.ones(8, "bool"),
            "mask.scale": np.ones(8, "float32"),
        }
        expected = {name: str(array.dtype) for name, array in arrays.items()}
        expected |= {"norm.scale": "bfloat16", "mask.scale": "bfloat16"}
        loaded = sr.load(save(arrays), P(), mesh_of(), dtype="bfloat16")
        assert {name: str(array.dtype) for name, array in loaded.items()} == expected
        for tree in (arrays, sr.plan(arrays, P(), mesh_of())):
            moved = sr.reshard(arrays, *([tree] if tree is not arrays else [P(), mesh_of()]), dtype="bfloat16")  # fmt: skip
            assert {name: str(array.dtype) for name, array in moved.items()} == expected


def words(key):
    return bits(jax.random.key_data(key))


class TestRandomKeys:
    """Each nnx model with Dropout has one in its state."""

    @pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
    def test_a_lock(self, implementation):
        tree = {"w": np.ones((8, 8)), "rng": jax.random.key(0, impl=implementation)}
        plan = sr.plan(tree, P(), mesh_of())
        again = check_round_trip(plan)
        of_key = 8 if implementation == "threefry2x32" else 16
        assert plan.bytes_per_device().max == 8 * 8 * 8 + of_key
        on_devices = again.on_mesh(mesh_of()).abstract()["rng"]
        assert (on_devices.shape, on_devices.dtype) == ((), tree["rng"].dtype)

    def test_keys_are_renamed_stacked_and_taken_apart(self):
        keys = {f"layers.{i}.rng": jax.random.key(i) for i in range(4)}
        stack = sr.Rename("layers.{layer}.rng", "rng", " -> layer")
        stacked = sr.reshard(keys, P(), mesh_of(), renames=[stack])["rng"]
        assert words(stacked) == words(jnp.stack(list(keys.values())))
        apart = sr.Rename("rng", "layers.{layer}.rng", "layer -> ")
        again = sr.reshard({"rng": stacked}, P(), mesh_of(), renames=[apart])
        assert {name: words(key) for name, key in again.items()} == {name: words(key) for name, key in keys.items()}


def test_a_dtype_of_a_tree_that_is_not_known_has_its_path():
    class Odd:
        shape, dtype = (8,), "odd"

    with pytest.raises(ValueError, match="a/w.*'odd'"):
        sr.reshard({"a": {"w": Odd()}}, P(), mesh_of(), renames=[sr.Rename("w", "v")])
