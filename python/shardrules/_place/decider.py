"""Deciders: rules of paths, rules of names, specs and plans, behind one interface.

Every function that takes `rules` asks `as_decider` for a decider and `policy_for` for its keywords.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from typing import Any, ClassVar, Final, TypeAlias

from shardrules._base.arguments import listed, texts
from shardrules._base.correction import Correction, check_correction
from shardrules._base.rule_specs import Fsdp
from shardrules._base.text import brief, shown
from shardrules._place.mesh import AnyMesh, MeshLike, local_view, resolve_mesh
from shardrules._place.name_shardings import shardings_by_names
from shardrules._place.shardings import Placement, Policy, placements_by_rules, shardings_by_rules
from shardrules._place.spec_trees import (
    is_named_sharding,
    is_spec,
    is_spec_of_mesh,
    placements_by_specs,
)
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.matcher import checked_min_size
from shardrules._rules.rules import PathRules, Rules, as_rules, matcher_of, where_rules_are

RulesLike: TypeAlias = "PathRules | LogicalRules | Decider | Any"
"""(pattern, spec) pairs; `Rules`; `LogicalRules`; a `Plan`, whose leaves are found by their paths;
or PartitionSpecs or NamedShardings: one for all leaves, or a tree of them, which may be a prefix of
the tree that they are for."""

_SEQUENCES: Final = (list, tuple)
_PATTERNS: Final = (str, re.Pattern)


class Decider(ABC):
    """Object that decides the placement of each leaf of a tree on a mesh."""

    _name: ClassVar[str]
    """How messages call it."""
    _refused: ClassVar[tuple[str, ...]]
    """The keywords of `policy_for` that mean nothing to it."""

    @abstractmethod
    def _placements(self, tree: Any, mesh: MeshLike | None, policy: Policy) -> list[Any]:
        """Return the Placement of each leaf in JAX's order; None for a leaf that stays unchanged.

        Raises:
            ValueError: There is no mesh, or some leaves get no placement; the message lists them.
            TypeError: The tree is not one of arrays.
        """

    def _shardings(self, tree: Any, mesh: MeshLike | None, policy: Policy) -> Any:
        """Return the tree of NamedShardings, with None for a leaf that stays unchanged."""
        from jax import tree_util

        placements = self._placements(tree, mesh, policy)
        treedef: Any = tree_util.tree_structure(tree)
        return treedef.unflatten(placement and placement.sharding for placement in placements)

    def _meshes(self, mesh: MeshLike | None) -> set[AnyMesh]:
        return {resolve_mesh(mesh)}


class ByPaths(Decider):
    """Rules of paths as a decider."""

    _name = "Rules"
    _refused = ("names",)

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def _placements(self, tree: Any, mesh: MeshLike | None, policy: Policy) -> list[Any]:
        if policy.companions:
            return self._planned(tree, mesh, policy)
        on_mesh, matcher = local_view(resolve_mesh(mesh)), matcher_of(self.rules)
        return placements_by_rules(tree, matcher, on_mesh, policy)

    def _shardings(self, tree: Any, mesh: MeshLike | None, policy: Policy) -> Any:
        if policy.companions:
            return super()._shardings(tree, mesh, policy)
        on_mesh, matcher = local_view(resolve_mesh(mesh)), matcher_of(self.rules)
        return shardings_by_rules(tree, matcher, on_mesh, policy)

    def _planned(self, tree: Any, mesh: MeshLike | None, policy: Policy) -> list[Any]:
        first = policy.companions[0]
        if not type(first).__module__.startswith("shardrules."):
            raise TypeError(f"companions[0] is {type(first).__name__}; give {_COMPANIONS}")
        # Only a plan knows companions; its module imports this one.
        plan = import_module("shardrules._plan.plan").plan
        on_mesh = local_view(resolve_mesh(mesh))
        planned: list[Any] = plan(tree, self.rules, on_mesh, **policy._asdict())._own_placements()
        return planned


class ByNames(Decider):
    """Rules of logical axis names as a decider."""

    _name = "LogicalRules"
    _refused = ("min_size", "companions")

    def __init__(self, rules: LogicalRules) -> None:
        self.rules = rules

    def _placements(self, tree: Any, mesh: MeshLike | None, policy: Policy) -> list[Any]:
        shardings = self._decided(tree, mesh, policy)[1]
        placement_of = {
            id(sharding): Placement(sharding, says_memory=False) for sharding in shardings
        }
        return [placement_of[id(sharding)] for sharding in shardings]

    def _shardings(self, tree: Any, mesh: MeshLike | None, policy: Policy) -> Any:
        return self._decided(tree, mesh, policy)[0]

    def _decided(self, tree: Any, mesh: MeshLike | None, policy: Policy) -> tuple[Any, list[Any]]:
        return shardings_by_names(tree, self.rules, local_view(resolve_mesh(mesh)), policy)


class BySpecs(Decider):
    """Specs or shardings as a decider."""

    _name = "specs"
    _refused = ("min_size", "companions", "names")

    def __init__(self, parameter: str, specs: Any) -> None:
        self.parameter = parameter
        self.specs = specs

    def _placements(self, tree: Any, mesh: MeshLike | None, policy: Policy) -> list[Any]:
        return placements_by_specs(self.parameter, tree, self.specs, mesh, policy)[1]

    def _shardings(self, tree: Any, mesh: MeshLike | None, policy: Policy) -> Any:
        treedef, placements = placements_by_specs(self.parameter, tree, self.specs, mesh, policy)
        return treedef.unflatten(placement and placement.sharding for placement in placements)

    def _meshes(self, mesh: MeshLike | None) -> set[AnyMesh]:
        from jax import tree_util

        specs = tree_util.tree_leaves(self.specs, is_leaf=is_spec)
        meshes = {spec.mesh for spec in specs if is_named_sharding(spec)}
        has_others = any(spec is not None and not is_named_sharding(spec) for spec in specs)
        return meshes | {resolve_mesh(mesh)} if has_others or not meshes else meshes


def as_decider(name: str, rules: RulesLike) -> Decider:
    """Return what decides; `name` is the parameter's, for errors."""
    if isinstance(rules, Rules):
        return ByPaths(rules)
    if isinstance(rules, Decider):
        return rules
    if isinstance(rules, LogicalRules):
        return ByNames(rules)
    if _are_specs(rules):
        return BySpecs(name, rules)
    if isinstance(rules, str | bytes) or not hasattr(rules, "__iter__"):
        raise TypeError(
            f"{name} is {shown(rules)}; it must be (pattern, spec) pairs, Rules, LogicalRules, a "
            "Plan, a PartitionSpec, a NamedSharding, or a tree of these two"
            f"{where_rules_are(rules)}"
        )
    return ByPaths(as_rules(name, rules))


