"""The order of meshes by `Plan.sweep(step=)`, and by what the TPU's compiler makes of the step.

    python -m benchmarks.sweep_order --seconds 240

It needs libtpu. Steps are forward passes, of which the compiler writes the optimized program in
seconds; code for it, and so cycles, would take minutes. So the seconds of the program are those of
its fusions by their products and bytes, over the part of them that the compiler expects in forward
passes that were compiled to the end, and those of what it sends. They are kept in sweep_order.json,
and what is there is not compiled again; after so many seconds nothing more is begun. Without
`--seconds` nothing is compiled: it prints the table of docs/step.md with today's estimates.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import combinations
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks import solving
from shardrules._base.io import write_text
from shardrules._program.dataflow import PRODUCTS
from shardrules._program.flow import is_product
from shardrules._program.program import time_on
from shardrules._program.work import _flops

FILE = Path(__file__).with_suffix(".json")
TOPOLOGIES = ("v5e:4x4", "v5p:2x2x4", "v6e:4x4", "v5p:4x4x4")
LATER_TOPOLOGIES = ("v5p:2x4x4", "v5e:4x8")
MOST_MESHES = 5
"""Of a model on a topology: evenly of those for which the step is."""
EXPECTED = 0.53
"""Part of the compiler's cycles that `fused_seconds` finds in the five forward passes of
tests/support/memory_steps.py, which were compiled to the end: 0.44 to 0.65."""
SLICES = ("dynamic-slice", "slice", "gather", "dynamic-update-slice")
NOT_MOVED = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "iota",
    "conditional", "after-all", "partition-id", "all-reduce", "all-gather", "reduce-scatter",
    "all-to-all", "collective-permute", "custom-call", "async-update", "opt-barrier",
))  # fmt: skip
# Times that differ by less are no order: the sweep has them for a tie as well.
TIE = 0.05
LAYERS = 2
SEQUENCES = 1
"""Of each device."""
CAPACITY = 1.25
CHOSEN = 2
Spec = tuple[Any, ...]


class Model(NamedTuple):
    """Sizes of a decoder, and the axes of its meshes."""

    name: str
    width: int = 2048
    hidden: int = 5632
    heads: int = 16
    kv_heads: int = 16
    words: int = 32000
    length: int = 2048
    experts: int = 0

    @property
    def size(self) -> int:
        """Of a head."""
        return self.width // self.heads

    @property
    def axes(self) -> tuple[str, ...]:
        """Experts have an axis of their own, which cuts the batch as well."""
        return ("fsdp", "ep" if self.experts else "tp")

    @property
    def batch(self) -> tuple[str, ...]:
        """Axes that cut the batch."""
        return self.axes if self.experts else ("fsdp",)

    @property
    def tp(self) -> str | None:
        """Axis that cuts heads and hidden sizes."""
        return None if self.experts else "tp"

    @property
    def rules(self) -> list[tuple[str, Spec]]:
        """Shard the stacks as for FSDP with tensor or expert parallelism."""
        fsdp = self.batch if self.experts else "fsdp"
        return [
            ("embed", (self.tp, fsdp)),
            ("head", (fsdp, self.tp)),
            ("router", (None, fsdp)),
            ("experts/(gate|up)", (None, "ep", "fsdp")),
            ("experts/down", (None, "ep", None, "fsdp")),
            ("/(o|down)", (None, self.tp, fsdp)),
            ("layers", (None, fsdp, self.tp)),
        ]


MODELS = (
    Model("dense"),
    Model("Llama 8B", width=4096, hidden=14336, heads=32, kv_heads=8, words=128256),
    Model("experts", width=4096, hidden=14336, heads=32, kv_heads=8, experts=8),
    Model("70B", width=8192, hidden=28672, heads=64, kv_heads=8, length=1024),
    Model("long", length=8192, kv_heads=4),
    Model("large vocabulary", width=1024, hidden=2816, heads=8, kv_heads=8, words=256000),
)

LATER = (
    Model("Nemo", width=5120, hidden=14336, heads=32, kv_heads=8, words=131072, length=4096),
    Model("medium", width=1024, hidden=4096, words=50304, length=1024),
    Model("16 experts", hidden=1536, kv_heads=4, words=151936, experts=16),
)
"""Compiled for `LATER_TOPOLOGIES`, and looked at when the estimate was done, from which
`_MOST_PARTS` was then set."""


class Row(NamedTuple):
    """A model on a mesh, in seconds: by the sweep, and of the program that the compiler makes."""

    mesh: Mapping[str, int]
    estimated: float
    computing: float
    sending: float
    hidden: float
    """Of sending, parameters, gradients and state."""
    cycles: float | None = None
    """Of computing, those that the compiler expects, once it has compiled to the end."""
    scheduled: float | None = None
    """Of a step then, by which `sweep(prove=)` ranks."""

    @property
    def middle(self) -> float:
        """Between all hidden and none."""
        return (max(self.computing, self.sending) + self.computing + self.sending) / 2


def tree_of(model: Model) -> Any:
    """Return the parameters as shapes."""
    width, of_kv = model.width, model.kv_heads * model.size
    mlp = {
        "gate": (width, model.hidden),
        "up": (width, model.hidden),
        "down": (model.hidden, width),
    }
    layers: dict[str, Any] = {"q": (width, width), "k": (width, of_kv), "v": (width, of_kv)}
    layers["o"] = (width, width)
    if model.experts:
        layers["router"] = (width, model.experts)
        layers["experts"] = {name: (model.experts, *shape) for name, shape in mlp.items()}
    else:
        layers |= mlp

    def leaf(shape: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    return {
        "embed": leaf((model.words, width)),
        "head": leaf((width, model.words)),
        "layers": jax.tree.map(
            lambda shape: leaf((LAYERS, *shape)), layers, is_leaf=lambda x: isinstance(x, tuple)
        ),
    }


def step_on(model: Model, sizes: Any) -> tuple[Any, sr.Plan, Any]:
    """Return a forward pass on a mesh, and its arguments."""
    plan = sr.plan(tree_of(model), model.rules, sizes)
    mesh = jax.tree.leaves(plan.shardings())[0].mesh

    def on(x: Any, *spec: Any) -> Any:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def mlp(x: Any, w: Any) -> Any:
        return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    def experts(x: Any, w: Any) -> Any:
        room = int(x.shape[1] * CHOSEN * CAPACITY / model.experts)
        weights, chosen = lax.top_k(jax.nn.softmax(x @ w["router"]), CHOSEN)
        is_of = jax.nn.one_hot(chosen, model.experts, dtype="int32")
        places = jnp.cumsum(is_of.reshape(len(x), -1, model.experts), 1).reshape(is_of.shape)
        sent = jax.nn.one_hot((places * is_of).sum(2) - 1, room, dtype=x.dtype)
        combined = sent * jnp.einsum("btke,btk->bte", is_of.astype(x.dtype), weights)[..., None]
        w = w["experts"]
        y = on(jnp.einsum("btd,btec->ebcd", x, sent), "ep", "fsdp")
        hidden = jax.nn.silu(jnp.einsum("ebcd,edh->ebch", y, w["gate"]))
        hidden = hidden * jnp.einsum("ebcd,edh->ebch", y, w["up"])
        y = on(jnp.einsum("ebch,ehd->ebcd", hidden, w["down"]), "ep", "fsdp")
        return jnp.einsum("ebcd,btec->btd", y, combined)

    def layer(x: Any, w: Any) -> Any:
        rows, length, _ = x.shape
        q = (x @ w["q"]).reshape(rows, length, model.kv_heads, -1, model.size)
        k, v = ((x @ w[n]).reshape(rows, length, model.kv_heads, model.size) for n in "kv")
        chances = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k))
        x = x + jnp.einsum("bkgts,bskd->btkgd", chances, v).reshape(x.shape) @ w["o"]
        x = on(x, model.batch)
        return on(x + (experts if model.experts else mlp)(x, w), model.batch), None

    def forward(params: Any, tokens: Any) -> Any:
        x = on(params["embed"][tokens], model.batch)
        x, _ = lax.scan(layer, x, params["layers"])
        logits = on(x @ params["head"], model.batch, None, model.tp)
        return jnp.mean(jax.nn.logsumexp(logits.astype("float32"), -1))

    spec = NamedSharding(mesh, P(model.batch))
    shape = SEQUENCES * prod(mesh.shape.values()), model.length
    tokens = jax.ShapeDtypeStruct(shape, "int32", sharding=spec)
    return jax.jit(forward), plan, tokens


def swept(model: Model, topology: str) -> list[sr.types.SweepRow]:
    """Return the rows of the sweep, the best first."""
    plan = sr.plan(tree_of(model), model.rules, dict.fromkeys(model.axes, 1))
    return list(plan.sweep(devices=topology, step=lambda mesh: sr.trace(*step_on(model, mesh))))


def meshes_of(model: Model, topology: str) -> list[str]:
    """Name some meshes of a topology by their sizes."""
    meshes = sorted(tuple(row.mesh.values()) for row in swept(model, topology) if row.fits)
    count = min(MOST_MESHES, len(meshes))
    some = {meshes[i * (len(meshes) - 1) // max(1, count - 1)] for i in range(count)}
    return [",".join(map(str, mesh)) for mesh in sorted(some)]


@contextmanager
def stopped_before_code() -> Iterator[None]:
    """Let proofs in this process and in its children end before the compiler makes code."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        solving.stop_before_code(Path(folder))
        yield


