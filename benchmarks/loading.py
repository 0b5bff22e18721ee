"""Cases on checkpoints: `load` beside safetensors, orbax and numpy, each in a process of its own.

A Llama of 4 GB in 9 files, or of the megabytes that the command line says, on 8 host devices; files
are in the page cache. Each process checks its arrays against the files. Peaks are of memory that is
not a file's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np
import safetensors.flax
import safetensors.numpy
from jax.sharding import Mesh

import shardrules as sr
from benchmarks.harness import Row

MEGABYTES: Final = 4096
RUNS: Final = 3
RULES: Final = [
    ("norm", ()),
    (r"(o|down)_proj", ("tp", "fsdp")),
    ("embed|lm_head", ("fsdp", "tp")),
    ("", ("fsdp", "tp")),
]
IN_FLIGHT: Final = 256 << 20


def rows(megabytes: int = MEGABYTES) -> Iterator[Row]:
    """Yield all rows: time and peak of each, and the ratios to ours."""
    with tempfile.TemporaryDirectory() as folder:
        size = _write(Path(folder), megabytes)
        found = _measured(folder)
    ours = found["shardrules"]
    for name, (seconds, peak, used) in found.items():
        note = f"{size / 1e9:.2f} GB in {seconds:.2f} s; {used:.2f} s of processors"
        bar = 1.0 if name != "shardrules" else None
        yield Row(f"load, to {name}", ours[0] / seconds, "x", bar, note)
        unit = "x of the shards and what may be in flight"
        allowed = size + IN_FLIGHT
        bar = 1.2 if name == "shardrules" else None
        yield Row(f"peak memory, {name}", peak / allowed, unit, bar, f"{peak / 1e9:.2f} GB")


def _write(folder: Path, megabytes: int) -> int:
    """Write the checkpoint; returns its bytes."""
    layers = 8
    # 12 * dim^2 elements of 2 bytes in a layer, and 2 * 4 * dim^2 beside them.
    dim = int((megabytes * 2**20 / 2 / (12 * layers + 8)) ** 0.5) // 64 * 64
    rng, total = np.random.default_rng(0), 0

    def save(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        nonlocal total
        arrays = {}
        for key, shape in shapes.items():
            values = rng.integers(0, 1 << 15, shape, dtype=np.uint16)
            arrays[key] = values.view(ml_dtypes.bfloat16)
            total += values.nbytes
        safetensors.numpy.save_file(arrays, folder / name)

    save(
        "model-0.safetensors",
        {f"{name}.weight": (4 * dim, dim) for name in ("model.embed_tokens", "lm_head")},
    )
    for i in range(layers):
        at = f"model.layers.{i}."
        square = {f"{at}self_attn.{n}_proj.weight": (dim, dim) for n in "qkvo"}
        wide = {f"{at}mlp.{n}_proj.weight": (8 * dim // 3 // 64 * 64, dim) for n in ("gate", "up")}
        down = {f"{at}mlp.down_proj.weight": (dim, 8 * dim // 3 // 64 * 64)}
        norms = {f"{at}input_layernorm.weight": (dim,)}
        save(f"model-{i + 1}.safetensors", {**square, **wide, **down, **norms})
    return total


def _measured(folder: str) -> dict[str, tuple[float, int, float]]:
    """{loader: median seconds, bytes of the peak, and seconds of processors}, in turns."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    found: dict[str, list[list[float]]] = {name: [] for name in LOADERS}
    for _ in range(RUNS):
        for name, runs in found.items():
            command = [sys.executable, "-m", "benchmarks.loading", "--run", name, folder]
            out = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            if out.returncode:
                raise RuntimeError(f"{name}: {out.stderr[-2000:]}")
            runs.append(json.loads(out.stdout.splitlines()[-1]))
    return {
        name: (median(run[0] for run in runs), int(median(run[1] for run in runs)),
               median(run[2] for run in runs))
        for name, runs in found.items()
    }  # fmt: skip


def _shardrules(folder: str, mesh: Any) -> Any:
    return sr.load(folder, RULES, mesh, max_bytes_in_flight=IN_FLIGHT)


def _safetensors(folder: str, mesh: Any) -> Any:
    arrays = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        arrays |= safetensors.flax.load_file(file)
    return jax.device_put(arrays, _shardings(folder, mesh))


def _orbax(folder: str, mesh: Any) -> Any:
    import orbax.checkpoint.experimental.v1 as ocp  # noqa: PLC0415 (not in an old orbax)

    target = sr.plan(sr.read_model(folder), RULES, mesh).abstract()
    options = ocp.options.CheckpointLayout.SAFETENSORS
    with ocp.Context(checkpoint_layout=options):
        return ocp.load(folder, target)


def _memmap(folder: str, mesh: Any) -> Any:
    shardings = _shardings(folder, mesh)
    return {
        name: jax.make_array_from_callback(mapped.shape, shardings[name], mapped.__getitem__)
        for name, mapped in _mapped(folder)
    }


def _shardings(folder: str, mesh: Any) -> Any:
    return sr.named_shardings(sr.read_model(folder), RULES, mesh)


def _mapped(folder: str) -> Iterator[tuple[str, Any]]:
    """(name, its values in the file) of each array."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        start = 8 + int.from_bytes(bytes(data[:8]), "little")
        for name, entry in json.loads(bytes(data[8:start])).items():
            if name != "__metadata__":
                begin, end = (start + offset for offset in entry["data_offsets"])
                yield name, data[begin:end].view(ml_dtypes.bfloat16).reshape(entry["shape"])


LOADERS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "shardrules": _shardrules,
    "safetensors.flax.load_file and device_put": _safetensors,
    "orbax (v1, safetensors)": _orbax,
    "numpy.memmap": _memmap,
}


def _memory() -> int:
    """Bytes of this process that are not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(
        int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))
    )


def _run(name: str, folder: str) -> None:
    """Print [seconds, peak bytes beyond those before, seconds of processors]."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
    load = LOADERS[name]
    with tempfile.TemporaryDirectory() as small:  # imports and first calls are not counted
        _write(Path(small), 1)
        jax.block_until_ready(load(small, mesh))
    before, peak, done = _memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], _memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, used = perf_counter(), process_time()
    loaded = jax.block_until_ready(load(folder, mesh))
    seconds, used = perf_counter() - start, process_time() - used
    done.set()
    watcher.join()
    for key, expected in _mapped(folder):
        array = loaded[key]
        assert array.size == prod(expected.shape)
        for shard in array.addressable_shards:
            own = np.asarray(shard.data).view(np.uint16)
            if not np.array_equal(own, expected[shard.index].view(np.uint16)):
                raise AssertionError(f"{name}: {key} differs")
    print(json.dumps([seconds, peak[0] - before, used]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _run(*sys.argv[2:])
    else:
        for row in rows(*map(int, sys.argv[1:])):
            print(f"{row.name:60} {row.measured:6.2f} {row.unit} {row.verdict} ({row.note})")
