"""What of a live leaf is not as it is planned: its type, memory, devices or sharding.

Costs some microseconds for each kind of leaves and each sharding. Must not know about trees, nor
what a fault costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeGuard

import numpy as np

from shardrules._dtypes import SAFETENSORS
from shardrules._format import counted, mesh_shown, with_article
from shardrules._jax import device_order
from shardrules._planning.kinds import placement_shown
from shardrules._sharding.memory import memory_apart
from shardrules._sharding.mesh import has_devices
from shardrules._specs import (
    Entries,
    as_partition_spec,
    entries_of,
    entry_axes,
    is_unconstrained,
    partition_spec,
    spec_shown,
    with_entries,
    without_axes,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

    from shardrules._planning.kinds import Kind
    from shardrules._sharding.mesh import MeshLike
    from shardrules._verifying.live import Live, Where

__all__ = ["Fault", "FaultKind", "PlannedKinds"]

FaultKind = Literal[
    "unplanned", "type", "narrowed", "deleted", "abstract", "host", "uncommitted",
    "devices", "order", "memory-kind", "sharding",
]  # fmt: skip

_WITHOUT_PLACE: Final[tuple[FaultKind, ...]] = ("deleted", "abstract", "host")


class Fault(NamedTuple):
    """What of a leaf is not as planned."""

    kind: FaultKind
    found: str
    planned: str


class PlannedKinds:
    """What a plan has for its leaves, on devices.

    A plan on a mesh without devices is put on that of the arrays: the mesh with the plan's axes
    that most of them are on; or the devices that most of them are on, in their order.

    Args:
        axis_sizes: Devices along each axis of the plan's mesh, in its order.
        mesh: The plan's mesh.
        wheres: Where each leaf is.
    """

    def __init__(
        self, axis_sizes: Mapping[str, int], mesh: MeshLike, wheres: Iterable[Where]
    ) -> None:
        self._axis_sizes = axis_sizes
        self.mesh = mesh if has_devices(mesh) else _mesh_of(axis_sizes, wheres)
        """None if no array is on as many devices."""
        self._devices = () if self.mesh is None else tuple(self.mesh.devices.flat)
        self._default_memory = None
        if self.mesh is not None:
            self._default_memory = self._on_mesh(partition_spec(), None).memory_kind

    def faults(self, live: Live, kind: Kind) -> Iterator[Fault]:
        """What of a leaf is not as planned; nothing if all is."""
        planned = placement_shown(kind)
        if kind.status != "placed":
            yield Fault("unplanned", "", str(kind.message))
            return
        if kind.shape is None and live.where in ("host", "nowhere"):
            return  # a number or a function, in the plan as in the tree
        is_of_shape = live.shape == (kind.shape or ())
        if not is_of_shape or not _is_of_dtype(live, kind):
            is_narrowed = is_of_shape and _name(live.dtype) == _name_on_devices(kind.dtype)
            types = _type_shown(live.shape, live.dtype), _type_shown(kind.shape, kind.dtype)
            yield Fault("narrowed" if is_narrowed else "type", *types)
        yield from (Fault(one, "", planned) for one in _WITHOUT_PLACE if one == live.where)
        if not isinstance(live.where, str) and is_of_shape:
            yield from self._of_place(live.where, live, kind)

    def _of_place(self, found: Sharding, live: Live, kind: Kind) -> Iterator[Fault]:
        memory, planned_memory = memory_apart(found) or "device", self._memory_of(kind)
        if memory != planned_memory:
            yield Fault("memory-kind", memory, planned_memory)
        shape, planned = live.shape or (), placement_shown(kind)
        if not _is_on_devices(found):
            yield from self._of_abstract(found, kind)
            return
        devices = _devices_of(found)
        if set(devices) != set(self._devices):
            other = "other " if len(devices) == len(self._devices) else ""
            on = counted(len(devices), f"{other}device")
            yield Fault("devices", on, mesh_shown(self._axis_sizes))
            return
        if devices != self._devices:
            yield Fault("order", self._shown(found, shape), planned)
            if not self._has_axes_of(found):
                return
            found = self._on_mesh(found.spec, found.memory_kind)
        wanted = self._on_mesh(self._spec(kind, found), found.memory_kind)
        if not wanted.is_equivalent_to(found, len(shape)):
            yield Fault("sharding", self._shown(found, shape), planned)

    def _of_abstract(self, found: Any, kind: Kind) -> Iterator[Fault]:
        """The faults of a sharding on a mesh without devices."""
        if not self._has_axes_of(found):
            yield Fault("devices", mesh_shown(found.mesh.shape), mesh_shown(self._axis_sizes))
        elif self._cuts(found.spec) != self._cuts(self._spec(kind, found)):
            yield Fault("sharding", self._shown(found, ()), placement_shown(kind))

    def _on_mesh(self, spec: PartitionSpec, memory_kind: str | None) -> NamedSharding:
        from jax.sharding import NamedSharding

        assert self.mesh is not None
        # The arrays' mesh may lack axes of one device.
        absent = self._axis_sizes.keys() - frozenset(self.mesh.axis_names)
        spec = without_axes(spec, frozenset(absent))
        return NamedSharding(self.mesh, spec, memory_kind=memory_kind)

    def _spec(self, kind: Kind, found: Sharding) -> PartitionSpec:
        """The planned spec; what it leaves unconstrained is as the array has it."""
        spec = as_partition_spec(Entries() if kind.spec is None else kind.spec)
        entries = entries_of(spec)
        if not any(map(is_unconstrained, entries)):
            return spec
        there = [*(entries_of(found.spec) if self._has_axes_of(found) else ())]
        there += [None] * len(entries)
        return with_entries(
            spec, (b if is_unconstrained(a) else a for a, b in zip(entries, there, strict=False))
        )

    def _memory_of(self, kind: Kind) -> str:
        """The planned memory; "device" is the devices' default one, whatever its name."""
        default = (None, self._default_memory)
        return "device" if kind.memory_kind in default else str(kind.memory_kind)

    def _has_axes_of(self, found: Sharding) -> TypeGuard[NamedSharding]:
        """Whether it is a NamedSharding on the axes of the plan."""
        mesh = getattr(found, "mesh", None)
        return mesh is not None and _axes(mesh.shape) == _axes(self._axis_sizes)

    def _cuts(self, spec: PartitionSpec) -> list[tuple[str, ...]]:
        """Per dimension the axes that cut it, without those of one device; [] for the last ones."""
        sizes = _axes(self._axis_sizes)
        cuts = [
            tuple(axis for axis in entry_axes(entry) if axis in sizes) for entry in entries_of(spec)
        ]
        while cuts and not cuts[-1]:
            cuts.pop()
        return cuts

    def _shown(self, found: Sharding, shape: tuple[int, ...]) -> str:
        """A sharding as people write it, without ids: they differ between processes."""
        mesh, spec = getattr(found, "mesh", None), getattr(found, "spec", None)
        if mesh is None or spec is None:
            return f"shards of shape {found.shard_shape(shape)}"
        here, there = _axes(self._axis_sizes), _axes(mesh.shape)
        on_other = [*here.items()] != [*there.items()]
        return spec_shown(spec) + (f" on {mesh_shown(mesh.shape)}" if on_other else "")


