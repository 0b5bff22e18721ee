"""Rules for the leaves of a tree: their dimensions, specs, phrases, and proven patterns.

Costs per folded path, and a match of one path for each of them. Must not know how the mesh was
chosen, nor how rules are shown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._correction import RuleSpec
from shardrules._declared import NOTHING
from shardrules._format import brief
from shardrules._matching.match_modes import MATCH_MODES
from shardrules._matching.rules import Rules
from shardrules._planning.asking.check import DEFAULT_LARGE
from shardrules._planning.asking.checks.queries import Queries
from shardrules._planning.roles import parts_of_model
from shardrules._shape_specs import fsdp
from shardrules._specs import Entries
from shardrules._suggesting.axes import uses_of
from shardrules._suggesting.choosing import Array, Cuts, choose
from shardrules._suggesting.dims import Dims, dims_of
from shardrules._suggesting.spelling import TIGHTEST, least_tightness, pattern_of, text_pattern
from shardrules._suggesting.texts import pattern_shown
from shardrules._suggesting.wording import AmbiguousError, Label, Phrase, phrases
from shardrules._suggesting.words import NUMBER, apart, numbered, words_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._matching.dialects import Dialect
    from shardrules._matching.match_modes import Pattern
    from shardrules._planning.columns import Columns
    from shardrules._planning.fold import Folded
    from shardrules._planning.roles import Part
    from shardrules._suggesting.words import Word

__all__ = ["Unit", "Written", "mended", "units_of", "written"]

_MOST_TEXTS: Final = 1000
# Some 0.3 ms each.
_MOST_PATHS: Final = 4000


class Unit(NamedTuple):
    """The leaves of one folded path."""

    folded: Folded
    words: tuple[Word, ...]
    part: Part
    dims: Dims
    every: Sequence[str]
    """The paths of all leaves of the tree."""
    bytes: int
    """Of all of them, whole."""

    @property
    def path(self) -> str:
        """That of the first of its leaves."""
        return self.every[int(self.folded.rows[0])]


class Written(NamedTuple):
    """Rules for a tree, and why."""

    rules: Rules
    units: list[tuple[Unit, ...]]
    """Per rule the leaves that it was written for."""
    unknown: list[Unit]


def written(units: list[Unit], axis_sizes: Mapping[str, int], dialect: Dialect) -> Written:
    """Rules for leaves that have none.

    Raises:
        ValueError: The dialect's patterns cannot tell the paths apart.
    """
    uses = uses_of(axis_sizes)
    arrays = [Array(unit.part.shape, unit.dims, unit.bytes) for unit in units]
    labels = [
        _label(unit, cuts, uses)
        for unit, cuts in zip(units, choose(arrays, axis_sizes, uses), strict=True)
    ]
    units, labels, first = _told_apart(units, labels, dialect)
    words = [unit.words for unit in units]
    left: tuple[int, ...] = ()
    if MATCH_MODES[dialect.match[-1]].written_as == "text":
        pairs, of_rules = _listed(units, labels)
    else:
        try:
            said, left = phrases(words, labels, [_place(unit) for unit in units])
        except AmbiguousError as error:
            one, other, *_ = (units[number] for number in error.units)
            raise ValueError(
                f"two leaves have the path {brief(one.path)}, with the shapes {one.part.shape} and "
                f"{other.part.shape}: rename one"
            ) from None
        # Numbers that are listed, before those that are left open.
        said.sort(key=lambda one: not any(number in first for number in one.units))
        pairs, of_rules = _proven(said, units, first, dialect)
    if left:
        axes = tuple(axis for axis, use in uses.items() if use == "fsdp") or tuple(uses)[:1]
        mode = MATCH_MODES[dialect.match[-1]]
        everything: Any = (".*",) if mode.written_as == "window" else ".*"
        pairs.append((everything, fsdp(axes)))
        of_rules.append(tuple(units[number] for number in left))
    unknown = [unit for unit in units if not unit.dims.is_known] + [units[n] for n in left]
    return Written(Rules(pairs, dialect), of_rules, unknown)


def mended(columns: Columns, units: list[Unit]) -> Written:
    """The rules of a plan that decide leaves, and rules for all other leaves after them.

    Args:
        columns: Of the tree under these rules.
        units: All leaves that need a rule.
    """
    rules = columns.leaves.path_rules or Rules(())
    queries = Queries(columns, DEFAULT_LARGE, NOTHING, None)
    kept = [
        rule
        for rule, won in enumerate(columns.coverage.won)
        if won and rule not in queries.silent_catch_alls
    ]
    decided = np.isin(columns.rule, kept)
    left = [part for unit in units for part in _with_rows(unit, ~decided)]
    more = written(left, columns.axis_sizes, rules.dialect)
    of_kept = [
        tuple(part for unit in units for part in _with_rows(unit, columns.rule == rule))
        for rule in kept
    ]
    pairs = [*(rules[rule] for rule in kept), *more.rules]
    return Written(Rules(pairs, rules.dialect), [*of_kept, *more.units], more.unknown)


def _with_rows(unit: Unit, chosen: npt.NDArray[np.bool_]) -> list[Unit]:
    """The unit with those of its leaves that are chosen; nothing if none are."""
    rows = unit.folded.rows[chosen[unit.folded.rows]]
    return [_of_rows(unit, unit.words, rows)] if len(rows) else []


def _of_rows(unit: Unit, words: tuple[Word, ...], rows: npt.NDArray[np.intp]) -> Unit:
    return unit._replace(
        folded=unit.folded._replace(rows=rows),
        words=words,
        part=replace(unit.part, leaves=len(rows)),
        bytes=unit.bytes // len(unit.folded.rows) * len(rows),
    )


def units_of(columns: Columns, heads: Mapping[int, int]) -> list[Unit]:
    """The leaves that need a rule.

    Args:
        columns: Of the tree, without rules.
        heads: Per row that is a projection of attention the elements of a head, where they are
            known.

    Raises:
        ValueError: The paths have too many names.
    """
    kinds = columns.kinds
    needed = [kind.shape is not None and kind.status != "placed" for kind in kinds]
    folded = apart((one for one in columns.folded if needed[one.group]), columns.paths)
    if len(folded) > _MOST_PATHS:
        raise ValueError(
            f"the tree has {len(folded):,} paths that differ not only in numbers, such as "
            f"{brief(columns.paths[folded[0].rows[0]])}; rules that name more than {_MOST_PATHS:,} "
            "are no rules: cut each array's largest dimension, with [('.*', shardrules.fsdp(axis))]"
        )
    parts = parts_of_model(folded, [kind.shape for kind in kinds], [kind.names for kind in kinds])
    return [
        Unit(
            one,
            words,
            part,
            dims._replace(unit=heads.get(int(one.rows[0]), 1)),
            columns.paths,
            kinds[one.group].bytes * len(one.rows),
        )
        for one, words, part, dims in zip(
            folded, words_of(folded), parts, dims_of(parts), strict=True
        )
    ]


def _place(unit: Unit) -> int:
    """How deep inside of a layer it is; 0 outside."""
    numbers = [place for place, word in enumerate(unit.words) if NUMBER in word.text]
    if numbers:
        return len(unit.words) - numbers[0]
    return len(unit.words) if "layers" in unit.dims.sides else 0


def _label(unit: Unit, cuts: Cuts, uses: Mapping[str, str]) -> Label:
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in cuts]
    while entries and entries[-1] is None:
        entries.pop()
    value: Any = Entries(entries)
    if units := _head_units(unit, cuts, uses):
        value = RuleSpec(value, units=units)
    return Label(value, not entries or unit.dims.is_vector, unit.dims.is_known)


def _head_units(unit: Unit, cuts: Cuts, uses: Mapping[str, str]) -> tuple[int, ...]:
    """What keeps heads whole on other meshes, if axes that compute with parts of them cut them."""
    if unit.dims.unit == 1 or "inner" not in unit.dims.sides:
        return ()
    inner = unit.dims.sides.index("inner")
    # Units bind all axes, and along those of fsdp heads may be cut.
    if not cuts[inner] or any(uses[axis] == "fsdp" for axis in cuts[inner]):
        return ()
    return (*[1] * inner, unit.dims.unit)


def _told_apart(
    units: list[Unit], labels: list[Label], dialect: Dialect
) -> tuple[list[Unit], list[Label], frozenset[int]]:
    """The units, in some of which numbers are listed, since only these tell their labels apart.

    Returns:
        The units, their labels, and which units are such.
    """
    alike: dict[tuple[Word, ...], list[int]] = defaultdict(list)
    for number, unit in enumerate(units):
        alike[unit.words].append(number)
    listed: set[int] = set()
    for group in alike.values():
        leaves: Counter[Label] = Counter()
        for number in group:
            leaves[labels[number]] += units[number].part.leaves
        if len(leaves) > 1:
            stays = (
                None if dialect.precedence == "only" else max(leaves, key=lambda one: leaves[one])
            )
            listed.update(number for number in group if labels[number] != stays)
    if not listed:
        return units, labels, frozenset()
    parted: list[tuple[Unit, Label, bool]] = []
    for number, (unit, label) in enumerate(zip(units, labels, strict=True)):
        if number not in listed:
            parted.append((unit, label, False))
        else:
            parted += ((one, label, True) for one in _parted(unit))
    first = frozenset(number for number, (_, _, is_listed) in enumerate(parted) if is_listed)
    return [unit for unit, _, _ in parted], [label for _, label, _ in parted], first


def _parted(unit: Unit) -> list[Unit]:
    """Per distinct words with numbers a unit."""
    rows = unit.folded.rows.tolist()
    found: dict[tuple[Word, ...], list[int]] = defaultdict(list)
    paths = (unit.every[row] for row in rows)
    for row, words in zip(rows, numbered(unit.words, paths), strict=True):
        found[words].append(row)
    return [_of_rows(unit, words, np.array(chosen, np.intp)) for words, chosen in found.items()]


def _listed(
    units: Sequence[Unit], labels: Sequence[Label]
) -> tuple[list[tuple[Pattern, Any]], list[tuple[Unit, ...]]]:
    """A rule for each path, where patterns are texts."""
    of: dict[str, list[int]] = defaultdict(list)
    for number, unit in enumerate(units):
        of[text_pattern(unit.words)].append(number)
    if len(of) > _MOST_TEXTS:
        raise ValueError(
            f"the dialect lists paths one by one, and {len(of):,} differ not only in "
            f"numbers; more than {_MOST_TEXTS:,} are no rules: choose a dialect of regexes"
        )
    pairs: list[tuple[Pattern, Any]] = [
        (text, labels[numbers[0]].value) for text, numbers in of.items()
    ]
    return pairs, [tuple(units[number] for number in numbers) for numbers in of.values()]


def _proven(
    said: list[Phrase], units: Sequence[Unit], first: frozenset[int], dialect: Dialect
) -> tuple[list[tuple[Pattern, Any]], list[tuple[Unit, ...]]]:
    """Patterns as loose as they may be: of a path of each unit only its own matches.

    Those in `first` list numbers; patterns that leave them open may match as well, as they are
    later.

    Raises:
        ValueError: No pattern of the dialect tells some path from another.
    """
    words = [unit.words for unit in units]
    tightness = [least_tightness(phrase) for phrase in said]
    owner = {unit: number for number, phrase in enumerate(said) for unit in phrase.units}
    paths = [unit.path for unit in units]
    while True:
        pairs = [
            (pattern_of(phrase, words, dialect, tight), phrase.label.value)
            for phrase, tight in zip(said, tightness, strict=True)
        ]
        wrong = dict(_wrong(Rules(pairs, dialect), paths, owner, first))
        loose = {rule: path for rule, path in wrong.items() if tightness[rule] < TIGHTEST}
        if not loose:
            break
        for rule in loose:
            tightness[rule] += 1
    if wrong:
        rule, path = next(iter(wrong.items()))
        raise ValueError(
            f"{brief(path)}: no pattern of the dialect {dialect.name} tells it from the leaves of "
            f"{pattern_shown(pairs[rule][0])}: rename it, or choose another dialect"
        )
    return pairs, [tuple(units[number] for number in phrase.units) for phrase in said]


def _wrong(
    rules: Rules, paths: Sequence[str], owner: Mapping[int, int], first: frozenset[int]
) -> Iterator[tuple[int, str]]:
    """The rules that match a path of another, or not one of their own; and a path of each."""
    for unit, path in enumerate(paths):
        own = owner.get(unit)
        matches = rules.all_matches(path)
        if own is not None and own not in matches:
            yield own, path
        for rule in matches:
            if rule != own and (own is None or rule < own or unit not in first):
                yield rule, path
