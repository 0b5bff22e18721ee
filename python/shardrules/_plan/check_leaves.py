"""Checks of leaves: replicated, too large, in unpinned memory, or found by a companion in vain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

import numpy as np

from shardrules._base.rule_specs import Fsdp, is_on_host
from shardrules._base.text import bytes_shown, counted
from shardrules._plan.check_context import (
    CheckContext,
    added_rule,
    check_of,
    finding,
    leaves_in,
    only_one,
    rules_listed,
)
from shardrules._plan.companions import LORA, QUANTIZED, Companion, base_path, fits_rank
from shardrules._plan.findings import Finding, at_stake
from shardrules._plan.fold import Folded, fold
from shardrules._plan.following import dims_at
from shardrules._plan.kinds import Kind, axes_named
from shardrules._plan.leaves import first_rules
from shardrules._plan.memory import DeviceBytes
from shardrules._rules.rules import Rules

_TABLES: Final[Mapping[str, tuple[Companion, ...]]] = {"LORA": LORA, "QUANTIZED": QUANTIZED}
"""The package's own tables by name."""


@check_of(
    "companion",
    "warning",
    "leaves that a companion finds, but no rule for their base, so that their own rule counts; "
    "companions that find nothing: of `LORA` and `QUANTIZED`, if none of their records does; "
    "and factors of LoRA whose rank a rule for their kernel cuts",
)
def following(context: CheckContext) -> Iterator[Finding]:
    plan, links = context.plan, context.plan._leaves.links
    unled: dict[Companion, list[int]] = defaultdict(list)
    for row, of_row in links.items():
        if plan.sources[row] != of_row[-1].base:
            unled[of_row[-1].companion].append(row)
    for companion, rows_of_it in unled.items():
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
    successful = {link.companion for of_row in links.values() for link in of_row}
    # Most records of the package's own tables find nothing, by design.
    tables: dict[str, list[Companion]] = defaultdict(list)
    for companion in plan._leaves.companions:
        name = next((name for name, table in _TABLES.items() if companion in table), None)
        tables[name or f"the companion {companion.pattern!r}"].append(companion)
    for name, table in tables.items():
        if successful.isdisjoint(table):
            yield finding(
                "companion",
                f"{name} finds no leaf",
                "correct its pattern or dims to what the tree's leaves are, or leave it out",
            )


@check_of("companion")
def cut_ranks(context: CheckContext) -> Iterator[Finding]:
    """Factors of LoRA that a rule for their kernel decides, as if they were the kernel."""
    plan, rules = context.plan, context.path_rules
    cut: dict[int, list[Folded]] = defaultdict(list)
    for part in plan.folded if rules is not None else ():
        row, kind = int(part.rows[0]), context.kinds[part.group]
        path, shape = plan.paths[row], kind.shape
        if "lora_" not in path or shape is None or row in plan._leaves.links:
            continue
        records = (record for record in LORA if fits_rank(record, len(shape)))
        record = next((each for each in records if _rules_of_record(each).all_matches(path)), None)
        if record is None or rules is None or kind.rule is None or kind.spec is None:
            continue
        base = base_path(record, path)
        if first_rules(rules, [base])[base] == kind.rule:
            kernel = plan._leaves.rows.get(base)
            kernel_shape = None if kernel is None else plan.kinds[plan.kind_of[kernel]].shape
            entries = zip(dims_at(record, path, shape, kernel_shape), kind.spec, strict=False)
            if any(dim is None and entry is not None for dim, entry in entries):
                cut[kind.rule].append(part)
    for rule, folded in cut.items():
        yield finding(
            "companion",
            f"{context.rule(rule)} is for kernels, and decides the factors of LoRA beside them, "
            "too: it cuts their rank, over which their product then needs a collective of its own",
            "give companions=shardrules.LORA, by which factors follow their kernels and no rank is "
            "cut; or let the pattern not match them",
            folded,
            rule=rule,
        )


@cache
def _rules_of_record(record: Companion) -> Rules:
    return Rules([(record.pattern, None)])


