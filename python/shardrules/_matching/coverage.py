"""What can be said of a rule list as a whole: what its matcher did, and how it covers a tree.

Plain values, computed from what one crossing into the core reports. Must not know how a match is
found.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Counters", "Coverage"]


class Counters(NamedTuple):
    """What a matcher has done, over all calls that have ended."""

    states_built: int
    """States of the lazy DFA made so far, those forgotten since included."""
    cache_clears: int
    """How often the memory budget was spent and the states were forgotten."""
    simulated_steps: int
    """Characters stepped through without a remembered transition: not seen often enough to be worth
    one, or the budget is spent."""
    program_nodes: int
    """Size of the compiled rules."""


class Coverage(NamedTuple):
    """How the rules of a list do on a tree; counts are in leaves that need a rule."""

    matched: tuple[int, ...]
    """Per rule, the leaves that its pattern matches."""
    won: tuple[int, ...]
    """Per rule, the leaves that it decides: the first rule that matches wins."""
    unmatched: int
    """Leaves that no rule matches."""
    lost: dict[int, dict[int, int]]
    """Of each rule, by the rule that won instead, the leaves that it matched but did not decide."""

    @classmethod
    def from_counts(
        cls,
        matched: list[int],
        won: list[int],
        unmatched: int,
        lost_pairs: list[tuple[int, int, int]],
    ) -> Coverage:
        """From what `_core.RuleSet.count_matches` returns."""
        lost: dict[int, dict[int, int]] = {}
        for loser, winner, leaves in lost_pairs:
            lost.setdefault(loser, {})[winner] = leaves
        return cls(tuple(matched), tuple(won), unmatched, lost)

    @property
    def dead(self) -> tuple[int, ...]:
        """Rules that match no leaf."""
        return tuple(rule for rule, leaves in enumerate(self.matched) if leaves == 0)

    @property
    def shadowed(self) -> dict[int, tuple[int, ...]]:
        """Rules that match leaves but win none, with the rules that win them all."""
        return {
            rule: tuple(sorted(self.lost[rule]))
            for rule, leaves in enumerate(self.matched)
            if leaves > 0 and self.won[rule] == 0
        }
