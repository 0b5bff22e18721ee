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

__all__ = ["NodeForms", "check_rules_are_for_paths", "is_name"]

_PLAIN: Final = re.compile(r"[\w-]+")


class NodeForms:
    """Classifies the nodes of one tree, each type once."""

    __slots__ = ("_boxes", "_known", "_variables")

    def __init__(self) -> None:
        self._boxes = box_types()
        self._variables = variable_types()
        self._known: dict[type, str] = {tuple: "tuple"}

    def of(self, node: Any) -> str:
        """One of "spec", "tuple", "box", "variable" or "other"."""
        form = self._known.get(type(node))
        if form is None:
            if is_partition_spec(node):
                form = "spec"
            elif isinstance(node, self._variables):
                form = "variable"
            else:
                form = "box" if isinstance(node, self._boxes) else "other"
            self._known[type(node)] = form
        return form

    def are_specs(self, leaves: list[Any]) -> bool:
        """Whether all leaves are PartitionSpecs, which need no conversion to names."""
        return all(self._known.get(type_) == "spec" for type_ in set(map(type, leaves)))

    def has_names(self, node: Any) -> bool:
        """Whether a node is a leaf with names."""
        form = self.of(node)
        if form == "spec":
            return True
        if form == "tuple":  # an empty tuple is usually a node of the tree
            return len(node) > 0 and all(map(is_name, node))
        if form == "variable":
            return says_its_sharding(node)
        return form == "box" and hasattr(node, "names")

    def names_of(self, leaf: Any) -> Any:
        """The names of a leaf: () for an array, and the leaf itself if it is anything else."""
        form = self.of(leaf)
        if form == "variable":
            return variable_sharding(leaf)
        if form == "box":
            return leaf.names
        # flax replicates the arrays without a box in a tree of boxes.
        return () if form == "other" and hasattr(leaf, "shape") else leaf

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
        form = self.of(leaf)
        if form == "variable":
            return leaf.get_value() if hasattr(leaf, "get_value") else leaf.value
        return leaf.value if form == "box" else leaf


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

    forms = NodeForms()
    leaves = tree_util.tree_leaves(tree, is_leaf=forms.has_names)
    boxed = [leaf for leaf in leaves if forms.of(leaf) in ("box", "variable")]
    return {name for leaf in boxed for name in forms.names_of(leaf) if isinstance(name, str)}


def is_name(entry: Any) -> bool:
    """Whether it is an entry of logical axis names."""
    return entry is None or isinstance(entry, str) or is_unconstrained(entry)
