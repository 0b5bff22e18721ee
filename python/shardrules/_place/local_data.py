"""`shard_local`: global arrays of a batch of which each process has its own part."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardrules._arguments import check_tree
from shardrules._mesh.mesh import check_placeable, resolve_mesh
from shardrules._place.decider import check_decided
from shardrules._place.named_shardings import asks_for_own_devices
from shardrules._place.processes import JointCall, rows_of
from shardrules._place.spec_trees import spread_specs
from shardrules._specs import entries_of, entry_axes, is_partition_spec
from shardrules._text import counted, mesh_shown, shown

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardrules._mesh.mesh import MeshLike


def shard_local(batch: Any, spec: Any, mesh: MeshLike | None = None) -> Any:
    """Make global arrays of a batch of which each process has its own part.

    Each process gives the rows that its own devices hold, in their order: with the batch cut over
    all devices and four processes, a quarter. In one process this is the whole batch.

    Args:
        batch: A pytree of numpy arrays, or jax.Arrays of this process.
        spec: A PartitionSpec or NamedSharding for all arrays, or a tree of them, which may be a
            prefix of `batch`. It must fit as it is.
        mesh: The Mesh for PartitionSpecs. Default: the context's.

    Returns:
        A tree of jax.Arrays. Along a dimension that the processes share among them, its size is the
        sum of theirs.

    Raises:
        ValueError: A spec does not fit an array; or the devices' parts do not divide it.
        TypeError: A leaf is not an array, or the mesh has no devices.
        RuntimeError: In several processes: their calls differ, or a process has failed or is late.

    Example:
        >>> import jax, numpy as np
        >>> import shardrules as sr
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("dp",))
        >>> spec = jax.sharding.PartitionSpec("dp")
        >>> batch = sr.shard_local({"tokens": np.zeros((8, 16), "int32")}, spec, mesh)
        >>> batch["tokens"].shape
        (8, 16)
    """
    import jax
    from jax import tree_util

    with JointCall("shard_local") as call:
        check_tree("batch", batch)
        check_decided("spec", spec, "a PartitionSpec such as P('dp'), which fits all of the batch")
        if call.joint and asks_for_own_devices(spec, mesh):
            call.alone()
        leaves, treedef = tree_util.tree_flatten(batch)
        paths = [keys for keys, _ in tree_util.tree_flatten_with_path(batch)[0]]
        specs = spread_specs("spec", batch, treedef, spec)
        targets = []
        for keys, leaf, leaf_spec in zip(paths, leaves, specs, strict=True):
            path = tree_util.keystr(keys) or "(the tree)"
            sharding = _sharding(path, leaf_spec, mesh)
            targets.append((sharding, _global_shape(path, leaf, sharding)))
        abstract = [
            jax.ShapeDtypeStruct(shape, leaf.dtype)
            for leaf, (_, shape) in zip(leaves, targets, strict=True)
        ]
        of_rows = dict(enumerate(sharding for sharding, _ in targets))
        call.agree(lambda: rows_of(tree_util.tree_unflatten(treedef, abstract), of_rows))
    arrays = [
        jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape)
        for leaf, (sharding, shape) in zip(leaves, targets, strict=True)
    ]
    return tree_util.tree_unflatten(treedef, arrays)


def _sharding(path: str, spec: Any, mesh: MeshLike | None) -> NamedSharding:
    from jax.sharding import NamedSharding

    if isinstance(spec, NamedSharding):
        sharding = spec
    elif is_partition_spec(spec):
        on_mesh: Any = resolve_mesh(mesh)
        if unknown := [a for entry in spec for a in entry_axes(entry) if a not in on_mesh.shape]:
            raise ValueError(
                f"spec: for {path} it has the axis {unknown[0]!r}, and the mesh is "
                f"{mesh_shown(on_mesh.shape)}"
            )
        sharding = NamedSharding(on_mesh, spec)
    else:
        raise TypeError(
            f"spec: for {path} it is {shown(spec)}; it must be a PartitionSpec or a NamedSharding"
        )
    check_placeable(sharding, lambda: path)
    return sharding


def _global_shape(path: str, leaf: Any, sharding: NamedSharding) -> tuple[int, ...]:
    """Return the shape of which the process's part has the leaf's.

    Raises:
        ValueError: The parts do not divide it, or the spec has more dimensions.
        TypeError: It is not an array.
    """
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(f"batch: {path} is {shown(leaf)}; only arrays can be placed")
    entries = entries_of(sharding.spec)
    if len(entries) > len(leaf.shape):
        raise ValueError(
            f"spec: for {path} it has {counted(len(entries), 'dimension')}, and the array "
            f"{len(leaf.shape)}"
        )
    shape = list(leaf.shape)
    for dim, entry in enumerate(entries):
        axes = entry_axes(entry)
        parts, local = (
            prod(sharding.mesh.shape[axis] for axis in axes),
            _local_parts(sharding, axes),
        )
        if local and shape[dim] % local:
            raise ValueError(
                f"batch: {path} has the shape {list(leaf.shape)}, and the devices of this process "
                f"hold {local} parts of dimension {dim}: give a number of rows that {local} divides"
            )
        shape[dim] = shape[dim] // max(1, local) * parts
    return tuple(shape)


def _local_parts(sharding: NamedSharding, axes: tuple[str, ...]) -> int:
    """Return how many of the parts that these axes make are on devices of this process."""
    import jax

    mesh, me = sharding.mesh, jax.process_index()
    dims = [mesh.axis_names.index(axis) for axis in axes]
    places = np.argwhere(np.vectorize(lambda device: device.process_index == me)(mesh.devices))
    return len({tuple(place[dims]) for place in places})
