"""`python -m benchmarks.checkpoints [CASE ...]`: `load` beside the plain way.

Each case has a process of its own, and files in the page cache. Both results are compared first,
then the calls alternate; a ratio is the median of the rounds' ratios, in seconds of processors and
in time.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks.harness import Row

ROUNDS: Final = 7
BOTH: Final = P("fsdp", "tp")


class Case(NamedTuple):
    """Two ways to the same arrays."""

    ours: Callable[[], Any]
    plain: Callable[[], Any]
    bar: float | None
    what: str
    rounds: int = ROUNDS


def rows(*names: str) -> Iterator[Row]:
    """Yield the rows of the cases with these names, or of all."""
    for name in names or CASES:
        processes = 2 if name in JOINT else 1
        with tempfile.TemporaryDirectory() as folder:
            for entry in _of_processes(name, folder, processes):
                yield Row(*entry)


def _of_processes(name: str, folder: str, processes: int) -> list[Any]:
    devices = 8 if processes == 1 else 2
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.checkpoints", "--run", name, folder]
    started = [
        subprocess.Popen(
            [*command, *([str(port), str(i)] if processes > 1 else [])],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(processes)
    ]  # fmt: skip
    outputs = [process.communicate() for process in started]
    for process, (_, error) in zip(started, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{name}: {error[-3000:]}")
    return list(json.loads(outputs[0][0].splitlines()[-1]))


def mesh_of(*sizes: int) -> Mesh:
    """Return a mesh of ("fsdp", "tp")."""
    return Mesh(np.array(jax.devices()).reshape(sizes), ("fsdp", "tp"))


def plain_load(folder: str, sharding_of: Callable[[str], Any], turned: bool = False) -> Any:
    """Load with safetensors, and put all arrays on the devices in one call."""
    arrays = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        arrays |= safetensors.numpy.load_file(file)
    if turned:
        arrays = {name: array.T for name, array in arrays.items()}
    shardings = {name: sharding_of(name) for name in arrays}
    return jax.block_until_ready(jax.device_put(arrays, shardings))


def save(folder: str, arrays: dict[str, Any], files: int = 1) -> None:
    """Write the arrays into some files of about equal counts."""
    names = list(arrays)
    count = -(-len(names) // files)
    for i in range(files):
        part = {name: arrays[name] for name in names[i * count : (i + 1) * count]}
        safetensors.numpy.save_file(part, Path(folder) / f"part{i}.safetensors")


def random(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an array of any finite numbers."""
    rng = np.random.default_rng(0)
    return rng.normal(size=shape).astype("float32").astype(dtype)


def small(folder: str) -> Case:
    """Return a case of many small arrays."""
    values = random((20_000, 32, 32), "float32")
    save(folder, {f"layers.{i}.w": each for i, each in enumerate(values)}, files=4)
    return _loaded(folder, BOTH, 1.1, "20,000 float32 arrays of 4 kB")


def forms(folder: str) -> Case:
    """Return a case of small arrays in 200 shapes."""
    arrays = {f"layers.{i}.w": random((8 + i % 200, 64), "float32") for i in range(10_000)}
    save(folder, arrays, files=4)
    return _loaded(folder, P(None, "tp"), 1.1, "10,000 float32 arrays of 200 shapes, 28 kB each")


def _loaded(folder: str, spec: P, bar: float, what: str, turned: bool = False) -> Case:
    """Return a case of arrays that all have a spec."""
    mesh = mesh_of(4, 2)
    sharding = NamedSharding(mesh, spec)
    renames = [sr.Rename("{name*}", "{name*}", "out in -> in out")] if turned else []
    return Case(
        lambda: sr.load(folder, spec, mesh, renames=renames),
        lambda: plain_load(folder, lambda _: sharding, turned=turned),
        bar,
        f"{what} / load_file{', .T' if turned else ''} and one device_put",
    )


def names(folder: str) -> Case:
    """Return a case of very many names."""
    return _deepseek(folder, P(), [], "89,089 tensors of DeepSeek-V3's names, replicated")


def experts(folder: str) -> Case:
    """Return a case of experts that are stacked."""
    at = "model.layers.{i}.mlp.experts"
    expert = f"{at}.{{expert}}.{{part}}.{{kind}}"
    stack = [sr.Rename(expert, f"{at}.{{part}}.{{kind}}", "out in -> expert out in")]
    spec = [("experts", ("fsdp", None, "tp")), ("", ())]
    return _deepseek(folder, spec, stack, "the same, the experts stacked")


