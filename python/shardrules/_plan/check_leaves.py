"""Checks of leaves and of the names in their paths.

Leaves: replicated, too large, in unpinned memory, or found by a companion in vain. Names: of
attention heads in paths, of logical axes, of the `value` of flax nnx.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from typing import Any, Final

import numpy as np

from shardrules._base.rule_specs import is_on_host
from shardrules._base.specs import entries_of, entry_axes, few_heads_advice
from shardrules._base.text import SLIP, bytes_shown, counted, nearest
from shardrules._plan.bases import links_of
from shardrules._plan.check_context import (
    Check,
    CheckContext,
    finding,
    leaves_in,
    only_one,
    rules_listed,
)
from shardrules._plan.companions import Companion
from shardrules._plan.findings import Finding, at_stake
from shardrules._plan.fold import Folded, fold
from shardrules._plan.leaves import first_rules
from shardrules._plan.memory import DeviceBytes
from shardrules._plan.path_words import HEAD_NORM, is_gathered
from shardrules._rules.resolver import axes_in


def companions_in_vain(context: CheckContext) -> Iterator[Finding]:
    plan, links, companions = context.plan, context.plan._leaves.links, context.companions
    if not companions:
        return
    rows_of_companion: dict[Companion, list[int]] = defaultdict(list)
    for row, of_row in links.items():
        if plan.sources[row] != of_row[-1].base:
            rows_of_companion[of_row[-1].companion].append(row)
    for companion, rows_of_it in rows_of_companion.items():
        rows = np.array(sorted(rows_of_it))
        folded = fold([plan.paths[row] for row in rows], plan.kind_of[rows])
        base = links[int(rows[0])][-1].base
        yield finding(
            "companion",
            f"{counted(len(rows), 'leaf')} found by the companion {companion.pattern!r} "
            f"should follow a rule for {base!r} and the like, but none meets that path: what "
            f"decides is {rules_listed(context.rules_of(folded)) or 'no rule'}, as if there were "
            "no companion",
            f"add a rule that matches {base!r}, or correct the companion's base; or leave the "
            "companion out",
            folded,
            bytes=context.device_bytes(folded),
        )
    from shardrules._plan.companion_tables import LORA, QUANTIZED

    finders = {link.companion for of_row in links.values() for link in of_row}
    # Most records of the package's own tables find nothing, by design.
    idlers = [each for each in companions if each not in (*finders, *LORA, *QUANTIZED)]
    who = [f"the companion {each.pattern!r} finds" for each in idlers]
    for text in who or ([] if finders else ["the companions find"]):
        fix = "correct its pattern or dims to what the tree's leaves are, or leave it out"
        yield finding("companion", f"{text} no leaf", fix)


def cut_ranks(context: CheckContext) -> Iterator[Finding]:
    """Factors of LoRA that a rule for their kernel decides, as if they were the kernel."""
    plan, rules = context.plan, context.path_rules
    if rules is None or "lora_" not in "\n".join(plan._leaves.templates.texts):
        return
    from shardrules._plan.companion_tables import LORA

    links = links_of(plan._leaves, LORA)
    rule_of = first_rules(rules, [link.base for chain in links.values() for link in chain])
    parts_of_rule: dict[int, list[Folded]] = defaultdict(list)
    for part in plan.folded:
        row, kind = int(part.rows[0]), context.kinds[part.group]
        chain = () if row in plan._leaves.links else links.get(row, ())
        for link in chain[:1]:
            entries = zip(link.step.dims, kind.spec or (), strict=False)
            is_cut = any(dim is None and entry is not None for dim, entry in entries)
            if is_cut and kind.rule is not None and kind.rule == rule_of[link.base]:
                parts_of_rule[kind.rule].append(part)
    for rule, folded in parts_of_rule.items():
        yield finding(
            "companion",
            f"{context.rule(rule)} is for kernels, and decides the factors of LoRA beside them, "
            "too: it cuts their rank, over which their product then needs a collective of its own",
            "give companions=shardrules.LORA, by which factors follow their kernels and no rank is "
            "cut; or let the pattern not match them",
            folded,
            rule=rule,
        )


_MOST_LEAVES: Final = 5


def too_large(context: CheckContext) -> Iterator[Finding]:
    if context.hbm is None:
        return
    held_bytes = context.plan.bytes_per_device()
    if held_bytes.max > context.hbm:
        largest = context.folded([not is_on_host(kind.memory_kind) for kind in context.kinds])
        yield no_room(held_bytes, context.hbm, largest)


def no_room(needed: DeviceBytes, hbm: int, largest: list[Folded]) -> Finding:
    """Return the error that these bytes do not fit; the leaves have most bytes first."""
    return finding(
        "memory",
        f"{needed}; a device has {bytes_shown(hbm)}",
        "cut these by more axes, or take a mesh of more devices: `sweep` compares meshes",
        largest[:_MOST_LEAVES],
        bytes=needed.max - hbm,
    )


def unpinned(context: CheckContext) -> Iterator[Finding]:
    folded = context.folded([kind.memory_kind == "unpinned_host" for kind in context.kinds])
    if not folded:
        return
    rules, cost = context.rules_of(folded), context.device_bytes(folded)
    yield finding(
        "unpinned",
        f"{counted(leaves_in(folded), 'leaf')} in unpinned_host memory "
        f"({context.rules(rules) or 'no rule'}), which jit does not have: it copies what it is "
        f"given from there to the device, where {at_stake(cost)} are not counted",
        "name 'pinned_host' instead, where arrays stay inside jit",
        folded,
        level=context.level(cost, "warning"),
        rule=only_one(rules),
        bytes=cost,
    )


def catch_alls(context: CheckContext) -> Iterator[Finding]:
    plan, kinds = context.plan, context.kinds
    for rule in sorted(context.silent_catch_alls):
        folded = context.undeclared(context.folded([kind.rule == rule for kind in kinds]))
        if not folded:
            continue
        leaves = leaves_in(folded)
        total = sum([kinds[part.group].bytes * len(part.rows) for part in folded])
        # Together: 10,000 experts of a megabyte each are as costly as one of 10 GB.
        silent_bytes = context.device_bytes(
            [part for part in folded if context.is_whole(kinds[part.group])]
        )
        cost, dead = context.device_bytes(folded), rules_listed(context.dead)
        yield finding(
            "catch-all",
            f"{counted(leaves, 'leaf')} of {len(plan.paths):,} ({bytes_shown(total)} of "
            f"{bytes_shown(plan.total_bytes)}) {'matches' if leaves == 1 else 'match'} no rule "
            f"but the catch-all, {context.rule(rule)}: {at_stake(cost)}",
            "add rules for them, such as `suggest` writes"
            + (f" (perhaps meant for them, but matching nothing: {dead})" if dead else "")
            + "; or declare them replicated",
            folded,
            level=context.level(silent_bytes, "error"),
            rule=rule,
            bytes=cost,
        )


def replicated(context: CheckContext) -> Iterator[Finding]:
    kinds = context.kinds
    by_rule: dict[Any, list[Folded]] = defaultdict(list)
    for part in context.undeclared(context.folded(map(context.is_whole, kinds))):
        kind = kinds[part.group]
        # Leaves of the catch-all, and those without names, are reported as that.
        if kind.rule not in context.silent_catch_alls and not context.is_unnamed(kind):
            by_rule[kind.decided_by, context.is_exempt(kind)].append(part)
    for (_, is_exempt), folded in by_rule.items():
        large = [part for part in folded if kinds[part.group].device_bytes >= context.large]
        if not large and not context.is_much(context.device_bytes(folded)):
            continue
        parts, noun = (large, "large leaf") if large else (folded, "leaf")
        kind = kinds[parts[0].group]
        why = context.who(kind)
        if any(kinds[part.group].losses for part in parts):
            why += ", of which the shapes and the mesh leave nothing"
        cost = context.device_bytes(parts)
        yield finding(
            "replicated",
            f"{counted(leaves_in(parts), noun)} replicated "
            f"({'by the threshold of ' if is_exempt else ''}{why}): {at_stake(cost)}",
            "lower its min_bytes or min_rank, if they are to be cut too"
            if is_exempt
            else "shard them, or declare them replicated",
            parts,
            level="info" if is_exempt else "warning",
            rule=kind.rule,
            bytes=cost,
        )


def cut_heads(context: CheckContext) -> Iterator[Finding]:
    """Projections of attention that are cut inside a head.

    The size of a head is `head_dim`, or that of the norm of single heads beside them.
    """
    folded, kinds = context.plan.folded, context.kinds
    if context.head_dim is None and not HEAD_NORM.are_in(*context.plan._leaves.templates.texts):
        return
    from shardrules._plan.roles import roles_of

    roles = roles_of(folded, [kind.shape or () for kind in kinds], context.head_dim)
    if context.head_dim is not None and all(dims.head is None for dims in roles):
        yield finding(
            "half-head",
            f"head_dim={context.head_dim} is given, but no path names projections of attention",
            "leave head_dim out; RuleSpec(units=...) keeps heads whole whatever paths are",
        )
    groups: dict[tuple[int | None, str, str], list[Folded]] = defaultdict(list)
    for folded_leaves, dims in zip(folded, roles, strict=True):
        kind, dim, head = kinds[folded_leaves.group], dims.head, dims.unit
        if dim is None or kind.spec is None:
            continue
        size = (kind.shape or ())[dim]
        axes = entry_axes(next(iter(entries_of(kind.spec)[dim:]), None))
        # A fraction where the dimension is cut unevenly.
        cutting = [context.sizes.get(axis, 1) for axis in axes if not is_gathered(axis)]
        part = size / prod(cutting)
        if part == size or size % head or part % head == 0:
            continue
        heads, axis_of_heads = size // head, axes[0] if len(axes) == 1 else ""
        division = (
            f"dim {dim} of size {size}, {counted(heads, 'head')} of {head}, is cut into "
            f"parts of {part:g}, {part / head:.3g} heads"
        )
        fix = "cut by fewer devices, or keep heads whole with RuleSpec(..., units=...)"
        if advice := few_heads_advice(heads, axis_of_heads, context.sizes.get(axis_of_heads, 1)):
            fix += f", and {advice}"
        groups[kind.rule, division, fix].append(folded_leaves)
    for (rule, division, fix), leaves in groups.items():
        who = "" if rule is None else f"{context.rule(rule)}: "
        message = f"{who}{division}; devices exchange parts of heads in each step"
        yield finding("half-head", message, fix, leaves, rule=rule)


_NUMBERS: Final = re.compile("[0-9]+")


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
        meant = nearest(name, others, SLIP)
        absent = meant in unused
        replicated = [
            part for part in context.undeclared(folded) if context.is_whole(kinds[part.group])
        ]
        size = context.device_bytes(replicated)
        hint = f"; did you mean {meant!r}{', which no leaf has' * absent}?" if meant else ""
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


def fewer_names(context: CheckContext) -> Iterator[Finding]:
    """Arrays with fewer names than dimensions: the names may be those of the wrong dimensions."""
    kinds = context.kinds
    has_fewer = [kind.names and len(kind.names) < len(kind.shape or ()) for kind in kinds]
    if folded := context.folded(has_fewer):
        first = context.kinds[folded[0].group]
        yield finding(
            "unnamed",
            f"{counted(leaves_in(folded), 'leaf')} with fewer names than dimensions, such as "
            f"{first.names} for the shape {first.shape}: names count from the first dimension",
            "give each dimension a name or None; stacked layers have a dimension of their own",
            folded,
            level="warning",
        )


def nnx_values(context: CheckContext) -> Iterator[Finding]:
    rules, sources = context.path_rules, context.plan.sources
    if rules is None or (dialect := rules.dialect).hidden_key is not None:
        return
    end = f"{dialect.separator or '.'}value"
    # Paths that have nothing of a model in them but this end, or not even that.
    probe = "~" if dialect.separator else "['~']"
    for rule in sorted({*rules.all_matches(probe + end)} - {*rules.all_matches(probe)}):
        if str(rules[rule][0]).removesuffix("$").endswith((end, re.escape(end))):  # it says so
            continue
        folded = [
            part
            for part in context.folded([kind.rule == rule for kind in context.kinds])
            for path in [sources[part.rows.item(0)]]
            if path.endswith(end) and rule not in rules.all_matches(path.removesuffix(end))
        ]
        if folded:
            yield finding(
                "nnx-value",
                f"{context.rule(rule)} matches {counted(leaves_in(folded), 'leaf')} only through "
                f"the {end!r} in which flax nnx lets paths end",
                "use the dialect NNX, whose paths do not have it; or let the pattern go on behind "
                f"the name, as in value{end[0]}kernel",
                folded,
                rule=rule,
            )


CHECKS: Final[tuple[Check, ...]] = (
    (companions_in_vain, None),
    (cut_ranks, "paths"),
    (too_large, None),
    (unpinned, None),
    (catch_alls, None),
    (replicated, None),
    (cut_heads, None),
    (unknown_names, "names"),
    (unnamed, "names"),
    (fewer_names, "names"),
    (nnx_values, "paths"),
)
