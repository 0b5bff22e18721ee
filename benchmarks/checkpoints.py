"""`python -m benchmarks.checkpoints [CASE ...]`: load, reshard and save beside the plain way.

Each case has a process of its own, and files in the page cache. Both results are compared first,
then the calls alternate; a ratio is the median of the rounds' ratios, in seconds of processors.
"""

from __future__ import annotations

import ctypes
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
from functools import partial
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
AT: Final = "model.layers.{i}.mlp.experts"
STACK: Final = sr.Rename(
    f"{AT}.{{expert}}.{{part}}.{{kind}}", f"{AT}.{{part}}.{{kind}}", "out in -> expert out in"
)
TURN: Final = sr.Rename("{name*}", "{name*}", "out in -> in out")


class Case(NamedTuple):
    """Two ways to the same arrays."""

    what: str
    ours: Callable[[], Any]
    plain: Callable[[], Any] | None
    bar: float


def rows(*names: str) -> Iterator[Row]:
    """Yield the rows of the cases with these names, or of all."""
    for name in names or CASES:
        processes = 2 if name == "columns" else 1
        flags = f"--xla_force_host_platform_device_count={8 // processes**2}"
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.checkpoints", "--run", name, folder]
            joint = [[port, str(i)] if processes > 1 else [] for i in range(processes)]
            started = [
                subprocess.Popen([*command, *each], env=environment, stdout=subprocess.PIPE)
                for each in joint
            ]
            outputs = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise RuntimeError(f"{name} has failed, as it says above")
        for entry in json.loads(outputs[0].splitlines()[-1]):
            yield Row(*entry)


def mesh_of(*axes: str) -> Mesh:
    """Return a mesh of all devices, the second axis of two."""
    return Mesh(np.array(jax.devices()).reshape(-1, 2), axes or ("fsdp", "tp"))


def random(shape: tuple[int, ...], dtype: Any = "float32") -> Any:
    """Return an array of any finite numbers."""
    return np.random.default_rng(0).normal(size=shape).astype("float32").astype(dtype)


