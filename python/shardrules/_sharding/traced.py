"""Constraints inside jit, decided once for trees of the same structure, shapes and dtypes.

A later call costs some microseconds, and a look at each shape, beside JAX's own call. Must not know
how a sharding was decided, nor which operations bring arrays into it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._correction import RuleSpec
from shardrules._jax import trace_state_check
from shardrules._logical.rules import LogicalRules
from shardrules._matching.rules import Rules
from shardrules._plan_like import PlanLike
from shardrules._shape_specs import Fsdp
from shardrules._sharding.leaf_shardings import requested_shardings
from shardrules._sharding.mesh import contexts
from shardrules._sharding.operations import Function, Operation, applied, one_call, operations_for

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardrules._correction import Correction
    from shardrules._sharding.mesh import MeshLike
    from shardrules._sharding.rules_like import RulesLike

__all__ = ["constrained", "is_tracing"]

_MOST_LEAVES: Final = 2**16
_DECIDERS: Final = (Rules, LogicalRules, PlanLike)


class _Known(NamedTuple):
    treedef: Any
    operations: list[Operation]
    call: tuple[Function, NamedSharding] | None
    """The one call for the whole tree, where that is all."""
    decider: Any
    """Kept alive, so that no other object gets its id."""


def constrained(
    tree: Any,
    specs_or_rules: RulesLike,
    mesh: MeshLike | None,
    *,
    correction: Correction | None,
    names: Any,
    optional_axes: tuple[str, ...],
) -> Any:
    """See `with_sharding_constraint`."""
    key: Hashable = None
    known = None
    leaves: list[Any] = []
    with suppress(AttributeError, TypeError, ValueError):  # something wrong, or not to remember
        _check_not_read_once(specs_or_rules)
        leaves, structure = _names_of_jax().flatten((tree, specs_or_rules, names))
        said = tuple([_SAID_BY[type(leaf)](leaf) for leaf in leaves])
        asked = structure, said, mesh, correction, optional_axes, contexts()
        known = _memory.get(asked)
        key = asked
    if known is None:
        leaves, treedef, shardings = requested_shardings(
            tree, specs_or_rules, mesh, correction, names=names, optional_axes=optional_axes
        )
        operations = operations_for(leaves, shardings)
        known = _Known(treedef, operations, one_call(leaves, operations), specs_or_rules)
        if key is not None and not _has_symbols(leaves):
            _memory.put(key, known)
    if known.call is not None:
        function, sharding = known.call
        return function(tree, sharding)
    return known.treedef.unflatten(applied(leaves[: known.treedef.num_leaves], known.operations))


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
    from jax.core import Tracer
    from jax.sharding import NamedSharding, PartitionSpec
    from jax.tree_util import tree_flatten

    own = type(PartitionSpec.UNCONSTRAINED)
    values = frozenset({str, re.Pattern, RuleSpec, Fsdp, PartitionSpec, NamedSharding, own})
    return _NamesOfJax(Tracer, values, trace_state_check(), tree_flatten)


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
