"""Rules for the leaves of a tree: their specs, and the patterns that tell them apart.

Costs what the choice of specs and the proof of patterns cost. Must not know how the mesh was
chosen, nor how rules are shown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardrules._correction import RuleSpec, plain_spec
from shardrules._plan.axis_uses import is_gathered, uses_of
from shardrules._plan.findings import NOTHING
from shardrules._plan.queries import Queries
from shardrules._plan.table import DEFAULT_LARGE
from shardrules._rules.patterns import MATCH_MODES
from shardrules._rules.rules import Rules
from shardrules._specs import Entries, entry_axes, fsdp
from shardrules._suggest.choose import Array, Cuts, choose, listed, proven, with_followers
from shardrules._suggest.dims import Unit, parted, with_rows
from shardrules._suggest.patterns import NUMBER, AmbiguousError, Label, phrases
from shardrules._text import brief

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.table import Columns
    from shardrules._rules.dialects import Dialect
    from shardrules._rules.patterns import Pattern
    from shardrules._suggest.patterns import Word


class Written(NamedTuple):
    """Rules for a tree, and why."""

    rules: Rules
    units: list[tuple[Unit, ...]]
    """Per rule the leaves that it was written for."""
    unknown: list[Unit]

    def whole_on_purpose(self, axis_sizes: Mapping[str, int]) -> list[int]:
        """Lists the rules whose leaves are whole on purpose.

        These are norms, biases and scalars; and what tensor axes are kept from, such as routers.
        """
        chosen = []
        for rule, ((_, value), units) in enumerate(zip(self.rules, self.units, strict=True)):
            spec = plain_spec(value)
            is_small = spec == Entries() and all(unit.dims.is_small for unit in units)
            may_be = all(unit.dims.tensor != "any" for unit in units)
            if is_small or (may_be and is_spared(spec, axis_sizes)):
                chosen.append(rule)
        return chosen

    def strays(self, rule_of: npt.NDArray[np.int32]) -> list[int]:
        """The rows that another rule decides than the one that was written for them."""
        wanted = rule_of.copy()
        for rule, units in enumerate(self.units):
            for unit in units:
                wanted[unit.folded.rows] = rule
        found: list[int] = np.flatnonzero(wanted != rule_of).tolist()
        return found


def is_spared(spec: Any, axis_sizes: Mapping[str, int]) -> bool:
    """Whether this spec of a leaf that tensor axes are kept from is meant.

    It is not if there are other axes for weights, and these do not cut it, either.
    """
    uses = {axis: use for axis, use in uses_of(axis_sizes).items() if axis_sizes[axis] > 1}
    if not isinstance(spec, Entries) or "tensor" not in uses.values():
        return False
    named = {uses[axis] for entry in spec for axis in entry_axes(entry) if axis in uses}
    others = {"fsdp", "experts"}.intersection(uses.values())
    return "tensor" not in named and bool(named or not others)


def written(
    units: list[Unit],
    axis_sizes: Mapping[str, int],
    dialect: Dialect,
    tightness: int = 0,
    entries: Mapping[tuple[str, ...], Any] | None = None,
) -> Written:
    """Rules for leaves that have none.

    Args:
        units: The leaves.
        axis_sizes: Those of the mesh.
        dialect: Of the rules.
        tightness: How tight patterns must be, as in `pattern_of`.
        entries: How other rules of the list write an entry of these axes: beside them they may name
            axes of one device, which are larger elsewhere.

    Raises:
        ValueError: The dialect's patterns cannot tell the paths apart.
    """
    uses = uses_of(axis_sizes)
    cuts = choose(
        [Array(unit.part.shape, unit.dims, unit.bytes) for unit in units], axis_sizes, uses
    )
    cuts = with_followers(units, cuts, axis_sizes)
    spared = {axis for axis, size in axis_sizes.items() if size > 1 and uses[axis] == "tensor"}
    labels = [_label(unit, of, spared, entries or {}) for unit, of in zip(units, cuts, strict=True)]
    units, labels = _told_apart(units, labels, dialect)
    pairs, of_rules, left = _worded(units, labels, dialect, tightness)
    if left:
        pairs.append(_safe(left, uses, dialect))
        of_rules.append(tuple(left))
    unknown = [unit for unit in units if not unit.dims.is_known]
    return Written(Rules(pairs, dialect), of_rules, unknown + left)


_Worded = tuple[list[tuple["Pattern", Any]], list[tuple[Unit, ...]], list[Unit]]


def _worded(
    units: list[Unit],
    labels: list[Label],
    dialect: Dialect,
    tightness: int,
) -> _Worded:
    """Rules, the units of each, and the units that have none, since they have too many names."""
    if MATCH_MODES[dialect.match[-1]].written_as == "text":
        pairs, of_rules = listed(units, labels)
        return pairs, of_rules, []
    try:
        said, left = phrases(
            [unit.words for unit in units], labels, [_place(unit) for unit in units]
        )
    except AmbiguousError as error:
        one, other, *_ = (units[number] for number in error.units)
        raise ValueError(
            f"two leaves have the path {brief(one.path)}, with the shapes {one.part.shape} and "
            f"{other.part.shape}: rename one"
        ) from None
    pairs, of_rules = proven(said, units, dialect, tightness)
    return pairs, of_rules, [units[number] for number in left]


def _safe(left: list[Unit], uses: Mapping[str, str], dialect: Dialect) -> tuple[Pattern, Any]:
    """The rule for what has too many names: the largest dimension that divides is cut."""
    if dialect.precedence == "only":
        raise ValueError(
            f"{len(left):,} paths, such as {brief(left[0].path)}, have too many names for rules; "
            f"and in the dialect {dialect.name} no rule may be for all that is left"
        )
    axes = tuple(axis for axis, use in uses.items() if use == "fsdp") or tuple(uses)[:1]
    return ".*", fsdp(axes)


def mended(columns: Columns, units: list[Unit], tightness: int = 0) -> Written:
    """The rules of a plan that decide leaves, and rules for all other leaves after them.

    Args:
        columns: Of the tree under these rules.
        units: All leaves that need a rule.
        tightness: As in `written`.
    """
    rules = columns.leaves.path_rules
    assert rules is not None
    queries = Queries(columns, DEFAULT_LARGE, NOTHING, None)
    kept = [
        rule
        for rule, won in enumerate(columns.coverage.won)
        if won and rule not in queries.silent_catch_alls
    ]
    decided = np.isin(columns.rule, kept)
    left = [part for unit in units for part in with_rows(unit, ~decided)]
    more = written(
        left, columns.axis_sizes, rules.dialect, tightness, _entries_of(rules, kept, columns)
    )
    of_kept = [
        tuple(part for unit in units for part in with_rows(unit, columns.rule == rule))
        for rule in kept
    ]
    pairs = [*(rules[rule] for rule in kept), *more.rules]
    return Written(Rules(pairs, rules.dialect), [*of_kept, *more.units], more.unknown)


def _entries_of(rules: Rules, kept: list[int], columns: Columns) -> dict[tuple[str, ...], Any]:
    """By the axes of several devices, the entry that most of these rules have for them.

    Of one without axes of one device nothing is to be copied.
    """
    counted: dict[tuple[str, ...], Counter[Any]] = defaultdict(Counter)
    for rule in kept:
        spec = plain_spec(rules[rule][1])
        for entry in spec if isinstance(spec, Entries) else ():
            axes = tuple(entry_axes(entry))
            if all(axis in columns.axis_sizes for axis in axes):
                used = tuple(axis for axis in axes if columns.axis_sizes[axis] > 1)
                counted[used][entry] += columns.coverage.won[rule]
    most = {used: entries.most_common(1)[0][0] for used, entries in counted.items() if used}
    return {used: entry for used, entry in most.items() if tuple(entry_axes(entry)) != used}


def _place(unit: Unit) -> int:
    """How deep inside of a layer it is; 0 outside."""
    numbers = [place for place, word in enumerate(unit.words) if NUMBER in word.text]
    if numbers:
        return len(unit.words) - numbers[0]
    return len(unit.words) if "layers" in unit.dims.sides else 0


def _label(
    unit: Unit, cuts: Cuts, spared: set[str], written_as: Mapping[tuple[str, ...], Any]
) -> Label:
    """What a unit gets; `spared` are the axes that some kernels are not cut by on purpose."""
    entries = [written_as.get(axes, axes[0] if len(axes) == 1 else axes or None) for axes in cuts]
    while entries and entries[-1] is None:
        entries.pop()
    value: Any = Entries(entries)
    if units := _head_units(unit, cuts):
        value = RuleSpec(value, units=units)
    dims = unit.dims
    sides = tuple(side for side, axes in zip(dims.sides, cuts, strict=True) if axes)
    named = {axis for axes in cuts for axis in axes}
    is_spared = dims.tensor != "any" and bool(spared) and spared.isdisjoint(named)
    meaning = (dims.is_vector, dims.is_vector or sides, is_spared)
    return Label(value, dims.is_vector, dims.is_known, meaning)


def _head_units(unit: Unit, cuts: Cuts) -> tuple[int, ...]:
    """What keeps heads whole on other meshes, if axes that compute with parts of them cut them."""
    if unit.dims.unit == 1 or unit.dims.is_assumed or "inner" not in unit.dims.sides:
        return ()
    inner = unit.dims.sides.index("inner")
    # Units bind all axes, and along those of fsdp heads may be cut.
    if not cuts[inner] or any(map(is_gathered, cuts[inner])):
        return ()
    return (*[1] * inner, unit.dims.unit)


def _told_apart(
    units: list[Unit], labels: list[Label], dialect: Dialect
) -> tuple[list[Unit], list[Label]]:
    """The units and labels; some with numbers, since only these tell their labels apart."""
    alike: dict[tuple[Word, ...], list[int]] = defaultdict(list)
    for number, unit in enumerate(units):
        alike[unit.words].append(number)
    with_numbers: set[int] = set()
    for group in alike.values():
        leaves: Counter[Label] = Counter()
        for number in group:
            leaves[labels[number]] += units[number].part.leaves
        if len(leaves) > 1:
            stays = (
                None if dialect.precedence == "only" else max(leaves, key=lambda one: leaves[one])
            )
            with_numbers.update(number for number in group if labels[number] != stays)
    if not with_numbers:
        return units, labels
    told: list[tuple[Unit, Label]] = []
    for number, (unit, label) in enumerate(zip(units, labels, strict=True)):
        if number not in with_numbers:
            told.append((unit, label))
        else:
            told += ((one, label._replace(is_numbered=True)) for one in parted(unit))
    return [unit for unit, _ in told], [label for _, label in told]
