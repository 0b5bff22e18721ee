"""Cuts of arrays: by the shardings of a step's arguments, and by those of factors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from shardrules._base.specs import entries_of, entry_axes
from shardrules._program.step.jaxprs import Cuts, inputs_of

if TYPE_CHECKING:
    from shardrules._program.step.factors import Factors, Rule
    from shardrules._program.step.step import Step


def argument_cuts(step: Step) -> list[Cuts | None]:
    """Return the cuts of each argument's leaf: its own, or those that the jitted step gives."""
    leaves = [leaf for tree in step._trees for leaf in inputs_of(tree, step._function)]
    own = [_sharding_cuts(getattr(leaf, "sharding", None)) for leaf in leaves]
    shardings = () if step._call is None else step._call.params.get("in_shardings", ())
    if len(shardings) != len(own):
        return own
    by_call = map(_sharding_cuts, shardings)
    return [default if row is None else row for row, default in zip(own, by_call, strict=True)]


def constraint_cuts(eqn: Any) -> Cuts | None:
    """Return the cuts that a constraint in the program gives its array; None if nothing says."""
    return _sharding_cuts(eqn.params.get("sharding") or eqn.params.get("dst_sharding"))


def _sharding_cuts(sharding: Any) -> Cuts | None:
    spec = getattr(sharding, "spec", None)
    return None if spec is None else tuple(map(entry_axes, entries_of(spec)))


def factor_cuts(
    rule: Rule, dims: Sequence[Factors], cuts: Cuts, sizes: Mapping[str, int]
) -> dict[int, tuple[str, ...]]:
    """Return by factor the axes that cut an array of these dimensions."""
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
                if gcd(left, size) < size:
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
