"""`python -m benchmarks.checkpoints [CASE ...]`: load, reshard and save beside the plain way.

Each case has a process of its own, and files in the page cache. Both results are compared first,
then the calls alternate, short ones several times a round; a ratio is the median of the rounds'
ratios, in seconds of processors.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple
from unittest.mock import patch

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
    bar: float
    ours: Callable[[], Any]
    plain: Callable[[], Any] | None
    calls: int = 1
    """In a round: of what takes less than a tenth of a second, more would be noise."""


def rows(*names: str) -> Iterator[Row]:
    """Yield the rows of the cases with these names, or of all."""
    for name in names or CASES:
        processes = 2 if name == "columns" else 1
        flags = f"--xla_force_host_platform_device_count={8 // processes**2}"
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}" if processes > 1 else ""
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.dict(os.environ, {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}),
            ProcessPoolExecutor(processes, get_context("spawn")) as pool,
        ):
            measure = partial(measured, name, folder, address)
            of_first, *_ = pool.map(measure, range(processes))
            yield from of_first


def placed(spec: P, *axes: str) -> NamedSharding:
    """Return the sharding on a mesh of all devices, the second axis of two."""
    devices = np.array(jax.devices()).reshape(-1, 2)
    return NamedSharding(Mesh(devices, axes or ("fsdp", "tp")), spec)


def random(shape: tuple[int, ...], dtype: Any = "float32") -> Any:
    """Return an array of any finite numbers."""
    return np.random.default_rng(0).normal(size=shape).astype("float32").astype(dtype)


def write(folder: str, arrays: dict[str, Any], files: int) -> None:
    """Write the arrays into some files of about equal counts."""
    for i in range(files):
        part = {name: arrays[name] for name in [*arrays][i::files]}
        safetensors.numpy.save_file(part, Path(folder) / f"part{i}.safetensors")


def read(folder: str | Path) -> dict[str, Any]:
    """Return the arrays of all files."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return {k: v for file in files for k, v in safetensors.numpy.load_file(file).items()}


LOADED: Final[dict[str, tuple[str, float, int, int, P, Callable[[int], Any]]]] = {
    "small": ("20,000 float32 arrays of 4 kB", 1.1, 1, 20_000, BOTH, lambda _: random((32, 32))),
    "forms": (
        "20,000 float32 arrays of 200 shapes, 28 kB each", 1.1, 1, 20_000, P(None, "tp"),
        lambda i: random((8 + i % 200, 64)),
    ),
    "again": ("a later load of 0.27 GB", 1.0, 8, 32, BOTH, lambda _: random((2048, 1024))),
    "turned": (
        "0.27 GB of bfloat16, all transposed", 1.0, 8, 32, BOTH,
        lambda _: random((2048, 2048), ml_dtypes.bfloat16),
    ),
}  # fmt: skip


def loaded(name: str, folder: str) -> Case:
    """Return a case of arrays that all have a spec."""
    what, bar, calls, count, spec, array = LOADED[name]
    is_turned = name == "turned"
    write(folder, {f"layers.{i}.w": array(i) for i in range(count)}, 4)
    sharding = placed(spec)

    def plain() -> Any:
        arrays = {name: array.T if is_turned else array for name, array in read(folder).items()}
        return jax.block_until_ready(jax.device_put(arrays, dict.fromkeys(arrays, sharding)))

    ours = partial(sr.load, folder, sharding, renames=[TURN] if is_turned else ())
    text = f"{what} / load_file{', .T' * is_turned} and one device_put"
    return Case(text, bar, ours, plain, calls)


def names(folder: str) -> Case:
    """Return a case of DeepSeek-V3's names, at small sizes; its experts are stacked."""
    code, scale = random((16, 16), ml_dtypes.float8_e4m3fn), np.full((1, 1), 0.5, "float32")
    arrays: dict[str, Any] = {"model.embed_tokens.weight": random((64, 16), ml_dtypes.bfloat16)}
    for layer, expert, part in product(range(3, 61), range(256), ("gate", "up", "down")):
        name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        arrays |= {name: code, f"{name}_scale_inv": scale}
    write(folder, arrays, 1)
    rules = [("experts", ("fsdp", None, "tp")), ("", ())]
    ours = partial(sr.load, folder, rules, placed(P()).mesh, renames=[STACK])
    return Case("89,089 tensors of DeepSeek-V3's names, experts stacked", 10.0, ours, None)


