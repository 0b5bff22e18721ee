"""`load` of orbax checkpoints: really saved, restored by orbax as the rules say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.moving.test_load import bits, mesh_of

ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
RULES = [("w", ("fsdp", "tp")), ("", ())]


@pytest.fixture
def params():
    layer = {"w": jnp.arange(64.0).reshape(8, 8).astype("bfloat16"), "norm": jnp.ones(8)}
    return {"layers": [layer, jax.tree.map(lambda x: x + 1, layer)], "step": jnp.int32(7)}


@pytest.fixture
def saved(params, tmp_path):
    checkpointer = ocp.StandardCheckpointer()
    try:
        checkpointer.save(tmp_path / "checkpoint", params)
        checkpointer.wait_until_finished()
    except AttributeError as error:
        pytest.skip(f"this orbax does not work with this JAX: {error}")
    return tmp_path / "checkpoint"


def test_an_orbax_checkpoint(params, saved):
    mesh = mesh_of()
    loaded = sr.load(saved, RULES, mesh)
    assert jax.tree.structure(loaded) == jax.tree.structure(sr.read_model(saved))
    in_tree = sr.load(saved, RULES, mesh, tree=params, dtype="float32")
    assert jax.tree.structure(in_tree) == jax.tree.structure(params)
    for i, layer in enumerate(params["layers"]):
        array = loaded["layers"][str(i)]["w"]
        assert array.sharding.spec == P("fsdp", "tp")
        assert bits(array) == bits(layer["w"])
        assert in_tree["layers"][i]["w"].dtype == "float32"
        assert np.array_equal(in_tree["layers"][i]["w"], layer["w"].astype("float32"))
    assert loaded["step"] == 7


def test_what_does_not_fit_is_one_error(params, saved):
    del params["step"]
    params["layers"][0]["w"] = jnp.ones((8, 4))
    with pytest.raises(sr.FileError, match="2 problems with the arrays") as info:
        sr.load(saved, RULES, mesh_of(), tree=params)
    assert "layers/0/w: another shape: the tree wants [8, 4], and the array has [8, 8]" in str(
        info.value
    )
    assert "step: left over" in str(info.value)


def test_renames_are_for_safetensors(saved):
    with pytest.raises(sr.FileError, match="give them to shardrules.reshard"):
        sr.load(saved, RULES, mesh_of(), renames=[sr.Rename("w", "v")])


def test_a_damaged_checkpoint(saved):
    for file in saved.rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(b"")
    with pytest.raises(sr.FileError, match="orbax cannot re"):
        sr.load(saved, RULES, mesh_of())
