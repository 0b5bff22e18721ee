"""Kinds of leaves on a mesh: by rules, by specs and shardings, or as another plan has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.correction import Correction
from shardrules._base.mesh_sizes import check_bounds, checked_sizes
from shardrules._base.rule_specs import MemoryKind, RuleSpec, memory_kind_of
from shardrules._base.specs import Entries, entries_of, entry_axes
from shardrules._base.text import shown
from shardrules._place.memory import memory_apart
from shardrules._place.mesh import MeshLike, axes_of_type, has_devices
from shardrules._place.shardings import (
    ManualAxes,
    check_memory_of_rules,
    manual_axes,
    specs_on_mesh,
)
from shardrules._place.spec_by_shape import SpecByShape
from shardrules._place.spec_on_mesh import LostAxes, SpecOnMesh
from shardrules._place.spec_trees import (
    broadcast_specs,
    is_named_sharding,
    is_spec,
    is_spec_of_mesh,
)
from shardrules._plan.device_bytes import held_of
from shardrules._plan.fold import Folded, fold, runs_of
from shardrules._plan.survey import (
    Derivation,
    PlannedLeaves,
    combined,
    dims_shown,
    grouped,
    redecided,
    survey,
    with_companions,
)
from shardrules._plan.table import (
    AMBIGUOUS,
    NO_RULE_NEEDED,
    UNMATCHED,
    Columns,
    Kind,
    LeafType,
    Leaves,
    Loss,
    Spec,
    Status,
    axes_named,
    refused,
)
from shardrules._rules.dialects import EFORMER
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._plan.companions import Companion
    from shardrules._rules.resolver import LostRule

OnMesh = Callable[..., Columns]
"""A function of a `SizedMesh` that puts leaves on it; `may_lack` has axes that it may lack."""


class SizedMesh(NamedTuple):
    """A mesh of any form with its axis sizes, which are checked."""

    form: MeshLike
    axis_sizes: dict[str, int]

    @property
    def explicit_axes(self) -> frozenset[str]:
        """Returns the axes of type Explicit; the axes of a dict are of type Auto."""
        return (
            frozenset() if isinstance(self.form, Mapping) else axes_of_type(self.form, "Explicit")
        )

    @property
    def manual(self) -> ManualAxes:
        """Returns the axes of type Manual."""
        return ManualAxes() if isinstance(self.form, Mapping) else manual_axes(self.form)


def sized_mesh(mesh: MeshLike) -> SizedMesh:
    """Return the mesh with its axis sizes."""
    if isinstance(mesh, Mapping):
        return SizedMesh(mesh, checked_sizes(mesh))
    check_bounds(sizes := dict(mesh.shape))
    return SizedMesh(mesh, sizes)


def axis_sizes_of(mesh: MeshLike) -> dict[str, int]:
    """Return the devices along each mesh axis, as `sized_mesh` does."""
    return sized_mesh(mesh).axis_sizes


class Problem(NamedTuple):
    """Reason why leaves are not placed, as `Kind` has it."""

    status: Status
    message: str | None = None
    fix: str | None = None


PLACED: Final = Problem("placed")
UNMATCHED_LEAVES: Final = Problem("unmatched", "no rule matches", "add a rule that matches")
AMBIGUOUS_LEAVES: Final = Problem(
    "ambiguous", "several rules match, where only one may", "make the patterns exclude each other"
)
_WITHOUT_RULE: Final = {
    NO_RULE_NEEDED: PLACED,
    UNMATCHED: UNMATCHED_LEAVES,
    AMBIGUOUS: AMBIGUOUS_LEAVES,
}


class Fit(NamedTuple):
    """Spec that an array gets, and the losses and the problem on the way to it."""

    spec: Spec | None
    counted: Spec | None = None
    """See `Kind`; of a spec that is not None it is the spec."""
    losses: tuple[Loss, ...] = ()
    """Their bytes are not counted yet."""
    problem: Problem = PLACED


def fitted(rule_spec: SpecOnMesh, shape: tuple[int, ...]) -> Fit:
    """Fit a spec to an array of this shape."""
    rank, kept = len(shape), rule_spec.corrector.kept(shape)
    losses = tuple(loss_of(rule_spec, lost, shape) for lost in rule_spec.lost(rank, kept))
    errors = [loss for loss in losses if loss.is_error]
    counted = None
    if all(loss.kind == "absent" for loss in errors):
        counted = rule_spec.without_lost(rank, kept)
    if not errors:
        return Fit(counted, counted, losses)
    return Fit(None, counted, losses, Problem("misfit", *refused(errors)))


def loss_of(rule_spec: SpecOnMesh, lost: LostAxes, shape: tuple[int, ...]) -> Loss:
    """Return the loss of these axes by an array of this shape; its bytes are 0 still."""
    words, is_error = rule_spec.message_and_fix(lost, shape), rule_spec.is_error(lost)
    axes = rule_spec.suggested_axes(lost), rule_spec.dropped_with(lost)
    return Loss(*lost, *axes, 0, *words, is_error)


def kind_on_mesh(
    leaf: LeafType,
    by_rule: Spec | None,
    fit: Fit,
    axis_sizes: Mapping[str, int],
    *,
    origin: str | None = None,
    dim_rules: tuple[int | None, ...] = (),
    lost_rules: tuple[LostRule, ...] = (),
    memory_kind: MemoryKind | None = None,
) -> Kind:
    """Return the kind of leaves whose spec is known, with its bytes and those of its losses."""
    counted = fit.counted if fit.spec is None else fit.spec
    # What is not placed is counted as if it were replicated, unless an axis alone is to be dropped.
    parts = held_of(leaf.shape or (), leaf.bits, counted or Entries(), axis_sizes)
    fullest, losses = parts.most, fit.losses
    if losses:
        kept = axes_named(counted)

        def shards_lost(loss: Loss) -> int:
            axes = (*_axes_lost(loss, losses, by_rule), *loss.meant)
            return prod(axis_sizes.get(axis, 1) for axis in axes if axis not in kept)

        losses = tuple(
            loss._replace(bytes=fullest - fullest // shards_lost(loss)) for loss in losses
        )
    return Kind(
        rule=leaf.rule if leaf.rule >= 0 else None,
        shape=leaf.shape,
        dtype=leaf.dtype,
        status=fit.problem.status,
        message=fit.problem.message,
        fix=fit.problem.fix,
        wanted=by_rule,
        spec=fit.spec,
        losses=losses,
        origin=origin,
        names=leaf.names,
        dim_rules=dim_rules,
        lost_rules=lost_rules,
        memory_kind=memory_kind,
        # Elements of fewer than 8 bits are packed.
        bytes=0 if leaf.shape is None else -(-prod(leaf.shape) * leaf.bits // 8),
        device_bytes=fullest,
        _held=parts,
        _counted=counted,
    )


def _axes_lost(loss: Loss, losses: tuple[Loss, ...], by_rule: Spec | None) -> tuple[str, ...]:
    """Return the axes that a loss took: an absent one may take those beside it with it."""
    counted = [taken.dim for taken in losses if taken.kind == "indivisible"]
    if loss.kind != "absent" or loss.dim in counted:
        return loss.axes
    return entry_axes(entries_of(by_rule or Entries())[loss.dim])


def fit_of(kind: Kind) -> Fit:
    """Return the spec of these leaves, and why it is this one."""
    problem = Problem(kind.status, kind.message, kind.fix)
    return Fit(kind.spec, kind._counted, kind.losses, problem)


class RulesOnMesh:
    """Specs of a rule list, bound to a mesh."""

    def __init__(self, rules: Rules, mesh: SizedMesh, may_lack: frozenset[str]) -> None:
        if has_devices(mesh.form):
            check_memory_of_rules(rules, mesh.form)
        self._axis_sizes = mesh.axis_sizes
        self._specs, self._spec_of = specs_on_mesh(
            rules,
            mesh.axis_sizes,
            rules.correction,
            manual=mesh.manual,
            as_specs=False,
            optional_axes=may_lack.union(rules.optional_axes),
        )
        self._memory_of: list[MemoryKind | None] = [memory_kind_of(value) for _, value in rules]
        self._unmatched_is_error = rules.dialect.unmatched != "replicate"

    def kind(self, leaf: LeafType, derivation: Derivation | None = None) -> Kind:
        """Return the kind of such leaves, with their rule's spec or one derived from it."""
        if leaf.rule < 0:
            problem = _WITHOUT_RULE[leaf.rule]
            if problem is UNMATCHED_LEAVES and not self._unmatched_is_error:
                problem = PLACED
            spec = Entries() if problem is PLACED else None
            return kind_on_mesh(leaf, None, Fit(spec, problem=problem), self._axis_sizes)
        by_rule, origin = self._spec_for(leaf, derivation)
        memory = self._memory_of[leaf.rule]
        # A leaf without a shape has no dimensions.
        shape = leaf.shape or ()
        on_mesh, origin_of_shape = by_rule.for_array(shape, leaf.bits)
        origin = "; ".join(filter(None, (origin, origin_of_shape))) or None
        written, fit = on_mesh.spec, fitted(on_mesh, shape)
        return kind_on_mesh(leaf, written, fit, self._axis_sizes, origin=origin, memory_kind=memory)

    def _spec_for(
        self, leaf: LeafType, derivation: Derivation | None
    ) -> tuple[SpecOnMesh | SpecByShape, str | None]:
        """Return (the spec of such leaves, its origin)."""
        by_rule = self._specs[self._spec_of[leaf.rule]]
        if derivation is None:
            return by_rule, None
        shape = leaf.shape or ()
        dims, blocks = combined(derivation.steps, len(by_rule.spec))
        cut = tuple(None if size == 1 else dim for size, dim in zip(shape, dims, strict=False))
        return (
            by_rule.with_dims((*cut, *dims[len(shape) :]), blocks),
            f"the rule of what it follows, dims {dims_shown(dims[: len(shape)])} of its spec",
        )


