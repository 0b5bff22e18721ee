"""Edits that mend a finding: a rule to add, or one with its axes renamed, as users write them.

A pattern is tried on the paths of the plan before it is given.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.rule_specs import RuleSpec, rule_spec_shown, rule_with_axes
from shardrules._plan.fold import Folded, runs_of
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan

# Numbers that a pattern lists, at most; more are left open.
_MOST_NUMBERS: Final = 16


def added_rule(plan: Plan, wanted: Sequence[Folded], *, opens_numbers: bool = False) -> str:
    """Write a rule for the first of these leaves, to stand before all others.

    P(...) stands for the spec to choose. Beside the first, the rule may match others that are
    wanted. "" if there is no such pattern, or another rule matches where a single one may.

    Args:
        plan: The plan that the leaves are of.
        wanted: Leaves that a finding is about.
        opens_numbers: Whether the rule is for all that differ from the first in numbers alone.
    """
    rules, sources = plan._leaves.path_rules, plan.sources
    if rules is None or not wanted:
        return ""
    path = sources[int(wanted[0].rows[0])]
    if rules.dialect.precedence == "only" and rules.all_matches(path):
        return ""
    rows = {row for part in wanted for row in part.rows.tolist()}
    firsts = [int(part.rows[0]) for part in plan.folded]
    others = [sources[row] for row in firsts if row not in rows]
    for pattern in _patterns(wanted[0].parts, opens_numbers):
        rule = Rules([(pattern, ())], rules.dialect)
        if rule.all_matches(path) and not any(map(rule.all_matches, others)):
            return f"({_pattern_shown(pattern)}, P(...))"
    return ""


def _patterns(parts: Sequence[str], opens_numbers: bool) -> Iterator[str]:
    r"""Yield patterns of these paths, the loosest first: \d+ stands for their numbers."""
    texts = [re.escape(text).replace(r"\-", "-") for text in parts[::2]]
    if opens_numbers:
        texts = [re.sub("[0-9]+", r"\\d+", text) for text in texts]
    regex = r"\d+".join(texts)
    yield regex
    yield f"^{regex}$"
    if not opens_numbers:
        listed = [*map(_numbers_listed, parts[1::2]), ""]
        yield f"^{''.join(part for pair in zip(texts, listed, strict=True) for part in pair)}$"


def _numbers_listed(numbers: str) -> str:
    listed = [str(number) for run in runs_of(numbers.strip("{}")) for number in run]
    return rf"({'|'.join(listed)})" if len(listed) <= _MOST_NUMBERS else r"\d+"


def renamed_axes(rule: tuple[Any, Any], names: Mapping[str, str]) -> str:
    """Write a rule with other names for its axes, to stand in its place.

    "" if it says more than a spec, which the text would not.
    """
    pattern, spec = rule
    if isinstance(spec, RuleSpec):
        return ""
    renamed = rule_with_axes(spec, {axis: (name,) for axis, name in names.items()})
    return f"({pattern!r}, {rule_spec_shown(renamed)})"


def _pattern_shown(regex: str) -> str:
    """Write a regex as one does in Python."""
    for written in (f"r'{regex}'", f'r"{regex}"'):
        try:
            if regex.isprintable() and ast.literal_eval(written) == regex:
                return written
        except (SyntaxError, ValueError):
            pass
    return repr(regex)
