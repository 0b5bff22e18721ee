"""`with_sharding_constraint`: rules or specs applied to arrays, inside and outside jit.

Outside jit it is a placement, of copies; inside, `traced` has the operations. Must not know how a
sharding was decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardrules._arguments import Tree, in_order, texts
from shardrules._correction import Correction
from shardrules._sharding.memory import moved_inside_jit
from shardrules._sharding.mesh import has_devices
from shardrules._sharding.operations import applied, operations_for
from shardrules._sharding.placement import agreed_shardings, put
from shardrules._sharding.traced import constrained, is_tracing
from shardrules._specs import entries_of, is_unconstrained

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardrules._sharding.mesh import MeshLike
    from shardrules._sharding.rules_like import RulesLike

__all__ = ["with_sharding_constraint"]


@in_order("tree", "rules", "mesh")
def with_sharding_constraint(
    tree: Tree,
    specs_or_rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    correction: Correction | None = None,
    names: Any = None,
    optional_axes: Iterable[str] = (),
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
        optional_axes: As in `plan`.

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
        >>> step = jax.jit(
        ...     lambda x: with_sharding_constraint(2 * x, P("dp", "tp"), mesh, optional_axes=["tp"])
        ... )
        >>> step(jax.numpy.ones((4, 4))).sharding.mesh.axis_names
        ('dp',)
    """
    optional = texts("optional_axes", optional_axes)
    if is_tracing([]):
        traced: Tree = constrained(
            tree, specs_or_rules, mesh, correction=correction, names=names, optional_axes=optional
        )
        return traced
    leaves, treedef, shardings = agreed_shardings(
        "with_sharding_constraint",
        tree,
        specs_or_rules,
        mesh,
        correction=correction,
        names=names,
        optional_axes=optional,
    )
    placed = (
        applied(leaves, operations_for(leaves, shardings))
        if is_tracing(leaves)
        else _put(leaves, shardings)
    )
    made: Tree = treedef.unflatten(placed)
    return made


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
