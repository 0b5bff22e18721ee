"""Slices of TPUs as their compiler, libtpu, sees them, without the hardware."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.hardware import Hardware
from shardrules._base.text import mesh_shown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class _Generation(NamedTuple):
    """TPUs of one kind."""

    hardware: str
    """Name in `hardware.toml`."""
    dimensions: int
    """Dimensions of the torus of chips."""
    ring: int
    """A dimension of so many chips, or in three dimensions a multiple of it, has links around."""
    devices: int
    """Devices of a chip."""
    clock: float
    """Cycles of a device in a second: the peak by the operations of its MXUs in a cycle."""
    options: Mapping[str, Any] = {}
    """Options for libtpu."""


# Names as libtpu has them. Rings: "How to scale your model", TPUs
# (https://jax-ml.github.io/scaling-book/tpus). A chip of v4 is one device, as on the hardware.
GENERATIONS: Final = {
    "v4": _Generation("v4", 3, 4, 1, 1.05e9, {"chip_config_name": "megacore"}),
    "v5e": _Generation("v5e", 2, 16, 1, 1.5e9),
    "v5p": _Generation("v5p", 3, 4, 1, 1.75e9),
    "v6e": _Generation("v6e", 2, 16, 1, 1.75e9),
    "tpu7x": _Generation("7x", 3, 4, 2, 2.2e9),
}
_LARGE: Final = 64
"""Chips of a slice over which libtpu sums whole arrays."""
# What libtpu reads from its environment: it asks no metadata server, several processes may load it,
# and its log lines go neither to the terminal nor to files.
ENVIRONMENT: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
}


class Links(NamedTuple):
    """Links between devices along axes of a mesh."""

    word: str
    """As `Topology.links` says it; "" of one device."""
    rate: float
    """Bytes that a device sends over them in a second."""
    summed: tuple[str, ...]
    """Collectives that the compiler writes as all-reduces."""


@dataclass(frozen=True)
class Slices:
    """Slices of TPUs: in each a torus of links, between them the data centre's network."""

    generation: str
    """Name for libtpu."""
    shape: tuple[int, ...]
    """Chips along each dimension of a slice."""
    slices: int

    @classmethod
    def parse(cls, generation: str, name: str, slices: int) -> Slices:
        """Return the slices that a topology's name says."""
        kind = GENERATIONS[generation]
        most = Hardware.named(kind.hardware).link_devices
        sizes = name.lower().removeprefix(f"{generation}:")
        is_form = re.fullmatch(r"\d{1,5}(x\d{1,5})*", sizes)
        shape = tuple(map(int, sizes.split("x"))) if is_form else ()
        # A smaller one is a part of a host.
        is_odd = prod(shape) > 2 and any(size % 2 for size in shape[:2])
        if len(shape) != kind.dimensions or is_odd or not 0 < prod(shape) * kind.devices <= most:
            raise ValueError(
                f"the name {name!r} is no topology's: give the kind and its chips along each of "
                f"{kind.dimensions} dimensions, such as "
                f"'{generation}:{'x'.join(['4'] * kind.dimensions)}'; even numbers along the first "
                f"two, as a host has 2x2 chips; and {most:,} devices at most, or slices= of them"
            )
        return cls(generation, shape, slices)

    @property
    def kind(self) -> _Generation:
        """What is the same in all slices of this generation."""
        return GENERATIONS[self.generation]

    @property
    def hardware(self) -> str:
        """Name in `hardware.toml`."""
        return self.kind.hardware

    @property
    def device_count(self) -> int:
        """Devices of all slices, as JAX counts them."""
        return self.slices * prod(self.shape) * self.kind.devices

    @property
    def description(self) -> tuple[str, dict[str, Any]]:
        """Name and options by which libtpu describes the devices."""
        options: dict[str, Any] = dict(self.kind.options)
        if self.slices > 1:
            options["num_slices"] = self.slices
        if prod(self.shape) == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        return f"{self.generation}:{'x'.join(map(str, self.shape))}", options

    def described(self) -> tuple[Any, ...]:
        """Return the devices as the compiler has them.

        Raises:
            ImportError: It is not installed.
        """
        from jax.experimental import topologies

        if importlib.util.find_spec("libtpu") is None:
            raise ImportError(
                "the TPU's compiler is in the package libtpu, which is not installed: pip install "
                "'jax[tpu]' (Google's terms: https://pypi.org/project/libtpu)"
            )
        name, options = self.description
        unset = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
        os.environ.update(unset)  # which libtpu reads as it is loaded
        try:
            topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
        finally:
            for name in unset:
                os.environ.pop(name, None)
        return tuple(topology.devices)

    def arrange(
        self, devices: Sequence[Any], sizes: Mapping[str, int], *, is_split: bool
    ) -> npt.NDArray[np.object_]:
        """Lay the axes of a mesh along dimensions, as jax.experimental.mesh_utils does."""
        from jax.experimental import mesh_utils

        shape = tuple(sizes.values())
        if self.slices == 1:
            return mesh_utils.create_device_mesh(
                shape, list(devices), allow_split_physical_axes=is_split
            )
        number = next((i for i, size in enumerate(shape) if size % self.slices == 0), None)
        if number is None:
            raise ValueError(
                f"{mesh_shown(sizes)}: no axis is divisible by the {self.slices} slices, over "
                "which one has to be"
            )
        between = [self.slices if i == number else 1 for i in range(len(shape))]
        within = [size // count for size, count in zip(shape, between, strict=True)]
        return mesh_utils.create_hybrid_device_mesh(
            within, between, list(devices), allow_split_physical_axes=is_split
        )

    def place(self, device: Any) -> tuple[int, ...]:
        """Return slice, coordinates and core of a device."""
        slice_number = getattr(device, "slice_index", None) or 0
        return (slice_number, *device.coords, device.core_on_chip)

    def links(self, counts: Sequence[int]) -> Links:
        """Return how devices of a slice are connected that differ in so many coordinates.

        Each dimension of the torus has its share of a device's links; without links around, or as a
        part of it alone, half of that. Between all chips of a large slice libtpu 0.0.50 writes
        collectives as all-reduces, which send twice as much.
        """
        chips = tuple(counts[: len(self.shape)])
        varied = [i for i, count in enumerate(chips) if count > 1]
        uncut = [i for i in varied if chips[i] == self.shape[i]]
        rings = [i for i in uncut if self._is_ring(i)]
        word = "split" if uncut != varied else "ring" if rings == varied else "line"
        share = min(1.0, (len(varied) + len(rings) or 2) / 2 / len(self.shape))
        summed: tuple[str, ...] = ()
        if self.slices == 1 and chips == self.shape and prod(chips) >= _LARGE:
            if len(chips) == 3:
                summed = ("all-gather", "reduce-scatter")
            elif len(set(chips)) == 1:
                summed = ("reduce-scatter",)
        rate = Hardware.named(self.hardware).link_bytes_per_second * share
        return Links(word if max(counts) > 1 else "", rate, summed)

    def _is_ring(self, dimension: int) -> bool:
        """Say whether a dimension has links around; two chips are neighbours anyway."""
        kind, size = self.kind, self.shape[dimension]
        if size <= 2:
            return True
        if kind.dimensions == 2:
            return size == kind.ring
        return all(count % kind.ring == 0 for count in self.shape)


def libtpu_path() -> str:
    """Return the file of libtpu, as JAX finds it."""
    path = os.environ.get("TPU_LIBRARY_PATH", "")
    return path if os.path.isfile(path) else importlib.import_module("libtpu").get_library_path()
