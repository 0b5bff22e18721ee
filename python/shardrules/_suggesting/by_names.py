"""A table of logical axis names: the mesh axes of each, by what the name's dimensions are.

Costs what the search for the table costs. Must not know how the mesh was chosen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._format import brief
from shardrules._logical.rules import LogicalRules
from shardrules._suggesting.tables import Axes, NamedArray, TableSearch

if TYPE_CHECKING:
    from shardrules._logical.dialects import LogicalDialect
    from shardrules._suggesting.units import Unit

__all__ = ["NameRule", "name_rules", "rules_of"]

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
