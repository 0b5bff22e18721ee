"""How long collectives take on the networks under the axes of a mesh.

Costs a look at each axis of a mesh, and a few numbers for each row of traffic. Must not know what
is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log2, prod
from typing import TYPE_CHECKING

from shardrules._format import brief, mesh_shown

if TYPE_CHECKING:
    from shardrules._hardware import Hardware
    from shardrules._planning.asking.collectives.sent import Transmission

__all__ = ["Network"]


class Network:
    """The networks under the axes of a mesh.

    Devices stand side by side along the last axis, as `jax.make_mesh` has them, so that the last
    axes are those inside a slice or node, as far as its devices go. Axes over the DCN are outside.
    """

    def __init__(
        self, hardware: Hardware, sizes: Mapping[str, int], axes_over_dcn: tuple[str, ...]
    ) -> None:
        if absent := [axis for axis in axes_over_dcn if axis not in sizes]:
            raise ValueError(
                f"axes_over_dcn: the mesh {mesh_shown(sizes)} has no axis {brief(absent[0])}"
            )
        self._hardware, self._sizes = hardware, sizes
        self._inside: dict[str, int] = {}
        left = hardware.link_devices
        for axis in reversed(list(sizes)):
            most = 1 if axis in axes_over_dcn else min(left, sizes[axis])
            self._inside[axis] = next(n for n in range(most, 0, -1) if sizes[axis] % n == 0)
            left //= self._inside[axis]
        self._dimensions = _dimensions(self._inside, hardware.torus_dimensions)

    def seconds(self, row: Transmission) -> float:
        """How long these collectives take, one after the other."""
        devices = prod(self._sizes[axis] for axis in row.axes)
        inside = prod(self._inside[axis] for axis in row.axes)
        outside = devices // inside
        # First between slices, each device with its part; then inside of them.
        share = (outside - 1) / (devices - 1)
        if row.collective == "all-to-all":
            share *= inside
        return max(
            row.sent * share / self._hardware.dcn_bytes_per_second,
            row.sent * (1 - share) / self._link_rate(row.axes) if inside > 1 else 0.0,
        )

    def _link_rate(self, axes: Iterable[str]) -> float:
        hardware = self._hardware
        dimensions = sum(self._dimensions[axis] for axis in axes)
        share = min(1.0, dimensions / hardware.torus_dimensions)
        return hardware.link_bytes_per_second * share


def _dimensions(inside: Mapping[str, int], torus: int) -> dict[str, int]:
    """Per mesh axis, along how many dimensions of the torus it lies: one, the largest the rest."""
    found = {axis: int(size > 1) for axis, size in inside.items()}
    left = torus - sum(found.values())
    for axis in sorted(inside, key=lambda axis: -inside[axis]):
        more = max(0, min(left, int(log2(inside[axis])) - 1))
        found[axis] += more
        left -= more
    return found
