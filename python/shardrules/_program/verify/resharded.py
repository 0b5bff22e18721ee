"""Finds what the arrays cost that XLA has warned of, since it cannot reshard them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache

from shardrules._base.text import bytes_shown
from shardrules._plan.findings import Finding
from shardrules._program.causes import CONSTRAINT
from shardrules._program.collectives import Collective
from shardrules._program.lock import largest
from shardrules._program.program import Program
from shardrules._program.reshards import Reshard


def resharded(
    program: Program, warnings: Sequence[Reshard], large: float
) -> Iterator[tuple[Finding, list[Collective]]]:
    """Yield findings, each with its collectives, about warnings that cost `large` bytes a step."""
    groups: defaultdict[tuple[str, str], list[Reshard]] = defaultdict(list)
    for reshard in dict.fromkeys(warnings):
        groups[reshard.op_name, reshard.shape].append(reshard)
    rest = list(program.collectives)
    for (op_name, shape), reshards in groups.items():
        rows = _replicating(op_name, shape, rest)
        size = sum(row.sent_at_least for row in rows)
        if rows and size >= large:
            rest = [row for row in rest if row not in rows]
            yield _reshard_finding(reshards, rows, size), rows


def _replicating(op_name: str, shape: str, rows: Sequence[Collective]) -> list[Collective]:
    """Find the gathers that replicate an array, perhaps in steps, the last to its whole size."""
    count = _elements(shape)
    gathers = [row for row in rows if row.kind in ("all-gather", "all-reduce")]
    parts = [row for row in gathers if row.op_name == op_name and count % _elements(row.shape) == 0]
    if any(_elements(row.shape) == count for row in parts):
        return parts
    # XLA may name them by what uses the array.
    is_argument = bool(op_name) and "/" not in op_name
    users = {
        row.op_name
        for row in gathers
        if row.shape == shape and (row.what == "argument") == is_argument
    }
    return [row for row in gathers if row.op_name in users and count % _elements(row.shape) == 0]


@lru_cache(maxsize=4096)
def _elements(shape: str) -> int:
    """Count the elements of f32[16,512], at least one."""
    return max(1, math.prod(map(int, re.findall(r"\d+", shape.partition("[")[2]))))


def _reshard_finding(reshards: Sequence[Reshard], rows: Sequence[Collective], size: int) -> Finding:
    ways = ", nor ".join(f"from {reshard.source} to {reshard.target}" for reshard in reshards)
    step = "an iteration" if any(row.times is None for row in rows) else "a step"
    message = (
        f"{bytes_shown(size)} sent by each device in {step}, since XLA cannot reshard "
        f"{reshards[0].shape} {ways}, and replicates it: {largest(rows)}"
    )
    line = f" at {rows[0].place}" if rows[0].place else ""
    fix = (
        f"constrain the array alike on both sides{line}; or go in two steps, by a constraint "
        "between that moves one mesh axis"
    )
    return Finding("warning", "unexpected", message, fix, bytes=size, mend=CONSTRAINT)
