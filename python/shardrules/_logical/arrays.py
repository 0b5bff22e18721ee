"""The arrays of a tree with the logical axis names of each, which are in boxes or beside the tree.

Costs a flattening of the tree; and a walk for its paths, where names stand beside it. Must not know
what the names are for.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from shardrules._logical.beside import names_beside
from shardrules._logical.leaves import Unboxed, unboxed_with_names
from shardrules._matching.rules import Rules, matcher_of

__all__ = ["NamedArrays", "leaf_paths", "named_arrays", "rows_and_paths"]

_NO_RULES: Final = Rules(())


class NamedArrays(NamedTuple):
    """The arrays of a tree, and the names of each."""

    tree: Any
    """The tree without boxes."""
    names: list[Any]
    """Of each array in the order of JAX's leaves its names, which can be hashed; None without."""
    boxes: Unboxed | None
    """The boxes that the names were in; None if the names were beside the tree."""

    def boxed(self, answers: Any) -> Any:
        """The tree of answers as users expect it; see `Unboxed.boxed`."""
        return answers if self.boxes is None else self.boxes.boxed(answers)

    def paths(self) -> list[str]:
        """The paths of the arrays, in the order of JAX's leaves."""
        return leaf_paths(self.tree)


def named_arrays(tree: Any, names: Any = None) -> NamedArrays:
    """The arrays of a tree, and their names.

    Args:
        tree: A tree of arrays, boxes, nnx Variables or haliax arrays.
        names: As in `plan`.

    Raises:
        TypeError: Nothing has names.
        ValueError: As `names_beside`.
    """
    from jax import tree_util

    if names is None:
        boxes = unboxed_with_names(tree)
        return NamedArrays(boxes.tree, _hashable(boxes.names_of_arrays()), boxes)
    of_rows, paths = rows_and_paths(tree)
    named = names_beside(of_rows, paths, names)
    ordered = [named[row] for row in tree_util.tree_leaves(of_rows)]
    return NamedArrays(tree, _hashable(ordered), None)


def _hashable(names: list[Any]) -> list[Any]:
    return [tuple(one) if isinstance(one, list) else one for one in names]


def leaf_paths(tree: Any) -> list[str]:
    """The paths of a tree's leaves, in the order of JAX's leaves."""
    from jax import tree_util

    of_rows, paths = rows_and_paths(tree)
    return [paths[row] for row in tree_util.tree_leaves(of_rows)]


def rows_and_paths(tree: Any, rules: Rules = _NO_RULES) -> tuple[Any, list[str]]:
    """(the tree with the number of its row for each leaf, the path of each row).

    Args:
        tree: Any pytree.
        rules: Their dialect spells the paths.
    """
    of_rows, paths, *_ = matcher_of(rules).survey(
        tree, min_size=0, replicated=0, unmatched=0, ambiguous=0
    )
    return of_rows, paths
