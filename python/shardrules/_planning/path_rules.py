"""Rules on single paths, without a tree: the rule that decides each, and what each rule wins.

Costs a match per path. Must not know what follows from a rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from shardrules._matching.coverage import Coverage
from shardrules._matching.rules import Rules, matcher_of

__all__ = ["AMBIGUOUS", "NO_RULE_NEEDED", "UNMATCHED", "coverage_of", "first_rules"]

# In the place of a rule's index.
NO_RULE_NEEDED: Final = -1
UNMATCHED: Final = -2
AMBIGUOUS: Final = -3


def first_rules(rules: Rules, paths: Iterable[str]) -> dict[str, int]:
    """Per path the index of the rule that decides it, or UNMATCHED or AMBIGUOUS."""
    distinct = list(dict.fromkeys(paths))
    matcher = matcher_of(rules).for_whole_paths()
    joined = dict(zip(distinct, matcher.all_joined(distinct), strict=True))
    found = matcher.decide(
        dict.fromkeys(joined.values(), 0),
        matcher.numbers(),
        NO_RULE_NEEDED,
        UNMATCHED,
        AMBIGUOUS,
        strict=False,
    )
    return {path: found.tree[key] for path, key in joined.items()}


def coverage_of(rules: Rules, paths: Iterable[str]) -> Coverage:
    """Per rule, the paths that it matches and wins. Each path counts once."""
    matcher = matcher_of(rules).for_whole_paths()
    return matcher.coverage(dict.fromkeys(matcher.all_joined(paths), 0), strict=False)
