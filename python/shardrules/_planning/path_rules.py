"""What rules say of paths that are not a tree's: which rule decides each, and how each rule does.

Costs a match per path. Must not know what follows from a rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shardrules._matching.coverage import Coverage
    from shardrules._matching.rules import Rules

__all__ = ["AMBIGUOUS", "NO_RULE_NEEDED", "UNMATCHED", "coverage_of", "first_rules"]

# In the place of a rule's index.
NO_RULE_NEEDED: Final = -1
UNMATCHED: Final = -2
AMBIGUOUS: Final = -3


def first_rules(rules: Rules, paths: Iterable[str]) -> dict[str, int]:
    """Per path the index of the rule that decides it, or UNMATCHED or AMBIGUOUS."""
    distinct = list(dict.fromkeys(paths))
    joined = dict(zip(distinct, rules.all_joined(distinct), strict=True))
    outcome = rules.for_whole_paths().decide(
        dict.fromkeys(joined.values(), 0),
        rules.numbers(),
        NO_RULE_NEEDED,
        UNMATCHED,
        AMBIGUOUS,
        strict=False,
    )
    return {path: outcome.tree[key] for path, key in joined.items()}


def coverage_of(rules: Rules, paths: Iterable[str]) -> Coverage:
    """How each rule does on these paths, each of which counts once."""
    leaves = dict.fromkeys(rules.all_joined(paths), 0)
    return rules.for_whole_paths().coverage(leaves, strict=False)
