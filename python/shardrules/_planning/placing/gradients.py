"""The gradients of a plan's parameters: the same paths and specs, of another dtype maybe.

Costs a kind per kind, and a look-up per leaf. Must not know how a parameter's spec was decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardrules._dtypes import bits_of
from shardrules._format import mesh_shown
from shardrules._planning.columns import Columns
from shardrules._planning.kinds import axes_named
from shardrules._planning.leaves import Leaves
from shardrules._planning.placing.on_mesh import Problem, kind_on_mesh
from shardrules._specs import tags_of, tags_shown, with_tags

if TYPE_CHECKING:
    from shardrules._planning.kinds import Kind, Spec
    from shardrules._planning.leaves import LeafType

__all__ = ["gradients_of", "leaves_with_gradients"]


def leaves_with_gradients(params: Leaves, dtype: Any) -> Leaves:
    """The leaves that have gradients, with None in the tree for the others.

    Args:
        params: The leaves of any tree with parameters.
        dtype: That of the gradients; None for the parameters' own.

    Raises:
        ValueError: No leaf has a gradient.
    """
    rows = params.gradient_rows
    if params.paths and not len(rows):
        raise ValueError(
            "no leaf has a gradient: there are integers, booleans, states of an optimizer or "
            "activations alone; plan the parameters"
        )
    kinds, kind_of = np.unique(params.kind_of[rows], return_inverse=True)
    types = [params.types[kind] for kind in kinds.tolist()]
    if dtype is not None:
        types = [one._replace(dtype=dtype, bits=bits_of(dtype)) for one in types]
    return replace(
        params,
        tree=_without_others(params, rows.tolist()),
        paths=[params.paths[row] for row in rows],
        sources=[params.sources[row] for row in rows],
        kind_of=kind_of.astype(np.int32),
        types=types,
        companions=(),
        links={},
    )


def _without_others(params: Leaves, rows: list[int]) -> Any:
    """The tree with the new number of each of these rows."""
    if len(rows) == len(params.paths):
        return params.tree
    from jax import tree_util

    number_of = {row: number for number, row in enumerate(rows)}
    return tree_util.tree_map(number_of.get, params.tree)


def gradients_of(params: Columns, leaves: Leaves, unreduced: tuple[str, ...]) -> Columns:
    """The sharding of the gradients on the mesh of their parameters.

    Args:
        params: The parameters.
        leaves: Those of `leaves_with_gradients`.
        unreduced: As in `Plan.for_gradients`.

    Raises:
        ValueError: The mesh lacks one of these axes, or it is not Explicit; or JAX has no unreduced
            axes.
    """
    for axis in unreduced:
        if axis not in params.axis_sizes:
            raise ValueError(f"unreduced: the mesh {params.axis_sizes} has no axis {axis!r}")
        if axis not in params.explicit_axes:
            raise ValueError(
                f"unreduced: {axis!r} is not Explicit in the mesh {mesh_shown(params.axis_sizes)}, "
                "and JAX leaves no other axis unreduced; make the mesh with AxisType.Explicit"
            )
    numbers = np.unique(params.kind_of[params.leaves.gradient_rows]).tolist()
    kinds = [
        _kind(leaf, params.kinds[number], params.axis_sizes, unreduced)
        for number, leaf in zip(numbers, leaves.types, strict=True)
    ]
    return Columns(leaves, kinds, params.axis_sizes, params.explicit_axes)


def _kind(
    leaf: LeafType, parameter: Kind, axis_sizes: Mapping[str, int], unreduced: tuple[str, ...]
) -> Kind:
    spec = parameter.spec
    origin = parameter.origin
    if spec is not None:
        spec = _spec(spec, unreduced)
        tags = ", ".join(tags_shown(spec))
        origin = "; ".join(filter(None, (origin, tags and f"a gradient, {tags}"))) or None
    return kind_on_mesh(
        leaf,
        parameter.wanted,
        spec,
        axis_sizes,
        problem=Problem(parameter.status, parameter.message, parameter.fix),
        losses=parameter.losses,
        origin=origin,
        dim_rules=parameter.dim_rules,
        lost_rules=parameter.lost_rules,
    )


def _spec(spec: Spec, unreduced: tuple[str, ...]) -> Spec:
    """The gradient's spec: of what is reduced it is unreduced, and the other way about, as in JAX.

    An axis that cuts the parameter cuts the gradient, which is reduced over it.
    """
    tags = tags_of(spec)
    terms, sums = tags.get("unreduced", []), tags.get("reduced", [])
    left = {*sums, *unreduced} - axes_named(spec) - set(terms)
    swapped = {"unreduced": sorted(left), "reduced": terms}
    return with_tags(spec, {name: axes for name, axes in swapped.items() if axes})
