"""Leaves that rules are written for, with the words of their paths and the roles of dimensions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardrules._base.text import brief
from shardrules._plan.fold import runs_of
from shardrules._plan.roles import Dims, roles_of

if TYPE_CHECKING:
    from shardrules._plan.fold import Folded
    from shardrules._plan.plan import Plan

# Some 0.3 ms each.
_MOST_PATHS: Final = 4000
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

    def opened(self) -> Word:
        """Return the word with all numbers left open."""
        return self._replace(text=_NUMBERS.sub(NUMBER, self.text))


Path = tuple[Word, ...]


class Unit(NamedTuple):
    """Leaves of one folded path."""

    folded: Folded
    words: Path
    shape: tuple[int, ...]
    dims: Dims
    paths: Sequence[str]
    """Paths of all leaves of the tree."""
    bytes: int
    """Bytes of all its leaves together."""

    @property
    def path(self) -> str:
        """Path of the first leaf."""
        return self.paths[int(self.folded.rows[0])]

    @property
    def names(self) -> tuple[str, ...]:
        """Texts of its words, without the `value` of flax nnx."""
        names = tuple([word.text for word in self.words])
        return names[:-1] if len(names) > 1 and names[-1] == "value" else names

    @property
    def leaves(self) -> int:
        """Number of its leaves."""
        return len(self.folded.rows)

    def with_rows(self, rows: Sequence[int], words: Path | None = None) -> Unit:
        """Return the unit with these of its leaves."""
        return self._replace(
            folded=self.folded._replace(rows=np.array(rows, np.intp)),
            words=self.words if words is None else words,
            bytes=self.bytes // self.leaves * len(rows),
        )

    def numbered(self) -> list[Unit]:
        """Split the unit into one for each of its words with numbers."""
        rows: list[int] = self.folded.rows.tolist()
        texts = "".join(word.before + word.text for word in self.words).split(NUMBER)
        split = [(word, word.text.split(NUMBER)) for word in self.words]
        rows_of: dict[Path, list[int]] = defaultdict(list)
        for row, numbers in _numbers_of_rows(texts, rows, self.paths):
            rest = iter(numbers)
            words = tuple(
                word._replace(text=first + "".join(next(rest) + text for text in others))
                for word, (first, *others) in split
            )
            rows_of[words].append(row)
        return [self.with_rows(of_words, words) for words, of_words in rows_of.items()]


def units_of(plan: Plan, heads: Mapping[int, int] | None = None) -> list[Unit]:
    """Collect the leaves that need a rule; `heads` are sizes of heads by rows of projections."""
    kinds = plan.kinds
    needed = [kind.shape is not None and kind.status != "placed" for kind in kinds]
    needing = (path for path in plan.folded if needed[path.group])
    folded = [part for path in needing for part in _with_names_apart(path, plan.paths)]
    if len(folded) > _MOST_PATHS:
        raise ValueError(
            f"the tree has {len(folded):,} paths that differ not only in numbers, such as "
            f"{brief(plan.paths[folded[0].rows[0]])}; rules that name more than {_MOST_PATHS:,} "
            "are no rules: cut each array's largest dimension, with [('.*', shardrules.fsdp(axis))]"
        )
    shapes = [kind.shape or () for kind in kinds]
    return [
        Unit(path, words, shapes[path.group], dims, plan.paths,
             kinds[path.group].bytes * len(path.rows))
        for path, words, dims in zip(
            folded, _words_of(folded), roles_of(folded, shapes, heads), strict=True
        )
    ]  # fmt: skip


def _with_names_apart(path: Folded, paths: Sequence[str]) -> Iterator[Folded]:
    """Yield a folded path with names such as w1 and w3 apart.

    A folded path `mlp/w{1,3}/kernel` becomes two; `layers_{0..31}/w` and `layers/{0,1}/w` stay.
    """
    parts = path.parts
    names = [place for place in range(1, len(parts), 2) if _is_name(parts, place)]
    if not names:
        yield path
        return
    rows_of: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row, numbers in _numbers_of_rows(parts[::2], path.rows.tolist(), paths):
        rows_of[tuple(numbers[place // 2] for place in names)].append(row)
    for numbers, rows in rows_of.items():
        text_of = dict(zip(names, numbers, strict=True))
        # Numbers of names become text.
        joined = [parts[0]]
        for place in range(1, len(parts), 2):
            if place in text_of:
                joined[-1] += text_of[place] + parts[place + 1]
            else:
                joined += parts[place : place + 2]
        yield path._replace(parts=tuple(joined), rows=np.array(rows, np.intp))


def _is_name(parts: tuple[str, ...], place: int) -> bool:
    """Tell if the numbers there end a few names, of arrays or their modules."""
    before = parts[place - 1]
    is_inside = bool(before) and before[-1] not in "/.[]'"
    words_behind = len(_WORD.findall("".join(parts[place + 1 :])))
    count = sum(len(run) for run in runs_of(parts[place].strip("{}")))
    return is_inside and words_behind <= 1 and count <= _MOST_NUMBERS


def _numbers_of_rows(
    texts: Iterable[str], rows: Iterable[int], paths: Sequence[str]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each row with the numbers of its path, which stand between these texts."""
    pattern = re.compile("([0-9]+)".join(map(re.escape, texts)))
    for row in rows:
        match = pattern.fullmatch(paths[row])
        yield row, match.groups() if match else ()


def _words_of(folded: Sequence[Folded]) -> list[Path]:
    """Split folded paths into words.

    A number that is a word is left open, as is one inside of a name that has many.
    """
    split = [_split_path(path.parts) for path in folded]
    # A name with many numbers may be folded in parts, with a few numbers each.
    texts_of: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for words in split:
        stem: tuple[str, ...] = ()
        for word in words:
            bare = word.opened().text
            # What stands before names the place; numbers in it do not.
            texts_of[(*stem, bare) if bare != word.text else ("",)].add(word.text)
            stem = (*stem, bare)
    open_names = {stem[-1] for stem, texts in texts_of.items() if len(texts) > _MOST_NUMBERS}
    # A name that is left open in one place is so in all: patterns could not tell them apart.
    open_names.update(word.text for words in split for word in words if NUMBER in word.text)
    open_names.discard(NUMBER)
    return [
        tuple(word.opened() if word.opened().text in open_names else word for word in words)
        for words in split
    ]


def _split_path(parts: tuple[str, ...]) -> Path:
    text = "".join(NUMBER if place % 2 else part for place, part in enumerate(parts))
    words = [
        Word(before, NUMBER if _NUMBERS.fullmatch(word) else word)
        for before, word in _WORD.findall(text)
    ]
    return tuple(words) or (Word("", text),)