def _deepseek(folder: str, rules: Any, renames: list[sr.Rename], what: str) -> Case:
    save_deepseek(folder)
    mesh = mesh_of(4, 2)
    load = functools.partial(sr.load, folder, rules, mesh, renames=renames)
    return Case(load, lambda: None, None, what, 1)


def save_deepseek(folder: str) -> None:
    """Write arrays of DeepSeek-V3's names, its experts with their scales, at small sizes."""
    code = random((16, 16), ml_dtypes.float8_e4m3fn)
    scale = np.full((1, 1), 0.5, "float32")
    arrays: dict[str, Any] = {"model.embed_tokens.weight": random((64, 16), ml_dtypes.bfloat16)}
    for layer, expert in product(range(3, 61), range(256)):
        for part in ("gate", "up", "down"):
            name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
            arrays |= {name: code, f"{name}_scale_inv": scale}
    save(folder, arrays)


def columns(folder: str) -> Case:
    """Return a case of columns that are cut over processes."""
    if jax.process_index() == 0:
        values = random((2048, 2048), "float32")
        save(folder, {f"layers.{i}.w": values + i for i in range(32)}, files=2)
        (Path(folder) / "done").touch()
    while not (Path(folder) / "done").exists():
        time.sleep(0.1)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("tp", "fsdp"))
    sharding = NamedSharding(mesh, BOTH)

    def plain() -> Any:
        arrays = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            data = np.memmap(file, np.uint8, "r")
            start = 8 + int.from_bytes(bytes(data[:8]), "little")
            for name, entry in json.loads(bytes(data[8:start])).items():
                begin, end = (start + offset for offset in entry["data_offsets"])
                mapped = data[begin:end].view("float32").reshape(entry["shape"])
                arrays[name] = jax.make_array_from_callback(
                    mapped.shape, sharding, mapped.__getitem__
                )
        return jax.block_until_ready(arrays)

    return Case(
        lambda: sr.load(folder, BOTH, mesh), plain, 1.2,
        "columns over 2 processes, 0.5 GB / numpy.memmap slices",
    )  # fmt: skip


def again(folder: str) -> Case:
    """Return a case of large arrays, loaded several times."""
    save(folder, {f"layers.{i}.w": random((2048, 1024), "float32") for i in range(32)}, files=4)
    return _loaded(folder, BOTH, 1.0, "a later load of 0.27 GB")


def turned(folder: str) -> Case:
    """Return a case of arrays that are transposed."""
    values = random((2048, 2048), ml_dtypes.bfloat16)
    save(folder, {f"layers.{i}.w": values for i in range(32)}, files=2)
    return _loaded(folder, BOTH, 1.0, "0.27 GB of bfloat16, all transposed", turned=True)


def resharded(folder: str) -> Case:
    """Return a case of a live tree that goes to other cuts."""
    mesh = mesh_of(4, 2)
    values = random((32, 2048, 1024), "float32")
    tree = {f"w{i}": jax.device_put(v, NamedSharding(mesh, BOTH)) for i, v in enumerate(values)}
    there = NamedSharding(mesh, P("tp", "fsdp"))
    return Case(
        lambda: jax.block_until_ready(sr.reshard(tree, there)),
        lambda: jax.block_until_ready(jax.device_put(tree, dict.fromkeys(tree, there))),
        1.0,
        "0.27 GB to other cuts / device_put",
    )


