"""A plan, and what several checks ask of it: catch-alls, undeclared leaves, what is at stake.

Costs per kind of leaf; per leaf where some are declared replicated. Must not know what is an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from shardrules._correction import plain_spec
from shardrules._matching.ways import WAYS
from shardrules._planning.fold import Folded, fold, parts_of
from shardrules._planning.kinds import Kind, spec_shown

if TYPE_CHECKING:
    from shardrules._planning.plan import Plan

__all__ = ["Facts"]

# A rule that matches these, and all leaves, matches whatever comes.
_PROBES: Final = ("~", "\x01/\x02")


class Facts:
    """A plan and what several checks ask of it."""

    def __init__(self, plan: Plan, large: int, declared: list[re.Pattern[str]]) -> None:
        self.plan = plan
        self.large = large
        self._declared = declared

    @cached_property
    def catch_alls(self) -> frozenset[int]:
        """Rules that match every path: these here, and others."""
        coverage = self.plan.coverage
        leaves = sum(coverage.won) + coverage.unmatched
        matched = [set(self.plan.rules.all_matches(probe)) for probe in _PROBES]
        everything = set.intersection(*matched)
        return frozenset(rule for rule in everything if coverage.matched[rule] == leaves)

    def folded(self, chosen: Callable[[Kind], bool]) -> list[Folded]:
        """The folded leaves of those kinds, with most bytes on a device first."""
        kinds = self.plan.kinds
        wanted = {number for number, kind in enumerate(kinds) if chosen(kind)}
        folded = [one for one in self.plan.folded if one.group in wanted]
        return sorted(folded, key=lambda one: -kinds[one.group].largest_bytes * len(one.rows))

    def undeclared(self, folded: list[Folded]) -> list[Folded]:
        """What of them is not declared to be replicated."""
        return (
            [part for one in folded for part in self._undeclared(one)] if self._declared else folded
        )

    def held(self, folded: Iterable[Folded]) -> int:
        """Bytes of these leaves on the device that holds most."""
        return sum(self.plan.kinds[one.group].largest_bytes * len(one.rows) for one in folded)

    def is_large(self, kind: Kind) -> bool:
        """Whether one leaf alone is worth a word."""
        return kind.largest_bytes >= self.large

    def level(self, count: int, level: str) -> str:
        """The level of a finding with this many bytes at stake."""
        return level if count >= self.large else "info"

    def rule(self, index: int) -> str:
        """A rule, for a message."""
        pattern, spec = self.plan.rules[index]
        return f"rule {index} {pattern!r} -> {spec_shown(plain_spec(spec))}"

    def _undeclared(self, folded: Folded) -> list[Folded]:
        paths = [self.plan.paths[row] for row in folded.rows]
        left = [
            i for i, path in enumerate(paths) if not any(p.search(path) for p in self._declared)
        ]
        if len(left) == len(paths):
            return [folded]
        rows = folded.rows[left]
        parts = fold([paths[i] for i in left], np.full(len(left), folded.group, np.int32))
        return [part._replace(rows=rows[part.rows]) for part in parts]

    def example(self, folded: Folded) -> str:
        """A rule, as one writes it, that matches these leaves."""
        dialect = self.plan.rules.dialect
        if WAYS[dialect.match[-1]].written_as != "window":
            return f"({_pattern_of(folded.pattern)}, P(...))"
        windows = map(_pattern_of, folded.pattern.split(dialect.separator))
        return f"(({', '.join(windows)},), P(...))"

    @property
    def example_of_a_catch_all(self) -> str:
        """A rule that replicates whatever comes."""
        way = WAYS[self.plan.rules.dialect.match[-1]].written_as
        return "(('.*',), P())" if way == "window" else "('.*', P())"


def _pattern_of(folded: str) -> str:
    r"""A regex for folded paths, as one writes it: \d+ stands for their sets of numbers."""
    regex = "".join(
        re.escape(text).replace(r"\-", "-") if numbers is None else r"\d+"
        for text, numbers in parts_of(folded)
    )
    for written in (f"r'{regex}'", f'r"{regex}"'):
        try:
            if regex.isprintable() and ast.literal_eval(written) == regex:
                return written
        except (SyntaxError, ValueError):
            pass
    return repr(regex)
