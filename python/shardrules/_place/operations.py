"""JAX's operations that bring traced arrays into shardings: Auto, Explicit and Manual axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from shardrules._base.specs import (
    entries_of,
    entry_axes,
    entry_of,
    is_unconstrained,
    with_entries,
    without_axes,
)
from shardrules._place.memory import memory_apart, moved_inside_jit
from shardrules._place.mesh import AnyMesh, axes_of_type, current_view
from shardrules._place.shardings import manual_axes

Function = Callable[[Any, Any], Any]


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
