"""Every pattern up to a size, on every text up to a length, against `re`.

The size of a pattern is the number of its atoms, anchors, repeats, groups and bars.
"""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import chain, product
from typing import NamedTuple

from tests.support.engines import NFA, differences
from tests.support.random_patterns import compiles


class Grammar(NamedTuple):
    """What patterns are made of, and the texts that tell them apart: `lead` and then characters."""

    atoms: tuple[str, ...]
    anchors: tuple[str, ...]
    repeats: tuple[str, ...]
    groups: tuple[str, ...]
    characters: str
    text_length: int
    lead: str = ""


# With VERBOSE, "#" and the newline make a comment. No text has a small b: it matches by IGNORECASE.
FULL = Grammar(
    atoms=("a", "b", ".", "[ab]", "[^a]", r"\w", r"\W", "é", "\n", "#"),
    anchors=("^", "$", r"\A", r"\Z", r"\b", r"\B"),
    repeats=("*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "+?", "??", "{2}?", "{0,2}?", "{1,}?"),
    groups=("(", "(?:", "(?i:", "(?s:", "(?m:", "(?x:", "(?a:", "(?-imsx:"),
    characters="aBéÉ\n#",
    text_length=3,
)
# The few operators that interact, so that there is time for larger patterns.
CORE = Grammar(
    atoms=("a", ".", r"\W"),
    anchors=("^", "$", r"\b"),
    repeats=("*", "?", "{1,3}"),
    groups=("(?:",),
    characters="a#\n",
    text_length=4,
)
# Each atom and anchor shows one of the flags of the scope around it.
SCOPED = Grammar(
    atoms=("b", ".", "#\n"),
    anchors=("^b", "b$"),
    repeats=("*",),
    groups=("(?i:", "(?s:", "(?m:", "(?x:", "(?-imsx:"),
    characters="bB#\n",
    text_length=3,
)
# As in a checkpoint: the walk resumes long names where they differ from the one before.
LONG_NAMES = CORE._replace(lead=33 * "#")


class Share(NamedTuple):
    """One of `count` parts of all patterns of a grammar up to a size, with these flags."""

    grammar: Grammar
    size: int
    flags: re.RegexFlag
    number: int
    count: int


def shares(size: int, count: int) -> list[Share]:
    """FULL up to the size with each flag; the others beyond it."""
    parts = [(FULL, size, flag) for flag in (re.NOFLAG, re.I, re.M, re.S, re.X, re.A)]
    parts += [
        (grammar, more, re.NOFLAG) for grammar, more in ((SCOPED, size + 1), (LONG_NAMES, size + 1), (CORE, size + 2))
    ]
    return [Share(*part, number, count) for part in parts for number in range(count)]


def check(share: Share) -> list[str]:
    """Compares a share with `re`, in lists of five; what differs."""
    grammar, size, flag, number, count = share
    compiled = (compiles(pattern, flag) for pattern in _shuffled_patterns(grammar, size)[number::count])
    rules = [one if flag else one.pattern for one in compiled if one is not None]
    assert rules
    # Neighbours in alphabetical order begin alike, and share states.
    return [
        line
        for ordered, options in ((rules, {}), (sorted(rules, key=repr), {}), (rules, NFA))
        for start in range(0, len(rules), 5)
        for line in differences(ordered[start : start + 5], _texts(grammar), **options)
    ]


@cache
def _texts(grammar: Grammar) -> list[str]:
    characters = [product(grammar.characters, repeat=length) for length in range(grammar.text_length + 1)]
    return [grammar.lead + "".join(text) for text in chain.from_iterable(characters)]


@cache
def _shuffled_patterns(grammar: Grammar, size: int) -> list[str]:
    patterns = list(chain.from_iterable(_patterns(grammar, n) for n in range(size + 1)))
    random.Random(size).shuffle(patterns)
    return patterns


@cache
def _patterns(grammar: Grammar, size: int) -> list[str]:
    """All patterns of exactly this size; each is derived in one way only."""
    alternatives = [
        f"{branch}|{others}"
        for n in range(size)
        for branch in _branches(grammar, n)
        for others in _patterns(grammar, size - 1 - n)
    ]
    return _branches(grammar, size) + alternatives


@cache
def _branches(grammar: Grammar, size: int) -> list[str]:
    if size == 0:
        return [""]
    return [
        item + rest for n in range(1, size + 1) for item in _items(grammar, n) for rest in _branches(grammar, size - n)
    ]


@cache
def _items(grammar: Grammar, size: int) -> list[str]:
    anchors = list(grammar.anchors) if size == 1 else []
    repeated = [item + repeat for item in _repeatable(grammar, size - 1) for repeat in grammar.repeats]
    return _repeatable(grammar, size) + anchors + repeated


@cache
def _repeatable(grammar: Grammar, size: int) -> list[str]:
    if size == 0:
        return []
    atoms = list(grammar.atoms) if size == 1 else []
    return atoms + [f"{group}{p})" for group in grammar.groups for p in _patterns(grammar, size - 1)]
