"""Patterns of rules, and the code that the automaton is built from.

Python's own `re` parses patterns and says which characters a class accepts, so nothing can differ
from it. What is not regular (lookaround, backreferences, ...) is left to `re`, with the reason.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from operator import attrgetter
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any, Final, Literal, NamedTuple, TypeGuard

from shardrules._base.text import brief, printable, shown

Pattern = str | re.Pattern[str]
"""The types that a rule's pattern may have."""

ModeName = Literal["search", "fullmatch", "exact"]

_NEVER_MATCHES: Final = "(?!)"


def checked_pattern(index: int, pattern: Any) -> Any:
    """Return the pattern of rule `index`, which is a string or compiled from one."""
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not isinstance(text, str):
        raise TypeError(
            f"rule {index}: the pattern must be a string or a compiled re.Pattern of one, not "
            f"{shown(pattern)}"
        )
    return pattern


# `re` names them when it is imported, where type checkers do not see it.
_OPERATIONS: Final = (
    "ANY", "AT", "IN", "LITERAL", "NOT_LITERAL", "BRANCH", "SUBPATTERN",
    "FAILURE", "MAX_REPEAT", "MIN_REPEAT", "MAXREPEAT",
)  # fmt: skip
(
    ANY, AT, IN, LITERAL, NOT_LITERAL, BRANCH, SUBPATTERN,
    FAILURE, MAX_REPEAT, MIN_REPEAT, MAXREPEAT,
) = attrgetter(*_OPERATIONS)(_constants)  # fmt: skip

# Words of the encoding: csrc/automata/syntax.hpp. Code points are literals.
_CLASS, _ASSERT, _NEVER, _ALTERNATE, _REPEAT, _SEQUENCE = range(0x110000, 0x110006)
_UNBOUNDED: Final = 0xFFFFFFFF
(
    _BEGIN, _BEGIN_LINE, _DOLLAR, _END_LINE, _END,
    _BOUNDARY, _NOT_BOUNDARY, _ASCII_BOUNDARY, _NOT_ASCII_BOUNDARY,
) = range(1, 10)  # fmt: skip

# Beyond these `re` evaluates the pattern itself; `{1000}{1000}` would unroll to a million states.
_MAX_NODES_OF_PATTERN: Final = 20_000
_MAX_NODES_OF_RULES: Final = 4_000_000
_MAX_DEPTH: Final = 100

_ASCII: Final = "".join(map(chr, range(128)))
_METACHARACTER: Final = re.compile(r"[\\.^$*+?{}\[\]|()]")
# As plain ints: `&` of an enum's members costs a microsecond, and each character is asked.
_IGNORECASE, _MULTILINE, _ASCII_ONLY, _DEBUG = map(int, (re.I, re.M, re.A, re.DEBUG))
_ALPHABET_FLAGS: Final = int(re.ASCII | re.LOCALE | re.UNICODE)
# Flags that change which characters a class accepts.
_CLASS_FLAGS: Final = int(re.ASCII | re.UNICODE | re.IGNORECASE | re.DOTALL)
# Python 3.14 made \B match the empty string.
EMPTY_TEXT_HAS_NO_NON_BOUNDARY: Final = re.search(r"\B", "") is None

_NOT_REGULAR: Final = {
    _constants.GROUPREF: "backreference",
    _constants.GROUPREF_EXISTS: "conditional on a group",
    _constants.ATOMIC_GROUP: "atomic group",
    _constants.POSSESSIVE_REPEAT: "possessive repeat",
}
_LOOKAROUNDS: Final = {_constants.ASSERT: "look", _constants.ASSERT_NOT: "negative look"}
# Plainly, and with the MULTILINE flag.
_ANCHORS: Final = {
    _constants.AT_BEGINNING: (_BEGIN, _BEGIN_LINE),
    _constants.AT_BEGINNING_STRING: (_BEGIN, _BEGIN),
    _constants.AT_END: (_DOLLAR, _END_LINE),
    _constants.AT_END_STRING: (_END, _END),
}
_BOUNDARIES: Final = {
    _constants.AT_BOUNDARY: (_BOUNDARY, _ASCII_BOUNDARY),
    _constants.AT_NON_BOUNDARY: (_NOT_BOUNDARY, _NOT_ASCII_BOUNDARY),
}


_BEFORE: Final = ((_constants.AT, _constants.AT_BEGINNING_STRING),)
_AFTER: Final = ((_constants.AT, _constants.AT_END_STRING),)


