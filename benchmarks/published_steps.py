"""Compares the time of traced steps, at best, with published runs.

    python -m benchmarks.published_steps

It needs no compiler, and takes half a minute. docs/step.md has what it prints.
"""

from __future__ import annotations

import sys
import tomllib
from functools import partial
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks import published_model as code
from benchmarks.published_runs import FILE, Run, published, spearman, title

ENDS = ("embed", "head")
HARDWARE = {"tpu7x": "7x"}
"""Names of devices that are not those of topologies."""


def loss(step: code.Step, params: code.Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """Apply all layers, and take the cross entropy."""
    policy = jax.checkpoint_policies.save_only_these_names(*step.saved)

    def body(x: jax.Array, w: code.Params) -> tuple[jax.Array, None]:
        for number in sorted(w):
            x = jax.checkpoint(partial(code.layer, step), policy=policy)(x, w[number])
        return x, None

    layers = {name: w for name, w in params.items() if name not in ENDS}
    x, _ = jax.lax.scan(body, x, layers)
    return code.loss_of_ends(step, {name: params[name] for name in ENDS}, x, tokens)


def traced(model: code.Model, run: Run) -> tuple[sr.types.Step, sr.Plan]:
    """Trace the step of a run."""
    sizes = run["mesh"]
    mesh = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    step = code.Step(model, run["length"], run["saved"], sizes, run["on"].split(":")[0])
    params = code.shapes(model, model.layers // model.layers_of_body)
    params["embed"] = jax.ShapeDtypeStruct((model.vocab, model.width), "float32")
    params["head"] = jax.ShapeDtypeStruct((model.width, model.vocab), "float32")
    plan = sr.plan({"params": params, "mu": params, "nu": params}, code.rules(sizes), mesh)
    shape = run["rows"] * prod(sizes.values()), run["length"]
    by_batch = NamedSharding(mesh, P(step.batch, None, step.tp))
    x = jax.ShapeDtypeStruct((*shape, model.width), "bfloat16", sharding=by_batch)
    tokens = jax.ShapeDtypeStruct(shape, "int32", sharding=NamedSharding(mesh, P(step.batch)))
    jitted = jax.jit(
        partial(code.train, partial(loss, step)),
        donate_argnums=0,
        out_shardings=(plan.shardings(), by_batch),
    )
    return sr.trace(jitted, plan, x, tokens), plan


def main() -> int:
    """Print the table."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    pairs: list[tuple[float, float]] = []
    print("| run | published | at best | ratio |", "|---|--:|--:|--:|", sep="\n")
    for run in data["runs"]:
        step, plan = traced(code.Model(**data["models"][run["model"]]), run)
        kind = run["on"].split(":")[0]
        time: Any = plan.step_time(step=step, hardware=HARDWARE.get(kind, kind))
        pairs.append((published(data["models"], run), time.total))
        seconds, best = pairs[-1]
        print(f"| {title(run)} | {seconds:.2f} s | {best:.2f} s | {best / seconds:.2f} |")
    print(f"\nSpearman's rank correlation: {spearman(*zip(*pairs, strict=True)):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
