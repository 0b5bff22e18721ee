"""Runs programs on host devices, with arguments from files: in the child of `rehearse`.

Arrays are in files one behind another; its request says what they are, and its results.json what
the results are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules._base.specs import entry_axes
from shardrules._program.jax_names import CompilerInput, run_module

Avals = Sequence[tuple[str, Sequence[int]]]
"""Dtype and shape of arrays."""


def main(folder: Path, request: dict[str, Any]) -> None:
    """Run what the folder asks for: the whole program, and then the sharded one."""
    positive: list[int] | None = None
    results = []
    for asked in request["programs"]:
        program = _Program(folder, **asked)
        if program.needed > program.free:
            results = [{"needed": program.needed, "free": program.free}]
            break
        positive = program.positive() if positive is None else positive
        results.append(program.results(positive))
    (folder / "results.json").write_text(json.dumps(results), "utf-8")


class _Program:
    """A program that is compiled to be run here.

    Args:
        folder: What it reads and writes.
        name: Of its files.
        mesh: Devices along each axis.
        overrides: As `CompilerInput` has them.
        specs: Of the arguments, as JSON has them.
        avals: Of the arguments.
        random: Arguments whose sign may be chosen.
        runs: Names of the files of arguments.
    """

    def __init__(
        self, folder: Path, *, name: str, mesh: dict[str, int], overrides: list[Any],
        specs: list[Any], avals: Avals, random: list[int], runs: list[str],
    ) -> None:  # fmt: skip
        count = prod(mesh.values())
        devices = np.array(jax.devices("cpu")[:count]).reshape(tuple(mesh.values()))
        module, options = ((folder / f"{name}.{end}").read_bytes() for end in ("bc", "pb"))
        self._folder, self._name, self._mesh = folder, name, Mesh(devices, tuple(mesh))
        self._avals, self._random, self._runs = avals, random, runs
        self._shardings = [
            NamedSharding(self._mesh, PartitionSpec(*map(_entry, spec))) for spec in specs
        ]
        asked = CompilerInput(module, options, overrides, [*range(count)])
        self._loaded = run_module(asked, self._mesh)
        self.needed = self._loaded.bytes * count
        """Bytes of all devices."""
        self.free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def positive(self) -> list[int]:
        """Return the random arguments that must not be negative, or results are not finite."""
        arrays = list(read(self._folder / self._runs[0], self._avals))
        signed: set[int] = set()
        pending = [self._random]
        while pending:
            group = pending.pop()
            rest = set(self._random).difference(signed, group)
            if all(np.isfinite(whole).all() for whole, _ in self._run(arrays, rest)):
                signed.update(group)
            elif len(group) > 1:
                pending += [group[: len(group) // 2], group[len(group) // 2 :]]
        return sorted(set(self._random) - signed)

    def results(self, positive: list[int]) -> dict[str, Any]:
        """Run with each file of arguments, write the results, and say what they are."""
        pairs: list[tuple[Any, Any]] = []
        for run in self._runs:
            arrays = list(read(self._folder / run, self._avals))
            pairs = list(self._run(arrays, positive))
            write(self._folder / f"{self._name} of {run}", [whole for whole, _ in pairs])
        return {
            "outputs": [(whole.dtype.name, whole.shape) for whole, _ in pairs],
            "unlike": [unlike for _, unlike in pairs],
            "text": self._loaded.text,
            "positive": positive,
        }

    def _run(self, arrays: list[Any], positive: Collection[int]) -> Iterator[tuple[Any, Any]]:
        signed = [abs(array) if i in positive else array for i, array in enumerate(arrays)]
        placed = [
            jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
            for array, sharding in zip(signed, self._shardings, strict=True)
        ]
        shards = self._loaded.execute(placed)
        specs = self._loaded.specs or [PartitionSpec()] * len(shards)
        return (joined(*pair, self._mesh) for pair in zip(shards, specs, strict=True))


def _entry(axes: Any) -> Any:
    return tuple(axes) if isinstance(axes, list) else axes


def joined(shards: list[Any], spec: Any, mesh: Mesh) -> tuple[Any, Any]:
    """Join the shards of an array, and find the first element of which two copies differ.

    Returns:
        The array; its index there, and the axes between the two devices; or None.
    """
    local = shards[0].shape
    cuts = [prod(mesh.shape[axis] for axis in entry_axes(dim)) for dim in spec]
    shape = tuple(map(prod, zip(local, [*cuts, *[1] * (len(local) - len(cuts))], strict=True)))
    index_of = NamedSharding(mesh, spec).devices_indices_map(shape)
    whole, unlike = np.zeros(shape, shards[0].dtype), None
    copies: dict[str, tuple[Any, Any]] = {}
    for shard in shards:
        (device,) = shard.devices()
        index, values = index_of[device], np.asarray(shard)
        other, known = copies.setdefault(str(index), (device, values))
        if known is values:
            whole[index] = values
        elif unlike is None and known.tobytes() != values.tobytes():
            raw = [np.frombuffer(x.tobytes(), f"V{x.itemsize}") for x in (known, values)]
            place = np.unravel_index(int(np.argmax(raw[0] != raw[1])), local)
            starts = [part.start or 0 for part in index]
            one, two = (np.argwhere(mesh.devices == x)[0] for x in (device, other))
            axes = [axis for axis, a, b in zip(mesh.axis_names, one, two, strict=True) if a != b]
            unlike = [int(a + b) for a, b in zip(place, starts, strict=True)], axes
    return whole, unlike


def write(file: Path, arrays: Sequence[Any]) -> None:
    """Write arrays one behind another."""
    file.write_bytes(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))


def read(file: Path, avals: Avals) -> Iterator[Any]:
    """Yield the arrays of a file."""
    data, begin = file.read_bytes(), 0
    for name, shape in avals:
        dtype: Any = jax.numpy.dtype(name)
        yield np.frombuffer(data, dtype, prod(shape), begin).reshape(shape)
        begin += prod(shape) * dtype.itemsize
