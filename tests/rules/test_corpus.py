"""The hand-picked cases of data/corpus.toml, through `re` itself and through every engine."""

import re
import tomllib
from functools import reduce
from operator import or_

import pytest

import shardrules as sr
from tests.support.engines import ENGINES, ROUNDS, Rule
from tests.support.folders import DATA
from tests.support.work import counters

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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("rules", "expected"), CASES)
def test_corpus(rules, expected, engine):
    paths = [path for path, _ in expected]
    chosen = ENGINES[engine]([rule_of(entry) for entry in rules], paths)
    assert [list(pair) for pair in zip(paths, chosen, strict=True)] == expected


def test_the_rounds_end_the_simulation():
    rules = sr.Rules([("x[ab]+y$", None)])
    simulated = set()
    for _ in range(ROUNDS):
        rules.first_match("abxababy")
        simulated.add(counters(rules).simulated_steps)
    assert len(simulated) > 1
    rules.first_match("abxababy")
    assert counters(rules).simulated_steps in simulated
