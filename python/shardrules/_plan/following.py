"""Companions followed: the leaves that they lead to other paths, and the dims of these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardrules._base.specs import Dim
from shardrules._plan.companions import (
    Companion,
    Dims,
    DimStep,
    Link,
    Shape,
    base_path,
    check_dims,
    fits_rank,
    named_dims,
)
from shardrules._plan.leaves import (
    NO_RULE_NEEDED,
    UNMATCHED,
    LeafType,
    Leaves,
    first_rules,
    grouped,
)
from shardrules._rules.dialects import EFORMER
from shardrules._rules.rules import Rules, remembered_rules


def with_companions(leaves: Leaves, rules: Rules, companions: tuple[Companion, ...]) -> Leaves:
    """Decide leaves that companions find by their bases' rules."""
    if not companions:
        return leaves
    links = links_of(leaves, companions)
    rule_of = first_rules(rules, {link.base for chain in links.values() for link in chain})
    none: tuple[int, tuple[DimStep, ...]] = UNMATCHED, ()
    decided = {}
    sources = list(leaves.paths)
    for row, chain in links.items():
        # The last base counts, or else the one before it.
        for end in range(len(chain), 0, -1):
            base = chain[end - 1].base
            if (rule := rule_of[base]) != UNMATCHED:
                decided[row] = rule, tuple(link.step for link in chain[:end])
                sources[row] = base
                break
    keys, kind_of = grouped(
        (kind, *decided.get(row, none)) for row, kind in enumerate(leaves.kind_of.tolist())
    )
    types = [
        _following(leaves.types[kind], rule, steps, rules.min_size) if steps else leaves.types[kind]
        for kind, rule, steps in keys
    ]
    return replace(
        leaves, sources=sources, kind_of=kind_of, types=types, companions=companions, links=links
    )


def _following(leaf: LeafType, rule: int, steps: tuple[DimStep, ...], min_size: int) -> LeafType:
    """Return the leaf with its base's rule, unless it is too small for any."""
    is_small = rule >= 0 and prod(leaf.shape or ()) < min_size
    return leaf._replace(rule=NO_RULE_NEEDED if is_small else rule, steps=steps)


class _Place(NamedTuple):
    """Place that companions have led a leaf to so far."""

    row: int
    path: str
    shape: Shape | None
    """None if it is not known."""
    used: tuple[int, ...]
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
    while led := _led(places, companions):
        places = []
        for place, number in led:
            companion = companions[number]
            base = base_path(companion, place.path)
            dims = dims_at(companion, place.path, place.shape, shapes.get(base))
            rank = None if place.shape is None else len(place.shape)
            link = Link(companion, base, DimStep(dims, rank))
            links[place.row] = (*links.get(place.row, ()), link)
            shape = shapes.get(base) or _shape_of_base(place.shape, dims)
            if shape is not None:
                shapes[base] = shape
            places.append(_Place(place.row, base, shape, (*place.used, number)))
    return links


def _led(places: Iterable[_Place], companions: tuple[Companion, ...]) -> list[tuple[_Place, int]]:
    """Pair each place that a companion finds with the number of the first that does."""
    groups: dict[tuple[int | None, tuple[int, ...]], list[_Place]] = defaultdict(list)
    for place in places:
        groups[None if place.shape is None else len(place.shape), place.used].append(place)
    led: list[tuple[_Place, int]] = []
    for (rank, used), group in groups.items():
        fitting = [
            number
            for number, companion in enumerate(companions)
            if number not in used and fits_rank(companion, rank)
        ]
        pairs = [(companions[number].pattern, None) for number in fitting]
        first = first_rules(remembered_rules(pairs, EFORMER), [place.path for place in group])
        indices = ((place, first[place.path]) for place in group)
        led += [(place, fitting[index]) for place, index in indices if index != UNMATCHED]
    return led


def dims_at(companion: Companion, path: str, shape: Shape | None, of_base: Shape | None) -> Dims:
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
    named, is_open = named_dims(dims)
    if shape is None or not is_open:
        return None
    all_dims = _closed(named, len(shape))
    sizes = {dim: size for dim, size in zip(all_dims, shape, strict=False) if isinstance(dim, int)}
    return (
        tuple(sizes[dim] for dim in sorted(sizes)) if len(sizes) > max(sizes, default=-1) else None
    )


def _closed(named: tuple[Dim, ...], count: int) -> tuple[Dim, ...]:
    """Return the dims with `count` of those that an ellipsis after them stands for."""
    following = max((dim for dim in named if isinstance(dim, int)), default=-1) + 1
    return (*named, *range(following, following + count))


def combined(steps: tuple[DimStep, ...], entries: int) -> tuple[Dim, ...]:
    """Combine steps to a leaf's dims; the base's spec has that many entries."""
    dims: tuple[Dim, ...] = tuple(range(entries))
    for place, step in enumerate(reversed(steps)):
        before = dims if place == 0 else _without_end(dims, entries)
        named, _ = named_dims(step.dims)
        rank = len(named) + len(before) if step.rank is None else step.rank
        dims = _dims_for(step.dims, rank, len(before))
        if place:
            dims = tuple(
                dim if not isinstance(dim, int) else before[dim] if dim < len(before) else None
                for dim in dims
            )
    return dims


def _without_end(dims: tuple[Dim, ...], entries: int) -> tuple[Dim, ...]:
    """Return the dims up to the last one that an axis cuts."""
    is_cut = [not (dim is None or (isinstance(dim, int) and dim >= entries)) for dim in dims]
    return dims[: max((place + 1 for place, cut in enumerate(is_cut) if cut), default=0)]


def _dims_for(dims: Dims, rank: int, entries: int) -> tuple[Dim, ...]:
    """Return the dims of a leaf of this rank; the base's spec has that many entries.

    Surplus entries are kept, so that the correction reports them.
    """
    named, is_open = named_dims(dims)
    if not is_open:
        return named
    dims = _closed(named, max(rank, entries))
    return (*dims[:rank], *(dim for dim in dims[rank:] if isinstance(dim, int) and dim < entries))


def dims_shown(dims: tuple[Dim, ...]) -> str:
    """Format the dims of an array as (0, -, 'stage'); - for those that are not cut."""
    return "(" + ", ".join("-" if dim is None else repr(dim) for dim in dims) + ")"
