"""`reshard`: live trees to another mesh, other rules, other names, in batches of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import starmap
from math import prod
from typing import Any, NamedTuple, overload

import jax
import numpy as np
from jax import tree_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from shardrules._base.arguments import as_tuple, boolean, check_items, integer
from shardrules._base.dtypes import BITS, bits_of, given_float, is_plain_float
from shardrules._base.mistakes import Tree, in_order
from shardrules._base.text import bytes_shown, shown
from shardrules._checkpoint.conversion import LossError, cast, check_kept, numpy_dtype
from shardrules._checkpoint.names import A_RENAME, Rename, forwards
from shardrules._checkpoint.programs import made_of
from shardrules._checkpoint.targets import Problems, Target
from shardrules._checkpoint.trees import checked_sharding, matched, scales_in, shapes_and_dtypes
from shardrules._checkpoint.units import DEFAULT_IN_FLIGHT, in_batches
from shardrules._place.agreement import rows_of
from shardrules._place.boxes import unboxed
from shardrules._place.decider import RulesLike
from shardrules._place.mesh import MeshLike
from shardrules._place.named_arrays import leaf_paths, rows_and_paths
from shardrules._place.named_shardings import only_process, requested_shardings
from shardrules._place.processes import JointCall
from shardrules._place.shard import placeable
from shardrules._place.spec_trees import leaf_path
from shardrules._place.transfers import Donated, check_reachable, put, stays_within
from shardrules._plan.align import align, check_distinct
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.plan import Plan


class _Move(NamedTuple):
    """Array of the result."""

    sharding: NamedSharding
    shape: tuple[int, ...]
    bytes: int
    sources: tuple[int, ...]
    """Which leaves of the tree it is made of."""
    make: Callable[[], tuple[Any, Any]]
    """Makes it, on the devices of its sources; and whether a value got lost, or None."""


# A plan or renames may give the result another structure.
@overload
def reshard(
    tree: Any,
    rules: Plan,
    mesh: MeshLike | None = None,
    *,
    donate: bool = False,
    dtype: Any = None,
    renames: Iterable[Rename] = (),
    max_bytes_in_flight: int | None = None,
) -> Any: ...
@overload
def reshard(
    tree: Any,
    rules: Any,
    mesh: MeshLike | None = None,
    *,
    donate: bool = False,
    dtype: Any = None,
    renames: Iterable[Rename],
    max_bytes_in_flight: int | None = None,
) -> Any: ...
@overload
def reshard(
    tree: Tree,
    rules: Any,
    mesh: MeshLike | None = None,
    *,
    donate: bool = False,
    dtype: Any = None,
    max_bytes_in_flight: int | None = None,
) -> Tree: ...
@in_order("tree", "rules", "mesh")
def reshard(
    tree: Any,
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    donate: bool = False,
    dtype: Any = None,
    renames: Iterable[Rename] = (),
    max_bytes_in_flight: int | None = None,
) -> Any:
    """Move a live tree to another mesh or other rules, some arrays at a time.

    `jax.device_put` moves the arrays; they may go to the same devices, to some of them, or to
    others. Each batch has arrived before the next is sent.

    Args:
        tree: A pytree of jax.Arrays and numpy arrays, as in `shard`.
        rules: A `Plan`, whose tree the result gets: structure, shapes and dtypes; arrays
            are found by their paths, and boxes of flax stay. Or what `shard` takes. Or a tree of
            arrays, or of ShapeDtypeStructs with shardings, whose shardings the arrays get.
        mesh: The Mesh for rules and PartitionSpecs. Default: the context's, or the plan's.
        donate: Whether the arrays of the tree may be given up. They are deleted as soon as all that
            is made of them has arrived, unless an array of the result uses the memory of a part.
            Default: False.
        dtype: As in `load`. Default: the plan's dtypes, or their own.
        renames: `Rename` templates for arrays that have other names in the result, or lie
            otherwise, as in `load`. A program is compiled for each form that is not just another
            name.
        max_bytes_in_flight: Maximum bytes of the arrays of a batch, on all devices together.
            Default: 2 GiB, or more if an array has more.

    Returns:
        The tree of jax.Arrays. With renames and rules, the new names, as `load` has them.

    Raises:
        ValueError: As `shard`; or an array is larger than `max_bytes_in_flight`; or, as in `load`,
            something does not fit the plan's tree, or a dtype lacks a finite value; or several
            processes hold an array, and JAX cannot move it there.
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
        followed = check_items("renames", as_tuple("renames", renames, "Renames"), Rename, A_RENAME)
        gives_up = boolean("donate", donate)
        name = None if dtype is None else given_float("dtype", dtype)
        most = max_bytes_in_flight
        if most is not None:
            most = integer("max_bytes_in_flight", most, 1, what="a number of bytes")
        if call.joint and stays_within(tree, only_process(_shardings_in(rules) or rules, mesh)):
            call.alone()
        abstract, moves_by_leaf = _moves(tree, rules, mesh, followed, name)
        most = _bound(moves_by_leaf, most, abstract)
        options = f"donate={gives_up}, dtype={name}, renames={followed}, in flight={most}"
        shardings = {i: move.sharding for i, move in moves_by_leaf.items()}
        values, treedef = tree_util.tree_flatten(abstract)
        sources = list(values) if abstract is tree else tree_util.tree_leaves(tree)
        if call.joint:
            for i, move in moves_by_leaf.items():
                for source in move.sources:
                    path = leaf_path(abstract, i)
                    check_reachable(path, sources[source], move.sharding, move.shape)
        call.agree(lambda: rows_of(abstract, shardings, options))
    uses_left = Counter(source for move in moves_by_leaf.values() for source in move.sources)
    donated = Donated(sources if gives_up else ())
    batches = list(in_batches(moves_by_leaf, most, lambda i: moves_by_leaf[i].bytes))
    for batch in batches:
        moves = [moves_by_leaf[i] for i in batch]
        made: list[Any] = []
        losses: dict[str, Any] = {}
        for i, move in zip(batch, moves, strict=True):
            try:
                array, loss = move.make()
            except LossError as error:
                raise ValueError(f"{leaf_path(abstract, i)}: {error}") from None
            made.append(array)
            losses |= {} if loss is None else {leaf_path(abstract, i): loss}
        check_kept(losses)
        arrays = put(made, [move.sharding for move in moves])
        if gives_up or len(batches) > 1:
            jax.block_until_ready(arrays)
        for i, move, array in zip(batch, moves, arrays, strict=True):
            values[i] = array
            uses_left.subtract(move.sources)
        if gives_up:
            donated.keep(arrays)
            done = {source for move in moves for source in move.sources if not uses_left[source]}
            donated.give_up([sources[source] for source in done])
    return tree_util.tree_unflatten(treedef, values)


