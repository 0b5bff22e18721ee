"""Logical axis names that stand beside a tree of arrays: in a tree of names, or by path.

Costs a look-up per leaf. Must not know what the names are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardrules._core import values_beside
from shardrules._format import and_more, counted, shown
from shardrules._near import near_shown
from shardrules._printable import printable_lines
from shardrules._specs import is_partition_spec

__all__ = ["by_row", "names_beside"]

_SHOWN: Final = 10


def names_beside(of_rows: Any, paths: list[str], names: Any) -> list[Any]:
    """The names of each leaf, by row; None for a leaf without.

    Args:
        of_rows: The tree with the number of its row for each leaf.
        paths: The leaves' paths, by row.
        names: A tree of names that fits the tree, or {path: names}.

    Raises:
        ValueError: The names do not fit the tree, or are for paths that are not there.
    """
    found = values_beside(of_rows, names, len(paths))
    if found is not None:
        return found
    is_by_path = isinstance(names, Mapping) and all(map(_may_be_names, names.values()))
    if is_by_path and names.keys() <= set(paths):
        return list(map(names.get, paths))
    try:
        return _by_jax(of_rows, names)
    except ValueError as error:
        raise (_unknown_paths(paths, names) if is_by_path else error) from None


def _may_be_names(one: Any) -> bool:
    if is_partition_spec(one):
        return True
    return isinstance(one, tuple | list) and not any(isinstance(x, Mapping | list) for x in one)


def _unknown_paths(paths: list[str], names: Mapping[Any, Any]) -> ValueError:
    known = set(paths)
    unknown = [path for path in names if path not in known]
    lines = [f"names: {counted(len(unknown), 'path')} of no leaf:"]
    for path in unknown[:_SHOWN]:
        near = near_shown(path, paths) if isinstance(path, str) else ""
        lines.append(f"    {shown(path)}{near}")
    lines += [f"    {line}" for line in and_more(len(unknown), _SHOWN, "path")]
    return ValueError(printable_lines(lines))


def _by_jax(of_rows: Any, names: Any) -> list[Any]:
    from jax import tree_util

    rows: list[int]
    treedef: Any
    rows, treedef = tree_util.tree_flatten(of_rows)
    try:
        given: list[Any] = treedef.flatten_up_to(names)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"names: they do not fit the tree: {str(error).splitlines()[0][:200]}; give a tree of "
            "the same structure with a tuple of names for each array, or {path: names}"
        ) from None
    return by_row(rows, given)


def by_row(rows: list[int], values: list[Any]) -> list[Any]:
    """Values in the order of JAX's leaves, by row: dicts are walked in the order of their keys.

    Args:
        rows: The row of each leaf, in JAX's order.
        values: The values, in the same order.
    """
    if rows == list(range(len(rows))):
        return values
    ordered = values.copy()
    for row, value in zip(rows, values, strict=True):
        ordered[row] = value
    return ordered