def _mesh_of(axis_sizes: Mapping[str, int], wheres: Iterable[Where]) -> Mesh | None:
    """A mesh with the plan's axes, of the arrays' devices."""
    from jax.sharding import Mesh

    meshes: Counter[Mesh] = Counter()
    devices: Counter[tuple[Any, ...]] = Counter()
    for where, leaves in Counter(wheres).items():
        if isinstance(where, str) or not _is_on_devices(where):
            continue
        mesh = getattr(where, "mesh", None)
        if mesh is not None and _axes(mesh.shape) == _axes(axis_sizes):
            meshes[mesh] += leaves
        devices[_devices_of(where)] += leaves
    if meshes:
        return meshes.most_common(1)[0][0]
    sizes = tuple(axis_sizes.values())
    fitting = [one for one, _ in devices.most_common() if len(one) == np.prod(sizes)]
    return Mesh(np.array(fitting[0]).reshape(sizes), tuple(axis_sizes)) if fitting else None


def _axes(axis_sizes: Mapping[str, int]) -> dict[str, int]:
    """The axes of more than one device."""
    return {axis: size for axis, size in axis_sizes.items() if size > 1}


def _is_on_devices(sharding: Sharding) -> bool:
    mesh = getattr(sharding, "mesh", None)
    return mesh is None or has_devices(mesh)


def _devices_of(sharding: Any) -> tuple[Any, ...]:
    """The devices in the sharding's order."""
    if hasattr(sharding, "mesh"):
        return tuple(sharding.mesh.devices.flat)
    return device_order(sharding)


def _is_of_dtype(live: Live, kind: Kind) -> bool:
    """Whether the dtypes are equal, of which the plan's may be a name; numbers have none."""
    # Not by ==: to numpy, None is float64.
    if live.dtype is None or kind.dtype is None:
        return True
    return _name(live.dtype) == _name(kind.dtype)


def _name(dtype: Any) -> str:
    name = str(getattr(dtype, "name", dtype))
    return SAFETENSORS.get(name, name)


def _name_on_devices(dtype: Any) -> str | None:
    """The name of the dtype that JAX makes of it, which depends on jax_enable_x64."""
    import jax

    try:
        return _name(jax.dtypes.canonicalize_dtype(_name(dtype)))
    except TypeError:  # that of random keys
        return None


def _type_shown(shape: tuple[int, ...] | None, dtype: Any) -> str:
    if shape is None:
        return "no array" if dtype is None else with_article(dtype.__name__)
    return "a number" if dtype is None else f"{_name(dtype)}{list(shape)}"
