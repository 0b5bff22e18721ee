"""Which leaves companions find, and where they lead: to a base, and from there to the base of that.

Costs two more matches of each path, and a `re.sub` for each leaf that is found, on whatever mesh.
Must not know about rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from shardrules._matching.dialects import EFORMER
from shardrules._matching.rules import remembered_rules
from shardrules._planning.companion import (
    Companion,
    Dims,
    Link,
    Shape,
    Step,
    base_path,
    check_dims,
    fits_rank,
    named_dims,
)
from shardrules._planning.leaves import Leaves
from shardrules._planning.path_rules import NO_RULE_NEEDED, UNMATCHED, first_rules

__all__ = ["links_of"]


class _Place(NamedTuple):
    """Where a leaf has been led to so far."""

    row: int
    path: str
    shape: Shape | None
    """None if it is not known."""
    used: tuple[int, ...]
    """The companions that have led there; each leads once."""


def links_of(leaves: Leaves, companions: tuple[Companion, ...]) -> dict[int, tuple[Link, ...]]:
    """The links of each row that a companion finds, from the leaf on."""
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
    while found := _found(places, companions):
        places = []
        for place, number in found:
            companion = companions[number]
            base = base_path(companion, place.path)
            dims = _resolved(companion, place, shapes.get(base))
            rank = None if place.shape is None else len(place.shape)
            link = Link(companion, base, Step(dims, companion.blocks, rank))
            links[place.row] = (*links.get(place.row, ()), link)
            shape = shapes.get(base) or _shape_of_base(place.shape, dims)
            if shape is not None:
                shapes[base] = shape
            places.append(_Place(place.row, base, shape, (*place.used, number)))
    return links


def _found(places: Iterable[_Place], companions: tuple[Companion, ...]) -> list[tuple[_Place, int]]:
    """Each place that a companion finds, with the number of the first that does."""
    groups: dict[tuple[int | None, tuple[int, ...]], list[_Place]] = defaultdict(list)
    for place in places:
        groups[None if place.shape is None else len(place.shape), place.used].append(place)
    found: list[tuple[_Place, int]] = []
    for (rank, used), group in groups.items():
        fitting = [
            number
            for number, companion in enumerate(companions)
            if number not in used and _fits(companion, rank)
        ]
        pairs = [(companions[number].pattern, None) for number in fitting]
        first = first_rules(remembered_rules(pairs, EFORMER), [place.path for place in group])
        indices = ((place, first[place.path]) for place in group)
        found += [(place, fitting[index]) for place, index in indices if index != UNMATCHED]
    return found


def _fits(companion: Companion, rank: int | None) -> bool:
    if rank is not None:
        return fits_rank(companion, rank)
    return not callable(companion.dims) and named_dims(companion.dims)[1]


def _resolved(companion: Companion, place: _Place, of_base: Shape | None) -> Dims:
    """The dims of what the companion finds there."""
    if not callable(companion.dims):
        return companion.dims
    shape = place.shape or ()
    dims = tuple(companion.dims(shape, of_base))
    check_dims(dims)
    if len(dims) != len(shape):
        raise ValueError(
            f"{place.path}: the dims of the companion {companion.pattern!r} are {dims} for "
            f"the shape {shape}; there must be one for each of its dimensions"
        )
    return dims


@lru_cache(maxsize=4096)
def _shape_of_base(shape: Shape | None, dims: Dims) -> Shape | None:
    """The shape of a base that is not in the tree, if the leaf has all of its dimensions."""
    named, is_open = named_dims(dims)
    if shape is None or not is_open:
        return None
    following = max((dim for dim in named if isinstance(dim, int)), default=-1) + 1
    every = (*named, *range(following, following + len(shape)))
    sizes = {dim: size for dim, size in zip(every, shape, strict=False) if isinstance(dim, int)}
    return (
        tuple(sizes[dim] for dim in sorted(sizes)) if len(sizes) > max(sizes, default=-1) else None
    )
