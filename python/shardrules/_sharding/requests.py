"""What a caller asks for, rules or specs or shardings, as one sharding for each leaf.

Shared by the functions that apply shardings to arrays. Must not know how they are applied.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from shardrules._correction import Correction
from shardrules._matching.dialects import EFORMER
from shardrules._matching.rules import Rules
from shardrules._sharding.mesh import resolve_mesh
from shardrules._sharding.shardings import corrected_sharding, named_shardings
from shardrules._specs import is_partition_spec
from shardrules._words import and_more, shown

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardrules._sharding.mesh import AnyMesh, MeshLike

__all__ = ["requested_shardings"]

_SHOWN: Final = 20


def requested_shardings(
    tree: Any, specs_or_rules: Any, mesh: MeshLike | None, correction: Correction | None
) -> tuple[list[Any], Any, list[NamedSharding | None]]:
    """(leaves, treedef, the sharding of each leaf or None where nothing is asked for).

    Args:
        tree: Any pytree.
        specs_or_rules: `Rules` or (pattern, spec) pairs; or a PartitionSpec, a NamedSharding or
            None for all leaves; or a tree of those, which may be a prefix of `tree`.
        mesh: For rules and PartitionSpecs; the context's unless given.
        correction: Instead of the dialect's.

    Raises:
        ValueError: As `named_shardings`; or the tree of specs does not fit.
        TypeError: Something else is given for a spec.
    """
    from jax import tree_util

    leaves, treedef = tree_util.tree_flatten(tree)
    if _are_rules(specs_or_rules):
        shardings = named_shardings(tree, specs_or_rules, mesh, correction=correction)
        return leaves, treedef, tree_util.tree_leaves(shardings)
    spread = _spread(tree, leaves, specs_or_rules)
    policy = correction or EFORMER.correction
    resolved: AnyMesh | None = None
    shardings_of_leaves: list[NamedSharding | None] = []
    errors: list[str] = []
    for index, (leaf, spec) in enumerate(zip(leaves, spread, strict=True)):
        if spec is None:
            shardings_of_leaves.append(None)
            continue
        if is_partition_spec(spec):
            resolved = resolved or resolve_mesh(mesh)
            wanted, on_mesh = spec, resolved
        elif _is_named_sharding(spec):
            wanted, on_mesh = spec.spec, spec.mesh
        else:
            raise TypeError(
                f"for the leaf {_path(tree, index)} the spec is {shown(spec)}; it must be a "
                "PartitionSpec, a NamedSharding, or None to leave the leaf alone"
            )
        try:
            sharding = corrected_sharding(wanted, _shape(leaf), on_mesh, policy)
        except ValueError as error:
            errors.append(f"the leaf {_path(tree, index)}: {error}")
            continue
        kind = getattr(spec, "memory_kind", None)
        if kind is not None and kind != sharding.memory_kind:
            sharding = sharding.with_memory_kind(kind)
        shardings_of_leaves.append(sharding)
    if errors:
        raise ValueError("\n".join([*errors[:_SHOWN], *and_more(len(errors), _SHOWN, "leaf")]))
    return leaves, treedef, shardings_of_leaves


def _spread(tree: Any, leaves: list[Any], specs: Any) -> list[Any]:
    """What is asked for each leaf, by a tree of specs that may be a prefix of the tree."""
    from jax import tree_util

    if is_partition_spec(specs):  # the common case in a forward pass, and worth ten microseconds
        return [specs] * len(leaves)
    spread: list[Any] = []
    tree_util.tree_map(
        lambda spec, part: spread.extend([spec] * len(tree_util.tree_leaves(part))),
        specs,
        tree,
        is_leaf=lambda x: x is None or is_partition_spec(x),
    )
    return spread


def _are_rules(given: Any) -> bool:
    if isinstance(given, Rules):
        return True
    # A spec has no strings outside its PartitionSpec, so a pair with a pattern is a rule.
    return (
        isinstance(given, (list, tuple))
        and len(given) > 0
        and not is_partition_spec(given)
        and all(isinstance(rule, (tuple, list)) and len(rule) == 2 for rule in given)
        and all(isinstance(rule[0], (str, re.Pattern)) for rule in given)
    )


def _is_named_sharding(spec: Any) -> bool:
    from jax.sharding import NamedSharding

    return isinstance(spec, NamedSharding)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def _path(tree: Any, index: int) -> str:
    from jax import tree_util

    return tree_util.keystr(tree_util.tree_flatten_with_path(tree)[0][index][0]) or "(the tree)"
