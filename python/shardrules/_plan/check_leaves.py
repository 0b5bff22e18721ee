"""Checks of leaves: replicated, too large, in unpinned memory, or found by a companion in vain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.rule_specs import Fsdp, is_on_host
from shardrules._base.text import bytes_shown, counted
from shardrules._plan.check_context import Queries, check_of, finding, leaves_in, rules_listed
from shardrules._plan.companions import LORA, QUANTIZED, Companion, base_path, fits_rank
from shardrules._plan.findings import Finding, at_stake
from shardrules._plan.fold import Folded, fold
from shardrules._plan.following import dims_at
from shardrules._plan.kinds import Kind, axes_named
from shardrules._plan.leaves import first_rules
from shardrules._plan.memory import DeviceBytes, Room, by_class
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan

_TABLES: Final[Mapping[str, tuple[Companion, ...]]] = {"LORA": LORA, "QUANTIZED": QUANTIZED}
"""The package's own tables by name."""


@check_of(
    "companion",
    "warning",
    "leaves that a companion finds, but no rule for their base, so that their own rule counts; "
    "companions that find nothing: of `LORA` and `QUANTIZED`, if none of their records does; "
    "and factors of LoRA whose rank a rule for their kernel cuts",
)
def following(queries: Queries) -> Iterator[Finding]:
    plan = queries.plan
    unled: dict[Companion, list[int]] = defaultdict(list)
    for row, links in plan._leaves.links.items():
        if plan.sources[row] != links[-1].base:
            unled[links[-1].companion].append(row)
    for companion, of_it in unled.items():
        rows = np.array(sorted(of_it))
        folded = fold([plan.paths[row] for row in rows], plan.kind_of[rows])
        rules = queries.rules_of(folded)
        base = plan._leaves.links[int(rows[0])][-1].base
        yield finding(
            "warning",
            "companion",
            f"{counted(len(rows), 'leaf')} found by the companion {companion.pattern!r} "
            f"should follow a rule for {base!r} and the like, but none meets that path: "
            f"what decides is {rules_listed(rules) or 'no rule'}, as if there were no companion",
            f"add a rule that matches {base!r}, or correct the companion's base; or leave the "
            "companion out",
            folded=folded,
            bytes=queries.device_bytes(folded),
        )
    successful = {link.companion for links in plan._leaves.links.values() for link in links}
    for name, table in _sets_of(plan._leaves.companions).items():
        if successful.isdisjoint(table):
            yield finding(
                "warning",
                "companion",
                f"{name} finds no leaf",
                "correct its pattern or dims to what the tree's leaves are, or leave it out",
            )


def _sets_of(companions: Iterable[Companion]) -> dict[str, list[Companion]]:
    """Return the companions by table.

    Most records of the package's own tables find nothing, by design.
    """
    sets: dict[str, list[Companion]] = defaultdict(list)
    for companion in companions:
        name = next((name for name, table in _TABLES.items() if companion in table), None)
        sets[name or f"the companion {companion.pattern!r}"].append(companion)
    return sets


class _Missed(NamedTuple):
    """Leaves that a record of a table finds."""

    folded: Folded
    path: str
    """Of the first of them."""
    companion: Companion
    rule: int
    """The rule that their base's path meets."""
    shape_of_base: tuple[int, ...] | None
    """None if their base is not in the tree."""


def advice(queries: Queries, folded: Sequence[Folded]) -> str:
    """Return the part of a fix that counts the leaves that a table would lead to a rule."""
    leaves = {
        name: sum(len(missed.folded.rows) for missed in _missed(queries, folded, table))
        for name, table in _TABLES.items()
    }
    return "".join(
        f"; or give companions=shardrules.{name}: {count:,} of them then follow other leaves' rules"
        for name, count in leaves.items()
        if count
    )


