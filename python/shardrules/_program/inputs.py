"""Reads what users plan for the inputs and outputs of an executable, leaf by leaf.

Equal leaves share a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from jax import tree_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules._base.specs import as_partition_spec, is_partition_spec
from shardrules._base.text import (
    brief,
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


class _PlanLeaves(NamedTuple):
    """Leaves of a plan in the order of a structure."""

    of_kind: list[PlannedSharding]
    structure: Any
    rows: list[int]
    targets: list[PlannedSharding | None]
    shapes: list[Any]


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
    plans: dict[int, _PlanLeaves] = {}
    of_inputs = _SideTargets(executable.inputs, executable, plans)
    _fill_arguments(of_inputs, executable.inputs, inputs)
    of_outputs = _SideTargets(executable.outputs, executable, plans)
    of_outputs.fill("outputs", outputs, executable.outputs.treedef)
    updated = [of_inputs.targets[before] for before, _ in executable.call.updates]
    return of_inputs.targets, of_outputs.targets + updated


def _fill_arguments(targets: _SideTargets, side: Side, plans: Any) -> None:
    names = ", ".join(side.keywords)
    count = len(side.subtrees) - len(side.keywords)
    check_entries(plans, count)
    if len(plans) not in (count, count + bool(names)):
        keywords = f", and with keyword arguments, for which a dict may follow: {names}"
        raise _misfit(
            f"inputs has {counted(len(plans), 'entry')}; the function was lowered with {count} "
            f"positional arguments{keywords if names else ''}"
        )
    by_name = plans[count] if len(plans) > count else {}
    places = [f"inputs[{i}]" for i in range(count)]
    places += [f"inputs[{count}][{name!r}]" for name in side.keywords]
    if not isinstance(by_name, Mapping) or not set(by_name) <= set(side.keywords):
        raise _misfit(
            f"inputs[{count}] is {brief(by_name)}; it must be a dict for these keyword arguments: "
            f"{names}"
        )
    for at, plan, (treedef, _) in zip(places, side.plans_of(plans), side.subtrees, strict=True):
        targets.fill(at, plan, treedef)


def _plan_leaves(
    plan: Plan, of_kind: list[PlannedSharding], structure: Any, rows: list[int]
) -> _PlanLeaves:
    kind_of = plan.kind_of[rows].tolist()
    shapes = [kind.shape for kind in plan.kinds]
    return _PlanLeaves(
        of_kind,
        structure,
        rows,
        targets=[of_kind[kind] for kind in kind_of],
        shapes=[shapes[kind] for kind in kind_of],
    )


class _SideTargets:
    """Targets of a side, filled in subtree by subtree."""

    def __init__(self, side: Side, executable: Executable, plans: dict[int, _PlanLeaves]) -> None:
        self.targets: list[PlannedSharding | None] = []
        self._side = side
        self._executable = executable
        self._plans = plans
        self._records: dict[int, PlannedSharding] = {}
        self._types = (PartitionSpec, Sharding)
        self._verb = "takes" if side.name == "inputs" else "returns"

    def fill(self, at: str, plan: Any, treedef: Any) -> None:
        """Fill in the leaves of a subtree; errors name it by `at`."""
        count = treedef.num_leaves
        if plan is None:
            self.targets += [None] * count
        elif isinstance(plan, Plan):
            self.targets += self._of_plan(at, plan, treedef)
        elif isinstance(plan, self._types):
            self.targets += [self._record(at, plan)] * count
        else:
            check_decided(at, plan, f"shardrules.plan(tree, rules, mesh); or {PLANNED}")
            leaves, structure = tree_util.tree_flatten(plan)
            types = set(map(type, leaves))
            if structure == treedef and all(issubclass(of_leaf, self._types) for of_leaf in types):
                self.targets += [self._record(at, leaf) for leaf in leaves]
            else:
                self._fill_children(at, plan, treedef)

    def _fill_children(self, at: str, plan: Any, treedef: Any) -> None:
        children, tree = tree_util.tree_flatten_with_path(plan, lambda node: node is not plan)
        root: Any = tree
        if root.num_nodes == 1:
            raise TypeError(f"{at} is {shown(plan)}; give {PLANNED}")
        if root.node_data() != treedef.node_data() or len(children) != len(treedef.children()):
            raise _misfit(
                f"{at}: the structure is not that of the {self._side.name}: {brief(root)} is "
                f"planned, and there is {brief(treedef)}"
            )
        for (key, child), child_def in zip(children, treedef.children(), strict=True):
            self.fill(at + tree_util.keystr(key), child, child_def)

    def _record(self, at: str, planned: Any) -> PlannedSharding:
        if id(planned) not in self._records:
            if is_partition_spec(planned):
                record = PlannedSharding(
                    NamedSharding(self._mesh(at, None), as_partition_spec(planned)), None
                )
            elif isinstance(planned, NamedSharding) and not isinstance(planned.mesh, Mesh):
                mesh = self._mesh(at, dict(planned.mesh.shape))
                record = PlannedSharding(NamedSharding(mesh, planned.spec), planned.memory_kind)
            else:
                record = PlannedSharding(planned, memory_apart(planned))
            self._records[id(planned)] = record
        return self._records[id(planned)]

    def _of_plan(self, at: str, plan: Plan, treedef: Any) -> list[PlannedSharding | None]:
        leaves = plan._leaves
        if id(plan) not in self._plans:
            rows, structure = leaves.flat
            self._plans[id(plan)] = _plan_leaves(plan, self._of_kind(at, plan), structure, rows)
        planned = self._plans[id(plan)]
        if planned.structure != treedef:
            rows = self._rows_by_paths(at, plan, treedef)
            planned = _plan_leaves(plan, planned.of_kind, treedef, rows)
        begin = len(self.targets)
        shapes = self._side.shapes[begin : begin + treedef.num_leaves]
        if planned.shapes != shapes:
            pairs = zip(planned.rows, planned.shapes, shapes, strict=True)
            row, shape, actual = next(pair for pair in pairs if pair[1] != pair[2])
            raise _misfit(
                f"{at}: the plan is for other shapes: {leaves.paths[row]} is planned as {shape}, "
                f"and there is {actual}; plan the tree that the function {self._verb}"
            )
        return planned.targets

    def _of_kind(self, at: str, plan: Plan) -> list[PlannedSharding]:
        planned = plan.mesh
        if has_devices(planned) and not is_of_other_kind(self._executable, planned):
            mesh: Any = planned
        else:
            mesh = self._mesh(at, sized_mesh(planned).axis_sizes)
        return [
            PlannedSharding(
                NamedSharding(mesh, as_partition_spec(spec)),
                kind.memory_kind,
                shared_along(kind),
                is_of_plan=True,
            )
            for spec, kind in zip(kind_specs(plan), plan.kinds, strict=True)
        ]

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
        others = {
            "lacks the leaf": (lacking, aligned.reference_paths),
            "has the leaf": (absent, paths),
        }
        for words, (unmatched, near) in others.items():
            for path in unmatched[:1]:
                raise _misfit(
                    f"{at}: the plan is for another tree: it {words} {path or _BARE}"
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


def is_of_other_kind(executable: Executable, mesh: Any) -> bool:
    """Say whether a mesh has devices of another kind than those of the executable."""
    mine = executable.mesh
    return (
        mine is not None
        and has_devices(mesh)
        and mesh.devices.flat[0].device_kind != executable.device_kind
    )


def other_kinds(executable: Executable, planned: Any) -> list[str]:
    """List the kinds of devices that plans are for, and the executable is not."""
    leaves = tree_util.tree_leaves(planned, is_leaf=lambda node: isinstance(node, Plan))
    meshes: list[Any] = [leaf.mesh for leaf in leaves if isinstance(leaf, Plan)]
    kinds = [
        mesh.devices.flat[0].device_kind for mesh in meshes if is_of_other_kind(executable, mesh)
    ]
    return sorted(set(kinds))


def _misfit(message: str) -> ValueError:
    """Make an error whose text may have names of users in it."""
    return ValueError(printable(message))
