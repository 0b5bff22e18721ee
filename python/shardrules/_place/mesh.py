"""Meshes: arguments, contexts, axis types, the devices of this process, and their memory kinds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from shardrules._base.arguments import check_bounds, checked_sizes
from shardrules._base.jax_names import mesh_contexts, transfer_target
from shardrules._base.specs import entries_of, is_unconstrained, spec_shown, tags_of
from shardrules._base.text import mesh_shown, shown

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

AnyMesh: TypeAlias = "Mesh | AbstractMesh"
MeshLike: TypeAlias = "Mesh | AbstractMesh | Mapping[str, int]"


def resolve_mesh(mesh: MeshLike | None = None) -> AnyMesh:
    """Return the mesh that a function uses for this argument.

    The first of these: the argument; the mesh of `jax.set_mesh` or
    `jax.sharding.use_abstract_mesh`, inside and outside jit; the mesh of the legacy `with mesh:`.

    Args:
        mesh: A Mesh, an AbstractMesh, or, if no device is needed, devices per axis such as
            {"dp": 8, "tp": 4}. Default: the context's mesh.

    Raises:
        ValueError: There is no mesh, it has no devices or more than 2**24, or two contexts
            disagree.
        TypeError: `mesh` is something else.

    Example:
        >>> resolve_mesh({"dp": 8, "tp": 4}).size
        32
    """
    resolved = context_mesh() if mesh is None else as_mesh(mesh)
    if resolved is None:
        raise ValueError(
            "no mesh: pass mesh=..., or call this inside `with jax.set_mesh(mesh):` (or, in older "
            "code, `with mesh:`)"
        )
    return resolved


def as_mesh(mesh: MeshLike, name: str = "mesh") -> AnyMesh:
    """Return the mesh that an argument of this name means; see `resolve_mesh`."""
    from jax.sharding import AbstractMesh, AxisType, Mesh

    if isinstance(mesh, Mapping):
        sizes = checked_sizes(mesh)
        auto = (AxisType.Auto,) * len(sizes)
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        text = (
            "it must be a jax.sharding.Mesh, an AbstractMesh, or a dict of axis sizes such as "
            "{'dp': 8, 'tp': 4}; that of a slice is "
            "shardrules.Topology('v5p:8x8x8').mesh(fsdp=64, tp=8)"
        )
        if hasattr(mesh, "mesh") and hasattr(mesh, "device_count"):
            one = f"Topology({mesh.name!r}).mesh(fsdp={mesh.device_count})"
            text = f"it has no axes; write {one}, or with other axes"
        raise TypeError(f"{name} is {shown(mesh)}; {text}")
    if not mesh.shape or 0 in mesh.shape.values():
        axes = mesh_shown(mesh.shape) or "none, as of JAX's mesh where none is in force"
        raise ValueError(f"a mesh without devices: its axes are {axes}")
    check_bounds(mesh.shape)
    return mesh


def context_mesh() -> AnyMesh | None:
    """Return the mesh of the context, or None."""
    meshes = mesh_contexts()
    abstract, concrete = _unless_empty(meshes.abstract()), _unless_empty(meshes.concrete())
    legacy = legacy_mesh()
    current = abstract if concrete is None or _has_other_axes(abstract, concrete) else concrete
    if current is None:
        return legacy
    if legacy is None:
        return current
    # As far as both have devices.
    agree = legacy.shape_tuple == current.shape_tuple if concrete is None else legacy == concrete
    if not agree:
        raise ValueError(
            f"two meshes are in force: jax.set_mesh's {mesh_shown(current.shape)} and "
            f"`with mesh:`'s {mesh_shown(legacy.shape)}"
            + ("" if legacy.shape != current.shape else " with other devices or axis types")
            + "; leave one of the two contexts, or pass mesh=..."
        )
    return current


def in_force(mesh: AnyMesh | None) -> AbstractContextManager[Any]:
    """Return the context in which specs are of a mesh, with devices or without them."""
    import jax

    if mesh is None:
        return nullcontext()
    if not has_devices(mesh):
        return jax.sharding.use_abstract_mesh(mesh)  # type: ignore[arg-type]
    return jax.set_mesh(mesh)


def contexts() -> tuple[Any, ...]:
    """Return JAX's contexts; the functions here answer the same in equal ones."""
    abstract, concrete, legacy = mesh_contexts()
    return abstract(), concrete(), legacy()


def legacy_mesh() -> Mesh | None:
    """Return the mesh of `with mesh:` only, as code from before `jax.set_mesh` does, or None."""
    return _unless_empty(mesh_contexts().legacy())  # type: ignore[return-value]


