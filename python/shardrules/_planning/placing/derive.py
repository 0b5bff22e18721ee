"""Derivation: which leaves follow the rule of another path, and in which of its dimensions.

Costs a match of each base, on whatever mesh. Must not know of optimizers, nor which libraries name
leaves in which ways.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from shardrules._matching.rules import Rules
from shardrules._planning.companion import Companion, Dims, Step, named_dims
from shardrules._planning.leaves import LeafType, Leaves
from shardrules._planning.path_rules import AMBIGUOUS, NO_RULE_NEEDED, UNMATCHED, first_rules
from shardrules._planning.placing.links import links_of
from shardrules._specs import Dim

__all__ = [
    "Derivation",
    "combined",
    "dims_for",
    "dims_shown",
    "grouped",
    "redecided",
    "with_companions",
]

_Key = TypeVar("_Key", bound=Hashable)
_T = TypeVar("_T")


class Derivation(NamedTuple):
    """The way in which leaves follow a base."""

    rule: int
    """The index of the base's rule; may be AMBIGUOUS."""
    steps: tuple[Step, ...]
    """From the leaf to the base: more than one where companions are combined."""


def with_companions(
    leaves: Leaves, rules: Rules, companions: tuple[Companion, ...], min_size: int
) -> tuple[Leaves, list[Derivation | None]]:
    """The leaves, those that companions find with the rules of their bases.

    Returns:
        (the leaves, per kind how they follow their bases or None)
    """
    if not companions:
        return leaves, [None] * len(leaves.types)
    links = links_of(leaves, companions)
    rule_of = first_rules(rules, {link.base for chain in links.values() for link in chain})
    derivation_of: dict[int, Derivation] = {}
    sources = list(leaves.paths)
    for row, chain in links.items():
        # The last base counts, or else the one before it.
        for end in range(len(chain), 0, -1):
            base = chain[end - 1].base
            if (rule := rule_of[base]) != UNMATCHED:
                derivation_of[row] = Derivation(rule, tuple(link.step for link in chain[:end]))
                sources[row] = base
                break
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
        links=links,
    )
    return found, [how for _, how in keys]


def redecided(leaves: Leaves, rules: Rules) -> Leaves:
    """The same leaves under other rules; the tree is not walked again.

    Raises:
        ValueError: The rules' dialect has other paths, or other leaves that need no rule.
    """
    before, after = leaves.paths_dialect, rules.dialect
    for name in ("keys", "separator", "hidden_key", "scalars"):
        if getattr(before, name) != getattr(after, name):
            raise ValueError(
                f"the dialect {after.name} has other {name} than {before.name}, whose paths these "
                "are: plan the tree itself with the rules"
            )
    first = first_rules(rules, leaves.paths)
    count = len(leaves.paths)
    rule_of = np.fromiter(map(first.__getitem__, leaves.paths), np.int64, count)
    needs_none = np.array([leaf.rule == NO_RULE_NEEDED for leaf in leaves.types], bool)
    rule_of[needs_none[leaves.kind_of]] = NO_RULE_NEEDED
    # AMBIGUOUS is the least that a rule's number is.
    pairs, kind_of = np.unique(
        leaves.kind_of * np.int64(len(rules) - AMBIGUOUS) + (rule_of - AMBIGUOUS),
        return_inverse=True,
    )
    types = [
        leaves.types[kind]._replace(rule=rule + AMBIGUOUS)
        for kind, rule in (divmod(pair, len(rules) - AMBIGUOUS) for pair in pairs.tolist())
    ]
    kind_of = kind_of.astype(np.int32)
    return Leaves(rules, leaves.tree, leaves.paths, leaves.paths, kind_of, types)


def _derived(leaf: LeafType, how: Derivation | None, min_size: int) -> LeafType:
    """The leaf with the rule that decides it: its base's, unless it is too small for any."""
    if how is None:
        return leaf
    is_small = how.rule >= 0 and prod(leaf.shape or ()) < min_size
    return leaf._replace(rule=NO_RULE_NEEDED if is_small else how.rule)


def combined(steps: tuple[Step, ...], entries: int) -> tuple[tuple[Dim, ...], tuple[int, ...]]:
    """The dims and blocks of a leaf, where the spec of the base's rule has so many entries."""
    dims: tuple[Dim, ...] = tuple(range(entries))
    blocks: tuple[int, ...] = ()
    for place, step in enumerate(reversed(steps)):
        known = dims if place == 0 else _without_end(dims, entries)
        named, _ = named_dims(step.dims)
        rank = len(named) + len(known) if step.rank is None else step.rank
        own = dims_for(step.dims, rank, len(known))
        blocks = tuple(
            _at(step.blocks, i, 1) * (_at(blocks, dim, 1) if isinstance(dim, int) else 1)
            for i, dim in enumerate(own)
        )
        dims = (
            own
            if place == 0
            else tuple(_at(known, dim, None) if isinstance(dim, int) else dim for dim in own)
        )
    return dims, blocks


def _without_end(dims: tuple[Dim, ...], entries: int) -> tuple[Dim, ...]:
    """The dims up to the last one that an axis cuts."""
    is_cut = [not (dim is None or (isinstance(dim, int) and dim >= entries)) for dim in dims]
    return dims[: max((place + 1 for place, cut in enumerate(is_cut) if cut), default=0)]


def _at(values: tuple[_T, ...], place: int, otherwise: _T) -> _T:
    return values[place] if place < len(values) else otherwise


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
