"""Writes rules for the leaves of a tree: their specs, and patterns proven on the tree's paths."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.rule_specs import Fsdp, RuleSpec, plain_spec
from shardrules._base.specs import Entries, entries_of, entry_axes, entry_of, trimmed
from shardrules._base.text import brief, counted
from shardrules._plan.axis_uses import is_gathered, uses_of
from shardrules._plan.check_context import CheckContext
from shardrules._plan.findings import NOTHING
from shardrules._plan.kinds import DEFAULT_LARGE
from shardrules._plan.plan import Plan
from shardrules._plan.suggest.choose import Axes, Cuts, choose, with_followers
from shardrules._plan.suggest.patterns import (
    NUMBER,
    TIGHTEST,
    AmbiguousError,
    Label,
    Path,
    Phrase,
    least_tightness,
    pattern_of,
    phrases,
)
from shardrules._rules.patterns import Pattern, pattern_shown
from shardrules._rules.rules import Rules, rules_like

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.suggest.units import Unit
    from shardrules._rules.dialects import Dialect

_MOST_NAMES: Final = 64
MOST_RULES: Final = 12
"""Rules of a solution, if it has no more specs."""
_Pairs = list[tuple["Pattern", Any]]


class Draft(NamedTuple):
    """Rules with the leaves that they were written for."""

    rules: Rules
    units: list[tuple[Unit, ...]]
    """Units of each rule."""

    def replicated_rules(self, axis_sizes: Mapping[str, int]) -> Iterator[int]:
        """Yield the rules whose leaves are replicated on purpose.

        These are norms, biases and scalars; and what tensor axes are kept from, such as routers.
        """
        for rule, ((_, value), units) in enumerate(zip(self.rules, self.units, strict=True)):
            spec = plain_spec(value)
            is_small = spec == Entries() and all(unit.dims.is_small for unit in units)
            may_be = all(unit.dims.tensor != "any" for unit in units)
            if is_small or (may_be and is_spared(spec, axis_sizes)):
                yield rule

    def strays(self, rule_of: npt.NDArray[np.int32]) -> list[int]:
        """List the rows that another rule decides than the one written for them."""
        intended = rule_of.copy()
        for rule, units in enumerate(self.units):
            for unit in units:
                intended[unit.folded.rows] = rule
        rows: list[int] = np.flatnonzero(intended != rule_of).tolist()
        return rows


def is_spared(spec: Any, axis_sizes: Mapping[str, int]) -> bool:
    """Say whether this spec of a leaf that tensor axes are kept from is meant.

    It is not if there are other axes for weights, and these do not shard it, either.
    """
    uses = {axis: use for axis, use in uses_of(axis_sizes).items() if axis_sizes[axis] > 1}
    if not isinstance(spec, Entries) or "tensor" not in uses.values():
        return False
    used = {uses[axis] for entry in spec for axis in entry_axes(entry) if axis in uses}
    others = {"fsdp", "experts"}.intersection(uses.values())
    return "tensor" not in used and bool(used or not others)


def draft(
    units: list[Unit],
    axis_sizes: Mapping[str, int],
    dialect: Dialect,
    tightness: int = 0,
    *,
    entries: Mapping[Axes, Any] | None = None,
    siblings: Mapping[Any, set[Cuts]] | None = None,
) -> Draft:
    """Write rules for leaves that have none; patterns are as tight as `pattern_of` has it.

    `entries` are those with which other rules of the list write axes: there they may name axes of
    one device, which are larger elsewhere. `siblings` says how other rules cut leaves, by
    `_sibling_keys`: those of one module are cut alike.
    """
    uses = uses_of(axis_sizes)
    cuts = with_followers(units, choose(units, axis_sizes, uses), axis_sizes)
    if siblings:
        cuts = [_copied(unit, siblings) or cut for unit, cut in zip(units, cuts, strict=True)]
    spared = {axis for axis, size in axis_sizes.items() if size > 1 and uses[axis] == "tensor"}
    labels = [
        _label_of(unit, of_unit, spared, entries or {})
        for unit, of_unit in zip(units, cuts, strict=True)
    ]
    return _rules_for_labels(units, labels, dialect, tightness)


def draft_of_specs(
    units: Iterable[Unit], specs: Mapping[str, Entries | RuleSpec], dialect: Dialect, tightness: int
) -> Draft:
    """Write rules that give leaves these specs: at most `MOST_RULES`, where specs are no more."""
    parts: list[Unit] = []
    labels: list[Label] = []
    for unit in units:
        rows_of: dict[Label, list[int]] = defaultdict(list)
        for row in unit.folded.rows.tolist():
            spec = specs[unit.paths[int(row)]]
            rows_of[Label(spec, is_plain=spec == Entries(), is_known=True)].append(row)
        parts += map(unit.with_rows, rows_of.values())
        labels += rows_of
    return _rules_for_labels(parts, labels, dialect, tightness, joins=True)


def _rules_for_labels(
    units: Sequence[Unit],
    labels: Sequence[Label],
    dialect: Dialect,
    tightness: int,
    *,
    joins: bool = False,
) -> Draft:
    """Write rules for units with labels; those of one spec are joined, if they are to be few."""
    labelled = _with_numbers(list(zip(units, labels, strict=True)), dialect)
    units, labels = [unit for unit, _ in labelled], [label for _, label in labelled]
    ends = _phrases(units, labels)
    pairs, of_rules = _loosest_patterns(ends, units, dialect, tightness)
    if joins:
        pairs, of_rules = _joined_rules(ends, pairs, of_rules)
    return Draft(Rules(pairs, dialect), of_rules)


def _joined_rules(
    phrases: Sequence[Phrase], pairs: _Pairs, of_rules: list[tuple[Unit, ...]]
) -> tuple[_Pairs, list[tuple[Unit, ...]]]:
    """Join all rules of what is whole; and of others with one spec the shortest, if they are many.

    A pattern matches its own paths alone, so that their order does not matter; patterns with
    numbers stay before those that leave these open.
    """
    patterns: list[tuple[str, ...]] = [(str(pattern),) for pattern, _ in pairs]
    units, labels = list(of_rules), [phrase.label for phrase in phrases]
    while True:
        alike = [
            (not labels[first].is_plain, sum(map(len, patterns[first] + patterns[second])), first,
             second)
            for first, second in itertools.combinations(range(len(labels)), 2)
            if labels[first] == labels[second] and not labels[first].is_numbered
        ]  # fmt: skip
        is_sharded, _, first, second = min(alike, default=(True, 0, 0, 0))
        if not alike or (is_sharded and len(labels) <= MOST_RULES):
            break
        patterns[first] += patterns.pop(second)
        units[first] += units.pop(second)
        del labels[second]
    texts = [names[0] if len(names) == 1 else f"({'|'.join(names)})" for names in patterns]
    return [(text, label.value) for text, label in zip(texts, labels, strict=True)], units


def mended(plan: Plan, units: list[Unit], tightness: int = 0) -> Draft:
    """Keep the rules of a plan that decide leaves, and write rules for all other leaves."""
    rules = plan._leaves.path_rules
    assert rules is not None
    context = CheckContext(plan, DEFAULT_LARGE, NOTHING, None)
    kept = [
        rule
        for rule, won in enumerate(plan.coverage.won)
        if won and rule not in context.silent_catch_alls
    ]
    undecided = ~np.isin(plan.rule, kept)
    rest = [part for unit in units for part in unit.where(undecided)]
    of_kept = [
        tuple(part for unit in units for part in unit.where(plan.rule == rule)) for rule in kept
    ]
    added = draft(
        rest,
        plan.axis_sizes,
        rules.dialect,
        tightness,
        entries=_entries_of(rules, kept, plan),
        siblings=_cuts_of_siblings(rules, kept, of_kept),
    )
    pairs = [*(rules[rule] for rule in kept), *added.rules]
    return Draft(rules_like(rules, pairs), [*of_kept, *added.units])


def _entries_of(rules: Rules, kept: list[int], plan: Plan) -> dict[Axes, Any]:
    """Find the entry that most of these rules have for axes of several devices.

    One without axes of one device is left out.
    """
    votes: dict[Axes, Counter[Any]] = defaultdict(Counter)
    for rule in kept:
        for entry in _entries_in(rules[rule][1]):
            axes = tuple(entry_axes(entry))
            if all(axis in plan.axis_sizes for axis in axes):
                used = tuple(axis for axis in axes if plan.axis_sizes[axis] > 1)
                votes[used][entry] += plan.coverage.won[rule]
    most = {used: entries.most_common(1)[0][0] for used, entries in votes.items() if used}
    return {used: entry for used, entry in most.items() if tuple(entry_axes(entry)) != used}


def _cuts_of_siblings(
    rules: Rules, kept: list[int], of_kept: list[tuple[Unit, ...]]
) -> dict[Any, set[Cuts]]:
    """Return how rules cut their leaves, by what siblings of these have in common."""
    siblings: dict[Any, set[Cuts]] = defaultdict(set)
    for rule, units in zip(kept, of_kept, strict=True):
        cuts = tuple(tuple(entry_axes(entry)) for entry in _entries_in(rules[rule][1]))
        for unit in units if cuts else ():
            for key in _sibling_keys(unit):
                siblings[key].add(cuts + ((),) * (len(unit.shape) - len(cuts)))
    return siblings


def _entries_in(value: Any) -> tuple[Any, ...]:
    """Return the entries of a rule's spec; none if the shape decides."""
    spec = plain_spec(value)
    return () if spec is None or isinstance(spec, Fsdp) else tuple(entries_of(spec))


