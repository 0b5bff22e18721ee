"""Splits paths into words, and writes patterns: the shortest ends of paths that tell labels apart.

A phrase has as few words as tell its leaves from those of other labels, and those that a reader
wants; leaves of one label that differ in one word share a phrase.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._rules.patterns import Pattern

if TYPE_CHECKING:
    from shardrules._plan.fold import Folded
    from shardrules._rules.dialects import Dialect

NUMBER: Final = "\0#"
"""Stands for a number, in a `Word`; no path of a model has it."""
_NUMBERS: Final = re.compile(r"[0-9]+")
# The last word has what stands behind it, such as the bracket of JAX's `keystr`.
_WORD: Final = re.compile(r"([/.\[\]']*)([^/.\[\]']+(?:[/.\[\]']+\Z)?)")
# Distinct numbers of a name, at most, that are names of their own, such as w1 and w3.
_MOST_NUMBERS: Final = 4


class Word(NamedTuple):
    """Word of a path, and the text between it and the word before."""

    before: str
    text: str
    """With NUMBER in the place of numbers that are left open."""


Path = tuple[Word, ...]
_START: Final = Word("", "\0^")


def apart(folded: Iterable[Folded], paths: Sequence[str]) -> Iterator[Folded]:
    """Yield folded paths with names such as w1 and w3 apart.

    A folded path `mlp/w{1,3}/kernel` becomes two; `layers_{0..31}/w` and `layers/{0,1}/w` stay.
    """
    for path in folded:
        parts = path.parts
        names = [place for place in range(1, len(parts), 2) if _is_name(parts, place)]
        rows_of: dict[tuple[str, ...], list[int]] = defaultdict(list)
        rows = path.rows.tolist() if names else []
        for row, numbers in zip(
            rows, _numbers_in(parts[::2], map(paths.__getitem__, rows)), strict=True
        ):
            rows_of[tuple(numbers[place // 2] for place in names)].append(row)
        for numbers, of_numbers in rows_of.items():
            text_of = dict(zip(names, numbers, strict=True))
            # Numbers of names become text.
            joined = [parts[0]]
            for place in range(1, len(parts), 2):
                if place in text_of:
                    joined[-1] += text_of[place] + parts[place + 1]
                else:
                    joined += parts[place : place + 2]
            yield path._replace(parts=tuple(joined), rows=np.array(of_numbers, np.intp))
        if not names:
            yield path


def _numbers_in(texts: Iterable[str], paths: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield the numbers of each path, which stand between these texts."""
    pattern = re.compile("([0-9]+)".join(map(re.escape, texts)))
    for path in paths:
        match = pattern.fullmatch(path)
        yield match.groups() if match else ()


def _is_name(parts: tuple[str, ...], place: int) -> bool:
    """Say whether the numbers there end a few names, of arrays or their modules."""
    before = parts[place - 1]
    is_inside = bool(before) and before[-1] not in "/.[]'"
    words_behind = len(_WORD.findall("".join(parts[place + 1 :])))
    ends = [run.split("..") for run in parts[place].strip("{}").split(",")]
    count = sum(int(end[-1]) - int(end[0]) + 1 for end in ends)
    return is_inside and words_behind <= 1 and count <= _MOST_NUMBERS


def words_of(folded: Sequence[Folded]) -> list[Path]:
    """Split folded paths into words.

    A number that is a word is left open, as is one inside of a name that has many.
    """
    split = [_split_path(path.parts) for path in folded]
    # A name with many numbers may be folded in parts, with a few numbers each.
    texts_of: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for words in split:
        stem: tuple[str, ...] = ()
        for word in words:
            bare = _bare_words(word)
            # What stands before names the place; numbers in it do not.
            texts_of[(*stem, bare) if bare != word.text else ("",)].add(word.text)
            stem = (*stem, bare)
    open_names = {stem[-1] for stem, texts in texts_of.items() if len(texts) > _MOST_NUMBERS}
    # A name that is left open in one place is so in all: patterns could not tell them apart.
    open_names.update(word.text for words in split for word in words if NUMBER in word.text)
    open_names.discard(NUMBER)
    if not open_names:
        return split
    return [
        tuple(_opened(word) if _bare_words(word) in open_names else word for word in words)
        for words in split
    ]


def _bare_words(word: Word) -> str:
    return _NUMBERS.sub(NUMBER, word.text)


def _opened(word: Word) -> Word:
    return word._replace(text=_bare_words(word))


