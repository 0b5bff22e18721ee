"""Writes patterns: the shortest ends of paths that tell labels apart.

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

from shardrules._base.specs import Entries
from shardrules._base.text import brief
from shardrules._plan.fold import runs_of
from shardrules._plan.roles import Dims, roles_of

if TYPE_CHECKING:
    from shardrules._plan.fold import Folded
    from shardrules._plan.plan import Plan
    from shardrules._rules.dialects import Dialect
    from shardrules._rules.patterns import Pattern

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
        """Split the unit into one for each leaf, with the numbers of its path as names."""
        rows: list[int] = self.folded.rows.tolist()
        return [
            self.with_rows([row], tuple(Word(*word) for word in _WORD.findall(self.paths[row])))
            for row in rows
        ]


def units_of(plan: Plan, head_dim: int | None = None) -> list[Unit]:
    """Collect the leaves that need a rule; `head_dim` is as in `roles_of`."""
    kinds = plan.kinds
    needs_rule = [kind.shape is not None and kind.status != "placed" for kind in kinds]
    undecided = (path for path in plan.folded if needs_rule[path.group])
    folded = [part for path in undecided for part in _with_names_apart(path, plan.paths)]
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
            folded, _words_of(folded), roles_of(folded, shapes, head_dim), strict=True
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
    pattern = re.compile("([0-9]+)".join(map(re.escape, parts[::2])))
    of_path: list[int] = path.rows.tolist()
    for row in of_path:
        match = pattern.fullmatch(paths[row])
        assert match is not None
        rows_of[tuple(match[place // 2 + 1] for place in names)].append(row)
    for numbers, rows in rows_of.items():
        text_of = dict(zip(names, numbers, strict=True))
        # Numbers of names become text.
        texts = [parts[0]]
        for place in range(1, len(parts), 2):
            if place in text_of:
                texts[-1] += text_of[place] + parts[place + 1]
            else:
                texts += parts[place : place + 2]
        yield path._replace(parts=tuple(texts), rows=np.array(rows, np.intp))


def _is_name(parts: tuple[str, ...], place: int) -> bool:
    """Tell if the numbers there end a few names, of arrays or their modules."""
    before = parts[place - 1]
    is_inside = bool(before) and before[-1] not in "/.[]'"
    words_behind = len(_WORD.findall("".join(parts[place + 1 :])))
    count = sum(len(run) for run in runs_of(parts[place].strip("{}")))
    return is_inside and words_behind <= 1 and count <= _MOST_NUMBERS


def _words_of(folded: Sequence[Folded]) -> list[Path]:
    """Split folded paths into words.

    A number that is a word is left open, as is one inside of a name that has many.
    """
    paths = [_split_path(path.parts) for path in folded]
    # A name with many numbers may be folded in parts, with a few numbers each.
    texts_of: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for words in paths:
        stem: tuple[str, ...] = ()
        for word in words:
            bare = word.opened().text
            # What stands before names the place; numbers in it do not.
            texts_of[(*stem, bare) if bare != word.text else ("",)].add(word.text)
            stem = (*stem, bare)
    open_names = {stem[-1] for stem, texts in texts_of.items() if len(texts) > _MOST_NUMBERS}
    # A name that is left open in one place is so in all: patterns could not tell them apart.
    open_names.update(word.text for words in paths for word in words if NUMBER in word.text)
    open_names.discard(NUMBER)
    return [
        tuple(word.opened() if word.opened().text in open_names else word for word in words)
        for words in paths
    ]


def _split_path(parts: tuple[str, ...]) -> Path:
    text = "".join(NUMBER if place % 2 else part for place, part in enumerate(parts))
    words = [
        Word(before, NUMBER if _NUMBERS.fullmatch(word) else word)
        for before, word in _WORD.findall(text)
    ]
    return tuple(words) or (Word("", text),)


_START: Final = Word("", "\0^")
# The order in which phrases that differ in one word become one: modules, then arrays, then what is
# around them.
_PLACES: Final = (-2, -1, -3, -4, -5, -6)
# Any path of flax nnx may end so.
_OF_NNX: Final = "value"


class Label(NamedTuple):
    """Spec of a rule, and how its leaves may be named."""

    spec: Entries
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
    depth: int
    """Of the words inside of a layer, 0 outside: phrases of one depth may become one."""
    words: tuple[Choice, ...]
    units: tuple[int, ...]
    """Indices of the units, ascending."""


class _Leaf(NamedTuple):
    """A unit while its phrase is looked for."""

    number: int
    unit: Unit
    label: Label
    opened: Path
    """Its words with all numbers left open."""


def phrases(labelled: Iterable[tuple[Unit, Label]]) -> list[Phrase]:
    """Find phrases that tell the labels apart, in the order of their first paths.

    Those with numbers come first, plain ones last.

    Raises:
        ValueError: Leaves with the same words have several labels.
    """
    leaves = [
        _Leaf(number, unit, label, tuple([word.opened() for word in unit.words]))
        for number, (unit, label) in enumerate(labelled)
    ]
    ends = list(_shortest_ends(leaves))
    for place in _PLACES:
        ends = list(_merged(ends, place))
    return sorted(
        ends, key=lambda phrase: (not phrase.label.is_numbered, phrase.label.is_plain, phrase.units)
    )


def _shortest_ends(leaves: list[_Leaf]) -> Iterator[Phrase]:
    """Yield for each path the shortest end that only its label has, and that says something."""
    # Paths that differ only in numbers are looked at together: a pattern may leave them open.
    pending = [leaves]
    length = 0
    while pending:
        length += 1
        longer: dict[Any, list[_Leaf]] = defaultdict(list)
        for number, group in enumerate(pending):
            for leaf in group:
                longer[number, _word(leaf.opened, length)].append(leaf)
        pending = []
        for group in longer.values():
            of_end: dict[Path, list[_Leaf]] = defaultdict(list)
            for leaf in group:
                words = leaf.unit.words
                of_end[words[-length:] if length <= len(words) else (_START, *words)].append(leaf)
            if _is_ready(of_end, group):
                for end, of_this in of_end.items():
                    yield _phrase(end, of_this)
            else:
                pending.append(group)


def _is_ready(of_end: dict[Path, list[_Leaf]], leaves: list[_Leaf]) -> bool:
    """Tell if these ends tell labels apart, and each says something.

    Ends that differ only in numbers may have several labels, if their whole paths do as well.
    """
    for end, of_this in of_end.items():
        has_several = any(leaf.label != of_this[0].label for leaf in of_this)
        if has_several and end[0] == _START:
            first, second, *_ = (leaf.unit for leaf in of_this)
            raise ValueError(
                f"two leaves have the path {brief(first.path)}, with the shapes {first.shape} and "
                f"{second.shape}: rename one"
            )
        if has_several or _needs_word_before(end, of_this):
            return False
    first_leaf, *others = leaves
    if all(leaf.label == first_leaf.label for leaf in others):
        return True
    if not any(leaf.label.is_numbered for leaf in leaves):
        return True
    length = len(next(iter(of_end)))
    labels_of: dict[Path, set[Label]] = defaultdict(set)
    for leaf in leaves:
        for part in leaf.unit.numbered():
            labels_of[part.words[-length:]].add(leaf.label)
    are_apart = all(len(labels) == 1 for labels in labels_of.values())
    return are_apart and all(leaf.opened == first_leaf.opened for leaf in others)


def _phrase(end: Path, leaves: list[_Leaf]) -> Phrase:
    label = leaves[0].label
    depth = 0 if label.is_plain else min([_depth(leaf.unit) for leaf in leaves])
    if depth and len(end) == 2:
        # The word before, if that is the module of all of them inside of a layer.
        first, *others = {_word(leaf.unit.words, 3) for leaf in leaves}
        if not others and first != _START and NUMBER not in first.text:
            end = (first, *end)
    head, *tail = end
    words = (Choice("", (head.text,)), *(Choice(word.before, (word.text,)) for word in tail))
    return Phrase(label, depth, words, tuple([leaf.number for leaf in leaves]))


def _depth(unit: Unit) -> int:
    """Return how many words stand inside of a layer; 0 outside of layers."""
    numbers = [place for place, word in enumerate(unit.words) if NUMBER in word.text]
    is_outside = not numbers and "layers" not in unit.dims.sides
    return 0 if is_outside else len(unit.words) - (numbers or [0])[0]


def _word(path: Path, place: int) -> Word:
    """Return the word at this place from the end; _START before the first."""
    return path[-place] if place <= len(path) else _START


def _needs_word_before(end: Path, leaves: list[_Leaf]) -> bool:
    """Tell if the next word belongs to it: a number means nothing without a name before."""
    first = end[0].text
    if first == _START.text:
        return False
    if first == NUMBER or first.isdecimal():
        return True
    is_module_long = all(len(leaf.opened) > 1 for leaf in leaves)
    needs_module = not leaves[0].label.is_plain and is_module_long
    return len(end) == 1 and (first == _OF_NNX or needs_module)


def _merged(phrases: Iterable[Phrase], place: int) -> Iterator[Phrase]:
    """Merge phrases of one label that differ only in the word at this place."""
    groups: dict[Any, list[Phrase]] = defaultdict(list)
    for number, phrase in enumerate(phrases):
        words = list(phrase.words)
        key: Any = number
        if len(words) >= -place and words[place].names[0] not in (_START.text, NUMBER):
            words[place] = Choice(words[place].before, ())
            key = (phrase.label, phrase.depth, tuple(words))
        groups[key].append(phrase)
    for group in groups.values():
        group.sort(key=lambda phrase: phrase.units)
        words = list(group[0].words)
        if len(group) > 1:
            names = dict.fromkeys(name for phrase in group for name in phrase.words[place].names)
            words[place] = Choice(words[place].before, tuple(names))
        units = tuple(sorted(unit for phrase in group for unit in phrase.units))
        yield group[0]._replace(words=tuple(words), units=units)


_SPECIAL: Final = re.compile(r"([.^$*+?{}\[\]\\|()])")
_FEW: Final = 3


def is_short(phrase: Phrase) -> bool:
    """Tell if a pattern of the words alone would match nearly everything."""
    return sum(min(map(len, word.names)) for word in phrase.words) < _FEW


def pattern_of(
    phrase: Phrase, units: Sequence[Unit], dialect: Dialect, *, is_tight: bool
) -> Pattern:
    """Write the phrase as a regex for the dialect; a tight one bounds it on both sides."""
    start, *rest = phrase.words
    behind = "".join(_escaped_word(word.before) + _names_of(word.names) for word in rest)
    if start.names == (_START.text,):
        return f"^{behind}$"
    is_full = dialect.match[-1] != "search"
    regex = _names_of(start.names, is_loose=not is_tight) + behind
    if is_tight:
        regex = _beginning(phrase, units, is_full=is_full) + regex
        return regex if is_full else f"{regex}$"
    return f".*{regex}" if is_full else regex


def _names_of(names: tuple[str, ...], *, is_loose: bool = False) -> str:
    """Write one name; or several as alternatives, or, such as those of norms, as their end."""
    if len(names) == 1:
        return _escaped_word(names[0])
    end = "".join(_common_words([name[::-1] for name in names]))[::-1].lstrip("_")
    is_family = len(names) >= _FEW and len(end) > _FEW and end.replace("_", "").isalpha()
    if is_loose and is_family:
        return end
    # The common first and last words, which underscores part, stand outside.
    words_of_names = [name.split("_") for name in names]
    most = min(map(len, words_of_names)) - 1
    first = _common_words([words[:most] for words in words_of_names])
    last = _common_words([words[::-1][: most - len(first)] for words in words_of_names])[::-1]
    middles = ["_".join(words[len(first) : len(words) - len(last)]) for words in words_of_names]
    before, after = "".join(f"{word}_" for word in first), "".join(f"_{word}" for word in last)
    return f"{_escaped_word(before)}({'|'.join(map(_escaped_word, middles))}){_escaped_word(after)}"


def _common_words(sequences: Sequence[Sequence[str]]) -> list[str]:
    """Return the items with which all sequences begin."""
    places = takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False))
    return [items[0] for items in places]


def _beginning(phrase: Phrase, units: Sequence[Unit], *, is_full: bool) -> str:
    """Write what stands before the phrase in its paths: nothing, or the end of another word."""
    length = len(phrase.words)
    paths = [units[number].words for number in phrase.units]
    places = {(len(path) == length, path[-length].before) for path in paths}
    any_start, start = (".*", "") if is_full else ("", "^")
    begins = [
        f"{start if is_first else any_start}{_escaped_word(before)}"
        for is_first, before in sorted(places)
    ]
    return begins[0] if len(begins) == 1 else f"({'|'.join(begins)})"


def _escaped_word(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text).replace(NUMBER, r"\d+")