@check_of("companion")
def cut_ranks(queries: Queries) -> Iterator[Finding]:
    """Factor of LoRA that a rule for their kernel decides, as if they were the kernel."""
    kinds = queries.plan.kinds
    cut: dict[int, list[Folded]] = defaultdict(list)
    named = [missed for missed in queries.plan.folded if "lora_" in "".join(missed.parts)]
    for missed in _missed(queries, named, _TABLES["LORA"]) if named else ():
        kind = kinds[missed.folded.group]
        if kind.rule == missed.rule and kind.spec is not None:
            dims = dims_at(missed.companion, missed.path, kind.shape, missed.shape_of_base)
            entries = zip(dims, kind.spec, strict=False)
            if any(dim is None and entry is not None for dim, entry in entries):
                cut[missed.rule].append(missed.folded)
    for rule, folded in cut.items():
        yield finding(
            "warning",
            "companion",
            f"{queries.rule(rule)} is for kernels, and decides the factors of LoRA beside them, "
            "too: it cuts their rank, over which their product then needs a collective of its own",
            "give companions=shardrules.LORA, by which factors follow their kernels and no rank is "
            "cut; or let the pattern not match them",
            folded=folded,
            mend="companions=shardrules.LORA",
            rule=rule,
        )


def _missed(
    queries: Queries, folded: Iterable[Folded], table: tuple[Companion, ...]
) -> Iterator[_Missed]:
    """Yield the leaves that follow nothing, and would, by the table, follow what a rule matches."""
    plan = queries.plan
    rules = plan._leaves.path_rules
    if rules is None:
        return
    of_rank: dict[int, dict[str, Folded]] = defaultdict(dict)
    for part in folded:
        shape = plan.kinds[part.group].shape
        if shape is not None and int(part.rows[0]) not in plan._leaves.links:
            of_rank[len(shape)][plan.paths[part.rows[0]]] = part
    for rank, free in of_rank.items():
        fitting = tuple(record for record in table if fits_rank(record, rank))
        first = first_rules(_finder(fitting), free)
        records = {path: fitting[index] for path, index in first.items() if index >= 0}
        bases = {path: base_path(record, path) for path, record in records.items()}
        of_base = first_rules(rules, bases.values())
        for path, base in bases.items():
            if of_base[base] >= 0:
                row = plan._leaves.rows.get(base)
                shape = None if row is None else plan.kinds[plan.kind_of[row]].shape
                yield _Missed(free[path], path, records[path], of_base[base], shape)


@cache
def _finder(table: tuple[Companion, ...]) -> Rules:
    return Rules([(record.pattern, None) for record in table])


_MOST_LEAVES: Final = 5


@check_of("memory", "error", "leaves that do not fit into `hbm`")
def too_large(queries: Queries) -> Iterator[Finding]:
    if queries.hbm is None:
        return
    held_bytes = by_class(queries.plan)
    if held_bytes.max > queries.hbm:
        largest = queries.folded([not is_on_host(kind.memory_kind) for kind in queries.plan.kinds])
        yield no_room(held_bytes, Room(queries.hbm, None), largest)


def no_room(needed: DeviceBytes, room: Room, largest: list[Folded]) -> Finding:
    """Return the error that these bytes do not fit; the leaves have most bytes first."""
    pairs = ((needed.max, room.hbm), (needed.max_host, room.host))
    return finding(
        "error",
        "memory",
        f"{needed}; a device has {room}",
        "cut these by more axes, or take a mesh of more devices: `sweep` compares meshes",
        folded=largest[:_MOST_LEAVES],
        bytes=max(count - limit for count, limit in pairs if limit is not None),
    )


@check_of(
    "unpinned",
    "warning, info",
    "leaves in `unpinned_host` memory, which jit copies to the device as a whole; info if they "
    "are not large together",
)
def unpinned(queries: Queries) -> Iterator[Finding]:
    folded = queries.folded([kind.memory_kind == "unpinned_host" for kind in queries.plan.kinds])
    if not folded:
        return
    rules, cost = queries.rules_of(folded), queries.device_bytes(folded)
    yield finding(
        queries.level(cost, "warning"),
        "unpinned",
        f"{counted(leaves_in(folded), 'leaf')} in unpinned_host memory "
        f"({queries.rules(rules) or 'no rule'}), which jit does not have: it copies what it is "
        f"given from there to the device, where {at_stake(cost)} are not counted",
        "name 'pinned_host' instead, where arrays stay inside jit",
        folded=folded,
        rule=rules[0] if len(rules) == 1 else None,
        bytes=cost,
    )