class PatternCode(NamedTuple):
    """Patterns of one rule list, ready for `_core.RuleSet`."""

    patterns: tuple[str | list[int] | None, ...]
    """Per match mode and rule: a literal, code words, or None where `re` evaluates the rule."""
    classes: tuple[int, ...]
    """Per character class its ASCII members, bit c for character c."""
    oracle: Callable[[int, str], bool]
    """Whether a class, by number, accepts a character."""
    word_class: int
    ascii_word_class: int
    fallbacks: tuple[tuple[int, Callable[[str], object]], ...]
    """(position in `patterns`, search) of the rules that `re` evaluates."""
    reasons: tuple[tuple[int, str], ...]
    """(rule, reason) of the same."""


def _not_regular(op: Any, argument: Any) -> str:
    if op in _LOOKAROUNDS:
        return _LOOKAROUNDS[op] + ("ahead" if argument[0] > 0 else "behind")
    return _NOT_REGULAR.get(op, f"{op} is not known to shardrules")


class _NotRegularError(Exception):
    """Carries the reason why `re` has to evaluate a pattern."""


class _CharClass(NamedTuple):
    ascii_members: int
    fullmatch: Callable[[str], object]


@functools.lru_cache(maxsize=4096)
def _char_class(op: int, argument: object, flags: int) -> _CharClass:
    """Ask `re` which characters a single-character node of a parse tree accepts."""
    operand = list(argument) if isinstance(argument, tuple) else argument
    node = _parser.SubPattern(_parser.State(), [(op, operand)])
    compiled = _compiler.compile(node, flags)
    members = sum([1 << ord(c) for c in compiled.findall(_ASCII)])
    return _CharClass(members, compiled.fullmatch)


class _Lowering:
    """Numbers the character classes of a rule list while its patterns are lowered."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, object, int], int] = {}
        self.classes: list[_CharClass] = []
        self.word_classes = {False: -1, True: -1}
        r"""The classes that \b looks at, all words and ASCII's; -1 if no pattern has one."""

    def number(self, op: int, argument: object, flags: int) -> int:
        key = (op, argument, flags & _CLASS_FLAGS)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.classes)
            self.classes.append(_char_class(*key))
        return number

    def sequence(
        self, items: Sequence[tuple[Any, Any]], flags: int, code: list[int], depth: int
    ) -> int:
        """Append the code of a parse tree to `code`; returns its unrolled size in nodes."""
        if depth > _MAX_DEPTH:
            raise _NotRegularError("nested too deeply for the automaton")
        if len(items) != 1:
            code += (_SEQUENCE, len(items))
        is_plain = not flags & _IGNORECASE
        size = 1 + len(items)
        for op, argument in items:
            if op is LITERAL and is_plain:  # nine of ten
                code.append(argument)
            else:
                size += self._item(op, argument, flags, code, depth) - 1
        if size > _MAX_NODES_OF_PATTERN:
            raise _NotRegularError("too large for the automaton once its repeats are unrolled")
        return size

    def _item(self, op: Any, argument: Any, flags: int, code: list[int], depth: int) -> int:
        if op is SUBPATTERN:
            _, added, removed, content = argument
            if added & _ALPHABET_FLAGS & ~flags:
                # `re` forgets these flags where it skips ahead to a possible first character.
                raise _NotRegularError("scoped ASCII or UNICODE flag")
            return self.sequence(content.data, (flags | added) & ~removed, code, depth + 1)
        if op is MAX_REPEAT or op is MIN_REPEAT:
            low, high, content = argument
            endless = high is MAXREPEAT
            code += (_REPEAT, low, _UNBOUNDED if endless else high)
            size = self.sequence(content.data, flags, code, depth + 1)
            return 2 + size * (low + 1 if endless else int(high))
        if op is BRANCH:
            branches = argument[1]
            code += (_ALTERNATE, len(branches))
            return 1 + sum(self.sequence(b.data, flags, code, depth + 1) for b in branches)
        if op is LITERAL and not flags & _IGNORECASE:
            code.append(argument)
        elif op in (LITERAL, NOT_LITERAL, ANY):
            code += (_CLASS, self.number(op, argument, flags))
        elif op is IN:
            code += (_CLASS, self.number(op, tuple(argument), flags))
        elif op is AT:
            code += (_ASSERT, self._assertion(argument, flags))
        elif op is FAILURE:
            code.append(_NEVER)
        else:
            raise _NotRegularError(_not_regular(op, argument))
        return 1

    def _assertion(self, anchor: Any, flags: int) -> int:
        if anchor in _ANCHORS:
            return _ANCHORS[anchor][bool(flags & _MULTILINE)]
        ascii_only = bool(flags & _ASCII_ONLY)
        word = (_constants.CATEGORY, _constants.CATEGORY_WORD)
        self.word_classes[ascii_only] = self.number(_constants.IN, (word,), flags & _ALPHABET_FLAGS)
        return _BOUNDARIES[anchor][ascii_only]


def _literally(pattern: Pattern) -> str:
    # No path is equal to a compiled pattern.
    return re.escape(pattern) if isinstance(pattern, str) else _NEVER_MATCHES


