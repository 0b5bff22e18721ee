"""Kinds of leaves on a mesh by logical rules: for each kind the rules of its axis names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import numpy as np

from shardrules._base.rule_specs import RuleSpec
from shardrules._base.specs import Entries, entry_axes, is_partition_spec
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
from shardrules._place.shardings import bound_spec, local_sizes
from shardrules._place.spec_on_mesh import LostAxes, SpecOnMesh
from shardrules._plan.kinds import REPLICATED, Fit, Kind, Loss, fitted, kind_of, loss_of
from shardrules._plan.leaves import NO_RULE_NEEDED, LeafType, Leaves, survey
from shardrules._plan.resolve import OnMesh, SizedMesh
from shardrules._rules.logical_rules import LogicalRules, resolver_of
from shardrules._rules.names import checked_names
from shardrules._rules.resolver import UNASSIGNED, Resolution, axes_in, repeated, resolver_for
from shardrules._rules.rules import Rules

_PLAIN: Final = re.compile(r"[\w-]+")


def survey_named(tree: Any, names: Any = None) -> Leaves:
    """Walk the tree once.

    Raises:
        TypeError: Nothing has names, or something else stands in their place.
        ValueError: The names do not fit the tree, or are for paths that are not there; or as
            `survey`.
    """
    if names is not None:
        leaves = survey(tree, NO_RULES)
        return _with_names(leaves, names_beside(leaves.tree, leaves.paths, names))
    from jax.tree_util import tree_leaves

    boxes = unboxed_with_names(tree)
    leaves = survey(boxes.tree, NO_RULES)
    names = by_row(tree_leaves(leaves.tree), boxes.names_of_arrays())
    return _with_names(replace(leaves, tree=boxes.boxed(leaves.tree)), names)


def _with_names(leaves: Leaves, names: list[Any]) -> Leaves:
    """Return the leaves with their kinds told apart by their names as well."""
    numbers: dict[tuple[Any, int], int] = {}
    types: list[LeafType] = []
    failed: dict[tuple[Any, int], TypeError] = {}

    def number(value: Any, kind: int) -> int:
        try:
            checked = None if value is None else checked_names(value)
        except TypeError as error:
            failed[id(value), kind] = error
            return -1
        index = numbers.setdefault((checked, kind), len(types))
        if index == len(types):
            types.append(leaves.types[kind]._replace(rule=NO_RULE_NEEDED, names=checked))
        return index

    if list in set(map(type, names)):
        names = [tuple(value) if type(value) is list else value for value in names]
    kinds = leaves.kind_of.tolist()
    try:
        kind_of = resolve_all(names, kinds, {}, number)
    except TypeError:  # something in names cannot be hashed
        kind_of = list(map(number, names, kinds))
    if failed:
        row = kind_of.index(-1)
        raise TypeError(f"names: {leaves.paths[row]}: {failed[id(names[row]), kinds[row]]}")
    return replace(leaves, kind_of=np.array(kind_of, np.int32), types=types)


def plan_by_names(tree: Any, rules: LogicalRules, names: Any) -> OnMesh:
    """Plan a tree by logical rules; see `shardrules.plan`."""
    return plan_named(survey_named(tree, names), rules)


def plan_named(leaves: Leaves, rules: LogicalRules) -> OnMesh:
    """Plan leaves whose names are known already by logical rules."""
    return partial(by_names, replace(leaves, rules=rules), rules)


def by_names(
    leaves: Leaves, rules: LogicalRules, mesh: SizedMesh, may_lack: frozenset[str]
) -> tuple[Leaves, list[Kind]]:
    """Put the leaves on the mesh, as `by_rules` does."""
    on_mesh = NamesOnMesh(rules, mesh, may_lack)
    return leaves, list(map(on_mesh.kind, leaves.types))


class NamesOnMesh:
    """Logical rules, bound to a mesh."""

    def __init__(self, rules: LogicalRules, mesh: SizedMesh, may_lack: frozenset[str]) -> None:
        self._axis_sizes = mesh.axis_sizes
        self._correction = rules.correction
        self._optional_axes = may_lack.union(rules.optional_axes)
        self._named_with = _named_with(rules, mesh.axis_sizes)
        self._manual = mesh.manual
        # By the names alone: no rule loses to a mesh or a shape.
        self._anywhere = resolver_for(tuple(rules), rules.dialect, {})
        sizes = local_sizes(mesh.axis_sizes, self._manual)
        self._here = resolver_of(rules, sizes, self._optional_axes)

    def kind(self, leaf: LeafType) -> Kind:
        """Return the kind of such leaves."""
        if leaf.names is None or leaf.shape is None:
            return kind_of(leaf, REPLICATED, self._axis_sizes)
        if twice := repeated(leaf.names, self._here.dialect):
            why = f"the names {leaf.names} have {', '.join(map(repr, twice))} more than once"
            fix = "give each dimension a name of its own, or None"
            return kind_of(leaf, Fit(status="misfit", message=why, fix=fix), self._axis_sizes)
        by_names_alone = self._anywhere.resolve(leaf.names)
        resolution = self._here.resolve(leaf.names, leaf.shape)
        bound = self._bound(_assigned_entries(by_names_alone))
        entries = self._here.without_ones(_assigned_entries(resolution), self._axis_sizes)
        fit = fitted(
            self._bound(entries),
            leaf.shape,
            self._lost_to_other_rules(bound, by_names_alone, resolution, leaf.shape),
            wanted=bound.spec,
            dim_rules=tuple(resolution.winners),
            lost_rules=tuple(resolution.lost),
        )
        return kind_of(leaf, fit, self._axis_sizes)

    def _bound(self, spec: Entries) -> SpecOnMesh:
        """Bind the spec of the rules that win to the mesh."""
        bound = bound_spec(
            RuleSpec(spec),
            self._axis_sizes,
            self._correction,
            self._manual,
            as_specs=False,
            optional_axes=self._optional_axes,
            named_with=self._named_with,
        )
        return cast(SpecOnMesh, bound)  # of entries, and not made from shapes

    def _lost_to_other_rules(
        self, bound: SpecOnMesh, by_names: Resolution, here: Resolution, shape: tuple[int, ...]
    ) -> Iterator[Loss]:
        """Yield the axes of rules that win by names alone, and lose for the mesh or the shape."""
        why = {(loser.rule, loser.dim): loser.why for loser in here.lost}
        for dim, rule in enumerate(by_names.winners[: len(shape)]):
            if rule is None or rule == here.winners[dim]:
                continue
            if (reason := why[rule, dim]) not in ("absent", "indivisible"):
                continue
            axes = entry_axes(bound.spec[dim])
            if absent := tuple(axis for axis in axes if axis not in self._axis_sizes):
                is_optional = self._optional_axes.issuperset(absent)
                lost = LostAxes("optional" if is_optional else "absent", dim, absent)
                yield loss_of(bound, lost, shape)
            if reason == "indivisible":
                present = tuple(axis for axis in axes if axis in self._axis_sizes)
                yield loss_of(bound, LostAxes("indivisible", dim, present), shape)


def _assigned_entries(resolution: Resolution) -> Entries:
    return Entries(None if entry is UNASSIGNED else entry for entry in resolution.entries())


def _named_with(rules: LogicalRules, axis_sizes: Mapping[str, int]) -> Mapping[str, frozenset[str]]:
    """Map each axis that the mesh lacks to the axes that rules name with it."""
    others: dict[str, frozenset[str]] = {}
    for named in (frozenset(axes_in(axes)) for _, axes in rules):
        for axis in named.difference(axis_sizes):
            others[axis] = others.get(axis, frozenset()) | named
    return others


def has_names(tree: Any) -> bool:
    """Return whether an array of the tree has logical axis names; free without such libraries."""
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
