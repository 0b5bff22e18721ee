"""`Machine`: hardware, and how well a step uses it; how long it sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from math import log2, prod
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._base.hardware import Hardware, as_hardware
from shardrules._program.solve.transmissions import Transmission

if TYPE_CHECKING:
    from shardrules._program.topologies.topology import Links, Topology

OVERLAPPED: Final = ("params", "gradients")
"""What is sent while devices compute: compilers prefetch it, but products wait for activations."""


class Network:
    """The networks under the axes of a mesh.

    Devices stand side by side along the last axis, as `jax.make_mesh` has them, so that the last
    axes are those inside a slice or node, as far as its devices go.
    """

    def __init__(self, machine: Machine, sizes: Mapping[str, int]) -> None:
        hardware = machine.hardware
        self._machine, self._hardware, self._sizes = machine, hardware, sizes
        self._inside: dict[str, int] = {}
        remaining = hardware.link_devices
        for axis in reversed(list(sizes)):
            most = min(remaining, sizes[axis])
            self._inside[axis] = next(n for n in range(most, 0, -1) if sizes[axis] % n == 0)
            remaining //= self._inside[axis]
        self._dimensions = _dimensions(self._inside, hardware.torus_dimensions)

    def seconds(self, row: Transmission) -> float:
        """Return how long these collectives take, one after the other."""
        return self.sending(row.collective, row.axes, self._machine.sent(row))

    def sending(self, kind: str, axes: Sequence[str], size: int) -> float:
        """Return how long it takes to send so many bytes."""
        if self._machine.links is not None:
            return size / self._machine.links(axes).rate
        devices = prod(self._sizes[axis] for axis in axes)
        inside = prod(self._inside[axis] for axis in axes)
        outside = devices // inside
        # First between slices, each device with its part; then inside of them.
        share = (outside - 1) / (devices - 1)
        if kind == "all-to-all":
            share *= inside
        return max(
            size * share / self._hardware.dcn_bytes_per_second,
            size * (1 - share) / self._link_rate(axes) if inside > 1 else 0.0,
        )

    def _link_rate(self, axes: Iterable[str]) -> float:
        hardware = self._hardware
        dimensions = sum(self._dimensions[axis] for axis in axes)
        share = min(1.0, dimensions / hardware.torus_dimensions)
        return hardware.link_bytes_per_second * share


def _dimensions(inside: Mapping[str, int], torus: int) -> dict[str, int]:
    """Return {mesh axis: dimensions of the torus that it lies along}: one, the largest the rest."""
    sizes = {axis: int(size > 1) for axis, size in inside.items()}
    remaining = torus - sum(sizes.values())
    for axis in sorted(inside, key=lambda axis: -inside[axis]):
        next_size = max(0, min(remaining, int(log2(inside[axis])) - 1))
        sizes[axis] += next_size
        remaining -= next_size
    return sizes


class Machine(NamedTuple):
    """Hardware, and how well a step uses it."""

    hardware: Hardware
    links: Callable[[Sequence[str]], Links] | None = None
    """Those over mesh axes; None if no topology says."""
    hides: float = 1.0
    """Of what could be sent while devices compute, the part that is."""

    def sent(self, row: Transmission) -> int:
        """Return the bytes that a device sends, by what the compiler makes of the collectives."""
        summed = () if self.links is None else self.links(row.axes).summed
        return row.sent * (2 if row.collective in summed else 1)

    def total(self, busy: float, meanwhile: float, alone: float) -> float:
        """Return the seconds of a step: of computing, and of sending meanwhile and alone."""
        exposed = (1 - self.hides) * min(busy, meanwhile)
        return max(busy, meanwhile) + exposed + alone

    def on_slice(self, topology: Topology, sizes: Mapping[str, int]) -> Machine:
        """Return the machine with the links that a mesh of these sizes has on a slice."""
        return self._replace(links=cache(partial(topology._links, topology.mesh(sizes))))


def machine_of(hardware: Hardware | str) -> Machine:
    """Return the machine of what a user gives: a `Hardware`, or the name of one such as "v5p"."""
    return Machine(as_hardware("hardware", hardware))


def sent_seconds(
    machine: Machine, sizes: Mapping[str, int], collectives: Iterable[Transmission]
) -> tuple[dict[tuple[str, ...], float], float]:
    """Return the seconds of collectives by their axes, and of those that nothing else overlaps."""
    network = Network(machine, sizes)
    sent: dict[tuple[str, ...], float] = defaultdict(float)
    alone = 0.0
    for row in collectives:
        seconds = network.seconds(row)
        sent[row.axes] += seconds
        alone += 0.0 if row.of in OVERLAPPED else seconds
    return dict(sent), alone
