"""The columns of a plan whose leaves logical rules decide: of each kind the rules of its names.

Costs one resolution and one correction per kind, and no walk. Must not know what is asked of
columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from shardrules._core import resolve_all
from shardrules._correction import RuleSpec
from shardrules._mesh.spec_on_mesh import LostAxes, SpecOnMesh
from shardrules._place.shardings import ManualAxes, bound_spec, local_sizes, manual_axes
from shardrules._plan.resolve import (
    Problem,
    axis_sizes_of,
    explicit_axes_of,
    fitted,
    kind_on_mesh,
    loss_of,
)
from shardrules._plan.survey import survey
from shardrules._plan.table import NO_RULE_NEEDED, Columns
from shardrules._rules.logical_rules import resolver_of
from shardrules._rules.names import checked_names, unboxed_with_names
from shardrules._rules.resolver import UNASSIGNED, axes_in, repeated
from shardrules._rules.rules import Rules
from shardrules._specs import Entries, entry_axes
from shardrules._trees.align import by_row, names_beside

if TYPE_CHECKING:
    from shardrules._correction import Correction
    from shardrules._mesh.mesh import MeshLike
    from shardrules._plan.table import Kind, LeafType, Leaves, Loss
    from shardrules._rules.logical_rules import LogicalRules
    from shardrules._rules.resolver import Resolution

_NO_RULES: Final = Rules(())


def survey_named(tree: Any, rules: LogicalRules, names: Any = None) -> Leaves:
    """Walks the tree once.

    Args:
        tree: Any pytree of arrays, boxes, nnx Variables or haliax arrays.
        rules: What decides the names.
        names: A tree of names that fits the tree, or {path: names}. Default: those in the boxes.

    Raises:
        TypeError: Nothing has names, or something else stands in their place.
        ValueError: The names do not fit the tree, or are for paths that are not there; or as
            `survey`.
    """
    if names is not None:
        leaves = replace(survey(tree, _NO_RULES), rules=rules)
        return _named(leaves, names_beside(leaves.tree, leaves.paths, names))
    from jax.tree_util import tree_leaves

    boxes = unboxed_with_names(tree)
    leaves = survey(boxes.tree, _NO_RULES)
    names = by_row(tree_leaves(leaves.tree), boxes.names_of_arrays())
    return _named(replace(leaves, rules=rules, tree=boxes.boxed(leaves.tree)), names)


def _named(leaves: Leaves, names: list[Any]) -> Leaves:
    """The leaves, their kinds told apart by their names as well."""
    numbers: dict[tuple[Any, int], int] = {}
    types: list[LeafType] = []
    failed: dict[tuple[Any, int], TypeError] = {}

    def number(given: Any, kind: int) -> int:
        try:
            checked = None if given is None else checked_names(given)
        except TypeError as error:
            failed[id(given), kind] = error
            return -1
        known = numbers.setdefault((checked, kind), len(types))
        if known == len(types):
            types.append(leaves.types[kind]._replace(rule=NO_RULE_NEEDED, names=checked))
        return known

    if list in set(map(type, names)):
        names = [tuple(one) if type(one) is list else one for one in names]
    kinds = leaves.kind_of.tolist()
    try:
        found = resolve_all(names, kinds, {}, number)
    except TypeError:  # something in names cannot be hashed
        found = list(map(number, names, kinds))
    if failed:
        row = found.index(-1)
        raise TypeError(f"names: {leaves.paths[row]}: {failed[id(names[row]), kinds[row]]}")
    return replace(leaves, kind_of=np.array(found, np.int32), types=types)


def by_names(
    leaves: Leaves,
    rules: LogicalRules,
    correction: Correction,
    mesh: MeshLike,
    *,
    optional_axes: frozenset[str] = frozenset(),
    may_lack: frozenset[str] = frozenset(),
) -> Columns:
    """The sharding of each leaf on the mesh.

    Args:
        leaves: As surveyed, with their names.
        rules: The rules for these names.
        correction: For rules and specs that do not fit.
        mesh: A mesh of any form.
        optional_axes: As in `by_rules`.
        may_lack: As in `by_rules`.
    """
    on_mesh = _NamesOnMesh(rules, correction, mesh, optional_axes | may_lack)
    return Columns(
        leaves, list(map(on_mesh.kind, leaves.types)), on_mesh.axis_sizes, explicit_axes_of(mesh)
    )


class _NamesOnMesh:
    """Logical rules, bound to a mesh."""

    def __init__(
        self,
        rules: LogicalRules,
        correction: Correction,
        mesh: MeshLike,
        optional_axes: frozenset[str],
    ) -> None:
        self.axis_sizes = axis_sizes_of(mesh)
        self._correction = correction
        self._optional_axes = optional_axes
        self._named_with = _named_with(rules, self.axis_sizes)
        self._manual = ManualAxes() if isinstance(mesh, Mapping) else manual_axes(mesh)
        self._anywhere = resolver_of(rules, {})
        sizes = local_sizes(self.axis_sizes, self._manual)
        self._here = resolver_of(rules, sizes, correction, optional_axes)

    def kind(self, leaf: LeafType) -> Kind:
        """The kind of such leaves."""
        if leaf.names is None or leaf.shape is None:
            return kind_on_mesh(leaf, None, Entries(), self.axis_sizes)
        if twice := repeated(leaf.names, self._here.dialect):
            listed = ", ".join(map(repr, twice))
            problem = Problem(
                "misfit",
                f"the names {leaf.names} have {listed} more than once",
                "give each dimension a name of its own, or None",
            )
            return kind_on_mesh(leaf, None, None, self.axis_sizes, problem=problem)
        wanted = self._anywhere.resolve(leaf.names)
        found = self._here.resolve(leaf.names, leaf.shape)
        bound = self._bound(wanted)
        fit = fitted(self._bound(found, whole=False), leaf.shape)
        return kind_on_mesh(
            leaf,
            bound.spec,
            fit.spec,
            self.axis_sizes,
            counted=fit.counted,
            problem=fit.problem,
            losses=(*self._lost_to_other_rules(bound, wanted, found, leaf.shape), *fit.losses),
            dim_rules=tuple(found.winners),
            lost_rules=tuple(found.lost),
        )

    def _bound(self, resolution: Resolution, *, whole: bool = True) -> SpecOnMesh:
        """The spec of the rules that were chosen, on the mesh."""
        spec = Entries(None if one is UNASSIGNED else one for one in resolution.entries())
        if not whole:
            spec = self._here.without_ones(spec, self.axis_sizes)
        bound = bound_spec(
            RuleSpec(spec),
            self.axis_sizes,
            self._correction,
            self._manual,
            made=False,
            optional_axes=self._optional_axes,
            named_with=self._named_with,
        )
        on_mesh = cast(SpecOnMesh, bound)  # of entries, and not made from shapes
        on_mesh.tried = ("prefix", "drop_axis")  # logical rules take no "factor"
        return on_mesh

    def _lost_to_other_rules(
        self, bound: SpecOnMesh, wanted: Resolution, found: Resolution, shape: tuple[int, ...]
    ) -> Iterator[Loss]:
        """The axes of rules that win by names alone, and lose for the mesh or the shape."""
        why = {(one.rule, one.dim): one.why for one in found.lost}
        for dim, rule in enumerate(wanted.winners[: len(shape)]):
            if rule is None or rule == found.winners[dim]:
                continue
            if (reason := why[rule, dim]) not in ("absent", "indivisible"):
                continue
            axes = entry_axes(bound.spec[dim])
            if absent := tuple(axis for axis in axes if axis not in self.axis_sizes):
                is_optional = self._optional_axes.issuperset(absent)
                lost = LostAxes("optional" if is_optional else "absent", dim, absent)
                yield loss_of(bound, lost, shape)
            if reason == "indivisible":
                present = tuple(axis for axis in axes if axis in self.axis_sizes)
                yield loss_of(bound, LostAxes("indivisible", dim, present), shape)


def _named_with(rules: LogicalRules, axis_sizes: Mapping[str, int]) -> Mapping[str, frozenset[str]]:
    """For each axis that the mesh lacks, the axes that rules name beside it."""
    beside: dict[str, frozenset[str]] = {}
    for named in (frozenset(axes_in(axes)) for _, axes in rules):
        for axis in named.difference(axis_sizes):
            beside[axis] = beside.get(axis, frozenset()) | named
    return beside