def _split_path(parts: tuple[str, ...]) -> Path:
    text = "".join(NUMBER if place % 2 else part for place, part in enumerate(parts))
    words = [
        Word(before, NUMBER if _NUMBERS.fullmatch(word) else word)
        for before, word in _WORD.findall(text)
    ]
    return tuple(words) or (Word("", text),)


def numbered(words: Path, paths: Iterable[str]) -> Iterator[Path]:
    """Yield the words of each of these paths, with its numbers in the place of open ones."""
    texts = "".join(word.before + word.text for word in words).split(NUMBER)
    split = [(word, word.text.split(NUMBER)) for word in words]
    for numbers in map(iter, _numbers_in(texts, paths)):
        yield tuple(
            word._replace(text=first + "".join(next(numbers) + text for text in rest))
            for word, (first, *rest) in split
        )


# The order in which phrases that differ in one word become one: modules, then arrays, then what is
# around them.
_PLACES: Final = (-2, -1, -3, -4, -5, -6)
# Any path of flax nnx may end so.
_OF_NNX: Final = "value"


class AmbiguousError(Exception):
    """Paths with the same words have several labels."""

    def __init__(self, units: list[int]) -> None:
        super().__init__(units)
        self.units: Final = units


class Label(NamedTuple):
    """Value of a rule, and how its leaves may be named."""

    value: Any
    is_plain: bool
    """True if one word is enough to tell its leaves, as for biases that are replicated."""
    is_known: bool
    """False for leaves that are not understood, which have phrases of their own."""
    meaning: Any = None
    """Roles of the sharded dimensions; another meaning has a rule of its own."""
    is_numbered: bool = False
    """True if its words have numbers that others leave open; its phrases come first."""


class Choice(NamedTuple):
    """Word of a phrase: the names that may stand there."""

    before: str
    names: tuple[str, ...]
    """In the order of the paths."""


class Phrase(NamedTuple):
    """Ends of some paths."""

    label: Label
    place: int
    """Phrases of one place in the model may become one."""
    words: tuple[Choice, ...]
    units: tuple[int, ...]
    """Indices of the paths, ascending."""


def phrases(paths: Sequence[Path], labels: Sequence[Label], places: Sequence[int]) -> list[Phrase]:
    """Find phrases that tell the labels apart, in the order of their first paths.

    Those with numbers come first, plain ones last.

    Args:
        paths: Words of each folded path. Those with equal words have one label.
        labels: Label of each folded path.
        places: Depth of each folded path inside of a layer; 0 outside of layers.
    """
    ends = list(_ends(paths, labels, places))
    for place in _PLACES:
        ends = list(_merged_phrases(ends, place))
    return sorted(
        ends, key=lambda phrase: (not phrase.label.is_numbered, phrase.label.is_plain, phrase.units)
    )


def _ends(
    paths: Sequence[Path], labels: Sequence[Label], places: Sequence[int]
) -> Iterator[Phrase]:
    """Yield for each path the shortest end that only its label has, and that says something."""
    # Paths that differ only in numbers are looked at together: a pattern may leave them open.
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
                path = paths[unit]
                end = path[-length:] if length <= len(path) else (_START, *path)
                of_end[end].append(unit)
            if _is_ready(of_end, units, paths, opened, labels):
                for end, of_units in of_end.items():
                    yield _phrase(end, of_units, paths, labels, places)
            else:
                pending.append(units)


def _is_ready(
    of_end: dict[Path, list[int]],
    units: list[int],
    paths: Sequence[Path],
    opened: Sequence[Path],
    labels: Sequence[Label],
) -> bool:
    """Say whether these ends tell labels apart, and each says something.

    Ends that differ only in numbers may have several labels, if their whole paths do as well.
    """
    for end, of_units in of_end.items():
        label = labels[of_units[0]]
        has_several = any(labels[unit] != label for unit in of_units)
        if has_several and end[0] == _START:
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
    if place and not label.is_plain and len(end) == 2:
        # The word before, if that is the module of all of them inside of a layer.
        first, *others = {_word(paths[unit], 3) for unit in units}
        if not others and first != _START and NUMBER not in first.text:
            end = (first, *end)
    head, *tail = end
    words = (Choice("", (head.text,)), *(Choice(word.before, (word.text,)) for word in tail))
    return Phrase(label, place, words, tuple(units))


def _word(path: Path, place: int) -> Word:
    """Return the word at this place from the end; _START before the first."""
    return path[-place] if place <= len(path) else _START