def by_rules(
    leaves: Leaves,
    rules: Rules,
    derivations: Iterable[Derivation | None],
    mesh: SizedMesh,
    *,
    may_lack: frozenset[str] = frozenset(),
) -> Columns:
    """Put leaves on the mesh, which may lack the axes of `may_lack` too."""
    on_mesh = RulesOnMesh(rules, mesh, may_lack)
    kinds = list(map(on_mesh.kind, leaves.types, derivations))
    return Columns(leaves, kinds, mesh.axis_sizes, mesh.explicit_axes)


def plan_by_rules(tree: Any, rules: Rules, companions: tuple[Companion, ...]) -> OnMesh:
    """Plan a tree by rules of paths; see `shardrules.plan`."""
    leaves, derivations = with_companions(survey(tree, rules), rules, companions)
    return partial(by_rules, leaves, rules, derivations)


def plan_by_specs(leaves: Leaves, specs: Any, correction: Correction | None = None) -> OnMesh:
    """Plan leaves by specs or shardings, one for all or a tree of them."""
    return plan_leaves(leaves, rules_of_specs(leaves, specs, correction))


def plan_leaves(leaves: Leaves, rules: Rules) -> OnMesh:
    """Plan leaves that were surveyed already by rules of paths."""
    decided = redecided(leaves, rules)
    return partial(by_rules, decided, rules, [None] * len(decided.types))


