"""`named_shardings` and `spec_for`: the shardings of a tree, and the spec of one array."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from shardrules._base.arguments import check_type, checked_shape
from shardrules._base.dtypes import as_bits
from shardrules._base.mistakes import check_arrays, in_order
from shardrules._base.rule_specs import Correction
from shardrules._place.decider import (
    ByNames,
    ByPaths,
    BySpecs,
    Decider,
    RulesLike,
    as_decider,
)
from shardrules._place.mesh import (
    MeshLike,
    context_mesh,
    in_memory,
    local_view,
    memory_apart,
    processes_of,
    resolve_mesh,
)
from shardrules._place.shardings import shardings_by_rules
from shardrules._place.transfers import array_types
from shardrules._rules.rules import matcher_of, specs_by_rules


@in_order("tree", "rules", "mesh")
def named_shardings(
    tree: Any,
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    correction: Correction | None = None,
    names: Any = None,
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
        correction: For specs: the policies for those that do not fit. Default: `Correction()`.
            Rules have their own.
        names: For `LogicalRules`, as in `plan`.

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
    return as_decider("rules", rules, correction, names)._shardings(tree, mesh).tree()


def requested_shardings(
    tree: Any,
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    correction: Correction | None = None,
    names: Any = None,
) -> tuple[list[Any], Any, list[NamedSharding | None]]:
    """Return (leaves, treedef, the sharding of each leaf or None if it stays unchanged).

    An array stays in its memory kind, unless a NamedSharding or a rule has one.

    Raises:
        ValueError: As `named_shardings`.
        TypeError: A spec is something else, or `tree` is not a pytree of arrays.
    """
    from jax import tree_util

    decider = as_decider("rules", rules, correction, names)
    leaves, treedef = tree_util.tree_flatten(tree)
    if not leaves:
        check_arrays("tree", tree)
    decided = decider._shardings(tree, mesh).leaves()
    shardings = [sharding for sharding, _ in decided]
    have_memory = array_types(leaves)
    for index, (leaf, (sharding, says_memory)) in enumerate(zip(leaves, decided, strict=True)):
        if type(leaf) not in have_memory or sharding is None or says_memory:
            continue
        if kind := memory_apart(leaf.sharding):
            shardings[index] = in_memory(sharding, kind)
    return leaves, treedef, shardings


def only_process(rules: Any, mesh: MeshLike | None) -> int | None:
    """Return the process that has all devices of each mesh that the rules would use.

    None if there are several, or the arguments are invalid.
    """
    # Of rules that are not a decider yet only shardings have meshes.
    decider = rules if isinstance(rules, Decider) else BySpecs("rules", rules)
    try:
        (process,) = frozenset().union(*map(processes_of, decider._meshes(mesh)))
    except Exception:
        return None
    return process


@in_order("path", "shape", "rules", "mesh")
def spec_for(
    path: str,
    shape: Sequence[int],
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    dtype: Any = None,
) -> PartitionSpec:
    """Return the PartitionSpec of one array.

    It is the spec of `named_shardings`. Without a mesh, neither given nor in the context, it is the
    spec of `match_partition_rules`.

    Args:
        path: The array's path.
        shape: The array's shape.
        rules: As in `named_shardings`; specs and shardings are the array's own. `LogicalRules` are
            for `logical_to_mesh`.
        mesh: As in `named_shardings`.
        dtype: The array's dtype, or its name; only specs that go by bytes need it, as `fsdp`.

    Raises:
        ValueError, TypeError: As `named_shardings`.

    Example:
        >>> mesh = {"fsdp": 8, "tp": 4}
        >>> tuple(spec_for("layers/0/wk", (512, 30), [("wk", ("fsdp", "tp"))], mesh))
        ('fsdp', None)
    """
    if dtype is not None:
        as_bits("dtype", dtype)
    array = SimpleNamespace(shape=checked_shape("shape", shape), dtype=dtype)
    decider = as_decider("rules", rules)
    if isinstance(decider, ByNames):
        raise TypeError(
            "rules: LogicalRules decide by the names of dimensions, which one path does not have; "
            "give shardrules.logical_to_mesh(names, rules)"
        )
    check_type("path", path, str, "a string")
    if isinstance(decider, ByPaths):
        matcher = matcher_of(decider.rules).for_whole_paths()
        tree = {path: array}
        if mesh is None and context_mesh() is None:
            return specs_by_rules(matcher, tree, 0)[path]  # type: ignore[no-any-return]
        on_mesh = local_view(resolve_mesh(mesh))
        return shardings_by_rules(tree, matcher, on_mesh).tree()[path].spec  # type: ignore[no-any-return]
    if dtype is None and not isinstance(decider, BySpecs):
        array.dtype = "uint8"  # a plan decides by path and shape, whatever the dtype
    sharding = decider._shardings({path: array}, mesh).tree()[path]
    if sharding is None:
        raise TypeError("rules are None, which leaves arrays as they are; give rules, or a spec")
    return sharding.spec  # type: ignore[no-any-return]
