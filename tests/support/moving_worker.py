"""One of several JAX processes on loopback that load and move, as tests/checkpoint/test_moving_processes.py starts them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._checkpoint import saving
from shardrules._checkpoint import units as reading
from tests.support.process_worker import main, raised

RULES = [("rows", ("all", None)), ("columns", (None, "all")), ("both", ("x", "y")), ("within", (None, "y")), ("", ())]
SHAPES = {"rows": (64, 24), "columns": (24, 128), "both": (32, 64), "within": (16, 8), "norm": (48,)}
RENAMES = [
    sr.Rename("columns", "turned/rows", "a b -> b a"),
    sr.Rename("layers.{layer}.w", "layers/columns", "a b -> (layer a) b"),
]


def checkpoint(folder):
    rng = np.random.default_rng(3)
    shapes = {**SHAPES, **{f"layers.{i}.w": (6, 32) for i in range(4)}}
    return {name: rng.integers(0, 1 << 16, shape).astype("uint16") for name, shape in shapes.items()}


def renamed(arrays):
    """{path: array} after RENAMES, by numpy."""
    layers = np.concatenate([arrays[f"layers.{i}.w"] for i in range(4)])
    kept = {name: arrays[name] for name in SHAPES if name != "columns"}
    return kept | {"turned/rows": np.ascontiguousarray(arrays["columns"].T), "layers/columns": layers}


def make_mesh():
    """("x", "y") over all devices; "all" in RULES is both."""
    return Mesh(np.array(jax.devices()).reshape(-1, 2), ("x", "y"))


def rules():
    return [(pattern, tuple(("x", "y") if axis == "all" else axis for axis in spec)) for pattern, spec in RULES]


FOLDER = Path(os.environ["SHARDRULES_TEST_FOLDER"])


def flat(tree):
    return {
        "/".join(str(key.key) for key in keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
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
    arrays = flat(loaded).items()
    parts = {(name, str(part.index)): part.data.nbytes for name, array in arrays for part in array.addressable_shards}
    return sum(parts.values())


def load():
    path, mesh, read = FOLDER / "m.safetensors", make_mesh(), []
    expected, read_at = checkpoint(FOLDER), reading._read_at

    def count(file, begin, into):
        read.append(done := read_at(file, begin, into))
        return done

    reading._read_at, reading._native, reading.GAP = count, None, 0
    found = []
    for renames, wanted, most in (
        ((), expected, 1 << 30), (RENAMES, renamed(expected), 1 << 30), (RENAMES, renamed(expected), 4000),
    ):  # fmt: skip
        read.clear()
        loaded = sr.load(path, rules(), mesh, renames=renames, max_bytes_in_flight=most)
        found.append([is_right(loaded, wanted), sum(read), own_bytes(loaded)])
    return {"found": found, "local": local(mesh)}


def local(mesh):
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
            if len(into) <= 64:  # a sample, before anything else is read
                return read_at(file, begin, into)
            raise OSError(5, "Input/output error")

        reading._read_at, reading._native = fail, None
        try:
            return call()
        finally:
            reading._read_at = read_at

    def with_missing(value):
        tree = {"norm": jax.ShapeDtypeStruct((48,), "uint16"), "new": jax.ShapeDtypeStruct((), "float32")}
        return call(tree=tree, strict=False, missing={"new": value})

    whole = call()
    cases = {
        "no file": lambda: call(FOLDER / "no such file.safetensors"),
        "cut": lambda: call(FOLDER / f"cut{me}.safetensors"),
        "rules": lambda: call(of=[("", ())]),
        "disk": with_bad_disk,
        "another model": lambda: call(other),
        "progress": lambda: call(progress=interrupted),
        "bound": lambda: call(max_bytes_in_flight=-1),
        "renames": lambda: call(renames=[sr.Rename("norm", "norm")]),
        "only": lambda: call(only="."),
        "missing": lambda: with_missing(2.0),
        "saved": lambda: sr.save(whole, FOLDER / "odd", renames=[sr.Rename("{n*}", "{n*}")]),
        "reshard": lambda: sr.reshard({}, rules(), mesh),
        "shard_local": lambda: sr.shard_local({"x": np.ones(3)}, P(("x", "y")), mesh),
    }
    others = {"missing": lambda: with_missing(1.0), "saved": lambda: sr.save(whole, FOLDER / "odd")}
    found = []
    for odd in (0, 1):
        for case, odd_call in cases.items():
            error = raised(odd_call if me == odd else others.get(case, call))
            found.append([odd, case, error, is_right(call(), expected)])
    return {"found": found}


def meshes():
    """{name: mesh} on devices of some processes, of all, and of parts of two."""
    devices = np.array(jax.devices())
    half = len(devices) // 2
    placed = {
        "first": devices[:half].reshape(-1, 2),
        "last": devices[half:].reshape(2, -1),
        "turned": devices[half:].reshape(-1, 2).T,
        "all": devices.reshape(-1, 4),
        "middle": devices[half - 1 : half + 2].reshape(1, 3),
        "one": devices[-1:].reshape(1, 1),
        "like first": devices[half:].reshape(-1, 2),
    }
    return {name: Mesh(of, ("x", "y")) for name, of in placed.items()}


def cross():
    """{case: the error of a move between processes}, and whether all arrays are as they were."""
    on, devices, rows = meshes(), jax.devices(), checkpoint(FOLDER)["rows"]
    keys = jax.random.split(jax.random.key(5), 8)
    placed = {name: sr.shard({"rows": rows, "keys": keys}, P("x"), on[name]) for name in ("first", "all")}
    turned = Mesh(on["all"].devices[::-1], ("x", "y"))
    own = Mesh(np.array(devices[: len(devices) // jax.process_count()]).reshape(1, -1), ("x", "y"))
    held = sr.shard({"rows": rows}, P("y"), own)
    half = Mesh(np.array(devices[: len(devices) // 2])[::-1].reshape(-1, 2), ("x", "y"))
    other_cuts = {"rows": P(None, "x"), "keys": P()}
    transposed = [sr.Rename("rows", "r", "a b -> b a")]
    moves = {
        "other cuts": lambda: sr.reshard(placed["first"], other_cuts, on["last"], donate=True),
        "the same cuts": lambda: sr.shard(placed["first"]["rows"], P("x"), on["like first"]),
        "more devices": lambda: sr.reshard(placed["first"], P("x"), on["all"], donate=True),
        "one device": lambda: sr.shard(placed["all"], P(), on["one"], donate=True),
        "renamed": lambda: sr.reshard(placed["first"], P("y"), on["last"], renames=transposed),
        "keys": lambda: sr.shard(placed["all"]["keys"], P("x"), turned),
        "held by one": lambda: sr.reshard(held, P("x"), on["all"]),
        "order": lambda: sr.shard(placed["first"]["rows"], P("x"), half),
    }
    errors = {case: raised(move) for case, move in moves.items()}
    as_they_were = is_right({"rows": placed["first"]["rows"]}, {"rows": rows})
    again = sr.shard(placed["all"]["keys"], P("y"), on["all"])
    key_data = np.asarray(jax.random.key_data(keys))
    for shard in again.addressable_shards:
        as_they_were &= np.array_equal(jax.random.key_data(shard.data), key_data[shard.index])
    is_alone = True
    mine = Mesh(np.array(jax.local_devices()).reshape(1, -1), ("x", "y"))
    whole = sr.shard({"rows": rows}, P(), on["all"])
    for call in (sr.reshard, sr.shard)[: jax.process_index() + 1]:  # no process waits for another
        alone = call(whole, P("y"), mine)["rows"]
        is_alone &= np.array_equal(np.asarray(alone), rows)
    return {"errors": errors, "kept": bool(as_they_were), "alone": bool(is_alone)}


def interrupted(*_):
    raise KeyboardInterrupt


def save():
    """Save what was loaded, then with a process that cannot write, and then again."""
    mesh, expected = make_mesh(), checkpoint(FOLDER)
    loaded = sr.load(FOLDER / "m.safetensors", rules(), mesh)
    sr.save(loaded, FOLDER / "saved", shard_bytes=4096)
    again = sr.load(FOLDER / "saved", rules(), mesh)
    turn = [sr.Rename("rows.T", "columns", "b a -> a b"), sr.Rename("{name*}", "{name*}")]
    sr.save(loaded, FOLDER / "turned", renames=turn)
    turned = is_right(sr.load(FOLDER / "turned", rules(), mesh, renames=turn), expected)
    # The boxes of a process, between which are those of another.
    woven = Mesh(np.array(jax.devices()).reshape(jax.process_count(), 2, -1).swapaxes(0, 1), ("x", "p", "y"))
    apart = sr.load(FOLDER / "m.safetensors", [("rows|both", (("x", "p"), "y")), ("", ())], woven)
    sr.save(apart, FOLDER / "woven")
    turned &= is_right(sr.load(FOLDER / "woven", rules(), mesh), expected)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    write = saving._write_box
    if jax.process_index() == jax.process_count() - 1:
        saving._write_box = refuse
    error = raised(lambda: sr.save(loaded, FOLDER / "full"))
    saving._write_box = write
    time.sleep(0.5)
    left = sorted(path.name for path in FOLDER.iterdir() if "full" in path.name)
    return {
        "right": is_right(again, expected) and turned,
        "files": sorted(path.name for path in (FOLDER / "saved").iterdir()),
        "error": error,
        "left": left,
    }


if __name__ == "__main__":
    main({"load": load, "move": move, "fail": fail, "cross": cross, "save": save})
