"""`with_sharding_constraint`: rules or specs applied to arrays, inside and outside jit.

JAX has an operation of its own for each kind of axis: Auto, Explicit and Manual.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten

from shardrules._base.jax_names import trace_state_check
from shardrules._base.mistakes import Tree, in_order
from shardrules._base.rule_specs import Correction, Fsdp, RuleSpec
from shardrules._base.specs import (
    entries_of,
    entry_axes,
    entry_of,
    is_unconstrained,
    with_entries,
    without_axes,
)
from shardrules._place.decider import Decider, RulesLike
from shardrules._place.mesh import (
    AnyMesh,
    MeshLike,
    axes_of_type,
    check_placeable,
    contexts,
    current_view,
    has_devices,
    memory_apart,
    moved_inside_jit,
)
from shardrules._place.named_shardings import only_process, requested_shardings
from shardrules._place.processes import JointCall, rows_of
from shardrules._place.shardings import manual_axes
from shardrules._place.spec_trees import leaf_path
from shardrules._place.transfers import distinct, put, stays_within
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import Rules

Function = Callable[[Any, Any], Any]


def with_sharding_constraint(
    tree: Tree,
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    correction: Correction | None = None,
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
        rules: `Rules` or (pattern, spec) pairs; `LogicalRules`; a `Plan`, whose leaves are
            found by their paths; a PartitionSpec or NamedSharding for all leaves; or a tree of
            these, which may be a prefix of `tree`. None leaves a leaf unchanged.
        mesh: The mesh for rules and PartitionSpecs. Default: the context's; a Plan's own.
        correction: For specs: the policies for those that do not fit, as in `named_shardings`.

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
        ...     lambda x: with_sharding_constraint(2 * x, P("dp"), mesh)
        ... )
        >>> step(jax.numpy.ones((4, 4))).sharding.mesh.axis_names
        ('dp',)
    """
    # JAX records each frame above its own for the equation that it makes, a microsecond each: what
    # is known has none between the caller and JAX but this one.
    entry, leaves, key = _known(tree, rules, mesh, correction)
    if entry is None:
        return _with_sharding_constraint(tree, rules, mesh, correction, key)  # type: ignore[no-any-return]
    if entry.call is not None:
        function, sharding = entry.call
        return function(tree, sharding)  # type: ignore[no-any-return]
    result = applied(leaves[: entry.treedef.num_leaves], entry.operations)
    return entry.treedef.unflatten(result)  # type: ignore[no-any-return]


@in_order("tree", "rules", "mesh")
def _with_sharding_constraint(
    tree: Any,
    rules: RulesLike,
    mesh: MeshLike | None,
    correction: Correction | None,
    key: Hashable,
) -> Any:
    """Decide the shardings, and remember the operations inside jit."""
    if is_tracing([]):
        leaves, treedef, shardings = requested_shardings(tree, rules, mesh, correction=correction)
        operations = operations_for(leaves, shardings)
        result = treedef.unflatten(applied(leaves, operations))
        if key is not None and leaves and not _has_symbols(leaves):
            entry = _Known(treedef, operations, one_call(leaves, operations), rules)
            _memory.put(key, entry)
        return result
    with JointCall("with_sharding_constraint") as call:
        if call.joint and stays_within(tree, only_process(rules, mesh)):
            call.alone()
        leaves, treedef, shardings = requested_shardings(tree, rules, mesh, correction=correction)
        call.agree(lambda: rows_of(tree, shardings))
    if is_tracing(leaves):
        return treedef.unflatten(applied(leaves, operations_for(leaves, shardings)))
    return treedef.unflatten(_put(tree, leaves, shardings))


