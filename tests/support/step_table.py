"""What a step sends by its jaxpr and by its HLO: the table of docs/step.md.

`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.support.step_table` writes the
tables anew; with `tpu` behind it, what is not in `tests/data/step_sends.json` is compiled before, for
four minutes at most, which needs libtpu.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import jax

import shardrules as sr
from shardrules._base.specs import entry_axes
from shardrules._base.text import bytes_shown, mesh_shown
from shardrules._program.hlo import Hlo
from tests.support import page_table, step_suite, step_traffic, steps
from tests.support.folders import ROOT

PAGE = ROOT / "docs" / "step.md"
Rows = Counter[tuple[str, tuple[str, ...]]]
"""{(collective, axes): bytes that a device sends}."""

# Rows that differ by more than 5 %, or in a collective by more than 10 %, and why.
_ROWS = "XLA does not gather the table: it exchanges parts of the tokens' rows."
_KERNELS = "XLA gathers the output's kernels, which are smaller than the tokens that it would move."
_ROUTER = "The router's probabilities, which XLA for CPU gathers for `top_k`, are not counted."
WHY = {
    "dense, table as held fsdp=8": _ROWS,
    "dense, square output transposed tp=4": _KERNELS,
    "dense, square output transposed, scanned fsdp=4,tp=2": _KERNELS,
    "MoE ep=8": _ROUTER,
    "MoE data=2,ep=4": _ROUTER,
    "MoE ep=4,tp=2": _ROUTER,
}


class Case(NamedTuple):
    """A step on a mesh."""

    name: str
    axes: dict[str, int]
    make: Callable[[], tuple[Any, tuple[Any, ...]]]
    """Returns the jitted step and its arguments."""
    sizes: dict[str, int]

    @property
    def id(self) -> str:
        return f"{self.name} {mesh_shown(self.axes)}"


def _of_model(case: step_traffic.Case) -> Case:
    def make() -> tuple[Any, tuple[Any, ...]]:
        made, plan, ids = steps.jitted(case.model, case.sizes)
        return made, (plan, ids, ids)

    return Case(case.name, case.axes, make, case.sizes)


def _of_suite(case: step_suite.Case) -> Case:
    axes = {axis: size for axis, size in case.sizes.items() if size > 1}
    make = partial(lambda case: case.step(step_suite.mesh_of(case.sizes)), case)
    return Case(case.name, axes, make, case.sizes)


CASES = [*map(_of_model, step_traffic.CASES), *map(_of_suite, step_suite.CASES)]


@cache
def compared(index: int) -> tuple[Rows, Rows]:
    """What each device sends in `CASES[index]`, by its jaxpr and by its HLO."""
    case = CASES[index]
    step, args = case.make()
    spread = steps.spread_on_cpu(sr.trace(step, *args))
    ours: Rows = Counter()
    for row in spread.sent:
        # XLA for CPU makes no reduce-scatter of what is no line of the user's.
        is_sum = row.kind == "reduce-scatter" and row.value is not None
        kind = "all-reduce" if is_sum else row.kind
        devices = prod(spread.sizes[axis] for axis in row.axes)
        axes = spread.named(row.axes)
        ours[kind, axes] += _ring(kind, row.payload * row.trips, devices)
    arrays = (arg.abstract() if isinstance(arg, sr.Plan) else arg for arg in args)
    real: Rows = Counter()
    for op in Hlo(step.lower(*arrays).compile().as_text()).collectives:
        assert op.times is not None
        for shape in op.results if op.kind == "all-gather" else op.operands:
            axes = op.groups.axes(case.sizes)
            devices = len(op.groups[0])
            real[op.kind, axes] += _ring(op.kind, shape.bytes * op.times, devices)
    return tuple(_in_order(rows, case.sizes) for rows in (ours, real))


SLICES = {4: "v5e:2x2", 8: "v5e:2x4"}
"""By the number of devices, the slice that the TPU's compiler compiles a case for."""
FILE = ROOT / "tests" / "data" / "step_sends.json"
_WHOLE = "XLA adds up whole gradients of small arrays, of which each device takes its part."
_TURNED = "XLA adds up the tokens' gradients whole."
WHY_ON_TPU = {
    "dense, table gathered fsdp=8": "The table's gradient is added up whole, and taken for scattered.",
    "dense, table as held fsdp=8": "The table's gradient has no name: its padding is not seen.",
    "dense, square output transposed tp=4": _TURNED,
    "dense, square output transposed, scanned fsdp=4,tp=2": _TURNED,
    "Muon fsdp=4,tp=2": "XLA gathers parts of Newton-Schulz products, and not their operands.",
    "LoRA fsdp=4,tp=2": _WHOLE,
    "LoRA on int8 fsdp=4,tp=2": _WHOLE,
    "masters cast fsdp=4,tp=2": "XLA packs pairs of float16, pads them, and adds up whole gradients.",
    "ZeRO-1 data=8": _WHOLE,
    "uneven heads fsdp=2,tp=4": "XLA exchanges parts of heads by permutes.",
}


