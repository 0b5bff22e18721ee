"""Writes a table of logical axis names: mesh axes by the roles of each name's dimensions."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._base.specs import entry_of
from shardrules._base.text import brief
from shardrules._plan.axis_uses import AxisUse, uses_of
from shardrules._plan.table import DEFAULT_LARGE
from shardrules._rules.logical_rules import LogicalRules
from shardrules._writer.choose import SLACK, Axes, Cuts, discomfort_of, shard_count

if TYPE_CHECKING:
    from shardrules._rules.dialects import LogicalDialect
    from shardrules._writer.dims import Dims, Side, Unit

_Table = dict[str, Axes]

# The order of rules: of names with the same axes, the first gets them in an array.
_ORDER: Final[tuple[Side, ...]] = (
    "experts", "vocabulary", "heads", "hidden", "residual", "head", "fused", "window", "vector",
    "layers", "other",
)  # fmt: skip
# The discomfort of a large array that is replicated, which `Plan.check` warns of.
_WHOLE: Final = 50
# Sides that experts shard by the axes.
_USUAL: Final[dict[AxisUse, frozenset[Side]]] = {
    "fsdp": frozenset({"residual"}),
    "tensor": frozenset({"hidden", "heads", "vocabulary"}),
    "experts": frozenset({"experts", "residual"}),
    "layers": frozenset({"layers"}),
    "data": frozenset(),
}
_MOST_NAMES: Final = 300


class NamedArray(NamedTuple):
    """Arrays with equal names, shape and roles of dimensions."""

    names: tuple[object, ...]
    shape: tuple[int, ...]
    dims: Dims

    def named(self) -> Iterator[tuple[int, str]]:
        """Yield the dimensions with names."""
        pairs = enumerate(self.names[: len(self.shape)])
        return ((dim, name) for dim, name in pairs if isinstance(name, str))


class _Price(NamedTuple):
    """Costs of a table."""

    bytes: int
    discomfort: int


_Priced = tuple[NamedArray, tuple[str, ...], dict[Cuts, _Price | None]]
"""Arrays with their names, and their prices by the axes of these names."""


class TableSearch:
    """Tables for these arrays on a mesh."""

    def __init__(
        self,
        arrays: Mapping[NamedArray, list[Unit]],
        axis_sizes: Mapping[str, int],
        *,
        shares_axes: bool,
    ) -> None:
        self._bytes = {array: sum(unit.bytes for unit in arrays[array]) for array in arrays}
        self._large = {
            array
            for array, units in arrays.items()
            if any(unit.bytes // unit.part.leaves >= DEFAULT_LARGE for unit in units)
        }
        self._sizes = axis_sizes
        self._uses = uses_of(axis_sizes)
        self._shares_axes = shares_axes
        priced: list[_Priced] = [(a, tuple(name for _, name in a.named()), {}) for a in arrays]
        self._with_name: dict[str, list[_Priced]] = defaultdict(list)
        for of_array in priced:
            for name in of_array[1]:
                self._with_name[name].append(of_array)
        self._with_names: dict[tuple[str, ...], list[_Priced]] = {}
        self._sides = {name: self._side(name) for name in self._with_name}
        self.names = sorted(self._sides, key=lambda name: _ORDER.index(self._sides[name]))
        self._place = {name: place for place, name in enumerate(self.names)}
        used = [a for a, size in axis_sizes.items() if size > 1 and self._uses[a] != "data"]
        subsets = [axes for n in range(len(used) + 1) for axes in itertools.combinations(used, n)]
        none: _Table = dict.fromkeys(self.names, ())
        self._options = {
            name: [axes for axes in subsets if self._price((name,), none | {name: axes})]
            for name in self.names
        }
        pairs = {
            tuple(sorted(pair, key=self._place.__getitem__))
            for _, names, _ in priced
            for pair in itertools.combinations(names, 2)
        }
        self._moves: list[tuple[str, ...]] = [(name,) for name in self.names] + sorted(pairs)

    def _side(self, name: str) -> Side:
        """Find the commonest role of the name; in biases and norms only if it has no others."""
        arrays = [array for array, *_ in self._with_name[name]]
        dims = [(array.dims, dim) for array in arrays for dim, n in array.named() if n == name]
        of_kernels = [pair for pair in dims if not pair[0].is_vector] or dims
        sides: Counter[Side] = Counter(of_array.sides[dim] for of_array, dim in of_kernels)
        return sides.most_common(1)[0][0]

    def usual(self) -> _Table:
        """Return the table that experts would write, as far as arrays can be sharded so."""
        table: _Table = dict.fromkeys(self.names, ())
        for name in self.names:
            usual = {a for a in self._sizes if self._sides[name] in _USUAL[self._uses[a]]}
            for axes in sorted(self._options[name], key=len, reverse=True):
                changed = table | {name: axes}
                if usual.issuperset(axes) and self._price((name,), changed):
                    table = changed
                    break
        return table

    def smallest(self, table: _Table) -> _Table:
        """Save bytes, as long as other axes for two names do."""
        while True:
            before = table
            for names in self._moves:
                changed, price = min(self._changes(names, table), key=lambda change: change[1])
                if price != self._price(names, table):
                    table = changed
            if table == before:
                return table

    def comfortable(self, table: _Table) -> _Table:
        """Lower discomfort, the cheapest first, while that costs hardly any bytes."""
        total = self._price(tuple(self.names), table)
        slack = SLACK * total.bytes if total else 0
        while True:
            steps = [
                (price.bytes - now.bytes, price.discomfort - now.discomfort, changed)
                for names in self._moves
                if (now := self._price(names, table))
                for changed, price in self._changes(names, table)
                if price.discomfort < now.discomfort and price.bytes - now.bytes <= slack
            ]
            if not steps:
                return table
            cost, _, table = min(steps, key=lambda step: step[:2])
            slack -= cost

    def _changes(self, names: tuple[str, ...], table: _Table) -> Iterator[tuple[_Table, _Price]]:
        for axes in itertools.product(*map(self._options.__getitem__, names)):
            changed = table | dict(zip(names, axes, strict=True))
            if price := self._price(names, changed):
                yield changed, price

    def _price(self, names: tuple[str, ...], table: _Table) -> _Price | None:
        """Price the arrays with one of the names; None if some cannot be sharded so."""
        if names not in self._with_names:
            arrays = {priced[0]: priced for name in names for priced in self._with_name[name]}
            self._with_names[names] = list(arrays.values())
        size = discomfort = 0
        for array, names_of_array, prices in self._with_names[names]:
            key = tuple([table[name] for name in names_of_array])
            if key not in prices:
                prices[key] = self._price_of(array, table)
            price = prices[key]
            if price is None:
                return None
            size += price.bytes
            discomfort += price.discomfort
        return _Price(size, discomfort)

    def _price_of(self, array: NamedArray, table: _Table) -> _Price | None:
        cuts = self.cuts(array, table)
        if cuts is None:
            return None
        discomfort = discomfort_of(array.shape, array.dims, cuts, self._sizes, self._uses)
        if discomfort is None:
            return None
        count = shard_count(cuts, self._sizes)
        # Biases and norms are sharded as the kernels are whose names they have.
        of_kernels = all(self._sides[n] != "vector" for dim, n in array.named() if cuts[dim])
        if array.dims.is_vector and of_kernels:
            discomfort = 0
        elif not discomfort and count == 1 and array in self._large:
            discomfort = _WHOLE
        # A name that does not get its axes is hard to read.
        lost = sum(len(table[name]) - len(cuts[dim]) for dim, name in array.named())
        return _Price(self._bytes[array] // count, lost + discomfort)

    def cuts(self, array: NamedArray, table: _Table) -> Cuts | None:
        """Return the axes of each dimension; None if two need the same one."""
        cuts: list[Axes] = [()] * len(array.shape)
        taken: set[str] = set()
        for dim, name in sorted(array.named(), key=lambda pair: self._place[pair[1]]):
            axes = table[name]
            if not self._shares_axes and not taken.isdisjoint(axes):
                return None
            while not taken.isdisjoint(axes):
                axes = axes[:-1]
            cuts[dim] = axes
            taken.update(axes)
        return tuple(cuts)


class NameRule(NamedTuple):
    """Rule of the table."""

    name: str
    axes: Axes
    dims: tuple[tuple[Unit, int], ...]
    """Dimensions that it decides, each of all leaves of a unit."""


def rules_of(rules: Iterable[NameRule], dialect: LogicalDialect) -> LogicalRules:
    """Make the rules: an axis, several, or None for each name."""
    return LogicalRules([(rule.name, entry_of(rule.axes)) for rule in rules], dialect)


def name_rules(
    units: list[Unit], axis_sizes: Mapping[str, int], dialect: LogicalDialect
) -> list[NameRule]:
    """Write a rule, or more, for each name; names that get their axes first come first."""
    arrays: dict[NamedArray, list[Unit]] = defaultdict(list)
    for unit in units:
        # Keys may share a name with queries: only heads whose size is known bind it.
        dims = unit.dims._replace(unit=1) if unit.dims.is_assumed else unit.dims
        arrays[NamedArray(unit.names, unit.part.shape, dims)].append(unit)
    names = {name for array in arrays for _, name in array.named()}
    if len(names) > _MOST_NAMES:
        raise ValueError(
            f"the arrays have {len(names):,} logical axis names, such as {brief(min(names))}; a "
            f"table of more than {_MOST_NAMES} is none: give what is alike one name"
        )
    search = TableSearch(arrays, axis_sizes, shares_axes=not dialect.last_wins)
    table = search.comfortable(search.smallest(search.usual()))
    won: dict[str, dict[Axes, list[tuple[Unit, int]]]] = {name: {} for name in search.names}
    for array, of_array in arrays.items():
        cuts = search.cuts(array, table)
        for dim, name in array.named():
            if cuts is not None and (cuts[dim] or not table[name]):
                won[name].setdefault(cuts[dim], []).extend((unit, dim) for unit in of_array)
    return [
        NameRule(name, axes, tuple(dims.get(axes, ())))
        for name, dims in won.items()
        for axes in sorted(dims, key=len, reverse=True) or [()]
    ]
