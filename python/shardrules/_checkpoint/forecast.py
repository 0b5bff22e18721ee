"""Forecasts of what `load` reads: bytes of each process, without devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardrules._base.arguments import as_tuple, check_items
from shardrules._base.dtypes import bits_of, given_float, numpy_name
from shardrules._base.specs import entries_of, entry_axes
from shardrules._base.text import bytes_shown, counted, mesh_shown, printable_lines
from shardrules._checkpoint.boxes import Box
from shardrules._checkpoint.problems import Problems
from shardrules._checkpoint.ranges import MOST_SHARE, STAGED, calls_of
from shardrules._checkpoint.reading import bound_of
from shardrules._checkpoint.renames import A_RENAME, Rename
from shardrules._checkpoint.targets import Target, whole
from shardrules._checkpoint.trees import matched
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.files.models import read_arrays

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.plan import Plan
    from shardrules._plan.table import Columns

Cuts = tuple[tuple[str, ...], ...]
"""Per dimension, the mesh axes that cut it."""


class Forecast(NamedTuple):
    """Bytes that each process of a job reads of a checkpoint, each of them once."""

    mesh: dict[str, int]
    arrays: int
    bytes: int
    """Bytes of the checkpoint."""
    read: tuple[int, ...]
    """Per process, the bytes that it reads."""
    device_bytes: int
    """Bytes on the device that holds most."""
    largest: int
    """Bytes of the largest part on one device: the least that may be in flight."""
    in_flight: int
    """Maximum bytes of the host's memory for what is on its way."""
    bandwidth: int
    """Bytes that a process reads in a second."""
    reads: int = 0
    """Calls of the system by which the process that reads most does so, about."""

    @property
    def seconds(self) -> float:
        """Return the time of the process that reads most."""
        return max(self.read) / self.bandwidth

    def __str__(self) -> str:
        most, least = max(self.read), min(self.read)
        share = f"{most / self.bytes:.1%} of the checkpoint" if self.bytes else "nothing"
        each = (
            bytes_shown(most) if most == least else f"{bytes_shown(least)} to {bytes_shown(most)}"
        )
        processes, devices = len(self.read), prod(self.mesh.values())
        return printable_lines(
            [
                f"{counted(self.arrays, 'array')}, {bytes_shown(self.bytes)}, on "
                f"{mesh_shown(self.mesh)} ({counted(devices, 'device')}, "
                f"{counted(processes, 'process')})",
                f"each process reads    {each} ({share}); all together "
                f"{bytes_shown(sum(self.read))}",
                f"the one that reads most needs about {counted(self.reads, 'read')} of "
                f"{bytes_shown(most // max(1, self.reads))}",
                f"each device holds     {bytes_shown(self.device_bytes)} at most",
                f"in flight             {bytes_shown(self.in_flight)} at most; the largest part on "
                f"one device is {bytes_shown(self.largest)}",
                f"reading takes         {self.seconds:,.1f} s at {bytes_shown(self.bandwidth)} per "
                "second and process",
            ]
        )


