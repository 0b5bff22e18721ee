"""`reshard`: live trees to another mesh, other rules, other names, in batches of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import starmap
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util
from jax.sharding import NamedSharding

from shardrules._base.arguments import boolean, byte_size
from shardrules._base.dtypes import as_float_name, bits_of
from shardrules._base.mistakes import in_order
from shardrules._checkpoint.conversion import cast, check_kept, make_target, numpy_dtype
from shardrules._checkpoint.load import checked_sharding, match_tree, shapes_and_dtypes, weights_in
from shardrules._checkpoint.names import Rename, checked_renames, forwards
from shardrules._checkpoint.targets import Problems
from shardrules._checkpoint.units import DEFAULT_IN_FLIGHT, in_batches
from shardrules._place.boxes import open_boxes
from shardrules._place.decider import RulesLike
from shardrules._place.mesh import MeshLike
from shardrules._place.named_shardings import only_process, requested_shardings
from shardrules._place.processes import JointCall, rows_of
from shardrules._place.shard import placeable
from shardrules._place.spec_trees import leaf_path, leaf_paths
from shardrules._place.transfers import Donated, check_reachable, put, stays_within
from shardrules._plan.align import check_distinct
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.plan import Plan


class _Move(NamedTuple):
    """Array of the result."""

    sharding: NamedSharding
    shape: tuple[int, ...]
    dtype: Any
    sources: tuple[int, ...]
    """Which leaves of the tree it is made of."""
    make: Callable[[], tuple[Any, Any]]
    """Makes it, on the devices of its sources; and whether a value got lost, or None."""

    @property
    def bytes(self) -> int:
        return -(-prod(self.shape) * bits_of(self.dtype) // 8)


@in_order("tree", "rules", "mesh")
def reshard(
    tree: Any,
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    donate: bool = False,
    dtype: Any = None,
    renames: Iterable[Rename] = (),
    max_bytes_in_flight: int | str = DEFAULT_IN_FLIGHT,
) -> Any:
    """Move a live tree to another mesh or other rules, some arrays at a time.

    `jax.device_put` moves the arrays; they may go to the same devices, to some of them, or to
    others. Each batch has arrived before the next is sent.

    Args:
        tree: A pytree of jax.Arrays and numpy arrays, as in `shard`.
        rules: A `Plan`, whose tree the result gets: structure, shapes and dtypes; arrays
            are found by their paths, and boxes of flax stay. Or what `shard` takes, such as the
            shardings of another tree.
        mesh: The Mesh for rules and PartitionSpecs. Default: the context's, or the plan's.
        donate: Whether the arrays of the tree may be given up. They are deleted as soon as all that
            is made of them has arrived, unless an array of the result uses the memory of a part.
            Default: False.
        dtype: As in `load`. Default: the plan's dtypes, or their own.
        renames: `Rename` templates for arrays that have other names in the result, or lie
            otherwise, as in `load`. A program is compiled for each form that is not just another
            name.
        max_bytes_in_flight: Maximum bytes of the arrays of a batch, on all devices together; an
            array that has more goes alone. Default: 2 GiB.

    Returns:
        The tree of jax.Arrays. With renames and rules, the new names, as `load` has them.

    Raises:
        ValueError: As `shard`; or, as in `load`, something does not fit the plan's tree, or a dtype
            lacks a finite value; or several processes hold an array, and JAX cannot move it there.
        TypeError: As `shard`.
        RuntimeError: In several processes: their calls differ, or a process has failed or is late.

    Example:
        >>> import jax, numpy as np
        >>> import shardrules as sr
        >>> one = jax.sharding.Mesh(jax.devices()[:1], ("tp",))
        >>> placed = sr.shard({"wq": np.ones((4, 8), "float32")}, [("wq", "tp")], one)
        >>> moved = sr.reshard(placed, [("wq", (None, "tp"))], one, dtype="bfloat16")
        >>> tuple(moved["wq"].sharding.spec), str(moved["wq"].dtype)
        ((None, 'tp'), 'bfloat16')
    """
    with JointCall("reshard") as call:
        renames = checked_renames(renames)
        gives_up = boolean("donate", donate)
        name = None if dtype is None else as_float_name("dtype", dtype)
        most = byte_size("max_bytes_in_flight", max_bytes_in_flight)
        if call.joint and stays_within(tree, only_process(rules, mesh)):
            call.alone()
        abstract, moves = _moves(tree, rules, mesh, renames, name)
        options = f"donate={gives_up}, dtype={name}, renames={renames}, in flight={most}"
        shardings = {i: move.sharding for i, move in moves.items()}
        values, treedef = tree_util.tree_flatten(abstract)
        sources = list(values) if abstract is tree else tree_util.tree_leaves(tree)
        if call.joint:
            for i, move in moves.items():
                for source in move.sources:
                    path = leaf_path(abstract, i)
                    check_reachable(path, sources[source], move.sharding, move.shape)
        call.agree(lambda: rows_of(abstract, shardings, options))
    uses_left = Counter(source for move in moves.values() for source in move.sources)
    donated = Donated(sources if gives_up else ())
    batches = list(in_batches(moves, most, lambda i: moves[i].bytes))
    for batch in batches:
        before, losses = zip(*(moves[i].make() for i in batch), strict=True)
        for i, loss in zip(batch, losses, strict=True):
            if loss is not None:
                check_kept(leaf_path(abstract, i), loss)
        arrays = put(list(before), [moves[i].sharding for i in batch])
        if gives_up or len(batches) > 1:
            jax.block_until_ready(arrays)
        for i, array in zip(batch, arrays, strict=True):
            values[i] = array
            uses_left.subtract(moves[i].sources)
        if gives_up:
            donated.keep(arrays)
            used = {source for i in batch for source in moves[i].sources}
            donated.give_up([sources[source] for source in used if not uses_left[source]])
    return tree_util.tree_unflatten(treedef, values)


def _moves(
    tree: Any, rules: Any, mesh: MeshLike | None, renames: Sequence[Rename], dtype: str | None
) -> tuple[Any, dict[int, _Move]]:
    """Return (the result or an abstract one of its structure, the move of each leaf that moves)."""
    if isinstance(rules, Plan) and mesh is not None:
        rules = rules.on_mesh(mesh)
    if renames or (isinstance(rules, Plan) and not _is_planned(tree, rules)):
        return _moves_by_paths(tree, rules, mesh, renames, dtype)
    if isinstance(rules, Plan):
        leaves = tree_util.tree_leaves(tree)
        shardings = [leaf.sharding for leaf in tree_util.tree_leaves(rules.abstract())]
    else:
        leaves, _, shardings = requested_shardings(tree, rules, mesh)
    return tree, _as_they_are(tree, leaves, shardings, dtype)


def _is_planned(tree: Any, plan: Plan) -> bool:
    """True if a tree is the plan's, but for boxes: then no array is looked for by its path."""
    leaves, treedef = tree_util.tree_flatten(tree)
    goals, planned = tree_util.tree_flatten(plan.abstract())
    # A plan of a tree with names has its arrays without their boxes.
    if planned not in (treedef, tree_util.tree_structure(open_boxes(tree).tree)):
        return False
    forms = ((np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves)
    return all(form == (goal.shape, goal.dtype) for form, goal in zip(forms, goals, strict=True))


def _as_they_are(
    tree: Any, leaves: list[Any], shardings: list[Any], dtype: str | None
) -> dict[int, _Move]:
    """Return the move of each leaf that moves, by its index."""
    paths = leaf_paths(tree) if dtype is not None else []
    names = (str(getattr(leaf, "dtype", "")) for leaf in leaves)
    weights = weights_in(dict(zip(paths, names, strict=False)))
    moves = {}
    for i, sharding in enumerate(placeable(tree, leaves, shardings)):
        if sharding is not None:
            leaf = leaves[i]
            goal = getattr(leaf, "dtype", None)
            if dtype is not None and paths[i] in weights:
                goal = numpy_dtype(dtype)
            if isinstance(leaf, np.ndarray | np.generic):
                goal = jax.dtypes.canonicalize_dtype(goal)
            make = partial(cast, leaf, goal)
            moves[i] = _Move(sharding, np.shape(leaf), goal or "float32", (i,), make)
    return moves


def _moves_by_paths(
    tree: Any, rules: Any, mesh: MeshLike | None, renames: Sequence[Rename], dtype: str | None
) -> tuple[Any, dict[int, _Move]]:
    """Return (the abstract tree of the result, the move of each of its leaves)."""
    names, (leaves, treedef) = leaf_paths(tree), tree_util.tree_flatten(tree)
    check_distinct(names, "a leaf finds its array by its path")
    arrays = dict(zip(names, starmap(ArraySpec, shapes_and_dtypes(tree, names)), strict=True))
    in_tree = None
    if isinstance(rules, Plan):
        in_tree, mesh = rules.abstract(), None
        planned: Any = tree_util.tree_structure(in_tree)
        # A plan of a tree with names has its arrays without their boxes.
        if not renames and tree_util.tree_structure(open_boxes(tree).tree) == planned:
            in_tree = tree_util.tree_unflatten(treedef, tree_util.tree_leaves(in_tree))
    problems = Problems("the tree")
    abstract, targets = match_tree(arrays, in_tree, forwards(renames), dtype, problems)
    specs, _, shardings = requested_shardings(abstract, rules, mesh)
    live, row = dict(zip(names, leaves, strict=True)), {name: i for i, name in enumerate(names)}
    moves: dict[int, _Move] = {}
    for (path, target), spec, sharding in zip(targets, specs, shardings, strict=True):
        to = checked_sharding(path, sharding)
        assert target is not None
        sources = tuple({row[part.source]: None for part in target.parts})
        make = partial(make_target, target, live, spec.dtype, to)
        moves[len(moves)] = _Move(to, target.shape, spec.dtype, sources, make)
    return abstract, moves
