"""`Machine`: how long the devices of a mesh send to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from math import log2, prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from shardrules._base.hardware import Hardware
    from shardrules._program.topologies.topology import Links, Topology

CollectiveKind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"
]


class Machine:
    """Hardware, and the networks under the axes of a mesh.

    Without a topology devices stand side by side along the last axis, as `jax.make_mesh` has them,
    so that the last axes are those inside a slice or node, as far as its devices go.
    """

    def __init__(
        self, hardware: Hardware, sizes: Mapping[str, int], topology: Topology | None = None
    ) -> None:
        self.hardware, self.sizes = hardware, dict(sizes)
        self._links: Callable[[Sequence[str]], Links] | None = None
        if topology is not None:
            self._links = cache(partial(topology._links, topology.mesh(sizes)))
        self._inside: dict[str, int] = {}
        remaining = hardware.link_devices
        for axis in reversed(list(sizes)):
            most = min(remaining, sizes[axis])
            self._inside[axis] = next(n for n in range(most, 0, -1) if sizes[axis] % n == 0)
            remaining //= self._inside[axis]
        self._dimensions = _dimensions(self._inside, hardware.torus_dimensions)

    def sent(self, kind: CollectiveKind, axes: Sequence[str], payload: int) -> float:
        """Return the bytes that a device sends by rings, as the compiler writes a collective."""
        if kind == "collective-permute":
            return payload
        rounds = 2 if kind == "all-reduce" else 1
        if self._links is not None and kind in self._links(axes).summed:
            rounds *= 2
        devices = prod(self.sizes[axis] for axis in axes)
        return payload * rounds * (devices - 1) / devices

    def seconds(self, kind: str, axes: Sequence[str], size: float) -> float:
        """Return how long it takes to send so many bytes."""
        if self._links is not None:
            return size / self._links(axes).rate
        devices = prod(self.sizes[axis] for axis in axes)
        inside = prod(self._inside[axis] for axis in axes)
        outside = devices // inside
        # First between slices, each device with its part; then inside of them.
        share = (outside - 1) / (devices - 1)
        if kind == "all-to-all":
            share *= inside
        return max(
            size * share / self.hardware.dcn_bytes_per_second,
            size * (1 - share) / self._link_rate(axes) if inside > 1 else 0.0,
        )

    def _link_rate(self, axes: Iterable[str]) -> float:
        dimensions = sum(self._dimensions[axis] for axis in axes)
        share = min(1.0, dimensions / self.hardware.torus_dimensions)
        return self.hardware.link_bytes_per_second * share


def _dimensions(inside: Mapping[str, int], torus: int) -> dict[str, int]:
    """Return {mesh axis: dimensions of the torus that it lies along}: one, the largest the rest."""
    sizes = {axis: int(size > 1) for axis, size in inside.items()}
    remaining = torus - sum(sizes.values())
    for axis in sorted(inside, key=lambda axis: -inside[axis]):
        next_size = max(0, min(remaining, int(log2(inside[axis])) - 1))
        sizes[axis] += next_size
        remaining -= next_size
    return sizes
