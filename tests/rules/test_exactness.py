"""The chosen rule is the first whose re.search hits: each way through shardrules, checked against `re` itself.

Random rule lists, CPython's own tables, the corpus, and every pattern up to a size on every text up to a length. A rule
is a pattern here, and its spec the rule's index; the size of a pattern is the number of its atoms, anchors, repeats,
groups and bars.
"""

from __future__ import annotations

import random
import re
import signal
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, reduce
from itertools import chain, product
from operator import or_
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.tree_util import tree_leaves

import shardrules as sr
from tests.support.folders import DATA
from tests.support.random_patterns import FLAGS, compiles, random_pattern, random_text
from tests.support.slow import slow
from tests.support.work import counters

Rule = str | re.Pattern[str]

NO_RULE = -1
# What is met for the first time is simulated; all has become states after so many rounds.
ROUNDS = 20
# With no memory everything is simulated, always.
NFA = {"memory_budget": 0}


def differences(rules: Sequence[Rule], paths: Sequence[str], rounds: int = 1, **options: Any) -> list[Any]:
    """For each path on which first_match, all_matches or a walk differs from `re`: all that repeats it."""
    patterns = [re.compile(rule) for rule in rules]
    every = {path: [i for i, pattern in enumerate(patterns) if pattern.search(path)] for path in paths}
    indexed = sr.Rules([(rule, index) for index, rule in enumerate(rules)], **options)
    # A walk wants a rule for every leaf.
    walked = sr.Rules([*indexed, ("", NO_RULE)], **options)
    found: list[Any] = []

    def compare(call: str, path: str, expected: object, answer: object) -> None:
        if answer != expected:
            found.append((call, path, expected, answer, rules, options))

    for _ in range(rounds):
        for path in paths:
            compare("first_match", path, next(iter(every[path]), None), indexed.first_match(path))
            compare("all_matches", path, every[path], indexed.all_matches(path))
        for tree in _trees(paths):
            for path, rule in zip(tree_leaves(tree), tree_leaves(walked.match(tree, strict=False)), strict=True):
                compare("match", path, next(iter(every[path]), NO_RULE), rule)
    return found


def _trees(paths: Sequence[str]) -> Iterator[Any]:
    """All paths as the keys of one dict; and those of one depth in dicts in dicts. A leaf is its own path."""
    yield dict(zip(paths, paths, strict=True))
    depths = {path.count("/") for path in paths}
    for depth in depths if depths != {0} else ():
        tree: dict[str, Any] = {}
        for path in paths:
            if path.count("/") == depth:
                *outer, last = path.split("/")
                node = tree
                for key in outer:
                    node = node.setdefault(key, {})
                node[last] = path
        yield tree


TEXTS = 8
BUDGETS = (1, 3000, 1 << 20)


class TooSlowForReError(Exception):
    pass


def random_rules(rng):
    irregular = rng.random() < 0.3
    size = rng.choice((1, 2, 5))
    patterns = []
    while len(patterns) < size:
        pattern = compiles(random_pattern(rng, irregular=irregular), rng.choice(FLAGS))
        if pattern is not None:
            patterns.append(pattern)
    return patterns


@contextmanager
def patience(seconds):
    """`re` takes exponential time on some patterns; nothing is learnt by waiting for it."""

    def stop(*_):
        raise TooSlowForReError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("lists", [500, slow(9_000)])
def test_random_rule_lists(rng, lists):
    found, slow_lists = [], 0
    for _ in range(lists):
        patterns, texts = random_rules(rng), [random_text(rng) for _ in range(TEXTS)]
        try:
            with patience(1.0):
                found += differences(patterns, texts, memory_budget=rng.choice(BUDGETS))
        except TooSlowForReError:
            slow_lists += 1
    assert found == []
    assert slow_lists < lists / 50


def test_patterns_of_cpython():
    """The tables of CPython's own tests, (pattern, string, outcome, ...): each alone, and all as one rule list."""
    reason = "this Python was built without its test package"
    tests = pytest.importorskip("test.re_tests", reason=reason).tests
    every = []
    for pattern, text, *_ in tests:
        compiled = compiles(pattern)
        if compiled is None:
            with pytest.raises(re.error):
                sr.Rules([(pattern, None)])
            continue
        every.append(compiled)
        assert differences([compiled], [text, text + "\n", "", "x" + text]) == []
        assert sr.Rules([(pattern, None)]).first_match(text) == (0 if re.search(pattern, text) else None)
    assert len(tests) > len(every) > 350
    assert differences(every, [text for _, text, *_ in tests]) == []


@given(st.text(max_size=20))
def test_any_character(text):
    patterns = (r"\w\W", r"(?i)[à-ÿ]", r"\s\S", r"[^\x00-\uffff]", r"\b\d", ".$")
    assert differences([re.compile(p) for p in patterns], [text]) == []


