"""Runs programs on host devices, with arguments from files: in the child of `rehearse`.

Arrays are in files one behind another; the request says what they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules._base.text import bytes_shown
from shardrules._program.jax_names import CompilerInput, run_module

Avals = Sequence[tuple[str, Sequence[int]]]
"""Dtype and shape of arrays."""


def main(folder: Path, request: dict[str, Any]) -> None:
    """Run each program with each file of arguments, and write the results.

    copies.json then says for each file where copies of a result of the last program differ.
    """
    copies: dict[str, list[Any]] = {}
    for asked in request["programs"]:
        name, sizes, specs = asked["name"], asked["mesh"], asked["specs"]
        count = prod(sizes.values())
        devices = np.array(jax.devices("cpu")[:count]).reshape(tuple(sizes.values()))
        mesh = Mesh(devices, tuple(sizes))
        module, options = ((folder / f"{name}.{end}").read_bytes() for end in ("bc", "pb"))
        loaded = run_module(
            CompilerInput(module, options, asked["overrides"], [*range(count)]), mesh
        )
        needed = loaded.bytes * count
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > free:
            raise MemoryError(f"it needs {bytes_shown(needed)}, of {bytes_shown(free)}")
        for run in asked["runs"]:
            arrays = read(folder / run, request["avals"])
            placed = [
                jax.make_array_from_callback(array.shape, _sharding(mesh, spec), array.__getitem__)
                for array, spec in zip(arrays, specs, strict=True)
            ]
            results = loaded.execute(placed)
            targets = loaded.specs or [PartitionSpec()] * len(results)
            shapes = [shape for _, shape in request["results"]]
            joined = [
                jax.make_array_from_single_device_arrays(
                    tuple(shape), NamedSharding(mesh, spec), shards
                )
                for shape, spec, shards in zip(shapes, targets, results, strict=True)
            ]
            write(folder / f"{name} of {run}", joined)
            copies[run] = [_first_unlike(array, mesh) for array in joined]
    (folder / "copies.json").write_text(json.dumps(copies), "utf-8")


def _sharding(mesh: Mesh, spec: list[Any]) -> NamedSharding:
    entries = (tuple(axes) if isinstance(axes, list) else axes for axes in spec)
    return NamedSharding(mesh, PartitionSpec(*entries))


def _first_unlike(array: jax.Array, mesh: Mesh) -> tuple[list[int], list[str]] | None:
    """Find the first element of which two copies differ, and the axes between their devices."""
    firsts: dict[str, Any] = {}
    shards: Any = array.addressable_shards
    for shard in shards:
        first = firsts.setdefault(str(shard.index), shard)
        bits = [_bits(np.asarray(copy.data)) for copy in (first, shard)]
        if (is_unlike := bits[0] != bits[1]).any():
            place = np.unravel_index(int(np.argmax(is_unlike)), shard.data.shape)
            starts = [part.start or 0 for part in shard.index]
            places = (np.argwhere(mesh.devices == copy.device)[0] for copy in (first, shard))
            axes = [axis for axis, a, b in zip(mesh.axis_names, *places, strict=True) if a != b]
            return [int(a + b) for a, b in zip(place, starts, strict=True)], axes
    return None


def _bits(values: Any) -> Any:
    return np.frombuffer(values.tobytes(), f"V{values.itemsize}")


def write(file: Path, arrays: Sequence[Any]) -> None:
    """Write arrays one behind another."""
    file.write_bytes(b"".join(np.asarray(array).tobytes() for array in arrays))


def read(file: Path, avals: Avals) -> Iterator[Any]:
    """Yield the arrays of a file."""
    data, begin = file.read_bytes(), 0
    for name, shape in avals:
        dtype: Any = jax.numpy.dtype(name)
        yield np.frombuffer(data, dtype, prod(shape), begin).reshape(shape)
        begin += prod(shape) * dtype.itemsize
