"""`Plan`'s bytes: on each device, and on many meshes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from shardrules._base.arguments import as_tuple, check_bytes, check_type, integer, strings
from shardrules._base.mesh_sizes import checked_sizes
from shardrules._base.rule_specs import MemoryKind, check_memory_kind
from shardrules._base.text import nearest
from shardrules._place.mesh import MeshLike, as_mesh
from shardrules._plan.memory import DeviceBytes, Room
from shardrules._plan.resolve import OnMesh, sized_mesh
from shardrules._plan.state import DTYPES, Training
from shardrules._plan.table import Columns
from shardrules._program.topologies.topology import Topology

if TYPE_CHECKING:
    from shardrules._estimate.sweep import Sweep

_SIZES: Final = "a dict of axis sizes"


class Estimates(Columns):
    """Estimates of memory, traffic and time: methods of `Plan`."""

    _on_mesh: OnMesh
    _mesh: MeshLike

    def bytes_per_device(
        self,
        *,
        gradients: Any = None,
        optimizer: Self | Iterable[Any] | None = None,
        optimizer_memory_kind: MemoryKind | None = None,
        activations: Self | None = None,
    ) -> DeviceBytes:
        """Count the bytes on each device and in the host's memory, uneven shards included.

        `DeviceBytes` says which leaves count as parameters, as the optimizer's or as activations.

        Args:
            gradients: The dtype of gradients, which are sharded like the parameters; True for the
                parameters' own dtypes. Default: none are counted.
            optimizer: The optimizer's state, if it is not in the tree: its plan, or the dtypes of
                its moments, which have the parameters' shapes and specs. Adam has two.
            optimizer_memory_kind: The memory of the state that `optimizer` gives, such as
                "pinned_host". Default: that of its plan, or of the parameters.
            activations: The plan of the activations that are there at once, if they are not in the
                tree.

        Raises:
            ValueError: The plan of the optimizer or the activations is for another mesh; a dtype or
                a memory kind is unknown; or there is a memory kind for no optimizer.
            TypeError: The optimizer is neither a plan nor dtypes, such as its name; or the
                activations are no plan.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"dp": 1, "tp": 2})
            >>> adam = ("float32", "float32")
            >>> plan.bytes_per_device(gradients="float32", optimizer=adam).total
            array([[448, 448]])
            >>> print(plan.bytes_per_device(optimizer=adam, optimizer_memory_kind="pinned_host"))
            64 B on the fullest device: params 64 B; 256 B in the host's memory
        """
        training = Training(gradients, optimizer, optimizer_memory_kind, activations)
        return training.bytes_with(self)

    def sweep(
        self,
        meshes: Iterable[Mapping[str, int]] | None = None,
        *,
        devices: int | str | Topology | None = None,
        axes: Iterable[str] | None = None,
        fixed: Mapping[str, int] | None = None,
        hbm: int | None = None,
        host_memory: int | None = None,
        gradients: Any = None,
        optimizer: Iterable[Any] | None = None,
        optimizer_memory_kind: MemoryKind | None = None,
    ) -> Sweep:
        """Put the leaves and rules on many meshes: bytes per device, and what fits.

        Args:
            meshes: The meshes, each of which may lack axes of the others. Default: all
                factorizations of `devices` over `axes`.
            devices: Devices of these factorizations; or the name of a `Topology`, such as
                "v5p:8x8x8", for the meshes that JAX builds on it without splitting a dimension of
                the torus. Default: as many as the plan has.
            axes: Axes of these factorizations. Default: those of the plan that are not in `fixed`.
            fixed: Further axes, with the size that each has in all meshes.
            hbm: Bytes of memory of a device, for `SweepRow.fits`. Default: those of the topology.
            host_memory: Bytes of the host's memory for each of its devices, for the same.
            gradients: As in `bytes_per_device`.
            optimizer: The dtypes of the optimizer's moments, as in `bytes_per_device`.
            optimizer_memory_kind: As in `bytes_per_device`.

        Returns:
            A row for each mesh, those with the fewest problems first, of these what fits, of these
            the fewest bytes. What differs by less than 5 %, or by less than 5 % of `hbm`, is a tie.
            Then the fewest devices along axes that do not split tokens, by their names, come first,
            then the fewest corrections, then bytes.

        Raises:
            ValueError: A mesh is invalid, there are no axes, or there are more than 10,000 meshes.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"dp": 1, "tp": 4})
            >>> [(row.mesh, row.bytes) for row in plan.sweep()]
            [({'dp': 1, 'tp': 4}, 32), ({'dp': 2, 'tp': 2}, 64), ({'dp': 4, 'tp': 1}, 128)]
        """
        from shardrules._estimate import sweep

        topology = _topology_of(devices)
        plan_axes = tuple(sized_mesh(self._mesh).axis_sizes)
        if topology is not None:
            hbm = topology.hardware.memory_bytes if hbm is None else hbm
            check_none("meshes: they are those of the topology", meshes)
            check_none("fixed: the meshes are those of the topology", fixed)
        room = room_of(hbm, host_memory)
        check_memory_kind("optimizer_memory_kind", optimizer_memory_kind)
        moments = None if optimizer is None else as_tuple("optimizer", optimizer, DTYPES)
        if topology is not None:
            meshes = topology.meshes(plan_axes if axes is None else strings("axes", axes))
        elif meshes is None:
            assert not isinstance(devices, str | Topology)
            meshes = self._factorizations(devices, axes, fixed)
        else:
            check_type("fixed", fixed, Mapping | None, _SIZES)
            check_type("meshes", meshes, Iterable, "a sequence of dicts of axis sizes")

        def on_mesh(mesh: MeshLike, axes: frozenset[str]) -> Columns:
            on = sized_mesh(mesh if isinstance(mesh, Mapping) else as_mesh(mesh))
            return self._on_mesh(on, may_lack=axes.union(plan_axes))

        return sweep.sweep_meshes(
            on_mesh,
            meshes,
            room=room,
            gradients=gradients,
            optimizer=moments,
            optimizer_memory_kind=optimizer_memory_kind,
        )

    def _factorizations(
        self, devices: int | None, axes: Iterable[str] | None, fixed: Mapping[str, int] | None
    ) -> Iterator[dict[str, int]]:
        from shardrules._estimate import sweep

        check_type("fixed", fixed, Mapping | None, _SIZES)
        sizes = checked_sizes(fixed) if fixed else {}
        plan_axes = sized_mesh(self._mesh).axis_sizes
        names = tuple(axis for axis in plan_axes if axis not in sizes)
        names = names if axes is None else strings("axes", axes)
        missing = plan_axes.keys() - {*names, *sizes}
        for axis in {*names, *sizes} - plan_axes.keys():
            if meant := nearest(axis, missing):
                raise ValueError(
                    f"the plan's mesh has no axis {axis!r}; did you mean {meant!r}? Its axes are "
                    f"{', '.join(plan_axes)}"
                )
        count = self.devices if devices is None else integer("devices", devices, 1)
        return sweep.factorizations(count, names, sizes)


def _topology_of(devices: int | str | Topology | None) -> Topology | None:
    if isinstance(devices, str):
        try:
            return Topology(devices)
        except ValueError as error:
            raise ValueError(f"devices: {error}") from error
    return devices if isinstance(devices, Topology) else None


def check_none(what: str, value: Any) -> None:
    """Check that an argument is left out."""
    if value is not None:
        raise ValueError(f"{what}, and cannot be given beside it")


def room_of(hbm: int | None, host_memory: int | None) -> Room:
    """Return the memory that there is for each device."""
    for name, size in (("hbm", hbm), ("host_memory", host_memory)):
        if size is not None:
            check_bytes(name, size)
    return Room(hbm, host_memory)
