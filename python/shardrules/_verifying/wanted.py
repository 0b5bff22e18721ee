"""What users plan for the inputs or outputs of an executable, as one record for each leaf.

Costs a comparison of structures per argument; leaves that are alike share a record. Must not know
what an executable does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._format import brief, mesh_shown, nearest, shown
from shardrules._matching.rules import Rules
from shardrules._planning.asking.trees import kind_specs
from shardrules._planning.placing.on_mesh import axis_sizes_of
from shardrules._planning.placing.survey import survey
from shardrules._planning.plan import Plan
from shardrules._printable import printable
from shardrules._sharding.memory import memory_apart
from shardrules._sharding.mesh import has_devices, on_axes
from shardrules._specs import as_partition_spec, is_partition_spec

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from shardrules._verifying.executable import Executable, Side

__all__ = ["Wanted", "wanted_inputs", "wanted_outputs"]

_WHAT: Final = "a Plan, a tree of PartitionSpecs or shardings, or None for what is not looked at"


class Wanted(NamedTuple):
    """What is planned for leaves."""

    sharding: Any
    memory_kind: str | None
    """None if nothing is said about memory, or it is the default."""


def wanted_inputs(executable: Executable, given: Any) -> list[Wanted | None]:
    """Per leaf of the inputs what is planned for it.

    Args:
        executable: The executable.
        given: A tuple with an entry for each positional argument. Behind these, a dict for keyword
            arguments, if the function was lowered with any.

    Raises:
        TypeError: It is no tuple, or has something else in it.
        ValueError: It does not fit the arguments, or a plan the mesh.
    """
    side = executable.inputs
    positional, keywords = side.treedef.children()
    if not isinstance(given, tuple | list):
        raise TypeError(
            f"inputs is {shown(given)}; give a tuple with an entry for each positional argument: "
            f"{_WHAT}"
        )
    counts = [len(positional.children()), len(positional.children()) + 1]
    if len(given) not in counts[: 1 + bool(keywords.num_leaves)]:
        raise _misfit(
            f"inputs has {len(given)} entries; the function was lowered with {counts[0]} "
            f"positional arguments{_and_keywords(keywords)}"
        )
    filled = _Filled(side, executable)
    for i, (entry, treedef) in enumerate(zip(given, positional.children(), strict=False)):
        filled.fill(f"inputs[{i}]", entry, treedef)
    by_name = given[counts[0]] if len(given) == counts[1] else {}
    filled.fill_some(f"inputs[{counts[0]}]", by_name, keywords)
    return filled.wanted


def wanted_outputs(executable: Executable, given: Any) -> list[Wanted | None]:
    """Per leaf of the outputs what is planned for it; see `wanted_inputs`."""
    filled = _Filled(executable.outputs, executable)
    filled.fill("outputs", given, executable.outputs.treedef)
    return filled.wanted


def _and_keywords(keywords: Any) -> str:
    names = keywords.node_data()[1]
    return f", and with keyword arguments, for which a dict may follow: {names}" if names else ""


class _Filled:
    """Fills `wanted` from its beginning, one subtree of the side's structure after the other."""

    def __init__(self, side: Side, executable: Executable) -> None:
        from jax.sharding import PartitionSpec, Sharding

        self.wanted: list[Wanted | None] = []
        self._side = side
        self._executable = executable
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
            leaves, structure = tree_util.tree_flatten(given)
            types = set(map(type, leaves))
            if structure == treedef and all(issubclass(one, self._types) for one in types):
                self.wanted += [self._record(at, one) for one in leaves]
            else:
                self._fill_children(at, given, treedef)

    def fill_some(self, at: str, given: Any, treedef: Any) -> None:
        """Fills the leaves of a dict, of which some keys may be left out."""
        names = treedef.node_data()[1]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise _misfit(
                f"{at} is {brief(given)}; it must be a dict for these keyword arguments: "
                f"{', '.join(map(str, names))}"
            )
        for name, child in zip(names, treedef.children(), strict=True):
            self.fill(f"{at}[{name!r}]", given.get(name), child)

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
        from jax.sharding import NamedSharding

        columns, given = plan._columns, plan._mesh
        base = given if has_devices(given) else self._mesh(at, axis_sizes_of(given))
        mesh = on_axes(base, columns.axis_sizes)
        of_kind = [
            Wanted(NamedSharding(mesh, as_partition_spec(spec)), kind.memory_kind)
            for spec, kind in zip(kind_specs(columns), columns.kinds, strict=True)
        ]
        rows = self._rows(at, plan, treedef)
        kind_of = columns.kind_of[rows].tolist()
        shapes = [kind.shape for kind in columns.kinds]
        self._check_shapes(at, plan, rows, [shapes[kind] for kind in kind_of])
        return [of_kind[kind] for kind in kind_of]

    def _rows(self, at: str, plan: Plan, treedef: Any) -> list[int]:
        """The plan's row for each leaf: by the structure, or else by the leaves' paths."""
        from jax import tree_util

        leaves = plan._columns.leaves
        rows, structure = tree_util.tree_flatten(leaves.tree)
        if structure == treedef:
            return rows
        begin = len(self.wanted)
        arrays = self._side.leaves[begin : begin + treedef.num_leaves]
        other = survey(treedef.unflatten(arrays), Rules((), leaves.paths_dialect), 0)
        row_of = leaves.rows
        for path in other.paths:
            if path not in row_of:
                near = nearest(path, leaves.paths)
                raise _misfit(
                    f"{at}: the plan is for another tree: it has no leaf {path}"
                    f"{f', but {near}' if near else ''}; plan the tree that the function takes"
                )
        for path in set(row_of) - set(other.paths):
            raise _misfit(
                f"{at}: the plan is for another tree: there is no leaf {path} in the "
                f"{self._side.name}; plan the tree that the function takes"
            )
        in_order = tree_util.tree_leaves(other.tree)
        return [row_of[other.paths[row]] for row in in_order]

    def _check_shapes(self, at: str, plan: Plan, rows: list[int], planned: list[Any]) -> None:
        columns, begin = plan._columns, len(self.wanted)
        there = [leaf.shape for leaf in self._side.leaves[begin : begin + len(rows)]]
        if planned == there:
            return
        i = next(i for i, (a, b) in enumerate(zip(planned, there, strict=True)) if a != b)
        raise _misfit(
            f"{at}: the plan is for other shapes: {columns.paths[rows[i]]} is planned as "
            f"{planned[i]}, and there is {there[i]}; plan the tree that the function takes"
        )

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
        return f"a {name} of {brief(list(found[1]))}"
    return f"a {name} of {len(children)}"
