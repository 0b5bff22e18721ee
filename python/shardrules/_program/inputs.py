"""Reads what users plan for the inputs and outputs of an executable, leaf by leaf.

Equal leaves share a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from jax import tree_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules._base.specs import as_partition_spec, is_partition_spec
from shardrules._base.text import (
    counted,
    mesh_shown,
    near_shown,
    printable,
    shown,
)
from shardrules._place.decider import check_decided
from shardrules._place.mesh import AnyMesh, has_devices, memory_apart
from shardrules._place.spec_trees import rows_and_paths
from shardrules._plan.align import align, kind_specs
from shardrules._plan.kinds import shared_along
from shardrules._plan.plan import Plan
from shardrules._plan.resolve import sized_mesh
from shardrules._program.executable import Executable, Side
from shardrules._program.libraries import PLANNED, check_entries
from shardrules._rules.rules import Rules

_BARE: Final = "'' of an array that is in no tree: give a PartitionSpec, or None"


class PlannedSharding(NamedTuple):
    """Planned sharding of leaves."""

    sharding: Any
    memory_kind: str | None
    """None if nothing is said about memory, or it is the default."""
    shared_along: frozenset[str] = frozenset()
    """Axes along which devices share the units of a leaf, such as KV heads, as they are too few."""
    is_of_plan: bool = False


def planned_targets(
    executable: Executable, inputs: Any, outputs: Any
) -> tuple[list[PlannedSharding | None], list[PlannedSharding | None]]:
    """Read the targets of the inputs' and of the outputs' leaves.

    Arguments that the call changes in place come out as they go in.

    Args:
        executable: The executable.
        inputs: A tuple with an entry for each positional argument. Behind these, a dict for keyword
            arguments, if the function was lowered with any.
        outputs: The plan of the result.

    Raises:
        TypeError: It is no tuple, or has something else in it.
        ValueError: It does not fit the arguments, or a plan the mesh.
    """
    of_inputs = _SideTargets(executable.inputs, executable)
    of_inputs.fill_arguments(inputs)
    of_outputs = _SideTargets(executable.outputs, executable)
    of_outputs.fill("outputs", outputs, executable.outputs.treedef)
    updated = [of_inputs.targets[before] for before, _ in executable.call.updates]
    return of_inputs.targets, of_outputs.targets + updated


class _SideTargets:
    """Targets of a side, filled in subtree by subtree."""

    def __init__(self, side: Side, executable: Executable) -> None:
        self.targets: list[PlannedSharding | None] = []
        self._side, self._executable = side, executable
        self._records: dict[Any, PlannedSharding] = {}
        self._verb = "takes" if side.name == "inputs" else "returns"

    def fill_arguments(self, plans: Any) -> None:
        """Fill in the leaves of all arguments."""
        side = self._side
        names = ", ".join(side.keywords)
        count = len(side.subtrees) - len(side.keywords)
        check_entries(plans, count)
        by_name = plans[count] if len(plans) > count else {}
        is_named = isinstance(by_name, Mapping) and set(by_name) <= set(side.keywords)
        if len(plans) < count or len(plans) > count + bool(names) or not is_named:
            keywords = f", and with these keyword arguments, for which a dict may follow: {names}"
            raise _misfit(
                f"inputs has {counted(len(plans), 'entry')}; the function was lowered with {count} "
                f"positional arguments{keywords if names else ''}"
            )
        places = [f"inputs[{i}]" for i in range(count)]
        places += [f"inputs[{count}][{name!r}]" for name in side.keywords]
        for at, plan, (treedef, _) in zip(places, side.plans_of(plans), side.subtrees, strict=True):
            self.fill(at, plan, treedef)

    def fill(self, at: str, plan: Any, treedef: Any) -> None:
        """Fill in the leaves of a subtree; errors name it by `at`."""
        if _is_entry(plan):
            self._extend(at, plan, treedef)
            return
        check_decided(at, plan, f"shardrules.plan(tree, rules, mesh); or {PLANNED}")
        entries, structure = tree_util.tree_flatten_with_path(plan, is_leaf=_is_entry)
        prefix: Any = structure
        for keys, entry in entries:
            if not _is_entry(entry):
                raise TypeError(f"{at}{tree_util.keystr(keys)} is {shown(entry)}; give {PLANNED}")
        numbers = treedef.unflatten(range(treedef.num_leaves))
        try:
            parts = prefix.flatten_up_to(numbers)
        except ValueError as error:
            paths = [keys for keys, _ in tree_util.tree_flatten_with_path(numbers)[0]]
            nodes = {keys[:count] for keys in paths for count in range(len(keys) + 1)}
            unknown = next((keys for keys, _ in entries if keys not in nodes), ())
            raise _misfit(
                f"{at}{tree_util.keystr(unknown)}: the structure is not that of the "
                f"{self._side.name}: {error}"
            ) from None
        for (keys, entry), part in zip(entries, parts, strict=True):
            place = at + tree_util.keystr(keys)
            self._extend(place, entry, tree_util.tree_structure(part))

    def _extend(self, at: str, entry: Any, treedef: Any) -> None:
        if isinstance(entry, Plan):
            self.targets += self._of_plan(at, entry, treedef)
        else:
            target = None if entry is None else self._record(at, entry)
            self.targets += [target] * treedef.num_leaves

    def _record(self, at: str, planned: Any) -> PlannedSharding:
        if planned not in self._records:
            kind, sharding = None, planned
            if is_partition_spec(planned):
                sharding = NamedSharding(self._mesh(at, None), as_partition_spec(planned))
            elif isinstance(planned, NamedSharding) and not isinstance(planned.mesh, Mesh):
                mesh, kind = self._mesh(at, dict(planned.mesh.shape)), planned.memory_kind
                sharding = NamedSharding(mesh, planned.spec)
            else:
                kind = memory_apart(planned)
            self._records[planned] = PlannedSharding(sharding, kind)
        return self._records[planned]

    def _of_plan(self, at: str, plan: Plan, treedef: Any) -> list[PlannedSharding]:
        rows, structure = plan._leaves.flat
        if structure != treedef:
            rows = np.array(self._rows_by_paths(at, plan, treedef), np.int64)
        kinds = plan.kind_of[rows].tolist()
        begin = len(self.targets)
        shapes = self._side.shapes[begin : begin + treedef.num_leaves]
        shape_of = [kind.shape for kind in plan.kinds]
        planned_shapes = [shape_of[kind] for kind in kinds]
        if planned_shapes != shapes:
            rows_of = zip(rows, planned_shapes, shapes, strict=True)
            row, wrong, shape = next(row for row in rows_of if row[1] != row[2])
            raise _misfit(
                f"{at}: the plan is for other shapes: {plan.paths[row]} is planned as {wrong}, and "
                f"there is {shape}; plan the tree that the function {self._verb}"
            )
        mesh: Any = plan.mesh
        if not has_devices(mesh) or other_kinds(self._executable, plan):
            mesh = self._mesh(at, sized_mesh(mesh).axis_sizes)
        of_kind = [
            PlannedSharding(
                NamedSharding(mesh, as_partition_spec(spec)),
                kind.memory_kind,
                shared_along(kind),
                is_of_plan=True,
            )
            for spec, kind in zip(kind_specs(plan), plan.kinds, strict=True)
        ]
        return [of_kind[kind] for kind in kinds]

    def _rows_by_paths(self, at: str, plan: Plan, treedef: Any) -> list[int]:
        """Find the plan's row for each leaf of another structure, by paths."""
        leaves = plan._leaves
        begin = len(self.targets)
        arrays = self._side.leaves[begin : begin + treedef.num_leaves]
        tree, rules = treedef.unflatten(arrays), Rules((), leaves.paths_dialect)
        aligned = align(tree, leaves, partial(rows_and_paths, rules=rules))
        paths = aligned.leaves.paths
        lacking = [path for path, row in zip(paths, aligned.rows, strict=True) if row == -1]
        # What is no array, such as a function in a module of equinox, is no argument either.
        absent = [
            aligned.reference_paths[row]
            for row in aligned.missing
            if plan.kinds[plan.kind_of[row]].shape is not None
        ]
        if lacking or absent:
            words, near = ("lacks", aligned.reference_paths) if lacking else ("has", paths)
            path = (lacking or absent)[0]
            raise _misfit(
                f"{at}: the plan is for another tree: it {words} the leaf {path or _BARE}"
                f"{near_shown(path, near)}; plan the tree that the function {self._verb}"
            )
        return [aligned.rows[row] for row in tree_util.tree_leaves(aligned.leaves.tree)]

    def _mesh(self, at: str, axis_sizes: Mapping[str, int] | None) -> AnyMesh:
        """Return the executable's mesh, which must have these axes."""
        mesh = self._executable.mesh
        if mesh is None:
            raise _misfit(
                f"{at}: a spec or a plan without devices takes those of the executable's mesh, and "
                "none of its inputs and outputs has a mesh; plan on a Mesh of devices"
            )
        if axis_sizes is not None and tuple(axis_sizes.items()) != tuple(mesh.shape.items()):
            raise _misfit(
                f"{at}: the plan is for the mesh {mesh_shown(axis_sizes)}, and the executable has "
                f"{mesh_shown(mesh.shape)}; give plan.on_mesh(mesh)"
            )
        return mesh


def _is_entry(node: Any) -> bool:
    return node is None or isinstance(node, Plan | PartitionSpec | Sharding)


def other_kinds(executable: Executable, planned: Any) -> list[str]:
    """List the kinds of devices that plans are for, and the executable is not."""
    if executable.mesh is None:
        return []
    meshes = (leaf.mesh for leaf in tree_util.tree_leaves(planned) if isinstance(leaf, Plan))
    kinds = {mesh.devices.flat[0].device_kind for mesh in meshes if has_devices(mesh)}
    return sorted(kinds - {executable.device_kind})


def _misfit(message: str) -> ValueError:
    """Make an error whose text may have names of users in it."""
    return ValueError(printable(message))
