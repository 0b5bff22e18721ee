"""Rules bound to a mesh: the kinds of leaves by rules of paths, or by rules of logical names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, cast

from shardrules._base.arguments import checked_sizes
from shardrules._base.rule_specs import MemoryKind, RuleSpec, memory_kind_of
from shardrules._base.specs import Entries, entry_axes
from shardrules._place.mesh import MeshLike, as_mesh, axes_of_type, has_devices
from shardrules._place.shardings import (
    ManualAxes,
    bound_spec,
    check_memory_of_rules,
    local_sizes,
    manual_axes,
    specs_on_mesh,
)
from shardrules._place.spec_on_mesh import LostAxes, SpecByShape, SpecOnMesh
from shardrules._plan.bases import combined
from shardrules._plan.companions import DimStep
from shardrules._plan.kinds import (
    REPLICATED,
    WITHOUT_RULE,
    Fit,
    Kind,
    Loss,
    fit_of,
    kind_with_bytes,
    loss_of,
)
from shardrules._plan.leaves import UNMATCHED, LeafType, Leaves
from shardrules._rules.logical_rules import LogicalRules, resolver_of
from shardrules._rules.resolver import UNASSIGNED, Resolution, axes_in, repeated, resolver_for
from shardrules._rules.rules import Rules

PutOnMesh = Callable[["SizedMesh"], tuple[Leaves, list[Kind]]]
"""A function that puts leaves on a mesh."""


class SizedMesh(NamedTuple):
    """A mesh of any form with its axis sizes, which are checked."""

    form: MeshLike
    axis_sizes: dict[str, int]

    @property
    def explicit_axes(self) -> frozenset[str]:
        """The axes of type Explicit; the axes of a dict are of type Auto."""
        return (
            frozenset() if isinstance(self.form, Mapping) else axes_of_type(self.form, "Explicit")
        )

    @property
    def manual(self) -> ManualAxes:
        """The axes of type Manual."""
        return ManualAxes() if isinstance(self.form, Mapping) else manual_axes(self.form)


def sized_mesh(mesh: MeshLike) -> SizedMesh:
    """Return the mesh with its axis sizes; raise as `as_mesh`."""
    if isinstance(mesh, Mapping):  # which needs no JAX
        return SizedMesh(mesh, checked_sizes(mesh))
    mesh = as_mesh(mesh)
    return SizedMesh(mesh, dict(mesh.shape))


def put_by_rules(leaves: Leaves, mesh: SizedMesh) -> tuple[Leaves, list[Kind]]:
    """Put leaves on the mesh by their rules; see `PutOnMesh`."""
    return leaves, list(map(bound_rules(leaves.rules, mesh).kind, leaves.types))


def bound_rules(rules: Rules | LogicalRules, mesh: SizedMesh) -> RulesOnMesh | NamesOnMesh:
    return RulesOnMesh(rules, mesh) if isinstance(rules, Rules) else NamesOnMesh(rules, mesh)


class RulesOnMesh:
    """Rules of paths, bound to a mesh."""

    def __init__(self, rules: Rules, mesh: SizedMesh) -> None:
        if has_devices(mesh.form):
            check_memory_of_rules(rules, mesh.form)
        self._axis_sizes = mesh.axis_sizes
        self._specs, self._spec_of = specs_on_mesh(
            rules,
            mesh.axis_sizes,
            rules.correction,
            manual=mesh.manual,
            as_specs=False,
            optional_axes=frozenset(rules.optional_axes),
        )
        self._memory_of: list[MemoryKind | None] = [memory_kind_of(value) for _, value in rules]
        self._unmatched_is_error = rules.dialect.unmatched != "replicate"

    def kind(self, leaf: LeafType) -> Kind:
        """Return the kind of such leaves, with their rule's spec or one derived from it."""
        if leaf.rule < 0:
            is_whole = leaf.rule == UNMATCHED and not self._unmatched_is_error
            fit = REPLICATED if is_whole else WITHOUT_RULE[leaf.rule]
            return kind_with_bytes(leaf, fit, self._axis_sizes)
        by_rule, origin = self._specs[self._spec_of[leaf.rule]], None
        # A leaf without a shape has no dimensions.
        shape = leaf.shape or ()
        if leaf.steps:
            by_rule, origin = _derived_spec(by_rule, shape, leaf.steps)
        if isinstance(by_rule, SpecByShape):
            by_rule, origin_of_shape = by_rule.for_array(shape, leaf.bits)
            origin = "; ".join(filter(None, (origin, origin_of_shape))) or None
        fit = fit_of(by_rule, shape, origin=origin, memory_kind=self._memory_of[leaf.rule])
        return kind_with_bytes(leaf, fit, self._axis_sizes)


def _derived_spec(
    of_base: SpecOnMesh | SpecByShape, shape: tuple[int, ...], steps: tuple[DimStep, ...]
) -> tuple[SpecOnMesh | SpecByShape, str]:
    """Return (the spec of leaves that follow a base with this spec, its origin)."""
    dims = combined(steps, len(of_base.spec))
    cut = tuple(None if size == 1 else dim for size, dim in zip(shape, dims, strict=False))
    texts = ", ".join("-" if dim is None else repr(dim) for dim in dims[: len(shape)])
    origin = f"the rule of what it follows, dims ({texts}) of its spec"
    return of_base.with_dims((*cut, *dims[len(shape) :])), origin


class NamesOnMesh:
    """Logical rules, bound to a mesh."""

    def __init__(self, rules: LogicalRules, mesh: SizedMesh) -> None:
        self._axis_sizes = mesh.axis_sizes
        self._correction = rules.correction
        self._optional_axes = frozenset(rules.optional_axes)
        self._named_with = _named_with(rules, mesh.axis_sizes)
        self._manual = mesh.manual
        # By the names alone: no rule loses to a mesh or a shape.
        self._anywhere = resolver_for(tuple(rules), rules.dialect, {})
        sizes = local_sizes(mesh.axis_sizes, self._manual)
        self._here = resolver_of(rules, sizes, self._optional_axes)

    def kind(self, leaf: LeafType) -> Kind:
        """Return the kind of such leaves."""
        if leaf.names is None or leaf.shape is None:
            return kind_with_bytes(leaf, REPLICATED, self._axis_sizes)
        if twice := repeated(leaf.names, self._here.dialect):
            why = f"the names {leaf.names} have {', '.join(map(repr, twice))} more than once"
            fix = "give each dimension a name of its own, or None"
            return kind_with_bytes(
                leaf, Fit(status="misfit", message=why, fix=fix), self._axis_sizes
            )
        by_names_alone = self._anywhere.resolve(leaf.names)
        resolution = self._here.resolve(leaf.names, leaf.shape)
        bound = self._bound(_assigned_entries(by_names_alone))
        entries = self._here.without_ones(_assigned_entries(resolution), self._axis_sizes)
        fit = fit_of(
            self._bound(entries),
            leaf.shape,
            self._lost_to_other_rules(bound, by_names_alone, resolution, leaf.shape),
            wanted=bound.spec,
            dim_rules=tuple(resolution.winners),
            lost_rules=tuple(resolution.lost),
        )
        return kind_with_bytes(leaf, fit, self._axis_sizes)

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