def compiled(model: Model, topology: str, name: str, to_the_end: bool) -> Any:
    """Return the seconds of the program that the compiler makes of a model on a mesh."""
    slice_ = sr.Topology(topology)
    mesh = slice_.mesh(dict(zip(model.axes, map(int, name.split(",")), strict=True)))
    with nullcontext() if to_the_end else stopped_before_code():
        try:
            program = sr.prove(*step_on(model, mesh), on=mesh, timeout=solving.LIMIT).program
        except sr.OutOfMemory:
            return REFUSED
    rows = [(row, row.sent_at_least / slice_.link_rate(mesh, row.axes))
            for row in program.collectives if row.axes]  # fmt: skip
    seconds = {
        "computing": fused_seconds(program._executable.hlo, slice_.hardware) / EXPECTED,
        "sending": sum(seconds for _, seconds in rows),
        "hidden": sum(s for row, s in rows if row.what in ("argument", "gradient", "state")),
    }
    if to_the_end and (time := time_on(slice_, program)) is not None:
        seconds |= {"cycles": time.computing, "scheduled": time.scheduled}
    return seconds


def fused_seconds(hlo: Any, hardware: sr.Hardware) -> float:
    """Return the seconds of a program by a roofline of each of its fusions and products."""
    peak = hardware.flops_per_second["bfloat16"] * hardware.efficiency
    total = 0.0
    for name, computation in hlo.computations.items():
        if hlo.fusion_of(name) is None and (times := hlo.times(name) or 1):
            for row in computation:
                if row.opcode not in NOT_MOVED and not row.opcode.endswith(("-start", "-done")):
                    seconds = moved(hlo, computation, row) / hardware.memory_bytes_per_second
                    if is_product(hlo, row):
                        seconds = max(seconds, flops(hlo, computation, row) / peak)
                    total += seconds * times
    return total


