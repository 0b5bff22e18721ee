"""The sharding of each leaf, from rules, specs or shardings: `named_shardings` and its relatives.

Shared by the functions that apply shardings to arrays. Must not know how they are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from shardrules._arguments import check_tree
from shardrules._correction import Correction, check_correction
from shardrules._format import and_more, brief, shown
from shardrules._logical.rules import LogicalRules
from shardrules._matching.dialects import EFORMER
from shardrules._matching.environment import checked_min_size
from shardrules._matching.rules import Rules, matcher_of
from shardrules._plan_like import PlanLike
from shardrules._printable import printable
from shardrules._shape_specs import Fsdp
from shardrules._sharding.memory import memory_keeper
from shardrules._sharding.mesh import has_own_devices, local_view, resolve_mesh
from shardrules._sharding.name_shardings import shardings_by_names
from shardrules._sharding.planned import checked_companions, planned_placements
from shardrules._sharding.rules_like import (
    RulesLike,
    as_decider,
    check_taken,
    is_named_sharding,
    is_spec,
    is_spec_of_mesh,
)
from shardrules._sharding.shardings import (
    Placement,
    corrected_sharding,
    mesh_for,
    placements_by_rules,
    shardings_by_rules,
)
from shardrules._specs import is_partition_spec

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardrules._sharding.mesh import AnyMesh, MeshLike

__all__ = [
    "asks_for_own_devices",
    "named_shardings",
    "requested_shardings",
    "spread_specs",
]

_SHOWN: Final = 20


def named_shardings(
    tree: Any,
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    min_size: int | None = 0,
    correction: Correction | None = None,
    companions: Iterable[Any] = (),
    names: Any = None,
) -> Any:
    """Replace each leaf of a tree by the NamedSharding that its rule gives it on the mesh.

    The result equals `eformer.escale.get_corrected_named_sharding` of the specs of
    `match_partition_rules`, leaf by leaf, but takes one call. Equal shardings are one object.

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

    Returns:
        A tree of the same structure, with None for a spec that is None. With a dict of axis sizes
        the shardings have an AbstractMesh. A box with names becomes the sharding of its array.

    Raises:
        ValueError: There is no mesh; no rule matches a leaf; a leaf cannot be sharded as its rule
            says, because it uses an axis twice or the correction makes it an error; or a tree of
            specs does not fit the tree. All leaves are checked first; the message has their number
            and lists the first 20.
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
    decider = as_decider("rules", rules)
    check_taken(
        decider, min_size=min_size, companions=followers, names=names, correction=correction
    )
    if isinstance(decider, LogicalRules):
        on_mesh = resolve_mesh(mesh)
        return shardings_by_names(tree, decider, on_mesh, names=names, correction=correction)[0]
    if isinstance(decider, PlanLike):
        placed = decider._placements(tree, mesh)
        treedef: Any = tree_util.tree_structure(tree)
        return treedef.unflatten(one.sharding for one in placed)
    if decider is None:
        _, treedef, found = _placements_by_specs("rules", tree, rules, mesh, correction)
        return treedef.unflatten(one and one.sharding for one in found)
    on_mesh = resolve_mesh(mesh)
    if followers:
        planned = planned_placements(
            tree, followers, decider, on_mesh, min_size=smallest, correction=correction
        )
        return tree_util.tree_map(lambda one: one.sharding, planned)
    matcher = matcher_of(decider)
    on_mesh = mesh_for(tree, matcher, on_mesh, min_size=smallest, correction=correction)
    return shardings_by_rules(tree, matcher, on_mesh, min_size=smallest, correction=correction)


