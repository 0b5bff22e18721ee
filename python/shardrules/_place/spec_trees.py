"""Trees of specs, shardings and axis names beside a tree, given to the leaves by their paths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from shardrules._base.rule_specs import Correction, Fsdp
from shardrules._base.specs import is_partition_spec, spec_shown
from shardrules._base.text import brief, counted, near_shown, shown, with_article
from shardrules._core import aligned_values
from shardrules._place.boxes import open_boxes
from shardrules._place.mesh import AnyMesh, MeshLike, local_view, resolve_mesh
from shardrules._place.shardings import (
    LeafError,
    Shardings,
    leaf_errors,
    listing,
    sharding_or_reasons,
)
from shardrules._rules.rules import Rules, matcher_of

if TYPE_CHECKING:
    from jax.sharding import NamedSharding


class PathsOfTree(NamedTuple):
    """A tree with the number of its row for each leaf, and the path of each row."""

    tree: Any
    paths: list[str]


@functools.cache
def no_rules() -> Rules:
    """Return rules for no leaf, for walks that ask for paths alone."""
    return Rules(())


def rows_and_paths(tree: Any, rules: Rules | None = None) -> PathsOfTree:
    """Return row numbers for the leaves of a pytree, and their paths in the dialect of rules."""
    matcher = matcher_of(no_rules() if rules is None else rules)
    of_rows, paths, *_ = matcher.survey(tree, replicated=0, unmatched=0, ambiguous=0)
    return PathsOfTree(of_rows, paths)


def leaf_paths(tree: Any) -> list[str]:
    """Return the paths of a tree's leaves, in the order of JAX's leaves."""
    from jax import tree_util

    of_rows, paths = rows_and_paths(tree)
    return [paths[row] for row in tree_util.tree_leaves(of_rows)]


def names_beside(of_rows: Any, paths: list[str], names: Any) -> list[Any]:
    """Return the logical axis names of each leaf, by row; None for a leaf without.

    Args:
        of_rows: The tree with the number of its row for each leaf.
        paths: The leaves' paths, by row.
        names: A tree of names that fits the tree, or {path: names}.

    Raises:
        ValueError: The names do not fit the tree, or are for paths that are not there.
    """
    from jax import tree_util

    values = aligned_values(of_rows, names, len(paths))
    if values is not None:
        return values
    is_by_path = isinstance(names, Mapping) and all(map(_may_be_names, names.values()))
    if is_by_path:
        if names.keys() <= set(paths):
            return list(map(names.get, paths))
        arrays = open_boxes(of_rows).tree
        if names.keys() <= set(paths_of_arrays := leaf_paths(arrays)):
            return by_row(tree_util.tree_leaves(arrays), list(map(names.get, paths_of_arrays)))
    rows: list[int]
    treedef: Any
    rows, treedef = tree_util.tree_flatten(of_rows)
    try:
        return by_row(rows, treedef.flatten_up_to(names))
    except (TypeError, ValueError) as error:
        if is_by_path:
            raise _unknown_paths(paths, names) from None
        raise ValueError(
            f"names: they do not fit the tree: {str(error).splitlines()[0][:200]}; give a tree of "
            "the same structure with a tuple of names for each array, or {path: names}"
        ) from None


def _may_be_names(value: Any) -> bool:
    if is_partition_spec(value):
        return True
    return isinstance(value, tuple | list) and not any(
        isinstance(entry, Mapping | list) for entry in value
    )


def _unknown_paths(paths: list[str], names: Mapping[Any, Any]) -> ValueError:
    existing = set(paths)
    unknown = [path for path in names if path not in existing]
    lines = (
        shown(path) + (near_shown(path, paths) if isinstance(path, str) else "") for path in unknown
    )
    return ValueError(
        listing(f"names: {counted(len(unknown), 'path')} of no leaf", lines, len(unknown), "path")
    )


def by_row(rows: list[int], values: list[Any]) -> list[Any]:
    """Return values of JAX's leaves by row: rows have dicts in their own order, JAX sorts keys."""
    if rows == list(range(len(rows))):
        return values
    ordered = values.copy()
    for row, value in zip(rows, values, strict=True):
        ordered[row] = value
    return ordered


