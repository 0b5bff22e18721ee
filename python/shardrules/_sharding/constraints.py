"""`with_sharding_constraint`: rules or specs applied to arrays, inside and outside jit.

Chooses the JAX operation for each type of mesh axis, and remembers it for one array and its spec.
Must not know how a sharding was decided.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from shardrules._arguments import Tree
from shardrules._correction import Correction
from shardrules._sharding.leaf_shardings import requested_shardings
from shardrules._sharding.memory import memory_apart, moved_inside_jit
from shardrules._sharding.mesh import axes_of_type, contexts, current_view, has_devices
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


class _Operations(NamedTuple):
    """What to do with an array inside jit; None for nothing."""

    explicit: NamedSharding | None
    """The sharding for `jax.sharding.reshard`."""
    auto: NamedSharding | None
    """The sharding for `jax.lax.with_sharding_constraint`."""
    moved: NamedSharding | None
    """The sharding that has the memory kind to move to."""


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
        if names is None and (known := _known_operations(tree, specs_or_rules, mesh, correction)):
            constrained: Tree = _applied(tree, *known)
            return constrained
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
    jax = _names_of_jax()
    return not jax.trace_state_clean() or any(isinstance(leaf, jax.tracer) for leaf in leaves)


class _NamesOfJax(NamedTuple):
    tracer: Any
    specs: tuple[type, type]
    trace_state_clean: Callable[[], bool]


@functools.cache  # importing names takes microseconds, a tenth of JAX's own call
def _names_of_jax() -> _NamesOfJax:
    from jax._src.core import trace_state_clean
    from jax.core import Tracer
    from jax.sharding import NamedSharding, PartitionSpec

    return _NamesOfJax(Tracer, (PartitionSpec, NamedSharding), trace_state_clean)


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
        else _applied(leaf, *_operations(sharding))
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]


def _known_operations(
    tree: Any, spec: Any, mesh: MeshLike | None, correction: Correction | None
) -> _Operations | None:
    """The operations for one array and its spec, as in a forward pass; None for all else."""
    jax = _names_of_jax()
    if not isinstance(tree, jax.tracer) or not isinstance(spec, jax.specs):
        return None
    try:
        return _operations_for_one(spec, tree.shape, mesh, correction, contexts())
    except (AttributeError, TypeError):  # what is wrong, the general way says
        return None


@functools.lru_cache(maxsize=4096)
def _operations_for_one(
    spec: Any,
    shape: tuple[int, ...],
    mesh: MeshLike | None,
    correction: Correction | None,
    _: tuple[Any, ...],
) -> _Operations:
    from jax import ShapeDtypeStruct

    one = ShapeDtypeStruct(shape, "float32")  # specs go by shapes alone
    sharding = requested_shardings(one, spec, mesh, correction)[2][0]
    return _operations(cast("NamedSharding", sharding))


def _operations(sharding: NamedSharding) -> _Operations:
    explicit, auto = _by_axis_type(sharding, current_view(sharding.mesh))
    return _Operations(explicit, auto, sharding if memory_apart(sharding) else None)


def _applied(
    array: Any,
    explicit: NamedSharding | None,
    auto: NamedSharding | None,
    moved: NamedSharding | None,
) -> Any:
    import jax

    if explicit is not None:
        array = jax.sharding.reshard(array, _with_own_entries(explicit, array))
    if auto is not None:
        array = jax.lax.with_sharding_constraint(array, auto)
    return array if moved is None else moved_inside_jit(array, moved)


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
