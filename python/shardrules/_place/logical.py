"""Logical axis names on whole trees: to PartitionSpecs, to NamedShardings, to constraints."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

from jax import tree_util
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._base.arguments import (
    Tree,
    check_choice,
    check_tree,
    check_type,
    checked_shape,
    in_order,
)
from shardrules._base.correction import Correction, check_correction
from shardrules._base.specs import is_partition_spec, partition_spec
from shardrules._base.text import mesh_shown, shown
from shardrules._core import resolve_all
from shardrules._place.boxes import NodeForms
from shardrules._place.constraint import with_sharding_constraint
from shardrules._place.mesh import AnyMesh, MeshLike, context_mesh, resolve_mesh
from shardrules._place.name_shardings import ErrorCollector, corrected, unknown_axes
from shardrules._place.shardings import local_sizes, manual_axes
from shardrules._rules.dialects import LINEN, LogicalDialect
from shardrules._rules.logical_rules import LogicalRules, LogicalRulesLike, get_logical_axis_rules
from shardrules._rules.names import is_name
from shardrules._rules.resolver import UNASSIGNED, Resolution, Resolver, resolver_for

_AS_FLAX = Correction(absent="keep", indivisible="keep", rank="keep", pad=False)


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
    gets no axes is unsharded. Semantics of flax.linen.logical_to_mesh, 0.12.

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
        TypeError: A leaf is something else.

    Example:
        >>> rules = [("batch", "dp"), ("heads", "tp"), ("embed", "tp")]
        >>> tuple(logical_to_mesh(("batch", "heads", "embed"), rules))
        ('dp', 'tp', None)
    """
    resolver = compiled(rules, None, dialect)
    return resolved(tree, None, lambda names, _: resolver.spec(names))


