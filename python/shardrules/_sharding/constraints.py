"""`with_sharding_constraint`: rules or specs applied to arrays, inside jit and outside of it.

Decides, per kind of mesh axis, which of JAX's operations says the same thing. Must not know how a
sharding was decided.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from shardrules._correction import Correction
from shardrules._sharding.leaf_shardings import requested_shardings
from shardrules._sharding.memory import moved_inside_jit
from shardrules._sharding.mesh import axes_of_type, current_view
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

__all__ = ["is_tracing", "with_sharding_constraint"]


def with_sharding_constraint(
    tree: Any,
    specs_or_rules: Any,
    mesh: MeshLike | None = None,
    *,
    correction: Correction | None = None,
) -> Any:
    """The tree with its arrays constrained to shardings, corrected to their shapes and the mesh.

    As `jax.lax.with_sharding_constraint`, and with the correction of
    `eformer.escale.with_sharding_constraint`. Inside jit, axes of type Auto become a constraint,
    Explicit ones a `jax.sharding.reshard`, and Manual ones (inside shard_map) are left out: a
    dimension that only they cut is unconstrained. Outside of jit the arrays, numpy ones included,
    are put there in one batched call, and what comes back are copies, as with JAX's: to donate one
    leaves the array that was given as it is. Several processes agree first, as in `shard`.

    Rules and specs leave an array in the kind of memory that it is in; a NamedSharding has one.
    Inside jit, one of its devices' default kind leaves the array where it is, as in JAX, and one of
    "pinned_host" moves it there.

    Args:
        tree: Any pytree. Leaves without a shape, such as Python numbers, are left alone.
        specs_or_rules: `Rules` or (pattern, spec) pairs; or a PartitionSpec or NamedSharding for
            all leaves; or a tree of those, which may be a prefix of `tree`; None leaves a leaf
            alone.
        mesh: For rules and PartitionSpecs; the context's unless given.
        correction: Instead of the dialect's; eformer's for specs.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: As `named_shardings`, before anything is done to an array; or inside jit a kind
            of memory that JAX does not have there.
        TypeError: Something else is given for a spec.
        RuntimeError: Outside of jit, as `shard`.

    Example:
        >>> import jax
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> mesh = Mesh(jax.devices()[:1], ("dp",))
        >>> step = jax.jit(lambda x: with_sharding_constraint(2 * x, P("dp", "tp"), mesh))
        >>> step(jax.numpy.ones((4, 4))).sharding.mesh.axis_names
        ('dp',)
    """
    if is_tracing([]):
        leaves, treedef, shardings = requested_shardings(tree, specs_or_rules, mesh, correction)
    else:
        leaves, treedef, shardings = agreed_shardings(
            "with_sharding_constraint", tree, specs_or_rules, mesh, correction=correction
        )
    apply = _constrain_traced if is_tracing(leaves) else _put
    return treedef.unflatten(apply(leaves, shardings))


def is_tracing(leaves: list[Any]) -> bool:
    """Whether this is inside of jit or another transformation, or one of the leaves is."""
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
        if any(map(is_unconstrained, entries_of(sharding.spec))) or not _has_devices(sharding):
            array = jax.lax.with_sharding_constraint(leaf, sharding)
            placed[index] = moved_inside_jit(array, sharding)
        else:
            at_once[index] = sharding
    arrays = put([leaves[i] for i in at_once], list(at_once.values()), may_alias=False)
    for index, array in zip(at_once, arrays, strict=True):
        placed[index] = array
    return placed


def _has_devices(sharding: NamedSharding) -> bool:
    from jax.sharding import Mesh

    return isinstance(sharding.mesh, Mesh)


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
    """The array's own entries for what is UNCONSTRAINED, which `reshard` does not know."""
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
    """(for reshard, for with_sharding_constraint), in terms of `view`; None: nothing to do."""
    from jax.sharding import NamedSharding

    types = {kind: axes_of_type(view, kind) for kind in ("Auto", "Explicit")}
    local = without_axes(sharding.spec, *manual_axes(view))

    def only(kind: str, other: str) -> NamedSharding | None:
        return NamedSharding(view, without_axes(local, types[other])) if types[kind] else None

    return only("Explicit", "Auto"), only("Auto", "Explicit")
