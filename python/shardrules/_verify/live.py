"""The leaves of a live tree beside those of a plan, and what there is of each.

Costs a walk over both trees at once and some attributes of each leaf; paths are spelled only where
the trees have different structures. Must not know what is planned for a leaf.
"""

from __future__ import annotations

from functools import partial
from numbers import Number
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from shardrules._core import values_beside
from shardrules._rules.names import NodeForms
from shardrules._rules.rules import Rules
from shardrules._trees.align import align, rows_and_paths

if TYPE_CHECKING:
    from jax.sharding import Sharding

    from shardrules._plan.table import Leaves

    Where = Sharding | Literal["deleted", "abstract", "host", "nowhere"]
    """Its sharding. Without one: a deleted array; an abstract one; a numpy array or a number, in
    this process's memory; something that is no array."""
    Fields = tuple[Where, tuple[int, ...] | None, Any]
    """The fields of `Live`, as a plain tuple: making 10,000 others costs half a walk."""


class Live(NamedTuple):
    """What there is of a leaf."""

    where: Where
    shape: tuple[int, ...] | None
    """None for what is no array, nor a number."""
    dtype: Any
    """Of what is no array, its class; None for a number."""


class LiveLeaves(NamedTuple):
    """The leaves of a tree, each with its row in the plan."""

    found: list[Any]
    """The leaves that the plan has."""
    rows: list[int]
    """Their rows in the plan."""
    missing: list[int]
    """The plan's rows that the tree does not have."""
    extra: dict[str, Any]
    """By path, the leaves that the plan does not have."""


# An array's own shape and dtype are functions in Python, which take these.
_OF_ARRAY: Final[Any] = attrgetter("sharding", "aval.shape", "aval.dtype")


def live_leaves(tree: Any, leaves: Leaves) -> LiveLeaves:
    """The leaves of a tree beside those of a plan: by structure, or else by path."""
    from jax import tree_util

    rows, found = _by_structure(tree, leaves)
    if found is None:
        return _by_paths(tree, leaves)
    if not _are_arrays(set(map(type, found))):
        forms = NodeForms()
        found = list(map(forms.array_in, found))
        # The tree may have more levels than the plan's; and None is no leaf.
        if not tree_util.all_leaves(found):
            return _by_paths(tree, leaves)
    return LiveLeaves(found, rows, [], {})


def _by_structure(tree: Any, leaves: Leaves) -> tuple[list[int], list[Any] | None]:
    """(rows, the leaf of each row), or None if the trees differ."""
    from jax import tree_util

    found = values_beside(leaves.tree, tree, len(leaves.paths))
    if found is not None:
        return list(range(len(found))), found
    rows: list[int]
    rows, planned = tree_util.tree_flatten(leaves.tree)
    found, structure = tree_util.tree_flatten(tree)
    # Not by flatten_up_to: its error has the text of each array, and fetches the data for it.
    return rows, found if _are_equal(structure, planned) else None


def _are_equal(structure: Any, planned: Any) -> bool:
    try:
        return bool(structure == planned)
    except (TypeError, ValueError):  # of what a node compares, such as arrays
        return False


def _by_paths(tree: Any, leaves: Leaves) -> LiveLeaves:
    rules = Rules((), leaves.paths_dialect)
    aligned = align(tree, leaves, partial(rows_and_paths, rules=rules))
    pairs = list(zip(aligned.values, aligned.rows, strict=True))
    return LiveLeaves(
        [value for value, row in pairs if row >= 0],
        [row for row in aligned.rows if row >= 0],
        aligned.missing,
        {
            path: value
            for path, (value, row) in zip(aligned.leaves.paths, pairs, strict=True)
            if row < 0
        },
    )


def _are_arrays(types: set[type]) -> bool:
    import jax
    from jax.core import Tracer

    return all(issubclass(one, jax.Array) and not issubclass(one, Tracer) for one in types)


def fields_of(found: list[Any]) -> list[Fields]:
    """What there is of each leaf: the fields of `Live`.

    Raises:
        TypeError: One is traced: inside jit no array is anywhere yet.
    """
    types: set[Any] = set(map(type, found))
    if not _are_arrays(types):
        return list(map(_live, found))
    # A method of the class takes half the time of looking one up for each array. Random keys of
    # older versions of JAX have a property.
    method = types.pop().is_deleted if len(types) == 1 else None
    is_deleted = method if callable(method) else methodcaller("is_deleted")
    if any(map(is_deleted, found)):
        return list(map(_live, found))
    return list(map(_OF_ARRAY, found))


def _live(leaf: Any) -> Live:
    import jax
    from jax.core import Tracer

    if isinstance(leaf, Tracer):
        raise TypeError(
            "audit looks at arrays on devices, and inside jit there are none yet: call it outside"
        )
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        if isinstance(leaf, Number):
            return Live("host", (), None)
        return Live("nowhere", None, type(leaf))
    shape, dtype, is_array = tuple(leaf.shape), leaf.dtype, isinstance(leaf, jax.Array)
    if is_array and leaf.is_deleted():
        return Live("deleted", shape, dtype)
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.Sharding):
        return Live(sharding, shape, dtype)
    is_host = hasattr(leaf, "__array__") or hasattr(leaf, "__dlpack__")
    return Live("host" if is_host else "abstract", shape, dtype)


def is_committed(leaf: Any) -> bool:
    """False for an array on a device that JAX chose; jit moves it to where the others are."""
    return bool(getattr(leaf, "committed", True))