def _moves(
    tree: Any, rules: Any, mesh: MeshLike | None, renames: Sequence[Rename], dtype: str | None
) -> tuple[Any, dict[int, _Move]]:
    """Return (the result or an abstract one of its structure, the move of each leaf that moves)."""
    target = rules
    if isinstance(rules, Plan):
        rules = rules if mesh is None else rules.on_mesh(mesh)
        target = rules.abstract()
    decided = _shardings_in(target)
    if decided is None or renames or not _is_like(tree, target, isinstance(rules, Plan)):
        if decided is not None and rules is target:
            rules = tree_util.tree_unflatten(tree_util.tree_structure(target), decided)
        if renames or isinstance(rules, Plan):
            return _moves_by_paths(tree, rules, mesh, renames, dtype)
        leaves, _, decided = requested_shardings(tree, rules, mesh)
    else:
        leaves = tree_util.tree_leaves(tree)
    return tree, _as_they_are(tree, leaves, decided, dtype)


def _is_like(tree: Any, target: Any, has_dtypes: bool) -> bool:
    """Compare structures, but for boxes, and shapes; with a plan dtypes too."""
    structure: Any
    leaves, treedef = tree_util.tree_flatten(tree)
    others, structure = tree_util.tree_flatten(target)
    # A plan of a tree with names has its arrays without their boxes.
    without = treedef if structure == treedef else tree_util.tree_structure(unboxed(tree).tree)
    if structure != without:
        return False
    for place, (leaf, goal) in enumerate(zip(leaves, others, strict=True)):
        if has_dtypes and getattr(leaf, "dtype", None) != goal.dtype:
            return False
        if np.shape(leaf) != goal.shape:
            if has_dtypes:
                return False
            raise ValueError(
                f"rules: {leaf_path(target, place)} has the shape {list(goal.shape)}, and "
                f"in tree it is {list(np.shape(leaf))}; give shardings of arrays of the same "
                "shape, or renames that turn the one into the other"
            )
    return True


def _shardings_in(target: Any) -> list[Any] | None:
    """Return the shardings of a tree of arrays or abstract arrays; None for anything else."""
    leaves = tree_util.tree_leaves(target)
    if not any(hasattr(leaf, "shape") and hasattr(leaf, "sharding") for leaf in leaves):
        return None
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    if None in shardings:
        place = shardings.index(None)
        raise TypeError(
            f"rules: {leaf_path(target, place)} is {shown(leaves[place])}, which has no "
            "sharding, as arrays have; give one for each array of tree"
        )
    return list(map(_as_named_sharding, shardings))