def _put(tree: Any, leaves: list[Any], shardings: list[NamedSharding | None]) -> list[Any]:
    placed = list(leaves)
    at_once: dict[int, NamedSharding] = {}
    says_all = {
        id(each): has_devices(each.mesh) and not any(map(is_unconstrained, entries_of(each.spec)))
        for each in distinct(shardings)
        if each is not None
    }
    for index, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if sharding is None or not hasattr(leaf, "shape"):
            continue
        if says_all[id(sharding)]:
            at_once[index] = sharding
            continue
        if not has_devices(sharding.mesh) and not isinstance(leaf, jax.Array):
            check_placeable(sharding, str)
        array = jax.lax.with_sharding_constraint(leaf, sharding)
        placed[index] = moved_inside_jit(array, sharding)
    # JAX shares the memory of large numpy arrays on CPUs, also where it may not.
    inputs = [x.copy() if isinstance(x := leaves[i], np.ndarray) else x for i in at_once]
    try:
        arrays = put(inputs, list(at_once.values()), may_alias=False)
    except NotImplementedError:  # bare, of unreduced axes that an array does not have already
        for index, sharding in at_once.items():
            check_placeable(sharding, partial(leaf_path, tree, index))
        raise
    for index, array in zip(at_once, arrays, strict=True):
        placed[index] = array
    return placed


_MOST_LEAVES: Final = 2**16
_MOST_ENTRIES: Final = 256  # each keeps its rules, some 100 kB
_DECIDERS: Final = (Rules, LogicalRules, Decider)
_ONE_FOR_ALL: Final = frozenset({PartitionSpec, NamedSharding})
_VALUES: Final = _ONE_FOR_ALL.union(
    {str, re.Pattern, RuleSpec, Fsdp, type(PartitionSpec.UNCONSTRAINED)}
)
"""Types of what specs and rules are made of; equal values say the same."""
_trace_state_clean: Final = trace_state_check()


class _Known(NamedTuple):
    treedef: Any
    operations: list[Operation]
    call: tuple[Function, NamedSharding] | None
    """The one call for the whole tree, where that is all."""
    decider: Any
    """Kept alive, so that no other object gets its id."""


def is_tracing(leaves: list[Any]) -> bool:
    """Return whether the caller, or one of the leaves, is inside jit or another transformation."""
    kinds = set(map(type, leaves))
    return not _trace_state_clean() or any(issubclass(kind, Tracer) for kind in kinds)


class _KeyOf(dict[type, Callable[[Any], Hashable]]):
    """Functions, by the type of a leaf, to all that its operations depend on."""

    def __missing__(self, kind: type) -> Callable[[Any], Hashable]:
        if issubclass(kind, Tracer):
            self[kind] = attrgetter("aval.shape", "aval.dtype")
        elif issubclass(kind, _DECIDERS):
            self[kind] = id
        elif kind in _VALUES:
            self[kind] = lambda value: value
        else:
            raise TypeError  # something wrong; or an array outside jit, whose memory matters
        return self[kind]


_KEY_OF: Final = _KeyOf()


def _has_symbols(leaves: list[Any]) -> bool:
    """Return whether a dimension is symbolic: only its scope knows what divides it."""
    return any(type(size) is not int for leaf in leaves for size in getattr(leaf, "shape", ()))


class _Memory:
    """Memo of operations by the arguments; all are forgotten when they or their leaves are many."""

    def __init__(self) -> None:
        self.known: dict[Hashable, _Known] = {}
        self._leaves = 0

    def put(self, key: Hashable, entry: _Known) -> None:
        if self._leaves > _MOST_LEAVES or len(self.known) >= _MOST_ENTRIES:
            self.known.clear()
            self._leaves = 0
        self.known[key] = entry
        self._leaves += 1 + entry.treedef.num_leaves


_memory: Final = _Memory()


def _known(
    tree: Any, rules: RulesLike, mesh: MeshLike | None, correction: Correction | None
) -> tuple[_Known | None, list[Any], Hashable]:
    """Return (what is known inside jit, the leaves, its key); the key is None for what has none."""
    try:
        if isinstance(tree, Tracer) and type(rules) in _ONE_FOR_ALL:
            aval: Any = tree.aval
            leaves, content = [tree], (aval.shape, aval.dtype, rules)
        else:
            if hasattr(rules, "__next__"):  # pairs from an iterator are not there again
                raise TypeError
            leaves, structure = tree_flatten((tree, rules))
            content = structure, *[_KEY_OF[type(leaf)](leaf) for leaf in leaves]
        key = content, mesh, correction, contexts()
        return _memory.known.get(key), leaves, key
    except (AttributeError, TypeError, ValueError):  # something wrong, or not to remember
        return None, [], None