def compiled_for_tpu(index: int) -> list[tuple[str, tuple[str, ...], str, float]]:
    """(collective, axes, dtype, bytes that a device sends), by the TPU's compiler."""
    case = CASES[index]
    count = prod(case.sizes.values())
    devices = list(sr.Topology(SLICES[count]).mesh(all=count).devices.flat)
    with mock.patch.object(jax, "devices", return_value=devices):
        step, args = case.make()
    mesh = jax.tree.leaves(args[0].shardings())[0].mesh
    sent: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    for op in sr.prove(step, *args, on=mesh, timeout=120).program.collectives:
        axes = tuple(axis for axis in case.axes if axis in op.axes)
        dtype = op.shape.partition("[")[0]
        key, size = _logical(args[0], op.kind, axes, dtype, op.moves, op.sent_at_least)
        sent[key] += round(size)
    return [(*key, size) for key, size in sent.items() if key[1] and size]


def _logical(
    plan: sr.types.Plan, kind: str, axes: tuple[str, ...], dtype: str, moves: str, sent: float
) -> tuple[tuple[str, tuple[str, ...], str], float]:
    """The collective that one of the program stands for: parts of 96 are no whole tiles.

    XLA pads such gradients to 128, scatters their sum, and brings rows back by permutes; or it adds
    up the whole, of which each device takes its part.
    """
    path = moves.removeprefix("gradient of inputs/0/")
    if kind == "collective-permute" and moves.startswith(kind):
        return (kind, axes, dtype), 0
    if kind == "reduce-scatter" and moves.startswith("all-reduce."):
        return (kind, axes, dtype), sent * 96 / 128
    if kind == "all-reduce" and path in plan.paths:
        cut = {axis for entry in plan.kind(path).spec or () for axis in entry_axes(entry)}
        if cut.issuperset(axes):
            return ("reduce-scatter", axes, dtype), sent / 2
    return (kind, axes, dtype), sent


def compared_on_tpu(index: int) -> tuple[Rows, Rows]:
    """What each device sends in `CASES[index]`, by its jaxpr and as the TPU's compiler had it.

    JAX multiplies float32 on TPUs in bfloat16, and XLA sends operands as they are multiplied: they
    count as float32, as in the jaxpr.
    """
    case = CASES[index]
    step, args = case.make()
    ours: Rows = Counter()
    for row in sr.trace(step, *args).traffic():
        ours[row.collective, row.axes] += row.sent
    real: Rows = Counter()
    for kind, axes, dtype, sent in json.loads(FILE.read_text())[case.id]:
        real[kind, tuple(axes)] += 2 * sent if dtype == "bf16" else sent
    return _in_order(ours, case.sizes), _in_order(real, case.sizes)


def _ring(kind: str, payload: int, devices: int) -> int:
    """The bytes that a device sends."""
    if kind == "collective-permute":
        return payload
    return round(payload * (2 if kind == "all-reduce" else 1) * (devices - 1) / devices)


def _in_order(rows: Rows, sizes: Mapping[str, int]) -> Rows:
    """Rows with axes in the mesh's order, without those of a single device."""
    sent: Rows = Counter()
    for (kind, axes), size in rows.items():
        sent[kind, tuple(axis for axis in sizes if axis in axes)] += size
    return +sent


def differences(ours: Rows, real: Rows) -> Iterator[str]:
    """What differs by more than 5 % in the whole, or 10 % in a collective that is 1 % of it."""
    totals = ours.total(), real.total()
    if abs(totals[0] - totals[1]) > 0.05 * totals[1]:
        yield f"{totals[0]:,} bytes, XLA {totals[1]:,}"
    for key in sorted({*ours, *real}):
        if abs(ours[key] - real[key]) > max(0.1 * real[key], 0.01 * totals[1]):
            yield f"{key[0]} over {','.join(key[1])}: {ours[key]:,} bytes, XLA {real[key]:,}"


def table(compared: Callable[[int], tuple[Rows, Rows]], why: Mapping[str, str]) -> str:
    """The rows of all cases."""
    lines = ["| step | mesh | by its jaxpr | by XLA | ratio | why |", "|" + "---|" * 6]
    for index, case in enumerate(CASES):
        ours, real = (rows.total() for rows in compared(index))
        cells = [
            case.name,
            mesh_shown(case.axes),
            bytes_shown(ours),
            bytes_shown(real),
            f"{ours / real:.3f}",
            why.get(case.id, ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@contextmanager
def stopped_before_code() -> Iterator[None]:
    """Let proofs in this process and in its children end before the compiler makes code."""
    from benchmarks.solving import stop_before_code

    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        stop_before_code(Path(folder))
        yield


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


def record(end: float) -> None:
    """Compile what is not recorded for TPUs, each in a process of its own, until a time."""
    rows = json.loads(FILE.read_text()) if FILE.exists() else {}
    for index, case in enumerate(CASES):
        if case.id not in rows and time.monotonic() < end:
            with stopped_before_code():
                result = apart(compiled_for_tpu, index)
            if isinstance(result, str):
                raise RuntimeError(f"{case.id}: {result}")
            rows[case.id] = result
            lines = (f" {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
            FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["tpu"]:
        record(time.monotonic() + 240)
    else:
        page_table.write(PAGE, table(compared, WHY))
    page_table.write(PAGE, table(compared_on_tpu, WHY_ON_TPU), "steps on TPUs")