def _copied(unit: Unit, siblings: Mapping[Any, set[Cuts]]) -> Cuts | None:
    """Return the cuts that all siblings of a leaf have; None if there are several, or none."""
    if not unit.dims.is_known:
        return None
    copies = {cuts for key in _sibling_keys(unit) for cuts in siblings.get(key, ())}
    return copies.pop() if len(copies) == 1 else None


def _sibling_keys(unit: Unit) -> list[Any]:
    """Return the path without its name, and without that of its module; shape and sides."""
    words = [word.text for word in unit.words]
    places = [place for place in (-1, -2) if len(words) >= -place and NUMBER not in words[place]]
    array = (unit.shape, unit.dims.sides)
    return [(*words[:place], None, *words[len(words) + place + 1 :], array) for place in places]


def _label_of(unit: Unit, cuts: Cuts, spared: set[str], entry_by_axes: Mapping[Axes, Any]) -> Label:
    """Label a unit; `spared` are the axes that some kernels are not sharded by on purpose."""
    value: Any = Entries(trimmed(entry_by_axes.get(axes, entry_of(axes)) for axes in cuts))
    if units := _head_units(unit, cuts):
        value = RuleSpec(value, units=units)
    dims = unit.dims
    sides = tuple(side for side, axes in zip(dims.sides, cuts, strict=True) if axes)
    used = {axis for axes in cuts for axis in axes}
    has_spared = dims.tensor != "any" and bool(spared) and spared.isdisjoint(used)
    meaning = (dims.is_vector, dims.is_vector or sides, has_spared)
    return Label(value, dims.is_vector, dims.is_known, meaning)


