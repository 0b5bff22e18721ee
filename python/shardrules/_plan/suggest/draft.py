"""Writes rules for the leaves of a tree: their specs, and patterns proven on the tree's paths."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.rule_specs import RuleSpec
from shardrules._base.specs import Entries, entry_of, trimmed
from shardrules._base.text import brief, counted
from shardrules._plan.path_words import is_gathered, uses_of
from shardrules._plan.plan import Plan
from shardrules._plan.suggest.choose import Cuts, choose, with_followers
from shardrules._plan.suggest.patterns import (
    TIGHTEST,
    Label,
    Phrase,
    least_tightness,
    pattern_of,
    phrases,
)
from shardrules._plan.suggest.units import Path, Unit
from shardrules._rules.patterns import Pattern, pattern_shown
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    import numpy.typing as npt

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

    def strays(self, rule_of: npt.NDArray[np.int32]) -> list[int]:
        """List the rows that another rule decides than the one written for them."""
        intended = rule_of.copy()
        for rule, units in enumerate(self.units):
            for unit in units:
                intended[unit.folded.rows] = rule
        rows: list[int] = np.flatnonzero(intended != rule_of).tolist()
        return rows


def draft(plan: Plan, units: Sequence[Unit], tightness: int = 0) -> Draft:
    """Write rules for the leaves of a plan, with patterns as tight as `pattern_of` has it."""
    rules, sizes = plan._leaves.path_rules, plan.axis_sizes
    assert rules is not None
    uses = uses_of(sizes)
    cuts = with_followers(units, choose(units, sizes, uses), sizes)
    spared = {axis for axis, size in sizes.items() if size > 1 and uses[axis] == "tensor"}
    labelled = [
        (unit, _label_of(unit, of_unit, spared)) for unit, of_unit in zip(units, cuts, strict=True)
    ]
    return _rules_for_labels(labelled, rules.dialect, tightness)


def draft_of_specs(
    units: Iterable[Unit], specs: Mapping[str, Entries | RuleSpec], dialect: Dialect, tightness: int
) -> Draft:
    """Write rules that give leaves these specs: at most `MOST_RULES`, where specs are no more."""
    labelled: list[tuple[Unit, Label]] = []
    for unit in units:
        rows_of: dict[Label, list[int]] = defaultdict(list)
        for row in unit.folded.rows.tolist():
            spec = specs[unit.paths[int(row)]]
            rows_of[Label(spec, is_plain=spec == Entries(), is_known=True)].append(row)
        labelled += [(unit.with_rows(rows), label) for label, rows in rows_of.items()]
    return _rules_for_labels(labelled, dialect, tightness, joins=True)


def _rules_for_labels(
    labelled: list[tuple[Unit, Label]], dialect: Dialect, tightness: int, *, joins: bool = False
) -> Draft:
    """Write rules for units with labels; those of one spec are joined, if they are to be few."""
    labelled = _with_numbers(labelled, dialect)
    ends, units = phrases(labelled), [unit for unit, _ in labelled]
    for end in ends:
        if any(len(word.names) > _MOST_NAMES for word in end.words):
            raise ValueError(
                f"{counted(len(end.units), 'path')}, such as {brief(units[end.units[0]].path)}, "
                "have too many names for rules: give the specs themselves to plan, or cut each "
                "array's largest dimension, with [('.*', shardrules.fsdp(axis))]"
            )
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


def _label_of(unit: Unit, cuts: Cuts, spared: set[str]) -> Label:
    """Label a unit; `spared` are the axes that some kernels are not sharded by on purpose."""
    dims = unit.dims
    value: Any = Entries(trimmed(map(entry_of, cuts)))
    if dims.unit > 1 and not dims.is_assumed and "hidden" in dims.sides:
        hidden = dims.sides.index("hidden")
        # Axes that compute keep heads whole on other meshes, too. Units bind all axes, and along
        # those of fsdp heads may be cut.
        if cuts[hidden] and not any(map(is_gathered, cuts[hidden])):
            value = RuleSpec(value, units=(*[1] * hidden, dims.unit))
    sides = tuple(side for side, axes in zip(dims.sides, cuts, strict=True) if axes)
    used = {axis for axes in cuts for axis in axes}
    has_spared = dims.tensor != "any" and bool(spared) and spared.isdisjoint(used)
    meaning = (dims.is_vector, dims.is_vector or sides, has_spared)
    return Label(value, dims.is_vector, dims.is_known, meaning)


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


def _loosest_patterns(
    phrases: list[Phrase], units: Sequence[Unit], dialect: Dialect, least: int
) -> tuple[_Pairs, list[tuple[Unit, ...]]]:
    """Write patterns as loose as they may be: of the path of each unit only its own matches.

    Patterns that leave numbers open may also match what patterns with numbers, before them, match.
    """
    tightness = [max(least, least_tightness(phrase)) for phrase in phrases]
    owner = {unit: number for number, phrase in enumerate(phrases) for unit in phrase.units}
    paths = [unit.path for unit in units]
    while True:
        pairs = [
            (pattern_of(phrase, units, dialect, tight), phrase.label.value)
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
        mine, matches = owner[unit], rules.all_matches(path)
        if mine not in matches:
            yield mine, path
        for rule in matches:
            is_later = rule > mine and phrases[mine].label.is_numbered
            if rule != mine and not is_later:
                yield rule, path
