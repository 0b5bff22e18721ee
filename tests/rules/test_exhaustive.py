"""The two short levels of exhaustive.py; `python -m tests.support.differential` runs a longer one."""

from __future__ import annotations

import pytest

from tests.support.exhaustive import CORE, ENGINES, NO_FLAGS, Share, check, shares
from tests.support.slow import slow


@pytest.mark.parametrize(
    "share", [*shares(size=1, count=1), *(slow(share) for share in shares(size=2, count=4))]
)
def test_every_small_pattern(share):
    outcome = check(share)
    assert outcome.differences[:10] == []
    assert outcome.cases > 0


def test_a_difference_is_reported(monkeypatch):
    monkeypatch.setitem(ENGINES, "nfa", lambda rules, texts: [0] * len(texts))
    reported = check(Share(CORE, 1, NO_FLAGS, 0, 1)).differences
    assert "sr.Rules([('a', 0)], memory_budget=0).first_match('#')  # re: None, nfa: 0" in reported
    assert not any("first_match('a')" in line and "('a', 0)" in line for line in reported)
