r"""Phrases as patterns, as a dialect writes them: `mlp/(gate|up)_proj/kernel`.

A pattern is as loose as a reader would write it, or as tight as it must be. Costs per phrase. Must
not know why leaves share a phrase.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardrules._matching.match_modes import MATCH_MODES
from shardrules._suggesting.wording import START
from shardrules._suggesting.words import NUMBER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardrules._matching.dialects import Dialect
    from shardrules._matching.match_modes import Pattern
    from shardrules._suggesting.wording import Phrase
    from shardrules._suggesting.words import Word

__all__ = ["TIGHTEST", "least_tightness", "pattern_of", "text_pattern"]

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
    """The phrase in a dialect that matches regexes, or windows of them."""
    if MATCH_MODES[dialect.match[-1]].written_as == "window":
        return _window(phrase, dialect.separator)
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


def _window(phrase: Phrase, separator: str) -> tuple[str, ...]:
    components: list[str] = []
    for word in phrase.words:
        if word.names == (START.text,):
            continue
        names = _names(word.names, loose=False)
        if components and separator not in word.before:
            components[-1] += _escaped(word.before) + names
        else:
            components.append(names)
    return tuple(components)


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
