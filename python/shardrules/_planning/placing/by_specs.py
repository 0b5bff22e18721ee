"""Specs and shardings of a tree as rules for its paths, one for leaves that fold together.

So a plan of specs is a plan like any other. Costs a pattern per folded path, such as
`^layers/(0|1|2)/w$`. Must not know what a mesh makes of the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from shardrules._correction import RuleSpec
from shardrules._format import shown
from shardrules._matching.dialects import EFORMER
from shardrules._matching.rules import Rules
from shardrules._planning.fold import fold
from shardrules._planning.path_rules import NO_RULE_NEEDED
from shardrules._planning.placing.derive import grouped
from shardrules._sharding.memory import memory_apart
from shardrules._sharding.rules_like import is_named_sharding, is_spec, is_spec_of_mesh
from shardrules._sharding.spec_trees import spread_specs

if TYPE_CHECKING:
    from shardrules._planning.fold import Folded
    from shardrules._planning.leaves import Leaves
    from shardrules._sharding.mesh import MeshLike

__all__ = ["mesh_of_shardings", "rules_of_specs"]

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
