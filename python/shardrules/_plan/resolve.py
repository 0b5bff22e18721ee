"""Kinds of leaves on a mesh: by rules, by specs and shardings, or as another plan has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.correction import Correction
from shardrules._base.mesh_sizes import check_bounds, checked_sizes
from shardrules._base.rule_specs import MemoryKind, RuleSpec, memory_kind_of
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
from shardrules._place.spec_on_mesh import SpecOnMesh
from shardrules._place.spec_trees import (
    broadcast_specs,
    is_named_sharding,
    is_spec,
    is_spec_of_mesh,
)
from shardrules._plan.align import PlannedLeaves
from shardrules._plan.fold import Folded, fold, runs_of
from shardrules._plan.following import Derivation, combined, dims_shown, with_companions
from shardrules._plan.kinds import (
    AMBIGUOUS_LEAVES,
    REPLICATED,
    UNMATCHED_LEAVES,
    Kind,
    fitted,
    kind_of,
)
from shardrules._plan.leaves import (
    AMBIGUOUS,
    NO_RULE_NEEDED,
    UNMATCHED,
    LeafType,
    Leaves,
    grouped,
    redecided,
    survey,
)
from shardrules._rules.dialects import EFORMER
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._plan.companions import Companion
    from shardrules._plan.plan import Plan

OnMesh = Callable[["SizedMesh", frozenset[str]], tuple[Leaves, list[Kind]]]
"""A function that puts leaves on a mesh, which may lack the axes of the set."""


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


_WITHOUT_RULE: Final = {
    NO_RULE_NEEDED: REPLICATED,
    UNMATCHED: UNMATCHED_LEAVES,
    AMBIGUOUS: AMBIGUOUS_LEAVES,
}


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
            fit = _WITHOUT_RULE[leaf.rule]
            if fit is UNMATCHED_LEAVES and not self._unmatched_is_error:
                fit = REPLICATED
            return kind_of(leaf, fit, self._axis_sizes)
        by_rule, origin = self._specs[self._spec_of[leaf.rule]], None
        # A leaf without a shape has no dimensions.
        shape = leaf.shape or ()
        if derivation is not None:
            by_rule, origin = _derived_spec(by_rule, shape, derivation)
        if isinstance(by_rule, SpecByShape):
            by_rule, origin_of_shape = by_rule.for_array(shape, leaf.bits)
            origin = "; ".join(filter(None, (origin, origin_of_shape))) or None
        fit = fitted(by_rule, shape, origin=origin, memory_kind=self._memory_of[leaf.rule])
        return kind_of(leaf, fit, self._axis_sizes)


def _derived_spec(
    of_base: SpecOnMesh | SpecByShape, shape: tuple[int, ...], derivation: Derivation
) -> tuple[SpecOnMesh | SpecByShape, str]:
    """Return (the spec of leaves that follow a base with this spec, its origin)."""
    dims, blocks = combined(derivation.steps, len(of_base.spec))
    cut = tuple(None if size == 1 else dim for size, dim in zip(shape, dims, strict=False))
    return (
        of_base.with_dims((*cut, *dims[len(shape) :]), blocks),
        f"the rule of what it follows, dims {dims_shown(dims[: len(shape)])} of its spec",
    )


def by_rules(
    leaves: Leaves,
    rules: Rules,
    derivations: Iterable[Derivation | None],
    mesh: SizedMesh,
    may_lack: frozenset[str],
) -> tuple[Leaves, list[Kind]]:
    """Put leaves on the mesh; see `OnMesh`."""
    on_mesh = RulesOnMesh(rules, mesh, may_lack)
    return leaves, list(map(on_mesh.kind, leaves.types, derivations))


def plan_by_rules(tree: Any, rules: Rules, companions: tuple[Companion, ...]) -> OnMesh:
    """Plan a tree by rules of paths; see `shardrules.plan`."""
    leaves, derivations = with_companions(survey(tree, rules), rules, companions)
    return partial(by_rules, leaves, rules, derivations)


def plan_by_specs(leaves: Leaves, specs: Any, correction: Correction | None = None) -> OnMesh:
    """Plan leaves by specs or shardings, one for all or a tree of them."""
    rules = rules_of_specs(leaves, specs, correction)
    decided = redecided(leaves, rules)
    decided = replace(decided, by_specs=True, is_corrected=correction is not None)
    return partial(by_rules, decided, rules, [None] * len(decided.types))


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


def by_plan(planned: Plan, tree: PlannedLeaves) -> tuple[Leaves, list[Kind]]:
    """Put the leaves of a tree on the mesh of a plan, as its leaves of the same paths."""
    leaves, rows = tree
    pairs, kinds_of = grouped(
        zip(leaves.kind_of.tolist(), planned.kind_of[rows].tolist(), strict=True)
    )
    types, kinds = [], []
    for number, decided in pairs:
        leaf, kind = leaves.types[number], planned.kinds[decided]
        types.append(planned._leaves.types[decided]._replace(dtype=leaf.dtype, bits=leaf.bits))
        rule = NO_RULE_NEEDED if kind.rule is None else kind.rule
        followed = leaf._replace(rule=rule, names=kind.names)
        kinds.append(kind_of(followed, kind, planned.axis_sizes))
    sources = [planned.sources[row] for row in rows]
    leaves = replace(leaves, rules=planned.rules, sources=sources, kind_of=kinds_of, types=types)
    return leaves, kinds