def current_view(mesh: AnyMesh) -> AnyMesh:
    """Return the mesh with the axis types of the traced code; shard_map makes some Manual."""
    abstract = _unless_empty(mesh_contexts().abstract())
    if abstract is None or abstract.shape_tuple != mesh.shape_tuple:
        return mesh
    return abstract if _has_other_axes(abstract, mesh) else mesh


def local_view(mesh: AnyMesh) -> AnyMesh:
    """Return the mesh, or inside a shard_map over some of its axes the one with Manual axes."""
    view = current_view(mesh)
    return view if axes_of_type(view, "Manual") else mesh


def has_devices(mesh: MeshLike) -> TypeGuard[Mesh]:
    """Return whether the mesh is one of devices, and not an abstract one."""
    # Without JAX in the process nobody can have made one.
    sharding = sys.modules.get("jax.sharding")
    return sharding is not None and isinstance(mesh, sharding.Mesh)


def check_placeable(sharding: NamedSharding, path: Callable[[], str]) -> None:
    """Check that arrays can be placed as the sharding says; `path` is called for an error.

    Raises:
        TypeError: Its mesh has no devices.
        ValueError: It leaves a dimension to the compiler, for which JAX has a bare KeyError; or it
            has unreduced axes, which only a computation makes.
    """
    if not has_devices(sharding.mesh):
        raise TypeError(
            "arrays can be placed on a jax.sharding.Mesh of devices; this mesh is "
            f"{shown(sharding.mesh)}: make one with jax.sharding.Mesh(numpy.array(jax.devices())"
            f".reshape{tuple(sharding.mesh.shape.values())}, {tuple(sharding.mesh.shape)})"
        )
    if unreduced := tags_of(sharding.spec).get("unreduced"):
        raise ValueError(
            f"the leaf {path()} cannot be placed as {spec_shown(sharding.spec)}: an array whose "
            f"sum over {', '.join(unreduced)} is yet to be made comes out of a computation alone; "
            "leave unreduced out of the spec"
        )
    if any(map(is_unconstrained, entries_of(sharding.spec))):
        raise ValueError(
            f"the leaf {path()} cannot be placed as {spec_shown(sharding.spec)}: UNCONSTRAINED "
            "leaves a dimension to the compiler, which places nothing; name mesh axes or None "
            "there, or give Correction(unconstrained='drop')"
        )


def processes_of(mesh: MeshLike) -> frozenset[int]:
    """Return the processes of the devices of a mesh; none of a mesh without devices."""
    return _processes_of(mesh) if has_devices(mesh) else frozenset()


@lru_cache(maxsize=256)
def _processes_of(mesh: Any) -> frozenset[int]:
    return frozenset(device.process_index for device in mesh.devices.flat)


def axes_of_type(mesh: AnyMesh, kind: str) -> frozenset[str]:
    """Return the axes of type "Auto", "Explicit" or "Manual"."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, type_ in types if type_.name == kind)


def _unless_empty(mesh: Any) -> AnyMesh | None:
    return None if mesh is None or mesh.empty else mesh


def _has_other_axes(abstract: Any, concrete: Any) -> bool:
    """Return whether use_abstract_mesh or shard_map has replaced the mesh of set_mesh."""
    return abstract is not None and (
        (abstract.axis_types, abstract.shape_tuple) != (concrete.axis_types, concrete.shape_tuple)
    )


def sharding_in_memory(mesh: AnyMesh, spec: PartitionSpec, kind: str | None) -> NamedSharding:
    """Return the NamedSharding of this memory kind. None leaves the kind to the mesh's devices.

    Raises:
        ValueError: The devices do not have the kind; or JAX forgets it, as for described GPUs.
    """
    from jax.sharding import NamedSharding

    if kind is None:
        return NamedSharding(mesh, spec)
    sharding = NamedSharding(mesh, spec, memory_kind=kind)
    if sharding.memory_kind != kind:
        raise ValueError(
            f"JAX describes GPUs without kinds of memory, and would count {kind!r} as their "
            "own; leave the kind out to count it so, or compile for GPUs that are there"
        )
    return sharding


@lru_cache(maxsize=4096)
def memory_apart(sharding: Sharding) -> str | None:
    """Return the sharding's memory kind; None if it is the default of its devices."""
    kind = sharding.memory_kind
    if kind in (None, "device"):
        return None
    return None if kind == sharding.with_memory_kind(None).memory_kind else kind  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def in_memory(sharding: NamedSharding, kind: str) -> NamedSharding:
    """Return the sharding in this memory kind; of equal ones, the same object."""
    return sharding.with_memory_kind(kind)


def moved_inside_jit(array: Any, sharding: NamedSharding) -> Any:
    """Return the array in the sharding's memory kind, unless that is the devices' default."""
    kind = memory_apart(sharding)
    if kind is None:
        return array
    import jax

    return jax.device_put(array, transfer_target(kind))