def columns(folder: str) -> Case:
    """Return a case of columns that are cut over processes, the first of which writes the files."""
    mapped, done = Path(folder) / "all.npy", Path(folder) / "done"
    if jax.process_index() == 0:
        values = random((2048, 2048))
        arrays = {f"layers.{i}.w": values + i for i in range(32)}
        write(folder, arrays, 2)
        np.save(mapped, [*arrays.values()])
        done.touch()
    while not done.exists():
        time.sleep(0.1)
    sharding = placed(BOTH, "tp", "fsdp")

    def plain() -> Any:
        cut = jax.make_array_from_callback
        arrays = {
            f"layers.{i}.w": cut(values.shape, sharding, values.__getitem__)
            for i, values in enumerate(np.load(mapped, mmap_mode="r"))
        }
        return jax.block_until_ready(arrays)

    what = "columns over 2 processes, 0.5 GB / numpy.memmap slices"
    return Case(what, 1.2, partial(sr.load, folder, sharding), plain, 8)


def resharded(_: str) -> Case:
    """Return a case of a live tree that goes to other cuts."""
    here, there = placed(BOTH), placed(P("tp", "fsdp"))
    values = jax.block_until_ready(jax.device_put(list(random((32, 2048, 1024))), here))
    tree = {f"w{i}": value for i, value in enumerate(values)}

    def plain() -> Any:
        return jax.block_until_ready(jax.device_put(tree, dict.fromkeys(tree, there)))

    plain()  # the first of either way leaves the whole values with the arrays, which are JAX's own
    ours = partial(sr.reshard, tree, there)
    what = "0.27 GB to other cuts / device_put"
    return Case(what, 1.0, lambda: jax.block_until_ready(ours()), plain, 16)


def written(folder: str) -> Case:
    """Return a case of saved arrays, on the disk before a call returns, in both ways."""
    values = jax.device_put(list(random((32, 512, 1024))), placed(BOTH))
    target = Path(folder) / "saved"

    def copied() -> Any:  # an array keeps what numpy has of it
        shutil.rmtree(target, ignore_errors=True)
        return {f"w{i}": jax.block_until_ready(jnp.copy(value)) for i, value in enumerate(values)}

    def ours() -> Any:
        sr.save(copied(), target)
        return partial(read, target)

    def plain() -> Any:
        arrays = {name: np.asarray(array) for name, array in copied().items()}
        target.mkdir()
        safetensors.numpy.save_file(arrays, target / "all.safetensors")
        with open(target / "all.safetensors", "rb") as file:
            os.fsync(file.fileno())
        return partial(read, target)

    return Case("67 MB saved / safetensors.save_file and fsync", 1.0, ours, plain, 4)


CASES: Final[dict[str, Callable[[str], Case]]] = {
    **{name: partial(loaded, name) for name in LOADED},
    "names": names, "columns": columns, "resharded": resharded, "written": written,
}  # fmt: skip


def _resident(which: str) -> int:
    """Return bytes of this process, as the system has them: VmRSS now, VmHWM at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def _peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return (the result, the most bytes during the call beyond those before)."""
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier call has freed would count as before
    Path("/proc/self/clear_refs").write_text("5")  # the most is from here on
    before = _resident("VmRSS")
    result = call()
    return (result() if callable(result) else result), _resident("VmHWM") - before


def _parts(arrays: Any) -> list[Any]:
    """Return what is here of arrays."""
    in_order = [array for _, array in sorted(arrays.items())]
    shards = [getattr(array, "addressable_shards", ()) for array in in_order]
    return [np.asarray(shard.data) for own in shards for shard in own] or in_order


def _seconds(call: Callable[[], Any], calls: int) -> float:
    used = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - used) / calls


def measured(name: str, folder: str, address: str, process: int) -> list[Row]:
    """Return the rows of a case; of one with an address, this is one of two processes."""
    if address:
        jax.distributed.initialize(address, 2, process)
    what, bar, ours, plain, calls = CASES[name](folder)
    result, peak = _peak(ours)
    if plain is None:  # there is no plain way
        return [Row(f"{what}: processors", _seconds(ours, calls), "s", bar)]
    expected, plain_peak = _peak(plain)
    size = 0
    for a, b in zip(_parts(result), _parts(expected), strict=True):
        if a.dtype != b.dtype or a.tobytes() != b.tobytes():
            raise AssertionError(f"{name}: the arrays differ")
        size += a.nbytes
    del result, expected
    taken = [(_seconds(ours, calls), _seconds(plain, calls)) for _ in range(ROUNDS)]
    note = "{:.3f} / {:.3f} s of processors".format(*map(median, zip(*taken, strict=True)))
    times = Row(f"{what}: processors", median(a / b for a, b in taken), "x", bar, note)
    if name == "written":
        return [times]
    peak_bar = 2.5 if name in ("small", "forms") else 1.05
    note = f"{plain_peak / size:.2f} x the plain way"
    return [times, Row(f"{what}: peak", peak / size, "x of the arrays", peak_bar, note)]


if __name__ == "__main__":
    for row in rows(*sys.argv[1:]):
        print(f"{row.name:80} {row.measured:6.2f} {row.unit} {row.verdict} ({row.note})")
