"""Deciders: rules of paths, rules of names, specs and plans, behind one interface.

Every function that takes `rules` asks `as_decider` for one. What it does with logical axis names is
here too.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from shardrules._base.mistakes import check_arrays
from shardrules._base.rule_specs import Correction, Fsdp, check_correction
from shardrules._base.text import shown
from shardrules._core import resolve_all
from shardrules._place.boxes import unboxed_with_names
from shardrules._place.mesh import AnyMesh, MeshLike, local_view, resolve_mesh
from shardrules._place.shardings import (
    LeafError,
    Shardings,
    leaf_errors,
    local_sizes,
    manual_axes,
    sharding_or_reasons,
    shardings_by_rules,
)
from shardrules._place.spec_trees import (
    is_named_sharding,
    is_spec,
    is_spec_of_mesh,
    leaf_paths,
    names_beside,
    rows_and_paths,
    shardings_by_specs,
)
from shardrules._rules.dialects import EFORMER
from shardrules._rules.logical_rules import LogicalRules, resolver_of
from shardrules._rules.resolver import logical_names
from shardrules._rules.rules import PathRules, Rules, as_rules, matcher_of, where_rules_are

if TYPE_CHECKING:
    from jax.sharding import NamedSharding


RulesLike: TypeAlias = "PathRules | LogicalRules | Decider | Any"
"""(pattern, spec) pairs; `Rules`; `LogicalRules`; a `Plan`, whose leaves are found by their paths;
or PartitionSpecs or NamedShardings: one for all leaves, or a tree of them, which may be a prefix of
the tree that they are for."""

_SEQUENCES: Final = (list, tuple)
_PATTERNS: Final = (str, re.Pattern)


class Decider(ABC):
    """Object that decides the sharding of each leaf of a tree on a mesh."""

    @abstractmethod
    def _shardings(self, tree: Any, mesh: MeshLike | None) -> Shardings:
        """Return the shardings of the leaves.

        Raises:
            ValueError: There is no mesh, or some leaves get no sharding; the message lists them.
            TypeError: The tree is not one of arrays.
        """

    def _meshes(self, mesh: MeshLike | None) -> set[AnyMesh]:
        return {resolve_mesh(mesh)}


class ByPaths(Decider):
    """Rules of paths as a decider."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def _shardings(self, tree: Any, mesh: MeshLike | None) -> Shardings:
        return shardings_by_rules(tree, matcher_of(self.rules), local_view(resolve_mesh(mesh)))


class ByNames(Decider):
    """Rules of logical axis names as a decider, with the names of the arrays if they are given."""

    def __init__(self, rules: LogicalRules, names: Any) -> None:
        self.rules = rules
        self.names = names

    def _shardings(self, tree: Any, mesh: MeshLike | None) -> Shardings:
        on_mesh = local_view(resolve_mesh(mesh))
        decided, shardings = shardings_by_names(tree, self.rules, on_mesh, self.names)
        return Shardings(lambda: decided, lambda: [(sharding, False) for sharding in shardings])


class BySpecs(Decider):
    """Specs or shardings as a decider, with the policies for those that do not fit."""

    def __init__(self, parameter: str, specs: Any, correction: Correction | None = None) -> None:
        self.parameter = parameter
        self.specs = specs
        self.correction = correction or EFORMER.correction

    def _shardings(self, tree: Any, mesh: MeshLike | None) -> Shardings:
        return shardings_by_specs(self.parameter, tree, self.specs, mesh, self.correction)

    def _meshes(self, mesh: MeshLike | None) -> set[AnyMesh]:
        from jax import tree_util

        specs = tree_util.tree_leaves(self.specs, is_leaf=is_spec)
        meshes = {spec.mesh for spec in specs if is_named_sharding(spec)}
        has_others = any(spec is not None and not is_named_sharding(spec) for spec in specs)
        return meshes | {resolve_mesh(mesh)} if has_others or not meshes else meshes


