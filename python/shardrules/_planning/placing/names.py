"""The leaves of a tree whose arrays have logical axis names, in boxes or beside them.

Costs one walk, a look at each box, and one call into the core that tells kinds apart by names as
well. Must not know about meshes, nor which rules there are for names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardrules._core import resolve_all
from shardrules._logical.beside import by_row, names_beside
from shardrules._logical.leaves import unboxed_with_names
from shardrules._logical.names import checked_names
from shardrules._matching.rules import Rules
from shardrules._planning.path_rules import NO_RULE_NEEDED
from shardrules._planning.placing.survey import survey

if TYPE_CHECKING:
    from shardrules._logical.rules import LogicalRules
    from shardrules._planning.leaves import LeafType, Leaves

__all__ = ["survey_named"]

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
