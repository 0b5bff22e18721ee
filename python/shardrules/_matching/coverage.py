"""`Coverage`: how the rules of a list do on a tree, which of them are dead or shadowed.

A plain value, made from what one walk over the tree has counted. Must not know how a match is
found.
"""

from __future__ import annotations

from typing import NamedTuple

from shardrules._display import answer
from shardrules._format import counted

__all__ = ["Coverage"]


@answer
class Coverage(NamedTuple):
    """The leaves that each rule of a list matches and wins. Only leaves that need a rule count."""

    matched: tuple[int, ...]
    """Per rule, the leaves that its pattern matches."""
    won: tuple[int, ...]
    """Per rule, the leaves that it decides: the first rule that matches wins."""
    unmatched: int
    """Leaves that no rule matches."""
    lost: dict[int, dict[int, int]]
    """Of each rule, by the rule that won instead, the leaves that it matched but did not decide."""

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

    def __str__(self) -> str:
        heading = f"{counted(len(self.won), 'rule')}: {counted(self.unmatched, 'leaf')} unmatched"
        return "\n".join([heading, *map(self._line, range(len(self.won)))])

    def _line(self, rule: int) -> str:
        if not self.matched[rule]:
            return f"rule {rule}: dead, matches no leaf"
        winners = ", ".join(f"rule {other}" for other in sorted(self.lost.get(rule, ())))
        matched = counted(self.matched[rule], "leaf")
        if not self.won[rule]:
            return f"rule {rule}: shadowed, wins none of {matched}, which {winners} wins"
        lost = f", the others {winners}" if winners else ""
        return f"rule {rule}: wins {self.won[rule]:,} of {matched}{lost}"