@in_order("tree", "mesh", "rules")
def logical_to_mesh_sharding(
    tree: Any,
    mesh: MeshLike | None = None,
    rules: LogicalRulesLike | None = None,
    *,
    arrays: Any = None,
    correction: Correction | None = None,
    dialect: LogicalDialect | None = None,
) -> Any:
    """Replace the logical axis names of each leaf by a NamedSharding.

    Semantics of flax.linen.logical_to_mesh_sharding, 0.12. A `correction` also takes shapes into
    account. If the mesh axes of a rule do not divide the dimension, `indivisible` decides which
    axes the rule keeps: none with "drop", the axes that fit with "prefix" and "drop_axis", all with
    "keep" and "error"; `absent` decides so about axes that the mesh lacks. A rule that keeps none
    loses the dimension to the next rule for the name, if the dialect tries it. The correction then
    applies to the resulting spec.

    Args:
        tree: As in `logical_to_mesh`.
        mesh: A Mesh, an AbstractMesh, or a dict of axis sizes. Default: the context's mesh.
        rules: As in `logical_to_mesh`.
        arrays: Only with a correction: a tree of the same structure whose leaves have shapes.
            Default: the values in the boxes of `tree`.
        correction: The policies for specs that do not fit. Default: none, as in flax, so JAX
            refuses such specs.
        dialect: As in `logical_to_mesh`.

    Returns:
        A tree of the same structure. Equal shardings are one object.

    Raises:
        ValueError: As `logical_to_mesh`; there is no mesh; the mesh does not have an axis; or the
            correction makes a misfit an error. All leaves are checked first; the message lists the
            first 20, each with its rules.
        TypeError: As `logical_to_mesh`; or, with a correction, an array without a shape.

    Example:
        >>> mesh = {"fsdp": 4, "tp": 2}
        >>> rules = [("heads", "fsdp"), ("heads", "tp"), ("embed", "fsdp")]
        >>> tuple(logical_to_mesh_sharding(("heads", "embed"), mesh, rules).spec)
        ('fsdp', None)
        >>> import numpy as np
        >>> tuple(logical_to_mesh_sharding(("heads", "embed"), mesh, rules,
        ...     arrays=np.ones((6, 8)), correction=Correction()).spec)  # 6 heads, fsdp=4
        ('tp', 'fsdp')
    """
    check_correction(correction)
    on_mesh = resolve_mesh(mesh)
    if correction is None:
        make = sharding_maker(compiled(rules, on_mesh, dialect), on_mesh)
        return resolved(tree, None, make)
    pairs, in_force = _in_force(rules, dialect)
    resolver = resolver_for(
        pairs, in_force, local_sizes(on_mesh.shape, manual_axes(on_mesh)), correction
    )
    return resolved(tree, _shapes(tree, arrays), corrected(resolver, on_mesh, correction))


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
        rules: As in `logical_to_mesh`.
        mesh: The mesh. Default: the context's.
        fallback: What happens if a name gets no mesh axes: the dimension is unsharded, an error is
            raised, or the array is left unconstrained.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: As `logical_to_mesh`; or a name gets no mesh axes and the fallback is
            RAISE_ERROR.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("dp",))
        >>> with_logical_constraint(jax.numpy.ones(2), ("batch",), [("batch", "dp")], mesh).shape
        (2,)
    """
    check_tree("tree", tree)
    check_type("rules", rules, Iterable | None, "a tuple of (logical name, mesh axes) pairs")
    choices = tuple(member.value for member in RulesFallback)
    check_choice("fallback", getattr(fallback, "value", fallback), choices)
    in_force = get_logical_axis_rules() if rules is None else rules
    on_mesh = context_mesh() if mesh is None else resolve_mesh(mesh)
    if not in_force or logical_names is None or on_mesh is None:
        return tree
    resolver = compiled(in_force, None)

    def spec(names: Any) -> PartitionSpec | None:
        resolution = resolver.resolve(names)
        if unknown := unknown_axes(resolution, on_mesh.axis_names):
            raise ValueError(
                f"an array with the names {names} cannot be constrained as the logical rules say, "
                f"on the mesh {mesh_shown(on_mesh.shape)}:\n    " + "\n    ".join(unknown)
            )
        return constraint_spec(resolution, fallback)

    specs = _map_names(spec, logical_names)
    return with_sharding_constraint(tree, specs, on_mesh, correction=_AS_FLAX)


def explain_logical(
    names: Any,
    rules: LogicalRulesLike | None = None,
    mesh: MeshLike | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    dialect: LogicalDialect | None = None,
) -> str:
    """Explain the spec of one array with logical names.

    Args:
        names: The logical names of the array.
        rules: As in `logical_to_mesh`.
        mesh: The mesh, for the sizes of its axes. Only with a shape. Default: the context's.
        shape: The shape of the array, if rules that do not divide it shall lose.
        dialect: As in `logical_to_mesh`.

    Returns:
        A line for each dimension with its mesh axes and its rule, followed by a line for each rule
        that lost the dimension, and why; and a line for each axis that the mesh does not have.

    Example:
        >>> rules = [("batch", "fsdp"), ("embed", "fsdp"), ("embed", "tp")]
        >>> print(explain_logical(("batch", "embed"), rules))
        dim 0 'batch' -> 'fsdp'  (rule 0)
        dim 1 'embed' -> 'tp'  (rule 2)
            rule 1 ('embed', 'fsdp') lost: a mesh axis of it is used by dim 0 'batch'
    """
    sizes = None if shape is None else checked_shape("shape", shape)
    on_mesh = None if sizes is None and mesh is None else resolve_mesh(mesh)
    pairs, in_force = _in_force(rules, dialect)
    axis_sizes = {} if on_mesh is None else dict(on_mesh.shape)
    correction = None if sizes is None else in_force.correction
    resolution = resolver_for(pairs, in_force, axis_sizes, correction).resolve(names, sizes)
    lacking = [] if on_mesh is None else unknown_axes(resolution, axis_sizes)
    return "\n".join([resolution.explained(), *lacking])


def compiled(
    rules: LogicalRulesLike | None, mesh: AnyMesh | None, dialect: LogicalDialect | None = None
) -> Resolver:
    """Return the rules, by default those in force, compiled for the axis sizes of the mesh."""
    pairs, in_force = _in_force(rules, dialect)
    return resolver_for(pairs, in_force, {} if mesh is None else dict(mesh.shape))


def _in_force(
    rules: LogicalRulesLike | None, dialect: LogicalDialect | None
) -> tuple[Any, LogicalDialect]:
    """Return the rules, by default those of the context, as pairs; and their dialect."""
    check_type("dialect", dialect, LogicalDialect | None, "a LogicalDialect, such as FLAX_CORE")
    in_force: Any = get_logical_axis_rules() if rules is None else rules
    if isinstance(in_force, LogicalRules):
        return tuple(in_force), dialect or in_force.dialect
    return in_force, dialect or LINEN


def resolved(
    tree: Any,
    shapes: list[Any] | None,
    make: Callable[[Any, Any], Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Return the tree with make(names, shape or None) for each leaf.

    Args:
        tree: A tree of names, boxes, Variables or arrays.
        shapes: The shape of each leaf, if `make` needs it.
        make: Called once for equal names and shapes. An `ErrorCollector` reports all errors.
        is_leaf: Tells the leaves, which are names then. Default: whatever has names.
    """
    forms = NodeForms()
    find = is_leaf or forms.has_names
    leaves, treedef = tree_util.tree_flatten(tree, is_leaf=find)
    if is_leaf is not None or forms.are_specs(leaves):
        names = leaves
    else:
        forms.check_some_have_names(leaves)
        names = list(map(forms.names_of, leaves))
    answers = resolve_all(names, shapes, {}, make)
    if isinstance(make, ErrorCollector):
        make.check(
            lambda: zip(_array_paths(tree, find), names, shapes or repeat(None), strict=False)
        )
    if names is not leaves:
        answers = [
            # As in flax.nnx.get_partition_spec, a Variable holds the result.
            leaf.replace(answer) if forms.of(leaf) == "variable" else answer
            for leaf, answer in zip(leaves, answers, strict=True)
        ]
    return tree_util.tree_unflatten(treedef, answers)


