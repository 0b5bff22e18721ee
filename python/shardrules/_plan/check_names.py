"""Checks of names: of attention heads in paths, of logical axes, of the `value` of flax nnx."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.specs import entries_of, entry_axes
from shardrules._base.text import SLIP, and_more, counted, nearest
from shardrules._plan.axis_uses import is_gathered
from shardrules._plan.check_context import Queries, check_of, finding, leaves_in, rules_listed
from shardrules._plan.findings import Finding, Level, at_stake
from shardrules._plan.fold import Folded
from shardrules._plan.heads import Projection, projections
from shardrules._plan.kinds import Kind
from shardrules._rules.resolver import axes_in
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    pass


class _CutHeads(NamedTuple):
    """A dimension of heads that is cut inside a head."""

    dim: int
    size: int
    head_dim: int
    part: float
    """Elements on a device; a fraction where the dimension is cut unevenly."""

    def __str__(self) -> str:
        heads = counted(self.size // self.head_dim, "head")
        return (
            f"dim {self.dim} of size {self.size}, {heads} of {self.head_dim}, is cut into parts of "
            f"{self.part:g}, {self.part / self.head_dim:.3g} heads"
        )


@check_of("half-head", "warning", "projections of attention that are cut inside a head")
def cut_heads(queries: Queries) -> Iterator[Finding]:
    """Projection of attention that are cut inside a head.

    The size of a head is `head_dim`, or that of the norm of single heads beside them.
    """
    found = projections(queries.plan, queries.head_dim)
    if queries.head_dim is not None and not found:
        yield finding(
            "warning",
            "half-head",
            f"head_dim={queries.head_dim} is given, but no path names projections of attention",
            "leave head_dim out; RuleSpec(units=...) keeps heads whole whatever paths are",
        )
    groups: dict[tuple[int | None, _CutHeads], list[Folded]] = defaultdict(list)
    for projection in found:
        kind = queries.plan.kinds[projection.folded.group]
        if cut := _cut_heads(kind, projection, queries.plan.axis_sizes):
            groups[kind.rule, cut].append(projection.folded)
    for (rule, cut), folded in groups.items():
        who = "" if rule is None else f"{queries.rule(rule)}: "
        yield finding(
            "warning",
            "half-head",
            f"{who}{cut}; devices exchange parts of heads in each step",
            "cut by fewer devices, or keep heads whole with RuleSpec(..., units=...)",
            folded=folded,
            rule=rule,
        )


def _cut_heads(
    kind: Kind, projection: Projection, axis_sizes: Mapping[str, int]
) -> _CutHeads | None:
    """Return the cut of these leaves inside a head; None if there is none."""
    dim, head = projection.dim, projection.head
    if kind.spec is None or head is None:
        return None
    size = (kind.shape or ())[dim]
    axes = entry_axes(entry) if (entry := next(iter(entries_of(kind.spec)[dim:]), None)) else ()
    part = size / prod(axis_sizes.get(axis, 1) for axis in axes if not is_gathered(axis))
    if part == size or size % head or part % head == 0:
        return None
    return _CutHeads(dim, size, head, part)


_MOST_NAMES: Final = 8
_NUMBERS: Final = re.compile("[0-9]+")


@check_of(
    "unknown-name",
    "error, warning, info",
    "names that no logical rule has: an error if the name is near one that no leaf has, or what "
    "is replicated is large, a warning if it is near another, else info",
)
def unknown_names(queries: Queries) -> Iterator[Finding]:
    if queries.plan._leaves.path_rules is not None:
        return
    kinds = queries.plan.kinds
    rule_names = {name for name, _ in queries.plan.rules}
    sizes = queries.plan.axis_sizes
    unused = [
        name
        for name, axes in map(queries.plan.rules.__getitem__, queries.dead)
        if isinstance(name, str) and any(sizes.get(axis, 1) > 1 for axis in axes_in(axes))
    ]
    by_name: dict[Any, list[Folded]] = defaultdict(list)
    for part in queries.folded([not rule_names.issuperset(kind.names or ()) for kind in kinds]):
        for name in dict.fromkeys(kinds[part.group].names or ()):
            if isinstance(name, str) and name not in rule_names:
                by_name[name].append(part)
    for name, folded in by_name.items():
        absent = nearest(name, unused, SLIP)
        meant = absent or nearest(name, _not_siblings(name, rule_names), SLIP)
        replicated = [
            part for part in queries.undeclared(folded) if queries.is_whole(kinds[part.group])
        ]
        bytes_whole = queries.device_bytes(replicated)
        hint = f"; did you mean {meant!r}{', which no leaf has' * bool(absent)}?" if meant else ""
        cost = (
            f"; {counted(leaves_in(replicated), 'leaf')} replicated: {at_stake(bytes_whole)}"
            if bytes_whole
            else ""
        )
        level = queries.level(bytes_whole, "error")
        yield finding(
            "error" if absent else "warning" if meant and level == "info" else level,
            "unknown-name",
            f"no rule is for the name {name!r} of {counted(leaves_in(folded), 'leaf')}{hint}{cost}",
            f"correct the name, or add a rule ({name!r}, None) if nothing is to cut it",
            mend=f"({name!r}, {queries.axes_of(meant)!r})" if meant else "",
            folded=folded,
            bytes=bytes_whole,
        )


def _not_siblings(name: str, names: Iterable[Any]) -> Iterator[str]:
    """Yield the names that differ from this one in more than numbers."""
    for other in names:
        if isinstance(other, str) and _NUMBERS.sub("", name) != _NUMBERS.sub("", other):
            yield other


@check_of(
    "unnamed",
    "error, warning, info",
    "leaves without logical axis names; info if they are not large together. A warning for "
    "leaves with fewer names than dimensions",
)
def unnamed(queries: Queries) -> Iterator[Finding]:
    if queries.plan._leaves.path_rules is not None:
        return
    folded = queries.undeclared(queries.folded(map(queries.is_unnamed, queries.plan.kinds)))
    if folded:
        cost = queries.device_bytes(folded)
        yield finding(
            queries.level(cost, "error"),
            "unnamed",
            f"{counted(leaves_in(folded), 'leaf')} of {len(queries.plan.paths):,} without "
            f"logical axis names, hence replicated: {at_stake(cost)}",
            "give them names, or declare them replicated",
            folded=folded,
            bytes=cost,
        )


@check_of("unnamed")
def fewer_names(queries: Queries) -> Iterator[Finding]:
    """Arrays with fewer names than dimensions: the names may be those of the wrong dimensions."""
    if folded := queries.fewer_names:
        first = queries.plan.kinds[folded[0].group]
        missing = queries.missing_names
        names = [repr(queries.plan.rules[rule][0]) for rule in missing]
        examples = ", ".join([*names[:_MOST_NAMES], *and_more(len(names), _MOST_NAMES, "name")])
        where = "names count from the first dimension"
        if missing:
            rules = rules_listed(missing[:_MOST_NAMES])
            where += f"; perhaps {examples} ({rules}), which no leaf has, should be among them"
        yield finding(
            "warning",
            "unnamed",
            f"{counted(leaves_in(folded), 'leaf')} with fewer names than dimensions, such as "
            f"{first.names} for the shape {first.shape}: {where}",
            "give each dimension a name or None; stacked layers have a dimension of their own",
            folded=folded,
        )


@check_of(
    "taken",
    "info",
    "dimensions that nothing cuts, since the axes of their logical rules cut others",
)
def taken(queries: Queries) -> Iterator[Finding]:
    sizes = queries.plan.axis_sizes
    groups: dict[tuple[Any, int, Any], list[Folded]] = defaultdict(list)
    kinds = queries.plan.kinds
    for part in queries.folded([kind.lost_rules and kind.spec is not None for kind in kinds]):
        kind = kinds[part.group]
        names, dims = kind.names or (), set()
        for lost in kind.lost_rules:
            axes = axes_in(queries.plan.rules[lost.rule][1])
            is_there = lost.dim < len(kind.shape or ()) and kind.dim_rules[lost.dim] is None
            if lost.why != "axis taken" or not is_there or lost.dim in dims or lost.to is None:
                continue
            if any(sizes.get(axis, 1) > 1 for axis in axes):
                dims.add(lost.dim)
                groups[names[lost.dim], lost.rule, names[lost.to]].append(part)
    for (name, rule, owner), folded in groups.items():
        yield finding(
            "info",
            "taken",
            f"{queries.rule(rule)}: nothing cuts {name!r} in {counted(leaves_in(folded), 'leaf')}, "
            f"as {owner!r} has the axes there",
            f"add a rule for {name!r} with other axes, if it is to be cut as well",
            folded=folded,
            rule=rule,
        )


@check_of("dead")
def dead_names(queries: Queries) -> Iterator[Finding]:
    """Rules for names that no leaf has: often those of activations, or of other models."""
    plan = queries.plan
    if plan._leaves.path_rules is not None:
        return
    # These are told of leaves without a name, and of axes that cut no leaf, or they are declared.
    explained = {*queries.missing_names, *itertools.chain(*queries.dead_rules_of.values())}
    dead = [rule for rule in queries.dead if rule not in explained]
    if dead:
        names = list(dict.fromkeys(repr(plan.rules[rule][0]) for rule in dead))
        rest = and_more(len(names), _MOST_NAMES, "name")
        yield finding(
            "info",
            "dead",
            f"{counted(len(dead), 'rule')} of {len(plan.rules)} for names that no leaf has: "
            + ", ".join([*names[:_MOST_NAMES], *rest]),
            "remove them, if they are for no other tree, such as activations",
        )


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


@check_of(
    "nnx-value",
    "error, warning, info",
    "rules that match leaves of flax nnx only through the `value` in which their paths end: "
    "every leaf (error), some (warning), or as it seems on purpose (info); and rules that match "
    "none because of it (warning)",
)
def nnx_values(queries: Queries) -> Iterator[Finding]:
    rules, coverage = queries.plan._leaves.path_rules, queries.plan.coverage
    if rules is None or rules.dialect.hidden_key is not None:
        return
    end = (rules.dialect.separator or ".") + _KEY
    if not any(map(str.endswith, queries.plan.sources, itertools.repeat(end))):
        return
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
            won = queries.folded([kind.rule == rule for kind in queries.plan.kinds])
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
    for rule in queries.dead:
        if folded := matches.stopped.get(rule, []):
            message = (
                f"{queries.rule(rule)} matches no leaf, since flax nnx lets paths end in {end!r}; "
                f"without it, {counted(leaves_in(folded), 'leaf')}"
            )
            yield _of_rule("warning", rule, message, f"let the pattern end in {end}$", folded)


def _of_rule(level: Level, rule: int, message: str, fix: str, folded: list[Folded]) -> Finding:
    return finding(level, "nnx-value", message, f"{fix}; {_FIX}", folded=folded, rule=rule)


def _of_rules(queries: Queries, end: str, folded: list[Folded]) -> Finding:
    """Return the finding about rules that match nothing else, probably on purpose."""
    return finding(
        "info",
        "nnx-value",
        f"{queries.rules(queries.rules_of(folded))}: {counted(leaves_in(folded), 'leaf')} matched "
        f"only through the {end!r} in which flax nnx lets paths end",
        f"leave it so if it is meant; {_FIX}",
        folded=folded,
    )


def _matches(queries: Queries, rules: Rules, end: str) -> _Matches:
    plan = queries.plan
    matches = _Matches(defaultdict(list), set(), defaultdict(list))
    for folded in plan.folded:
        path = plan.sources[folded.rows.item(0)]
        if not path.endswith(end):
            continue
        matching = set(rules.all_matches(path))
        without = set(rules.all_matches(path.removesuffix(end)))
        matches.named.update(without)
        rule = plan.kinds[folded.group].rule
        if rule in matching - without and not _spells(rules[rule][0], end):
            matches.through[rule].append(folded)
        for rule in without - matching:
            matches.stopped[rule].append(folded)
    return matches


def _spells(pattern: Any, end: str) -> bool:
    """Tell if a pattern ends in the very end of the paths, as those of a tree of specs do."""
    return str(pattern).removesuffix("$").endswith((end, re.escape(end)))


def _matching_everywhere(rules: Rules, end: str) -> set[int]:
    """Rules that match whatever ends so."""
    # Paths that have nothing of a model in them but this end, or not even that.
    probe = "~" if rules.dialect.separator else "['~']"
    return set(rules.all_matches(probe + end)) - set(rules.all_matches(probe))
