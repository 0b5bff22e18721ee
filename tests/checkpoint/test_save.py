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
from shardrules._checkpoint import saving

SPECS = [P(), P("a"), P(None, "b"), P("a", "b"), P(("b", "a")), P(None, None, "a"), P("b", None, "a")]


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


@pytest.mark.parametrize("dtype", [">f4", ">i8", "<f4", ">c8"])
def test_safetensors_reads_the_files_and_another_byte_order_is_written_as_it_means(tmp_path, dtype):
    tree = {"a.weight": np.ones((2, 3), "float32"), "k": np.arange(4).astype(dtype)}
    sr.save(tree, tmp_path / "m", shard_bytes=24)
    files = sorted((tmp_path / "m").glob("*-of-00002.safetensors"))
    read = {name: array for file in files for name, array in safetensors.numpy.load_file(file).items()}
    np.testing.assert_equal(read, tree)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_come_back_as_keys(tmp_path, implementation):
    keys = jax.random.split(jax.random.key(3, impl=implementation), 8)
    tree = {"drop": {"key": keys[0], "keys": keys}, "w": np.ones((8, 2), "float32")}
    sr.save(tree, tmp_path / "m")
    assert jax.tree.map(lambda x: x.dtype, sr.read_model(tmp_path / "m")) == jax.tree.map(lambda x: x.dtype, tree)
    rules = [("keys|w", P("a")), ("", P())]
    for loaded in (
        sr.load(tmp_path / "m", rules, mesh()),
        sr.load(tmp_path / "m", rules, mesh(), tree=jax.eval_shape(lambda: tree)),
    ):
        for name in ("key", "keys"):
            key = loaded["drop"][name]
            assert key.dtype == keys.dtype
            assert key.sharding.spec == (P("a") if name == "keys" else P())
            data = jax.random.key_data
            np.testing.assert_array_equal(data(key), data(tree["drop"][name]))
    renames = [sr.Rename("rng.{k}", "drop/{k}"), sr.Rename("{p}", "{p}")]
    sr.save(tree, tmp_path / "n", renames=renames)
    again = sr.load(tmp_path / "n", rules, mesh(), renames=renames)
    assert again["drop"]["key"].dtype == keys.dtype


@pytest.mark.parametrize("keys", ["[]", '{"w": "rbg"}', '{"v": "threefry2x32"}', '{"w": "none"}', '{"w": 3}', "{"])
def test_words_that_are_none_of_keys(tmp_path, keys):
    metadata = {"shardrules.random_keys": keys}
    safetensors.numpy.save_file({"w": np.ones((3, 2), "uint32")}, tmp_path / "m.safetensors", metadata)
    with pytest.raises(sr.FileError):
        sr.load(tmp_path / "m.safetensors", [("", P())], mesh())


def test_a_path_that_is_none(tmp_path):
    for path in ("gs://bucket/m", "/"):
        with pytest.raises(ValueError, match="save makes a directory of files of this machine"):
            sr.save({"w": np.ones(4)}, path)
    sr.save({"w": np.ones(4)}, tmp_path / "new" / "folder" / "m")
    assert (tmp_path / "new" / "folder" / "m").is_dir()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, at):
    calls, write = [], saving._write_box

    def full(*arguments):
        calls.append(arguments)
        if len(calls) > at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    monkeypatch.setattr(saving, "_write_box", full)
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
    rules = sr.LogicalRules({"embed": axis, "mlp": None}) if is_by_name else [("up", axis), ("", ())]
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


# In processes of their own, forked from one that has imported all: what `sr.save` did, and what is left.
FORKS = """
import itertools, os, signal, sys
import jax
import numpy as np
import shardrules as sr
from shardrules._checkpoint import saving

path, renamed = sys.argv[1], sys.argv[2:] == ["renamed"]
tree = {c: np.ones((4, 2)) for c in "abc"}
renames = [sr.Rename("x", "a", "o i -> i o"), sr.Rename("y", "b"), sr.Rename("c", "c")] if renamed else []
# Without a backend, which cannot be forked.
jax.process_index, jax.process_count = (lambda: 0), (lambda: 1)

def save(value=1.0):
    return sr.save({k: v * value for k, v in tree.items()}, path, renames=renames, shard_bytes=128)

def forked(call):
    if (child := os.fork()) == 0:
        try:
            call()
        except sr.FileError as error:
            os._exit(3)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child

def killed_at(number):
    count = itertools.count(1)
    def step():
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
    def wrapped(call):
        def function(*arguments, **more):
            step()
            return call(*arguments, **more)
        return function
    for owner, name in ((saving, "_write_box"), (os, "fsync"), (os, "rename"), (os, "mkdir")):
        setattr(owner, name, wrapped(getattr(owner, name)))
    folder = os.path.dirname(path)
    sys.addaudithook(lambda event, of: event == "open" and folder in str(of[0]) and step())
    save()
"""


@pytest.mark.parametrize("renamed", [[], ["renamed"]])
def test_killed_at_each_step_there_is_nothing_or_all(tmp_path, renamed):
    code = f"""{FORKS}
for number in itertools.count(1):
    code = os.waitstatus_to_exitcode(os.waitpid(forked(lambda: killed_at(number)), 0)[1])
    print(code, *sorted(name for name in os.listdir(os.path.dirname(path)) if "-" not in name), flush=True)
    if code != -9:
        break
    left = os.path.join(os.path.dirname(path), ".m.saving")
    if os.path.exists(left):
        os.rename(left, f"{{path}}-left-{{number}}")
    if os.path.exists(path):
        os.rename(path, f"{{path}}-{{number}}")
"""
    path = tmp_path / "out" / "m"
    path.parent.mkdir()
    run = [sys.executable, "-c", code, str(path), *renamed]
    lines = subprocess.run(run, timeout=120, check=True, capture_output=True, text=True).stdout
    *killed, last = lines.splitlines()
    assert len(killed) > 12
    # A name only when all is there.
    assert {*killed[:-2]} == {"-9", "-9 .m.saving"}
    assert last.split()[0] == "0"
    names = ["x", "y", "c"] if renamed else ["a", "b", "c"]
    for whole in {path, *path.parent.glob("m*")}:
        try:  # a folder that was left may have all, but for its name
            loaded = sr.load(whole, [(".*", P())], mesh())
        except sr.FileError:
            assert "left" in whole.name
            continue
        assert sorted(loaded) == sorted(names)
        assert all((np.asarray(array) == 1).all() for array in loaded.values())


def test_of_several_writers_one_writes(tmp_path):
    code = f"""{FORKS}
for round in range(6):
    path = f"{{sys.argv[1]}}{{round}}"
    children = [forked(lambda: save(value)) for value in (1.0, 2.0, 3.0)]
    print(*sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""
    run = [sys.executable, "-c", code, str(tmp_path / "m")]
    lines = subprocess.run(run, timeout=120, check=True, capture_output=True, text=True).stdout
    assert lines.splitlines() == ["0 3 3"] * 6
    assert sorted(os.listdir(tmp_path)) == [f"m{i}" for i in range(6)]
    for directory in tmp_path.iterdir():
        loaded = sr.load(directory, [(".*", P())], mesh())
        assert len({float(value) for array in loaded.values() for value in array.ravel()}) == 1
