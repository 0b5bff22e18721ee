"""`with_sharding_constraint`: rules or specs applied to arrays, inside and outside jit.

Chooses the JAX operation for each type of mesh axis. Must not know how a sharding was decided.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from shardrules._arguments import Tree
from shardrules._correction import Correction
from shardrules._sharding.leaf_shardings import requested_shardings
from shardrules._sharding.memory import moved_inside_jit
from shardrules._sharding.mesh import axes_of_type, current_view, has_devices
from shardrules._sharding.placement import agreed_shardings, put
from shardrules._sharding.shardings import manual_axes
from shardrules._specs import (
    entries_of,
    entry_axes,
    entry_of,
    is_unconstrained,
    with_entries,
    without_axes,
)

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardrules._sharding.mesh import AnyMesh, MeshLike
    from shardrules._sharding.rules_like import RulesLike

__all__ = ["is_tracing", "with_sharding_constraint"]


def with_sharding_constraint(
    tree: Tree,
    specs_or_rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    correction: Correction | None = None,
    names: Any = None,
) -> Tree:
    """Constrain the arrays of a tree to shardings that fit their shapes and the mesh.

    Semantics of `jax.lax.with_sharding_constraint`, with the correction of
    `eformer.escale.with_sharding_constraint`.

    Inside jit, axes of type Auto become a sharding constraint, and Explicit axes a
    `jax.sharding.reshard`. Manual axes (inside shard_map) are left out; a dimension that only they
    cut is unconstrained. Outside jit, one batched call places all arrays, also numpy arrays. It
    returns copies, as JAX does, so donating a result leaves the input alone. Several processes
    agree first, as in `shard`.

    With rules and specs an array stays in its memory kind. A NamedSharding has its own memory kind.
    Inside jit, the devices' default kind leaves the array in its kind, as in JAX, and "pinned_host"
    moves the array there.

    Args:
        tree: Any pytree. Leaves without a shape, such as Python numbers, stay unchanged.
        specs_or_rules: `Rules` or (pattern, spec) pairs; `LogicalRules`; a `Plan`, whose leaves are
            found by their paths; a PartitionSpec or NamedSharding for all leaves; or a tree of
            these, which may be a prefix of `tree`. None leaves a leaf unchanged.
        mesh: The mesh for rules and PartitionSpecs. Default: the context's; a Plan's own.
        correction: The policies for specs that do not fit. Default: the dialect's for rules,
            eformer's for specs.
        names: For `LogicalRules`, as in `plan`.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: As `named_shardings`, before any array is changed; or JAX does not have the
            memory kind inside jit.
        TypeError: A spec is something else.
        RuntimeError: Outside jit, as `shard`.

    Example:
        >>> import jax
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> mesh = Mesh(jax.devices()[:1], ("dp",))
        >>> step = jax.jit(lambda x: with_sharding_constraint(2 * x, P("dp", "tp"), mesh))
        >>> step(jax.numpy.ones((4, 4))).sharding.mesh.axis_names
        ('dp',)
    """
    if is_tracing([]):
        leaves, treedef, shardings = requested_shardings(
            tree, specs_or_rules, mesh, correction, names=names
        )
    else:
        leaves, treedef, shardings = agreed_shardings(
            "with_sharding_constraint",
            tree,
            specs_or_rules,
            mesh,
            correction=correction,
            names=names,
        )
    apply = _constrain_traced if is_tracing(leaves) else _put
    made: Tree = treedef.unflatten(apply(leaves, shardings))
    return made


def is_tracing(leaves: list[Any]) -> bool:
    """Whether the caller, or one of the leaves, is inside jit or another transformation."""
    from jax._src.core import trace_state_clean
    from jax.core import Tracer

    return not trace_state_clean() or any(isinstance(leaf, Tracer) for leaf in leaves)


def _put(leaves: list[Any], shardings: list[NamedSharding | None]) -> list[Any]:
    import jax

    placed = list(leaves)
    at_once: dict[int, NamedSharding] = {}
    for index, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if sharding is None or not hasattr(leaf, "shape"):
            continue
        if any(map(is_unconstrained, entries_of(sharding.spec))) or not has_devices(sharding.mesh):
            array = jax.lax.with_sharding_constraint(leaf, sharding)
            placed[index] = moved_inside_jit(array, sharding)
        else:
            at_once[index] = sharding
    arrays = put([leaves[i] for i in at_once], list(at_once.values()), may_alias=False)
    for index, array in zip(at_once, arrays, strict=True):
        placed[index] = array
    return placed


def _constrain_traced(leaves: list[Any], shardings: list[NamedSharding | None]) -> list[Any]:
    return [
        leaf
        if sharding is None or not hasattr(leaf, "shape")
        else moved_inside_jit(
            _constrained(leaf, *_by_axis_type(sharding, current_view(sharding.mesh))), sharding
        )
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]


def _constrained(array: Any, explicit: NamedSharding | None, auto: NamedSharding | None) -> Any:
    import jax

    if explicit is not None:
        array = jax.sharding.reshard(array, _with_own_entries(explicit, array))
    if auto is not None:
        array = jax.lax.with_sharding_constraint(array, auto)
    return array


def _with_own_entries(sharding: NamedSharding, array: Any) -> NamedSharding:
    """The sharding with the array's own entries for UNCONSTRAINED, which `reshard` refuses."""
    import jax

    wanted = entries_of(sharding.spec)
    if not any(map(is_unconstrained, wanted)):
        return sharding
    taken = {axis for entry in wanted for axis in entry_axes(entry)}
    own = entries_of(jax.typeof(array).sharding.spec)
    filled = (
        entry_of(tuple(axis for axis in entry_axes(mine) if axis not in taken))
        if is_unconstrained(entry)
        else entry
        for entry, mine in zip(wanted, own, strict=False)
    )
    return jax.sharding.NamedSharding(sharding.mesh, with_entries(sharding.spec, filled))


@functools.lru_cache(maxsize=4096)
def _by_axis_type(
    sharding: NamedSharding, view: AnyMesh
) -> tuple[NamedSharding | None, NamedSharding | None]:
    """(sharding for reshard, sharding for with_sharding_constraint) on `view`; None for no call."""
    from jax.sharding import NamedSharding

    types = {kind: axes_of_type(view, kind) for kind in ("Auto", "Explicit")}
    local = without_axes(sharding.spec, *manual_axes(view))

    def only(kind: str, other: str) -> NamedSharding | None:
        return NamedSharding(view, without_axes(local, types[other])) if types[kind] else None

    return only("Explicit", "Auto"), only("Auto", "Explicit")
