"""Arrays of a tree: their paths, and the logical axis names beside the tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from shardrules._base.specs import is_partition_spec
from shardrules._base.text import counted, near_shown, shown
from shardrules._core import aligned_values
from shardrules._place.boxes import open_boxes
from shardrules._place.leaf_errors import listing
from shardrules._rules.rules import Rules, matcher_of

NO_RULES: Final = Rules(())


class PathsOfTree(NamedTuple):
    """A tree with the number of its row for each leaf, and the path of each row."""

    tree: Any
    paths: list[str]


def rows_and_paths(tree: Any, rules: Rules = NO_RULES) -> PathsOfTree:
    """Return row numbers for the leaves of a pytree, and their paths in the dialect of rules."""
    of_rows, paths, *_ = matcher_of(rules).survey(tree, replicated=0, unmatched=0, ambiguous=0)
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
