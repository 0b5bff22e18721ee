"""NamedShardings from logical rules, names and a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardrules._base.mistakes import check_arrays
from shardrules._core import resolve_all
from shardrules._place.boxes import unboxed_with_names
from shardrules._place.leaf_errors import LeafError, leaf_errors
from shardrules._place.named_arrays import leaf_paths, names_beside, rows_and_paths
from shardrules._place.shardings import local_sizes, manual_axes, sharding_or_reasons
from shardrules._rules.logical_rules import LogicalRules, resolver_of
from shardrules._rules.names import logical_names

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardrules._place.mesh import AnyMesh


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