_MOST_LEAVES: Final = 5


@check_of("memory", "error", "leaves that do not fit into `hbm`")
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


@check_of(
    "unpinned",
    "warning, info",
    "leaves in `unpinned_host` memory, which jit copies to the device as a whole; info if they "
    "are not large together",
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


@check_of(
    "catch-all",
    "error, info",
    "leaves that only the catch-all rule matches; info if those of them that are replicated are "
    "not large together",
)
def catch_alls(context: CheckContext) -> Iterator[Finding]:
    plan, kinds = context.plan, context.kinds
    for rule in sorted(context.silent_catch_alls):
        folded = context.undeclared(context.folded([kind.rule == rule for kind in kinds]))
        if not folded:
            continue
        leaves = leaves_in(folded)
        total = sum(kinds[part.group].bytes * len(part.rows) for part in folded)
        # Together: 10,000 experts of a megabyte each are as costly as one of 10 GB.
        silent = context.device_bytes(
            part for part in folded if context.is_whole(kinds[part.group])
        )
        cost, dead = context.device_bytes(folded), rules_listed(context.dead)
        example = added_rule(plan, folded)
        yield finding(
            "catch-all",
            f"{counted(leaves, 'leaf')} of {len(plan.paths):,} ({bytes_shown(total)} of "
            f"{bytes_shown(plan.total_bytes)}) {'matches' if leaves == 1 else 'match'} no rule "
            f"but the catch-all, {context.rule(rule)}: {at_stake(cost)}",
            "add rules for them"
            + (f", such as {example}" if example else "")
            + (f" (perhaps meant for them, but matching nothing: {dead})" if dead else "")
            + "; or declare them replicated",
            folded,
            level=context.level(silent, "error"),
            rule=rule,
            bytes=cost,
        )


@check_of(
    "replicated",
    "warning, info",
    "other leaves that are replicated, and large alone or together; info if the rule itself "
    "leaves them whole, as `fsdp(min_bytes=)` does",
)
def replicated(context: CheckContext) -> Iterator[Finding]:
    kinds = context.kinds
    by_rule: dict[Any, list[Folded]] = defaultdict(list)
    for part in context.undeclared(context.folded(map(context.is_whole, kinds))):
        kind = kinds[part.group]
        # Leaves of the catch-all, and those without names, are reported as that.
        if kind.rule not in context.silent_catch_alls and not context.is_unnamed(kind):
            by_rule[kind.decided_by, _is_exempt(context, kind)].append(part)
    large_of = {
        rule: [part for part in folded if kinds[part.group].device_bytes >= context.large]
        for rule, folded in by_rule.items()
    }
    small = sum(
        context.device_bytes(folded) for rule, folded in by_rule.items() if not large_of[rule]
    )
    for (decider, exempt), folded in by_rule.items():
        large = large_of[decider, exempt]
        if not large and not context.matters(context.device_bytes(folded), small):
            continue
        reported, noun = (large, "large leaf") if large else (folded, "leaf")
        kind = kinds[reported[0].group]
        why = context.who(kind)
        if any(kinds[part.group].losses for part in reported):
            why += ", of which the shapes and the mesh leave nothing"
        cost = context.device_bytes(reported)
        yield finding(
            "replicated",
            f"{counted(leaves_in(reported), noun)} replicated "
            f"({'by the threshold of ' if exempt else ''}{why}): {at_stake(cost)}",
            "lower its min_bytes or min_rank, if they are to be cut too"
            if exempt
            else "shard them, or declare them replicated",
            reported,
            level="info" if exempt else "warning",
            rule=kind.rule,
            bytes=cost,
        )


def _is_exempt(context: CheckContext, kind: Kind) -> bool:
    """Tell if a rule that is made from shapes leaves such arrays whole itself."""
    spec = None if kind.rule is None else context.plan._spec_of_rule(kind.rule)
    return isinstance(spec, Fsdp) and not kind.losses and axes_named(kind.wanted) == frozenset()
