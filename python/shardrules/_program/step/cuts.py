"""Cuts of arrays: by the shardings of a step's arguments and results, and by those of factors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from shardrules._base.specs import entries_of, entry_axes
from shardrules._plan.plan import Plan

if TYPE_CHECKING:
    from shardrules._program.step.factors import Factors, Rule

Cuts = tuple[tuple[str, ...], ...]
"""The mesh axes that cut each dimension of an array."""


class SplitError(Exception):
    """An axis whose first devices cut a factor that all of them do not: 4 heads by 8 devices."""

    def __init__(self, axis: str, first: int) -> None:
        self.axis, self.first = axis, first


def argument_cuts(arg: Any, function: Any) -> Iterator[Cuts | None]:
    """Yield the cuts of each leaf of a function's argument; None if nothing says."""
    leaves = inputs_of(arg.abstract() if isinstance(arg, Plan) else arg, function)
    yield from (_sharding_cuts(getattr(leaf, "sharding", None)) for leaf in leaves)


def inputs_of(tree: Any, function: Any, values: Iterable[Any] | None = None) -> list[Any]:
    """Return the leaves that are inputs, or these values of leaves: of equinox the arrays alone."""
    from jax import Array, ShapeDtypeStruct, tree_util

    leaves = tree_util.tree_leaves(tree)
    is_filtered = type(function).__module__.startswith("equinox.")
    pairs = zip(leaves, leaves if values is None else values, strict=True)
    kinds = Array | ShapeDtypeStruct
    return [value for leaf, value in pairs if not is_filtered or isinstance(leaf, kinds)]


def call_cuts(call: Any, name: str, count: int) -> list[Cuts | None]:
    """Return the cuts of what goes into a call, or comes out, by its `in_shardings` and so on."""
    shardings = () if call is None else call.params.get(name, ())
    return [*map(_sharding_cuts, shardings)] if len(shardings) == count else [None] * count


def _sharding_cuts(sharding: Any) -> Cuts | None:
    spec = getattr(sharding, "spec", None)
    return None if spec is None else tuple(map(entry_axes, entries_of(spec)))


def factor_cuts(
    rule: Rule, dims: Sequence[Factors], cuts: Cuts, sizes: Mapping[str, int], *, may_split: bool
) -> dict[int, tuple[str, ...]]:
    """Return by factor the axes that cut an array of these dimensions.

    Raises:
        SplitError: Only the first devices of an axis cut a factor, and axes may be split.
    """
    of_factors: dict[int, tuple[str, ...]] = {}
    for factors, names in zip(dims, cuts, strict=bool(cuts)):
        if not names or not factors:
            continue
        rows: dict[int, tuple[str, ...]] = {}
        place, left = 0, rule.sizes[factors[0]]
        for name in names:
            if left == 1 and place < len(factors) - 1:
                place, left = place + 1, rule.sizes[factors[place + 1]]
            size = sizes[name]
            if place < len(factors) - 1:  # parts of the minor factors are in one of the major
                kept = gcd(left, size)
                if 1 < kept < size and may_split:
                    raise SplitError(name, kept)
                if kept < size:
                    break
                left //= size
            rows[factors[place]] = (*rows.get(factors[place], ()), name)
        of_factors = rows | of_factors
    return of_factors


def array_cuts(dims: Iterable[Factors], axes: Mapping[int, tuple[str, ...]]) -> Cuts:
    """Return the cuts of an array by those of its factors."""
    return tuple(
        axes.get(factors[0], ())
        if len(factors) == 1
        else tuple(a for f in factors for a in axes.get(f, ()))
        for factors in dims
    )


def fitting_cuts(
    axes: Iterable[str], places: Iterable[int | None], rule: Rule, sizes: Mapping[str, int]
) -> dict[int, tuple[str, ...]]:
    """Return by factor the axes that are put there, without those of more devices than it has."""
    by_factor: dict[int, tuple[str, ...]] = {}
    for axis, factor in zip(axes, places, strict=True):
        if factor is not None:
            row = (*by_factor.get(factor, ()), axis)
            if prod(sizes[name] for name in row) <= rule.sizes[factor]:
                by_factor[factor] = row
    return by_factor


def closed_factors(
    rule: Rule, axes: Mapping[int, tuple[str, ...]], sizes: Mapping[str, int]
) -> frozenset[int]:
    """Return the factors that devices cannot share if these axes cut the others.

    They need all of it; or parts of a minor one are not contiguous in a dimension, since its major
    is not cut into single elements.
    """
    if not rule.minor.intersection(axes):
        return rule.whole
    closed = set(rule.whole)
    for dims in (*rule.operands, *rule.results):
        for row in dims:
            for before, factor in pairwise(row):
                count = prod(sizes[axis] for axis in axes.get(before, ()))
                if before in closed or count != rule.sizes[before]:
                    closed.add(factor)
    return frozenset(closed)