def flops(hlo: Any, computation: Any, row: Any) -> int:
    """Count the operations of a product, or of those in a fusion."""
    if row.opcode != "fusion":
        return _flops(computation, row)
    inner = hlo[row.callees[0]]
    return sum(_flops(inner, line) for line in inner.executed if line.opcode in PRODUCTS)


def moved(hlo: Any, computation: Any, row: Any) -> int:
    """Count the bytes that an instruction reads and writes; of what it slices, the slices."""
    written = sum(shape.bytes for shape in row.results)
    if row.opcode in ("dynamic-slice", "slice"):
        return 2 * written
    if row.opcode == "dynamic-update-slice":
        return 2 * _bytes(computation, row.operands[1])
    if row.opcode != "fusion":
        return written + sum(_bytes(computation, name) for name in row.operands)
    inner = hlo[row.callees[0]]
    places = {line.parameter: line.name for line in inner.parameters}
    for place, operand in enumerate(row.operands):
        size, users = _bytes(computation, operand), inner.users(places.get(place, ""))
        lines = [inner[user] for user in users]
        if lines and all(line.opcode in SLICES for line in lines):
            parts = [line for line in lines if line.opcode != "dynamic-update-slice"]
            written -= size if len(parts) < len(lines) else 0  # it is updated in place
            size = min(size, sum(_bytes(inner, line.name) for line in parts))
        written += size
    return max(0, written)


def _bytes(computation: Any, name: str) -> int:
    return sum(shape.bytes for shape in computation[name].results)


def in_order(rows: list[Row], by: Callable[[Row, Row], tuple[float, float] | None]) -> list[int]:
    """Return how many pairs of meshes are in order, how many are not, and ties of the compiler."""
    counts = [0, 0, 0]
    for pair in combinations(rows, 2):
        if (seconds := by(*pair)) is not None:
            a, b = seconds
            is_right = (pair[0].estimated < pair[1].estimated) == (a < b)
            counts[2 if abs(a - b) < TIE * min(a, b) else 0 if is_right else 1] += 1
    return counts


def by_roofline(first: Row, second: Row) -> tuple[float, float]:
    """Return the seconds of two meshes in the middle between hiding all that is sent and none."""
    return first.middle, second.middle


