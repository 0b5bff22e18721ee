"""Checks of rules for flax nnx, whose paths end in `value`: patterns that match it, or miss it.

Costs two matches of each rule per folded path of a tree with such paths. Must not know how findings
are shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from shardrules._format import counted
from shardrules._matching.rules import Rules
from shardrules._planning.asking.checks.queries import Queries, finding, leaves_in
from shardrules._planning.asking.findings import Finding, Level
from shardrules._planning.fold import Folded

__all__ = ["nnx_values"]

_KEY: Final = "value"
_FIX: Final = "or use the dialect NNX, whose paths do not have it"


class _Matches(NamedTuple):
    """The ways in which rules match the paths that end so."""

    through: dict[int, list[Folded]]
    """Per rule, the leaves that it wins and that it does not match without the end."""
    named: set[int]
    """Rules that match some path without the end, too."""
    stopped: dict[int, list[Folded]]
    """Per rule, the leaves that it matches only without the end."""


def nnx_values(queries: Queries) -> Iterator[Finding]:
    """Rules that match a leaf only through its `value`, or match none because of it."""
    rules, coverage = queries.columns.leaves.path_rules, queries.columns.coverage
    if rules is None or rules.dialect.hidden_key is not None:
        return
    end = (rules.dialect.separator or ".") + _KEY
    matches = _matches(queries, rules, end)
    everywhere = _matching_everywhere(rules, end)
    go_on = f"let the pattern go on behind the name, as in {_KEY}{end[0]}kernel"
    on_purpose: list[Folded] = []
    for rule, folded in matches.through.items():
        if rule in everywhere:
            message = (
                f"{queries.rule(rule)} matches every path that ends in {end!r}, in which flax nnx "
                "lets paths end, and wins "
                f"{counted(coverage.won[rule], 'leaf')}"
            )
            won = queries.folded(lambda kind, rule=rule: kind.rule == rule)  # type: ignore[misc]
            yield _of_rule("error", rule, message, go_on, won)
        elif rule in matches.named:
            message = (
                f"{queries.rule(rule)} matches {counted(leaves_in(folded), 'leaf')} only through "
                f"the {end!r} in which flax nnx lets paths end, and others by their names"
            )
            yield _of_rule("warning", rule, message, go_on, folded)
        else:
            on_purpose += folded
    if on_purpose:
        yield _of_rules(queries, end, on_purpose)
    for rule in coverage.dead:
        if folded := matches.stopped.get(rule, []):
            message = (
                f"{queries.rule(rule)} matches no leaf, since flax nnx lets paths end in {end!r}; "
                f"without it, {counted(leaves_in(folded), 'leaf')}"
            )
            yield _of_rule("warning", rule, message, f"let the pattern end in {end}$", folded)


def _of_rule(level: Level, rule: int, message: str, fix: str, folded: list[Folded]) -> Finding:
    return finding(level, "nnx-value", message, f"{fix}; {_FIX}", folded=folded, rule=rule)


def _of_rules(queries: Queries, end: str, folded: list[Folded]) -> Finding:
    """Of the rules that match nothing else, which is what such patterns are probably meant to."""
    return finding(
        "info",
        "nnx-value",
        f"{queries.rules(queries.rules_of(folded))}: {counted(leaves_in(folded), 'leaf')} matched "
        f"only through the {end!r} in which flax nnx lets paths end",
        f"leave it so if it is meant; {_FIX}",
        folded=folded,
    )


def _matches(queries: Queries, rules: Rules, end: str) -> _Matches:
    columns = queries.columns
    found = _Matches(defaultdict(list), set(), defaultdict(list))
    for folded in columns.folded:
        path = columns.sources[folded.rows.item(0)]
        if not path.endswith(end):
            continue
        whole = set(rules.all_matches(path))
        without = set(rules.all_matches(path.removesuffix(end)))
        found.named.update(without)
        rule = columns.kinds[folded.group].rule
        if rule in whole - without and not _spells(rules[rule][0], end):
            found.through[rule].append(folded)
        for rule in without - whole:
            found.stopped[rule].append(folded)
    return found


def _spells(pattern: Any, end: str) -> bool:
    """Whether a pattern ends in the very end of the paths, as those of a tree of specs do."""
    return str(pattern).removesuffix("$").endswith((end, re.escape(end)))


def _matching_everywhere(rules: Rules, end: str) -> set[int]:
    """Rules that match whatever ends so."""
    # Paths that have nothing of a model in them but this end, or not even that.
    probe = "~" if rules.dialect.separator else "['~']"
    return set(rules.all_matches(probe + end)) - set(rules.all_matches(probe))
