"""Checks for leaves that every device holds whole: by a catch-all rule, or undeclared.

Costs per kind of leaf; per leaf where some are declared replicated. Must not know how findings are
shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardrules._format import bytes_shown, counted
from shardrules._planning.asking.checks.queries import Queries, finding, leaves_in, rules_listed
from shardrules._planning.asking.findings import Finding, at_stake
from shardrules._planning.fold import Folded
from shardrules._planning.kinds import Kind, axes_named
from shardrules._shape_specs import Fsdp

if TYPE_CHECKING:
    from shardrules._planning.columns import Columns

__all__ = ["catch_alls", "replicated"]


def catch_alls(queries: Queries) -> Iterator[Finding]:
    """Leaves that only the catch-all rule matches."""
    columns = queries.columns
    for rule in sorted(queries.silent_catch_alls):
        folded = queries.undeclared(queries.folded(lambda kind, rule=rule: kind.rule == rule))  # type: ignore[misc]
        if not folded:
            continue
        leaves = leaves_in(folded)
        whole = sum(columns.kinds[one.group].bytes * len(one.rows) for one in folded)
        # Together: 10,000 experts of a megabyte each are as costly as one of 10 GB.
        silent = queries.device_bytes(
            one for one in folded if queries.is_whole(columns.kinds[one.group])
        )
        held = queries.device_bytes(folded)
        dead = rules_listed(columns.coverage.dead)
        match = "matches" if leaves == 1 else "match"
        yield finding(
            queries.level(silent, "error"),
            "catch-all",
            f"{counted(leaves, 'leaf')} of {len(columns.paths):,} ({bytes_shown(whole)} of "
            f"{bytes_shown(columns.total_bytes)}) {match} no rule but the catch-all, "
            f"{queries.rule(rule)}: {at_stake(held)}",
            f"add rules for them, such as {queries.example(folded[0])}"
            + (f" (perhaps meant for them, but matching nothing: {dead})" if dead else "")
            + "; or declare them replicated",
            folded=folded,
            rule=rule,
            bytes=held,
        )


def replicated(queries: Queries) -> Iterator[Finding]:
    """Other leaves that are replicated, and large alone or together."""
    columns = queries.columns
    by_rule: dict[Any, list[Folded]] = defaultdict(list)
    for one in queries.undeclared(queries.folded(queries.is_whole)):
        kind = columns.kinds[one.group]
        # Leaves of the catch-all, and those without names, are reported as that.
        if kind.rule not in queries.silent_catch_alls and not queries.is_unnamed(kind):
            by_rule[kind.decided_by, _is_exempt(kind, columns)].append(one)
    large_of = {
        rule: [one for one in folded if queries.is_large(columns.kinds[one.group])]
        for rule, folded in by_rule.items()
    }
    small = sum(
        queries.device_bytes(folded) for rule, folded in by_rule.items() if not large_of[rule]
    )
    for (rule, exempt), folded in by_rule.items():
        large = large_of[rule, exempt]
        if not large and not queries.matters(queries.device_bytes(folded), small):
            continue
        chosen, what = (large, "large leaf") if large else (folded, "leaf")
        why = queries.who(columns.kinds[chosen[0].group])
        if any(columns.kinds[one.group].losses for one in chosen):
            why += ", of which the shapes and the mesh leave nothing"
        held = queries.device_bytes(chosen)
        yield finding(
            "info" if exempt else "warning",
            "replicated",
            f"{counted(leaves_in(chosen), what)} replicated "
            f"({'by the threshold of ' if exempt else ''}{why}): {at_stake(held)}",
            "lower its min_bytes or min_rank, if they are to be cut too"
            if exempt
            else "shard them, or declare them replicated",
            folded=chosen,
            rule=rule,
            bytes=held,
        )


def _is_exempt(kind: Kind, columns: Columns) -> bool:
    """Whether a rule that is made from shapes leaves such arrays whole itself."""
    spec = None if kind.rule is None else columns.spec_of_rule(kind.rule)
    return isinstance(spec, Fsdp) and not kind.losses and axes_named(kind.wanted) == frozenset()
