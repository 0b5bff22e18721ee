"""Finds the arrays that XLA has warned of since it cannot reshard them, and what they cost."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from shardrules._base.text import bytes_shown
from shardrules._plan.findings import Finding
from shardrules._program.causes import CONSTRAINT
from shardrules._program.collectives import Collective
from shardrules._program.lock import largest
from shardrules._program.program import Program

# "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {...} to {...}
# efficiently for HLO operation %add = f32[8,16]{1,0} add(...), ..., metadata={op_name="..."}"
_BRACES: Final = r"(\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})"
_WARNING: Final = re.compile(
    rf"Involuntary full rematerialization\. The compiler \D{{,30}} go from sharding {_BRACES} to "
    rf"{_BRACES} (?:efficiently|without) .*?for HLO operation:? %?\S+ = (\w+)\[([\d,]*)\](.*)"
)
_OP_NAME: Final = re.compile(r'op_name="([^"]*)"')
_AXIS: Final = re.compile(r"'([^']+)'(?::\(\d+\))?=?(\d*)")
_MESH: Final = re.compile(r"\{mesh\[([^\]]*)\](?:, device_ids=\([^)]*\))?, \[(.*?)\]")
_TILES: Final = re.compile(r"\{devices=\[([\d,]+)\]")


class Reshard(NamedTuple):
    """Array that XLA replicates on all devices, since it cannot reshard it."""

    shape: str
    """Dtype and dimensions of the whole array, such as "f32[16,512]"."""
    source: str
    """Sharding of the array as it is computed; a spec, or in the words of XLA."""
    target: str
    """Sharding in which it is used."""
    op_name: str
    """JAX's name of the operation that computes it; "" if XLA does not name it."""


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


def reshards_in(log: str) -> tuple[Reshard, ...]:
    """Return the arrays of which a compiler's standard error says so."""
    return tuple(filter(None, map(_reshard, log.splitlines())))


def _reshard(line: str) -> Reshard | None:
    """Parse a line; None if it is no such warning, or of another form than those of XLA's today."""
    match = _WARNING.search(line)
    if match is None:
        return None
    *shardings, dtype, dims, rest = match.groups()
    local = [int(size) for size in dims.split(",") if size]
    source, target = (_dims_and_text(sharding, len(local)) for sharding in shardings)
    if source is None or target is None:
        return None
    whole = ",".join(str(size * parts) for size, parts in zip(local, source[0], strict=True))
    op_name = _OP_NAME.search(rest)
    return Reshard(f"{dtype}[{whole}]", source[1], target[1], op_name[1] if op_name else "")


def _dims_and_text(sharding: str, rank: int) -> tuple[list[int], str] | None:
    """Return the parts of each dimension, and a text: a spec if mesh axes are named."""
    if mesh := _MESH.match(sharding):
        sizes = dict(_AXIS.findall(mesh[1]))
        entries = [_AXIS.findall(entry) for entry in re.findall(r"\{([^}]*)\}", mesh[2])]
        if len(entries) != rank or any(axis not in sizes for axes in entries for axis, _ in axes):
            return None
        parts = [math.prod(int(size or sizes[axis]) for axis, size in axes) for axes in entries]
        names = [tuple(axis for axis, _ in axes) for axes in entries]
        spec = ", ".join(repr(axes[0] if len(axes) == 1 else axes or None) for axes in names)
        return parts, f"P({spec})"
    tiles = _TILES.match(sharding)
    parts = [int(size) for size in tiles[1].split(",")][:rank] if tiles else [1] * rank
    is_known = tiles or sharding.startswith(("{replicated", "{maximal"))
    return (parts, sharding) if is_known and len(parts) == rank else None