def write(folder: str, arrays: dict[str, Any], files: int) -> None:
    """Write the arrays into some files of about equal counts."""
    names = list(arrays)
    count = -(-len(names) // files)
    for i in range(files):
        part = {name: arrays[name] for name in names[i * count : (i + 1) * count]}
        safetensors.numpy.save_file(part, Path(folder) / f"part{i}.safetensors")


LOADED: Final[dict[str, tuple[str, Callable[[int], Any], int, P, float]]] = {
    "small": ("20,000 float32 arrays of 4 kB", lambda _: random((32, 32)), 20_000, BOTH, 1.1),
    "forms": (
        "20,000 float32 arrays of 200 shapes, 28 kB each",
        lambda i: random((8 + i % 200, 64)), 20_000, P(None, "tp"), 1.1,
    ),
    "again": ("a later load of 0.27 GB", lambda _: random((2048, 1024)), 32, BOTH, 1.0),
    "turned": (
        "0.27 GB of bfloat16, all transposed",
        lambda _: random((2048, 2048), ml_dtypes.bfloat16), 32, BOTH, 1.0,
    ),
}  # fmt: skip


def loaded(name: str, folder: str) -> Case:
    """Return a case of arrays that all have a spec."""
    what, array, count, spec, bar = LOADED[name]
    is_turned = name == "turned"
    write(folder, {f"layers.{i}.w": array(i) for i in range(count)}, 4)
    mesh = mesh_of()

    def plain() -> Any:
        found = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            found |= safetensors.numpy.load_file(file)
        if is_turned:
            found = {name: array.T for name, array in found.items()}
        sharding = NamedSharding(mesh, spec)
        return jax.block_until_ready(jax.device_put(found, dict.fromkeys(found, sharding)))

    ours = partial(sr.load, folder, spec, mesh, renames=[TURN] if is_turned else ())
    return Case(f"{what} / load_file{', .T' * is_turned} and one device_put", ours, plain, bar)


def names(folder: str) -> Case:
    """Return a case of DeepSeek-V3's names, at small sizes; its experts are stacked."""
    code, scale = random((16, 16), ml_dtypes.float8_e4m3fn), np.full((1, 1), 0.5, "float32")
    arrays: dict[str, Any] = {"model.embed_tokens.weight": random((64, 16), ml_dtypes.bfloat16)}
    for layer, expert, part in product(range(3, 61), range(256), ("gate", "up", "down")):
        name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        arrays |= {name: code, f"{name}_scale_inv": scale}
    write(folder, arrays, 1)
    rules = [("experts", ("fsdp", None, "tp")), ("", ())]
    ours = partial(sr.load, folder, rules, mesh_of(), renames=[STACK])
    return Case("89,089 tensors of DeepSeek-V3's names, experts stacked", ours, None, 10.0)


def columns(folder: str) -> Case:
    """Return a case of columns that are cut over processes."""
    done = Path(folder) / "done"
    if jax.process_index() == 0:
        values = random((2048, 2048))
        write(folder, {f"layers.{i}.w": values + i for i in range(32)}, 2)
        done.touch()
    while not done.exists():
        time.sleep(0.1)
    sharding = NamedSharding(mesh_of("tp", "fsdp"), BOTH)

    def plain() -> Any:
        arrays = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            data = np.memmap(file, np.uint8, "r")
            start = 8 + int.from_bytes(bytes(data[:8]), "little")
            for name, entry in json.loads(bytes(data[8:start])).items():
                begin, end = (start + offset for offset in entry["data_offsets"])
                mapped = data[begin:end].view("float32").reshape(entry["shape"])
                cut = mapped.__getitem__
                arrays[name] = jax.make_array_from_callback(mapped.shape, sharding, cut)
        return jax.block_until_ready(arrays)

    what = "columns over 2 processes, 0.5 GB / numpy.memmap slices"
    return Case(what, partial(sr.load, folder, sharding), plain, 1.2)


def resharded(_: str) -> Case:
    """Return a case of a live tree that goes to other cuts."""
    here, there = (NamedSharding(mesh_of(), spec) for spec in (BOTH, P("tp", "fsdp")))
    values = jax.block_until_ready(jax.device_put(list(random((32, 2048, 1024))), here))
    tree = {f"w{i}": value for i, value in enumerate(values)}

    def plain() -> Any:
        return jax.block_until_ready(jax.device_put(tree, dict.fromkeys(tree, there)))

    plain()  # the first of either way leaves the whole values with the arrays, which are JAX's own
    ours = partial(sr.reshard, tree, there)
    what = "0.27 GB to other cuts / device_put"
    return Case(what, lambda: jax.block_until_ready(ours()), plain, 1.0)


def written(folder: str) -> Case:
    """Return a case of saved arrays, on the disk before a call returns, in both ways."""
    values = jax.device_put(list(random((32, 512, 1024))), NamedSharding(mesh_of(), BOTH))
    target = Path(folder) / "saved"

    def copied() -> Any:  # an array keeps what numpy has of it
        shutil.rmtree(target, ignore_errors=True)
        return {f"w{i}": jax.block_until_ready(jnp.copy(value)) for i, value in enumerate(values)}

    def read() -> Any:
        return {k: v for f in target.glob("*rs") for k, v in safetensors.numpy.load_file(f).items()}

    def ours() -> Any:
        sr.save(copied(), target, shard_bytes=1 << 25)
        return read

    def plain() -> Any:
        arrays = list(copied().items())
        target.mkdir()
        for i in range(0, 32, 16):
            part = {name: np.asarray(array) for name, array in arrays[i : i + 16]}
            safetensors.numpy.save_file(part, target / f"{i}.safetensors")
            with open(target / f"{i}.safetensors", "rb") as file:
                os.fsync(file.fileno())
        return read

    return Case("67 MB saved / safetensors.save_file and fsync", ours, plain, 1.0)


CASES: Final[dict[str, Callable[[str], Case]]] = {
    **{name: partial(loaded, name) for name in LOADED},
    "names": names, "columns": columns, "resharded": resharded, "written": written,
}  # fmt: skip


def _memory() -> int:
    """Count the bytes of this process that are not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kinds = ("RssAnon", "RssShmem")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(kinds))


def _peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return (the result, the most bytes during the call beyond those before)."""
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier call has freed would count as before
    before, peak, done = _memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], _memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = call()
    done.set()
    watcher.join()
    return (result() if callable(result) else result), max(peak[0], _memory()) - before


def _parts(arrays: Any) -> list[Any]:
    """Return what is here of arrays."""
    in_order = [array for _, array in sorted(arrays.items())]
    shards = [getattr(array, "addressable_shards", ()) for array in in_order]
    return [np.asarray(shard.data) for own in shards for shard in own] or in_order


def _measured(name: str, folder: str) -> Iterator[Row]:
    what, ours, plain, bar = CASES[name](folder)
    result, peak = _peak(ours)
    if plain is None:  # there is no plain way
        used = time.process_time()
        ours()
        yield Row(f"{what}: processors", time.process_time() - used, "s", bar)
        return
    expected, plain_peak = _peak(plain)
    size = 0
    for a, b in zip(_parts(result), _parts(expected), strict=True):
        if a.dtype != b.dtype or a.tobytes() != b.tobytes():
            raise AssertionError(f"{name}: the arrays differ")
        size += a.nbytes
    del result, expected
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for call, column in zip((ours, plain), taken, strict=True):
            used = time.process_time()
            made = call()
            column.append(time.process_time() - used)
            del made
    ratio = median(a / b for a, b in zip(*taken, strict=True))
    note = "{:.2f} / {:.2f} s of processors".format(*map(median, taken))
    yield Row(f"{what}: processors", ratio, "x", bar, note)
    if name != "written":
        peak_bar = 2.5 if name in ("small", "forms") else 1.05
        note = f"{plain_peak / size:.2f} x the plain way"
        yield Row(f"{what}: peak", peak / size, "x of the arrays", peak_bar, note)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        if joint := sys.argv[4:]:
            jax.distributed.initialize(f"localhost:{joint[0]}", 2, int(joint[1]))
        print(json.dumps(list(_measured(*sys.argv[2:4]))))
    else:
        for row in rows(*sys.argv[1:]):
            print(f"{row.name:80} {row.measured:6.2f} {row.unit} {row.verdict} ({row.note})")
