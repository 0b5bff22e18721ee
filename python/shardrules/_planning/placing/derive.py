"""Derivation: which leaves follow the rule of another path, and in which of its dimensions.

Costs one more match of each path, and a `re.sub` for each leaf that follows, on whatever mesh. Must
not know of optimizers, nor which libraries name leaves in which ways.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from shardrules._matching.rules import Rules
from shardrules._planning.companion import (
    Companion,
    Dims,
    base_path,
    check_dims,
    fits_rank,
    named_dims,
)
from shardrules._planning.leaves import LeafType, Leaves
from shardrules._planning.path_rules import NO_RULE_NEEDED, UNMATCHED, first_rules
from shardrules._specs import Dim

__all__ = ["Derivation", "dims_for", "dims_shown", "grouped", "with_companions"]

_Key = TypeVar("_Key", bound=Hashable)


class Derivation(NamedTuple):
    """The way in which leaves follow their bases."""

    rule: int
    """The index of the base's rule; may be AMBIGUOUS."""
    dims: Dims
    """The dims of the `Companion`, or the result of its function."""
    blocks: tuple[int, ...]


def with_companions(
    leaves: Leaves, rules: Rules, companions: tuple[Companion, ...], min_size: int
) -> tuple[Leaves, list[Derivation | None]]:
    """The leaves, those that companions find with the rules of their bases.

    Returns:
        (the leaves, per kind how they follow their bases or None)
    """
    if not companions:
        return leaves, [None] * len(leaves.types)
    companion_of = _companions_of(leaves, companions)
    base_of = {row: base_path(one, leaves.paths[row]) for row, one in companion_of.items()}
    rule_of = first_rules(rules, set(base_of.values()))
    derivation_of: dict[int, Derivation] = {}
    sources = list(leaves.paths)
    for row, companion in companion_of.items():
        if (rule := rule_of[base_of[row]]) != UNMATCHED:
            dims = _resolved(companion, leaves, row, base_of[row])
            derivation_of[row] = Derivation(rule, dims, companion.blocks)
            sources[row] = base_of[row]
    keys, kind_of = grouped(
        (kind, derivation_of.get(row)) for row, kind in enumerate(leaves.kind_of.tolist())
    )
    types = [_derived(leaves.types[kind], how, min_size) for kind, how in keys]
    found = replace(
        leaves,
        sources=sources,
        kind_of=kind_of,
        types=types,
        companions=companions,
        found_by=companion_of,
    )
    return found, [how for _, how in keys]


def _companions_of(leaves: Leaves, companions: tuple[Companion, ...]) -> dict[int, Companion]:
    """The first companion that finds a row, for each row that one finds."""
    ranks = [
        -1 if one.shape is None or one.rule == NO_RULE_NEEDED else len(one.shape)
        for one in leaves.types
    ]
    rank_of = np.array(ranks, np.int64)[leaves.kind_of]
    companion_of = {}
    for rank in set(ranks) - {-1}:
        fitting = [companion for companion in companions if fits_rank(companion, rank)]
        rows = np.flatnonzero(rank_of == rank).tolist()
        patterns = Rules([(companion.pattern, None) for companion in fitting])
        first = first_rules(patterns, [leaves.paths[row] for row in rows])
        for row in rows:
            if (index := first[leaves.paths[row]]) != UNMATCHED:
                companion_of[row] = fitting[index]
    return companion_of


def _resolved(companion: Companion, leaves: Leaves, row: int, base: str) -> Dims:
    """The dims of the leaf of this row."""
    if not callable(companion.dims):
        return companion.dims
    shape, of_base = (
        None if at is None else leaves.types[int(leaves.kind_of[at])].shape
        for at in (row, leaves.rows.get(base))
    )
    dims = tuple(companion.dims(shape or (), of_base))
    check_dims(dims)
    if len(dims) != len(shape or ()):
        raise ValueError(
            f"{leaves.paths[row]}: the dims of the companion {companion.pattern!r} are {dims} for "
            f"the shape {shape}; there must be one for each of its dimensions"
        )
    return dims


def _derived(leaf: LeafType, how: Derivation | None, min_size: int) -> LeafType:
    """The leaf with the rule that decides it: its base's, unless it is too small for any."""
    if how is None:
        return leaf
    is_small = how.rule >= 0 and prod(leaf.shape or ()) < min_size
    return leaf._replace(rule=NO_RULE_NEEDED if is_small else how.rule)


def dims_for(dims: Dims, rank: int, entries: int) -> tuple[Dim, ...]:
    """The dims of a leaf of this rank, where the spec of the base's rule has so many entries.

    Where all of the base's dimensions are taken, entries beyond the rank are too many for the base
    as well; they are taken along, so that the correction says what becomes of them.
    """
    named, is_open = named_dims(dims)
    if not is_open:
        return named
    following = max((dim for dim in named if isinstance(dim, int)), default=-1) + 1
    every = (*named, *range(following, following + max(rank, entries)))
    return (*every[:rank], *(dim for dim in every[rank:] if isinstance(dim, int) and dim < entries))


def dims_shown(dims: tuple[Dim, ...]) -> str:
    """(0, -, 'stage'): what a new array's dimensions are; - for those that are not cut."""
    return "(" + ", ".join("-" if dim is None else repr(dim) for dim in dims) + ")"


def grouped(keys: Iterable[_Key]) -> tuple[list[_Key], np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """The distinct keys in order, and per key the index of its equal among them."""
    numbers: dict[_Key, int] = {}
    column = [numbers.setdefault(key, len(numbers)) for key in keys]
    return list(numbers), np.array(column, np.int32)
