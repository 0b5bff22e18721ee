"""Leaves that follow nothing, though a table of companions would find them: LoRA's factors, scales.

Costs a match per folded path. Must not know how findings are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from shardrules._matching.rules import Rules
from shardrules._planning.asking.checks.queries import Queries, finding
from shardrules._planning.companion import base_path, fits_rank
from shardrules._planning.path_rules import first_rules

if TYPE_CHECKING:
    from shardrules._planning.asking.findings import Finding
    from shardrules._planning.companion import Companion
    from shardrules._planning.fold import Folded

__all__ = ["advice", "cut_ranks", "tables"]


class _Missed(NamedTuple):
    """Leaves that a record of a table finds."""

    folded: Folded
    companion: Companion
    rule: int
    """The rule that their base's path meets."""


@cache
def tables() -> Mapping[str, tuple[Companion, ...]]:
    """Returns the package's own tables by name, imported where leaves may be theirs."""
    from shardrules._planning.companions import LORA, QUANTIZED

    return {"LORA": LORA, "QUANTIZED": QUANTIZED}


def advice(queries: Queries, folded: Sequence[Folded]) -> str:
    """How many of these leaves a table's records would lead to a rule, as a part of a fix."""
    leaves = {
        name: sum(len(one.folded.rows) for one in _missed(queries, folded, table))
        for name, table in tables().items()
    }
    return "".join(
        f"; or give companions=shardrules.{name}: {count:,} of them then follow other leaves' rules"
        for name, count in leaves.items()
        if count
    )


def cut_ranks(queries: Queries) -> Iterator[Finding]:
    """Factors of LoRA that a rule for their kernel decides, as if they were the kernel."""
    kinds = queries.columns.kinds
    cut: dict[int, list[Folded]] = defaultdict(list)
    named = [one for one in queries.columns.folded if "lora_" in "".join(one.parts)]
    for one in _missed(queries, named, tables()["LORA"]) if named else ():
        kind, dims = kinds[one.folded.group], one.companion.dims
        if kind.rule == one.rule and kind.spec is not None and not callable(dims):
            entries = zip(dims, kind.spec, strict=False)
            if any(dim is None and entry is not None for dim, entry in entries):
                cut[one.rule].append(one.folded)
    for rule, folded in cut.items():
        yield finding(
            "warning",
            "companion",
            f"{queries.rule(rule)} is for kernels, and decides the factors of LoRA beside them, "
            "too: it cuts their rank, over which their product then needs a collective of its own",
            "give companions=shardrules.LORA, by which factors follow their kernels and no rank is "
            "cut; or let the pattern not match them",
            folded=folded,
            rule=rule,
        )


def _missed(
    queries: Queries, folded: Iterable[Folded], table: tuple[Companion, ...]
) -> Iterator[_Missed]:
    """The leaves that follow nothing, and would, by the table, follow what a rule matches."""
    columns = queries.columns
    rules = columns.leaves.path_rules
    if rules is None:
        return
    of_rank: dict[int, dict[str, Folded]] = defaultdict(dict)
    for one in folded:
        shape = columns.kinds[one.group].shape
        if shape is not None and int(one.rows[0]) not in columns.leaves.links:
            of_rank[len(shape)][columns.paths[one.rows[0]]] = one
    for rank, free in of_rank.items():
        fitting = tuple(record for record in table if fits_rank(record, rank))
        found = first_rules(_finder(fitting), free)
        records = {path: fitting[index] for path, index in found.items() if index >= 0}
        bases = {path: base_path(record, path) for path, record in records.items()}
        of_base = first_rules(rules, bases.values())
        for path, base in bases.items():
            if of_base[base] >= 0:
                yield _Missed(free[path], records[path], of_base[base])


@cache
def _finder(table: tuple[Companion, ...]) -> Rules:
    return Rules([(record.pattern, None) for record in table])
