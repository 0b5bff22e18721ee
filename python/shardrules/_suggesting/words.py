r"""Paths as words: `layers/3/mlp/up/kernel` is layers, a number, mlp, up, kernel.

What wording and roles compare. A number that is a word of its own is any number; one inside of a
word is a part of it, such as in `w1`, unless it counts many, as in `layers_12`. Costs once per
folded path. Must not know what a word means.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from shardrules._planning.fold import Folded

__all__ = ["NUMBER", "NUMBERS", "Word", "apart", "numbered", "words_of"]

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
    return [tuple(_opened(word, many) for word in words) for words in split] if many else split


def _opened(word: Word, many: set[str]) -> Word:
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
