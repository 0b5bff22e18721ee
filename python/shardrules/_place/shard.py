"""`shard`, `shard_local` and `gather`: whole trees onto devices and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import prod
from typing import Any, Final, Literal

import jax
import numpy as np
from jax import tree_util
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr, tree_flatten_with_path

from shardrules._base.arguments import boolean, check_choice
from shardrules._base.dtypes import as_float_name, is_plain_float
from shardrules._base.mistakes import Tree, check_arrays, in_order
from shardrules._base.rule_specs import Correction
from shardrules._base.specs import entries_of, entry_axes, is_partition_spec, spec_shown
from shardrules._base.text import counted, shown
from shardrules._place.boxes import is_flax_struct, variable_types
from shardrules._place.decider import RulesLike, check_decided
from shardrules._place.mesh import MeshLike, check_placeable, resolve_mesh
from shardrules._place.named_shardings import only_process, requested_shardings
from shardrules._place.processes import JointCall, rows_of
from shardrules._place.shardings import LeafError, leaf_errors, sharding_or_reasons
from shardrules._place.spec_trees import broadcast_specs, leaf_path
from shardrules._place.transfers import (
    Donated,
    distinct,
    of_each_type,
    put,
    replace_at,
    stays_within,
)

_NUMBERS: Final = frozenset({int, float, complex})
_HOST_TYPES: Final = (np.ndarray, np.generic, int, float, complex)


@in_order("tree", "rules", "mesh")
def shard(
    tree: Tree,
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    correction: Correction | None = None,
    donate: bool = False,
    dtype: Any = None,
    scalars: Literal["place", "keep"] | None = None,
) -> Tree:
    """Place the arrays and numbers of a tree on devices, as the rules say.

    In several processes, each process calls this with the same tree. Each array needs correct
    values only in the shards of the process's own devices. No device ever holds more than its
    shards. The processes agree on the call first, unless all devices of the mesh belong to this
    process.

    Args:
        tree: A pytree of jax.Arrays, numpy arrays and Python numbers. Functions, bools and the
            attributes of modules that are no arrays stay unchanged, such as a dropout rate.
        rules: As in `with_sharding_constraint`. None leaves a leaf unchanged.
        mesh: The Mesh for rules and PartitionSpecs. Default: the context's.
        correction: For specs: the policies for those that do not fit, as in `named_shardings`.
        donate: Whether the jax.Arrays of the tree may be given up: they are deleted, unless an
            array of the result uses the memory of a part. Default: False.
        dtype: The dtype of all floating arrays of 16 bits or more. Default: their own.
        scalars: "place" makes arrays of all numbers. "keep" leaves all leaves as they are that are
            not arrays, such as numbers and strings. Default: numbers in dicts, lists, namedtuples
            and flax's states become arrays, as optimizers' counts; those that are attributes of a
            module, or in a node of another registered type, stay. Other leaves are errors.

    Returns:
        A tree of the same structure, with jax.Arrays; type checkers take it for one of the type of
        `tree`. As with `jax.device_put`, an array that is in
        place already is returned itself, so donating the result deletes the input. The result may
        share its memory with a numpy array. With rules and specs an array stays in its memory kind.
        A NamedSharding has its own memory kind.

    Raises:
        ValueError: As `named_shardings`, before anything is placed.
        TypeError: A leaf is neither an array nor a number, the mesh is an abstract one, or the call
            is inside jit.
        RuntimeError: In several processes: their calls differ, or a process has failed or is late.

    Example:
        >>> import jax, numpy as np
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("tp",))
        >>> placed = shard({"w": np.ones((4, 4)), "step": 3}, [("w", "tp")], mesh)
        >>> tuple(placed["w"].sharding.spec)
        ('tp', None)
    """
    with JointCall("shard") as call:
        check_choice("scalars", scalars, ("place", "keep", None))
        gives_up = boolean("donate", donate)
        name = None if dtype is None else as_float_name("dtype", dtype)
        if call.joint and stays_within(tree, only_process(rules, mesh)):
            call.alone()
        leaves, treedef, decided = requested_shardings(tree, rules, mesh, correction=correction)
        targets = placeable(tree, leaves, decided, scalars)
        options = f"donate={gives_up}, dtype={name}" if gives_up or name else ""
        call.agree(lambda: rows_of(tree, targets, options))
    placed_at = [i for i, sharding in enumerate(targets) if sharding is not None]
    shardings: list[Any] = [targets[i] for i in placed_at]
    ready = [leaves[i] if dtype is None else with_float_dtype(leaves[i], dtype) for i in placed_at]
    inputs = list(leaves)
    donated = Donated(inputs if donate else ())
    arrays = put(ready, shardings, donate=donate and donated.are_apart())
    placed = replace_at(leaves, placed_at, arrays)
    if donate:
        donated.keep(jax.block_until_ready(placed))
        donated.give_up(inputs)
    result: Tree = treedef.unflatten(placed)
    return result


def with_float_dtype(leaf: Any, dtype: Any) -> Any:
    """Return the leaf with this dtype, if it is a floating array of 16 bits or more."""
    if dtype is None:
        return leaf
    name = getattr(getattr(leaf, "dtype", None), "name", "")
    if not is_plain_float(name) or isinstance(leaf, np.generic):
        return leaf
    return leaf.astype(np.dtype(dtype))


@in_order("tree")
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
    with JointCall("shard_local") as call:
        check_decided("spec", spec, "a PartitionSpec such as P('dp'), which fits all of the batch")
        if call.joint and only_process(spec, mesh) is not None:
            call.alone()
        leaves, treedef = tree_util.tree_flatten(batch)
        paths = [keys for keys, _ in tree_util.tree_flatten_with_path(batch)[0]]
        specs = broadcast_specs("spec", batch, treedef, spec)
        targets, abstract = [], []
        for keys, leaf, leaf_spec in zip(paths, leaves, specs, strict=True):
            path = keystr(keys) or "(the tree)"
            targets.append(_local_sharding(keys, leaf, leaf_spec, mesh))
            shape = _global_shape(path, leaf, targets[-1])
            abstract.append(jax.ShapeDtypeStruct(shape, leaf.dtype))
        call.agree(lambda: rows_of(tree_util.tree_unflatten(treedef, abstract), targets))
    arrays = [
        jax.make_array_from_process_local_data(sharding, np.asanyarray(leaf), array.shape)
        for leaf, sharding, array in zip(leaves, targets, abstract, strict=True)
    ]
    return tree_util.tree_unflatten(treedef, arrays)


def gather(tree: Tree) -> Tree:
    """Copy the jax.Arrays of a tree to this host, as whole numpy arrays.

    In several processes, each process calls this with the same tree. Arrays that are spread over
    processes are replicated first, one after the other, so each device needs room for the largest
    one. If the tree has no such array, one process may call this alone.

    Args:
        tree: Any pytree. Leaves that are not jax.Arrays, and random keys, stay unchanged.

    Returns:
        A tree of the same structure; type checkers take it for one of the type of `tree`.

    Raises:
        TypeError: The call is inside jit.
        RuntimeError: As `shard`, if there are arrays that are spread over processes.

    Example:
        >>> import jax
        >>> gather([jax.numpy.ones(2), 3])
        [array([1., 1.], dtype=float32), 3]
    """
    with JointCall("gather") as call:
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        at_once, spread = [], {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"the tree has {shown(leaf)}, which is abstract, and has nothing to gather; "
                    "give the arrays themselves"
                )
            if not isinstance(leaf, jax.Array):
                continue
            if isinstance(leaf, Tracer):
                raise TypeError(
                    "gather fetches arrays from devices, and inside jit there are none: "
                    "call it outside jit"
                )
            if leaf.is_fully_addressable or leaf.is_fully_replicated:
                at_once.append(index)
            else:
                sharding: Any = leaf.sharding
                spread[index] = NamedSharding(sharding.mesh, PartitionSpec())
        if not at_once and not spread:
            check_arrays("tree", tree)
        if not spread:
            call.alone()
        call.agree(lambda: rows_of(tree, spread))
    for index, sharding in spread.items():
        # One after the other, so that the devices need room for one only.
        replicated = jax.block_until_ready(jax.device_put(leaves[index], sharding))
        leaves[index] = jax.device_get(replicated)
    replace_at(leaves, at_once, jax.device_get([leaves[i] for i in at_once]))
    result: Tree = jax.tree_util.tree_unflatten(treedef, leaves)
    return result


def placeable(
    tree: Any,
    leaves: list[Any],
    shardings: list[NamedSharding | None],
    scalars: Literal["place", "keep"] | None = None,
) -> list[NamedSharding | None]:
    """Return the shardings, with None for leaves that stay unchanged; `scalars` as in `shard`."""
    targets = list(shardings)
    if scalars == "keep":
        targets = [
            target if _has_shape(leaf) else None
            for leaf, target in zip(leaves, targets, strict=True)
        ]
    elif scalars is None and not _NUMBERS.isdisjoint(map(type, leaves)):
        numbers = [index for index, leaf in enumerate(leaves) if type(leaf) in _NUMBERS]
        find = _finder(tree)
        for index, path in _paths(tree, numbers):
            if _is_attribute_of_module(find, path):
                targets[index] = None
    can_all = all(map(_can_be_placed, of_each_type(leaves)))
    others = [] if can_all else [i for i, leaf in enumerate(leaves) if not _can_be_placed(leaf)]
    for index, path in _paths(tree, others):
        if targets[index] is None:
            continue
        if not _stays(leaves[index], path) or len(others) == len(leaves):
            raise TypeError(
                f"the leaf {keystr(path) or '(the tree)'} is "
                f"{shown(leaves[index])}; {_instead(leaves[index])}"
            )
        targets[index] = None
    _check_placeable(tree, leaves, targets)
    return targets


def _check_placeable(tree: Any, leaves: list[Any], shardings: list[NamedSharding | None]) -> None:
    """Check that the leaves with a sharding can be placed: here, on devices, and as it says."""

    def path(sharding: NamedSharding) -> str:
        return leaf_path(tree, next(i for i, target in enumerate(shardings) if target is sharding))

    placed = [leaf for leaf, target in zip(leaves, shardings, strict=True) if target is not None]
    if any(isinstance(leaf, Tracer) for leaf in of_each_type(placed)):
        raise TypeError(
            "shard places arrays on devices, and inside jit there are none yet: "
            "use with_sharding_constraint, which takes the same arguments"
        )
    for sharding in distinct(shardings):
        if sharding is not None:
            check_placeable(sharding, partial(path, sharding))


def _instead(leaf: Any) -> str:
    """Return what to do with a leaf that cannot be placed."""
    if _has_shape(leaf):
        return (
            "it is no array with data to place: make the arrays where they belong, with jax.jit("
            "init, out_shardings=plan.shardings())(...), or give the arrays themselves (of a Ref "
            "what is in it, ref[...])"
        )
    return (
        "only arrays and numbers can be placed: take it out of the tree, give None for it instead "
        "of a spec, or give scalars='keep', which leaves all that is not an array as it is (as in "
        "an equinox module)"
    )


def _paths(tree: Any, indices: list[int]) -> list[tuple[int, tuple[Any, ...]]]:
    """Return (index, keys) of each of these leaves."""
    if not indices:
        return []
    paths = tree_util.tree_flatten_with_path(tree)[0]
    return [(index, paths[index][0]) for index in indices]


def _finder(tree: Any) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function from a path to the node there, which takes no node apart twice."""

    @cache
    def children(path: tuple[Any, ...]) -> dict[tuple[Any, ...], Any]:
        node = find(path)
        return dict(tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0])

    def find(path: tuple[Any, ...]) -> Any:
        return children(path[:-1])[path[-1:]] if path else tree

    return find