def _array_paths(tree: Any, is_leaf: Callable[[Any], bool]) -> list[str]:
    leaves = tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return [tree_util.keystr(path) for path, _ in leaves]


def _shapes(tree: Any, arrays: Any) -> list[Any]:
    forms = NodeForms()
    leaves = tree_util.tree_leaves(tree, is_leaf=forms.has_names)
    arrays_of_leaves: list[Any] = []
    if arrays is None:
        arrays_of_leaves += map(forms.array_in, leaves)
    else:
        tree_util.tree_map(
            lambda _, array: arrays_of_leaves.append(array), tree, arrays, is_leaf=forms.has_names
        )
    for leaf, array in zip(leaves, arrays_of_leaves, strict=True):
        if not hasattr(array, "shape"):
            raise TypeError(
                f"a correction needs shapes, and the array with the names {shown(leaf)} is "
                f"{shown(array)}; give arrays=..., a tree of arrays like that of the names"
            )
    return [tuple(array.shape) for array in arrays_of_leaves]


def sharding_maker(resolver: Resolver, mesh: AnyMesh) -> ErrorCollector:
    """Return a function from (names, shape) to the NamedSharding, which collects errors."""
    return ErrorCollector(
        lambda names, _: _named_sharding(resolver.spec(names), mesh), resolver, mesh
    )


@functools.lru_cache(maxsize=4096)
def _named_sharding(spec: PartitionSpec, mesh: AnyMesh) -> NamedSharding:
    return NamedSharding(mesh, spec)


def constraint_spec(resolution: Resolution, fallback: Any) -> PartitionSpec | None:
    """Return the spec of a constraint; None for no constraint. See `with_logical_constraint`."""
    entries = resolution.entries()
    if UNASSIGNED in entries and fallback.value != RulesFallback.AXIS_IS_UNSHARDED.value:
        if fallback.value == RulesFallback.NO_CONSTRAINT.value:
            return None
        missing = [
            n for n, entry in zip(resolution.names, entries, strict=True) if entry is UNASSIGNED
        ]
        raise ValueError(
            f"Axis names {resolution.names} did not match a rule: {missing} got no mesh axes; add "
            f"rules for them\n{resolution.explained()}"
        )
    return partition_spec(*(None if entry is UNASSIGNED else entry for entry in entries))


def _map_names(function: Any, names: Any) -> Any:
    return tree_util.tree_map(
        lambda leaf: None if leaf is None else function(leaf), names, is_leaf=is_logical_spec
    )


def is_logical_spec(node: Any) -> bool:
    """Return whether it is for one array: a spec, a tuple of names, or None for no constraint."""
    return (
        node is None
        or is_partition_spec(node)
        or (isinstance(node, tuple) and all(map(is_name, node)))
    )
