"""Logical axis names of a tree's arrays: beside it, or in its boxes, Variables and NamedArrays."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

import numpy as np

from shardrules._base.specs import is_partition_spec
from shardrules._core import resolve_all
from shardrules._place.boxes import (
    NodeForms,
    box_types,
    named_array_types,
    open_boxes,
    unboxed,
    unboxed_with_names,
    variable_types,
)
from shardrules._place.named_arrays import NO_RULES, by_row, names_beside
from shardrules._plan.leaves import NO_RULE_NEEDED, LeafType, Leaves, survey
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.names import checked_names
from shardrules._rules.rules import Rules

_PLAIN: Final = re.compile(r"[\w-]+")


def survey_named(tree: Any, rules: LogicalRules, names: Any = None) -> Leaves:
    """Walk the tree once, for these rules.

    Raises:
        TypeError: Nothing has names, or something else stands in their place.
        ValueError: The names do not fit the tree, or are for paths that are not there; or as
            `survey`.
    """
    if names is not None:
        leaves = replace(survey(tree, NO_RULES), rules=rules)
        return _with_names(leaves, names_beside(leaves.tree, leaves.paths, names))
    from jax.tree_util import tree_leaves

    boxes = unboxed_with_names(tree)
    leaves = survey(boxes.tree, NO_RULES)
    names = by_row(tree_leaves(leaves.tree), boxes.names_of_arrays())
    return _with_names(replace(leaves, rules=rules, tree=boxes.boxed(leaves.tree)), names)


def _with_names(leaves: Leaves, names: list[Any]) -> Leaves:
    """Return the leaves with their kinds told apart by their names as well."""
    numbers: dict[tuple[Any, int], int] = {}
    types: list[LeafType] = []

    def number(value: Any, kind: int) -> int:
        checked = None if value is None else checked_names(value)
        index = numbers.setdefault((checked, kind), len(types))
        if index == len(types):
            types.append(leaves.types[kind]._replace(rule=NO_RULE_NEEDED, names=checked))
        return index

    if list in set(map(type, names)):
        names = [tuple(value) if type(value) is list else value for value in names]
    kinds = leaves.kind_of.tolist()
    try:
        kind_of = resolve_all(names, kinds, {}, number)
    except TypeError:  # something is no names, or cannot be hashed
        kind_of = []
        for path, value, kind in zip(leaves.paths, names, kinds, strict=True):
            try:
                kind_of.append(number(value, kind))
            except TypeError as error:
                raise TypeError(f"names: {path}: {error}") from None
    return replace(leaves, kind_of=np.array(kind_of, np.int32), types=types)


def has_names(tree: Any) -> bool:
    """Tell whether an array of the tree has logical axis names; free without such libraries."""
    return _may_have_boxes() and any(unboxed(tree).names)


def axes_said(tree: Any, rows: Any) -> dict[int, tuple[Any, ...]]:
    """Return what boxes and Variables say of the dimensions of their arrays, by row.

    Args:
        tree: The tree.
        rows: The number of its row for each of its leaves, in a tree with or without the boxes.
    """
    if not _may_have_boxes():
        return {}
    from jax.tree_util import tree_leaves

    said = zip(tree_leaves(rows), open_boxes(tree).names_of_arrays(), strict=True)
    return {
        row: tuple(names)
        for row, names in said
        if isinstance(names, tuple | list) or is_partition_spec(names)
    }


def _may_have_boxes() -> bool:
    return bool(box_types() or variable_types() or named_array_types())


def check_rules_are_for_paths(rules: Rules, tree: Any) -> None:
    """Check that rules for paths are not logical axis rules for the tree's boxes.

    Costs a look at each pattern, unless there are boxes and all patterns could be names.

    Raises:
        TypeError: Each pattern is a plain word that is a name in a box or Variable of the tree, or
            that matches no path.
    """
    if not (box_types() or variable_types()):
        return
    patterns = [pattern for pattern, _ in rules]
    if not all(isinstance(pattern, str) and _PLAIN.fullmatch(pattern) for pattern in patterns):
        return
    names = _names_in_boxes(tree)
    if names.isdisjoint(patterns):
        return
    matches_nothing = set(rules.coverage(tree).dead)
    if all(p in names or index in matches_nothing for index, p in enumerate(patterns)):
        raise TypeError(
            "the rules are for the logical axis names in the tree's boxes, such as "
            f"{next(p for p in patterns if p in names)!r}, and here patterns are searched for in "
            "paths. Give shardrules.LogicalRules(rules); if they are patterns of paths, unbox the "
            "tree first"
        )


def _names_in_boxes(tree: Any) -> set[Any]:
    from jax import tree_util

    forms = NodeForms()
    leaves = tree_util.tree_leaves(tree, is_leaf=forms.has_names)
    boxed = [leaf for leaf in leaves if forms.holds_array(leaf)]
    return {name for leaf in boxed for name in forms.names_of(leaf) if isinstance(name, str)}
