"""`Plan.check`: the coverage contract, which is that nothing is replicated or ignored silently.

Each check is one function from a plan to findings, listed in `_CHECKS`; all run, and all is told at
once. Costs per kind of leaf, and one more walk if a rule wins nothing. Must not know how findings
are shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from shardrules._planning.facts import Facts
from shardrules._planning.findings import LEVELS, Finding, Findings, at_stake
from shardrules._planning.fold import Folded
from shardrules._planning.kinds import Kind, axes_used, is_replicated, spec_shown
from shardrules._words import bytes_shown, check_choice, counted

if TYPE_CHECKING:
    from shardrules._planning.plan import Plan

__all__ = ["DEFAULT_LARGE", "KINDS", "check"]

DEFAULT_LARGE: Final = 16 * 2**20
# Those of w1 and w2 are names.
_NUMBERS_OF_SIBLINGS: Final = re.compile(r"(?<![A-Za-z0-9])[0-9]+")


def check(
    plan: Plan,
    *,
    large: int = DEFAULT_LARGE,
    replicated: Iterable[str] = (),
    levels: Mapping[str, str] | None = None,
) -> Findings:
    """See `Plan.check`."""
    chosen = dict(levels or {})
    for kind, level in chosen.items():
        check_choice("a kind of finding", kind, tuple(KINDS))
        check_choice(f"the level of {kind!r}", level, (*LEVELS, "off"))
    facts = Facts(plan, large, [re.compile(pattern) for pattern in replicated])
    found = (finding for one in _CHECKS for finding in one(facts))
    levelled = (one._replace(level=chosen.get(one.kind, one.level)) for one in found)
    return Findings(one for one in levelled if one.level != "off")


def _finding(level: str, kind: str, message: str, fix: str, **more: Any) -> Finding:
    folded = more.pop("folded", [])
    given = {"rule": None, "bytes": 0, "leaves": _leaves(folded), **more}
    return Finding(level, kind, message, tuple(one.pattern for one in folded), fix=fix, **given)


def _leaves(folded: Iterable[Folded]) -> int:
    return sum(len(one.rows) for one in folded)


def _unmatched(facts: Facts) -> Iterator[Finding]:
    folded = facts.folded(lambda kind: kind.problem == "unmatched")
    if folded:
        yield _finding(
            "error",
            "unmatched",
            f"no rule matches {counted(_leaves(folded), 'leaf')} of {len(facts.plan.paths):,}",
            f"add rules for them, such as {facts.example(folded[0])}; or replicate them by a last "
            f"rule {facts.example_of_a_catch_all}",
            folded=folded,
            bytes=facts.held(folded),
        )


def _misfit(facts: Facts) -> Iterator[Finding]:
    told: dict[tuple[int | None, str], list[Folded]] = defaultdict(list)
    for one in facts.folded(lambda kind: kind.problem not in (None, "unmatched")):
        kind = facts.plan.kinds[one.group]
        told[kind.rule, str(kind.problem)].append(one)
    for (rule, problem), folded in told.items():
        if rule is None:
            message = "several rules match, where one alone may"
            fix = "make the patterns exclude each other; `explain` a path to see which they are"
        else:
            kind = facts.plan.kinds[folded[0].group]
            message = f"{facts.rule(rule)} cannot be applied to the shape {kind.shape}: {problem}"
            fix = "; ".join(kind.ways_out) or "change the rule, the mesh or the array"
        held = facts.held(folded)
        yield _finding("error", "misfit", message, fix, folded=folded, rule=rule, bytes=held)


def _catch_all(facts: Facts) -> Iterator[Finding]:
    plan = facts.plan
    for rule in sorted(facts.catch_alls):
        folded = facts.undeclared(facts.folded(lambda kind, rule=rule: kind.rule == rule))  # type: ignore[misc]
        if not folded:
            continue
        leaves = _leaves(folded)
        whole = sum(plan.kinds[one.group].bytes * len(one.rows) for one in folded)
        # Together: 10,000 experts of a megabyte each are no less silent than one of 10 GB.
        silent = facts.held(
            one for one in folded if is_replicated(plan.kinds[one.group], plan.axis_sizes)
        )
        held = facts.held(folded)
        dead = _rules_listed(plan.coverage.dead)
        match = "matches" if leaves == 1 else "match"
        yield _finding(
            facts.level(silent, "error"),
            "catch-all",
            f"{counted(leaves, 'leaf')} of {len(plan.paths):,} ({bytes_shown(whole)} of "
            f"{bytes_shown(int(plan.bytes.sum()))}) {match} no rule but the catch-all, "
            f"{facts.rule(rule)}: {at_stake(held)}",
            f"add rules for them, such as {facts.example(folded[0])}"
            + (f" (perhaps meant for them, but matching nothing: {dead})" if dead else "")
            + "; or declare them replicated",
            folded=folded,
            rule=rule,
            bytes=held,
        )


def _replicated(facts: Facts) -> Iterator[Finding]:
    by_rule: dict[int | None, list[Folded]] = defaultdict(list)
    sizes = facts.plan.axis_sizes
    large = facts.folded(lambda kind: is_replicated(kind, sizes) and facts.is_large(kind))
    for one in facts.undeclared(large):
        rule = facts.plan.kinds[one.group].rule
        if rule not in facts.catch_alls:
            by_rule[rule].append(one)
    for rule, folded in by_rule.items():
        why = "no rule decides" if rule is None else facts.rule(rule)
        if any(facts.plan.kinds[one.group].losses for one in folded):
            why += ", of which the shapes and the mesh leave nothing"
        held = facts.held(folded)
        yield _finding(
            "warning",
            "replicated",
            f"{counted(_leaves(folded), 'large leaf')} replicated ({why}): {at_stake(held)}",
            "shard them, or declare them replicated",
            folded=folded,
            rule=rule,
            bytes=held,
        )


def _corrections(facts: Facts) -> Iterator[Finding]:
    plan = facts.plan
    lost: dict[Any, list[tuple[Folded, int, tuple[str, str]]]] = defaultdict(list)
    for one in facts.folded(lambda kind: kind.problem is None and bool(kind.losses)):
        kind = plan.kinds[one.group]
        for loss, cost, note in zip(kind.losses, kind.costs, kind.notes, strict=True):
            # An axis that the mesh lacks is one thing to tell, however many rules name it.
            key = note if loss.kind == "absent" else (kind.rule, loss)
            lost[key].append((one, cost * len(one.rows), note))
    for losses in lost.values():
        cost = sum(cost for _, cost, _ in losses)
        rules = sorted(
            {rule for one, _, _ in losses if (rule := plan.kinds[one.group].rule) is not None}
        )
        rule = rules[0] if len(rules) == 1 else None
        who = _rules_listed(rules) if rule is None else facts.rule(rule)
        what, way_out = losses[0][2]
        several = len({plan.kinds[one.group].shape for one, _, _ in losses}) > 1
        more = ", and the like" if several and "of size" in what else ""
        yield _finding(
            facts.level(cost, "warning"),
            "correction",
            f"{who}: {what}{more}; costs {at_stake(cost) if cost else 'nothing'}",
            way_out,
            folded=[one for one, _, _ in losses],
            rule=rule,
            bytes=cost,
        )


def _dead_rules(facts: Facts) -> Iterator[Finding]:
    for rule in facts.plan.coverage.dead:
        yield _finding(
            "warning",
            "dead",
            f"{facts.rule(rule)} matches no leaf",
            "correct the pattern, or remove the rule",
            rule=rule,
        )


def _shadowed_rules(facts: Facts) -> Iterator[Finding]:
    plan = facts.plan
    for rule, winners in plan.coverage.shadowed.items():
        if rule in facts.catch_alls:  # that nothing is left for it is what one hopes for
            continue
        leaves = plan.coverage.matched[rule]
        yield _finding(
            "warning",
            "shadowed",
            f"{facts.rule(rule)} matches {counted(leaves, 'leaf')}, but wins none: "
            f"{_rules_listed(winners)} came first",
            f"move it before {_rules_listed(winners)}, or remove it"
            if plan.rules.dialect.precedence == "first"
            else "make the patterns exclude each other, or remove it",
            rule=rule,
            leaves=leaves,
        )


def _siblings(facts: Facts) -> Iterator[Finding]:
    plan = facts.plan
    alike: dict[Any, list[Folded]] = defaultdict(list)
    for one in plan.folded:
        kind = plan.kinds[one.group]
        template = _NUMBERS_OF_SIBLINGS.sub("#", plan.paths[one.rows[0]])
        alike[template, kind.shape, str(kind.dtype)].append(one)
    for folded in alike.values():
        specs = dict.fromkeys(_spec_or_none(plan.kinds[one.group]) for one in folded)
        if len(specs) > 1:
            rules = sorted({r for one in folded if (r := plan.kinds[one.group].rule) is not None})
            yield _finding(
                "warning",
                "siblings",
                f"{counted(_leaves(folded), 'leaf')} that differ only in "
                f"numbers get {len(specs)} specs, {' and '.join(specs)}"
                + (f", by {_rules_listed(rules)}" if rules else ""),
                "let one rule match them all, or see why the patterns tell them apart",
                folded=folded,
            )


def _unused_axes(facts: Facts) -> Iterator[Finding]:
    plan = facts.plan
    used = frozenset().union(*(axes_used(kind.spec, plan.axis_sizes) for kind in plan.kinds))
    for axis, size in plan.axis_sizes.items():
        if size > 1 and axis not in used:
            yield _finding(
                "info",
                "unused-axis",
                f"the mesh axis {axis!r} cuts no leaf: everything is held {size} times along it",
                "right if it is for data alone; else name it in a rule",
            )


_CHECKS: Final = (
    _unmatched, _misfit, _catch_all, _replicated, _corrections, _dead_rules, _shadowed_rules,
    _siblings, _unused_axes,
)  # fmt: skip

KINDS: Final = {
    "unmatched": "leaves that no rule matches",
    "misfit": "leaves that cannot be sharded as their rule says",
    "catch-all": "leaves that only the catch-all rule matches",
    "replicated": "large leaves that are replicated without being declared so",
    "correction": "what the mesh or the shape takes from a spec, and what it costs",
    "dead": "rules that match no leaf",
    "shadowed": "rules that match leaves, all of which earlier rules win",
    "siblings": "leaves that differ only in numbers, but not in specs alike",
    "unused-axis": "mesh axes that cut no leaf",
}


def _rules_listed(rules: Iterable[int]) -> str:
    listed = list(rules)
    if not listed:
        return ""
    return ("rule " if len(listed) == 1 else "rules ") + ", ".join(map(str, listed))


def _spec_or_none(kind: Kind) -> str:
    return "none" if kind.spec is None else spec_shown(kind.spec)
