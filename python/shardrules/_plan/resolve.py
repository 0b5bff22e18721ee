"""The columns of a tree whose leaves another plan has decided: the same paths, of any dtype.

Costs a kind per kind, and a look-up per leaf. Must not know how the other plan decided.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._correction import RuleSpec, memory_kind_of
from shardrules._mesh.device_bytes import held_of
from shardrules._mesh.memory import memory_apart
from shardrules._mesh.mesh import axes_of_type, has_devices, on_axes
from shardrules._mesh.spec_on_mesh import in_parts
from shardrules._mesh_sizes import check_bounds, checked_sizes
from shardrules._place.decider import is_named_sharding, is_spec, is_spec_of_mesh
from shardrules._place.shardings import (
    ManualAxes,
    check_memory_of_rules,
    manual_axes,
    specs_on_mesh,
)
from shardrules._place.spec_trees import spread_specs
from shardrules._plan.fold import fold
from shardrules._plan.survey import Derivation, combined, dims_shown, grouped
from shardrules._plan.table import (
    AMBIGUOUS,
    NO_RULE_NEEDED,
    UNMATCHED,
    Columns,
    Kind,
    Loss,
    Status,
    axes_named,
    refused,
)
from shardrules._rules.dialects import EFORMER
from shardrules._rules.rules import Rules
from shardrules._specs import Entries, entries_of, entry_axes
from shardrules._text import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardrules._correction import Correction, MemoryKind
    from shardrules._mesh.mesh import MeshLike
    from shardrules._mesh.spec_on_mesh import LostAxes, SpecByShape, SpecOnMesh
    from shardrules._plan.fold import Folded
    from shardrules._plan.survey import Derivation, PlannedLeaves
    from shardrules._plan.table import Kind, LeafType, Leaves, Spec
    from shardrules._rules.resolver import LostRule
    from shardrules._rules.rules import Rules


class Problem(NamedTuple):
    """Why leaves are not placed, as `Kind` has it."""

    status: Status
    message: str | None = None
    fix: str | None = None


PLACED: Final = Problem("placed")
UNMATCHED_LEAVES: Final = Problem("unmatched", "no rule matches", "add a rule that matches")
AMBIGUOUS_LEAVES: Final = Problem(
    "ambiguous",
    "several rules match, where only one may",
    "make the patterns exclude each other",
)
_WITHOUT_RULE: Final = {
    NO_RULE_NEEDED: PLACED,
    UNMATCHED: UNMATCHED_LEAVES,
    AMBIGUOUS: AMBIGUOUS_LEAVES,
}


def axis_sizes_of(mesh: MeshLike) -> dict[str, int]:
    """Devices along each mesh axis.

    Raises:
        ValueError, TypeError: It is not a mesh, or has more devices than can be counted.
    """
    sizes = checked_sizes(mesh) if isinstance(mesh, Mapping) else dict(mesh.shape)
    check_bounds(sizes)
    return sizes


def mesh_on(mesh: MeshLike, axis_sizes: dict[str, int]) -> MeshLike:
    """The mesh with these axes, which are its own or parts of them.

    Raises:
        ValueError: The mesh cannot be factored.
    """
    return axis_sizes if isinstance(mesh, Mapping) else on_axes(mesh, axis_sizes)


def explicit_axes_of(mesh: MeshLike) -> frozenset[str]:
    """The mesh axes of type Explicit; the axes of a dict are of type Auto."""
    return frozenset() if isinstance(mesh, Mapping) else axes_of_type(mesh, "Explicit")


class RulesOnMesh:
    """The specs of a rule list, bound to a mesh.

    Args:
        rules: The rules.
        correction: For rules that have none of their own.
        mesh: What to bind them to.
        optional_axes: Axes that the mesh may lack, beside those of each rule.
    """

    def __init__(
        self,
        rules: Rules,
        correction: Correction,
        mesh: MeshLike,
        optional_axes: frozenset[str] = frozenset(),
    ) -> None:
        manual = ManualAxes() if isinstance(mesh, Mapping) else manual_axes(mesh)
        if has_devices(mesh):
            check_memory_of_rules(rules, mesh)
        self.axis_sizes = axis_sizes_of(mesh)
        self._specs, self._spec_of = specs_on_mesh(
            rules,
            self.axis_sizes,
            correction,
            manual=manual,
            made=False,
            optional_axes=optional_axes,
        )
        self._memory_of: list[MemoryKind | None] = [memory_kind_of(given) for _, given in rules]
        self._unmatched_is_error = rules.dialect.unmatched != "replicate"

    def kind(self, leaf: LeafType, derivation: Derivation | None = None) -> Kind:
        """The kind of such leaves, with their rule's spec or one derived from it."""
        if leaf.rule < 0:
            return self._without_rule(leaf)
        return self._with_spec(leaf, *self._wanted(leaf, derivation))

    def factored(self, leaves: Iterable[tuple[LeafType, Derivation | None]]) -> dict[str, int]:
        """The axis sizes of the mesh with the parts that the leaves need; see `factors`."""
        factors: dict[str, set[int]] = defaultdict(set)
        if any(spec.by_factors for spec in self._specs):
            for leaf, derivation in leaves:
                if leaf.rule >= 0 and leaf.shape is not None:
                    by_rule = self._wanted(leaf, derivation)[0]
                    wanted, _ = by_rule.for_array(leaf.shape, leaf.bits)
                    for axis, factor in wanted.factors(wanted.corrector.kept(leaf.shape)):
                        factors[axis].add(factor)
        return in_parts(self.axis_sizes, factors)

    def _wanted(
        self, leaf: LeafType, derivation: Derivation | None
    ) -> tuple[SpecOnMesh | SpecByShape, str | None]:
        """(the spec of such leaves, where it comes from)."""
        wanted = self._specs[self._spec_of[leaf.rule]]
        if derivation is None:
            return wanted, None
        shape = leaf.shape or ()
        dims, blocks = combined(derivation.steps, len(wanted.spec))
        cut = tuple(None if size == 1 else dim for size, dim in zip(shape, dims, strict=False))
        return (
            wanted.with_dims((*cut, *dims[len(shape) :]), blocks),
            f"the rule of what it follows, dims {dims_shown(dims[: len(shape)])} of its spec",
        )

    def _without_rule(self, leaf: LeafType) -> Kind:
        problem = _WITHOUT_RULE[leaf.rule]
        if problem is UNMATCHED_LEAVES and not self._unmatched_is_error:
            problem = PLACED
        spec = Entries() if problem is PLACED else None
        return kind_on_mesh(leaf, None, spec, self.axis_sizes, problem=problem)

    def _with_spec(
        self, leaf: LeafType, by_rule: SpecOnMesh | SpecByShape, origin: str | None
    ) -> Kind:
        memory = self._memory_of[leaf.rule]
        if leaf.shape is None:
            return kind_on_mesh(
                leaf, by_rule.spec, Entries(), self.axis_sizes, origin=origin, memory_kind=memory
            )
        wanted, made = by_rule.for_array(leaf.shape, leaf.bits)
        origin = "; ".join(filter(None, (origin, made))) or None
        fit = fitted(wanted, leaf.shape)
        return kind_on_mesh(
            leaf,
            wanted.spec,
            fit.spec,
            self.axis_sizes,
            counted=fit.counted,
            problem=fit.problem,
            losses=fit.losses,
            origin=origin,
            memory_kind=memory,
        )


