"""The chosen rule is the first whose re.search hits: checked against `re` itself."""

import re
import signal
import sys
import tomllib
from contextlib import contextmanager
from functools import reduce
from operator import or_

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardrules as sr
from tests.support.engines import NFA, NO_RULE, ROUNDS, Rule, differences
from tests.support.exhaustive import check, shares
from tests.support.folders import DATA
from tests.support.random_patterns import FLAGS, compiles, random_pattern, random_text
from tests.support.slow import slow
from tests.support.work import counters

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


@pytest.mark.parametrize("share", [*shares(size=1, count=1), *(slow(share) for share in shares(size=2, count=4))])
def test_every_small_pattern(share):
    assert check(share)[:10] == []


def test_a_difference_is_reported(monkeypatch):
    monkeypatch.setattr(sr.Rules, "all_matches", lambda rules, path: [0])
    (reported,) = differences(["b", "a"], ["a"], **NFA)
    assert reported == "sr.Rules([('b', 0), ('a', 1)], memory_budget=0).all_matches('a')  # re: [1], ours: [0]"


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