class Operation(NamedTuple):
    """Call for some leaves of a tree."""

    function: Function
    leaves: list[int]
    shardings: list[NamedSharding]


def operations_for(leaves: list[Any], shardings: list[NamedSharding | None]) -> list[Operation]:
    """Return the calls for these leaves, in their order."""
    calls_for = functools.cache(lambda sharding: list(_calls_for(sharding)))
    by_function: dict[Function, dict[int, NamedSharding]] = {each: {} for each in _functions()}
    for place, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if sharding is not None and hasattr(leaf, "shape"):
            for function, target in calls_for(sharding):
                by_function[function][place] = target
    return [
        Operation(function, list(of_leaf), list(of_leaf.values()))
        for function, of_leaf in by_function.items()
        if of_leaf
    ]


def applied(leaves: list[Any], operations: list[Operation]) -> list[Any]:
    """Return the leaves after these calls."""
    arrays_after = list(leaves)
    for function, places, shardings in operations:
        arrays = function([arrays_after[i] for i in places], shardings)
        for place, array in zip(places, arrays, strict=True):
            arrays_after[place] = array
    return arrays_after


def one_call(
    leaves: list[Any], operations: list[Operation]
) -> tuple[Function, NamedSharding] | None:
    """Return (JAX's function, the sharding) if one call covers the tree; else None."""
    if len(operations) != 1:
        return None
    ((function, places, shardings),) = operations
    takes_trees = function in {_functions().reshard, _functions().constrain}
    is_all = len(places) == len(leaves) and len(set(shardings)) == 1
    return (function, shardings[0]) if takes_trees and is_all else None


def _calls_for(sharding: NamedSharding) -> Iterator[tuple[Function, NamedSharding]]:
    """Return the functions that bring an array into the sharding, with the sharding for each."""
    functions = _functions()
    explicit, auto = _by_axis_type(sharding, current_view(sharding.mesh))
    if explicit is not None:
        is_open = any(map(is_unconstrained, entries_of(explicit.spec)))
        yield functions.reshard_beside if is_open else functions.reshard, explicit
    if auto is not None:
        yield functions.constrain, auto
    if memory_apart(sharding):
        yield functions.move, sharding


class _Functions(NamedTuple):
    """JAX's functions of arrays and their shardings, in the order of their calls."""

    reshard_beside: Function
    reshard: Function
    constrain: Function
    move: Function


@functools.cache
def _functions() -> _Functions:
    constrain = jax.lax.with_sharding_constraint
    return _Functions(_reshard_beside, jax.sharding.reshard, constrain, _move)


def _reshard_beside(arrays: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """Return `reshard` with an array's own entries for UNCONSTRAINED, which JAX refuses."""
    targets = list(map(_with_own_entries, shardings, arrays))
    resharded: list[Any] = jax.sharding.reshard(arrays, targets)
    return resharded


def _move(arrays: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    return list(map(moved_inside_jit, arrays, shardings))


def _with_own_entries(sharding: NamedSharding, array: Any) -> NamedSharding:
    """Return the sharding with the array's own entries for UNCONSTRAINED."""
    entries = entries_of(sharding.spec)
    taken = {axis for entry in entries for axis in entry_axes(entry)}
    current = entries_of(jax.typeof(array).sharding.spec)
    filled = (
        entry_of(tuple(axis for axis in entry_axes(mine) if axis not in taken))
        if is_unconstrained(entry)
        else entry
        for entry, mine in zip(entries, current, strict=False)
    )
    return jax.sharding.NamedSharding(sharding.mesh, with_entries(sharding.spec, filled))


def _by_axis_type(
    sharding: NamedSharding, view: AnyMesh
) -> tuple[NamedSharding | None, NamedSharding | None]:
    """Return (sharding for reshard, sharding for a constraint) on `view`; None for no call."""
    types = {kind: axes_of_type(view, kind) for kind in ("Auto", "Explicit")}
    local = without_axes(sharding.spec, *manual_axes(view))

    def only(kind: str, excluded: str) -> NamedSharding | None:
        return NamedSharding(view, without_axes(local, types[excluded])) if types[kind] else None

    return only("Explicit", "Auto"), only("Auto", "Explicit")
