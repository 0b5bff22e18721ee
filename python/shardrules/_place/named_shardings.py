"""`spec_for`: the spec of one array, without a tree.

Costs what a tree of one leaf costs. Must not know how a spec is made to fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardrules._arguments import check_shapes, check_tree, check_type, in_order, shape_of, texts
from shardrules._correction import Correction, check_correction
from shardrules._dtypes import given_bits
from shardrules._mesh.memory import memory_keeper
from shardrules._mesh.mesh import context_mesh, has_own_devices, local_view, resolve_mesh
from shardrules._place.decider import (
    RulesLike,
    as_decider,
    check_taken,
    checked_companions,
    is_named_sharding,
    is_spec,
    planned_placements,
)
from shardrules._place.name_shardings import shardings_by_names
from shardrules._place.shardings import (
    Placement,
    mesh_for,
    placements_by_rules,
    shardings_by_rules,
)
from shardrules._place.spec_trees import placements_by_specs
from shardrules._plan_like import PlanLike
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.matcher import checked_min_size
from shardrules._rules.rules import Rules, matcher_of, specs_by_rules

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, PartitionSpec

    from shardrules._mesh.mesh import AnyMesh, MeshLike


@in_order("tree", "rules", "mesh")
def named_shardings(
    tree: Any,
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    min_size: int | None = 0,
    correction: Correction | None = None,
    companions: Iterable[Any] = (),
    names: Any = None,
    optional_axes: Iterable[str] = (),
) -> Any:
    """Replace each leaf of a tree by the NamedSharding that its rule gives it on the mesh.

    The result equals `eformer.escale.get_corrected_named_sharding` of the specs of
    `match_partition_rules`, leaf by leaf, but takes one call; and an axis that the mesh lacks is an
    error. Equal shardings are one object.

    Inside shard_map, shapes are the local shapes, and manual axes are left out. A dimension that
    only they cut is UNCONSTRAINED, if the mesh has axes of type Auto left.

    Args:
        tree: Any pytree. Only `.shape` of its leaves is read. A leaf without a shape is replicated.
        rules: `Rules` or (pattern, spec) pairs; `LogicalRules`; a `Plan`, whose leaves are found by
            their paths; or specs or shardings, as in `shard`.
        mesh: A Mesh, an AbstractMesh, or a dict of axis sizes. Default: the context's mesh.
        min_size: As in `match_partition_rules`. For rules of paths alone.
        correction: The policies for specs that do not fit. A `RuleSpec` may have its own. Default:
            the dialect's for rules, eformer's for specs.
        companions: As in `plan`, whose shardings these are then. For rules of paths alone.
        names: For `LogicalRules`, as in `plan`.
        optional_axes: As in `plan`.

    Returns:
        A tree of the same structure, with None for a spec that is None. With a dict of axis sizes
        the shardings have an AbstractMesh. A box with names becomes the sharding of its array.

    Raises:
        ValueError: There is no mesh; no rule matches a leaf; a leaf cannot be sharded as its rule
            says, because the mesh lacks an axis, it uses an axis twice, or the correction makes it
            an error; or a tree of specs does not fit the tree. All leaves are checked first; the
            message has their number and lists the first 20.
        TypeError: The spec of a rule cannot become a PartitionSpec, or `tree` is not a pytree of
            arrays.

    Example:
        >>> import jax
        >>> from jax.sharding import PartitionSpec as P
        >>> params = {"wq": jax.ShapeDtypeStruct((512, 30), "bfloat16")}
        >>> shardings = named_shardings(params, [("wq", ("fsdp", "tp"))], {"fsdp": 8, "tp": 4})
        >>> shardings["wq"].spec == P("fsdp", None)
        True
    """
    from jax import tree_util

    check_tree("tree", tree)
    check_correction(correction)
    smallest = checked_min_size(min_size)
    followers = checked_companions(companions)
    optional = frozenset(texts("optional_axes", optional_axes))
    policy: Any = {"correction": correction, "optional_axes": optional}
    decider = as_decider("rules", rules)
    check_taken(
        decider, min_size=min_size, companions=followers, names=names, correction=correction
    )
    if isinstance(decider, LogicalRules):
        on_mesh = resolve_mesh(mesh)
        return shardings_by_names(tree, decider, on_mesh, names=names, **policy)[0]
    if isinstance(decider, PlanLike):
        placed = decider._placements(tree, mesh)
        treedef: Any = tree_util.tree_structure(tree)
        return treedef.unflatten(one.sharding for one in placed)
    if decider is None:
        _, treedef, found = placements_by_specs("rules", tree, rules, mesh, **policy)
        return treedef.unflatten(one and one.sharding for one in found)
    on_mesh = resolve_mesh(mesh)
    if followers:
        planned = planned_placements(tree, followers, decider, on_mesh, min_size=smallest, **policy)
        return tree_util.tree_map(lambda one: one.sharding, planned)
    matcher = matcher_of(decider)
    on_mesh = mesh_for(tree, matcher, on_mesh, min_size=smallest, **policy)
    return shardings_by_rules(tree, matcher, on_mesh, min_size=smallest, **policy)


def requested_shardings(
    tree: Any,
    specs_or_rules: RulesLike,
    mesh: MeshLike | None,
    correction: Correction | None,
    *,
    min_size: int | None = 0,
    companions: Iterable[Any] = (),
    names: Any = None,
    optional_axes: Iterable[str] = (),
    called: str = "specs_or_rules",
) -> tuple[list[Any], Any, list[NamedSharding | None]]:
    """(leaves, treedef, the sharding of each leaf, or None for a leaf that stays unchanged).

    An array stays in its memory kind, unless a NamedSharding or a rule has one.

    Args:
        tree: Any pytree.
        specs_or_rules: `Rules` or (pattern, spec) pairs; `LogicalRules`; a `Plan`; a PartitionSpec,
            a NamedSharding or None for all leaves; or a tree of these, which may be a prefix of
            `tree`.
        mesh: The mesh for rules and PartitionSpecs. Default: the context's.
        correction: The policies for specs that do not fit. Default: the dialect's.
        min_size: As in `named_shardings`.
        companions: As in `named_shardings`.
        names: As in `named_shardings`.
        optional_axes: As in `named_shardings`.
        called: What the caller's parameter for specs or rules is called, for errors.

    Raises:
        ValueError: As `named_shardings`.
        TypeError: A spec is something else, or `tree` is not a pytree of arrays.
    """
    from jax import tree_util

    check_tree("tree", tree)
    check_correction(correction)
    smallest = checked_min_size(min_size)
    followers = checked_companions(companions)
    optional = frozenset(texts("optional_axes", optional_axes))
    policy: Any = {"correction": correction, "optional_axes": optional}
    decider = as_decider(called, specs_or_rules)
    check_taken(
        decider, min_size=min_size, companions=followers, names=names, correction=correction
    )
    placements: Sequence[Placement | None]
    if decider is None:
        leaves, treedef, placements = placements_by_specs(
            called, tree, specs_or_rules, mesh, **policy
        )
        return leaves, treedef, _in_own_memory(leaves, placements)
    leaves, treedef = tree_util.tree_flatten(tree)
    if not leaves:
        check_shapes("tree", tree, None)
    if isinstance(decider, LogicalRules):
        on_mesh = local_view(resolve_mesh(mesh))
        _, found = shardings_by_names(tree, decider, on_mesh, names=names, **policy)
        return leaves, treedef, list(map(memory_keeper(), leaves, found))
    if isinstance(decider, PlanLike):
        placements = decider._placements(tree, mesh)
    else:
        on_mesh = local_view(resolve_mesh(mesh))
        placements = _placements(tree, decider, on_mesh, followers, min_size=smallest, **policy)
    return leaves, treedef, _in_own_memory(leaves, placements)


def _in_own_memory(
    leaves: list[Any], placements: Sequence[Placement | None]
) -> list[NamedSharding | None]:
    """The shardings; where nothing is said about memory, that of the leaf."""
    keep = memory_keeper()
    return [
        None if one is None else one.sharding if one.says_memory else keep(leaf, one.sharding)
        for leaf, one in zip(leaves, placements, strict=True)
    ]


def _placements(
    tree: Any,
    rules: Rules,
    mesh: AnyMesh,
    companions: tuple[Any, ...],
    **policy: Any,
) -> list[Placement]:
    from jax import tree_util

    if companions:
        planned = planned_placements(tree, companions, rules, mesh, **policy)
        return tree_util.tree_leaves(planned)
    matcher = matcher_of(rules)
    factored = mesh_for(tree, matcher, mesh, **policy)
    return placements_by_rules(tree, matcher, factored, **policy)


def asks_for_own_devices(specs_or_rules: Any, mesh: MeshLike | None) -> bool:
    """Whether this process has all devices of each mesh that `requested_shardings` would use.

    False also if the arguments are invalid.
    """
    from jax import tree_util

    if isinstance(specs_or_rules, PlanLike):
        specs_or_rules, mesh = [], specs_or_rules.mesh if mesh is None else mesh
    try:
        specs = tree_util.tree_leaves(specs_or_rules, is_leaf=is_spec)
        meshes = {spec.mesh for spec in specs if is_named_sharding(spec)}
        if not meshes or not all(spec is None or is_named_sharding(spec) for spec in specs):
            meshes.add(resolve_mesh(mesh))
    except Exception:
        return False
    return all(map(has_own_devices, meshes))


@in_order("path", "shape", "rules", "mesh")
def spec_for(
    path: str,
    shape: Sequence[int],
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    min_size: int | None = 0,
    correction: Correction | None = None,
    dtype: Any = None,
    optional_axes: Iterable[str] = (),
) -> PartitionSpec:
    """The PartitionSpec of one array.

    It is the spec of `named_shardings`. Without a mesh, neither given nor in the context, it is the
    spec of `match_partition_rules`.

    Args:
        path: The array's path.
        shape: The array's shape.
        rules: As in `named_shardings`; specs and shardings are the array's own. `LogicalRules` are
            for `logical_to_mesh`.
        mesh: As in `named_shardings`.
        min_size: As in `match_partition_rules`.
        correction: As in `named_shardings`.
        dtype: The array's dtype, or its name; only specs that go by bytes need it, as `fsdp`.
        optional_axes: As in `named_shardings`.

    Raises:
        ValueError, TypeError: As `named_shardings`.

    Example:
        >>> mesh = {"fsdp": 8, "tp": 4}
        >>> tuple(spec_for("layers/0/wk", (512, 30), [("wk", ("fsdp", "tp"))], mesh))
        ('fsdp', None)
    """
    check_correction(correction)
    if dtype is not None:
        given_bits("dtype", dtype)
    policy: Any = {
        "correction": correction,
        "optional_axes": frozenset(texts("optional_axes", optional_axes)),
    }
    array = SimpleNamespace(shape=shape_of("shape", shape), dtype=dtype)
    decider = as_decider("rules", rules)
    if isinstance(decider, LogicalRules):
        raise TypeError(
            "rules: LogicalRules decide by the names of dimensions, which one path does not have; "
            "give shardrules.logical_to_mesh(names, rules)"
        )
    if not isinstance(decider, Rules):
        check_type("path", path, str, "a string")
        if decider is not None and dtype is None:
            array.dtype = "uint8"  # a plan decides by path and shape, whatever the dtype
        found = named_shardings({path: array}, rules, mesh, min_size=min_size, **policy)
        return found[path].spec  # type: ignore[no-any-return]
    matcher = matcher_of(decider).for_whole_paths()
    key = matcher.joined(path)
    tree = {key: array}
    if mesh is None and context_mesh() is None:
        return specs_by_rules(matcher, tree, min_size)[key]  # type: ignore[no-any-return]
    on_mesh = resolve_mesh(mesh)
    shardings = shardings_by_rules(tree, matcher, on_mesh, min_size=min_size, **policy)
    return shardings[key].spec  # type: ignore[no-any-return]
