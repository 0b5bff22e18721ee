"""Compares the time of traced steps with published runs.

    python -m benchmarks.published_steps

It needs no compiler, and takes half a minute. docs/step.md has what it prints.
"""

from __future__ import annotations

import sys
import tomllib

import jax
from jax.sharding import AbstractMesh, AxisType

import shardrules as sr
from benchmarks import published_model as code
from benchmarks.published_runs import FILE, Run, published, spearman, title


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


def main() -> int:
    """Print the table."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    pairs: list[tuple[float, float]] = []
    heads = ("run", "published", "at best", "with its efficiency", "ratio")
    print("|", " | ".join(heads), "|\n|---|--:|--:|--:|--:|")
    for run in data["runs"]:
        step, plan = traced(code.Model(**data["models"][run["model"]]), run)
        hardware = sr.Topology(run["on"]).hardware
        time = plan.step_time(step=step, hardware=hardware)
        seconds = published(data["models"], run)
        pairs.append((seconds, time.total))
        cells = (title(run), *(f"{s:.2f} s" for s in (seconds, time.best, time.total)))
        print("|", " | ".join(cells), f"| {time.total / seconds:.2f} |", flush=True)
    print(f"\nSpearman's rank correlation: {spearman(*zip(*pairs, strict=True)):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
