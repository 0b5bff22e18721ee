"""Constraints inside jit: which operations of JAX's bring traced arrays into their shardings.

Decided once for arrays of the same shapes, in trees of the same structure; a later call costs some
microseconds and a look at each shape beside JAX's own call. Must not know how a sharding was
decided.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._correction import RuleSpec
from shardrules._logical.rules import LogicalRules
from shardrules._matching.rules import Rules
from shardrules._plan_like import PlanLike
from shardrules._shape_specs import Fsdp
from shardrules._sharding.leaf_shardings import requested_shardings
from shardrules._sharding.memory import memory_apart, moved_inside_jit
from shardrules._sharding.mesh import axes_of_type, contexts, current_view
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

    from shardrules._correction import Correction
    from shardrules._sharding.mesh import AnyMesh, MeshLike
    from shardrules._sharding.rules_like import RulesLike

__all__ = ["constrained", "constrained_leaves", "is_tracing"]

_MOST_LEAVES: Final = 2**16
_DECIDERS: Final = (Rules, LogicalRules, PlanLike)
_Function = Callable[[Any, Any], Any]


class _Operation(NamedTuple):
    """A call for some leaves of a tree."""

    function: _Function
    leaves: list[int]
    shardings: list[NamedSharding]


class _Known(NamedTuple):
    treedef: Any
    operations: list[_Operation]
    call: tuple[_Function, NamedSharding] | None
    """The one call for the whole tree, where that is all."""
    decider: Any
    """Kept alive, so that no other object gets its id."""


def constrained(
    tree: Any,
    specs_or_rules: RulesLike,
    mesh: MeshLike | None,
    correction: Correction | None,
    names: Any,
) -> Any:
    """See `with_sharding_constraint`."""
    key: Hashable = None
    known = None
    leaves: list[Any] = []
    with suppress(AttributeError, TypeError, ValueError):  # something wrong, or not to remember
        _check_not_read_once(specs_or_rules)
        leaves, structure = _names_of_jax().flatten((tree, specs_or_rules, names))
        said = tuple([_SAID_BY[type(leaf)](leaf) for leaf in leaves])
        asked = structure, said, mesh, correction, contexts()
        known = _memory.get(asked)
        key = asked
    if known is None:
        leaves, treedef, shardings = requested_shardings(
            tree, specs_or_rules, mesh, correction, names=names
        )
        operations = _operations(leaves, shardings)
        known = _Known(treedef, operations, _one_call(leaves, operations), specs_or_rules)
        if key is not None and not _has_symbols(leaves):
            _memory.put(key, known)
    if known.call is not None:
        function, sharding = known.call
        return function(tree, sharding)
    return known.treedef.unflatten(_applied(leaves[: known.treedef.num_leaves], known.operations))


def constrained_leaves(leaves: list[Any], shardings: list[NamedSharding | None]) -> list[Any]:
    """The leaves in these shardings; None leaves one alone."""
    return _applied(leaves, _operations(leaves, shardings))


def _applied(leaves: list[Any], operations: list[_Operation]) -> list[Any]:
    made = list(leaves)
    for function, places, shardings in operations:
        arrays = function([made[i] for i in places], shardings)
        for place, array in zip(places, arrays, strict=True):
            made[place] = array
    return made


def is_tracing(leaves: list[Any]) -> bool:
    """Whether the caller, or one of the leaves, is inside jit or another transformation."""
    jax = _names_of_jax()
    return not jax.trace_state_clean() or any(isinstance(leaf, jax.tracer) for leaf in leaves)


class _NamesOfJax(NamedTuple):
    tracer: Any
    values: frozenset[type]
    """Types of what specs and rules are made of; equal values say the same."""
    trace_state_clean: Callable[[], bool]
    flatten: Callable[[Any], tuple[list[Any], Any]]


@functools.cache  # importing names takes microseconds, a tenth of JAX's own call
def _names_of_jax() -> _NamesOfJax:
    from jax._src.core import trace_state_clean
    from jax.core import Tracer
    from jax.sharding import NamedSharding, PartitionSpec
    from jax.tree_util import tree_flatten

    own = type(PartitionSpec.UNCONSTRAINED)
    values = frozenset({str, re.Pattern, RuleSpec, Fsdp, PartitionSpec, NamedSharding, own})
    return _NamesOfJax(Tracer, values, trace_state_clean, tree_flatten)


class _SaidBy(dict[type, Callable[[Any], Hashable]]):
    """By type of a leaf, what of it the operations follow from."""

    def __missing__(self, kind: type) -> Callable[[Any], Hashable]:
        jax = _names_of_jax()
        if issubclass(kind, jax.tracer):
            self[kind] = attrgetter("aval.shape", "aval.dtype")
        elif issubclass(kind, _DECIDERS):
            self[kind] = id
        elif kind in jax.values:
            self[kind] = _itself
        else:
            raise TypeError  # something wrong; or an array outside jit, whose memory matters
        return self[kind]


def _check_not_read_once(specs_or_rules: RulesLike) -> None:
    if hasattr(specs_or_rules, "__next__"):  # pairs from an iterator are not there again
        raise TypeError


def _itself(value: Any) -> Hashable:
    return value  # type: ignore[no-any-return]


_SAID_BY: Final = _SaidBy()


def _has_symbols(leaves: list[Any]) -> bool:
    """Whether a dimension is symbolic: only its scope knows what divides it."""
    return any(type(size) is not int for leaf in leaves for size in getattr(leaf, "shape", ()))


class _Memory:
    """The operations for what was asked before; all are forgotten when their leaves are many."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}
        self._leaves = 0

    def get(self, key: Hashable) -> _Known | None:
        return self._known.get(key)

    def put(self, key: Hashable, known: _Known) -> None:
        if self._leaves > _MOST_LEAVES:
            self._known.clear()
            self._leaves = 0
        self._known[key] = known
        self._leaves += 1 + known.treedef.num_leaves


