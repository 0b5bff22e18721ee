"""Checks of companions: whether they find leaves, and whether rules meet the bases of these.

Costs per leaf that a companion finds. Must not know how a finding is shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from shardrules._format import counted
from shardrules._planning.asking.checks.queries import Queries, finding, rules_listed
from shardrules._planning.asking.checks.tables import tables
from shardrules._planning.fold import fold

if TYPE_CHECKING:
    from shardrules._planning.asking.findings import Finding
    from shardrules._planning.companion import Companion

__all__ = ["following"]


def following(queries: Queries) -> Iterator[Finding]:
    """Leaves that companions find but no rule for their bases; companions that find nothing."""
    columns = queries.columns
    left: dict[Companion, list[int]] = defaultdict(list)
    for row, links in columns.leaves.links.items():
        if columns.sources[row] != links[-1].base:
            left[links[-1].companion].append(row)
    for companion, of_it in left.items():
        rows = np.array(sorted(of_it))
        folded = fold([columns.paths[row] for row in rows], columns.kind_of[rows])
        rules = queries.rules_of(folded)
        base = columns.leaves.links[int(rows[0])][-1].base
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
    successful = {link.companion for links in columns.leaves.links.values() for link in links}
    for name, table in _sets_of(columns.leaves.companions).items():
        if successful.isdisjoint(table):
            yield finding(
                "warning",
                "companion",
                f"{name} finds no leaf",
                "correct its pattern or dims to what the tree's leaves are, or leave it out",
            )


def _sets_of(companions: Iterable[Companion]) -> dict[str, list[Companion]]:
    """The companions by table. Most records of the package's own tables find nothing, by design."""
    sets: dict[str, list[Companion]] = defaultdict(list)
    for companion in companions:
        name = next((name for name, table in tables().items() if companion in table), None)
        sets[name or f"the companion {companion.pattern!r}"].append(companion)
    return sets