def _head_units(unit: Unit, cuts: Cuts) -> tuple[int, ...]:
    """Return units that keep heads whole on other meshes, if axes that compute shard them."""
    if unit.dims.unit == 1 or unit.dims.is_assumed or "hidden" not in unit.dims.sides:
        return ()
    hidden = unit.dims.sides.index("hidden")
    # Units bind all axes, and along those of fsdp heads may be cut.
    if not cuts[hidden] or any(map(is_gathered, cuts[hidden])):
        return ()
    return (*[1] * hidden, unit.dims.unit)


def _with_numbers(labelled: list[tuple[Unit, Label]], dialect: Dialect) -> list[tuple[Unit, Label]]:
    """Write numbers out where only these tell labels apart; the commonest label may stay open."""
    leaves_of: dict[Path, Counter[Label]] = defaultdict(Counter)
    for unit, label in labelled:
        leaves_of[unit.words][label] += unit.leaves
    told_apart: list[tuple[Unit, Label]] = []
    for unit, label in labelled:
        leaves = leaves_of[unit.words]
        is_open = dialect.precedence != "only" and label == max(leaves, key=leaves.__getitem__)
        if len(leaves) == 1 or is_open:
            told_apart.append((unit, label))
        else:
            numbered = label._replace(is_numbered=True)
            told_apart += ((part, numbered) for part in unit.numbered())
    return told_apart