def by_schedule(first: Row, second: Row) -> tuple[float, float] | None:
    """Return those by the compiler's cycles and schedule; None if it did not compile both."""
    if first.scheduled is None or second.scheduled is None:
        return None
    return first.scheduled, second.scheduled


Kept = dict[str, dict[str, dict[str, Any]]]
"""{model: {topology: {sizes of the mesh: seconds of the program}}}, None before it is compiled."""
REFUSED = "refused"


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process that ends with its result: the compiler goes on."""
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()

    def run() -> None:
        try:
            results.put(function(*args))
        except Exception as error:
            results.put(f"{type(error).__name__}: {error}"[:200])
        os._exit(0)

    process = fork.Process(target=run)
    process.start()
    result = results.get()
    process.join()
    return result


def cases() -> Iterator[tuple[str, Model, str]]:
    """Yield (slice, model, when it was added)."""
    for topologies, models, when in (
        (TOPOLOGIES, MODELS, "first"),
        (LATER_TOPOLOGIES, LATER, "added later"),
    ):
        yield from ((topology, model, when) for topology in topologies for model in models)


def keep(kept: Kept, seconds: float, only: str, to_the_end: bool) -> None:
    """Compile what is not kept, one mesh after the other, until the time is over.

    To the end, that is what is kept without cycles.
    """
    end = time.monotonic() + seconds
    for topology, model, _ in cases():
        if only not in f"{model.name}, {topology}":
            continue
        meshes = kept.setdefault(model.name, {}).setdefault(topology, {})
        if not meshes and time.monotonic() < end:
            meshes |= dict.fromkeys(apart(meshes_of, model, topology))
        for name, result in meshes.items():
            is_done = "scheduled" in (result or "") if to_the_end else result is not None
            if is_done or result == REFUSED or time.monotonic() >= end:
                continue
            begin = time.monotonic()
            meshes[name] = apart(compiled, model, topology, name, to_the_end)
            write_text(FILE, json.dumps(kept, indent=1) + "\n")
            print(f"{model.name}, {topology}, {name}: {time.monotonic() - begin:.0f} s", flush=True)


def rows_of(model: Model, topology: str, kept: Mapping[str, Any]) -> list[Row]:
    """Return the meshes of a model on a topology that were compiled, with today's estimates."""
    results = {name: result for name, result in kept.items() if isinstance(result, dict)}
    named = ((",".join(map(str, row.mesh.values())), row) for row in swept(model, topology))
    return [
        Row(row.mesh, row.time.total, **results[name])
        for name, row in named
        if name in results and row.time is not None
    ]


def table(kept: Kept, only: str) -> Iterator[str]:
    """Yield a row for each model and topology, and the pairs in order by model and topology."""
    times = "by the sweep, by the program, by the schedule"
    yield f"| model | slice | mesh: {times} | in order | not | ties |"
    yield "|---|---|---|--:|--:|--:|"
    sums: dict[str, list[int]] = {}
    scheduled = [0, 0, 0]
    for topology, model, when in cases():
        results = kept.get(model.name, {}).get(topology, {})
        if only not in f"{model.name}, {topology}" or not any(results.values()):
            continue
        rows = rows_of(model, topology, results)
        counts = in_order(rows, by_roofline)
        scheduled = _sum(scheduled, in_order(rows, by_schedule))
        for key in (model.name, topology, when):
            sums[key] = _sum(sums.get(key, [0, 0, 0]), counts)
        times = "; ".join(
            f"{','.join(f'{axis}={n}' for axis, n in row.mesh.items() if n > 1)}: "
            f"{row.estimated * 1e3:.3g}, {row.middle * 1e3:.3g}"
            f"{'' if row.scheduled is None else f', {row.scheduled * 1e3:.3g}'} ms"
            for row in rows
        )
        yield f"| {model.name} | {topology} | {times} | {' | '.join(map(str, counts))} |"
    yield ""
    for key, (right, wrong, ties) in {**sums, "by the schedule": scheduled}.items():
        share = right / max(1, right + wrong)
        yield f"{key}: {right} of {right + wrong} pairs in order, {share:.0%}; {ties} ties"


def _sum(first: list[int], second: list[int]) -> list[int]:
    return [a + b for a, b in zip(first, second, strict=True)]


def main() -> None:
    """Compile what is asked for, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--only", default="", help='of "model, topology"')
    parser.add_argument("--cycles", action="store_true", help="compile to the end")
    options = parser.parse_args()
    kept: Kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    if options.seconds:
        keep(kept, options.seconds, options.only, options.cycles)
    else:
        for line in table(kept, options.only):
            print(line, flush=True)


if __name__ == "__main__":
    main()
