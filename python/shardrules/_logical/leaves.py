"""The leaves of trees with logical axis names: specs, tuples, boxes, nnx Variables, arrays.

Classifies each type once for a tree. Must not know how the names are used.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from shardrules._format import shown
from shardrules._logical.flax import (
    box_types,
    says_its_sharding,
    variable_sharding,
    variable_types,
)
from shardrules._specs import is_partition_spec, is_unconstrained

if TYPE_CHECKING:
    from shardrules._matching.rules import Rules

__all__ = ["Kinds", "check_rules_are_for_paths", "is_name"]

_PLAIN: Final = re.compile(r"[\w-]+")


class Kinds:
    """Classifies the nodes of one tree, each type once."""

    __slots__ = ("_boxes", "_known", "_variables")

    def __init__(self) -> None:
        self._boxes = box_types()
        self._variables = variable_types()
        self._known: dict[type, str] = {tuple: "tuple"}

    def of(self, node: Any) -> str:
        """One of "spec", "tuple", "box", "variable" or "other"."""
        kind = self._known.get(type(node))
        if kind is None:
            if is_partition_spec(node):
                kind = "spec"
            elif isinstance(node, self._variables):
                kind = "variable"
            else:
                kind = "box" if isinstance(node, self._boxes) else "other"
            self._known[type(node)] = kind
        return kind

    def are_specs(self, leaves: list[Any]) -> bool:
        """Whether all leaves are PartitionSpecs, which need no conversion to names."""
        return all(self._known.get(type_) == "spec" for type_ in set(map(type, leaves)))

    def has_names(self, node: Any) -> bool:
        """Whether a node is a leaf with names."""
        kind = self.of(node)
        if kind == "spec":
            return True
        if kind == "tuple":  # an empty tuple is usually a node of the tree
            return len(node) > 0 and all(map(is_name, node))
        if kind == "variable":
            return says_its_sharding(node)
        return kind == "box" and hasattr(node, "names")

    def names_of(self, leaf: Any) -> Any:
        """The names of a leaf: () for an array, and the leaf itself if it is anything else."""
        kind = self.of(leaf)
        if kind == "variable":
            return variable_sharding(leaf)
        if kind == "box":
            return leaf.names
        # flax replicates the arrays without a box in a tree of boxes.
        return () if kind == "other" and hasattr(leaf, "shape") else leaf

    def check_some_have_names(self, leaves: list[Any]) -> None:
        """Checks that not all leaves are arrays.

        Raises:
            TypeError: They are.
        """
        if leaves and all(self.of(x) == "other" and hasattr(x, "shape") for x in leaves):
            raise TypeError(
                "nothing in the tree has logical axis names; its first leaf is "
                f"{shown(leaves[0])}. Give a tree of names, such as ('embed', 'mlp') for each "
                "array, with the arrays as arrays=...; or boxes or nnx Variables with names, "
                "before they are unboxed"
            )

    def array_in(self, leaf: Any) -> Any:
        """The array that the names of a leaf belong to."""
        kind = self.of(leaf)
        if kind == "variable":
            return leaf.get_value() if hasattr(leaf, "get_value") else leaf.value
        return leaf.value if kind == "box" else leaf


def check_rules_are_for_paths(rules: Rules, tree: Any) -> None:
    """Checks that rules for paths are not logical axis rules for the tree's boxes.

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
            "paths. Use shardrules.logical_to_mesh_sharding(tree, mesh, rules); if they are "
            "patterns of paths, unbox the tree first"
        )


def _names_in_boxes(tree: Any) -> set[Any]:
    from jax import tree_util

    kinds = Kinds()
    leaves = tree_util.tree_leaves(tree, is_leaf=kinds.has_names)
    boxed = [leaf for leaf in leaves if kinds.of(leaf) in ("box", "variable")]
    return {name for leaf in boxed for name in kinds.names_of(leaf) if isinstance(name, str)}


def is_name(entry: Any) -> bool:
    """Whether it is an entry of logical axis names."""
    return entry is None or isinstance(entry, str) or is_unconstrained(entry)