def _phrases(units: list[Unit], labels: list[Label]) -> list[Phrase]:
    depths = []
    for unit in units:
        numbers = [place for place, word in enumerate(unit.words) if NUMBER in word.text]
        is_outside = not numbers and "layers" not in unit.dims.sides
        depths.append(0 if is_outside else len(unit.words) - (numbers or [0])[0])
    try:
        ends = phrases([unit.words for unit in units], labels, depths)
    except AmbiguousError as error:
        first, second, *_ = (units[number] for number in error.units)
        raise ValueError(
            f"two leaves have the path {brief(first.path)}, with the shapes {first.shape} and "
            f"{second.shape}: rename one"
        ) from None
    for end in ends:
        if any(len(word.names) > _MOST_NAMES for word in end.words):
            path = brief(units[end.units[0]].path)
            raise ValueError(
                f"{counted(len(end.units), 'path')}, such as {path}, have "
                "too many names for rules: give the specs themselves to plan, or cut each array's "
                "largest dimension, with [('.*', shardrules.fsdp(axis))]"
            )
    return ends


def _loosest_patterns(
    phrases: list[Phrase], units: Sequence[Unit], dialect: Dialect, least: int
) -> tuple[_Pairs, list[tuple[Unit, ...]]]:
    """Write patterns as loose as they may be: of the path of each unit only its own matches.

    Patterns that leave numbers open may also match what patterns with numbers, before them, match.
    """
    words = [unit.words for unit in units]
    tightness = [max(least, least_tightness(phrase)) for phrase in phrases]
    owner = {unit: number for number, phrase in enumerate(phrases) for unit in phrase.units}
    paths = [unit.path for unit in units]
    while True:
        pairs = [
            (pattern_of(phrase, words, dialect, tight), phrase.label.value)
            for phrase, tight in zip(phrases, tightness, strict=True)
        ]
        wrong = dict(_mismatches(Rules(pairs, dialect), paths, owner, phrases))
        loose = [rule for rule in wrong if tightness[rule] < TIGHTEST]
        if not loose:
            break
        for rule in loose:
            tightness[rule] += 1
    for rule, path in wrong.items():
        raise ValueError(
            f"{brief(path)}: no pattern of the dialect {dialect.name} tells it from the leaves of "
            f"{pattern_shown(pairs[rule][0])}: rename it, or choose another dialect"
        )
    return pairs, [tuple(units[number] for number in phrase.units) for phrase in phrases]


def _mismatches(
    rules: Rules, paths: Sequence[str], owner: Mapping[int, int], phrases: Sequence[Phrase]
) -> Iterator[tuple[int, str]]:
    """Yield rules that match a path of another, or miss one of their own, and a path of each."""
    for unit, path in enumerate(paths):
        mine = owner.get(unit)
        matches = rules.all_matches(path)
        if mine is not None and mine not in matches:
            yield mine, path
        for rule in matches:
            is_later = mine is not None and rule > mine and phrases[mine].label.is_numbered
            if rule != mine and not is_later:
                yield rule, path