def written(folder: str) -> Case:
    """Return a case of saved arrays, on the disk before a call returns, in both ways."""
    mesh = mesh_of(4, 2)
    values = random((32, 512, 1024), "float32")
    tree = {f"w{i}": jax.device_put(v, NamedSharding(mesh, BOTH)) for i, v in enumerate(values)}
    ours_at, plain_at = Path(folder) / "ours", Path(folder) / "plain"

    def ours() -> Any:
        shutil.rmtree(ours_at, ignore_errors=True)
        sr.save(copied(), ours_at, shard_bytes=1 << 25)
        return tree

    def copied() -> Any:  # an array keeps what numpy has of it
        return jax.block_until_ready(jax.tree.map(jnp.copy, tree))

    def plain() -> Any:
        shutil.rmtree(plain_at, ignore_errors=True)
        plain_at.mkdir()
        arrays = copied()
        for i in range(0, 32, 16):
            part = {name: np.asarray(arrays[name]) for name in list(tree)[i : i + 16]}
            safetensors.numpy.save_file(part, plain_at / f"{i}.safetensors")
            with open(plain_at / f"{i}.safetensors", "rb") as file:
                os.fsync(file.fileno())
        return tree

    saved = []
    for call, directory in ((ours, ours_at), (plain, plain_at)):
        call()
        files = directory.glob("*.safetensors")
        saved.append({k: v for f in files for k, v in safetensors.numpy.load_file(f).items()})
    _check_equal(*saved)
    return Case(ours, plain, 1.0, "67 MB saved / safetensors.save_file and fsync")


CASES: Final[dict[str, Callable[[str], Case]]] = {
    "small": small, "forms": forms, "names": names, "experts": experts, "columns": columns,
    "again": again, "turned": turned, "resharded": resharded, "written": written,
}  # fmt: skip
JOINT: Final = {"columns"}


def _memory() -> int:
    """Count the bytes of this process that are not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kinds = ("RssAnon", "RssShmem")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(kinds))


def _peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return (the result, the most bytes during the call beyond those before)."""
    before, peak, done = _memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], _memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = call()
    done.set()
    watcher.join()
    return result, peak[0] - before


def _check_equal(ours: Any, plain: Any) -> int:
    """Compare the local shards; returns their bytes."""
    size = 0
    for name, expected in plain.items():
        if isinstance(expected, np.ndarray):
            pairs = [(np.asarray(ours[name]), expected)]
        else:
            both = (ours[name].addressable_shards, expected.addressable_shards)
            pairs = [(a.data, b.data) for a, b in zip(*both, strict=True)]
        for a, b in pairs:
            if a.dtype != b.dtype or np.asarray(a).tobytes() != np.asarray(b).tobytes():
                raise AssertionError(f"{name} differs")
            size += a.nbytes
    return size


def _measured(case: Case) -> Iterator[Row]:
    ours, peak = _peak(case.ours)
    plain, plain_peak = _peak(case.plain)
    size = _check_equal(ours, plain or {})
    size = size or sum(each.nbytes for each in jax.tree.leaves(ours))
    del ours, plain
    taken: dict[str, list[tuple[float, float]]] = {"ours": [], "plain": []}
    for _ in range(case.rounds):
        for name, call in (("ours", case.ours), ("plain", case.plain)):
            used, start = time.process_time(), time.perf_counter()
            result = call()
            taken[name].append((time.process_time() - used, time.perf_counter() - start))
            del result
    (cpu, seconds), (plain_cpu, plain_seconds) = (
        [median(column) for column in zip(*pairs, strict=True)] for pairs in taken.values()
    )
    note = (
        f"{cpu:.2f} / {plain_cpu:.2f} s of processors, {seconds:.2f} / {plain_seconds:.2f} s; peak "
        f"{peak / size:.2f} / {plain_peak / size:.2f} of the arrays"
    )
    if case.bar is None:  # there is no plain way
        yield Row(f"{case.what}: processors", cpu, "s", 10.0, f"{seconds:.2f} s")
        return
    for place, kind in enumerate(("processors", "time")):
        ratio = median(
            a[place] / b[place] for a, b in zip(taken["ours"], taken["plain"], strict=True)
        )
        yield Row(f"{case.what}: {kind}", ratio, "x", case.bar, note if not place else "")
    if sys.argv[2] != "written":
        bar = 2.5 if sys.argv[2] in ("small", "forms") else 1.05
        yield Row(f"{case.what}: peak", peak / size, "x of the arrays", bar)


def _run(name: str, folder: str, *joint: str) -> None:
    if joint:
        jax.distributed.initialize(f"localhost:{joint[0]}", 2, int(joint[1]))
    print(json.dumps(list(_measured(CASES[name](folder)))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _run(*sys.argv[2:])
    else:
        for row in rows(*sys.argv[1:]):
            print(f"{row.name:80} {row.measured:6.2f} {row.unit} {row.verdict} ({row.note})",
                  flush=True)  # fmt: skip