@check_of(
    "catch-all",
    "error, info",
    "leaves that only the catch-all rule matches; info if those of them that are replicated are "
    "not large together",
)
def catch_alls(queries: Queries) -> Iterator[Finding]:
    plan = queries.plan
    for rule in sorted(queries.silent_catch_alls):
        folded = queries.undeclared(queries.folded([kind.rule == rule for kind in plan.kinds]))
        if not folded:
            continue
        leaves = leaves_in(folded)
        total = sum(plan.kinds[part.group].bytes * len(part.rows) for part in folded)
        # Together: 10,000 experts of a megabyte each are as costly as one of 10 GB.
        silent = queries.device_bytes(
            part for part in folded if queries.is_whole(plan.kinds[part.group])
        )
        cost = queries.device_bytes(folded)
        dead = rules_listed(queries.dead)
        match = "matches" if leaves == 1 else "match"
        mend = queries.added_rule(folded)
        example = f", such as {mend}" if mend else ""
        yield finding(
            queries.level(silent, "error"),
            "catch-all",
            f"{counted(leaves, 'leaf')} of {len(plan.paths):,} ({bytes_shown(total)} of "
            f"{bytes_shown(plan.total_bytes)}) {match} no rule but the catch-all, "
            f"{queries.rule(rule)}: {at_stake(cost)}",
            f"add rules for them{example}"
            + (f" (perhaps meant for them, but matching nothing: {dead})" if dead else "")
            + "; or declare them replicated",
            folded=folded,
            mend=mend,
            rule=rule,
            bytes=cost,
        )


@check_of(
    "replicated",
    "warning, info",
    "other leaves that are replicated, and large alone or together; info if the rule itself "
    "leaves them whole, as `fsdp(min_bytes=)` does",
)
def replicated(queries: Queries) -> Iterator[Finding]:
    plan = queries.plan
    by_rule: dict[Any, list[Folded]] = defaultdict(list)
    for part in queries.undeclared(queries.folded(map(queries.is_whole, plan.kinds))):
        kind = plan.kinds[part.group]
        # Leaves of the catch-all, and those without names, are reported as that.
        if kind.rule not in queries.silent_catch_alls and not queries.is_unnamed(kind):
            by_rule[kind.decided_by, _is_exempt(kind, plan)].append(part)
    large_of = {
        rule: [part for part in folded if queries.is_large(plan.kinds[part.group])]
        for rule, folded in by_rule.items()
    }
    small = sum(
        queries.device_bytes(folded) for rule, folded in by_rule.items() if not large_of[rule]
    )
    for (rule, exempt), folded in by_rule.items():
        large = large_of[rule, exempt]
        if not large and not queries.matters(queries.device_bytes(folded), small):
            continue
        reported, what = (large, "large leaf") if large else (folded, "leaf")
        why = queries.who(plan.kinds[reported[0].group])
        if any(plan.kinds[part.group].losses for part in reported):
            why += ", of which the shapes and the mesh leave nothing"
        cost = queries.device_bytes(reported)
        yield finding(
            "info" if exempt else "warning",
            "replicated",
            f"{counted(leaves_in(reported), what)} replicated "
            f"({'by the threshold of ' if exempt else ''}{why}): {at_stake(cost)}",
            "lower its min_bytes or min_rank, if they are to be cut too"
            if exempt
            else "shard them, or declare them replicated",
            folded=reported,
            rule=rule,
            bytes=cost,
            mend=queries.added_rule(reported),
        )


def _is_exempt(kind: Kind, plan: Plan) -> bool:
    """Return whether a rule that is made from shapes leaves such arrays whole itself."""
    spec = None if kind.rule is None else plan._spec_of_rule(kind.rule)
    return isinstance(spec, Fsdp) and not kind.losses and axes_named(kind.wanted) == frozenset()
