"""What users plan for the inputs or outputs of an executable, as one record for each leaf.

Costs a comparison of structures per argument; leaves that are alike share a record. Must not know
what an executable does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._mesh.memory import memory_apart
from shardrules._mesh.mesh import has_devices, on_axes
from shardrules._place.decider import check_decided
from shardrules._plan.plan import Plan
from shardrules._plan.resolve import axis_sizes_of
from shardrules._plan.trees import kind_specs
from shardrules._rules.rules import Rules
from shardrules._specs import as_partition_spec, is_partition_spec
from shardrules._text import brief, counted, mesh_shown, near_shown, printable, shown, with_article
from shardrules._trees.align import align, rows_and_paths

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from shardrules._verify.executable import Executable, Side

_WHAT: Final = "a Plan, a tree of PartitionSpecs or shardings, or None for what is not looked at"


class Wanted(NamedTuple):
    """What is planned for leaves."""

    sharding: Any
    memory_kind: str | None
    """None if nothing is said about memory, or it is the default."""


class _Placed(NamedTuple):
    """A plan's leaves in the order of a structure."""

    of_kind: list[Wanted]
    structure: Any
    rows: list[int]
    wanted: list[Wanted | None]
    shapes: list[Any]


def wanted(
    executable: Executable, inputs: Any, outputs: Any
) -> tuple[list[Wanted | None], list[Wanted | None]]:
    """What is planned for each leaf of the inputs and of the outputs.

    What the call changes in place is planned as it goes in.

    Args:
        executable: The executable.
        inputs: A tuple with an entry for each positional argument. Behind these, a dict for keyword
            arguments, if the function was lowered with any.
        outputs: What is planned for the result.

    Raises:
        TypeError: It is no tuple, or has something else in it.
        ValueError: It does not fit the arguments, or a plan the mesh.
    """
    plans: dict[int, _Placed] = {}
    of_inputs = _Filled(executable.inputs, executable, plans)
    _fill_arguments(of_inputs, executable.inputs, inputs)
    of_outputs = _Filled(executable.outputs, executable, plans)
    of_outputs.fill("outputs", outputs, executable.outputs.treedef)
    updated = [of_inputs.wanted[before] for before, _ in executable.call.updates]
    return of_inputs.wanted, of_outputs.wanted + updated


def _fill_arguments(filled: _Filled, side: Side, given: Any) -> None:
    if not isinstance(given, tuple | list):
        raise TypeError(
            f"inputs is {shown(given)}; give a tuple with an entry for each positional argument: "
            f"{_WHAT}"
        )
    names = side.keywords
    count = len(side.subtrees) - len(names)
    positional, keywords = side.subtrees[:count], side.subtrees[count:]
    if len(given) not in (count, count + bool(names)):
        raise _misfit(
            f"inputs has {counted(len(given), 'entry')}; the function was lowered with {count} "
            f"positional arguments{_and_keywords(names)}"
        )
    for i, (entry, (treedef, _)) in enumerate(zip(given, positional, strict=False)):
        filled.fill(f"inputs[{i}]", entry, treedef)
    by_name = given[count] if len(given) > count else {}
    at = f"inputs[{count}]"
    if not isinstance(by_name, Mapping) or not set(by_name) <= set(names):
        raise _misfit(
            f"{at} is {brief(by_name)}; it must be a dict for these keyword arguments: "
            f"{', '.join(names)}"
        )
    for name, (treedef, _) in zip(names, keywords, strict=True):
        filled.fill(f"{at}[{name!r}]", by_name.get(name), treedef)


def _arranged(plan: Plan, of_kind: list[Wanted], structure: Any, rows: list[int]) -> _Placed:
    columns = plan._columns
    kind_of = columns.kind_of[rows].tolist()
    shapes = [kind.shape for kind in columns.kinds]
    return _Placed(
        of_kind,
        structure,
        rows,
        wanted=[of_kind[kind] for kind in kind_of],
        shapes=[shapes[kind] for kind in kind_of],
    )


def _and_keywords(names: tuple[str, ...]) -> str:
    listed = ", ".join(names)
    return f", and with keyword arguments, for which a dict may follow: {listed}" if names else ""