def is_spec(node: Any) -> bool:
    """Return whether it is a leaf of a tree of specs that JAX takes for none."""
    return node is None or is_partition_spec(node)


def is_spec_of_mesh(spec: Any) -> bool:
    return is_partition_spec(spec) or isinstance(spec, Fsdp)


def is_named_sharding(spec: Any) -> bool:
    from jax.sharding import NamedSharding

    return isinstance(spec, NamedSharding)


_Kind = tuple[int, tuple[int, ...], Any]  # the id of a spec; the shape and dtype of leaves


def shardings_by_specs(
    name: str, tree: Any, specs: Any, mesh: MeshLike | None, correction: Correction
) -> Shardings:
    """Return the shardings of the leaves; `name` is that of the parameter `specs` in messages."""
    from jax import tree_util

    treedef: Any
    leaves, treedef = tree_util.tree_flatten(tree)
    spread = broadcast_specs(name, tree, treedef, specs)
    # The list keeps the specs alive, so an id is one's own; the leaves of a kind have it in common.
    ids = list(map(id, spread))
    bound = _bound_specs(name, tree, ids, spread, mesh)
    by_dtype = any(isinstance(bare, Fsdp) for bare, _ in bound.values())
    dtypes = [getattr(leaf, "dtype", None) for leaf in leaves] if by_dtype else [None] * len(leaves)
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    kinds = list(zip(ids, shapes, dtypes, strict=True))
    of_kind = {
        kind: (None, False) if spec is None else _of_kind(spec, kind, bound, correction)
        for kind, spec in dict(zip(kinds, spread, strict=True)).items()
    }
    if any(isinstance(decided, list) for decided in of_kind.values()):
        raise ValueError(_errors(tree, kinds, of_kind, bound))
    of_leaves: list[Any] = list(map(of_kind.__getitem__, kinds))
    return Shardings(lambda: treedef.unflatten(each[0] for each in of_leaves), lambda: of_leaves)


def _errors(
    tree: Any, kinds: list[_Kind], of_kind: dict[_Kind, Any], bound: dict[int, tuple[Any, AnyMesh]]
) -> str:
    rows, meshes = [], set()
    for path, kind in zip(leaf_paths(tree), kinds, strict=True):
        if isinstance(reasons := of_kind[kind], list):
            spec, mesh = bound[kind[0]]
            rows.append(LeafError(path, kind[1], spec_shown(spec), reasons))
            meshes.add(tuple(mesh.shape.items()))
    sizes = dict(meshes.pop()) if len(meshes) == 1 else None
    return leaf_errors(rows, sizes, said_by="specs")


def _of_kind(
    spec: Any,
    kind: _Kind,
    bound: dict[int, tuple[Any, AnyMesh]],
    correction: Correction,
) -> tuple[NamedSharding, bool] | list[str]:
    """Return (sharding, whether it says the memory) of one spec, shape and dtype, or why none."""
    number, shape, dtype = kind
    bare, on_mesh = bound[number]
    try:
        sharding = sharding_or_reasons(bare, shape, on_mesh, correction, dtype)
        if isinstance(sharding, list):
            return sharding
        if bare is spec:
            return sharding, False
        return _in_memory_of(spec, sharding), True
    except ValueError as error:
        return str(error).splitlines()