def as_decider(
    name: str, rules: RulesLike, correction: Correction | None = None, names: Any = None
) -> Decider:
    """Return what decides, with the policies of specs, or the names for `LogicalRules`.

    Args:
        name: The parameter's name, for errors.
        rules: The rules, specs or plan.
        correction: For specs and trees of specs alone.
        names: For `LogicalRules` alone.
    """
    decider: Decider
    if isinstance(rules, Rules):
        decider = ByPaths(rules)
    elif isinstance(rules, Decider):
        decider = rules
    elif isinstance(rules, LogicalRules):
        decider = ByNames(rules, names)
    elif _are_specs(rules):
        decider = BySpecs(name, rules, correction)
    elif isinstance(rules, str | bytes) or not hasattr(rules, "__iter__"):
        raise TypeError(
            f"{name} is {shown(rules)}; it must be (pattern, spec) pairs, Rules, LogicalRules, a "
            "Plan, a PartitionSpec, a NamedSharding, or a tree of these two"
            f"{where_rules_are(rules)}"
        )
    else:
        decider = ByPaths(as_rules(name, rules))
    if correction is not None:
        check_correction(correction)
        if not isinstance(decider, BySpecs):
            raise ValueError(
                f"correction is {correction!r}, and {name} are no specs; rules have their own: "
                f"give {_with_correction(rules)}"
            )
    if names is not None and not isinstance(decider, ByNames):
        raise TypeError(f"names: they are for LogicalRules alone, and are {shown(names)}: leave it")
    return decider


def _with_correction(rules: RulesLike) -> str:
    if isinstance(rules, Decider):
        return "a plan of Rules(pairs, correction=...)"
    kind = "LogicalRules" if isinstance(rules, LogicalRules) else "Rules"
    return f"{kind}(pairs, correction=...)"


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


def shardings_by_names(
    tree: Any, rules: LogicalRules, mesh: AnyMesh, names: Any
) -> tuple[Any, list[NamedSharding]]:
    """Return (the tree of NamedShardings, the sharding of each array in JAX's order)."""
    from jax import tree_util

    boxes = unboxed_with_names(tree) if names is None else None
    if boxes is None:
        opened, (of_rows, paths) = tree, rows_and_paths(tree)
        by_rows = names_beside(of_rows, paths, names)
        named = [by_rows[row] for row in tree_util.tree_leaves(of_rows)]
    else:
        opened, named = boxes.tree, boxes.names_of_arrays()
    arrays: list[Any]
    treedef: Any
    arrays, treedef = tree_util.tree_flatten(opened)
    if not arrays:
        check_arrays("tree", tree)
    resolver = resolver_of(rules, local_sizes(mesh.shape, manual_axes(mesh)))
    optional_axes = frozenset(rules.optional_axes)
    failed: dict[Any, list[str]] = {}
    objects: dict[NamedSharding, NamedSharding] = {}

    def sharding(names: Any, shape: tuple[int, ...]) -> NamedSharding | None:
        try:
            resolution = resolver.resolve(names, shape)
        except ValueError as error:  # a name stands twice
            failed[names, shape] = [str(error)]
            return None
        spec = resolver.without_ones(resolution.spec(names), mesh.shape)
        result = sharding_or_reasons(
            spec, shape, mesh, rules.correction, optional_axes=optional_axes
        )
        if isinstance(result, list):
            failed[names, shape] = result + resolution.explained()
            return None
        return objects.setdefault(result, result)

    # Something that can be hashed.
    entries = [
        () if item is None else tuple(item) if isinstance(item, list) else item for item in named
    ]
    shapes = [tuple(getattr(array, "shape", ())) for array in arrays]
    shardings = resolve_all(entries, shapes, {}, sharding)
    if failed:
        leaves = zip(leaf_paths(opened), entries, shapes, strict=True)
        rows = [
            LeafError(path, shape, f"names {logical_names(names)}", failed[names, shape])
            for path, names, shape in leaves
            if (names, shape) in failed
        ]
        raise ValueError(leaf_errors(rows, mesh.shape, said_by="logical rules"))
    answers = treedef.unflatten(shardings)
    return answers if boxes is None else boxes.boxed(answers), shardings
