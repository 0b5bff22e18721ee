"""Patterns for phrases, each matched with the paths of the whole model before it is given out.

Costs a match of one path per unit, some times over. Must not know why units share a phrase.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shardrules._format import brief
from shardrules._matching.rules import Rules
from shardrules._suggesting.spelling import TIGHTEST, least_tightness, pattern_of, text_pattern
from shardrules._suggesting.texts import pattern_shown
from shardrules._suggesting.units import Unit, alone

if TYPE_CHECKING:
    from shardrules._matching.dialects import Dialect
    from shardrules._matching.match_modes import Pattern
    from shardrules._suggesting.wording import Label, Phrase

__all__ = ["listed", "proven"]

_MOST_TEXTS: Final = 1000


def listed(
    units: Sequence[Unit], labels: Sequence[Label]
) -> tuple[list[tuple[Pattern, Any]], list[tuple[Unit, ...]]]:
    """A rule for each path, where patterns are texts."""
    of: dict[str, list[Unit]] = defaultdict(list)
    value_of: dict[str, Any] = {}
    for unit, label in zip(units, labels, strict=True):
        text = text_pattern(unit.words)
        # Numbers in names are written out, path by path.
        for one in [unit] if text is not None else alone(unit):
            of[text or one.path].append(one)
            value_of[text or one.path] = label.value
    if len(of) > _MOST_TEXTS:
        raise ValueError(
            f"the dialect lists paths one by one, and {len(of):,} differ not only in "
            f"numbers; more than {_MOST_TEXTS:,} are no rules: choose a dialect of regexes"
        )
    return list(value_of.items()), [tuple(alike) for alike in of.values()]


def proven(
    said: list[Phrase],
    units: Sequence[Unit],
    dialect: Dialect,
    least: int,
) -> tuple[list[tuple[Pattern, Any]], list[tuple[Unit, ...]]]:
    """Patterns as loose as they may be: of a path of each unit only its own matches.

    Patterns that leave numbers open may also match what patterns with numbers, before them, match.

    Raises:
        ValueError: No pattern of the dialect tells some path from another.
    """
    words = [unit.words for unit in units]
    tightness = [max(least, least_tightness(phrase)) for phrase in said]
    owner = {unit: number for number, phrase in enumerate(said) for unit in phrase.units}
    paths = [unit.path for unit in units]
    while True:
        pairs = [
            (pattern_of(phrase, words, dialect, tight), phrase.label.value)
            for phrase, tight in zip(said, tightness, strict=True)
        ]
        wrong = dict(_wrong(Rules(pairs, dialect), paths, owner, said))
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
    rules: Rules, paths: Sequence[str], owner: Mapping[int, int], said: Sequence[Phrase]
) -> Iterator[tuple[int, str]]:
    """The rules that match a path of another, or not one of their own; and a path of each."""
    for unit, path in enumerate(paths):
        own = owner.get(unit)
        matches = rules.all_matches(path)
        if own is not None and own not in matches:
            yield own, path
        for rule in matches:
            is_later = own is not None and rule > own and said[own].label.is_numbered
            if rule != own and not is_later:
                yield rule, path
