"""`Topology`: slices of TPUs or hosts of GPUs as their compilers see them, without the hardware."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from importlib.metadata import version
from math import prod
from string import Template
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.arguments import check_type, checked_sizes, integer, mesh_shapes, strings
from shardrules._base.hardware import Hardware, as_hardware, compiler_facts
from shardrules._base.text import counted, mesh_shown, near_names, without_defaults
from shardrules._program.topologies.tpu import GENERATIONS, Links, Slices

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from jax.sharding import AxisType, Mesh

_NICKNAMES: Final = {"trillium": "v6e", "v5litepod": "v5e"} | dict.fromkeys(
    ("ironwood", "v7", "v7x", "7x"), "tpu7x"
)
_FORM: Final = "a name such as 'v5p:8x8x8', or for GPUs 'h100:8x16', 8 in each of 16 hosts"


@dataclass(frozen=True)
class Topology:
    """Slices of TPUs or hosts of GPUs: a mesh of them, for which their compiler runs here.

    Nothing is read from a network, and no backend starts. Meshes need the compiler: for TPUs that
    of the package libtpu, `pip install 'jax[tpu]'`; for GPUs JAX's plugin for CUDA,
    `pip install 'jax[cuda12-local]'`, and without a GPU JAX_PLATFORMS=cpu in the environment.

    Args:
        name: The kind and its chips along each dimension: "v5p:8x8x8", "v5e:4x4", "v6e:16x16",
            "v4:4x4x4", "tpu7x:4x4x4". Of GPUs the kind, those that NVLink connects, and how many
            such hosts there are: "h100:8x16", "h200:8", "b200:8x2", "gb200:72x2".
        slices: How many such slices of TPUs there are, which the data centre's network connects.

    Raises:
        ValueError: There is no such kind, or no slice of this shape.

    Example:
        >>> import shardrules as sr
        >>> topology = sr.Topology("v5p:8x8x8")
        >>> topology.shape, topology.device_count, topology.hardware.name
        ((8, 8, 8), 512, 'v5p')
        >>> sr.Topology("h100:8x16").device_count
        128
    """

    name: str
    slices: int = 1

    __repr__ = without_defaults

    def __post_init__(self) -> None:
        check_type("name", self.name, str, _FORM)
        object.__setattr__(self, "name", self.name.lower())
        object.__setattr__(self, "slices", integer("slices", self.slices, 1))
        _ = self._layout  # which refuses what is no topology

    @cached_property
    def _layout(self) -> Slices | Hosts:
        kind = re.split(r"[:-]", self.name, maxsplit=1)[0]
        if kind not in _LAYOUTS:
            named = _NICKNAMES.get(kind)
            near = [named] if named else near_names(kind, _LAYOUTS, least=0.6)
            meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            if kind in ("cpu", "cpus") or kind.isdecimal():
                meant = "XLA for CPU takes sizes, as {'fsdp': 4, 'tp': 2}, or a number; "
            raise ValueError(
                f"the name {self.name!r}: there is no topology of {kind!r}; {meant}there are "
                f"those of {', '.join(_LAYOUTS)}: give {_FORM}"
            )
        return _LAYOUTS[kind](kind, self.name, self.slices)

    @property
    def shape(self) -> tuple[int, ...]:
        """Chips along each dimension of a slice; of GPUs those of a host, and hosts."""
        return self._layout.shape

    @property
    def hardware(self) -> Hardware:
        """Figures of a device; of TPUs the memory that the compiler lets a program use."""
        return Hardware.named(self._layout.hardware)

    @property
    def device_count(self) -> int:
        """Devices of all slices, as JAX counts them: on 7x a chip is two."""
        return self._layout.device_count

    @property
    def devices(self) -> tuple[Any, ...]:
        """Described devices, for which JAX compiles and on which nothing runs.

        Raises:
            ImportError: The compiler is not installed.
        """
        return _described_devices(self)

    def mesh(
        self,
        axes: Mapping[str, int] | None = None,
        /,
        *,
        axis_types: Sequence[AxisType] | None = None,
        **sizes: int,
    ) -> Mesh:
        """Return a mesh whose axes lie along the dimensions of the torus, where that is possible.

        As `jax.experimental.mesh_utils` arranges the devices: the last axis gets the most links.
        Of several slices the first axis that they divide is over the data centre's network. Where
        an axis can only have a part of a dimension, `links` says "split". GPUs lie in the order
        of their hosts, as `jax.make_mesh` has them: give the axes within a host last.

        Args:
            axes: Devices by axis, such as {"fsdp": 64, "tp": 8}; or as keywords.
            axis_types: The type of each axis, as `jax.make_mesh` takes them. Default: Auto.
            **sizes: The same.

        Raises:
            ValueError: It has another number of devices, or no axis that the slices divide.
            ImportError: The compiler is not installed.

        Example:
            >>> import shardrules as sr
            >>> mesh = sr.Topology("v5p:8x8x8").mesh(fsdp=64, tp=8)  # doctest: +SKIP
        """
        from jax.sharding import Mesh

        check_type("axes", axes, Mapping | None, "a dict such as {'fsdp': 64, 'tp': 8}")
        sizes = checked_sizes({**(axes or {}), **sizes})
        if (count := prod(sizes.values())) != self.device_count:
            raise ValueError(
                f"{mesh_shown(sizes)} are {counted(count, 'device')}, and {topology_shown(self)} "
                f"has {self.device_count:,}: write sizes whose product is {self.device_count}, as "
                f"Topology.meshes({tuple(sizes)}) lists them"
            )
        try:
            devices = self._layout.arrange(self.devices, sizes, is_split=True)
        except ImportError as error:
            raise ImportError(
                f"{error}. Or ask XLA for CPU, whose partitioner may choose otherwise, with the "
                f"same mesh as a dict: on={sizes}; of `shardrules prove` leave out --on"
            ) from None
        types = None if axis_types is None else tuple(axis_types)
        return Mesh(devices, tuple(sizes), axis_types=types)

    def meshes(self, axes: Sequence[str]) -> list[dict[str, int]]:
        """List the sizes of these axes that JAX builds without splitting a dimension.

        For `Plan.sweep(meshes=...)`. Each has all devices. Of GPUs there are all, as a switch has
        no dimensions.

        Args:
            axes: Names of mesh axes, such as ("fsdp", "tp").

        Raises:
            ImportError: The compiler is not installed.
        """
        return self._whole_and_split(axes)[0]

    def _whole_and_split(
        self, axes: Sequence[str]
    ) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
        """List the sizes of these axes that have all devices: `meshes`, and all others."""
        axes = strings("axes", axes)
        unsplit, split = [], []
        for shape in mesh_shapes(self.device_count, len(axes)):
            sizes = dict(zip(axes, shape, strict=True))
            try:
                self._layout.arrange(self.devices, sizes, is_split=False)
                unsplit.append(sizes)
            except (NotImplementedError, ValueError):
                split.append(sizes)
        return unsplit, split

    def links(self, mesh: Mesh) -> dict[str, str]:
        """Say of each axis of a mesh of these devices how its devices are connected.

        Returns:
            By axis: "ring" if it has whole dimensions of the torus, each with links around; "line"
            if one of them has none; "split" if it has a part of a dimension; of GPUs "NVLink"
            within a host; "DCN" if it is over slices or hosts, as in "DCN and ring"; "one device".
        """
        from jax.sharding import Mesh

        check_type("mesh", mesh, Mesh, "a jax.sharding.Mesh, as Topology.mesh makes it")
        return {axis: self._links(mesh, (axis,)).word or "one device" for axis in mesh.axis_names}

    def _places(self, mesh: Mesh) -> npt.NDArray[np.int64]:
        """Return the place of each device of a mesh, which begins with its slice or host."""
        import numpy as np

        devices = set(self.devices)
        if not devices.issuperset(mesh.devices.flat):
            raise ValueError(
                f"the mesh has other devices than {topology_shown(self)}: make it by Topology.mesh"
            )
        rows = [self._layout.place(device) for device in mesh.devices.flat]
        return np.array(rows).reshape(*mesh.devices.shape, -1)

    def _links(self, mesh: Mesh, axes: Sequence[str]) -> Links:
        """Return how devices along axes of a mesh are connected.

        Over slices or hosts and within them, as if a device exchanged its own part with those of
        others alone.
        """
        numbers = [mesh.axis_names.index(axis) for axis in axes]
        between, *within = _most_along(self._places(mesh), numbers)
        links = self._layout.links(within)
        if between == 1:
            return links
        outer = (between - 1) / (prod(mesh.shape[axis] for axis in axes) - 1)
        seconds = outer / self.hardware.dcn_bytes_per_second + (1 - outer) / links.rate
        return Links(" and ".join(filter(None, ("DCN", links.word))), 1 / seconds, ())


def _most_along(places: npt.NDArray[np.int64], axes: Sequence[int]) -> list[int]:
    """Return how many slices or hosts, and other coordinates, devices along axes have at most."""
    import numpy as np

    lines = np.moveaxis(places, axes, range(len(axes)))
    count = prod(lines.shape[: len(axes)])
    lines = np.sort(lines.reshape(count, -1, places.shape[-1]), axis=0)
    steps = (np.diff(lines, axis=0) != 0).sum(axis=0)
    return [int(most) + 1 for most in steps.max(axis=0)]


_DESCRIBED: Final[dict[Any, Topology]] = {}
"""By device, the topology that has described it."""


@cache
def _described_devices(topology: Topology) -> tuple[Any, ...]:
    """Return the devices of a topology; those of another description would be others to JAX."""
    devices = topology._layout.described()
    _DESCRIBED.update(dict.fromkeys(devices, topology))
    return devices


def topology_shown(topology: Topology) -> str:
    """Return its name, and how many slices there are of it."""
    return topology.name if topology.slices == 1 else f"{topology.slices} slices of {topology.name}"


def topology_of(mesh: Any) -> Topology | None:
    """Return the topology whose devices a mesh has; None of a mesh of others, or of none."""
    from jax.sharding import Mesh

    return _DESCRIBED.get(mesh.devices.flat[0]) if isinstance(mesh, Mesh) else None


def memory_limit(mesh: Mesh) -> int | None:
    """Return the bytes that a program may need on a device, if something says.

    Of a GPU that is there it is what JAX may allocate.
    """
    first = mesh.devices.flat[0]
    if first in _DESCRIBED:
        return _DESCRIBED[first].hardware.memory_bytes
    return (first.memory_stats() or {}).get("bytes_limit") if first.platform == "gpu" else None


def hardware_on(topology: Topology | None, hardware: Hardware | str | None) -> Hardware:
    """Return the hardware that a user gives, or else that of a topology.

    Raises:
        TypeError: There is none.
        ValueError: It is not that of the topology.
    """
    if hardware is None:
        if topology is None:
            raise TypeError(
                "hardware: give the devices, such as 'v5p', or on=Topology('v5p:8x8x8')"
            )
        return topology.hardware
    record = as_hardware("hardware", hardware)
    if topology is not None and record.name != (name := topology.hardware.name):
        raise ValueError(
            f"hardware is {record.name!r}, and {topology_shown(topology)} has {name}: leave it out"
        )
    return record


# GPUs; for TPUs see `tpu`.

GPUS: Final = {"h100": "H100", "h200": "H200", "b200": "B200", "gb200": "GB200"}
"""Names in `hardware.toml` by those in topologies."""


@dataclass(frozen=True)
class Hosts:
    """Hosts of GPUs, which NVLink connects within a host, and the network between hosts."""

    hardware: str
    shape: tuple[int, int]
    """GPUs of a host, and hosts."""

    @classmethod
    def parse(cls, kind: str, name: str, slices: int) -> Hosts:
        """Return the hosts that a topology's name says."""
        match = re.fullmatch(r"\w+:(\d{1,5})(?:x(\d{1,5}))?", name)
        shape = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        limit = Hardware.named(GPUS[kind]).link_devices
        if 0 in shape or shape[0] > limit or slices > 1:
            raise ValueError(
                f"the name {name!r}{f' with slices={slices}' if slices > 1 else ''} is no "
                f"topology's: give the GPUs of a host, of which NVLink connects {limit} at most, "
                f"and how many hosts there are, such as '{kind}:{limit}x16'; slices are of TPUs"
            )
        return cls(GPUS[kind], shape)

    @property
    def device_count(self) -> int:
        """GPUs of all hosts."""
        return self.shape[0] * self.shape[1]

    def described(self) -> tuple[Any, ...]:
        """Return the GPUs, in the order of their ids, as JAX's compiler has them."""
        from jax.experimental import topologies

        config = target_config(self.hardware)
        sizes = f"{self.shape[1]}x1x{self.shape[0]}"
        try:
            topology = topologies.get_topology_desc(
                platform="cuda", topology_name="", target_config=config, topology=sizes
            )
        except NotImplementedError as error:
            raise ImportError(
                "JAX has no compiler for CUDA, which is in its plugin, and needs neither a GPU nor "
                "NVIDIA's libraries: pip install 'jax[cuda12-local]', of jaxlib's version, "
                f"{version('jaxlib')}. Without a GPU set JAX_PLATFORMS=cpu in the environment, "
                f"before JAX starts. JAX says: {error}"
            ) from error
        return tuple(topology.devices)

    def arrange(
        self, devices: Sequence[Any], sizes: Mapping[str, int], *, is_split: bool
    ) -> npt.NDArray[np.object_]:
        """Lay devices in the order of their ids, as jax.make_mesh does with GPUs."""
        import numpy as np

        del is_split  # a switch connects all alike
        return np.array(devices, dtype=object).reshape(tuple(sizes.values()))

    def place(self, device: Any) -> tuple[int, ...]:
        """Return the host of a device, and its number in it."""
        host, number = divmod(device.id, self.shape[0])
        return host, number

    def links(self, counts: Sequence[int]) -> Links:
        """Return how devices of a host are connected: an axis has all links of a device."""
        hardware = Hardware.named(self.hardware)
        return Links(hardware.link if counts[0] > 1 else "", hardware.link_bytes_per_second, ())


def target_config(hardware: str) -> str:
    """Return a GPU's facts as XLA reads them: the text form of its GpuTargetConfigProto."""
    facts = compiler_facts(hardware)
    text = (resources.files("shardrules._program.topologies") / "gpu_target.txt").read_text("utf-8")
    rates = {"gigahertz": facts["clock"] / 1e9, "bandwidth": int(facts["memory_bytes_per_second"])}
    return Template(text).substitute(facts, **rates)


_LAYOUTS: Final[Mapping[str, Callable[[str, str, int], Slices | Hosts]]] = {
    **dict.fromkeys(GENERATIONS, Slices.parse),
    **dict.fromkeys(GPUS, Hosts.parse),
}
