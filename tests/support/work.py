"""What a call costs, counted: the same number whatever else the machine does."""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from shardrules._rules.rules import matcher_of


def calls_by_file(call: Callable[[], Any]) -> Counter[str]:
    """How many calls of functions, Python's and C's, each source file has part in."""
    counted: Counter[str] = Counter()

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event in {"call", "c_call"}:
            counted[frame.f_code.co_filename] += 1

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counted


def calls(call: Callable[[], Any]) -> int:
    return calls_by_file(call).total()


class Counters(NamedTuple):
    """Counts of a matcher's work, over all calls that have ended."""

    states_built: int
    """States of the lazy DFA made so far, those cleared since included."""
    cache_clears: int
    """The number of times that the memory budget was spent and the states were cleared."""
    simulated_steps: int
    """Characters stepped through without a remembered transition: not seen often enough to be worth
    one, or the budget is spent."""
    program_nodes: int
    """Size of the compiled rules."""


def counters(rules: Any) -> Counters:
    return Counters(*matcher_of(rules).rule_set.counters())
