"""One of several JAX processes on loopback that load and move, as tests/checkpoint/test_moving_processes.py starts them."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._checkpoint import reading, saving
from tests.support.process_worker import main, raised

RULES = [
    ("rows", ("all", None)),
    ("columns", (None, "all")),
    ("both", ("x", "y")),
    ("within", (None, "y")),
    ("", ()),
]
SHAPES = {
    "rows": (64, 24),
    "columns": (24, 128),
    "both": (32, 64),
    "within": (16, 8),
    "norm": (48,),
}
RENAMES = [
    sr.Rename("columns", "turned/rows", "a b -> b a"),
    sr.Rename(r"layers\.(?P<layer>\d+)\.w", "layers/columns", "a b -> (layer a) b"),
]


def checkpoint(folder):
    """{name: array} of the checkpoint in this folder."""
    rng = np.random.default_rng(3)
    shapes = {**SHAPES, **{f"layers.{i}.w": (6, 32) for i in range(4)}}
    return {
        name: rng.integers(0, 1 << 16, shape).astype("uint16") for name, shape in shapes.items()
    }


def renamed(arrays):
    """{path: array} after RENAMES, by numpy."""
    layers = np.concatenate([arrays[f"layers.{i}.w"] for i in range(4)])
    kept = {name: arrays[name] for name in SHAPES if name != "columns"}
    return kept | {
        "turned/rows": np.ascontiguousarray(arrays["columns"].T),
        "layers/columns": layers,
    }


def make_mesh():
    """("x", "y") over all devices; "all" in RULES is both."""
    return Mesh(np.array(jax.devices()).reshape(-1, 2), ("x", "y"))


def rules():
    return [
        (pattern, tuple(("x", "y") if axis == "all" else axis for axis in spec))
        for pattern, spec in RULES
    ]


FOLDER = Path(os.environ["SHARDRULES_TEST_FOLDER"])


def flat(tree):
    return {
        "/".join(str(key.key) for key in keys): leaf
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def is_right(loaded, expected):
    """Whether each of this process's devices has its part, bit by bit."""
    found = flat(loaded)
    assert found.keys() == expected.keys(), found.keys()
    return all(
        np.array_equal(np.asarray(shard.data), expected[name][shard.index])
        for name, array in found.items()
        for shard in array.addressable_shards
    )


def own_bytes(loaded):
    """Bytes of this process's distinct parts."""
    return sum(
        int(np.prod([len(range(*one.indices(size))) for one, size in zip(index, array.shape, strict=True)]))
        * array.dtype.itemsize
        for array in flat(loaded).values()
        for index in {str(i): i for i in array.sharding.addressable_devices_indices_map(array.shape).values()}.values()
    )  # fmt: skip


def load():
    path, mesh, read = FOLDER / "m.safetensors", make_mesh(), []
    expected, read_at = checkpoint(FOLDER), reading._read_at

    def count(file, begin, into):
        read.append(done := read_at(file, begin, into))
        return done

    reading._read_at, reading._native, reading.GAP = count, None, 0
    found = []
    for renames, wanted, most in (
        ((), expected, None), (RENAMES, renamed(expected), None), (RENAMES, renamed(expected), 4000),
    ):  # fmt: skip
        read.clear()
        loaded = sr.load(path, rules(), mesh, renames=renames, max_bytes_in_flight=most)
        found.append([is_right(loaded, wanted), sum(read), own_bytes(loaded)])
    return {"found": found, "local": local(mesh)}


def local(mesh):
    """Each process gives its own rows."""
    rows = np.arange(64).reshape(16, 4)
    per = 16 // jax.process_count()
    mine = rows[jax.process_index() * per : (jax.process_index() + 1) * per]
    placed = sr.shard_local({"x": mine}, P(("x", "y")), mesh)["x"]
    assert placed.shape == (16, 4)
    return all(np.array_equal(np.asarray(s.data), rows[s.index]) for s in placed.addressable_shards)


def move():
    """From one layout to another and back."""
    mesh, expected = make_mesh(), checkpoint(FOLDER)
    loaded = sr.load(FOLDER / "m.safetensors", rules(), mesh)
    again = sr.reshard(loaded, P("x"), mesh, max_bytes_in_flight=8000)
    back = sr.reshard(again, rules(), mesh, donate=True)
    return {"right": is_right(back, expected)}


