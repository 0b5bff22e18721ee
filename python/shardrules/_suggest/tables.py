"""A table of logical axis names: the mesh axes of each, by what the name's dimensions are.

Costs what the search for the table costs. Must not know how the mesh was chosen.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._plan.axis_uses import uses_of
from shardrules._plan.table import DEFAULT_LARGE
from shardrules._rules.logical_rules import LogicalRules
from shardrules._suggest.choose import SLACK, Cuts, discomfort_of, parts_of_cuts
from shardrules._text import brief

if TYPE_CHECKING:
    from shardrules._plan.axis_uses import AxisUse
    from shardrules._rules.dialects import LogicalDialect
    from shardrules._suggest.dims import Dims, Side, Unit

Axes = tuple[str, ...]
Table = dict[str, Axes]

# The order of rules: of names with the same axes, the first gets them in an array.
_ORDER: Final[tuple[Side, ...]] = (
    "experts", "vocabulary", "heads", "inner", "outer", "head", "fused", "window", "vector",
    "layers", "one",
)  # fmt: skip
# The discomfort of a large array that is replicated, which `Plan.check` warns of.
_WHOLE: Final = 50
# What experts have the axes cut.
_USUAL: Final[dict[AxisUse, frozenset[Side]]] = {
    "fsdp": frozenset({"outer"}),
    "tensor": frozenset({"inner", "heads", "vocabulary"}),
    "experts": frozenset({"experts", "outer"}),
    "layers": frozenset({"layers"}),
    "data": frozenset(),
}


class NamedArray(NamedTuple):
    """Arrays that are alike."""

    names: tuple[object, ...]
    shape: tuple[int, ...]
    dims: Dims

    def named(self) -> Iterator[tuple[int, str]]:
        """The dimensions with names."""
        pairs = enumerate(self.names[: len(self.shape)])
        return ((dim, name) for dim, name in pairs if isinstance(name, str))


class _Price(NamedTuple):
    """What a table costs."""

    bytes: int
    discomfort: int


# By the axes of an array's names; and the array with these names.
_Prices = dict[tuple[Axes, ...], _Price | None]
_Priced = tuple[NamedArray, tuple[str, ...], _Prices]


class TableSearch:
    """Tables for these arrays on a mesh."""

    def __init__(
        self,
        arrays: Mapping[NamedArray, list[Unit]],
        axis_sizes: Mapping[str, int],
        *,
        shares_axes: bool,
    ) -> None:
        self._bytes = {one: sum(unit.bytes for unit in of) for one, of in arrays.items()}
        self._large = {
            one
            for one, of in arrays.items()
            if any(unit.bytes // unit.part.leaves >= DEFAULT_LARGE for unit in of)
        }
        self._sizes = axis_sizes
        self._uses = uses_of(axis_sizes)
        self._shares_axes = shares_axes
        self._prices: dict[NamedArray, _Prices] = {one: {} for one in arrays}
        self._priced: dict[tuple[str, ...], list[_Priced]] = {}
        self._with_name: dict[str, list[NamedArray]] = defaultdict(list)
        for one in arrays:
            for _, name in one.named():
                self._with_name[name].append(one)
        self._sides = {name: self._side(name) for name in self._with_name}
        self.names = sorted(self._sides, key=lambda name: _ORDER.index(self._sides[name]))
        self._place = {name: place for place, name in enumerate(self.names)}
        used = [a for a, size in axis_sizes.items() if size > 1 and self._uses[a] != "data"]
        every = [axes for n in range(len(used) + 1) for axes in itertools.combinations(used, n)]
        none: Table = dict.fromkeys(self.names, ())
        self._options = {
            name: [axes for axes in every if self._price((name,), none | {name: axes})]
            for name in self.names
        }
        pairs = {
            tuple(sorted(pair, key=self._place.__getitem__))
            for one in arrays
            for pair in itertools.combinations([name for _, name in one.named()], 2)
        }
        self._moves: list[tuple[str, ...]] = [(name,) for name in self.names] + sorted(pairs)

    def _side(self, name: str) -> Side:
        """What most dimensions of the name are; of biases and norms only if it has no others."""
        dims = [(one, dim) for one in self._with_name[name] for dim, n in one.named() if n == name]
        of_kernels = [one for one in dims if not one[0].dims.is_vector] or dims
        sides: Counter[Side] = Counter(one.dims.sides[dim] for one, dim in of_kernels)
        return sides.most_common(1)[0][0]

    def usual(self) -> Table:
        """The table that experts would write, as far as arrays can be cut so."""
        table: Table = dict.fromkeys(self.names, ())
        for name in self.names:
            wanted = [a for a in self._sizes if self._sides[name] in _USUAL[self._uses[a]]]
            for axes in sorted(self._options[name], key=len, reverse=True):
                changed = table | {name: axes}
                if {*axes} <= {*wanted} and self._price((name,), changed):
                    table = changed
                    break
        return table

    def smallest(self, table: Table) -> Table:
        """Fewer bytes, as long as another choice for two names saves some."""
        while True:
            before = table
            for names in self._moves:
                changed, price = min(self._changes(names, table), key=lambda one: one[1])
                if price != self._price(names, table):
                    table = changed
            if table == before:
                return table

    def comfortable(self, table: Table) -> Table:
        """More comfort, the cheapest first, while that costs hardly any bytes."""
        held = self._price(tuple(self.names), table)
        slack = SLACK * held.bytes if held else 0
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
            cost, _, table = min(steps, key=lambda one: one[:2])
            slack -= cost

    def _changes(self, names: tuple[str, ...], table: Table) -> Iterator[tuple[Table, _Price]]:
        for axes in itertools.product(*map(self._options.__getitem__, names)):
            changed = table | dict(zip(names, axes, strict=True))
            if price := self._price(names, changed):
                yield changed, price

    def _price(self, names: tuple[str, ...], table: Table) -> _Price | None:
        """The price of the arrays with one of the names; None if some cannot be cut so."""
        held = discomfort = 0
        for one, own, prices in self._with_one_of(names):
            key = tuple([table[name] for name in own])
            if key not in prices:
                prices[key] = self._price_of(one, table)
            price = prices[key]
            if price is None:
                return None
            held += price.bytes
            discomfort += price.discomfort
        return _Price(held, discomfort)

    def _with_one_of(self, names: tuple[str, ...]) -> list[_Priced]:
        if names not in self._priced:
            arrays = dict.fromkeys(one for name in names for one in self._with_name[name])
            self._priced[names] = [
                (one, tuple(name for _, name in one.named()), self._prices[one]) for one in arrays
            ]
        return self._priced[names]

    def _price_of(self, one: NamedArray, table: Table) -> _Price | None:
        cuts = self.cuts(one, table)
        if cuts is None:
            return None
        found = discomfort_of(one.shape, one.dims, cuts, self._sizes, self._uses)
        # Biases and norms are cut as the kernels are whose names they have.
        of_kernels = all(self._sides[n] != "vector" for dim, n in one.named() if cuts[dim])
        follows = one.dims.is_vector and of_kernels
        parts = parts_of_cuts(cuts, self._sizes)
        whole = _WHOLE if parts == 1 and one in self._large else 0
        # A name that does not get its axes is hard to read.
        lost = sum(len(table[name]) - len(cuts[dim]) for dim, name in one.named())
        price = _Price(self._bytes[one] // parts, lost + (0 if follows else found or whole))
        return None if found is None else price

    def cuts(self, one: NamedArray, table: Table) -> Cuts | None:
        """The axes that each dimension gets; None if two need the same one."""
        found: list[Axes] = [()] * len(one.shape)
        taken: set[str] = set()
        for dim, name in sorted(one.named(), key=lambda pair: self._place[pair[1]]):
            wanted = table[name]
            if not self._shares_axes and not taken.isdisjoint(wanted):
                return None
            while not taken.isdisjoint(wanted):
                wanted = wanted[:-1]
            found[dim] = wanted
            taken.update(wanted)
        return tuple(found)


_MOST_NAMES: Final = 300


class NameRule(NamedTuple):
    """A rule of the table."""

    name: str
    axes: Axes
    dims: tuple[tuple[Unit, int], ...]
    """The dimensions that it decides, each of all leaves of a unit."""


def rules_of(rules: Iterable[NameRule], dialect: LogicalDialect) -> LogicalRules:
    """The rules as they are written: an axis, several, or None."""
    pairs = [(one.name, one.axes[0] if len(one.axes) == 1 else one.axes or None) for one in rules]
    return LogicalRules(pairs, dialect)


def name_rules(
    units: list[Unit], axis_sizes: Mapping[str, int], dialect: LogicalDialect
) -> list[NameRule]:
    """A rule, or more, for each name; first that of the names which get their axes first.

    Raises:
        ValueError: There are too many names.
    """
    found: dict[NamedArray, list[Unit]] = defaultdict(list)
    for unit in units:
        # Keys may share a name with queries: only heads whose size is known bind it.
        dims = unit.dims._replace(unit=1) if unit.dims.is_assumed else unit.dims
        found[NamedArray(unit.names, unit.part.shape, dims)].append(unit)
    names = {name for one in found for _, name in one.named()}
    if len(names) > _MOST_NAMES:
        raise ValueError(
            f"the arrays have {len(names):,} logical axis names, such as {brief(min(names))}; a "
            f"table of more than {_MOST_NAMES} is none: give what is alike one name"
        )
    search = TableSearch(found, axis_sizes, shares_axes=not dialect.last_wins)
    table = search.comfortable(search.smallest(search.usual()))
    won: dict[tuple[str, Axes], list[tuple[Unit, int]]] = defaultdict(list)
    for one, alike in found.items():
        cuts = search.cuts(one, table)
        for dim, name in one.named():
            if cuts is not None and (cuts[dim] or not table[name]):
                won[name, cuts[dim]] += [(unit, dim) for unit in alike]
    rules = []
    for name in search.names:
        decided = sorted((axes for of, axes in won if of == name), key=len, reverse=True)
        rules += [NameRule(name, axes, tuple(won[name, axes])) for axes in decided or [()]]
    return rules
