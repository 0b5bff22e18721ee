"""Classes of dimensions that must be sharded alike: a union of dimensions that can be split."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from shardrules._program.step.factors import Factors, Rule

Dims = tuple[int, ...]
"""Numbers of the dimensions of an array."""


class Dimensions:
    """Dimensions of the arrays of a step, united where an operation makes them the same one.

    A dimension may consist of others, as 4096 of 32 heads x 128 after a reshape: what they are
    united with is split alike. Classes are dimensions that consist of no others.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._same: list[int] = []
        self._consists_of: dict[int, Dims] = {}
        self.parts: list[tuple[int, int]] = []
        """Pairs of dimensions of which one is a part of the other."""

    def new(self, size: int) -> int:
        self.sizes.append(size)
        self._same.append(len(self._same))
        return len(self._same) - 1

    def shape(self, sizes: Iterable[int]) -> Dims:
        """Return new dimensions of these sizes."""
        return tuple(map(self.new, sizes))

    def first(self, dim: int) -> int:
        """Return the first of the dimensions that are united with one."""
        same = self._same
        while same[dim] != dim:
            same[dim] = same[same[dim]]
            dim = same[dim]
        return dim

    def classes(self, dim: int) -> Dims:
        """Return the classes that a dimension consists of, the major one first."""
        dim = self.first(dim)
        if dim not in self._consists_of:
            return (dim,) if self.sizes[dim] > 1 else ()
        return tuple(c for part in self._consists_of[dim] for c in self.classes(part))

    def unite(self, dim: int, other: int) -> None:
        """Make two dimensions of one size the same."""
        dim, other = self.first(dim), self.first(other)
        if dim == other or self.sizes[dim] != self.sizes[other]:
            return
        if other in self._consists_of and dim in self._consists_of:
            self._unite_parts(self.classes(dim), self.classes(other))
        # The parts may have been united with the whole meanwhile.
        dim, other = self.first(dim), self.first(other)
        if dim == other:
            return
        if dim not in self._consists_of:
            dim, other = other, dim
        self._same[other] = dim

    def unite_all(self, dims: Iterable[int], others: Iterable[int]) -> None:
        """Make the dimensions of two arrays the same."""
        for dim, other in zip(dims, others, strict=True):
            self.unite(dim, other)

    def divided(self, dim: int, sizes: Iterable[int]) -> Dims:
        """Return the dimensions of these sizes that a dimension consists of."""
        parts = self.shape(sizes)
        self.unite(dim, self.product(parts))
        return parts

    def product(self, parts: Dims) -> int:
        """Return the dimension that consists of these, the major one first."""
        whole = self.new(prod(self.sizes[part] for part in parts))
        self._consists_of[whole] = parts
        return whole

    def _unite_parts(self, left: Dims, right: Dims) -> None:
        """Unite what two dimensions consist of, which is split where it does not align."""
        lefts, rights = list(reversed(left)), list(reversed(right))
        while lefts and rights:
            a, b = self.first(lefts.pop()), self.first(rights.pop())
            if a == b:
                continue
            small, large = sorted((a, b), key=self.sizes.__getitem__)
            size, rest = divmod(self.sizes[large], self.sizes[small])
            if rest:  # such as 2 x 3 and 3 x 2, which no sharding of both cuts alike
                return
            if size == 1:
                self.unite(a, b)
                continue
            if large in self._consists_of:
                return
            major, minor = self.shape((self.sizes[small], size))
            self._consists_of[large] = (major, minor)
            self.unite(small, major)
            (lefts if large == a else rights).append(minor)

    def apply(self, rule: Rule, operands: list[Dims]) -> list[Dims]:
        """Unite the dimensions of operands by a rule, and return those of the results."""
        dims: list[int] = [-1] * len(rule.sizes)
        for operand, of_dims in zip(operands, rule.operands, strict=True):
            for dim, factors in zip(operand, of_dims, strict=True):
                if not factors:
                    continue
                sizes = [rule.sizes[factor] for factor in factors]
                if prod(sizes) != self.sizes[dim]:
                    continue
                parts = (dim,) if len(factors) == 1 else self.divided(dim, sizes)
                for factor, part in zip(factors, parts, strict=True):
                    if dims[factor] < 0:
                        dims[factor] = part
                    elif dims[factor] != part:
                        self.unite(dims[factor], part)
        for factor, size in enumerate(rule.sizes):
            if dims[factor] < 0:
                dims[factor] = self.new(size)
        self.parts += [(dims[a], dims[b]) for a, b in rule.parts]
        return [tuple([self._of(factors, dims) for factors in result]) for result in rule.results]

    def _of(self, factors: Factors, dims: list[int]) -> int:
        if len(factors) == 1:
            return dims[factors[0]]
        return self.product(tuple(dims[factor] for factor in factors)) if factors else self.new(1)