def _are_specs(rules: Any) -> bool:
    """Return whether it is a spec, a sharding, None, or a tree of them, and not pairs."""
    if rules is None or is_spec_of_mesh(rules):
        return True
    if isinstance(rules, _SEQUENCES):
        if not rules or _begins_with_a_pair(rules):
            return False
    elif isinstance(rules, Iterator):
        return False
    if "jax" not in sys.modules:  # then nobody has a spec
        return False
    from jax import tree_util
    from jax.sharding import PartitionSpec, Sharding

    kinds = set(map(type, tree_util.tree_leaves(rules)))
    if any(issubclass(kind, _PATTERNS) for kind in kinds):
        return False
    return not kinds or any(issubclass(kind, (Sharding, PartitionSpec, Fsdp)) for kind in kinds)


def _begins_with_a_pair(rules: Any) -> bool:
    """Return whether the first of a list or tuple is a (pattern, anything) pair."""
    first = rules[0]
    return isinstance(first, _SEQUENCES) and len(first) == 2 and isinstance(first[0], _PATTERNS)


def check_decided(name: str, specs: Any, instead: str) -> None:
    """Check that specs are not rules, which decide first; the error says what to give `instead`."""
    is_pairs = isinstance(specs, _SEQUENCES) and bool(specs) and _begins_with_a_pair(specs)
    if is_pairs or isinstance(specs, Rules | LogicalRules | Decider):
        raise TypeError(f"{name} is {shown(specs)}, and must be decided already: give {instead}")


_COMPANIONS: Final = "Companion records: write shardrules.LORA, or [shardrules.stacked('layers')]"


def policy_for(
    decider: Decider,
    *,
    min_size: int | None = 0,
    correction: Correction | None = None,
    companions: Any = (),
    names: Any = None,
    optional_axes: Any = (),
) -> Policy:
    """Return the keywords, checked."""
    check_correction(correction)
    least = checked_min_size(min_size)
    records = listed("companions", companions, _COMPANIONS) if companions != () else ()
    optional = frozenset(texts("optional_axes", optional_axes)) if optional_axes != () else _NONE
    for name in decider._refused:
        if name == "names" and names is not None:
            raise TypeError(
                f"names: they are for LogicalRules alone, and are {shown(names)}: leave it"
            )
        if name == "companions" and records:
            raise ValueError(
                f"companions are for rules of paths, not for {decider._name}: leave them out"
            )
        if name == "min_size" and min_size:
            raise ValueError(_not_for(name, min_size, decider, "rules of paths"))
        if name == "correction" and correction is not None:
            raise ValueError(_not_for(name, correction, decider, "rules"))
    return Policy(least, correction, records, names, optional)


_NONE: Final[frozenset[str]] = frozenset()


def _not_for(name: str, value: object, decider: Decider, taken_by: str) -> str:
    return f"{name} is {brief(value)}; it is not for {decider._name}, but for {taken_by}: leave it"
