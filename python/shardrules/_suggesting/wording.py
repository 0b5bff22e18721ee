"""From leaves with labels to a few phrases that tell the labels apart: the ends of their paths.

A phrase has as few words as tell its leaves from those of other labels, and those that a reader
wants; leaves of one label that differ in one word share a phrase. Costs per folded path and word.
Must not know what a label means, nor how a dialect writes a pattern.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from shardrules._suggesting.words import NUMBER, Word

__all__ = ["MOST_NAMES", "START", "AmbiguousError", "Label", "Phrase", "phrases"]

MOST_NAMES: Final = 64
"""A word of a phrase stands for so many names at most."""
START: Final = Word("", "\0^")
"""Stands before the first word of a path."""

# The order in which phrases that differ in one word become one: modules, then arrays, then what is
# around them.
_PLACES: Final = (-2, -1, -3, -4, -5, -6)


class AmbiguousError(Exception):
    """Paths with the same words have several labels."""

    def __init__(self, units: list[int]) -> None:
        super().__init__(units)
        self.units: Final = units


class Label(NamedTuple):
    """What leaves get."""

    value: Any
    is_plain: bool
    """Whether one word is enough to tell its leaves, as for biases that are replicated."""
    is_known: bool
    """Whether it is known what the leaves are; others have phrases of their own."""


class Choice(NamedTuple):
    """A word of a phrase: the names that may stand there."""

    before: str
    names: tuple[str, ...]
    """In the order of the paths."""


class Phrase(NamedTuple):
    """The ends of some paths."""

    label: Label
    place: int
    """Phrases of one place in the model may become one."""
    words: tuple[Choice, ...]
    units: tuple[int, ...]
    """Which of the paths, ascending."""


Path = tuple[Word, ...]


def phrases(
    paths: Sequence[Path], labels: Sequence[Label], places: Sequence[int]
) -> tuple[list[Phrase], tuple[int, ...]]:
    """Phrases that tell the labels apart, in the order of their first paths, plain ones last.

    Args:
        paths: Per folded path its words. Those with equal words have one label.
        labels: Per folded path.
        places: Per folded path how deep it is inside of a layer; 0 outside of layers.

    Returns:
        The phrases, and the paths that have none, since they have too many names.
    """
    found = list(_ends(paths, labels, places))
    for place in _PLACES:
        found = list(_merged(found, place))
    kept = [one for one in found if all(len(word.names) <= MOST_NAMES for word in one.words)]
    left = {unit for one in found for unit in one.units} - {u for one in kept for u in one.units}
    return sorted(kept, key=lambda one: (one.label.is_plain, one.units)), tuple(sorted(left))


def _ends(
    paths: Sequence[Path], labels: Sequence[Label], places: Sequence[int]
) -> Iterator[Phrase]:
    """Per path the shortest end that only paths of its label have, and that says something."""
    pending: list[tuple[Path, list[int]]] = [((), list(range(len(paths))))]
    while pending:
        longer: dict[Path, list[int]] = defaultdict(list)
        for end, units in pending:
            for unit in units:
                longer[_word(paths[unit], len(end) + 1), *end].append(unit)
        pending = []
        for end, units in longer.items():
            label = labels[units[0]]
            if end[0] == START and any(labels[unit] != label for unit in units):
                raise AmbiguousError(units)
            if any(labels[unit] != label for unit in units) or _says_little(
                end, label, paths, units
            ):
                pending.append((end, units))
            else:
                place = 0 if label.is_plain else min(places[unit] for unit in units)
                first, *others = _with_module(end, label, paths, units) if place else end
                words = (Choice("", (first.text,)), *(Choice(w.before, (w.text,)) for w in others))
                yield Phrase(label, place, words, tuple(units))


def _word(path: Path, place: int) -> Word:
    """The word at this place from the end; START before the first."""
    return path[-place] if place <= len(path) else START


def _says_little(end: Path, label: Label, paths: Sequence[Path], units: list[int]) -> bool:
    """Whether the next word belongs to it: a number says nothing without the name before it."""
    if end[0].text == START.text:
        return False
    if end[0].text == NUMBER or end[0].text.isdecimal():
        return True
    return len(end) == 1 and not label.is_plain and all(len(paths[unit]) > 1 for unit in units)


def _with_module(end: Path, label: Label, paths: Sequence[Path], units: list[int]) -> Path:
    """The end with the word before it, if that is the module of all of them inside of a layer."""
    if label.is_plain or len(end) != 2:
        return end
    first, *others = {_word(paths[unit], 3) for unit in units}
    is_module = not others and first != START and NUMBER not in first.text
    return (first, *end) if is_module else end


def _merged(found: Iterable[Phrase], place: int) -> Iterator[Phrase]:
    """The phrases; those of one label that differ in the word at this place alone are one."""
    alike: dict[Any, list[Phrase]] = defaultdict(list)
    for number, one in enumerate(found):
        is_name = len(one.words) >= -place and one.words[place].names[0] not in (START.text, NUMBER)
        key: Any = number
        if is_name:
            words = list(one.words)
            words[place] = Choice(words[place].before, ())
            key = (one.label, one.place, tuple(words))
        alike[key].append(one)
    for group in alike.values():
        group.sort(key=lambda one: one.units)
        if len(group) == 1:
            yield group[0]
            continue
        words = list(group[0].words)
        names = dict.fromkeys(name for one in group for name in one.words[place].names)
        words[place] = Choice(words[place].before, tuple(names))
        units = tuple(sorted(unit for one in group for unit in one.units))
        yield group[0]._replace(words=tuple(words), units=units)
