"""From leaves with labels to a few phrases that tell the labels apart: the ends of their paths.

A phrase has as few words as tell its leaves from those of other labels, and those that a reader
wants; leaves of one label that differ in one word share a phrase. Costs per folded path and word.
Must not know what a label means, nor how a dialect writes a pattern.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from shardrules._suggesting.words import NUMBER, NUMBERS, Word

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
    meaning: Any = None
    """What the dimensions are that are cut; what has another meaning has a rule of its own."""
    is_numbered: bool = False
    """Whether the words have numbers that others leave open; its phrases come first."""


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

# Any path of flax nnx may end so.
_OF_NNX: Final = "value"


def phrases(
    paths: Sequence[Path], labels: Sequence[Label], places: Sequence[int]
) -> tuple[list[Phrase], tuple[int, ...]]:
    """Phrases that tell the labels apart, in the order of their first paths, plain ones last.

    Those of paths with numbers in them are before all others.

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
    kept.sort(key=lambda one: (not one.label.is_numbered, one.label.is_plain, one.units))
    return kept, tuple(sorted(left))


def _ends(
    paths: Sequence[Path], labels: Sequence[Label], places: Sequence[int]
) -> Iterator[Phrase]:
    """Per path the shortest end that only paths of its label have, and that says something."""
    # What differs only in numbers is looked at together: a pattern may leave them open.
    opened = [tuple(map(_opened, path)) for path in paths]
    pending = [list(range(len(paths)))]
    length = 0
    while pending:
        length += 1
        longer: dict[Any, list[int]] = defaultdict(list)
        for number, units in enumerate(pending):
            for unit in units:
                longer[number, _word(opened[unit], length)].append(unit)
        pending = []
        for units in longer.values():
            of_end: dict[Path, list[int]] = defaultdict(list)
            for unit in units:
                of_end[_end(paths[unit], length)].append(unit)
            if _is_ready(of_end, units, paths, opened, labels):
                for end, of_units in of_end.items():
                    yield _phrase(end, of_units, paths, labels, places)
            else:
                pending.append(units)


def _opened(word: Word) -> Word:
    return word._replace(text=NUMBERS.sub(NUMBER, word.text))


def _end(path: Path, length: int) -> Path:
    return path[-length:] if length <= len(path) else (START, *path)


def _is_ready(
    of_end: dict[Path, list[int]],
    units: list[int],
    paths: Sequence[Path],
    opened: Sequence[Path],
    labels: Sequence[Label],
) -> bool:
    """Whether these ends tell labels apart, and each says something.

    Ends that differ only in numbers may have several labels, if their whole paths do as well.
    """
    for end, of_units in of_end.items():
        label = labels[of_units[0]]
        has_several = any(labels[unit] != label for unit in of_units)
        if has_several and end[0] == START:
            raise AmbiguousError(of_units)
        if has_several or _says_little(end, label, paths, of_units):
            return False
    has_one = all(labels[unit] == labels[units[0]] for unit in units)
    is_literal = not any(labels[unit].is_numbered for unit in units)
    return has_one or is_literal or all(opened[unit] == opened[units[0]] for unit in units)


def _phrase(
    end: Path,
    units: list[int],
    paths: Sequence[Path],
    labels: Sequence[Label],
    places: Sequence[int],
) -> Phrase:
    label = labels[units[0]]
    place = 0 if label.is_plain else min(places[unit] for unit in units)
    first, *others = _with_module(end, label, paths, units) if place else end
    words = (Choice("", (first.text,)), *(Choice(w.before, (w.text,)) for w in others))
    return Phrase(label, place, words, tuple(units))


def _word(path: Path, place: int) -> Word:
    """The word at this place from the end; START before the first."""
    return path[-place] if place <= len(path) else START


def _says_little(end: Path, label: Label, paths: Sequence[Path], units: list[int]) -> bool:
    """Whether the next word belongs to it: a number says nothing without the name before it."""
    if end[0].text == START.text:
        return False
    if end[0].text == NUMBER or end[0].text.isdecimal():
        return True
    if len(end) == 1 and end[0].text == _OF_NNX:
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
