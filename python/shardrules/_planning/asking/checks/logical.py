"""Checks of logical rules: names that no rule knows, leaves without names, axes that are taken.

Costs per kind of leaf and name. Must not know how findings are shown.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from shardrules._format import and_more, counted, misspelt
from shardrules._logical.resolver import axes_in
from shardrules._planning.asking.checks.queries import Queries, finding, leaves_in, rules_listed
from shardrules._planning.asking.findings import Finding, at_stake
from shardrules._planning.fold import Folded

__all__ = ["dead_names", "fewer_names", "taken", "unknown_names", "unnamed"]

_MOST_NAMES: Final = 8


def unknown_names(queries: Queries) -> Iterator[Finding]:
    """Names that no rule has: an error where one was probably meant, or leaves are replicated."""
    if queries.columns.leaves.path_rules is not None:
        return
    kinds, coverage = queries.columns.kinds, queries.columns.coverage
    known = {name for name, _ in queries.columns.rules}
    sizes = queries.columns.axis_sizes
    unused = [
        name
        for name, axes in map(queries.columns.rules.__getitem__, coverage.dead)
        if isinstance(name, str) and any(sizes.get(axis, 1) > 1 for axis in axes_in(axes))
    ]
    found: dict[Any, list[Folded]] = defaultdict(list)
    for one in queries.folded(lambda kind: not known.issuperset(kind.names or ())):
        for name in dict.fromkeys(kinds[one.group].names or ()):
            if isinstance(name, str) and name not in known:
                found[name].append(one)
    for name, folded in found.items():
        meant = misspelt(name, unused)
        whole = [one for one in queries.undeclared(folded) if queries.is_whole(kinds[one.group])]
        held = queries.device_bytes(whole)
        hint = f"; did you mean {meant!r}, which no leaf has?" if meant else ""
        cost = f"; {counted(leaves_in(whole), 'leaf')} replicated: {at_stake(held)}" if held else ""
        yield finding(
            "error" if meant else queries.level(held, "error"),
            "unknown-name",
            f"no rule is for the name {name!r} of {counted(leaves_in(folded), 'leaf')}{hint}{cost}",
            f"correct the name, or add a rule ({name!r}, None) if nothing is to cut it",
            folded=folded,
            bytes=held,
        )


def unnamed(queries: Queries) -> Iterator[Finding]:
    """Arrays without names, which no logical rule decides."""
    folded = queries.undeclared(queries.folded(queries.is_unnamed))
    if folded:
        held = queries.device_bytes(folded)
        yield finding(
            queries.level(held, "error"),
            "unnamed",
            f"{counted(leaves_in(folded), 'leaf')} of {len(queries.columns.paths):,} without "
            f"logical axis names, hence replicated: {at_stake(held)}",
            "give them names, or declare them replicated",
            folded=folded,
            bytes=held,
        )


def fewer_names(queries: Queries) -> Iterator[Finding]:
    """Arrays with fewer names than dimensions: the names may be those of the wrong dimensions."""
    if folded := queries.fewer_names:
        first = queries.columns.kinds[folded[0].group]
        missing = queries.missing_names
        names = [repr(queries.columns.rules[rule][0]) for rule in missing]
        listed = ", ".join([*names[:_MOST_NAMES], *and_more(len(names), _MOST_NAMES, "name")])
        where = "names count from the first dimension"
        if missing:
            rules = rules_listed(missing[:_MOST_NAMES])
            where += f"; perhaps {listed} ({rules}), which no leaf has, should be among them"
        yield finding(
            "warning",
            "unnamed",
            f"{counted(leaves_in(folded), 'leaf')} with fewer names than dimensions, such as "
            f"{first.names} for the shape {first.shape}: {where}",
            "give each dimension a name or None; stacked layers have a dimension of their own",
            folded=folded,
        )


def taken(queries: Queries) -> Iterator[Finding]:
    """Dimensions that no axis cuts, since the axes of their rules cut others of the array."""
    sizes = queries.columns.axis_sizes
    found: dict[tuple[Any, int, Any], list[Folded]] = defaultdict(list)
    for one in queries.folded(lambda kind: bool(kind.lost_rules) and kind.spec is not None):
        kind = queries.columns.kinds[one.group]
        names, told = kind.names or (), set()
        for lost in kind.lost_rules:
            axes = axes_in(queries.columns.rules[lost.rule][1])
            is_there = lost.dim < len(kind.shape or ()) and kind.dim_rules[lost.dim] is None
            if lost.why != "axis taken" or not is_there or lost.dim in told or lost.to is None:
                continue
            if any(sizes.get(axis, 1) > 1 for axis in axes):
                told.add(lost.dim)
                found[names[lost.dim], lost.rule, names[lost.to]].append(one)
    for (name, rule, other), folded in found.items():
        yield finding(
            "info",
            "taken",
            f"{queries.rule(rule)}: nothing cuts {name!r} in {counted(leaves_in(folded), 'leaf')}, "
            f"as {other!r} has the axes there",
            f"add a rule for {name!r} with other axes, if it is to be cut as well",
            folded=folded,
            rule=rule,
        )


def dead_names(queries: Queries) -> Iterator[Finding]:
    """Rules for names that no leaf has: often those of activations, or of other models."""
    columns = queries.columns
    if columns.leaves.path_rules is not None:
        return
    # These are told of leaves without a name, and of axes that cut no leaf, or they are declared.
    explained = {*queries.missing_names, *itertools.chain(*queries.dead_rules_of.values())}
    dead = [rule for rule in columns.coverage.dead if rule not in explained]
    if dead:
        names = list(dict.fromkeys(repr(columns.rules[rule][0]) for rule in dead))
        more = and_more(len(names), _MOST_NAMES, "name")
        yield finding(
            "info",
            "dead",
            f"{counted(len(dead), 'rule')} of {len(columns.rules)} for names that no leaf has: "
            + ", ".join([*names[:_MOST_NAMES], *more]),
            "remove them, if they are for no other tree, such as activations",
        )
