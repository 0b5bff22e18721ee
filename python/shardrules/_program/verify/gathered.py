"""Finds planned arrays of which devices get more than their part, by the reasons of gathers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from shardrules._base.text import bytes_shown, counted
from shardrules._plan.findings import Finding, Level
from shardrules._program.causes import CONSTRAINT, REASONS
from shardrules._program.executable import sharding_shown
from shardrules._program.inputs import PlannedSharding
from shardrules._program.program import Program
from shardrules._program.verify.placements import is_same

GATHERED: Final = frozenset({"all experts", "anew", "gather", "layer", "loop", "same work", "wide"})
"""Reasons for which planned arrays are gathered."""
_EXPECTED: Final = {
    "layer": ("a slice at a time, such as a layer, in a loop", "no change: as in FSDP"),
    "gather": (
        "inside the function",
        "no change if this is FSDP; stacked layers in a scan are gathered one at a time",
    ),
}
"""Words and fix of those that are expected."""


def gathered(
    program: Program, inputs: Sequence[PlannedSharding | None], large: int
) -> Iterator[tuple[Finding, Sequence[str]]]:
    """Yield findings about planned arrays that are gathered, and are then large.

    Behind each are the axes along which devices do the same work with them.
    """
    executable = program._executable
    if executable.hlo is None:
        message = (
            "this backend does not show the text of executables: what they gather is not known"
        )
        fix = "verify the same function on another backend, such as CPU devices"
        yield Finding("warning", "gathered", message, fix), ()
        return
    side = executable.inputs
    rows = [
        (row.leaf, row)
        for _, row in program._exchanged
        if row is not None and row.leaf is not None and row.gathered
    ]
    # Copies that are gathered again are told where they end.
    passed_on = {executable.facts.source_of(row.operand) for _, row in rows}
    sizes: defaultdict[tuple[str, tuple[str, ...], str], dict[int, int]] = defaultdict(dict)
    for leaf, row in rows:
        target, sharding, reason = inputs[leaf], side.shardings[leaf], row.reason
        size = row.exchange.payload
        if size < large or reason not in GATHERED or row.result in passed_on or target is None:
            continue
        # One that is not sharded as planned is a finding of its own.
        if is_same(target.sharding, sharding, len(side.shapes[leaf])):
            axes = tuple(axis for axis in program.axis_sizes if axis in row.gathered)
            of_leaf = sizes[sharding_shown(sharding), axes, reason]
            of_leaf[leaf] = max(size, of_leaf.get(leaf, 0))
    for (spec, axes, reason), of_leaf in sizes.items():
        total, cause = sum(of_leaf.values()), REASONS[reason]
        words, fix = _EXPECTED.get(reason, (cause.text.partition(", gathered ")[2], cause.fix))
        message = (
            f"{counted(len(of_leaf), 'leaf')} planned {spec} gathered over {', '.join(axes)} "
            f"to {bytes_shown(total)} on each device, {words}"
        )
        level: Level = "info" if cause.is_expected else "warning"
        leaves = sorted(of_leaf)
        finding = side.finding(
            level, "gathered", message, fix, leaves, bytes=total, mend=CONSTRAINT
        )
        yield finding, axes if reason == "same work" else ()
