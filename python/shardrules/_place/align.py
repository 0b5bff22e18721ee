"""Alignment of the leaves of two trees: by structure or by path, in boxes or without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from shardrules._base.specs import is_partition_spec
from shardrules._base.text import brief, counted, near_shown, shown
from shardrules._core import aligned_values
from shardrules._place.boxes import Unboxed, open_boxes, unboxed_with_names
from shardrules._place.leaf_errors import listing
from shardrules._rules.rules import Rules, matcher_of

_NO_RULES: Final = Rules(())


class Walk(Protocol):
    """Leaves of a tree in the order of a walk."""

    @property
    def tree(self) -> Any:
        """The tree with the number of its row for each leaf."""
        ...

    @property
    def paths(self) -> list[str]:
        """The path of each row."""
        ...


_Walk = TypeVar("_Walk", bound=Walk)
_Path = TypeVar("_Path", bound=Hashable)


class PathsOfTree(NamedTuple):
    """A tree with the number of its row for each leaf, and the path of each row."""

    tree: Any
    paths: list[str]


def rows_and_paths(tree: Any, rules: Rules = _NO_RULES) -> PathsOfTree:
    """Return row numbers for the leaves of a pytree, and their paths in the dialect of rules."""
    of_rows, paths, *_ = matcher_of(rules).survey(tree, replicated=0, unmatched=0, ambiguous=0)
    return PathsOfTree(of_rows, paths)


def key_text(key: Any) -> str:
    """Return a key of JAX's paths as text: of a dict, a sequence, a field, or a flattened index."""
    names = (name for name in ("key", "idx", "name") if hasattr(key, name))
    return str(next((getattr(key, name) for name in names), key))


def leaf_paths(tree: Any) -> list[str]:
    """Return the paths of a tree's leaves, in the order of JAX's leaves."""
    from jax import tree_util

    of_rows, paths = rows_and_paths(tree)
    return [paths[row] for row in tree_util.tree_leaves(of_rows)]


def check_distinct(paths: Sequence[str], use: str) -> None:
    """Refuse two leaves of one path, such as a key "a/b" beside the key "b" of "a".

    Raises:
        ValueError: It says `use`, what tells leaves apart by their paths.
    """
    if len(set(paths)) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise ValueError(
            f"two leaves have the path {brief(twice)}, and {use}: rename a key of one of them"
        )


def match_rows(
    paths: Sequence[_Path], references: Sequence[_Path], *spellings: Callable[[_Path], _Path]
) -> list[int]:
    """Find each path among others; a path that stands twice on one side is found nowhere.

    Args:
        paths: The paths.
        references: The other paths.
        spellings: Tried in turn for the paths that are left on both sides.

    Returns:
        The index of the other path, or -1, for each path.
    """
    row_of, reference_row_of = _rows_by_path(paths), _rows_by_path(references)
    rows = [reference_row_of.get(path, -1) if path in row_of else -1 for path in paths]
    for spell in spellings:
        if -1 not in rows:
            break
        places = [place for place, row in enumerate(rows) if row < 0]
        free = sorted({*range(len(references))}.difference(rows))
        again = match_rows([spell(paths[i]) for i in places], [spell(references[i]) for i in free])
        for place, index in zip(places, again, strict=True):
            rows[place] = -1 if index < 0 else free[index]
    return rows


def _rows_by_path(paths: Sequence[_Path]) -> dict[_Path, int]:
    row_of = {path: row for row, path in enumerate(paths)}
    if len(row_of) < len(paths):
        counts = Counter(paths)
        row_of = {path: row for path, row in row_of.items() if counts[path] == 1}
    return row_of


def match_leaves(leaves: Walk, reference: Walk) -> list[int]:
    """Find each leaf among others by its path; those that share a path, by their keys.

    Returns:
        The row of the other leaf, or -1, for each leaf.
    """
    walks = (leaves, reference)
    shared = {
        path
        for walk in walks
        if len(set(walk.paths)) < len(walk.paths)
        for path, count in Counter(walk.paths).items()
        if count > 1
    }
    if not shared:
        return match_rows(leaves.paths, reference.paths)
    return match_rows(_distinct(leaves, shared), _distinct(reference, shared))


def _distinct(walk: Walk, shared: set[str]) -> list[Hashable]:
    """Return the paths, but the keys of leaves that share one: "a/b" alone, or "a" and "b"."""
    from jax import tree_util

    names: list[Hashable] = [(path,) if path in shared else path for path in walk.paths]
    for keys, row in tree_util.tree_flatten_with_path(walk.tree)[0]:
        if walk.paths[row] in shared:
            names[row] = tuple(map(key_text, keys))
    return names


@dataclass(frozen=True)
class Alignment(Generic[_Walk]):
    """Leaves of a tree, each with its row in another."""

    leaves: _Walk
    rows: list[int]
    """The row of each leaf in the other tree, or -1."""
    tree: Any
    """The tree; without its boxes, if that is how its leaves were found."""
    boxes: Unboxed | None
    """These boxes."""
    reference_paths: list[str]
    """The paths of the other tree, with boxes or without."""

    @cached_property
    def values(self) -> list[Any]:
        """The leaves themselves, by row."""
        from jax import tree_util

        return by_row(tree_util.tree_leaves(self.leaves.tree), tree_util.tree_leaves(self.tree))

    @property
    def missing(self) -> list[int]:
        """The other tree's rows that no leaf has."""
        return sorted({*range(len(self.reference_paths))}.difference(self.rows))


