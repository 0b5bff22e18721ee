"""Reads shardings, shapes and dtypes of the leaves of a live tree, matched with a plan's rows."""

from __future__ import annotations

from functools import partial
from numbers import Number
from operator import attrgetter, methodcaller
from typing import Any, Final, Literal, NamedTuple

import jax
from jax import tree_util
from jax.core import Tracer
from jax.sharding import Sharding

from shardrules._core import aligned_values
from shardrules._place.boxes import NodeForms
from shardrules._place.named_arrays import rows_and_paths
from shardrules._plan.align import align
from shardrules._plan.leaves import Leaves
from shardrules._rules.rules import Rules

Where = Sharding | Literal["deleted", "abstract", "host", "nowhere"]
"""Sharding of a leaf; or, of "host", a numpy array or number in this process's memory, and of
"nowhere", something that is no array."""
Fields = tuple[Where, tuple[int, ...] | None, Any]
"""Fields of `Live`, as a plain tuple: making 10,000 records costs half a walk."""


class Live(NamedTuple):
    """Sharding, shape and dtype of a live leaf."""

    where: Where
    shape: tuple[int, ...] | None
    """None for what is no array, nor a number."""
    dtype: Any
    """Class of what is no array; None for a number."""


class LiveLeaves(NamedTuple):
    """Leaves of a tree that the plan has, and those that only one of both has."""

    leaves: list[Any]
    rows: list[int]
    """Rows of these leaves in the plan."""
    missing: list[int]
    """Rows of the plan that the tree does not have."""
    extra: dict[str, Any]
    """Leaves that the plan does not have, by path."""


# An array's own shape and dtype are functions in Python, which take these.
_OF_ARRAY: Final[Any] = attrgetter("sharding", "aval.shape", "aval.dtype")


def live_leaves(tree: Any, leaves: Leaves) -> LiveLeaves:
    """Match the leaves of a tree with those of a plan: by structure, or else by path."""
    values, rows = aligned_values(leaves.tree, tree, len(leaves.paths)), [*range(len(leaves.paths))]
    if values is None:  # of other nodes than dicts, lists and tuples, or unlike
        structures: list[Any] = [None, None]
        rows, structures[0] = tree_util.tree_flatten(leaves.tree)
        values, structures[1] = tree_util.tree_flatten(tree)
        # Not by flatten_up_to: its error has the text of each array, and fetches the data for it.
        try:
            is_alike = bool(structures[0] == structures[1])
        except (TypeError, ValueError):  # of what a node compares, such as arrays
            is_alike = False
        if not is_alike:
            return _leaves_by_paths(tree, leaves)
    if not _are_arrays(set(map(type, values))):
        forms = NodeForms()
        values = list(map(forms.array_in, values))
        # The tree may have more levels than the plan's; and None is no leaf.
        if not tree_util.all_leaves(values):
            return _leaves_by_paths(tree, leaves)
    return LiveLeaves(values, rows, [], {})


def _leaves_by_paths(tree: Any, leaves: Leaves) -> LiveLeaves:
    rules = Rules((), leaves.paths_dialect)
    aligned = align(tree, leaves, partial(rows_and_paths, rules=rules))
    rows, values, paths = aligned.rows, aligned.values, aligned.leaves.paths
    return LiveLeaves(
        [value for value, row in zip(values, rows, strict=True) if row >= 0],
        [row for row in rows if row >= 0],
        aligned.missing,
        {path: values[i] for i, path in enumerate(paths) if rows[i] < 0},
    )


def _are_arrays(types: set[type]) -> bool:
    return all(issubclass(cls, jax.Array) and not issubclass(cls, Tracer) for cls in types)


def fields_of(leaves: list[Any]) -> list[Fields]:
    """Read the fields of `Live` for each leaf."""
    types: set[Any] = set(map(type, leaves))
    if not _are_arrays(types):
        return list(map(_live, leaves))
    # A method of the class takes half the time of looking one up for each array. Random keys of
    # older versions of JAX have a property.
    method = types.pop().is_deleted if len(types) == 1 else None
    is_deleted = method if callable(method) else methodcaller("is_deleted")
    return list(map(_live if any(map(is_deleted, leaves)) else _OF_ARRAY, leaves))


def _live(leaf: Any) -> Live:
    if isinstance(leaf, Tracer):
        raise TypeError(
            "audit looks at arrays on devices, and inside jit there are none yet: call it outside"
        )
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        is_number = isinstance(leaf, Number)
        return Live("host", (), None) if is_number else Live("nowhere", None, type(leaf))
    where: Where = "abstract"
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        where = "deleted"
    elif isinstance(sharding, jax.sharding.Sharding):
        where = sharding
    elif hasattr(leaf, "__array__") or hasattr(leaf, "__dlpack__"):
        where = "host"
    return Live(where, tuple(leaf.shape), leaf.dtype)


def is_committed(leaf: Any) -> bool:
    """Return False for an array on a device that JAX chose, from which jit may move it."""
    return bool(getattr(leaf, "committed", True))
