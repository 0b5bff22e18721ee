"""Alignment of the leaves of two trees: by structure or by path, in boxes or without them.

And the trees of a plan's specs, shardings and ShapeDtypeStructs, as JAX takes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from shardrules._base.rule_specs import MemoryKind
from shardrules._base.specs import as_partition_spec
from shardrules._base.text import brief, counted, near_shown
from shardrules._place.boxes import Unboxed, open_boxes
from shardrules._place.mesh import as_mesh, sharding_in_memory
from shardrules._place.shardings import Shardings, listing
from shardrules._place.spec_trees import PathsOfTree, by_row
from shardrules._plan.findings import NOTHING
from shardrules._plan.fold import fold_paths
from shardrules._plan.kinds import Kind, kind_with_bytes
from shardrules._plan.leaves import NO_RULE_NEEDED, Leaves, grouped, survey
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardrules._plan.plan import Plan
    from shardrules._plan.resolve import SizedMesh


# Kinds of findings about leaves that get no sharding.
_WITHOUT_SHARDING: Final = ("unmatched", "misfit", "unknown-axis")
_Walk = TypeVar("_Walk", Leaves, PathsOfTree)
_Path = TypeVar("_Path", bound=Hashable)


@dataclass(frozen=True)
class Alignment(Generic[_Walk]):
    """Leaves of a tree, each with its row in another."""

    leaves: _Walk
    rows: list[int]
    """The row of each leaf in the other tree, or -1."""
    tree: Any
    """The tree; without its boxes, if that is how its leaves were found."""
    boxes: Unboxed | None
    """These boxes."""
    reference_paths: list[str]
    """The paths of the other tree, with boxes or without."""

    @cached_property
    def values(self) -> list[Any]:
        """The leaves themselves, by row."""
        from jax import tree_util

        return by_row(tree_util.tree_leaves(self.leaves.tree), tree_util.tree_leaves(self.tree))

    @property
    def missing(self) -> list[int]:
        """The other tree's rows that no leaf has."""
        return sorted({*range(len(self.reference_paths))}.difference(self.rows))


def align(
    tree: Any, reference: Leaves | PathsOfTree, walk: Callable[[Any], _Walk]
) -> Alignment[_Walk]:
    """Find each leaf of a tree in another by its path: with boxes, or without where more match.

    `walk` gives leaves their paths, as those of the other tree are.
    """
    leaves = walk(tree)
    rows = match_rows(leaves.paths, reference.paths)
    direct = Alignment(leaves, rows, tree, None, reference.paths)
    if -1 not in rows:
        return direct
    # An array in a box has a longer path.
    boxes, unboxed = open_boxes(tree), _without_boxes(reference, walk)
    plain = walk(boxes.tree)
    plain_rows = match_rows(plain.paths, unboxed.paths)
    without = Alignment(plain, plain_rows, boxes.tree, boxes, unboxed.paths)
    return min(direct, without, key=lambda each: each.rows.count(-1))


def _without_boxes(
    reference: Leaves | PathsOfTree, walk: Callable[[Any], Leaves | PathsOfTree]
) -> PathsOfTree:
    """Return the same rows, with the tree and the paths that they have without boxes."""
    from jax import tree_util

    tree = open_boxes(reference.tree).tree
    plain = walk(tree)
    numbers, rows = (tree_util.tree_leaves(each) for each in (plain.tree, tree))
    paths = reference.paths.copy()
    for number, row in zip(numbers, rows, strict=True):
        paths[row] = plain.paths[number]
    return PathsOfTree(tree, paths)


def match_rows(
    paths: Sequence[_Path], references: Sequence[_Path], *spellings: Callable[[_Path], _Path]
) -> list[int]:
    """Return the index of each path among others, or -1; one that stands twice is found nowhere.

    Spellings are tried in turn for the paths that are left on both sides.
    """
    row_of, reference_row_of = _rows_by_path(paths), _rows_by_path(references)
    rows = [reference_row_of.get(path, -1) if path in row_of else -1 for path in paths]
    for spell in spellings:
        if -1 not in rows:
            break
        places = [place for place, row in enumerate(rows) if row < 0]
        free = sorted({*range(len(references))}.difference(rows))
        again = match_rows([spell(paths[i]) for i in places], [spell(references[i]) for i in free])
        for place, index in zip(places, again, strict=True):
            rows[place] = -1 if index < 0 else free[index]
    return rows


def _rows_by_path(paths: Sequence[_Path]) -> dict[_Path, int]:
    row_of = {path: row for row, path in enumerate(paths)}
    if len(row_of) < len(paths):
        counts = Counter(paths)
        row_of = {path: row for path, row in row_of.items() if counts[path] == 1}
    return row_of


def check_distinct(paths: Sequence[str], use: str) -> None:
    """Refuse two leaves of one path, as "a/b" beside "b" of "a"; `use` says who needs paths."""
    if len(set(paths)) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise ValueError(
            f"two leaves have the path {brief(twice)}, and {use}: rename a key of one of them"
        )


