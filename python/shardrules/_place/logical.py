"""Logical axis names on whole trees: to PartitionSpecs, and to constraints."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

from jax import tree_util
from jax.sharding import PartitionSpec

from shardrules._base.arguments import check_choice, check_type
from shardrules._base.mistakes import Tree
from shardrules._base.rule_specs import Correction
from shardrules._base.specs import is_partition_spec
from shardrules._base.text import mesh_shown, nearest
from shardrules._core import resolve_all
from shardrules._place.boxes import NodeForms
from shardrules._place.constraint import with_sharding_constraint
from shardrules._place.decider import shardings_by_names
from shardrules._place.mesh import AnyMesh, MeshLike, context_mesh, local_view, resolve_mesh
from shardrules._place.spec_trees import broadcast_specs
from shardrules._rules.dialects import LogicalDialect
from shardrules._rules.logical_rules import (
    LogicalRules,
    LogicalRulesLike,
    resolver_in_force,
    rules_in_force,
)
from shardrules._rules.resolver import UNASSIGNED, Resolution, axes_in, is_name, spec_of_names

_AS_FLAX = Correction(indivisible="keep", rank="keep", pad=False)


class RulesFallback(enum.Enum):
    """Action of `with_logical_constraint` if a name gets no mesh axes from any rule.

    Semantics of flax.linen.spmd.RulesFallback, whose members are accepted too.
    """

    AXIS_IS_UNSHARDED = "axis_is_unsharded"
    RAISE_ERROR = "raise_error"
    NO_CONSTRAINT = "no_constraint"


def logical_to_mesh(
    tree: Any, rules: LogicalRulesLike | None = None, *, dialect: LogicalDialect | None = None
) -> Any:
    """Replace the logical axis names of each leaf by a PartitionSpec.

    The rules are tried in order. A rule gives its mesh axes to the dimension of its name, if the
    dimension has none yet and no other dimension of the array uses them. A dimension whose name
    gets no axes is unsharded. Semantics of flax.linen.logical_to_mesh, 0.12. For shardings that
    fit the shapes on a mesh, give `LogicalRules` to `named_shardings`.

    Args:
        tree: Any pytree. A leaf is a PartitionSpec or a tuple of names (each a logical name, None,
            UNCONSTRAINED or a tuple of mesh axes); a box or an nnx Variable with names; or an
            array, which is replicated.
        rules: `LogicalRules`, or (logical name, mesh axes) pairs. Default: the rules of
            `logical_axis_rules`.
        dialect: `LINEN`; or `FLAX_CORE`, where the last rule for a name wins and names without a
            rule stay. Default: that of `LogicalRules`, or else `LINEN`.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: A name occurs twice in one array, or a rule is not a pair.
        TypeError: A leaf is something else, or no leaf has names.

    Example:
        >>> rules = [("batch", "dp"), ("heads", "tp"), ("embed", "tp")]
        >>> tuple(logical_to_mesh(("batch", "heads", "embed"), rules))
        ('dp', 'tp', None)
    """
    resolver = resolver_in_force(rules, dialect)
    forms = NodeForms()
    leaves: list[Any]
    treedef: Any
    leaves, treedef = tree_util.tree_flatten(tree, is_leaf=forms.has_names)
    forms.check_some_have_names(leaves)
    names = list(map(forms.names_of, leaves))
    specs = resolve_all(names, None, {}, lambda names, _: resolver.spec(names))
    return treedef.unflatten(map(forms.with_answer, leaves, specs))


def with_logical_constraint(
    tree: Tree,
    logical_names: Any,
    rules: LogicalRulesLike | None = None,
    mesh: MeshLike | None = None,
    fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
) -> Tree:
    """Constrain the arrays of a tree to the mesh axes of their logical names.

    Works as `with_sharding_constraint` on every type of mesh axis. Without rules or a mesh it
    returns the tree unchanged. Semantics of flax.linen.with_logical_constraint, 0.12.

    Args:
        tree: Any pytree of arrays.
        logical_names: A tuple of names for all leaves, or a tree of such tuples. None leaves arrays
            unconstrained.
        rules: As in `logical_to_mesh`. Pairs are corrected by nothing, as in flax. `LogicalRules`
            fit the arrays to the mesh as in `named_shardings`, by their correction.
        mesh: The mesh. Default: the context's.
        fallback: What happens if a name gets no mesh axes: the dimension is unsharded, an error is
            raised, or the array is left unconstrained.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: As `logical_to_mesh`; the mesh lacks an axis; a name gets no mesh axes and the
            fallback is RAISE_ERROR; or the correction of `LogicalRules` forbids a misfit.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("dp",))
        >>> with_logical_constraint(jax.numpy.ones(2), ("batch",), [("batch", "dp")], mesh).shape
        (2,)
    """
    check_type("rules", rules, Iterable | None, "a tuple of (logical name, mesh axes) pairs")
    action = getattr(fallback, "value", fallback)
    check_choice("fallback", action, tuple(member.value for member in RulesFallback))
    in_force = rules_in_force(rules)
    on_mesh = context_mesh() if mesh is None else resolve_mesh(mesh)
    if not in_force or logical_names is None or on_mesh is None:
        return tree
    resolver = resolver_in_force(in_force)
    has_policy = isinstance(in_force, LogicalRules)

    def spec(names: Any) -> PartitionSpec | None:
        if names is None:
            return None
        resolution = resolver.resolve(names)
        if not has_policy:
            check_mesh_axes(resolution, on_mesh)
        entries = zip(resolution.names, resolution.entries(), strict=True)
        missing = [name for name, entry in entries if entry is UNASSIGNED]
        if missing and action == "raise_error":
            raise ValueError(
                f"Axis names {resolution.names} did not match a rule: {missing} got no mesh axes; "
                "add rules for them\n" + "\n".join(resolution.explained())
            )
        if missing and action == "no_constraint":
            return None
        return spec_of_names(names, resolution.names) if has_policy else resolution.spec(names)

    specs = tree_util.tree_map(spec, logical_names, is_leaf=is_logical_spec)
    if has_policy:
        specs = _fitting(tree, specs, in_force, on_mesh)
    return with_sharding_constraint(tree, specs, on_mesh, correction=_AS_FLAX)


def _fitting(tree: Any, names: Any, rules: LogicalRules, mesh: AnyMesh) -> Any:
    """Return the specs of `named_shardings` for these names; None where there are none."""
    treedef: Any = tree_util.tree_structure(tree)
    of_leaves = broadcast_specs("logical_names", tree, treedef, names)
    given = [PartitionSpec() if each is None else each for each in of_leaves]
    _, shardings = shardings_by_names(tree, rules, local_view(mesh), treedef.unflatten(given))
    specs = [
        None if each is None else sharding.spec
        for each, sharding in zip(of_leaves, shardings, strict=True)
    ]
    return treedef.unflatten(specs)


def check_mesh_axes(resolution: Resolution, mesh: AnyMesh) -> None:
    """Check that the mesh has each axis that the rules give an array; the error names the rules."""
    lines = []
    for dim, (entry, winner) in enumerate(
        zip(resolution.entries(), resolution.winners, strict=True)
    ):
        for axis in axes_in(None if entry is UNASSIGNED else entry):
            if axis in mesh.shape:
                continue
            near = nearest(str(axis), mesh.shape)
            if winner is None:
                lines.append(f"dim {dim}: no rule for {axis!r}, and the mesh has no axis {axis!r}")
                named = [name for name, _ in resolution.rules.rules if isinstance(name, str)]
                near = nearest(str(axis), named) or near
            else:
                rule = resolution.rules.rules[winner]
                lines.append(f"dim {dim}: rule {winner} {rule!r}: the mesh has no axis {axis!r}")
            lines[-1] += f" (did you mean {near!r}?)" if near else ""
    if lines:
        raise ValueError(
            f"an array with the names {resolution.names} cannot be sharded as the logical rules "
            f"say, on the mesh {mesh_shown(mesh.shape)}:\n    " + "\n    ".join(lines)
        )


def is_logical_spec(node: Any) -> bool:
    """Return whether it is for one array: a spec, a tuple of names, or None for no constraint."""
    return (
        node is None
        or is_partition_spec(node)
        or (isinstance(node, tuple) and all(map(is_name, node)))
    )
