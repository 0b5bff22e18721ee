"""Compares the time of traced steps with published runs.

    python -m benchmarks.published_steps
    python -m benchmarks.published_steps --speed    # of the analysis of DeepSeek V3

It needs no compiler, and takes half a minute. docs/step.md has what it prints, and
docs/performance.md the speed.
"""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any, Final
from unittest import mock

import jax
from jax.sharding import AbstractMesh, AxisType

import shardrules as sr
from benchmarks import published_model as code
from benchmarks.published_runs import FILE, Run, published, spearman, title
from shardrules._estimate.step_time import machine_of
from shardrules._program.step.spread import Spread
from shardrules._program.step.tracing import TracedFunction

_ROUNDS: Final = 21


def loss(step: code.Step, params: code.Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """Apply all layers, and take the cross entropy."""
    x = code.layers(step, params["layers"], x)
    return code.loss_of_ends(step, params["ends"], x, tokens)


def traced(model: code.Model, run: Run) -> tuple[sr.types.Step, sr.Plan]:
    """Trace the step of a run."""
    sizes = run["mesh"]
    automatic = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic)
    step = code.Step(model, run["length"], run["saved"], sizes, run["on"].split(":")[0])
    params = {
        "layers": code.shapes(model, model.layers // model.layers_of_body),
        "ends": code.shapes_of_ends(model),
    }
    jitted, plan, x, tokens = code.jitted_on(mesh, step, loss, params, run["rows"])
    return sr.trace(jitted, plan, x, tokens), plan


def print_speed(run: Run, model: code.Model) -> None:
    """Print the processor time of what is asked of a step after it is traced."""
    step, plan = traced(model, run)
    parts = TracedFunction(step._function, step._closed, step._out_tree)
    questions: dict[str, Callable[[sr.types.Step], object]] = {
        "dimensions and roles": lambda new: new.dimensions,
        "FLOPs": lambda new: new.flops,
        "memory": lambda new: new.memory(plan),
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(_ROUNDS):
        new = None
        for name, ask in questions.items():
            before = time.process_time()
            new = new or sr.types.Step(step.name, parts, step._args, step._paths, step.mesh)
            ask(new)
            seconds.setdefault(name, []).append(time.process_time() - before)
    for name, times in seconds.items():
        print(f"{name}: {median(times) * 1e3:.1f} ms, at least {min(times) * 1e3:.1f} ms")


def gathers_first(is_set: bool) -> AbstractContextManager[Any]:
    """Price a step with the flag that has operands gathered whole, before they are multiplied."""
    one_part = mock.patch.object(Spread, "summed_parts", return_value=1)
    return one_part if is_set else nullcontext()


def main() -> int:
    """Print the table."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    if "--speed" in sys.argv[1:]:
        run = next(run for run in data["runs"] if run["model"] == "DeepSeek V3")
        print_speed(run, code.Model(**data["models"][run["model"]]))
        return 0
    pairs: list[tuple[float, float]] = []
    heads = ("run", "published", "at best", "with its efficiency", "ratio")
    print("|", " | ".join(heads), "|\n|---|--:|--:|--:|--:|")
    for run in data["runs"]:
        step, _ = traced(code.Model(**data["models"][run["model"]]), run)
        hardware = sr.Topology(run["on"]).hardware
        with gathers_first("whole" in run["flags"]):
            expected = step.time(machine_of(hardware))
        seconds = published(data["models"], run)
        pairs.append((seconds, expected.total))
        cells = (title(run), *(f"{s:.2f} s" for s in (seconds, expected.best, expected.total)))
        print("|", " | ".join(cells), f"| {expected.total / seconds:.2f} |", flush=True)
    print(f"\nSpearman's rank correlation: {spearman(*zip(*pairs, strict=True)):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
