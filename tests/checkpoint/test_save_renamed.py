"""`save(renames=)`: other names and layouts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._checkpoint import saving
from tests.checkpoint.test_load import mesh_of


def read(directory):
    arrays = {}
    for file in sorted(directory.glob("*.safetensors")):
        arrays |= safetensors.numpy.load_file(file)
    return arrays


def test_what_is_made_is_spread_and_forgotten(tmp_path, monkeypatch):
    mesh = mesh_of((2, 4))
    array = jax.device_put(
        jnp.arange(8 * 16 * 4.0).reshape(8, 16, 4), jax.NamedSharding(mesh, P("tp"))
    )
    seen = []
    write = saving._own_boxes
    monkeypatch.setattr(
        saving, "_own_boxes", lambda leaf, first: seen.append(leaf.sharding) or write(leaf, first)
    )
    rename = sr.Rename("^w$", "{layer}", "layer a b -> b a")
    sr.save({"w": array}, tmp_path / "m", renames=[rename])
    for i in range(8):
        np.testing.assert_array_equal(read(tmp_path / "m")[str(i)], np.asarray(array)[i].T)
    assert all(sharding.shard_shape((4, 16)) != (4, 16) for sharding in seen)


def test_dtypes_and_left_out(tmp_path):
    tree = {"a": np.arange(6.0).reshape(2, 3), "b": jnp.ones(3), "c": np.ones(2, "float32")}
    renames = [
        sr.Rename("^a$", "x", "i o -> o i"),
        sr.Rename("^b$", "y", dtype="bfloat16"),
        sr.Rename("c", None),
    ]
    sr.save(tree, tmp_path / "m", renames=renames)
    again = read(tmp_path / "m")
    assert {name: str(array.dtype) for name, array in again.items()} == {
        "x": "float32",
        "y": "bfloat16",
    }
    np.testing.assert_array_equal(again["x"], tree["a"].T)


@pytest.mark.parametrize(
    ("renames", "message"),
    [
        (
            [sr.Rename("^v$", "x", optional=True)],
            "renames: they find no array of the tree, whose first path is 'w'",
        ),
        ([sr.Rename("^v$", "x")], r"\^v\$: this Rename finds no array"),
        ([sr.Rename("^w$", "x", "a b c -> a b c")], "w: its shape is \\[4, 8\\]"),
        ([sr.Rename("^.$", "x")], "x: several arrays would become it: 'v', 'w'"),
    ],
)
def test_renames_that_do_not_fit(tmp_path, renames, message):
    tree = {"w": np.ones((4, 8)), **({"v": np.ones(2)} if "several" in message else {})}
    with pytest.raises(ValueError, match=message):
        sr.save(tree, tmp_path / "m", renames=renames)
    assert not list(tmp_path.iterdir())
