"""What a matcher's work costs, counted: the same number whatever else the machine does."""

from typing import Any, NamedTuple

from shardrules._rules.rules import matcher_of


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