def align(tree: Any, reference: Walk, walk: Callable[[Any], _Walk]) -> Alignment[_Walk]:
    """Find each leaf of a tree in another by its path: with boxes, or without where more match.

    Args:
        tree: A pytree; arrays may be in boxes of flax, nnx Variables and haliax NamedArrays.
        reference: The leaves of the other tree.
        walk: Gives leaves their paths, as those of the other tree are.
    """
    leaves = walk(tree)
    rows = match_leaves(leaves, reference)
    direct = Alignment(leaves, rows, tree, None, reference.paths)
    if -1 not in rows:
        return direct
    # An array in a box has a longer path.
    boxes = open_boxes(tree)
    plain = walk(boxes.tree)
    plain_reference = _without_boxes(reference, walk)
    without = [
        Alignment(plain, match_leaves(plain, each), boxes.tree, boxes, each.paths)
        for each in (reference, plain_reference)
    ]
    boxed = Alignment(
        leaves, match_leaves(leaves, plain_reference), tree, None, plain_reference.paths
    )
    return min((direct, without[0], boxed, without[1]), key=lambda each: each.rows.count(-1))


def _without_boxes(reference: Walk, walk: Callable[[Any], Walk]) -> PathsOfTree:
    """Return the same rows, with the tree and the paths that they have without boxes."""
    from jax import tree_util

    tree = open_boxes(reference.tree).tree
    plain = walk(tree)
    numbers, rows = (tree_util.tree_leaves(each) for each in (plain.tree, tree))
    paths = reference.paths.copy()
    for number, row in zip(numbers, rows, strict=True):
        paths[row] = plain.paths[number]
    return PathsOfTree(tree, paths)


def names_beside(of_rows: Any, paths: list[str], names: Any) -> list[Any]:
    """Return the logical axis names of each leaf, by row; None for a leaf without.

    Args:
        of_rows: The tree with the number of its row for each leaf.
        paths: The leaves' paths, by row.
        names: A tree of names that fits the tree, or {path: names}.

    Raises:
        ValueError: The names do not fit the tree, or are for paths that are not there.
    """
    values = aligned_values(of_rows, names, len(paths))
    if values is not None:
        return values
    is_by_path = isinstance(names, Mapping) and all(map(_may_be_names, names.values()))
    if is_by_path:
        if names.keys() <= set(paths):
            return list(map(names.get, paths))
        aligned = align(of_rows, PathsOfTree((), list(names)), rows_and_paths)
        if not aligned.missing:
            entries = [*names.values(), None]
            return by_row(aligned.values, [entries[row] for row in aligned.rows])
    try:
        return _by_jax(of_rows, names)
    except ValueError as error:
        raise (_unknown_paths(paths, names) if is_by_path else error) from None


def _may_be_names(value: Any) -> bool:
    if is_partition_spec(value):
        return True
    return isinstance(value, tuple | list) and not any(
        isinstance(entry, Mapping | list) for entry in value
    )


def _unknown_paths(paths: list[str], names: Mapping[Any, Any]) -> ValueError:
    existing = set(paths)
    unknown = [path for path in names if path not in existing]
    lines = (
        shown(path) + (near_shown(path, paths) if isinstance(path, str) else "") for path in unknown
    )
    return ValueError(
        listing(f"names: {counted(len(unknown), 'path')} of no leaf", lines, len(unknown), "path")
    )


def _by_jax(of_rows: Any, names: Any) -> list[Any]:
    from jax import tree_util

    rows: list[int]
    treedef: Any
    rows, treedef = tree_util.tree_flatten(of_rows)
    try:
        values: list[Any] = treedef.flatten_up_to(names)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"names: they do not fit the tree: {str(error).splitlines()[0][:200]}; give a tree of "
            "the same structure with a tuple of names for each array, or {path: names}"
        ) from None
    return by_row(rows, values)


def by_row(rows: list[int], values: list[Any]) -> list[Any]:
    """Return values of JAX's leaves by row: rows have dicts in their own order, JAX sorts keys."""
    if rows == list(range(len(rows))):
        return values
    ordered = values.copy()
    for row, value in zip(rows, values, strict=True):
        ordered[row] = value
    return ordered


class NamedArrays(NamedTuple):
    """Arrays of a tree, and the names of each."""

    tree: Any
    """The tree without boxes."""
    names: list[Any]
    """Of each array in the order of JAX's leaves its names, which can be hashed; None without."""
    boxes: Unboxed | None
    """The boxes that the names were in; None if the names were beside the tree."""

    def boxed(self, answers: Any) -> Any:
        """Return the tree of answers as users expect it; see `Unboxed.boxed`."""
        return answers if self.boxes is None else self.boxes.boxed(answers)

    def paths(self) -> list[str]:
        """Return the paths of the arrays, in the order of JAX's leaves."""
        return leaf_paths(self.tree)


def named_arrays(tree: Any, names: Any = None) -> NamedArrays:
    from jax import tree_util

    if names is None:
        boxes = unboxed_with_names(tree)
        return NamedArrays(boxes.tree, _hashable(boxes.names_of_arrays()), boxes)
    of_rows, paths = rows_and_paths(tree)
    named = names_beside(of_rows, paths, names)
    ordered = [named[row] for row in tree_util.tree_leaves(of_rows)]
    return NamedArrays(tree, _hashable(ordered), None)


def _hashable(names: list[Any]) -> list[Any]:
    return [tuple(entries) if isinstance(entries, list) else entries for entries in names]