_memory: Final = _Memory()


def _operations(leaves: list[Any], shardings: list[NamedSharding | None]) -> list[_Operation]:
    """The calls for these leaves, in their order."""
    calls_for = functools.cache(lambda sharding: list(_calls(sharding)))
    by_function: dict[_Function, dict[int, NamedSharding]] = {one: {} for one in _functions()}
    for place, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if sharding is not None and hasattr(leaf, "shape"):
            for function, wanted in calls_for(sharding):
                by_function[function][place] = wanted
    return [
        _Operation(function, list(of_leaf), list(of_leaf.values()))
        for function, of_leaf in by_function.items()
        if of_leaf
    ]


def _one_call(
    leaves: list[Any], operations: list[_Operation]
) -> tuple[_Function, NamedSharding] | None:
    """JAX's function and the sharding for all leaves, if that is all there is to do."""
    if len(operations) != 1:
        return None
    ((function, places, shardings),) = operations
    is_all = len(places) == len(leaves) and len(set(shardings)) == 1
    return (function, shardings[0]) if is_all and function in _functions()[1:3] else None


def _calls(sharding: NamedSharding) -> Iterator[tuple[_Function, NamedSharding]]:
    """The functions that bring an array into the sharding, with the sharding for each."""
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
    """What is called, in this order, with arrays and their shardings."""

    reshard_beside: _Function
    reshard: _Function
    constrain: _Function
    move: _Function


@functools.cache
def _functions() -> _Functions:
    import jax

    reshard = getattr(jax.sharding, "reshard", _reshard_beside)  # JAX before 0.6 has no such axes
    return _Functions(_reshard_beside, reshard, jax.lax.with_sharding_constraint, _move)


def _reshard_beside(arrays: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """`reshard` with an array's own entries for UNCONSTRAINED, which JAX refuses."""
    import jax

    wanted = list(map(_with_own_entries, shardings, arrays))
    made: list[Any] = jax.sharding.reshard(arrays, wanted)
    return made


def _move(arrays: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    return list(map(moved_inside_jit, arrays, shardings))


def _with_own_entries(sharding: NamedSharding, array: Any) -> NamedSharding:
    """The sharding with the array's own entries for UNCONSTRAINED."""
    import jax

    wanted = entries_of(sharding.spec)
    taken = {axis for entry in wanted for axis in entry_axes(entry)}
    own = entries_of(jax.typeof(array).sharding.spec)
    filled = (
        entry_of(tuple(axis for axis in entry_axes(mine) if axis not in taken))
        if is_unconstrained(entry)
        else entry
        for entry, mine in zip(wanted, own, strict=False)
    )
    return jax.sharding.NamedSharding(sharding.mesh, with_entries(sharding.spec, filled))


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