def _as_named_sharding(sharding: Any) -> Any:
    """Turn a sharding on a single device into a NamedSharding."""
    if not isinstance(sharding, SingleDeviceSharding):
        return sharding
    mesh = Mesh(np.array([*sharding.device_set]), ("device",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


def _as_they_are(
    tree: Any, leaves: list[Any], shardings: list[Any], dtype: str | None
) -> dict[int, _Move]:
    """Return the move of each leaf that moves, by its index."""
    of_leaf = [dtype] * len(leaves)
    for i in [] if dtype is None else _scales(tree, leaves):
        of_leaf[i] = None
    return {
        i: _Move(
            sharding,
            np.shape(leaves[i]),
            _moved_bytes_of(leaves[i], of_leaf[i]),
            (i,),
            partial(_as_dtype, leaves[i], of_leaf[i]),
        )
        for i, sharding in enumerate(placeable(tree, leaves, shardings))
        if sharding is not None
    }


def _as_dtype(leaf: Any, dtype: str | None) -> tuple[Any, Any]:
    """Return (the leaf in this dtype, if it is a floating array, whether a value got lost)."""
    name = getattr(getattr(leaf, "dtype", None), "name", "")
    if dtype is None or not is_plain_float(name) or isinstance(leaf, np.generic):
        return leaf, None
    return cast(leaf, numpy_dtype(dtype))


def _scales(tree: Any, leaves: Sequence[Any]) -> list[int]:
    """Return the indices of leaves that are scales of quantized arrays."""
    paths = leaf_paths(tree)
    dtypes = {
        path: str(getattr(leaf, "dtype", "")) for path, leaf in zip(paths, leaves, strict=True)
    }
    scales = scales_in({path: dtype for path, dtype in dtypes.items() if dtype in BITS})
    return [i for i, path in enumerate(paths) if path in scales]


def _moved_bytes_of(leaf: Any, dtype: str | None) -> int:
    """Count the bytes of the array that a leaf becomes."""
    dtype_of_leaf = getattr(leaf, "dtype", None)
    if dtype_of_leaf is None:
        return int(np.asarray(leaf).nbytes)
    is_converted = dtype is not None and is_plain_float(dtype_of_leaf.name)
    # Random keys of older versions of JAX do not know their bytes.
    bits: int = prod(leaf.shape) * bits_of(dtype if is_converted else dtype_of_leaf)
    return -(-bits // 8)


def _moves_by_paths(
    tree: Any, rules: Any, mesh: MeshLike | None, renames: Sequence[Rename], dtype: str | None
) -> tuple[Any, dict[int, _Move]]:
    """Return (the abstract tree of the result, the move of each of its leaves)."""
    names, leaves = leaf_paths(tree), tree_util.tree_leaves(tree)
    if isinstance(rules, Plan) and not renames:
        names = _planned_paths(tree, rules)
    check_distinct(names, "a leaf finds its array by its path")
    arrays = dict(zip(names, starmap(ArraySpec, shapes_and_dtypes(tree, names)), strict=True))
    in_tree = None
    if isinstance(rules, Plan):
        in_tree, rules, mesh = rules.abstract(), rules.shardings(), None
    problems = Problems("the tree", in_file=False)
    abstract, targets = matched(arrays, in_tree, forwards(renames), dtype, problems)
    specs, _, shardings = requested_shardings(abstract, rules, mesh)
    live, row = dict(zip(names, leaves, strict=True)), {name: i for i, name in enumerate(names)}
    moves = {}
    for i, ((path, target), spec, sharding) in enumerate(
        zip(targets, specs, shardings, strict=True)
    ):
        to = checked_sharding(path, sharding)
        assert target is not None
        used = {part.source for part in target.parts}
        moves[i] = _Move(
            to,
            target.shape,
            prod(target.shape) * spec.dtype.itemsize,
            tuple(sorted(map(row.__getitem__, used))),
            partial(_made, target, live, spec.dtype, to),
        )
    return abstract, moves


def _planned_paths(tree: Any, plan: Plan) -> list[str]:
    """Return the path of each leaf in the plan's tree, or its own if the plan does not have it."""
    planned = rows_and_paths(plan.abstract())
    aligned = align(tree, planned, rows_and_paths)
    paths = [
        planned.paths[row] if row >= 0 else path
        for path, row in zip(aligned.leaves.paths, aligned.rows, strict=True)
    ]
    return [paths[row] for row in tree_util.tree_leaves(aligned.leaves.tree)]


def _made(
    target: Target, live: Mapping[str, Any], dtype: Any, sharding: NamedSharding
) -> tuple[Any, Any]:
    if not target.is_plain:
        return made_of(target, live, dtype, sharding)
    return cast(live[target.parts[0].source], dtype)


def _bound(moves: Mapping[int, _Move], bound: int | None, tree: Any) -> int:
    """Return the bound, or the default."""
    largest = max(moves, key=lambda i: moves[i].bytes, default=None)
    size = 0 if largest is None else moves[largest].bytes
    if bound is None:
        return max(DEFAULT_IN_FLIGHT, size)
    if largest is not None and size > bound:
        raise ValueError(
            f"max_bytes_in_flight is {bytes_shown(bound)}, and {leaf_path(tree, largest)} has "
            f"{bytes_shown(size)}: give at least {size:,}"
        )
    return bound
