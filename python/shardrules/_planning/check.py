"""`Plan.check`: the coverage contract, which is that nothing is replicated or ignored silently.

Each check is one function from a plan to findings, listed in `_CHECKS`; all run, and all is told at
once. Costs per kind of leaf, and one more walk if a rule wins nothing. Must not know how findings
are shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._arguments import check_choice
from shardrules._planning.axis_checks import uncut, unused_axes
from shardrules._planning.companion_checks import following
from shardrules._planning.facts import Facts, finding, leaves_in, rules_listed
from shardrules._planning.findings import LEVELS, Finding, Findings, at_stake
from shardrules._planning.fold import Folded
from shardrules._planning.kinds import Kind, is_replicated, refusals, spec_shown
from shardrules._planning.name_checks import half_heads, nnx_values
from shardrules._words import bytes_shown, counted

if TYPE_CHECKING:
    from shardrules._declared import Declared
    from shardrules._planning.plan import Plan

__all__ = ["DEFAULT_LARGE", "KINDS", "check"]

DEFAULT_LARGE: Final = 16 * 2**20
# Those of w1 and w2 are names.
_NUMBERS_OF_SIBLINGS: Final = re.compile(r"(?<![A-Za-z0-9])[0-9]+")


def check(
    plan: Plan,
    *,
    large: int = DEFAULT_LARGE,
    declared: Declared,
    head_dim: int | None = None,
    levels: Mapping[str, str] | None = None,
) -> Findings:
    """See `Plan.check`."""
    chosen = dict(levels or {})
    for kind, level in chosen.items():
        check_choice("levels: a kind of finding", kind, tuple(KINDS))
        check_choice(f"levels: the level of {kind!r}", level, (*LEVELS, "off"))
    facts = Facts(plan, large, declared, head_dim)
    found = (each for one in _CHECKS for each in one(facts))
    levelled = (one._replace(level=chosen.get(one.kind, one.level)) for one in found)
    return Findings(one for one in levelled if one.level != "off")


def _unmatched(facts: Facts) -> Iterator[Finding]:
    folded = facts.folded(lambda kind: kind.problem == "unmatched")
    if folded:
        yield finding(
            "error",
            "unmatched",
            f"no rule matches {counted(leaves_in(folded), 'leaf')} of {len(facts.plan.paths):,}",
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
        yield finding("error", "misfit", message, fix, folded=folded, rule=rule, bytes=held)


def _unplaceable(facts: Facts) -> Iterator[Finding]:
    """What the corrections let through, and JAX refuses when it makes the sharding."""
    plan = facts.plan
    refused = {
        number: list(refusals(kind, plan.axis_sizes, plan.explicit_axes))
        for number, kind in enumerate(plan.kinds)
        if kind.spec is not None and kind.shape is not None
    }
    told: dict[tuple[int | None, str, str], list[Folded]] = defaultdict(list)
    for one in facts.folded_kinds({number for number, found in refused.items() if found}):
        for what, way_out in refused[one.group]:
            told[plan.kinds[one.group].rule, what, way_out].append(one)
    for (rule, what, way_out), folded in told.items():
        who = "a spec" if rule is None else facts.rule(rule)
        held = facts.held(folded)
        message = f"{who} cannot be placed: {what}"
        yield finding("error", "misfit", message, way_out, folded=folded, rule=rule, bytes=held)


def _catch_all(facts: Facts) -> Iterator[Finding]:
    plan = facts.plan
    for rule in sorted(facts.catch_alls):
        folded = facts.undeclared(facts.folded(lambda kind, rule=rule: kind.rule == rule))  # type: ignore[misc]
        if not folded:
            continue
        leaves = leaves_in(folded)
        whole = sum(plan.kinds[one.group].bytes * len(one.rows) for one in folded)
        # Together: 10,000 experts of a megabyte each are no less silent than one of 10 GB.
        silent = facts.held(
            one for one in folded if is_replicated(plan.kinds[one.group], plan.axis_sizes)
        )
        held = facts.held(folded)
        dead = rules_listed(plan.coverage.dead)
        match = "matches" if leaves == 1 else "match"
        yield finding(
            facts.level(silent, "error"),
            "catch-all",
            f"{counted(leaves, 'leaf')} of {len(plan.paths):,} ({bytes_shown(whole)} of "
            f"{bytes_shown(plan.total_bytes)}) {match} no rule but the catch-all, "
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
    for one in facts.undeclared(facts.folded(lambda kind: is_replicated(kind, sizes))):
        rule = facts.plan.kinds[one.group].rule
        if rule not in facts.catch_alls:
            by_rule[rule].append(one)
    large_of = {
        rule: [one for one in folded if facts.is_large(facts.plan.kinds[one.group])]
        for rule, folded in by_rule.items()
    }
    small = sum(facts.held(folded) for rule, folded in by_rule.items() if not large_of[rule])
    for rule, folded in by_rule.items():
        if not large_of[rule] and not facts.matters(facts.held(folded), small):
            continue
        chosen, what = (large_of[rule], "large leaf") if large_of[rule] else (folded, "leaf")
        why = "no rule decides" if rule is None else facts.rule(rule)
        if any(facts.plan.kinds[one.group].losses for one in chosen):
            why += ", of which the shapes and the mesh leave nothing"
        held = facts.held(chosen)
        yield finding(
            "warning",
            "replicated",
            f"{counted(leaves_in(chosen), what)} replicated ({why}): {at_stake(held)}",
            "shard them, or declare them replicated",
            folded=chosen,
            rule=rule,
            bytes=held,
        )


class _Lost(NamedTuple):
    """What some leaves lose of their spec, all for one reason."""

    is_unknown: bool
    """Whether it is an axis that the mesh lacks, and may not lack."""
    folded: list[Folded]
    cost: int
    message: str
    fix: str


def _corrections(facts: Facts) -> Iterator[Finding]:
    found = list(_losses(facts))
    small = sum(one.cost for one in found if one.cost < facts.large)
    for one in found:
        is_much = one.cost >= facts.large or facts.matters(one.cost, small)
        rules = facts.rules_of(one.folded)
        free = "" if one.is_unknown else "; costs nothing"
        costs = f"; costs {at_stake(one.cost)}" if one.cost else free
        yield finding(
            "error" if one.is_unknown else "warning" if is_much else "info",
            "unknown-axis" if one.is_unknown else "correction",
            f"{facts.rules(rules)}: {one.message}{costs}",
            one.fix,
            folded=one.folded,
            rule=rules[0] if len(rules) == 1 else None,
            bytes=one.cost,
        )


def _losses(facts: Facts) -> Iterator[_Lost]:
    kinds = facts.plan.kinds
    lost: dict[Any, list[tuple[Folded, int, tuple[str, str]]]] = defaultdict(list)
    for one in facts.folded(lambda kind: kind.problem is None and bool(kind.losses)):
        kind = kinds[one.group]
        for loss, cost, note in zip(kind.losses, kind.costs, kind.notes, strict=True):
            is_absent = loss.kind == "absent"
            is_unknown = is_absent and not facts.optional_axes.issuperset(loss.axes)
            # An axis that the mesh lacks is one thing to tell, however many rules name it.
            key = (is_unknown, note if is_absent else (kind.rule, loss))
            lost[key].append((one, cost * len(one.rows), note))
    for (is_unknown, _), losses in lost.items():
        message, fix = losses[0][2]
        several = len({kinds[one.group].shape for one, _, _ in losses}) > 1
        more = ", and the like" if several and "of size" in message else ""
        folded, cost = [one for one, _, _ in losses], sum(cost for _, cost, _ in losses)
        yield _Lost(is_unknown, folded, cost, message + more, fix)


def _dead_rules(facts: Facts) -> Iterator[Finding]:
    for rule in facts.plan.coverage.dead:
        yield finding(
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
        yield finding(
            "warning",
            "shadowed",
            f"{facts.rule(rule)} matches {counted(leaves, 'leaf')}, but wins none: "
            f"{rules_listed(winners)} came first",
            f"move it before {rules_listed(winners)}, or remove it"
            if plan.rules.dialect.precedence == "first"
            else "make the patterns exclude each other, or remove it",
            rule=rule,
            leaves=leaves,
        )


def _siblings(facts: Facts) -> Iterator[Finding]:
    plan = facts.plan
    spec_of = [_spec_or_none(kind) for kind in plan.kinds]
    arrays = [(kind.shape, kind.dtype_shown) for kind in plan.kinds]
    specs_of: dict[Any, set[str]] = defaultdict(set)
    for array, spec in zip(arrays, spec_of, strict=True):
        specs_of[array].add(spec)
    alike: dict[Any, list[Folded]] = defaultdict(list)
    for one in plan.folded:
        array = arrays[one.group]
        if len(specs_of[array]) > 1:
            template = _NUMBERS_OF_SIBLINGS.sub("#", plan.paths[one.rows[0]])
            alike[template, array].append(one)
    for folded in alike.values():
        specs = dict.fromkeys(spec_of[one.group] for one in folded)
        if len(specs) > 1:
            rules = facts.rules_of(folded)
            yield finding(
                "warning",
                "siblings",
                f"{counted(leaves_in(folded), 'leaf')} that differ only in "
                f"numbers get {len(specs)} specs, {' and '.join(specs)}"
                + (f", by {rules_listed(rules)}" if rules else ""),
                "let one rule match them all, or see why the patterns tell them apart",
                folded=folded,
            )


_CHECKS: Final = (
    _unmatched, _misfit, _unplaceable, _catch_all, _replicated, uncut, _corrections,
    _dead_rules, _shadowed_rules, _siblings, following, half_heads, nnx_values, unused_axes,
)  # fmt: skip

KINDS: Final = {
    "unmatched": "leaves that no rule matches",
    "misfit": "leaves that cannot be sharded as their rule says",
    "unknown-axis": "axes that rules name and the mesh lacks",
    "catch-all": "leaves that only the catch-all rule matches",
    "replicated": "large leaves that are replicated without being declared so",
    "uncut": "leaves that a mesh axis could cut as it cuts their like",
    "correction": "what the mesh or the shape takes from a spec, and what it costs",
    "dead": "rules that match no leaf",
    "shadowed": "rules that match leaves, all of which earlier rules win",
    "siblings": "leaves that differ only in numbers, but not in specs alike",
    "half-head": "projections of attention that are cut inside a head",
    "nnx-value": "rules that match every leaf through the value in which paths of flax nnx end",
    "companion": "leaves that companions find but no rule for their bases, companions of nothing",
    "unused-axis": "mesh axes that cut no leaf",
}


def _spec_or_none(kind: Kind) -> str:
    return "none" if kind.spec is None else spec_shown(kind.spec)