def compile_patterns(patterns: Sequence[Any], modes: Sequence[ModeName]) -> PatternCode:
    """Lower all patterns of a rule list for the first match mode, then all for the next one."""
    lowering = _Lowering()
    lowered: list[str | list[int] | None] = []
    fallbacks: list[tuple[int, Callable[[str], object]]] = []
    reasons: list[tuple[int, str]] = []
    nodes = 0
    for mode, (index, pattern) in product(modes, enumerate(patterns)):
        is_searched = mode == "search"
        if is_searched and _is_literal(pattern) and nodes + len(pattern) <= _MAX_NODES_OF_RULES:
            nodes += len(pattern)
            lowered.append(pattern)
            continue
        code: list[int] = []
        regex = _literally(pattern) if mode == "exact" else pattern
        try:
            tree = parse(f"rule {index}", regex)
            items = tree.data if is_searched else [*_BEFORE, *tree.data, *_AFTER]
            size = lowering.sequence(items, tree.state.flags, code, 0)
            if nodes + size > _MAX_NODES_OF_RULES:
                raise _NotRegularError("the rules before it fill the automaton")
            nodes += size
            lowered.append(code)
        except _NotRegularError as reason:
            compiled = _compile(index, regex)
            evaluate = compiled.search if is_searched else compiled.fullmatch
            fallbacks.append((len(lowered), evaluate))
            lowered.append(None)
            reasons.append((index, str(reason)))
    fullmatches = [each.fullmatch for each in lowering.classes]
    return PatternCode(
        tuple(lowered),
        tuple([each.ascii_members for each in lowering.classes]),
        lambda number, character: fullmatches[number](character) is not None,
        lowering.word_classes[False],
        lowering.word_classes[True],
        tuple(fallbacks),
        tuple(reasons),
    )


def _is_literal(pattern: Pattern) -> TypeGuard[str]:
    return isinstance(pattern, str) and not _METACHARACTER.search(pattern)


def parse(where: str, regex: Pattern) -> Any:
    """Return the parse tree of a regex; `where` is its place, such as "rule 3", for errors.

    Raises:
        re.error, OverflowError, RecursionError, ValueError: `re` rejects it; the message begins
            with the place.
    """
    text, flags = _text_and_flags(regex)
    try:
        return _parser.parse(text, flags)
    except re.error as error:
        raise _located(where, error, text) from None
    except (OverflowError, RecursionError, ValueError) as error:
        raise type(error)(f"{where}: {error}: {brief(text)}") from None


def check_template(pattern: Pattern, template: str) -> None:
    """Check a regex, and what `re.sub` shall put in the place of what it finds."""
    parse("pattern", pattern)
    try:
        re.sub(pattern, template, "")
    except (re.error, IndexError) as error:
        text = _text_and_flags(pattern)[0]
        raise re.error(
            f"{brief(template)} does not go with the pattern {brief(text)}: {error}; a group is "
            r"(...), and \1 in its place"
        ) from None


def _compile(index: int, pattern: Pattern) -> re.Pattern[str]:
    try:
        # Parsing has warned already, if there was a reason to.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern)
    except re.error as error:
        raise _located(f"rule {index}", error, _text_and_flags(pattern)[0]) from None


def _text_and_flags(pattern: Pattern) -> tuple[str, int]:
    if isinstance(pattern, str):
        return pattern, 0
    return pattern.pattern, pattern.flags & ~_DEBUG


def pattern_shown(pattern: Pattern) -> str:
    """Return a rule's pattern: a string as it is, anything else as Python writes it."""
    return pattern if isinstance(pattern, str) else repr(pattern)


def with_inline_flags(pattern: Pattern) -> str:
    """Return a pattern as a text: the flags of a compiled one stand before it."""
    text, flags = _text_and_flags(pattern)
    letters = "".join(letter for letter in "aimsx" if flags & getattr(re, letter.upper()))
    return f"(?{letters}){text}" if letters else text


def _located(where: str, error: re.error, pattern: str) -> re.error:
    """Return the error with the rule and a caret under the place; each line is printable."""
    located = re.error(error.msg, pattern, error.pos)
    message = printable(f"{where}: {located}")
    if located.pos is not None and located.lineno is not None and located.colno is not None:
        line = pattern.split("\n")[located.lineno - 1]
        before = printable(f"    {line[: located.colno - 1]}")
        message += f"\n{printable(f'    {line}')}\n{' ' * len(before)}^"
    elif pattern:
        message += f"\n{printable(f'    {pattern}')}"
    if error.pos == 0 and pattern.startswith("*"):
        meant = printable(repr(f".*{pattern.lstrip('*')}"))
        message += f"\npatterns are regular expressions, not globs: write {meant}"
    located.args = (message,)
    return located
