"""From leaves with labels to a few phrases that tell the labels apart: the ends of their paths.

A phrase has as few words as tell its leaves from those of other labels, and those that a reader
wants; leaves of one label that differ in one word share a phrase. Costs per folded path and word.
Must not know what a label means, nor how a dialect writes a pattern.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._rules.patterns import MATCH_MODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardrules._plan.fold import Folded
    from shardrules._rules.dialects import Dialect
    from shardrules._rules.patterns import Pattern

NUMBER: Final = "\0#"
"""Stands for a number, in a `Word`; no path of a model has it."""
NUMBERS: Final = re.compile(r"[0-9]+")

# Of a name with a number inside, so many numbers at most are names of their own.
_MOST_NAMES: Final = 4
# The last one has what stands behind it, such as the bracket of JAX's `keystr`.
_WORD: Final = re.compile(r"([/.\[\]']*)([^/.\[\]']+(?:[/.\[\]']+\Z)?)")
_OPEN: Final = re.escape(NUMBER)


class Word(NamedTuple):
    """A word of a path, and the text between it and the word before."""

    before: str
    text: str
    """With NUMBER in the place of numbers that are left open."""


def apart(folded: Iterable[Folded], paths: Sequence[str]) -> list[Folded]:
    """The folded paths, with names such as w1 and w3 apart.

    A folded path `mlp/w{1,3}/kernel` becomes two; `layers_{0..31}/w` and `layers/{0,1}/w` stay.
    """
    found = []
    for one in folded:
        open_names = [i for i in range(1, len(one.parts), 2) if _is_name(one.parts, i)]
        if not open_names:
            found.append(one)
            continue
        rows_of: dict[tuple[str, ...], list[int]] = defaultdict(list)
        pattern = re.compile(
            "".join(
                re.escape(part) if i % 2 == 0 else "([0-9]+)" if i in open_names else "[0-9]+"
                for i, part in enumerate(one.parts)
            )
        )
        for row in map(int, one.rows):
            match = pattern.fullmatch(paths[row])
            rows_of[match.groups() if match else ()].append(row)
        for numbers, rows in rows_of.items():
            found.append(
                one._replace(
                    parts=_with_numbers(one.parts, dict(zip(open_names, numbers, strict=True))),
                    rows=np.array(rows, np.intp),
                )
            )
    return found


def _is_name(parts: tuple[str, ...], place: int) -> bool:
    """Whether the numbers there end a few names, of arrays or their modules."""
    before = parts[place - 1]
    is_inside = bool(before) and before[-1] not in "/.[]'"
    words_behind = len(_WORD.findall("".join(parts[place + 1 :])))
    return is_inside and words_behind <= 1 and _count(parts[place]) <= _MOST_NAMES


def _count(numbers: str) -> int:
    ends = [run.split("..") for run in numbers.strip("{}").split(",")]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


def _with_numbers(parts: tuple[str, ...], numbers: dict[int, str]) -> tuple[str, ...]:
    """The parts with these numbers as text."""
    joined = [parts[0]]
    for place in range(1, len(parts), 2):
        if place in numbers:
            joined[-1] += numbers[place] + parts[place + 1]
        else:
            joined += [parts[place], parts[place + 1]]
    return tuple(joined)


def words_of(folded: Sequence[Folded]) -> list[tuple[Word, ...]]:
    """Per folded path its words.

    A number that is a word is left open, as is one inside of a name that has many.
    """
    split = [_split(one.parts) for one in folded]
    # A name with many numbers may be folded in parts, with a few numbers each.
    numbers_of: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for words in split:
        for stem, word in _stems(words):
            numbers_of[stem].add(word)
    many = {stem[-1] for stem, names in numbers_of.items() if len(names) > _MOST_NAMES}
    # A name that is left open in one place is so in all: patterns could not tell them apart.
    many.update(word.text for words in split for word in words if NUMBER in word.text)
    many.discard(NUMBER)
    return (
        [tuple(_opened_words(word, many) for word in words) for words in split] if many else split
    )


def _opened_words(word: Word, many: set[str]) -> Word:
    bare = NUMBERS.sub(NUMBER, word.text)
    return word._replace(text=bare) if bare in many else word


def _split(parts: tuple[str, ...]) -> tuple[Word, ...]:
    text = "".join(NUMBER if place % 2 else part for place, part in enumerate(parts))
    words = [
        Word(before, NUMBER if NUMBERS.fullmatch(word) else word)
        for before, word in _WORD.findall(text)
    ]
    return tuple(words) or (Word("", text),)


def _stems(words: tuple[Word, ...]) -> list[tuple[tuple[str, ...], str]]:
    """Per word (the words up to it without their numbers, the word)."""
    stems: list[tuple[tuple[str, ...], str]] = []
    stem: tuple[str, ...] = ()
    for word in words:
        bare = NUMBERS.sub(NUMBER, word.text)
        # What stands before names the place; numbers in it do not.
        stems.append(((*stem, bare) if bare != word.text else ("",), word.text))
        stem = (*stem, bare)
    return stems


def numbered(words: tuple[Word, ...], paths: Iterable[str]) -> list[tuple[Word, ...]]:
    """The words of each of these paths, with its own numbers in the place of open ones."""
    pattern = re.compile(
        "".join(re.escape(word.before + word.text).replace(_OPEN, "([0-9]+)") for word in words)
    )
    found = []
    for path in paths:
        match = pattern.fullmatch(path)
        numbers = iter(match.groups() if match else ())
        found.append(tuple(_with(word, numbers) for word in words))
    return found


def _with(word: Word, numbers: Iterator[str]) -> Word:
    """The word with the next numbers in the place of open ones."""
    first, *texts = word.text.split(NUMBER)
    return word._replace(text=first + "".join(next(numbers) + text for text in texts))


TIGHTEST: Final = 4
"""0: names of one family by their common end; 1: the names; 2: to the end of the path; 3: from the
beginning of a word; 4: both."""

_SPECIAL: Final = re.compile(r"([.^$*+?{}\[\]\\|()])")
# The last part of a name, such as `norm` of `attention_norm` and `layernorm`.
_LEAST_FAMILY: Final = 4
_FEW: Final = 3


def least_tightness(phrase: Phrase) -> int:
    """How tight a pattern must be not to match nearly everything."""
    letters = sum(min(map(len, word.names)) for word in phrase.words)
    return 0 if letters >= _FEW else TIGHTEST


def pattern_of(
    phrase: Phrase, paths: Sequence[tuple[Word, ...]], dialect: Dialect, tightness: int
) -> Pattern:
    """Return the phrase as a regex for the dialect."""
    start, *rest = phrase.words
    if start.names == (START.text,):
        return "^" + _joined(rest, loose=False, first=True) + "$"
    regex = _joined(phrase.words, loose=tightness == 0)
    whole = MATCH_MODES[dialect.match[-1]].method == "fullmatch"
    if tightness > 2:
        regex = _beginning(phrase, paths, whole) + regex
    elif whole:
        regex = ".*" + regex
    return regex + "$" if tightness in (2, TIGHTEST) and not whole else regex


def text_pattern(path: tuple[Word, ...]) -> str | None:
    """A folded path as transformers writes it: `*` is a number between dots; None elsewhere."""
    numbers = [place for place, word in enumerate(path) if NUMBER in word.text]
    if any(path[n] != (".", NUMBER) or n == 0 or n - 1 in numbers for n in numbers):
        return None
    return "".join(word.before + word.text.replace(NUMBER, "*") for word in path)


def _joined(words: Sequence[object], *, loose: bool, first: bool = False) -> str:
    parts = []
    for place, word in enumerate(words):
        before = _escaped(word.before) if place or first else ""  # type: ignore[attr-defined]
        parts.append(before + _names(word.names, loose=loose and not place))  # type: ignore[attr-defined]
    return "".join(parts)


def _names(names: tuple[str, ...], *, loose: bool) -> str:
    """One name; or several as alternatives, or as their common end."""
    if len(names) == 1:
        return _escaped(names[0])
    end = _common_end(names).lstrip("_")
    if (
        loose
        and len(names) >= _FEW
        and len(end) >= _LEAST_FAMILY
        and end.replace("_", "").isalpha()
    ):
        return _escaped(end)
    before, after = _affixes(names)
    middles = [name[len(before) : len(name) - len(after)] for name in names]
    return f"{_escaped(before)}({'|'.join(map(_escaped, middles))}){_escaped(after)}"


def _common_end(names: tuple[str, ...]) -> str:
    shortest = min(names, key=len)
    for size in range(len(shortest), 0, -1):
        if all(name.endswith(shortest[-size:]) for name in names):
            return shortest[-size:]
    return ""


def _affixes(names: tuple[str, ...]) -> tuple[str, str]:
    """What all names begin and end with, in whole words that underscores part."""
    split = [name.split("_") for name in names]
    most = min(map(len, split)) - 1
    before = _common([parts[:most] for parts in split])
    after = _common([parts[::-1][: most - len(before)] for parts in split])[::-1]
    return "".join(f"{part}_" for part in before), "".join(f"_{part}" for part in after)


def _common(lists: list[list[str]]) -> list[str]:
    common = []
    for parts in zip(*lists, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return common


def _beginning(phrase: Phrase, paths: Sequence[tuple[Word, ...]], whole: bool) -> str:
    """What stands before the phrase in its paths: nothing, or the end of another word."""
    length = len(phrase.words)
    found = {(len(paths[unit]) == length, paths[unit][-length].before) for unit in phrase.units}
    any_start = ".*" if whole else ""
    begins = [
        f"{'^' if first and not whole else '' if first else any_start}{_escaped(before)}"
        for first, before in sorted(found)
    ]
    return begins[0] if len(begins) == 1 else f"({'|'.join(begins)})"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text).replace(NUMBER, r"\d+")


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