class Fitted(NamedTuple):
    """What an array gets of a spec."""

    spec: Spec | None
    counted: Spec | None
    """See `Kind`."""
    losses: tuple[Loss, ...]
    """Their bytes are 0 still."""
    problem: Problem


def fitted(wanted: SpecOnMesh, shape: tuple[int, ...]) -> Fitted:
    """What an array of this shape gets of a spec."""
    rank, kept = len(shape), wanted.corrector.kept(shape)
    losses = tuple(loss_of(wanted, one, shape) for one in wanted.lost(rank, kept))
    errors = [loss for loss in losses if loss.is_error]
    counted = None
    if all(loss.kind == "absent" for loss in errors):
        counted = wanted.without_lost(rank, kept)
    if not errors:
        return Fitted(counted, counted, losses, PLACED)
    return Fitted(None, counted, losses, Problem("misfit", *refused(errors)))


def loss_of(wanted: SpecOnMesh, lost: LostAxes, shape: tuple[int, ...]) -> Loss:
    """The loss of these axes by an array of this shape; its bytes are 0 still."""
    words = wanted.words(lost, shape)
    return Loss(*lost, wanted.meant(lost), wanted.beside(lost), 0, *words, wanted.is_error(lost))


def kind_on_mesh(
    leaf: LeafType,
    wanted: Spec | None,
    spec: Spec | None,
    axis_sizes: Mapping[str, int],
    *,
    counted: Spec | None = None,
    problem: Problem = PLACED,
    losses: tuple[Loss, ...] = (),
    origin: str | None = None,
    dim_rules: tuple[int | None, ...] = (),
    lost_rules: tuple[LostRule, ...] = (),
    memory_kind: MemoryKind | None = None,
) -> Kind:
    """The kind of these leaves, whose spec is known: its bytes and what its losses cost.

    `counted` is as in `Kind`, for leaves that are not placed.
    """
    counted = counted if spec is None else spec
    # What is not placed is counted as if it were replicated, unless an axis alone is to be dropped.
    held = held_of(leaf.shape or (), leaf.bits, counted or Entries(), axis_sizes)
    fullest = held.most
    kept = axes_named(counted)

    def parts_lost(loss: Loss) -> int:
        lost = (*_axes_lost(loss, losses, wanted), *loss.meant)
        return prod(axis_sizes.get(axis, 1) for axis in lost if axis not in kept)

    return Kind(
        rule=leaf.rule if leaf.rule >= 0 else None,
        shape=leaf.shape,
        dtype=leaf.dtype,
        status=problem.status,
        message=problem.message,
        fix=problem.fix,
        wanted=wanted,
        spec=spec,
        losses=tuple(loss._replace(bytes=fullest - fullest // parts_lost(loss)) for loss in losses),
        origin=origin,
        names=leaf.names,
        dim_rules=dim_rules,
        lost_rules=lost_rules,
        memory_kind=memory_kind,
        # Elements of fewer than 8 bits are packed.
        bytes=0 if leaf.shape is None else -(-prod(leaf.shape) * leaf.bits // 8),
        device_bytes=fullest,
        _held=held,
        _counted=counted,
    )


def _axes_lost(loss: Loss, losses: tuple[Loss, ...], wanted: Spec | None) -> tuple[str, ...]:
    """The axes that a loss took: an absent one may take those beside it with it."""
    counted = [one.dim for one in losses if one.kind in ("indivisible", "factored")]
    if loss.kind != "absent" or loss.dim in counted:
        return loss.axes
    return entry_axes(entries_of(wanted or Entries())[loss.dim])


_GIVE: Final = "give a PartitionSpec, a NamedSharding, or None for a leaf that nothing decides"


def rules_of_specs(leaves: Leaves, specs: Any) -> Rules:
    """The rules that give each of these leaves its spec, and no other leaf any.

    Args:
        leaves: As surveyed by no rules.
        specs: A spec or sharding for all leaves, or a tree of them; None decides nothing.

    Raises:
        TypeError: A spec is something else, or nothing has one.
        ValueError: The tree of specs does not fit the tree.
    """
    from jax import tree_util

    rows, treedef = tree_util.tree_flatten(leaves.tree)
    spread = spread_specs("rules", leaves.tree, treedef, specs)
    spec_of = dict(zip(rows, spread, strict=True))
    if spread and all(one is None for one in spread):
        raise TypeError(f"rules: no leaf has a spec: {shown(specs)}; {_GIVE}")
    needs_none = [leaf.rule == NO_RULE_NEEDED for leaf in leaves.types]
    chosen = [
        row
        for row, kind in enumerate(leaves.kind_of.tolist())
        if spec_of[row] is not None and not needs_none[kind]
    ]
    wanted, group_of = grouped(_wanted(leaves.paths[row], spec_of[row]) for row in chosen)
    folded = fold([leaves.paths[row] for row in chosen], group_of)
    # Of two patterns for one path, none can be: each stands for its own paths alone.
    return Rules([(_pattern(one), wanted[one.group]) for one in folded], EFORMER)


def mesh_of_shardings(specs: Any) -> MeshLike | None:
    """The one mesh of the shardings in a tree of specs; None if they have none or several."""
    from jax import tree_util

    leaves = tree_util.tree_leaves(specs, is_leaf=is_spec)
    meshes = {one.mesh for one in leaves if is_named_sharding(one)}
    return meshes.pop() if len(meshes) == 1 else None


def _wanted(path: str, given: Any) -> Any:
    """What a rule says for this spec or sharding."""
    if is_spec_of_mesh(given):
        return given
    if not is_named_sharding(given):
        raise TypeError(f"rules: for the leaf {path} the spec is {shown(given)}; {_GIVE}")
    memory: Any = memory_apart(given)
    return given.spec if memory is None else RuleSpec(given.spec, memory_kind=memory)


def _pattern(folded: Folded) -> str:
    return rf"^{''.join(_regexes(folded))}$"


def _regexes(folded: Folded) -> Iterator[str]:
    for place, part in enumerate(folded.parts):
        if place % 2 == 0:
            yield re.escape(part).replace(r"\-", "-")
        else:
            yield f"({'|'.join(map(str, _numbers(part)))})"


def _numbers(shown_set: str) -> Iterator[int]:
    """The numbers of a set such as {0..3,7}."""
    for run in shown_set.strip("{}").split(","):
        first, _, last = run.partition("..")
        yield from range(int(first), int(last or first) + 1)


def by_rules(
    leaves: Leaves,
    rules: Rules,
    derivations: Iterable[Derivation | None],
    correction: Correction,
    mesh: MeshLike,
    *,
    optional_axes: frozenset[str] = frozenset(),
    may_lack: frozenset[str] = frozenset(),
) -> Columns:
    """The sharding of each leaf on the mesh.

    Args:
        leaves: As surveyed.
        rules: What decides them.
        derivations: Per kind how it follows a base, or None.
        correction: For rules that have none of their own.
        mesh: A mesh of any form.
        optional_axes: Axes that a mesh may lack, beside those of each rule.
        may_lack: Further axes that this one may lack.

    Raises:
        TypeError: A rule's spec cannot be made a PartitionSpec.
        ValueError: The leaves need factors of axes, and the mesh cannot be factored.
    """
    types = list(zip(leaves.types, derivations, strict=True))
    optional = optional_axes | may_lack
    on_mesh = RulesOnMesh(rules, correction, mesh, optional)
    axis_sizes = on_mesh.factored(types)
    if axis_sizes != on_mesh.axis_sizes:
        mesh = mesh_on(mesh, axis_sizes)
        on_mesh = RulesOnMesh(rules, correction, mesh, optional)
    kinds = [on_mesh.kind(*one) for one in types]
    return Columns(leaves, kinds, on_mesh.axis_sizes, explicit_axes_of(mesh))


def by_plan(planned: Columns, tree: PlannedLeaves) -> Columns:
    """The sharding of each leaf on the mesh of the plan.

    Args:
        planned: The plan's columns.
        tree: The leaves of the tree, and their rows in the plan.
    """
    leaves, rows = tree
    kinds = zip(leaves.kind_of.tolist(), planned.kind_of[rows].tolist(), strict=True)
    pairs, kind_of = grouped(kinds)
    made = [
        _kind(leaves.types[kind], planned.kinds[like], planned.axis_sizes) for kind, like in pairs
    ]
    types = [
        planned.leaves.types[like]._replace(dtype=own.dtype, bits=own.bits)
        for own, like in ((leaves.types[kind], like) for kind, like in pairs)
    ]
    found = replace(
        leaves,
        rules=planned.rules,
        sources=[planned.sources[row] for row in rows],
        kind_of=kind_of,
        types=types,
    )
    return Columns(found, made, planned.axis_sizes, planned.explicit_axes)


def _kind(leaf: LeafType, planned: Kind, axis_sizes: Mapping[str, int]) -> Kind:
    rule = NO_RULE_NEEDED if planned.rule is None else planned.rule
    return kind_on_mesh(
        leaf._replace(rule=rule, names=planned.names),
        planned.wanted,
        planned.spec,
        axis_sizes,
        counted=planned._counted,
        problem=Problem(planned.status, planned.message, planned.fix),
        losses=planned.losses,
        origin=planned.origin,
        dim_rules=planned.dim_rules,
        lost_rules=planned.lost_rules,
        memory_kind=planned.memory_kind,
    )
