"""Bases: the paths whose rules the leaves follow that companions find, and the dims of these."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardrules._base.specs import Dim
from shardrules._plan.companions import Companion, Dims, DimStep, Link, Shape, check_dims
from shardrules._plan.leaves import NO_RULE_NEEDED, UNMATCHED, Leaves, first_rules, grouped
from shardrules._rules.dialects import EFORMER
from shardrules._rules.rules import Rules, remembered_rules


def with_companions(leaves: Leaves, rules: Rules, companions: tuple[Companion, ...]) -> Leaves:
    """Decide leaves that companions find by their bases' rules."""
    if not companions:
        return leaves
    links = links_of(leaves, companions)
    rule_of = first_rules(rules, {link.base for chain in links.values() for link in chain})
    none: tuple[int, tuple[DimStep, ...]] = UNMATCHED, ()
    rule_and_steps = {}
    sources = list(leaves.paths)
    for row, chain in links.items():
        # The last base counts, or else the one before it.
        ends = range(len(chain), 0, -1)
        if end := next((end for end in ends if rule_of[chain[end - 1].base] != UNMATCHED), 0):
            sources[row] = chain[end - 1].base
            steps = tuple([link.step for link in chain[:end]])
            rule_and_steps[row] = rule_of[sources[row]], steps
    keys, kind_of = grouped(
        (kind, *rule_and_steps.get(row, none)) for row, kind in enumerate(leaves.kind_of.tolist())
    )
    types = []
    for kind, rule, steps in keys:
        leaf = leaves.types[kind]
        if steps:  # unless it is too small for any rule
            is_small = rule >= 0 and prod(leaf.shape or ()) < rules.min_size
            leaf = leaf._replace(rule=NO_RULE_NEEDED if is_small else rule, steps=steps)
        types.append(leaf)
    return replace(
        leaves, sources=sources, kind_of=kind_of, types=types, companions=companions, links=links
    )


class _Place(NamedTuple):
    """Place that companions have led a leaf to so far."""

    row: int
    path: str
    shape: Shape | None
    """None if it is not known."""
    trail: tuple[int, ...]
    """The companions that have led there; each leads once."""


def links_of(leaves: Leaves, companions: tuple[Companion, ...]) -> dict[int, tuple[Link, ...]]:
    """Return the links of each row that a companion finds, from the leaf on."""
    types = [leaves.types[kind] for kind in leaves.kind_of.tolist()]
    shapes: dict[str, Shape | None] = {
        path: leaf.shape for path, leaf in zip(leaves.paths, types, strict=True)
    }
    places: Iterable[_Place] = (
        _Place(row, path, leaf.shape, ())
        for row, (path, leaf) in enumerate(zip(leaves.paths, types, strict=True))
        if leaf.shape is not None and leaf.rule != NO_RULE_NEEDED
    )
    links: dict[int, tuple[Link, ...]] = {}
    while pairs := _first_companions(places, companions):
        places = []
        for place, number in pairs:
            companion = companions[number]
            base = re.sub(companion.pattern, companion.base, place.path, count=1)
            dims = _dims_of(companion, place.path, place.shape, shapes.get(base))
            rank = None if place.shape is None else len(place.shape)
            link = Link(companion, base, DimStep(dims, rank))
            links[place.row] = (*links.get(place.row, ()), link)
            shape = shapes.get(base) or _shape_of_base(place.shape, dims)
            if shape is not None:
                shapes[base] = shape
            places.append(_Place(place.row, base, shape, (*place.trail, number)))
    return links


def _first_companions(
    places: Iterable[_Place], companions: tuple[Companion, ...]
) -> list[tuple[_Place, int]]:
    """Pair each place that a companion finds with the number of the first that does."""
    groups: dict[tuple[int | None, tuple[int, ...]], list[_Place]] = defaultdict(list)
    for place in places:
        groups[None if place.shape is None else len(place.shape), place.trail].append(place)
    pairs: list[tuple[_Place, int]] = []
    for (rank, trail), group in groups.items():
        numbers = [
            number
            for number, companion in enumerate(companions)
            if number not in trail and _fits_rank(companion, rank)
        ]
        patterns = [(companions[number].pattern, None) for number in numbers]
        first = first_rules(remembered_rules(patterns, EFORMER), [place.path for place in group])
        indices = ((place, first[place.path]) for place in group)
        pairs += [(place, numbers[index]) for place, index in indices if index != UNMATCHED]
    return pairs


def _fits_rank(companion: Companion, rank: int | None) -> bool:
    """Tell whether leaves of this rank can follow their base so; None if it is not known."""
    if callable(companion.dims):
        return rank is not None
    named, is_open = _named_dims(companion.dims)
    if rank is None:
        return is_open
    # There must be a place for each dimension that the base does not have.
    return all(isinstance(dim, int) for dim in named[rank:]) if is_open else len(named) == rank


def _dims_of(companion: Companion, path: str, shape: Shape | None, of_base: Shape | None) -> Dims:
    """Return the dims of the leaf that a companion finds."""
    if not callable(companion.dims):
        return companion.dims
    dims = tuple(companion.dims(shape or (), of_base))
    check_dims(dims)
    if len(dims) != len(shape or ()):
        raise ValueError(
            f"{path}: the dims of the companion {companion.pattern!r} are {dims} for "
            f"the shape {shape}; there must be one for each of its dimensions"
        )
    return dims


@lru_cache(maxsize=4096)
def _shape_of_base(shape: Shape | None, dims: Dims) -> Shape | None:
    """Return the shape of a base outside the tree, if the leaf has all of its dimensions."""
    named, is_open = _named_dims(dims)
    if shape is None or not is_open:
        return None
    all_dims = _closed(named, len(shape))
    sizes = {dim: size for dim, size in zip(all_dims, shape, strict=False) if isinstance(dim, int)}
    return (
        tuple(sizes[dim] for dim in sorted(sizes)) if len(sizes) > max(sizes, default=-1) else None
    )


def combined(steps: tuple[DimStep, ...], entries: int) -> tuple[Dim, ...]:
    """Combine steps to a leaf's dims; the base's spec has that many entries.

    Surplus entries are kept, so that the correction reports them.
    """
    dims: tuple[Dim, ...] | None = None
    for step in reversed(steps):
        named, is_open = _named_dims(step.dims)
        before = entries if dims is None else len(dims)
        rank = len(named) + before if step.rank is None else step.rank
        leaf_dims = _closed(named, max(rank, before)) if is_open else named
        if dims is not None:
            bases = dict(enumerate(dims))
            leaf_dims = tuple(bases.get(d) if isinstance(d, int) else d for d in leaf_dims)
        if is_open:
            surplus = (d for d in leaf_dims[rank:] if isinstance(d, int) and d < entries)
            leaf_dims = (*leaf_dims[:rank], *surplus)
        dims = leaf_dims
    return dims or ()


def _closed(named: tuple[Dim, ...], count: int) -> tuple[Dim, ...]:
    """Return the dims with `count` of those that an ellipsis after them stands for."""
    following = max((dim for dim in named if isinstance(dim, int)), default=-1) + 1
    return (*named, *range(following, following + count))


def _named_dims(dims: Dims) -> tuple[tuple[Dim, ...], bool]:
    """Return the dims before the ellipsis, and whether there is one."""
    named = tuple(dim for dim in dims if dim is not ...)
    return named, len(named) < len(dims)
