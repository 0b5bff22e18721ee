"""Finds what a program moves, computes or keeps without need, and results whose copies differ.

Planned arrays of which devices get more than their part, collectives that nothing planned explains,
arrays that XLA cannot reshard, products computed alike, activations kept in memory, and results
that lack a sum over devices.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from jax.sharding import NamedSharding

from shardrules._base.text import and_more, bytes_shown, counted
from shardrules._plan.findings import Finding, Level
from shardrules._plan.kinds import axes_used
from shardrules._program.causes import REASONS
from shardrules._program.executable import Executable, sharding_shown
from shardrules._program.hlo import Collective
from shardrules._program.inputs import PlannedSharding
from shardrules._program.program import Program
from shardrules._program.values import reached
from shardrules._program.verify.placements import is_same

_SHARE: Final = 0.05
"""Share of all bytes that are sent, above which a collective is told whatever its size."""
_ALIKE: Final = 0.2
"""Share of all products, above which those that devices compute alike are told."""
_KEPT: Final = 0.5
"""Share of the memory beside the arguments, above which activations that are kept are told."""
_KEPT_OF_PEAK: Final = 0.05
"""The same of all memory at the peak: computing less again frees too little."""
_NAMED: Final = 3

_GATHERED: Final = frozenset(
    {"all experts", "anew", "gather", "layer", "loop", "same work", "wide"}
)
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
) -> Iterator[Finding]:
    """Yield findings about planned arrays that are gathered, and are then large."""
    executable = program._executable
    side = executable.inputs
    rows = [
        (row.leaf, row)
        for _, row in program._exchanged
        if row is not None and row.leaf is not None and row.gathered_axes
    ]
    # Copies that are gathered again are told where they end.
    passed_on = {executable.facts.source_of(row.operand) for _, row in rows}
    sizes: defaultdict[tuple[str, tuple[str, ...], str], dict[int, int]] = defaultdict(dict)
    for leaf, row in rows:
        target, sharding, reason = inputs[leaf], side.shardings[leaf], row.reason
        size = row.exchange.payload
        if size < large or reason not in _GATHERED or row.result in passed_on or target is None:
            continue
        # One that is not sharded as planned is a finding of its own.
        if is_same(target.sharding, sharding, len(side.shapes[leaf])):
            axes = tuple(axis for axis in program.axis_sizes if axis in row.gathered_axes)
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
        yield side.finding(level, "gathered", message, fix, leaves, bytes=total)


# "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {...} to {...}
# efficiently for HLO operation %add = f32[8,16]{1,0} add(...), ..., metadata={op_name="..."}"
_BRACES: Final = r"(\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})"
_WARNING: Final = re.compile(
    rf"Involuntary full rematerialization\. The compiler \D{{,30}} go from sharding {_BRACES} to "
    rf'{_BRACES} (?:efficiently|without) .*?for HLO operation.*?op_name="([^"]*)"'
)
_RESHARD_FIX: Final = (
    "constrain the array alike on both sides{line}; or go in two steps, by a constraint between "
    "that moves one mesh axis"
)


def unexpected(program: Program, large: int, log: str) -> Iterator[Finding]:
    """Yield findings about what the program sends without need.

    `log` has XLA's warnings about arrays that it cannot reshard, and replicates.
    """
    ways: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for source, target, op_name in _WARNING.findall(log):
        ways[op_name][f"from {source} to {target}"] = None
    total, gathers = sum(program.sent.values()), {REASONS[reason].text for reason in _GATHERED}
    fixes = {cause.text: cause.fix for cause in REASONS.values()}
    groups: defaultdict[tuple[str, tuple[str, ...]], list[Collective]] = defaultdict(list)
    for row in program.collectives:
        if row.op_name in ways and row.kind in ("all-gather", "all-reduce"):
            way = ", nor ".join(ways[row.op_name])
            groups[f"XLA cannot reshard it {way}, and replicates it", ()].append(row)
        elif not row.is_expected and row.reason not in gathers:
            groups[row.reason, row.axes].append(row)
    for (reason, _), rows in groups.items():
        size = sum(row.sent_at_least for row in rows)
        if size >= large or (size >= _SHARE * total and total >= large):
            fix = fixes.get(reason, _RESHARD_FIX)
            yield _movement_finding(program, reason, fix, rows, size)


def _movement_finding(
    program: Program, reason: str, fix: str, rows: Sequence[Collective], size: int
) -> Finding:
    """Make the finding about what is sent for one reason."""
    names = "; ".join([*map(str, rows[:_NAMED]), *and_more(len(rows), _NAMED, "collective")])
    step = "an iteration" if any(row.times is None for row in rows) else "a step"
    of_xla = "" if any(row.is_called for row in rows) else ", by XLA's own collectives"
    place, axes = rows[0].place, ", ".join(dict.fromkeys(axis for row in rows for axis in row.axes))
    message = (
        f"{bytes_shown(size)} sent by each device in {step} over {axes}{of_xla}: {reason}: {names}"
    )
    batch = [axis for axis in program.axis_sizes if axis in program.batch_axes]
    rank = rows[0].shape.count(",") + 1
    entry = repr(batch[0] if len(batch) == 1 else tuple(batch))
    spec = f"P({', '.join([entry, *['None'] * (rank - 1)])})"
    fix = fix.format(spec=spec, axes=axes, line="" if place is None else f" at {place}")
    leaves = [row.moves.rpartition(" ")[2] for row in rows if row.what in ("gradient", "state")]
    paths, count = tuple(dict.fromkeys(leaves)), len(leaves)
    return Finding("warning", "unexpected", message, fix, paths=paths, leaves=count, bytes=size)


def computed_alike(program: Program, inputs: Sequence[PlannedSharding | None]) -> Iterator[Finding]:
    """Yield findings about products that devices along an axis compute alike.

    Those of what the plan lets them share there, such as KV heads, are meant so.
    """
    if not (products := program.products):
        return
    total = sum(product.flops for product in products)
    for axis, count in program.axis_sizes.items():
        shared = {leaf for leaf, x in enumerate(inputs) if x is not None and axis in x.shared_along}
        repeats = [
            row for row in products if axis not in row.axes and shared.isdisjoint(row.leaves)
        ]
        flops = sum(row.flops for row in repeats)
        if count == 1 or flops <= _ALIKE * total:
            continue
        repeats.sort(key=lambda row: -row.flops)
        names = [
            row.op_name + (f" at {row.place}" if row.place else "") for row in repeats[:_NAMED]
        ]
        message = (
            f"{counted(len(repeats), 'product')}, {flops / total:.0%} of the work of a device, are "
            f"computed alike by all devices along {axis}: {'; '.join(dict.fromkeys(names))}"
        )
        fix = (
            f"let {axis} shard the batch, or a dimension of what is multiplied: constrain the "
            f"activations by {axis} where the products begin"
        )
        yield Finding("warning", "batch", message, fix)


def kept_activations(program: Program, large: int) -> Iterator[Finding]:
    """Yield a finding if most memory is what the forward pass keeps for the backward pass."""
    hlo = program._executable.hlo
    # XLA's numbers take longer than the text.
    if not program.products or not hlo.has_gradients or (totals := program.totals) is None:
        return
    # The arguments, such as the state of an optimizer, are there whatever is kept.
    least = max(large, _KEPT * (totals.peak - totals.arguments), _KEPT_OF_PEAK * totals.peak)
    if totals.temporaries < least:
        return  # without a walk through the program
    memory = program.memory
    if memory is None or memory.is_recomputed or memory.saved < least:
        return
    names = "; ".join(
        f"{row.shape} ({row.what})" + ("" if row.place is None else f" at {row.place}")
        for row in [row for row in memory.buffers if row.is_saved][:_NAMED]
    )
    message = (
        f"{bytes_shown(memory.saved)}, {memory.saved / totals.peak:.0%} of the memory at the peak, "
        f"are activations that the forward pass keeps for the backward pass: {names}"
    )
    fix = (
        "recompute them: wrap the layer in jax.checkpoint, or give its policy less to save; in a "
        "scan, jax.lax.scan(jax.checkpoint(layer), ...)"
    )
    yield Finding("info", "remat", message, fix, bytes=memory.saved)


_MANUAL: Final = "shard_map"
"""In the names of operations that the program itself has put on the devices."""
_SUMS: Final = frozenset({"convolution", "custom-call", "dot", "reduce"})
_SOURCES: Final = 2


def differing(executable: Executable) -> Iterator[Finding]:
    """Yield findings for results that devices have copies of, which are not computed alike.

    XLA's own partitioner keeps copies alike; `shard_map` with `check_vma=False` leaves that to the
    program.
    """
    mesh, side = executable.mesh, executable.outputs
    if mesh is None or not executable.hlo.has(_MANUAL):
        return
    groups: defaultdict[tuple[str, str, tuple[int, ...]], list[int]] = defaultdict(list)
    pairs = zip(executable.results, side.shardings, strict=True)
    for leaf, (node, sharding) in enumerate(pairs):
        if isinstance(sharding, NamedSharding):
            cut = axes_used(sharding.spec, mesh.shape)
            if axes := executable.variation.of([node]) - cut:
                along = " and ".join(axis for axis in mesh.shape if axis in axes)
                groups[along, *_causes(executable, node, axes)].append(leaf)
    for (along, line, inputs), leaves in groups.items():
        at = f" at {line}" if line else ""
        names = along.split(" and ")
        call = f"jax.lax.psum(x, {tuple(names) if names[1:] else names[0]!r})"
        fix = (
            f"sum it over {along}{at}, {call}, and let shard_map check that, check_vma=True; or "
            f"give it a spec that {along} cuts"
        )
        paths = [executable.inputs.paths[leaf] for leaf in inputs]
        sources = ", ".join([*paths[:_SOURCES], *and_more(len(paths), _SOURCES, "other")])
        message = (
            f"copies along {along} will differ: each is computed from its own part of {sources}, "
            f"and nothing on the way sums, gathers or exchanges over {along}"
        )
        if not inputs:
            message = (
                f"copies along {along} differ, by the number of the device, as random keys that "
                "are folded with it do"
            )
        yield side.finding("error" if inputs else "info", "differs", message, fix, leaves)


def _causes(executable: Executable, node: int, axes: frozenset[str]) -> tuple[str, tuple[int, ...]]:
    """Return the line of the last sum, and the leaves of the inputs that make copies differ."""
    values, variation, hlo = executable.values, executable.variation, executable.hlo

    def differing_sources(node: int) -> list[int]:
        return [source for source in values.made_of[node] if axes & variation.of([source])]

    made_of = dict.fromkeys(reached([node], differing_sources))
    sums = (source for source in made_of if values.opcodes[source] in _SUMS)
    lines = (place for source in sums if (place := hlo.place(values.lines[source])))
    pairs = executable.leaf_of.items()
    leaves = sorted(leaf for number, leaf in pairs if values.parameters[number] in made_of)
    return str(next(lines, "")), tuple(leaves)
