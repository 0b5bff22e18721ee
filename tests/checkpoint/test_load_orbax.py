"""`load` of orbax checkpoints: really saved, restored by orbax as the rules say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.checkpoint.test_load import bits, mesh_of

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


def test_what_is_left_over_can_be_left_out(params, saved):
    """As the error for it advises."""
    tree = {"layers": params["layers"]}
    with pytest.raises(sr.FileError, match="step: left over: .* a Rename to None leaves it out"):
        sr.load(saved, RULES, mesh_of(), tree=tree)
    loaded = sr.load(saved, RULES, mesh_of(), tree=tree, renames=[sr.Rename("^step$", None)])
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    assert bits(loaded["layers"][1]["w"]) == bits(params["layers"][1]["w"])


def test_names_and_dtypes_of_renames(params, saved):
    renames = [sr.Rename(r"layers/(\d+)/", r"blocks/\1/", dtype="float32"), sr.Rename("step", None)]
    loaded = sr.load(saved, RULES, mesh_of(), renames=renames, dtype="bfloat16")
    found = loaded["blocks"]["1"]["w"]
    assert found.dtype == "float32"
    assert np.array_equal(found, params["layers"][1]["w"].astype("float32"))


@pytest.mark.parametrize("more", [{"dims": "a b -> b a"}, {"scale": "s", "blocks": (8, 8)}])
def test_orbax_does_not_rearrange(saved, more):
    with pytest.raises(sr.FileError, match="the others to shardrules.reshard"):
        sr.load(saved, RULES, mesh_of(), renames=[sr.Rename("w", "v", **more)])


def test_a_damaged_checkpoint(saved):
    for file in saved.rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(b"")
    with pytest.raises(sr.FileError, match="orbax cannot re"):
        sr.load(saved, RULES, mesh_of())
