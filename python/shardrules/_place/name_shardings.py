"""NamedShardings from logical rules, names and a mesh, and the errors of leaves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from shardrules._base.arguments import check_shapes
from shardrules._base.text import nearest
from shardrules._core import resolve_all
from shardrules._place.align import named_arrays
from shardrules._place.leaf_errors import LeafError, leaf_errors
from shardrules._place.shardings import Policy, local_sizes, manual_axes, sharding_or_reasons
from shardrules._rules.logical_rules import LogicalRules, resolver_of
from shardrules._rules.names import logical_names
from shardrules._rules.resolver import UNASSIGNED, Resolution, Resolver, axes_in

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardrules._base.correction import Correction
    from shardrules._place.mesh import AnyMesh


def unknown_axes(resolution: Resolution, mesh_axes: Collection[str]) -> list[str]:
    """Return a line for each mesh axis that an array gets and the mesh does not have."""
    lines = []
    for dim, (entry, winner) in enumerate(
        zip(resolution.entries(), resolution.winners, strict=True)
    ):
        for axis in axes_in(None if entry is UNASSIGNED else entry):
            if axis in mesh_axes:
                continue
            near = nearest(str(axis), mesh_axes)
            if winner is None:
                lines.append(f"dim {dim}: no rule for {axis!r}, and the mesh has no axis {axis!r}")
                near = nearest(str(axis), resolution.rules.names) or near
            else:
                rule = resolution.rules.rules[winner]
                lines.append(f"dim {dim}: rule {winner} {rule!r}: the mesh has no axis {axis!r}")
            lines[-1] += f" (did you mean {near!r}?)" if near else ""
    return lines


class ErrorCollector:
    """Calls `make` for each leaf and collects its errors, so that one error reports all leaves.

    Args:
        make: make(names, shape or None). A ValueError is an error of the leaf, and so is a list, of
            reasons.
        rules: The rules that `make` resolves names by.
        mesh: The mesh that `make` uses.
    """

    def __init__(self, make: Callable[[Any, Any], Any], rules: Resolver, mesh: Any) -> None:
        self._make = make
        self._rules = rules
        self._mesh = mesh
        self._failed: dict[Any, ValueError | list[str]] = {}

    def __call__(self, names: Any, shape: Any) -> Any:
        try:
            result = self._make(names, shape)
        except ValueError as error:
            result = error
        if isinstance(result, ValueError | list):
            self._failed[names, shape] = result
            return None
        return result

    def check(self, leaves: Callable[[], Iterable[tuple[str, Any, Any]]]) -> None:
        """Check that there was no error.

        Args:
            leaves: Returns (path, names, shape or None) of each leaf; called only after an error.

        Raises:
            ValueError: There was one. The message has the number of leaves and lists the first 20.
        """
        if not self._failed:
            return
        wrong = [leaf for leaf in leaves() if leaf[1:] in self._failed]
        rows = [
            LeafError(path, shape, f"names {logical_names(names)}", self._errors_of(names, shape))
            for path, names, shape in wrong
        ]
        message = leaf_errors(rows, self._mesh.shape, said_by="logical rules")
        first = next(iter(self._failed.values()))
        raise ValueError(message) from (first if isinstance(first, ValueError) else None)

    def _errors_of(self, names: Any, shape: Any) -> list[str]:
        error = self._failed[names, shape]
        reasons = error if isinstance(error, list) else str(error).splitlines()
        try:
            resolution = self._rules.resolve(names, shape)
        except ValueError:  # the names themselves are wrong
            return reasons
        if isinstance(error, ValueError):
            # Without a correction the only error is JAX's, about these axes.
            reasons = unknown_axes(resolution, self._mesh.axis_names) or reasons
        return reasons + resolution.explained().splitlines()


def shardings_by_names(
    tree: Any, rules: LogicalRules, mesh: AnyMesh, policy: Policy
) -> tuple[Any, list[NamedSharding]]:
    """Return (the tree of NamedShardings, the sharding of each array in JAX's order)."""
    from jax import tree_util

    named = named_arrays(tree, policy.names)
    arrays: list[Any]
    treedef: Any
    arrays, treedef = tree_util.tree_flatten(named.tree)
    if not arrays:
        check_shapes("tree", tree, None)
    correction = policy.correction or rules.dialect.correction
    sizes = local_sizes(mesh.shape, manual_axes(mesh))
    resolver = resolver_of(rules, sizes, correction, policy.optional_axes)
    make = corrected(resolver, mesh, correction, policy.optional_axes)
    entries = [() if entry is None else entry for entry in named.names]
    shapes = [tuple(getattr(array, "shape", ())) for array in arrays]
    shardings = resolve_all(entries, shapes, {}, make)
    make.check(lambda: zip(named.paths(), entries, shapes, strict=True))
    return named.boxed(treedef.unflatten(shardings)), shardings


def corrected(
    resolver: Resolver,
    mesh: AnyMesh,
    correction: Correction,
    optional_axes: frozenset[str] = frozenset(),
) -> ErrorCollector:
    """Return a function from (names, shape) to the corrected NamedSharding; it collects errors."""

    def make(names: Any, shape: tuple[int, ...]) -> NamedSharding | list[str]:
        spec = resolver.without_ones(resolver.resolve(names, shape).spec(names), mesh.shape)
        return sharding_or_reasons(spec, shape, mesh, correction, optional_axes=optional_axes)

    return ErrorCollector(make, resolver, mesh)
