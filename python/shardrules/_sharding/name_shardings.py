"""From logical rules, names and a mesh to NamedShardings, one object per distinct one.

One call into the core for all leaves. Must not know how the shardings are applied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardrules._arguments import check_shapes
from shardrules._core import resolve_all
from shardrules._logical.arrays import named_arrays
from shardrules._logical.rules import resolver_of
from shardrules._sharding.name_errors import ErrorCollector
from shardrules._sharding.shardings import local_sizes, manual_axes, sharding_or_reasons

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardrules._correction import Correction
    from shardrules._logical.resolver import Resolver
    from shardrules._logical.rules import LogicalRules
    from shardrules._sharding.mesh import AnyMesh

__all__ = ["corrected", "shardings_by_names"]


def shardings_by_names(
    tree: Any,
    rules: LogicalRules,
    mesh: AnyMesh,
    *,
    names: Any = None,
    correction: Correction | None = None,
    optional_axes: frozenset[str] = frozenset(),
) -> tuple[Any, list[NamedSharding]]:
    """(the tree of NamedShardings, the sharding of each array in the order of JAX's leaves).

    Args:
        tree: A tree of arrays, boxes, nnx Variables or haliax arrays. A box becomes its sharding.
        rules: What decides the names.
        mesh: The mesh.
        names: As in `plan`.
        correction: Default: the dialect's.
        optional_axes: As in `plan`.

    Raises:
        ValueError: As `logical_to_mesh_sharding`, and as `plan` for names.
        TypeError: Nothing has names, or an array has no shape.
    """
    from jax import tree_util

    named = named_arrays(tree, names)
    arrays: list[Any]
    treedef: Any
    arrays, treedef = tree_util.tree_flatten(named.tree)
    if not arrays:
        check_shapes("tree", tree, None)
    policy = correction or rules.dialect.correction
    sizes = local_sizes(mesh.shape, manual_axes(mesh))
    resolver = resolver_of(rules, sizes, policy, optional_axes)
    make = corrected(resolver, mesh, policy, optional_axes)
    given = [() if one is None else one for one in named.names]
    shapes = [tuple(getattr(array, "shape", ())) for array in arrays]
    shardings = resolve_all(given, shapes, {}, make)
    make.check(lambda: zip(named.paths(), given, shapes, strict=True))
    return named.boxed(treedef.unflatten(shardings)), shardings


def corrected(
    resolver: Resolver,
    mesh: AnyMesh,
    correction: Correction,
    optional_axes: frozenset[str] = frozenset(),
) -> ErrorCollector:
    """A function from (names, shape) to the corrected NamedSharding, which collects errors."""

    def make(names: Any, shape: tuple[int, ...]) -> NamedSharding | list[str]:
        spec = resolver.without_ones(resolver.resolve(names, shape).spec(names), mesh.shape)
        return sharding_or_reasons(spec, shape, mesh, correction, optional_axes=optional_axes)

    return ErrorCollector(make, resolver, mesh)
