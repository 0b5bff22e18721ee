"""`load` of orbax checkpoints: really saved, restored by orbax as the rules say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._checkpoint import formats
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
    del params["layers"][1]["norm"]
    params["layers"][0]["w"] = jnp.ones((8, 4))
    with pytest.raises(sr.FileError, match="2 problems with the arrays") as info:
        sr.load(saved, RULES, mesh_of(), tree=params)
    assert "layers/0/w: another shape: the tree wants [8, 4], and the array has [8, 8]" in str(
        info.value
    )
    assert "layers/1/norm: left over" in str(info.value)


def test_what_is_left_over_can_be_left_out(params, saved):
    """As the error for it advises."""
    del params["layers"][1]["norm"]
    with pytest.raises(sr.FileError, match="1/norm: left over: .* a Rename to None leaves it out"):
        sr.load(saved, RULES, mesh_of(), tree=params)
    renames = [sr.Rename("^layers/1/norm$", None)]
    loaded = sr.load(saved, RULES, mesh_of(), tree=params, renames=renames)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert bits(loaded["layers"][1]["w"]) == bits(params["layers"][1]["w"])


def test_names_and_dtypes_of_renames(params, saved):
    renames = [sr.Rename(r"layers/(\d+)/", r"blocks/\1/", dtype="float32"), sr.Rename("step", None)]
    loaded = sr.load(saved, RULES, mesh_of(), renames=renames, dtype="bfloat16")
    found = loaded["blocks"]["1"]["w"]
    assert found.dtype == "float32"
    assert np.array_equal(found, params["layers"][1]["w"].astype("float32"))


def test_orbax_checkpoints_are_rearranged_on_devices(params, saved):
    mesh = mesh_of()
    layer = r"layers/(?P<layer>\d)/"
    renames = [
        sr.Rename(layer + "w", "w", "a b -> layer b a", dtype="float32"),
        sr.Rename(layer + "norm", "norm", "a -> layer (a times)", sizes={"times": 2}),
        sr.Rename("step", "step", apply=lambda x: x + 1),
    ]
    loaded = sr.load(saved, P(), mesh, renames=renames)
    ws = [np.asarray(each["w"], "float32").T for each in params["layers"]]
    norms = [np.repeat(np.asarray(each["norm"]), 2) for each in params["layers"]]
    assert bits(loaded["w"]) == bits(np.stack(ws))
    assert bits(loaded["norm"]) == bits(np.stack(norms))
    assert int(loaded["step"]) == 8


@pytest.fixture
def restored_names(monkeypatch):
    """The names of the arrays that orbax is asked for, a list for each time."""
    calls, restored = [], formats._restored
    monkeypatch.setattr(
        formats,
        "_restored",
        lambda path, abstract: calls.append([*abstract]) or restored(path, abstract),
    )
    return calls


def test_an_orbax_array_for_many_leaves_is_read_once(saved, tmp_path, restored_names):
    stacked = np.arange(8 * 16 * 4, dtype="float32").reshape(8, 16, 4)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "c", {"w": stacked, "scale": np.arange(8, dtype="float32")})
    checkpointer.wait_until_finished()
    apart = sr.Rename("^w$", "{layer}", "layer a b -> b a", scale="scale", blocks=(1, None, None))
    loaded = sr.load(tmp_path / "c", P(None, "tp"), mesh_of((2, 4)), renames=[apart])
    assert restored_names == [["w", "scale"]]
    for i in range(8):
        assert loaded[str(i)].sharding.spec == P(None, "tp")
        assert bits(loaded[str(i)]) == bits(np.ascontiguousarray(stacked[i].T * i))


def test_a_damaged_checkpoint(saved):
    for file in saved.rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(b"")
    with pytest.raises(sr.FileError, match="orbax cannot re"):
        sr.load(saved, RULES, mesh_of())


def test_a_part_of_a_train_state(saved, tmp_path, restored_names):
    weights = {"w": np.arange(64, dtype="float32").reshape(8, 8)}
    state = {"params": weights, "opt_state": {"mu": weights, "nu": weights}, "step": np.int32(3)}
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "c", state)
    checkpointer.wait_until_finished()
    tree = {"params": {"w": jax.ShapeDtypeStruct((8, 8), "float32")}}
    loaded = sr.load(tmp_path / "c", P("tp"), mesh_of((2, 4)), tree=tree)
    assert bits(loaded["params"]["w"]) == bits(weights["w"])
    rename = sr.Rename("params/w", "params/v", "a b -> b a")
    tree = {"params": {"v": tree["params"]["w"]}}
    loaded = sr.load(tmp_path / "c", P("tp"), mesh_of((2, 4)), tree=tree, renames=[rename])
    assert bits(loaded["params"]["v"]) == bits(np.ascontiguousarray(weights["w"].T))
    assert restored_names == [["params/w"], ["params/w"]]
    # An item that the tree has must be whole, and one that it misspells is missing.
    with pytest.raises(sr.FileError, match="opt_state/nu/w: left over"):
        sr.load(tmp_path / "c", P(), mesh_of(), tree={"opt_state": {"mu": weights}})
    with pytest.raises(sr.FileError, match="param/w: missing"):
        sr.load(tmp_path / "c", P(), mesh_of(), tree={"param": weights})