def _bound_specs(
    name: str, tree: Any, ids: list[int], spread: list[Any], mesh: MeshLike | None
) -> dict[int, tuple[Any, AnyMesh]]:
    """Return (its spec, its mesh), by the id of each distinct spec or sharding."""
    resolved: AnyMesh | None = None
    bound: dict[int, tuple[Any, AnyMesh]] = {}
    for number, spec in dict(zip(ids, spread, strict=True)).items():
        if spec is None:
            continue
        if is_spec_of_mesh(spec):
            resolved = resolved or local_view(resolve_mesh(mesh))
            bound[number] = spec, resolved
        elif is_named_sharding(spec):
            bound[number] = spec.spec, local_view(spec.mesh)
        else:
            path = leaf_path(tree, ids.index(number))
            raise TypeError(
                f"{name}: for the leaf {path} the spec is {shown(spec)}; it must be a "
                "PartitionSpec, a NamedSharding, or None to leave the leaf alone"
            )
    return bound


def _in_memory_of(target: NamedSharding, sharding: NamedSharding) -> NamedSharding:
    kind = target.memory_kind
    if kind is not None and kind != sharding.memory_kind:
        sharding = sharding.with_memory_kind(kind)
    return target if target == sharding else sharding  # JAX's caches know that one already


def broadcast_specs(name: str, tree: Any, treedef: Any, specs: Any) -> list[Any]:
    """Return the spec of each leaf, from a tree of specs that may be a prefix of the tree."""
    from jax import tree_util

    if is_partition_spec(specs):  # common in a forward pass; saves ten microseconds
        return [specs] * treedef.num_leaves
    if (same := _leaves_alike(specs, treedef)) is not None:
        return same
    try:
        flat, structure = tree_util.tree_flatten(specs, is_leaf=is_spec)
        node: Any = structure  # JAX's types do not know its methods
        parts = node.flatten_up_to(tree)
    except (TypeError, ValueError) as error:
        place = _misfit_error(specs, tree, "") or str(error).splitlines()[0][:200]
        raise ValueError(
            f"{name}: the tree of specs does not fit the tree: {place}; give one of the same "
            "structure, or one that ends earlier; rules are (pattern, spec) pairs"
        ) from None
    if tree_util.all_leaves(parts):
        return flat
    pairs = zip(flat, parts, strict=True)
    return [spec for spec, part in pairs for _ in tree_util.tree_leaves(part)]


def _leaves_alike(specs: Any, treedef: Any) -> list[Any] | None:
    """Return the specs if their tree has the same structure; this takes no call per leaf."""
    from jax import tree_util

    with suppress(TypeError, ValueError):  # of what cannot be flattened or compared
        flat, structure = tree_util.tree_flatten(specs)
        if structure == treedef:
            return flat
    return None


def _misfit_error(specs: Any, tree: Any, path: str) -> str | None:
    """Return the first place where a tree of specs is not a prefix of the tree."""
    here, there = _children(specs, is_spec), _children(tree, lambda node: node is None)
    if here is None:
        return None
    at = f"at {path}" if path else "at the root"
    if there is None:
        return f"{at} the specs go on, where the tree has {shown(tree)}"
    if here.keys() != there.keys():
        extra, missing = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
        return f"{at} the specs alone have {brief(extra)}, and the tree alone {brief(missing)}"
    if type(specs) is not type(tree):
        return (
            f"{at} the specs have {with_article(type(specs).__name__)}, and the tree "
            f"{with_article(type(tree).__name__)}"
        )
    deeper = (_misfit_error(spec, there[key], path + key) for key, spec in here.items())
    return next(filter(None, deeper), None)


def _children(node: Any, is_leaf: Callable[[Any], bool]) -> dict[str, Any] | None:
    """Return the children of a node by `keystr` of their keys; None for a leaf."""
    from jax import tree_util

    if is_leaf(node) or tree_util.all_leaves([node]):
        return None
    flat = tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
    return {tree_util.keystr(path): child for path, child in flat}


def leaf_path(tree: Any, index: int) -> str:
    """Return the path of a leaf as JAX writes it, for errors."""
    from jax import tree_util

    return tree_util.keystr(tree_util.tree_flatten_with_path(tree)[0][index][0]) or "(the tree)"
