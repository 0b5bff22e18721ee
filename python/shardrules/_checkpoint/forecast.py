"""Forecasts of what `load` reads: bytes of each process, without devices."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardrules._checkpoint.reading import bound_of
from shardrules._specs import entries_of, entry_axes
from shardrules._text import bytes_shown, counted, mesh_shown, printable_lines

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.table import Columns


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
                f"each device holds     {bytes_shown(self.device_bytes)} at most",
                f"in flight             {bytes_shown(self.in_flight)} at most; the largest part on "
                f"one device is {bytes_shown(self.largest)}",
                f"reading takes         {self.seconds:,.1f} s at {bytes_shown(self.bandwidth)} per "
                "second and process",
            ]
        )


def forecast(
    columns: Columns, *, processes: int, in_flight: int | None, bandwidth: int
) -> Forecast:
    """Forecast what loading the checkpoint of a plan would read.

    Args:
        columns: The plan. Devices are shared out among the processes in the mesh's order.
        processes: Number of processes, which divides that of the devices.
        in_flight: Maximum bytes in flight. Default: that of `load`.
        bandwidth: Bytes that a process reads in a second.

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
    for kind, count in zip(columns.kinds, columns.counts.tolist(), strict=True):
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
        read += distinct[cuts].astype(object) * (count * kind.device_bytes)
    largest = max((kind.device_bytes for kind in columns.kinds), default=0)
    needs = f"the largest part on one device has {bytes_shown(largest)}"
    most = bound_of(in_flight, largest, needs, "--in-flight")
    return Forecast(
        dict(columns.axis_sizes),
        len(columns.paths),
        columns.total_bytes,
        tuple(map(int, read)),
        sum(
            kind.device_bytes * int(n)
            for kind, n in zip(columns.kinds, columns.counts, strict=True)
        ),
        largest,
        min(most, max(map(int, read))),
        bandwidth,
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