class _Filled:
    """Fills `wanted` from its beginning, one subtree of the side's structure after the other."""

    def __init__(self, side: Side, executable: Executable, plans: dict[int, _Placed]) -> None:
        from jax.sharding import PartitionSpec, Sharding

        self.wanted: list[Wanted | None] = []
        self._side = side
        self._executable = executable
        self._plans = plans
        self._records: dict[int, Wanted] = {}
        self._types = (PartitionSpec, Sharding)

    def fill(self, at: str, given: Any, treedef: Any) -> None:
        """Fills the leaves of a subtree.

        Args:
            at: Where it is, for errors.
            given: What is planned for it.
            treedef: Its structure.
        """
        from jax import tree_util

        count = treedef.num_leaves
        if given is None:
            self.wanted += [None] * count
        elif isinstance(given, Plan):
            self.wanted += self._of_plan(at, given, treedef)
        elif isinstance(given, self._types):
            self.wanted += [self._record(at, given)] * count
        else:
            check_decided(at, given, f"shardrules.plan(tree, rules, mesh); or {_WHAT}")
            leaves, structure = tree_util.tree_flatten(given)
            types = set(map(type, leaves))
            if structure == treedef and all(issubclass(one, self._types) for one in types):
                self.wanted += [self._record(at, one) for one in leaves]
            else:
                self._fill_children(at, given, treedef)

    def _fill_children(self, at: str, given: Any, treedef: Any) -> None:
        from jax import tree_util

        children, tree = tree_util.tree_flatten_with_path(given, lambda one: one is not given)
        node: Any = tree
        if node.num_nodes == 1:
            raise TypeError(f"{at} is {shown(given)}; give {_WHAT}")
        if node.node_data() != treedef.node_data() or len(children) != len(treedef.children()):
            raise _misfit(
                f"{at}: the structure is not that of the {self._side.name}: {_node_shown(node)} "
                f"is planned, and there is {_node_shown(treedef)}"
            )
        for (key, child), child_def in zip(children, treedef.children(), strict=True):
            self.fill(at + tree_util.keystr(key), child, child_def)

    def _record(self, at: str, given: Any) -> Wanted:
        from jax.sharding import Mesh, NamedSharding

        if id(given) not in self._records:
            if is_partition_spec(given):
                made = Wanted(NamedSharding(self._mesh(at, None), as_partition_spec(given)), None)
            elif isinstance(given, NamedSharding) and not isinstance(given.mesh, Mesh):
                mesh = self._mesh(at, dict(given.mesh.shape))
                made = Wanted(NamedSharding(mesh, given.spec), given.memory_kind)
            else:
                made = Wanted(given, memory_apart(given))
            self._records[id(given)] = made
        return self._records[id(given)]

    def _of_plan(self, at: str, plan: Plan, treedef: Any) -> list[Wanted | None]:
        from jax import tree_util

        leaves = plan._columns.leaves
        if id(plan) not in self._plans:
            rows, structure = tree_util.tree_flatten(leaves.tree)
            self._plans[id(plan)] = _arranged(plan, self._of_kind(at, plan), structure, rows)
        placed = self._plans[id(plan)]
        if placed.structure != treedef:
            rows = self._rows_by_paths(at, plan, treedef)
            placed = _arranged(plan, placed.of_kind, treedef, rows)
        begin = len(self.wanted)
        there = self._side.shapes[begin : begin + treedef.num_leaves]
        if placed.shapes != there:
            pairs = zip(placed.rows, placed.shapes, there, strict=True)
            row, planned, has = next(one for one in pairs if one[1] != one[2])
            raise _misfit(
                f"{at}: the plan is for other shapes: {leaves.paths[row]} is planned as {planned}, "
                f"and there is {has}; plan the tree that the function takes"
            )
        return placed.wanted

    def _of_kind(self, at: str, plan: Plan) -> list[Wanted]:
        from jax.sharding import NamedSharding

        columns, given = plan._columns, plan._mesh
        base = given if has_devices(given) else self._mesh(at, axis_sizes_of(given))
        mesh = on_axes(base, columns.axis_sizes)
        return [
            Wanted(NamedSharding(mesh, as_partition_spec(spec)), kind.memory_kind)
            for spec, kind in zip(kind_specs(columns), columns.kinds, strict=True)
        ]

    def _rows_by_paths(self, at: str, plan: Plan, treedef: Any) -> list[int]:
        """The plan's row for each leaf of another structure, by the leaves' paths."""
        from jax import tree_util

        columns = plan._columns
        leaves = columns.leaves
        begin = len(self.wanted)
        arrays = self._side.leaves[begin : begin + treedef.num_leaves]
        tree, rules = treedef.unflatten(arrays), Rules((), leaves.paths_dialect)
        aligned = align(tree, leaves, partial(rows_and_paths, rules=rules))
        paths = aligned.leaves.paths
        if -1 in aligned.rows:
            path = paths[aligned.rows.index(-1)]
            raise _misfit(
                f"{at}: the plan is for another tree: it has no leaf {path}"
                f"{near_shown(path, aligned.reference_paths)}; plan the tree that the function "
                "takes"
            )
        for row in aligned.missing:
            # What is no array, such as a function in a module of equinox, is no argument either.
            if columns.kinds[columns.kind_of[row]].shape is not None:
                path = aligned.reference_paths[row]
                raise _misfit(
                    f"{at}: the plan is for another tree: there is no leaf {path} in the "
                    f"{self._side.name}{near_shown(path, paths)}; plan the tree that the "
                    "function takes"
                )
        return [aligned.rows[row] for row in tree_util.tree_leaves(aligned.leaves.tree)]

    def _mesh(self, at: str, axis_sizes: Mapping[str, int] | None) -> Mesh:
        """The executable's mesh, which must have these axes."""
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


def _misfit(message: str) -> ValueError:
    """The error for what does not fit; its text may have names of users in it."""
    return ValueError(printable(message))


def _node_shown(treedef: Any) -> str:
    """A node of a tree without what is below it: a dict of 'k', 'v'; a tuple of 2; a leaf."""
    found = treedef.node_data()
    if found is None:
        return "a leaf" if treedef.num_leaves else "nothing"
    name, children = found[0].__name__, treedef.children()
    if issubclass(found[0], dict):
        return f"{with_article(name)} of {brief(list(found[1]))}"
    return f"{with_article(name)} of {len(children)}"
