"""`Topology`: slices of TPUs as their compiler sees them, without the hardware."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations_with_replacement
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._arguments import check_type, integer, texts
from shardrules._hardware import Hardware
from shardrules._mesh_sizes import checked_sizes
from shardrules._text import counted, mesh_shown, nearest, without_defaults

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from jax.sharding import Mesh


class _Generation(NamedTuple):
    """TPUs of one kind."""

    hardware: str
    """Name in `hardware.toml`."""
    compiler_name: str
    """Name for libtpu."""
    dimensions: int
    """Dimensions of the torus of chips."""
    ring: int
    """A dimension of so many chips, or in three dimensions a multiple of it, has links around."""
    cores_counted: int
    """Cores of a chip by which clouds count in names such as v5p-1024."""
    clock: float
    """Cycles of a device in a second: the peak by the operations of its MXUs in a cycle."""
    options: Mapping[str, Any] = {}
    """Options for libtpu."""


# Names as clouds and JAX have them. Rings: "How to scale your model", TPUs
# (https://jax-ml.github.io/scaling-book/tpus). A chip of v4 is one device, as on the hardware.
_GENERATIONS: Final = {
    "v4": _Generation("v4", "v4", 3, 4, 2, 1.05e9, {"chip_config_name": "megacore"}),
    "v5e": _Generation("v5e", "v5e", 2, 16, 1, 1.5e9),
    "v5litepod": _Generation("v5e", "v5e", 2, 16, 1, 1.5e9),
    "v5p": _Generation("v5p", "v5p", 3, 4, 2, 1.75e9),
    "v6e": _Generation("v6e", "v6e", 2, 16, 1, 1.75e9),
    "tpu7x": _Generation("7x", "tpu7x", 3, 4, 2, 2.2e9),
    "7x": _Generation("7x", "tpu7x", 3, 4, 2, 2.2e9),
}
_CORES: Final = {"7x": 2}
"""Devices of a chip, where it has more than one."""
# What libtpu reads from its environment: it asks no metadata server, several processes may load it,
# and its log lines go neither to the terminal nor to files.
_ENVIRONMENT: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
}
_LARGEST_HOST: Final = 8
_FORM: Final = "a name such as 'v5p:8x8x8', or as clouds have it 'v5p-1024'"


@dataclass(frozen=True)
class Topology:
    """Slices of TPUs: a mesh of them, for which their compiler runs here without the hardware.

    Nothing is read from a network, and no backend starts. Meshes need the package libtpu, which has
    the compiler: `pip install 'shardrules[tpu]'`.

    Args:
        name: The kind and its chips along each dimension: "v5p:8x8x8", "v5e:4x4", "v6e:16x16",
            "v4:4x4x4", "tpu7x:4x4x4"; or the cloud's name, which for v4, v5p and tpu7x counts
            cores: "v5p-1024" has 512 chips, "v5litepod-16" has 16.
        slices: How many such slices there are, which the data centre's network connects.

    Raises:
        ValueError: There is no such kind, or no slice of this shape.

    Example:
        >>> import shardrules as sr
        >>> topology = sr.Topology("v5p-1024")
        >>> topology.shape, topology.device_count, topology.hardware.name
        ((8, 8, 8), 512, 'v5p')
    """

    name: str
    slices: int = 1

    __repr__ = without_defaults

    def __post_init__(self) -> None:
        check_type("name", self.name, str, _FORM)
        object.__setattr__(self, "slices", integer("slices", self.slices, 1))
        limit = self.hardware.link_devices
        if (devices := self.device_count // self.slices) > limit:
            raise ValueError(
                f"the name {self.name!r}: a slice of {devices:,} devices, and the largest of "
                f"{self.hardware.name} has {limit:,}; give slices= for several"
            )

    @cached_property
    def _kind(self) -> _Generation:
        kind = re.split(r"[:-]", self.name, maxsplit=1)[0].lower()
        if kind not in _GENERATIONS:
            near = nearest(kind, _GENERATIONS)
            meant = f"did you mean {near!r}? " if near else ""
            raise ValueError(
                f"the name {self.name!r}: there is no topology of {kind!r}; {meant}there are "
                f"those of {', '.join(_GENERATIONS)}: give {_FORM}"
            )
        return _GENERATIONS[kind]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Chips along each dimension of a slice."""
        kind = self._kind
        match = re.fullmatch(r"\w+:(\d{1,5}(?:x\d{1,5})*)|\w+-(\d{1,6})", self.name)
        if match is None:
            raise ValueError(f"the name {self.name!r} is no topology's: give {_FORM}")
        if match[1]:
            shape = tuple(map(int, match[1].split("x")))
            if len(shape) != kind.dimensions or 0 in shape:
                raise ValueError(
                    f"the name {self.name!r}: chips of {kind.hardware} are connected in "
                    f"{kind.dimensions} dimensions: give such as {self._example}"
                )
            if not _has_whole_hosts(shape):
                raise ValueError(
                    f"the name {self.name!r}: a host has 2x2 chips; give even numbers of chips "
                    f"along the first two dimensions, such as {_near_shape(shape)}"
                )
            return shape
        shapes = list(_slices_of(int(match[2]) // kind.cores_counted, kind.dimensions))
        if int(match[2]) % kind.cores_counted or not shapes:
            raise ValueError(
                f"the name {self.name!r}: there is no slice with so many "
                f"{'cores' if kind.cores_counted > 1 else 'chips'}; give its shape, such as "
                f"{self._example}"
            )
        return min(shapes, key=sum)

    @property
    def _example(self) -> str:
        kind = self._kind
        return repr(f"{kind.compiler_name}:{'x'.join(['4'] * kind.dimensions)}")

    @property
    def hardware(self) -> Hardware:
        """Figures of a device, with the memory that the compiler lets a program use."""
        return Hardware.named(self._kind.hardware)

    @property
    def device_count(self) -> int:
        """Devices of all slices, as JAX counts them: on 7x a chip is two."""
        return self.slices * prod(self.shape) * _CORES.get(self._kind.hardware, 1)

    @cached_property
    def devices(self) -> tuple[Any, ...]:
        """Described devices, for which JAX compiles and on which nothing runs.

        Raises:
            ImportError: The package libtpu is not installed.
        """
        return _described(self._kind.compiler_name, self.shape, self.slices)

    def mesh(self, axes: Mapping[str, int] | None = None, /, **sizes: int) -> Mesh:
        """Return a mesh whose axes lie along the dimensions of the torus, where that is possible.

        As `jax.experimental.mesh_utils` arranges the devices: the last axis gets the most links.
        Of several slices the first axis that they divide is over the data centre's network. Where
        an axis can only have a part of a dimension, `links` says "split".

        Args:
            axes: Devices by axis, such as {"fsdp": 64, "tp": 8}; or as keywords.
            **sizes: The same.

        Raises:
            ValueError: It has another number of devices, or no axis that the slices divide.
            ImportError: The package libtpu is not installed.

        Example:
            >>> import shardrules as sr
            >>> mesh = sr.Topology("v5p:8x8x8").mesh(fsdp=64, tp=8)  # doctest: +SKIP
        """
        from jax.sharding import Mesh

        sizes = checked_sizes({**(axes or {}), **sizes})
        if prod(sizes.values()) != self.device_count:
            raise ValueError(
                f"{mesh_shown(sizes) or 'no axes'} are {counted(prod(sizes.values()), 'device')}, "
                f"and {topology_shown(self)} has {self.device_count:,}"
            )
        try:
            devices = self._arranged(sizes, is_split=False)
        except NotImplementedError:
            devices = self._arranged(sizes, is_split=True)
        return Mesh(devices, tuple(sizes))

    def _arranged(self, sizes: Mapping[str, int], *, is_split: bool) -> npt.NDArray[np.object_]:
        from jax.experimental import mesh_utils

        shape = tuple(sizes.values())
        if self.slices == 1:
            return mesh_utils.create_device_mesh(
                shape, list(self.devices), allow_split_physical_axes=is_split
            )
        place = next((i for i, size in enumerate(shape) if size % self.slices == 0), None)
        if place is None:
            raise ValueError(
                f"{mesh_shown(sizes)}: no axis is divisible by the {self.slices} slices, over "
                "which one has to be"
            )
        between = [self.slices if i == place else 1 for i in range(len(shape))]
        within = [size // count for size, count in zip(shape, between, strict=True)]
        return mesh_utils.create_hybrid_device_mesh(
            within, between, list(self.devices), allow_split_physical_axes=is_split
        )

    def meshes(self, axes: Sequence[str]) -> list[dict[str, int]]:
        """List the sizes of these axes that JAX builds without splitting a dimension.

        For `Plan.sweep(meshes=...)`. Each has all devices.

        Args:
            axes: Names of mesh axes, such as ("fsdp", "tp").

        Raises:
            ImportError: The package libtpu is not installed.
        """
        axes = texts("axes", axes)
        return [
            sizes
            for shape in _factors(self.device_count, len(axes))
            if self._is_whole(sizes := dict(zip(axes, shape, strict=True)))
        ]

    def _is_whole(self, sizes: Mapping[str, int]) -> bool:
        try:
            self._arranged(sizes, is_split=False)
        except (NotImplementedError, ValueError):
            return False
        return True

    def links(self, mesh: Mesh) -> dict[str, str]:
        """Say of each axis of a mesh of these devices how its devices are connected.

        Returns:
            By axis: "ring" if it has whole dimensions of the torus, each with links around; "line"
            if one of them has none; "split" if it has a part of a dimension; "DCN" if it is
            over slices, as in "DCN and ring"; "one device".
        """
        places = self._places(mesh)
        return {axis: self._link(places, number) for number, axis in enumerate(mesh.axis_names)}

    def _places(self, mesh: Mesh) -> npt.NDArray[np.int64]:
        """Return slice, coordinates and core of each device of a mesh."""
        import numpy as np

        known = set(self.devices)
        if not known.issuperset(mesh.devices.flat):
            raise ValueError(
                f"the mesh has other devices than {topology_shown(self)}: make it by Topology.mesh"
            )
        rows = [
            (getattr(device, "slice_index", None) or 0, *device.coords, device.core_on_chip)
            for device in mesh.devices.flat
        ]
        return np.array(rows).reshape(*mesh.devices.shape, -1)

    def _link(self, places: npt.NDArray[np.int64], axis: int) -> str:
        import numpy as np

        if places.shape[axis] == 1:
            return "one device"
        lines = np.moveaxis(places, axis, 0).reshape(places.shape[axis], -1, places.shape[-1])
        values = [np.unique(lines[:, 0, i]) for i in range(places.shape[-1])]
        words = ["DCN"] if len(values[0]) > 1 else []
        sizes = [*self.shape, *[1] * (3 - len(self.shape)), _CORES.get(self._kind.hardware, 1)]
        varied = [i for i in range(len(sizes)) if len(values[1 + i]) > 1]
        if any(len(values[1 + i]) < sizes[i] for i in varied):
            words.append("split")
        elif varied:
            is_ring = all(i == len(sizes) - 1 or self._is_ring(i) for i in varied)
            words.append("ring" if is_ring else "line")
        return " and ".join(words)

    @property
    def clock(self) -> float:
        """Cycles of a device in a second, as its peak and the size of its MXUs have them."""
        return self._kind.clock

    def link_rate(self, mesh: Mesh, axes: Sequence[str]) -> float:
        """Return the bytes that a device sends in a second over axes of a mesh of these devices.

        Each dimension of the torus has its share of the links; without links around, or as a part
        of it alone, half of that. Over slices and within them, as if a device exchanged its own
        part with those of other slices alone.
        """
        import numpy as np

        numbers = [mesh.axis_names.index(axis) for axis in axes]
        places = np.moveaxis(self._places(mesh), numbers, range(len(numbers)))
        count = int(np.prod(places.shape[: len(numbers)]))
        line = places.reshape(count, -1, places.shape[-1])[:, 0]
        slices, *varied = (len(np.unique(line[:, i])) for i in range(line.shape[1]))
        dimensions = self._kind.dimensions
        shares = [
            1.0 if varied[i] == self.shape[i] and self._is_ring(i) else 0.5
            for i in range(dimensions)
            if varied[i] > 1
        ]
        within = self.hardware.link_bytes_per_second * min(1.0, (sum(shares) or 1.0) / dimensions)
        if slices == 1:
            return within
        between = (slices - 1) / (count - 1)
        return 1 / (between / self.hardware.dcn_bytes_per_second + (1 - between) / within)

    def _is_ring(self, dimension: int) -> bool:
        """Say whether a dimension has links around; two chips are neighbours anyway."""
        kind, size = self._kind, self.shape[dimension]
        if size <= 2:
            return True
        if kind.dimensions == 2:
            return size == kind.ring
        return all(count % kind.ring == 0 for count in self.shape)

    def mesh_code(self, mesh: Mesh) -> str:
        """Write the order of a mesh's devices as code, so that a job builds the same mesh."""
        places = self._places(mesh).reshape(mesh.devices.size, -1).tolist()
        order = ", ".join(str(tuple(place)) for place in places)
        return (
            "import jax, numpy as np\n"
            f"# {topology_shown(self)}: slice, coordinates and core of each device\n"
            f"order = [{order}]\n"
            "place = lambda d: (getattr(d, 'slice_index', None) or 0, *d.coords, d.core_on_chip)\n"
            "device = {place(d): d for d in jax.devices()}\n"
            f"devices = np.array([device[p] for p in order]).reshape({mesh.devices.shape})\n"
            f"mesh = jax.sharding.Mesh(devices, {tuple(mesh.axis_names)!r})\n"
        )


def topology_shown(topology: Topology) -> str:
    """Return its name, and how many slices there are of it."""
    return topology.name if topology.slices == 1 else f"{topology.slices} slices of {topology.name}"


@cache
def _described(kind: str, shape: tuple[int, ...], slices: int) -> tuple[Any, ...]:
    """Return the devices of a topology; those of another description would be others to JAX."""
    use_libtpu()
    from jax.experimental import topologies

    options: dict[str, Any] = dict(_GENERATIONS[kind].options)
    if slices > 1:
        options["num_slices"] = slices
    if prod(shape) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = f"{kind}:{'x'.join(map(str, shape))}"
    described = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    _DESCRIBED.update(described.devices)
    return tuple(described.devices)


_DESCRIBED: Final[set[Any]] = set()


def is_described(mesh: Mesh) -> bool:
    """Say whether the devices of a mesh are those of a topology, on which nothing runs."""
    return mesh.devices.flat[0] in _DESCRIBED


def use_libtpu() -> None:
    """Set what libtpu reads from its environment, as far as it is not set.

    Raises:
        ImportError: The package is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            "the TPU's compiler is in the package libtpu, which is not installed: pip install "
            "'shardrules[tpu]' (Google's terms: https://pypi.org/project/libtpu)"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _has_whole_hosts(shape: Sequence[int]) -> bool:
    """Say whether hosts of 2x2 chips fill a slice; a smaller one is a part of a host."""
    return prod(shape) <= 2 or (shape[0] % 2 == 0 and shape[1] % 2 == 0)


def _near_shape(shape: Sequence[int]) -> str:
    even = [size + size % 2 for size in shape[:2]]
    return "x".join(map(str, [*even, *shape[2:]]))


def _slices_of(chips: int, dimensions: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of slices of so many chips that clouds have: 1, 2, and multiples of 4."""
    if chips == 4 and dimensions == 3:
        yield 2, 2, 1
        return
    sizes = [
        size for size in range(1, chips + 1) if chips % size == 0 and (size < 3 or size % 4 == 0)
    ]
    for shape in combinations_with_replacement(sizes, dimensions):
        if prod(shape) == chips and (chips <= _LARGEST_HOST or _has_whole_hosts(shape)):
            yield shape


def _factors(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield all sizes of so many axes whose product is the count."""
    if axes == 0:
        yield from [()] if count == 1 else []
        return
    for size in range(1, count + 1):
        if count % size == 0:
            yield from ((size, *rest) for rest in _factors(count // size, axes - 1))
