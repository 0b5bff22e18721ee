"""Checks of memory: whether a device has room, and kinds of memory that programs do not have.

Costs per kind of leaf. Must not know how findings are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from shardrules._format import bytes_shown, counted
from shardrules._memory_kinds import is_on_host
from shardrules._planning.asking.budget import by_class
from shardrules._planning.asking.checks.queries import Queries, finding, leaves_in
from shardrules._planning.asking.findings import Finding, at_stake

__all__ = ["too_large", "unpinned"]

_MOST_LEAVES: Final = 5


def too_large(queries: Queries) -> Iterator[Finding]:
    """Leaves that do not fit into the memory of a device."""
    columns, hbm = queries.columns, queries.hbm
    held = by_class(columns)
    if hbm is None or held.max <= hbm:
        return
    largest = queries.folded(lambda kind: not is_on_host(kind.memory_kind))[:_MOST_LEAVES]
    yield finding(
        "error",
        "memory",
        f"{held}; a device has {bytes_shown(hbm)}",
        "cut these by more axes, or take a mesh of more devices: `sweep` compares meshes",
        folded=largest,
        bytes=held.max - hbm,
    )


def unpinned(queries: Queries) -> Iterator[Finding]:
    """Leaves in the host's unpinned memory, which jit copies to the device as a whole."""
    folded = queries.folded(lambda kind: kind.memory_kind == "unpinned_host")
    if not folded:
        return
    rules, held = queries.rules_of(folded), queries.device_bytes(folded)
    yield finding(
        queries.level(held, "warning"),
        "unpinned",
        f"{counted(leaves_in(folded), 'leaf')} in unpinned_host memory "
        f"({queries.rules(rules) or 'no rule'}), which jit does not have: it copies what it is "
        f"given from there to the device, where {at_stake(held)} are not counted",
        "name 'pinned_host' instead, where arrays stay inside jit",
        folded=folded,
        rule=rules[0] if len(rules) == 1 else None,
        bytes=held,
    )