def requested_shardings(
    tree: Any,
    specs_or_rules: RulesLike,
    mesh: MeshLike | None,
    correction: Correction | None,
    *,
    companions: Iterable[Any] = (),
    names: Any = None,
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
        companions: As in `named_shardings`.
        names: As in `named_shardings`.
        called: What the caller's parameter for specs or rules is called, for errors.

    Raises:
        ValueError: As `named_shardings`.
        TypeError: A spec is something else, or `tree` is not a pytree of arrays.
    """
    from jax import tree_util

    check_tree("tree", tree)
    check_correction(correction)
    followers = checked_companions(companions)
    decider = as_decider(called, specs_or_rules)
    check_taken(decider, companions=followers, names=names, correction=correction)
    placements: Sequence[Placement | None]
    if decider is None:
        leaves, treedef, placements = _placements_by_specs(
            called, tree, specs_or_rules, mesh, correction
        )
        return leaves, treedef, _in_own_memory(leaves, placements)
    leaves, treedef = tree_util.tree_flatten(tree)
    if isinstance(decider, LogicalRules):
        on_mesh = local_view(resolve_mesh(mesh))
        _, found = shardings_by_names(tree, decider, on_mesh, names=names, correction=correction)
        return leaves, treedef, list(map(memory_keeper(), leaves, found))
    if isinstance(decider, PlanLike):
        placements = decider._placements(tree, mesh)
    else:
        on_mesh = local_view(resolve_mesh(mesh))
        placements = _placements(tree, decider, on_mesh, correction, followers)
    return leaves, treedef, _in_own_memory(leaves, placements)


def _in_own_memory(
    leaves: list[Any], placements: Sequence[Placement | None]
) -> list[NamedSharding | None]:
    """The shardings; where nothing is said about memory, that of the leaf."""
    keep = memory_keeper()

    def own(leaf: Any, one: Placement | None) -> NamedSharding | None:
        if one is None:
            return None
        return one.sharding if one.says_memory else keep(leaf, one.sharding)

    return list(map(own, leaves, placements))


def _placements(
    tree: Any,
    rules: Rules,
    mesh: AnyMesh,
    correction: Correction | None,
    companions: tuple[Any, ...],
) -> list[Placement]:
    from jax import tree_util

    if companions:
        planned = planned_placements(tree, companions, rules, mesh, correction=correction)
        return tree_util.tree_leaves(planned)
    matcher = matcher_of(rules)
    factored = mesh_for(tree, matcher, mesh, correction=correction)
    return placements_by_rules(tree, matcher, factored, correction)


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


def _placements_by_specs(
    name: str, tree: Any, specs: Any, mesh: MeshLike | None, correction: Correction | None
) -> tuple[list[Any], Any, list[Placement | None]]:
    """(leaves, treedef, placements); `name` is that of the parameter `specs` in messages."""
    from jax import tree_util

    leaves, treedef = tree_util.tree_flatten(tree)
    spread = spread_specs(name, tree, treedef, specs)
    bound = _bound_specs(name, tree, spread, mesh)
    policy = correction or EFORMER.correction
    by_dtype = any(isinstance(wanted, Fsdp) for wanted, _ in bound.values())
    dtypes = [getattr(leaf, "dtype", None) if by_dtype else None for leaf in leaves]
    # By the id of the spec, which the list keeps alive: the leaves of a kind have one in common.
    kinds = list(zip(map(id, spread), map(_shape, leaves), dtypes, strict=True))
    of_kind = {
        kind: None if spec is None else _of_kind(spec, kind, bound, policy)
        for kind, spec in dict(zip(kinds, spread, strict=True)).items()
    }
    wrong = {kind: error for kind, error in of_kind.items() if isinstance(error, ValueError)}
    if wrong:
        places = [index for index, kind in enumerate(kinds) if kind in wrong]
        lines = [
            f"{printable(f'the leaf {_path(tree, index)}')}: {wrong[kinds[index]]}"
            for index in places[:_SHOWN]
        ]
        raise ValueError("\n".join([*lines, *and_more(len(places), _SHOWN, "leaf")]))
    placements: Any = list(map(of_kind.__getitem__, kinds))
    return leaves, treedef, placements


def _of_kind(
    spec: Any,
    kind: tuple[int, tuple[int, ...], Any],
    bound: dict[int, tuple[Any, AnyMesh]],
    policy: Correction,
) -> Placement | ValueError:
    """What leaves of one spec, shape and dtype get, or what is wrong."""
    number, shape, dtype = kind
    wanted, on_mesh = bound[number]
    try:
        sharding = corrected_sharding(wanted, shape, on_mesh, policy, dtype)
        if wanted is spec:
            return Placement(sharding, says_memory=False)
        return Placement(_in_memory_of(spec, sharding), says_memory=True)
    except ValueError as error:
        return error


def _bound_specs(
    name: str, tree: Any, spread: list[Any], mesh: MeshLike | None
) -> dict[int, tuple[Any, AnyMesh]]:
    """(its spec, its mesh), by the id of each distinct spec or sharding."""
    resolved: AnyMesh | None = None
    bound: dict[int, tuple[Any, AnyMesh]] = {}
    for spec in {id(one): one for one in spread if one is not None}.values():
        if is_spec_of_mesh(spec):
            resolved = resolved or local_view(resolve_mesh(mesh))
            bound[id(spec)] = spec, resolved
        elif is_named_sharding(spec):
            bound[id(spec)] = spec.spec, local_view(spec.mesh)
        else:
            index = next(index for index, one in enumerate(spread) if one is spec)
            raise TypeError(
                f"{name}: for the leaf {_path(tree, index)} the spec is {shown(spec)}; it must be "
                "a PartitionSpec, a NamedSharding, or None to leave the leaf alone"
            )
    return bound


def _in_memory_of(given: NamedSharding, sharding: NamedSharding) -> NamedSharding:
    kind = given.memory_kind
    if kind is not None and kind != sharding.memory_kind:
        sharding = sharding.with_memory_kind(kind)
    return given if given == sharding else sharding  # JAX's caches know that one already


def spread_specs(name: str, tree: Any, treedef: Any, specs: Any) -> list[Any]:
    """The spec of each leaf, from a tree of specs that may be a prefix of the tree."""
    from jax import tree_util

    if is_partition_spec(specs):  # common in a forward pass; saves ten microseconds
        return [specs] * treedef.num_leaves
    if (alike := _leaves_alike(specs, treedef)) is not None:
        return alike
    try:
        given, structure = tree_util.tree_flatten(specs, is_leaf=is_spec)
        node: Any = structure  # JAX's types do not know its methods
        parts = node.flatten_up_to(tree)
    except (TypeError, ValueError) as error:
        place = _misfit(specs, tree, "") or str(error).splitlines()[0][:200]
        raise ValueError(
            f"{name}: the tree of specs does not fit the tree: {place}; give one of the same "
            "structure, or one that ends earlier; rules are (pattern, spec) pairs"
        ) from None
    if tree_util.all_leaves(parts):
        return given
    pairs = zip(given, parts, strict=True)
    return [spec for spec, part in pairs for _ in tree_util.tree_leaves(part)]


def _leaves_alike(specs: Any, treedef: Any) -> list[Any] | None:
    """The specs, if they are in a tree of the same structure; that takes no call for each."""
    from jax import tree_util

    with suppress(TypeError, ValueError):  # of what cannot be flattened or compared
        given, structure = tree_util.tree_flatten(specs)
        if structure == treedef:
            return given
    return None


def _misfit(specs: Any, tree: Any, path: str) -> str | None:
    """The first place where a tree of specs is not a prefix of the tree."""
    here, there = _children(specs, is_spec), _children(tree, lambda node: node is None)
    if here is None:
        return None
    at = f"at {path}" if path else "at the root"
    if there is None:
        return f"{at} the specs go on, where the tree has {shown(tree)}"
    if here.keys() != there.keys():
        more, missing = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
        return f"{at} the specs alone have {brief(more)}, and the tree alone {brief(missing)}"
    if type(specs) is not type(tree):
        return f"{at} the specs have a {type(specs).__name__}, and the tree a {type(tree).__name__}"
    deeper = (_misfit(spec, there[key], path + key) for key, spec in here.items())
    return next(filter(None, deeper), None)


def _children(node: Any, is_leaf: Callable[[Any], bool]) -> dict[str, Any] | None:
    """The children of a node by `keystr` of their keys; None for a leaf."""
    from jax import tree_util

    if is_leaf(node) or tree_util.all_leaves([node]):
        return None
    flat = tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
    return {tree_util.keystr(path): child for path, child in flat}


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def _path(tree: Any, index: int) -> str:
    from jax import tree_util

    return tree_util.keystr(tree_util.tree_flatten_with_path(tree)[0][index][0]) or "(the tree)"
