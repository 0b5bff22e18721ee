"""Checks of names: of attention heads in paths, of logical axes, of the `value` of flax nnx."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from math import prod
from typing import Any, Final

from shardrules._base.specs import entries_of, entry_axes, few_heads_advice
from shardrules._base.text import SLIP, and_more, counted, nearest
from shardrules._plan.check_context import (
    CheckContext,
    check_of,
    finding,
    leaves_in,
)
from shardrules._plan.findings import Finding, at_stake
from shardrules._plan.fold import Folded
from shardrules._plan.kinds import Kind
from shardrules._plan.path_words import Projection, is_gathered, projections
from shardrules._rules.resolver import axes_in


@check_of("half-head", "warning", "projections of attention that are cut inside a head")
def cut_heads(context: CheckContext) -> Iterator[Finding]:
    """Projections of attention that are cut inside a head.

    The size of a head is `head_dim`, or that of the norm of single heads beside them.
    """
    in_attention = projections(context.plan, context.head_dim)
    if context.head_dim is not None and not in_attention:
        yield finding(
            "half-head",
            f"head_dim={context.head_dim} is given, but no path names projections of attention",
            "leave head_dim out; RuleSpec(units=...) keeps heads whole whatever paths are",
        )
    groups: dict[tuple[int | None, tuple[str, str]], list[Folded]] = defaultdict(list)
    for projection in in_attention:
        kind = context.kinds[projection.folded.group]
        if words := _cut_and_fix(kind, projection, context.sizes):
            groups[kind.rule, words].append(projection.folded)
    for (rule, (cut, fix)), folded in groups.items():
        who = "" if rule is None else f"{context.rule(rule)}: "
        yield finding(
            "half-head",
            f"{who}{cut}; devices exchange parts of heads in each step",
            fix,
            folded,
            rule=rule,
        )


def _cut_and_fix(
    kind: Kind, projection: Projection, axis_sizes: Mapping[str, int]
) -> tuple[str, str] | None:
    """Return how these leaves are cut inside a head, and what to do; None if they are not."""
    dim, head = projection.dim, projection.head
    if kind.spec is None or head is None:
        return None
    size = (kind.shape or ())[dim]
    axes = entry_axes(entry) if (entry := next(iter(entries_of(kind.spec)[dim:]), None)) else ()
    # A fraction where the dimension is cut unevenly.
    cutting = [axis for axis in axes if not is_gathered(axis)]
    part = size / prod([axis_sizes.get(axis, 1) for axis in cutting])
    if part == size or size % head or part % head == 0:
        return None
    heads = size // head
    cut = (
        f"dim {dim} of size {size}, {counted(heads, 'head')} of {head}, is cut into parts of "
        f"{part:g}, {part / head:.3g} heads"
    )
    fix = "cut by fewer devices, or keep heads whole with RuleSpec(..., units=...)"
    alone = axes[0] if len(axes) == 1 else ""
    if advice := few_heads_advice(heads, alone, axis_sizes.get(alone, 1)):
        fix += f", and {advice}"
    return cut, fix


_MOST_NAMES: Final = 8
_NUMBERS: Final = re.compile("[0-9]+")


@check_of(
    "unknown-name",
    "error, warning, info",
    "names that no logical rule has: an error if the name is near one that no leaf has, or what "
    "is replicated is large, a warning if it is near another, else info",
    rules_of="names",
)
def unknown_names(context: CheckContext) -> Iterator[Finding]:
    kinds, rules = context.kinds, context.plan.rules
    axes_of = dict(reversed([*rules]))  # of rules for one name, the first
    unused = [
        name
        for name, axes in map(rules.__getitem__, context.dead)
        if isinstance(name, str) and any(context.sizes.get(axis, 1) > 1 for axis in axes_in(axes))
    ]
    by_name: dict[str, list[Folded]] = defaultdict(list)
    for part in context.folded([not axes_of.keys() >= {*(kind.names or ())} for kind in kinds]):
        for name in dict.fromkeys(kinds[part.group].names or ()):
            if isinstance(name, str) and name not in axes_of:
                by_name[name].append(part)
    for name, folded in by_name.items():
        # Names that differ in numbers alone are no misspellings of each other.
        stem = _NUMBERS.sub("", name)
        others = [n for n in axes_of if isinstance(n, str) and _NUMBERS.sub("", n) != stem]
        absent = nearest(name, unused, SLIP)
        meant = absent or nearest(name, others, SLIP)
        replicated = [
            part for part in context.undeclared(folded) if context.is_whole(kinds[part.group])
        ]
        size = context.device_bytes(replicated)
        hint = f"; did you mean {meant!r}{', which no leaf has' * bool(absent)}?" if meant else ""
        cost = f"; {counted(leaves_in(replicated), 'leaf')} replicated: {at_stake(size)}"
        level = context.level(size, "error")
        yield finding(
            "unknown-name",
            f"no rule is for the name {name!r} of {counted(leaves_in(folded), 'leaf')}{hint}"
            + (cost if size else ""),
            f"correct the name, or add a rule ({name!r}, None) if nothing is to cut it",
            folded,
            level="error" if absent else "warning" if meant and level == "info" else level,
            bytes=size,
        )


@check_of(
    "unnamed",
    "error, warning, info",
    "leaves without logical axis names; info if they are not large together. A warning for "
    "leaves with fewer names than dimensions",
    rules_of="names",
)
def unnamed(context: CheckContext) -> Iterator[Finding]:
    folded = context.undeclared(context.folded(map(context.is_unnamed, context.kinds)))
    if folded:
        cost = context.device_bytes(folded)
        yield finding(
            "unnamed",
            f"{counted(leaves_in(folded), 'leaf')} of {len(context.plan.paths):,} without "
            f"logical axis names, hence replicated: {at_stake(cost)}",
            "give them names, or declare them replicated",
            folded,
            level=context.level(cost, "error"),
            bytes=cost,
        )


@check_of("unnamed", rules_of="names")
def fewer_names(context: CheckContext) -> Iterator[Finding]:
    """Arrays with fewer names than dimensions: the names may be those of the wrong dimensions."""
    if folded := context.fewer_names:
        first = context.kinds[folded[0].group]
        yield finding(
            "unnamed",
            f"{counted(leaves_in(folded), 'leaf')} with fewer names than dimensions, such as "
            f"{first.names} for the shape {first.shape}: names count from the first dimension",
            "give each dimension a name or None; stacked layers have a dimension of their own",
            folded,
            level="warning",
        )


@check_of("dead", rules_of="names")
def dead_names(context: CheckContext) -> Iterator[Finding]:
    """Rules for names that no leaf has: often those of activations, or of other models."""
    rules = context.plan.rules
    # Others are told of the axes that they name and that cut no leaf.
    dead = [rule for rule in context.dead if rule not in {*chain(*context.dead_rules_of.values())}]
    if dead:
        texts = [*dict.fromkeys(repr(rules[rule][0]) for rule in dead)]
        names = ", ".join([*texts[:_MOST_NAMES], *and_more(len(texts), _MOST_NAMES, "name")])
        yield finding(
            "dead",
            f"{counted(len(dead), 'rule')} of {len(rules)} for names that no leaf has: {names}",
            "remove them, if they are for no other tree, such as activations",
            level="info",
        )


@check_of(
    "nnx-value",
    "error, warning",
    "rules that match leaves of flax nnx only through the `value` in which their paths end: as "
    "they match all such paths, or beside leaves that they match by name (warning)",
    rules_of="paths",
)
def nnx_values(context: CheckContext) -> Iterator[Finding]:
    rules, sources = context.path_rules, context.plan.sources
    if rules is None or rules.dialect.hidden_key is not None:
        return
    end = f"{rules.dialect.separator or '.'}value"
    through: dict[int, list[Folded]] = defaultdict(list)
    by_name: set[int] = set()
    for part in context.plan.folded:
        path = sources[part.rows.item(0)]
        if path.endswith(end):
            matching = set(rules.all_matches(path.removesuffix(end)))
            by_name |= matching
            rule = context.kinds[part.group].rule
            if rule is not None and rule not in matching and not _spells(rules[rule][0], end):
                through[rule].append(part)
    if not through:
        return
    # Paths that have nothing of a model in them but this end, or not even that.
    probe = "~" if rules.dialect.separator else "['~']"
    anywhere = {*rules.all_matches(probe + end)} - {*rules.all_matches(probe)}
    for rule, folded in through.items():
        if rule in anywhere | by_name:  # of others the pattern is meant so
            yield finding(
                "nnx-value",
                f"{context.rule(rule)} matches {counted(leaves_in(folded), 'leaf')} only through "
                f"the {end!r} in which flax nnx lets paths end",
                "use the dialect NNX, whose paths do not have it; or let the pattern go on behind "
                f"the name, as in value{end[0]}kernel",
                folded,
                level=None if rule in anywhere else "warning",
                rule=rule,
            )


def _spells(pattern: Any, end: str) -> bool:
    """Tell if a pattern ends in the very end of the paths, as those of a tree of specs do."""
    return str(pattern).removesuffix("$").endswith((end, re.escape(end)))