def test_every_code_point_of_a_class():
    """Non-ASCII members of a class are asked from `re` when first met."""
    pattern = re.compile(r"^(?:\w|[^\W\d]|(?i:[k-sß]))$")
    rules = sr.Rules([(pattern, None)])
    step = 17  # all planes, in a few seconds
    for code in range(0, sys.maxunicode + 1, step):
        assert (rules.first_match(chr(code)) == 0) == bool(pattern.search(chr(code))), code


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a(?=b)", "lookahead"),
        ("a(?!b)", "negative lookahead"),
        ("(?<=a)b", "lookbehind"),
        ("(?<!a)b", "negative lookbehind"),
        (r"(a)\1", "backreference"),
        ("(a)?(?(1)b|c)", "conditional on a group"),
        ("(?>a+)b", "atomic group"),
        ("a++b", "possessive repeat"),
        ("(?a:\\w)b", "scoped ASCII or UNICODE flag"),
        ("((x{100}){100}){100}y", "too large for the automaton once its repeats are unrolled"),
        ("(" * 120 + "a" + ")" * 120, "nested too deeply for the automaton"),
    ],
)
def test_fallbacks_are_named(pattern, reason):
    rules = sr.Rules([("first", None), (pattern, None)])
    assert rules.fallbacks == ((1, reason),)


def test_a_huge_literal_is_left_to_re(monkeypatch):
    for limit in ("_MAX_NODES_OF_PATTERN", "_MAX_NODES_OF_RULES"):
        monkeypatch.setattr(f"shardrules._rules.patterns.{limit}", 4_000)
    rules = sr.Rules([("x" * 5_000, None), ("y", None)])
    assert rules.fallbacks == ((0, "too large for the automaton once its repeats are unrolled"),)
    assert rules.first_match("xy") == 1


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


def shares(size: int, count: int) -> list[tuple[Grammar, int, re.RegexFlag, int, int]]:
    """Parts of all patterns up to a size: of FULL with each flag; of the others beyond it."""
    parts = [(FULL, size, flag) for flag in (re.NOFLAG, re.I, re.M, re.S, re.X, re.A)]
    parts += [
        (grammar, more, re.NOFLAG) for grammar, more in ((SCOPED, size + 1), (LONG_NAMES, size + 1), (CORE, size + 2))
    ]
    return [(*part, number, count) for part in parts for number in range(count)]


@pytest.mark.parametrize(
    ("grammar", "size", "flag", "number", "count"),
    [*shares(size=1, count=1), *(slow(*share) for share in shares(size=2, count=4))],
)
def test_every_small_pattern(grammar, size, flag, number, count):
    """One of `count` parts of them, in lists of five."""
    compiled = (compiles(pattern, flag) for pattern in _shuffled_patterns(grammar, size)[number::count])
    rules = [one if flag else one.pattern for one in compiled if one is not None]
    assert rules
    # Neighbours in alphabetical order begin alike, and share states.
    for ordered, options in ((rules, {}), (sorted(rules, key=repr), {}), (rules, NFA)):
        for start in range(0, len(rules), 5):
            assert differences(ordered[start : start + 5], _texts(grammar), **options) == []


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


def test_a_difference_is_reported(monkeypatch):
    monkeypatch.setattr(sr.Rules, "all_matches", lambda rules, path: [0])
    assert differences(["b", "a"], ["a"], **NFA) == [("all_matches", "a", [1], [0], ["b", "a"], NFA)]


CORPUS = tomllib.loads((DATA / "corpus.toml").read_text("utf-8"))
CASES = [
    pytest.param(case["rules"], case["paths"], id=f"{group}: {case['name']}")
    for group, cases in CORPUS.items()
    for case in cases
]


def rule_of(entry: str | list[str]) -> Rule:
    if isinstance(entry, str):
        return entry
    pattern, letters = entry
    return re.compile(pattern, reduce(or_, (re.RegexFlag[letter.upper()] for letter in letters)))


@pytest.mark.parametrize("options", [{"rounds": ROUNDS}, NFA], ids=["dfa", "nfa"])
@pytest.mark.parametrize(("rules", "expected"), CASES)
def test_corpus(rules, expected, options):
    rules, paths = [rule_of(entry) for entry in rules], [path for path, _ in expected]
    for path, index in expected:
        assert next((i for i, rule in enumerate(rules) if re.search(rule, path)), NO_RULE) == index
    assert differences(rules, paths, **options) == []


def test_the_rounds_end_the_simulation():
    rules = sr.Rules([("x[ab]+y$", None)])
    simulated = set()
    for _ in range(ROUNDS):
        rules.first_match("abxababy")
        simulated.add(counters(rules).simulated_steps)
    assert len(simulated) > 1
    rules.first_match("abxababy")
    assert counters(rules).simulated_steps in simulated