def forecast(
    columns: Columns,
    *,
    processes: int,
    in_flight: int | None,
    bandwidth: int,
    targets: Mapping[str, tuple[Target, str]] | None = None,
) -> Forecast:
    """Forecast what loading the checkpoint of a plan would read.

    Args:
        columns: The plan. Devices are shared out among the processes in the mesh's order.
        processes: Number of processes, which divides that of the devices.
        in_flight: Maximum bytes in flight. Default: that of `load`.
        bandwidth: Bytes that a process reads in a second.
        targets: By path what an array is made of, and the dtype in the files. Default: of the array
            of that name.

    Raises:
        ValueError: The processes do not divide the devices, an array is not placed, or its part on
            one device is larger than what may be in flight.
    """
    devices = columns.devices
    if devices % processes:
        raise ValueError(
            f"--processes is {processes:,}, and the mesh has {counted(devices, 'device')}: give a "
            "number that divides it"
        )
    read = np.zeros(processes, object)
    distinct: dict[tuple[tuple[str, ...], ...], npt.NDArray[np.int64]] = {}
    first = {int(kind): int(leaf) for leaf, kind in reversed([*enumerate(columns.kind_of)])}
    sources: list[tuple[Target, str, Cuts, int]] = []
    stored_bytes = 0
    for number, (kind, count) in enumerate(
        zip(columns.kinds, columns.counts.tolist(), strict=True)
    ):
        if kind.shape is None:
            continue
        if kind.spec is None:
            raise ValueError(f"not all arrays are placed: {kind.message}; see shardrules check")
        cuts = tuple(
            tuple(axis for axis in entry_axes(entry) if columns.axis_sizes.get(axis, 1) > 1)
            for entry in entries_of(kind.spec)
        )
        if cuts not in distinct:
            distinct[cuts] = _device_boxes(cuts, columns.axis_sizes, processes)
        path = columns.paths[first[number]]
        own = numpy_name(str(kind.dtype))
        target, dtype = (targets or {}).get(path) or (whole(path, ArraySpec(kind.shape, own)), own)
        bits, own_bits = bits_of(dtype), bits_of(own)
        read += distinct[cuts].astype(object) * (count * kind.device_bytes * bits // own_bits)
        stored_bytes += count * prod(kind.shape) * bits // 8
        sources.append((target, dtype, cuts, count))
    largest = max((kind.device_bytes for kind in columns.kinds), default=0)
    needs = f"the largest part on one device has {bytes_shown(largest)}"
    most = bound_of(in_flight, largest, needs, "--in-flight")
    return Forecast(
        dict(columns.axis_sizes),
        len(columns.paths),
        stored_bytes,
        tuple(map(int, read)),
        sum(
            kind.device_bytes * int(n)
            for kind, n in zip(columns.kinds, columns.counts, strict=True)
        ),
        largest,
        min(most, max(map(int, read))),
        bandwidth,
        _count_reads(
            sources, columns.axis_sizes, processes, int(np.argmax(read.astype(np.float64)))
        ),
    )


def _device_boxes(
    cuts: tuple[tuple[str, ...], ...], axis_sizes: Mapping[str, int], processes: int
) -> npt.NDArray[np.int64]:
    """Count, per process, the different boxes that its devices hold of an array cut like this."""
    sizes = tuple(axis_sizes.values())
    places = dict(zip(axis_sizes, np.indices(sizes).reshape(len(sizes), -1), strict=True))
    box = np.zeros(prod(sizes), np.int64)
    for axes in cuts:
        for axis in axes:
            box = box * axis_sizes[axis] + places[axis]
    of_processes = np.sort(box.reshape(processes, -1), axis=1)
    changes = np.diff(of_processes, axis=1) != 0
    counts: npt.NDArray[np.int64] = 1 + changes.sum(axis=1, dtype=np.int64)
    return counts


def _count_reads(
    sources: Sequence[tuple[Target, str, Cuts, int]],
    axis_sizes: Mapping[str, int],
    processes: int,
    process: int,
) -> int:
    """Count about how many calls of the system a process reads by: one array of each kind."""
    sizes = tuple(axis_sizes.values())
    devices = np.indices(sizes).reshape(len(sizes), -1)
    devices = devices.reshape(len(sizes), processes, -1)[:, process]
    places = dict(zip(axis_sizes, devices, strict=True))
    return sum(
        count * _count_calls(target, dtype, _boxes(target.shape, cuts, axis_sizes, places))
        for target, dtype, cuts, count in sources
    )


def _count_calls(target: Target, dtype: str, boxes: Sequence[Box]) -> int:
    if bits_of(dtype) < 8:
        return len(target.parts)
    of_source: dict[str, set[Box]] = defaultdict(set)
    most: dict[str, int] = defaultdict(lambda: MOST_SHARE)
    shapes: dict[str, tuple[int, ...]] = {}
    for part in target.parts:
        shape = (
            at + size for at, size in zip(part.source_at, part.sized.source_shape, strict=True)
        )
        shapes[part.source] = tuple(map(max, shape, shapes.get(part.source, part.source_at)))
        if part.sized.form.order != tuple(sorted(part.sized.form.order)):
            most[part.source] = STAGED
        of_source[part.source].update(piece.source for box in boxes for piece in part.pieces(box))
    return sum(
        calls_of(ArraySpec(shapes[name], dtype), each, most[name])
        for name, each in of_source.items()
    )


def _boxes(
    shape: tuple[int, ...],
    cuts: Cuts,
    axis_sizes: Mapping[str, int],
    places: Mapping[str, npt.NDArray[np.int64]],
) -> list[Box]:
    """Return the distinct boxes of devices in these places of the mesh."""
    devices = len(next(iter(places.values()), [0]))
    spans = []
    rest: Cuts = ((),) * (len(shape) - len(cuts))
    for size, axes in zip(shape, (*cuts, *rest), strict=True):
        index, parts = np.zeros(devices, np.int64), 1
        for axis in axes:
            index, parts = index * axis_sizes[axis] + places[axis], parts * axis_sizes[axis]
        part = -(-size // parts)
        spans.append([(min(i * part, size), min(i * part + part, size)) for i in index.tolist()])
    return sorted(set(zip(*spans, strict=True))) if spans else [()]


def renamed(
    source: str, renames: Iterable[Rename], dtype: str | None
) -> tuple[Any, dict[str, tuple[Target, str]]]:
    """Return (the tree of a renamed checkpoint, by path what an array is made of and its dtype)."""
    followed = check_items("renames", as_tuple("renames", renames, "Renames"), Rename, A_RENAME)
    arrays = read_arrays(source)
    problems = Problems(arrays.name)
    name = None if dtype is None else given_float("dtype", dtype)
    abstract, targets = matched(arrays.leaves, None, followed, name, problems)
    return abstract, {
        path: (target, arrays.leaves[next(iter(target.sources))].dtype)
        for path, target in targets
        if target is not None and target.sources
    }


def timed(source: str, plan: Plan, renames: Iterable[Rename], in_flight: int | None) -> str:
    """Load onto this process's devices; returns a line on what that took."""
    import jax
    from jax.sharding import Mesh

    from shardrules._checkpoint.load import load

    devices, sizes = jax.devices(), plan.axis_sizes
    if prod(sizes.values()) != len(devices):
        raise ValueError(
            f"--mesh has {counted(prod(sizes.values()), 'device')}, and here "
            f"{'is' if len(devices) == 1 else 'are'} {len(devices):,}; --dry-run needs none"
        )
    mesh = Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))
    start = perf_counter()
    loaded = load(source, plan.on_mesh(mesh), renames=renames, max_bytes_in_flight=in_flight)
    jax.block_until_ready(loaded)
    seconds = perf_counter() - start
    arrays = jax.tree_util.tree_leaves(loaded)
    size = sum(array.nbytes for array in arrays)
    return (
        f"{counted(len(arrays), 'array')}, {bytes_shown(size)}, in {seconds:.2f} s: "
        f"{bytes_shown(int(size / seconds))} per second, onto {mesh_shown(sizes)}"
    )