def fail():
    """[odd process, case, the error, whether the next call is right]; each process odd in turn."""
    path, mesh, me = FOLDER / "m.safetensors", make_mesh(), jax.process_index()
    expected, read_at = checkpoint(FOLDER), reading._read_at
    data = path.read_bytes()
    (FOLDER / f"cut{me}.safetensors").write_bytes(data[:-1])

    other = FOLDER / "other" / path.name
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(data[:-100] + bytes(byte ^ 1 for byte in data[-100:]))

    def call(source=path, of=None, **more):
        return sr.load(source, of or rules(), mesh, **more)

    def with_bad_disk():
        def fail(file, begin, into):
            if sum(map(len, into)) <= 64:  # a sample, before anything else is read
                return read_at(file, begin, into)
            raise OSError(5, "Input/output error")

        reading._read_at, reading._native = fail, None
        try:
            return call()
        finally:
            reading._read_at = read_at

    cases = {
        "no file": lambda: call(FOLDER / "no such file.safetensors"),
        "cut": lambda: call(FOLDER / f"cut{me}.safetensors"),
        "rules": lambda: call(of=[("", ())]),
        "disk": with_bad_disk,
        "another model": lambda: call(other),
        "progress": lambda: call(progress=interrupted),
        "bound": lambda: call(max_bytes_in_flight=10),
        "reshard": lambda: sr.reshard({}, rules(), mesh),
        "shard_local": lambda: sr.shard_local({"x": np.ones(3)}, P(("x", "y")), mesh),
    }
    found = []
    for odd in (0, 1):
        for case, odd_call in cases.items():
            error = raised(odd_call if me == odd else call)
            found.append([odd, case, error, is_right(call(), expected)])
    return {"found": found}


def refuse():
    """What JAX cannot move: from devices of several processes to others, or to some of them."""
    mesh, me = make_mesh(), jax.process_index()
    arrays = {"rows": np.arange(64.0).reshape(16, 4)}
    placed = sr.shard(arrays, P(("x", "y")), mesh)
    first = [d for d in jax.devices() if d.process_index == 0]
    of_each = [d for d in jax.devices() if d.id % 2 == 0]
    own, half = (Mesh(np.array(of).reshape(-1, 2), ("x", "y")) for of in (first, of_each))
    start = time.monotonic()
    errors = {
        f"{name} {call.__name__}": raised(partial(call, placed, P("x"), to))
        for name, to in (("own", own), ("half", half))
        for call in (sr.reshard, sr.shard)
    }
    errors["renamed"] = raised(
        lambda: sr.reshard(placed, P("x"), half, renames=[sr.Rename("rows", "r", "a b -> b a")])
    )
    seconds = time.monotonic() - start
    back = sr.shard(arrays, P("y"), mesh)
    is_right = all(
        np.array_equal(np.asarray(s.data), arrays["rows"][s.index])
        for s in back["rows"].addressable_shards
    )
    whole = sr.shard(arrays, P(), mesh)
    mine = [d for d in jax.devices() if d.process_index == me]
    for call in (sr.reshard, sr.shard)[: me + 1]:  # no process waits for another
        alone = call(whole, P("x"), Mesh(np.array(mine).reshape(-1, 2), ("x", "y")))["rows"]
        is_right &= np.array_equal(np.asarray(alone), arrays["rows"])
    return {"errors": errors, "next is right": bool(is_right), "seconds": seconds, "me": me}


def interrupted(*_):
    raise KeyboardInterrupt


def plus_one(x):
    return x + 1


def save():
    """Save what was loaded, then with a process that cannot write, and then again."""
    mesh, expected = make_mesh(), checkpoint(FOLDER)
    loaded = sr.load(FOLDER / "m.safetensors", rules(), mesh)
    sr.save(loaded, FOLDER / "saved", shard_bytes=4096)
    again = sr.load(FOLDER / "saved", rules(), mesh)
    turned = True
    if hasattr(jax, "set_mesh"):  # for collectives
        turn = sr.Rename("columns", "rows.T", "a b -> b a")
        add = sr.Rename("rows.T", "columns", "b a -> a b", apply=plus_one)
        sr.save(loaded, FOLDER / "turned", renames=[turn])
        others = sr.Rename("rows$|both|within|norm|layers", None)
        turned = is_right(
            sr.load(FOLDER / "turned", rules(), mesh, renames=[add, others]),
            {"columns": expected["columns"] + np.uint16(1)},
        )

    def refuse(*_):
        raise OSError(28, "No space left on device")

    write = saving._write_all
    if jax.process_index() == jax.process_count() - 1:
        saving._write_all = refuse
    error = raised(lambda: sr.save(loaded, FOLDER / "full"))
    saving._write_all = write
    time.sleep(0.5)
    left = sorted(path.name for path in FOLDER.iterdir() if "full" in path.name)
    return {
        "right": is_right(again, expected) and turned,
        "files": sorted(path.name for path in (FOLDER / "saved").iterdir()),
        "error": error,
        "left": left,
    }


if __name__ == "__main__":
    main({"load": load, "move": move, "fail": fail, "refuse": refuse, "save": save})