def survey_planned(tree: Any, planned: Leaves) -> tuple[Leaves, list[int]]:
    """Walk a tree, and return its leaves with their rows in a plan, which may have more."""
    aligned = align(tree, planned, partial(survey, rules=Rules((), planned.paths_dialect)))
    leaves, boxes = aligned.leaves, aligned.boxes
    if boxes is not None:
        leaves = replace(leaves, tree=boxes.boxed(leaves.tree))
    check_planned(leaves, aligned.rows, planned)
    return leaves, aligned.rows


def check_planned(leaves: Leaves, rows: list[int], planned: Leaves) -> None:
    """Check that leaves are those of these rows in a plan; the error lists the first others."""
    if -1 in rows:
        for paths in (planned.paths, leaves.paths):
            check_distinct(paths, "a plan decides leaves by their paths")
        unknown = [path for path, row in zip(leaves.paths, rows, strict=True) if row == -1]
        folded = fold_paths(unknown)
        planned_patterns = [group.pattern for group in planned.folded]
        raise ValueError(
            listing(
                f"{counted(len(unknown), 'leaf')} of the tree without a place in the plan, which "
                "decides leaves by their paths; plan this tree with plan.rules, or the state of an "
                "optimizer with plan.for_optimizer(state)",
                (path + near_shown(path, planned_patterns) for path in folded),
                len(folded),
                "line",
            )
        )
    shapes, planned_shapes = ([leaf.shape for leaf in each.types] for each in (leaves, planned))
    pairs = zip(leaves.kind_of.tolist(), planned.kind_of[rows].tolist(), strict=True)
    for path, (mine, its) in zip(leaves.paths, pairs, strict=True):
        if shapes[mine] != planned_shapes[its]:
            raise ValueError(
                f"{path} has the shape {shapes[mine]}, and is planned as {planned_shapes[its]}: "
                "plan this tree"
            )


def put_as_planned(
    planned: Plan, leaves: Leaves, rows: list[int], mesh: SizedMesh
) -> tuple[Leaves, list[Kind]]:
    """Put leaves on the mesh as a plan puts its leaves of these rows."""
    planned = planned._on(mesh)
    pairs, kinds_of = grouped(
        zip(leaves.kind_of.tolist(), planned.kind_of[rows].tolist(), strict=True)
    )
    types, kinds = [], []
    for number, index in pairs:
        leaf, kind = leaves.types[number], planned.kinds[index]
        types.append(planned._leaves.types[index]._replace(dtype=leaf.dtype, bits=leaf.bits))
        rule = NO_RULE_NEEDED if kind.rule is None else kind.rule
        followed = leaf._replace(rule=rule, names=kind.names)
        kinds.append(kind_with_bytes(followed, kind, planned.axis_sizes))
    sources = [planned.sources[row] for row in rows]
    leaves = replace(leaves, rules=planned.rules, sources=sources, kind_of=kinds_of, types=types)
    return leaves, kinds


def shardings_in(plan: Plan, tree: Any, numbers: Any, rows: Sequence[int]) -> Shardings:
    """Return the shardings of another tree, by the tree of its leaves' numbers in `rows`."""
    from jax import tree_util

    of_kind, of_row = kind_shardings(plan), plan.kind_of[rows].tolist()
    kinds = [of_row[number] for number in tree_util.tree_leaves(numbers)]
    treedef: Any = tree_util.tree_structure(tree)
    return Shardings(
        lambda: treedef.unflatten(of_kind[kind] for kind in kinds),
        lambda: [(of_kind[kind], plan.kinds[kind].memory_kind is not None) for kind in kinds],
    )


def kind_specs(plan: Plan) -> list[Any]:
    """Return the spec of each kind."""
    if any(kind.status != "placed" for kind in plan.kinds):
        raise ValueError(placement_errors(plan))
    return [kind.spec for kind in plan.kinds]


def kind_shardings(plan: Plan) -> list[NamedSharding]:
    on_mesh = as_mesh(plan.mesh)
    placed: list[tuple[Any, MemoryKind | None]] = [
        (spec, kind.memory_kind) for spec, kind in zip(kind_specs(plan), plan.kinds, strict=True)
    ]
    try:
        sharding_of = {
            (spec, memory): sharding_in_memory(on_mesh, as_partition_spec(spec), memory)
            for spec, memory in set(placed)
        }
    except ValueError as error:
        raise ValueError(placement_errors(plan) or str(error)) from error
    return [sharding_of[pair] for pair in placed]


def placement_errors(plan: Plan) -> str:
    """Return the findings of `check` about leaves without a sharding; "" if all have one."""
    from shardrules._plan.check import refusals, run_checks

    if not any(kind.status != "placed" or any(refusals(kind, plan)) for kind in plan.kinds):
        return ""
    findings = run_checks(plan, declared=NOTHING)
    return "\n".join(str(each) for each in findings if each.kind in _WITHOUT_SHARDING)


def mapped(plan: Plan, of_kind: Iterable[Any]) -> Any:
    """Return the plan's tree, with what is given for the kind of each leaf."""
    from jax import tree_util

    values = [*of_kind]
    of_row = [values[kind] for kind in plan.kind_of.tolist()]
    return tree_util.tree_map(of_row.__getitem__, plan._leaves.tree)
