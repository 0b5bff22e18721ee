"""`save`: what is written is what is loaded, or nothing is there."""

import errno
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

SPECS = [
    P(),
    P("a"),
    P(None, "b"),
    P("a", "b"),
    P(("b", "a")),
    P(None, None, "a"),
    P("b", None, "a"),
]


def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("spec", SPECS)
def test_each_cut_is_written_to_its_place(tmp_path, spec, dtype):
    values = jnp.arange(8 * 16 * 4).reshape(8, 16, 4).astype(dtype)
    array = jax.device_put(values, NamedSharding(mesh(), spec))
    tree = {
        "x": {"w": array, "s": jnp.float32(3)},
        "n": np.arange(6).reshape(2, 3).T.astype("int32"),
        "e": jnp.zeros((0, 3)),
    }
    sr.save(tree, tmp_path / "m", shard_bytes=600)
    loaded = sr.load(tmp_path / "m", [(".*", P())], mesh())
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(tree), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert os.listdir(tmp_path) == ["m"]


def test_safetensors_reads_the_files(tmp_path):
    tree = {"a.weight": np.ones((2, 3), "float32"), "b.weight": np.arange(4.0)}
    sr.save(tree, tmp_path / "m", shard_bytes=24)
    read = {}
    for file in sorted((tmp_path / "m").glob("*-of-00002.safetensors")):
        read |= safetensors.numpy.load_file(file)
    assert read.keys() == tree.keys()
    for name, value in tree.items():
        np.testing.assert_array_equal(read[name], value)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, at):
    calls, pwrite = [], os.pwrite

    def full(*arguments):
        calls.append(arguments)
        if len(calls) > at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(sr.FileError, match="No space left"):
        sr.save({c: np.ones(4) for c in "abc"}, tmp_path / "m", shard_bytes=32)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("is_by_name", [True, False])
def test_named_arrays_come_back(tmp_path, mesh, is_by_name):
    hax = pytest.importorskip("haliax", reason="haliax is not installed", exc_type=ImportError)
    axes = hax.make_axes(embed=8, mlp=16)
    values = np.arange(128, dtype="float32").reshape(8, 16)
    tree = {"up": hax.NamedArray(values, axes), "scale": np.ones(8, "float32")}
    axis = mesh.axis_names[0]
    rules = (
        sr.LogicalRules({"embed": axis, "mlp": None}) if is_by_name else [("up", axis), ("", ())]
    )
    plan = sr.plan(tree, rules, mesh)
    sr.save(tree, tmp_path / "saved")
    loaded = sr.load(tmp_path / "saved", plan)
    assert not sr.audit(loaded, plan)
    assert np.array_equal(np.asarray(jax.tree.leaves(loaded["up"])[0]), values)


def test_what_exists_stays(tmp_path):
    sr.save({"w": np.ones(3)}, tmp_path / "m")
    with pytest.raises(sr.FileError, match="exists"):
        sr.save({"w": np.zeros(3)}, tmp_path / "m")
    (tmp_path / ".n.saving").mkdir()
    with pytest.raises(sr.FileError, match=r"\.n\.saving exists"):
        sr.save({"w": np.zeros(3)}, tmp_path / "n")
    assert sorted(os.listdir(tmp_path)) == [".n.saving", "m"]


@pytest.mark.parametrize("tree", [{}, {"w": "text"}, {"w": jnp.ones(2, "int4")}])
def test_bad_trees(tmp_path, tree):
    with pytest.raises(ValueError, match="tree"):
        sr.save(tree, tmp_path / "m")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_what_a_killed_process_leaves_does_not_load(tmp_path, call, at):
    code = f"""
import os, signal
import numpy as np
import shardrules as sr

calls, plain = [], os.{call}
def killed(*arguments):
    calls.append(arguments)
    if len(calls) == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments)
os.{call} = killed
sr.save({{c: np.ones(4) for c in "abc"}}, {str(tmp_path / "m")!r}, shard_bytes=64)
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert ended.returncode == -9
    (left,) = os.listdir(tmp_path)
    assert left == ".m.saving"
    if (call, at) in {("rename", 3), ("fsync", 3)}:
        # All is written, but the directory has not its name yet.
        whole = sr.load(tmp_path / left, [(".*", P())], mesh())
        assert {name: value.shape for name, value in whole.items()} == dict.fromkeys("abc", (4,))
    else:
        with pytest.raises(sr.FileError):
            sr.load(tmp_path / left, [(".*", P())], mesh())