_GIVE: Final = "give a PartitionSpec, a NamedSharding, or None for a leaf that nothing decides"


def rules_of_specs(leaves: Leaves, specs: Any, correction: Correction | None) -> Rules:
    """Return the rules that give each leaf, surveyed by no rules, its spec in a tree of specs."""
    from jax import tree_util

    rows, treedef = tree_util.tree_flatten(leaves.tree)
    spread = broadcast_specs("rules", leaves.tree, treedef, specs)
    spec_of = dict(zip(rows, spread, strict=True))
    if spread and all(spec is None for spec in spread):
        raise TypeError(f"rules: no leaf has a spec: {shown(specs)}; {_GIVE}")
    needs_none = [leaf.rule == NO_RULE_NEEDED for leaf in leaves.types]
    decided = [
        row
        for row, kind in enumerate(leaves.kind_of.tolist())
        if spec_of[row] is not None and not needs_none[kind]
    ]
    values, group_of = grouped(_rule_value(leaves.paths[row], spec_of[row]) for row in decided)
    # No path matches two of these patterns: each lists exactly its own paths.
    folded = fold([leaves.paths[row] for row in decided], group_of)
    pairs = [(rf"^{''.join(_regexes(paths))}$", values[paths.group]) for paths in folded]
    return Rules(pairs, EFORMER, correction=correction)


def mesh_of_shardings(specs: Any) -> MeshLike | None:
    """Return the mesh of the shardings in a tree of specs; None if they have none or several."""
    from jax import tree_util

    leaves = tree_util.tree_leaves(specs, is_leaf=is_spec)
    meshes = {sharding.mesh for sharding in leaves if is_named_sharding(sharding)}
    return meshes.pop() if len(meshes) == 1 else None


def _rule_value(path: str, spec: Any) -> Any:
    """Return what a rule says for this spec or sharding."""
    if is_spec_of_mesh(spec):
        return spec
    if not is_named_sharding(spec):
        raise TypeError(f"rules: for the leaf {path} the spec is {shown(spec)}; {_GIVE}")
    memory: Any = memory_apart(spec)
    return spec.spec if memory is None else RuleSpec(spec.spec, memory_kind=memory)


def _regexes(folded: Folded) -> Iterator[str]:
    for place, part in enumerate(folded.parts):
        if place % 2 == 0:
            yield re.escape(part).replace(r"\-", "-")
        else:
            numbers = (str(number) for run in runs_of(part.strip("{}")) for number in run)
            yield f"({'|'.join(numbers)})"


def by_plan(planned: Columns, tree: PlannedLeaves) -> Columns:
    """Put the leaves of a tree on the mesh of a plan, as its leaves of the same paths."""
    leaves, rows = tree
    pairs, kind_of = grouped(
        zip(leaves.kind_of.tolist(), planned.kind_of[rows].tolist(), strict=True)
    )
    types = [
        planned._leaves.types[decided]._replace(
            dtype=leaves.types[kind].dtype, bits=leaves.types[kind].bits
        )
        for kind, decided in pairs
    ]
    kinds = [
        _kind_as_planned(leaves.types[kind], planned.kinds[decided], planned.axis_sizes)
        for kind, decided in pairs
    ]
    sources = [planned.sources[row] for row in rows]
    leaves = replace(leaves, rules=planned.rules, sources=sources, kind_of=kind_of, types=types)
    return Columns(leaves, kinds, planned.axis_sizes, planned._explicit_axes)


def _kind_as_planned(leaf: LeafType, kind: Kind, axis_sizes: Mapping[str, int]) -> Kind:
    rule = NO_RULE_NEEDED if kind.rule is None else kind.rule
    return kind_on_mesh(
        leaf._replace(rule=rule, names=kind.names),
        kind.wanted,
        fit_of(kind),
        axis_sizes,
        origin=kind.origin,
        dim_rules=kind.dim_rules,
        lost_rules=kind.lost_rules,
        memory_kind=kind.memory_kind,
    )
