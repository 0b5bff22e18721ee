"""Errors and warnings about the leaves of a walk: they name paths and rules, and say what to do.

Costs nothing unless something went wrong. Must not know how a match is found.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from shardrules._correction import plain_spec
from shardrules._format import and_more, counted
from shardrules._matching.match_modes import Pattern
from shardrules._matching.matcher import Matcher, WalkResult
from shardrules._printable import printable, printable_lines

__all__ = ["ambiguous_message", "decided_tree", "rule_shown", "too_long_message"]


def decided_tree(
    matcher: Matcher, found: WalkResult, misfits_message: Callable[[Matcher, int, Any], str]
) -> Any:
    """The tree of a walk, if nothing went wrong. Its events become warnings.

    The warnings name the line that called the public function, three frames above this one.

    Args:
        matcher: What made the walk.
        found: Its result.
        misfits_message: misfits_message(matcher, count, leaves) words `found.misfits`.

    Raises:
        ValueError: Some leaves are not decided; one message lists all.
    """
    for path, spec in found.events[1]:
        warnings.warn(_event_message(path, spec), stacklevel=4)
    messages = []
    if found.unmatched[0]:
        messages.append(_unmatched_message(matcher, *found.unmatched))
    if found.ambiguous[0]:
        messages.append(ambiguous_message(matcher, *found.ambiguous))
    if found.misfits[0]:
        messages.append(misfits_message(matcher, *found.misfits))
    if messages:
        raise ValueError("\n".join(messages))
    return found.tree


def _unmatched_message(matcher: Matcher, count: int, leaves: list[tuple[str, Any]]) -> str:
    """About leaves that no rule matches; of the first ones (path, shape or None)."""
    listed = _listed(
        count, [path if shape is None else f"{path}  shape {shape}" for path, shape in leaves]
    )
    searches = matcher.dialect.match == ("search",)
    catch_all = ", or end the rules with ('.*', PartitionSpec()) to replicate whatever no rule "
    fix = f"Add a rule for them{catch_all + 'shards' if searches else ''}."
    return (
        f"{printable(f'Partition rule not found for param: {leaves[0][0]}')}\n"
        f"  {_leaves_match(count)} none of the {len(matcher.pairs)} rules:\n{listed}\n"
        f"  {fix}"
    )


def ambiguous_message(
    matcher: Matcher, count: int, leaves: list[tuple[str, tuple[list[int], Any]]]
) -> str:
    """About leaves that several rules match, where only one may; (path, (rules, shape))."""
    listed = _listed(
        count,
        [
            f"{path}  shape {shape}  "
            + ", ".join(f"rule {rule}: {matcher.pairs[rule][0]!r}" for rule in matching)
            for path, (matching, shape) in leaves
        ],
    )
    tries_exact = matcher.dialect.match[0] == "exact"
    exact = ", or add a rule whose pattern is the path itself" if tries_exact else ""
    return (
        f"{_leaves_match(count)} several rules, where only one may:\n{listed}\n"
        f"  Make the patterns exclude each other{exact}."
    )


def too_long_message(
    matcher: Matcher, count: int, leaves: list[tuple[str, tuple[int, Any]]]
) -> str:
    """About leaves of a lower rank than their spec has entries; (path, (rule, shape))."""
    listed = _listed(
        count,
        [
            f"{path}  shape {shape}  rule {rule}: {rule_shown(*matcher.pairs[rule])}"
            for path, (rule, shape) in leaves
        ],
    )
    have = f"{counted(count, 'leaf')} {'has' if count == 1 else 'have'}"
    return (
        f"{have} fewer dimensions than the spec has entries:\n{listed}\n"
        "  Shorten the specs, or take a dialect with rank='truncate'."
    )


def _event_message(path: str, spec: object) -> str:
    """In eformer's own words, so that filters of its warnings work."""
    if spec is None:
        what = "was safer and faster being local array."
    else:
        what = f"went out of range (will be auto trimed to {spec})."
    return printable(f"PartitionSpec Related to {path} {what}")


def rule_shown(pattern: Pattern, given: Any) -> str:
    """A rule, for a message."""
    return f"{pattern!r} -> {plain_spec(given)}"


def _leaves_match(count: int) -> str:
    return f"{counted(count, 'leaf')} {'matches' if count == 1 else 'match'}"


def _listed(count: int, lines: list[str]) -> str:
    return printable_lines(f"    {line}" for line in lines + and_more(count, len(lines), "leaf"))