def _is_attribute_of_module(find: Callable[[tuple[Any, ...]], Any], path: tuple[Any, ...]) -> bool:
    """Return whether the leaf of this path is in a module, and not in a node of data."""
    if not path or isinstance(path[-1], (DictKey, SequenceKey)):
        return False
    node = find(path[:-1])
    is_state = isinstance(node, (tuple, Mapping, *variable_types())) or is_flax_struct(node)
    return not is_state


def _stays(leaf: Any, path: tuple[Any, ...]) -> bool:
    """Return whether the leaf is a part of a model but not data: a flag, function or attribute."""
    if _has_shape(leaf):  # an abstract array
        return False
    # A flag must stay a bool: an array cannot decide an `if` inside jit. A string is an option if
    # it is a module's attribute, and a mistake in a dict of parameters.
    return isinstance(leaf, bool) or callable(leaf) or isinstance((path or (None,))[-1], GetAttrKey)


def _has_shape(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and not isinstance(leaf, type)


def _can_be_placed(leaf: Any) -> bool:
    if isinstance(leaf, _HOST_TYPES):
        return not isinstance(leaf, bool)
    return isinstance(leaf, jax.Array)


# The part of a process tells neither the rank nor what divides it.
_AS_GIVEN: Final = Correction(indivisible="keep", rank="keep", pad=False)


def _local_sharding(keys: Any, leaf: Any, spec: Any, mesh: MeshLike | None) -> NamedSharding:
    path = keystr(keys) or "(the tree)"
    if isinstance(spec, NamedSharding):
        sharding = spec
    elif is_partition_spec(spec):
        on_mesh, shape = resolve_mesh(mesh), tuple(getattr(leaf, "shape", ()))
        decided = sharding_or_reasons(spec, shape, on_mesh, _AS_GIVEN)
        if isinstance(decided, list):
            row = LeafError(
                keystr(keys, simple=True, separator="/"), shape, spec_shown(spec), decided
            )
            raise ValueError(leaf_errors([row], on_mesh.shape, said_by="specs"))  # noqa: TRY004
        sharding = decided
    else:
        raise TypeError(
            f"spec: for {path} it is {shown(spec)}; it must be a PartitionSpec or a NamedSharding"
        )
    check_placeable(sharding, lambda: path)
    return sharding


def _global_shape(path: str, leaf: Any, sharding: NamedSharding) -> tuple[int, ...]:
    """Return the shape of which the process's part has the leaf's."""
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
        parts = prod(sharding.mesh.shape[axis] for axis in axes)
        local = _local_parts(sharding, axes)
        if local and shape[dim] % local:
            raise ValueError(
                f"batch: {path} has the shape {list(leaf.shape)}, and the devices of this process "
                f"hold {local} parts of dimension {dim}: give a number of rows that {local} divides"
            )
        shape[dim] = shape[dim] // max(1, local) * parts
    return tuple(shape)


def _local_parts(sharding: NamedSharding, axes: tuple[str, ...]) -> int:
    """Return how many of the parts that these axes make are on devices of this process."""
    mesh, me = sharding.mesh, jax.process_index()
    dims = [mesh.axis_names.index(axis) for axis in axes]
    places = np.argwhere(np.vectorize(lambda device: device.process_index == me)(mesh.devices))
    return len({tuple(place[dims]) for place in places})