def _says_little(end: Path, label: Label, paths: Sequence[Path], units: list[int]) -> bool:
    """Say whether the next word belongs to it: a number means nothing without a name before."""
    first = end[0].text
    if first == _START.text:
        return False
    if first == NUMBER or first.isdecimal():
        return True
    is_short = len(end) == 1
    needs_module = not label.is_plain and all(len(paths[unit]) > 1 for unit in units)
    return is_short and (first == _OF_NNX or needs_module)


def _merged_phrases(phrases: Iterable[Phrase], place: int) -> Iterator[Phrase]:
    """Merge phrases of one label that differ only in the word at this place."""
    groups: dict[Any, list[Phrase]] = defaultdict(list)
    for number, phrase in enumerate(phrases):
        words = list(phrase.words)
        key: Any = number
        if len(words) >= -place and words[place].names[0] not in (_START.text, NUMBER):
            words[place] = Choice(words[place].before, ())
            key = (phrase.label, phrase.place, tuple(words))
        groups[key].append(phrase)
    for group in groups.values():
        group.sort(key=lambda phrase: phrase.units)
        words = list(group[0].words)
        if len(group) > 1:
            names = dict.fromkeys(name for phrase in group for name in phrase.words[place].names)
            words[place] = Choice(words[place].before, tuple(names))
        units = tuple(sorted(unit for phrase in group for unit in phrase.units))
        yield group[0]._replace(words=tuple(words), units=units)


TIGHTEST: Final = 4
"""0: names of one family by their common end; 1: the names; 2: to the end of the path; 3: from the
beginning of a word; 4: both."""

_SPECIAL: Final = re.compile(r"([.^$*+?{}\[\]\\|()])")
# Letters of the last part of a name, such as `norm` of `attention_norm` and `layernorm`.
_LEAST_FAMILY: Final = 4
_FEW: Final = 3


def least_tightness(phrase: Phrase) -> int:
    """Return how tight a pattern must be not to match nearly everything."""
    letters = sum(min(map(len, word.names)) for word in phrase.words)
    return 0 if letters >= _FEW else TIGHTEST


def pattern_of(phrase: Phrase, paths: Sequence[Path], dialect: Dialect, tightness: int) -> Pattern:
    """Write the phrase as a regex for the dialect."""
    start, *rest = phrase.words
    if start.names == (_START.text,):
        return (
            "^" + "".join(_escaped_word(word.before) + _names_of(word.names) for word in rest) + "$"
        )
    is_full = dialect.match[-1] != "search"
    regex = _names_of(start.names, is_loose=tightness == 0)
    regex += "".join(_escaped_word(word.before) + _names_of(word.names) for word in rest)
    if tightness > 2:
        regex = _beginning(phrase, paths, is_full=is_full) + regex
    elif is_full:
        regex = ".*" + regex
    return regex + "$" if tightness in (2, TIGHTEST) and not is_full else regex


def _names_of(names: tuple[str, ...], *, is_loose: bool = False) -> str:
    """Write one name; or several as alternatives, or as their common end."""
    if len(names) == 1:
        return _escaped_word(names[0])
    end = "".join(_common_words([name[::-1] for name in names]))[::-1].lstrip("_")
    is_family = len(names) >= _FEW and len(end) >= _LEAST_FAMILY
    if is_loose and is_family and end.replace("_", "").isalpha():
        return _escaped_word(end)
    # The common first and last words, which underscores part.
    split = [name.split("_") for name in names]
    most = min(map(len, split)) - 1
    first = _common_words([words[:most] for words in split])
    last = _common_words([words[::-1][: most - len(first)] for words in split])[::-1]
    middles = ["_".join(words[len(first) : len(words) - len(last)]) for words in split]
    before, after = "".join(f"{word}_" for word in first), "".join(f"_{word}" for word in last)
    return f"{_escaped_word(before)}({'|'.join(map(_escaped_word, middles))}){_escaped_word(after)}"


def _common_words(sequences: Sequence[Sequence[str]]) -> list[str]:
    """Return the items with which all sequences begin."""
    places = takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False))
    return [items[0] for items in places]


def _beginning(phrase: Phrase, paths: Sequence[Path], *, is_full: bool) -> str:
    """Write what stands before the phrase in its paths: nothing, or the end of another word."""
    length = len(phrase.words)
    places = {(len(paths[unit]) == length, paths[unit][-length].before) for unit in phrase.units}
    any_start, start = (".*", "") if is_full else ("", "^")
    begins = [
        f"{start if is_first else any_start}{_escaped_word(before)}"
        for is_first, before in sorted(places)
    ]
    return begins[0] if len(begins) == 1 else f"({'|'.join(begins)})"


def _escaped_word(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text).replace(NUMBER, r"\d+")
