"""Compares the time that the TPU's compiler expects with published runs.

    python -m benchmarks.published_runs build/runs

It needs libtpu, and takes about an hour. What each run gives is kept in the folder as JSON; what is
there already is not compiled again.

The models are plain JAX with the published sizes, mesh and kept arrays, splash attention and Adam.
What a run kept in the host's memory is kept on the device; two layers are compiled and multiplied,
with libtpu's defaults. DeepSeek V3 on tpu7x hid all that it sends: the middle of its range is 1.42
of the published time. Llama 4 Maverick (0.78) moves 55 GB to the host's memory and back, and is the
only run with both experts and `tp`; the cause of its 0.78 is not known.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks.decoders import HEAD, Decoder, adam, entropy, splash
from shardrules._base.io import write_text
from shardrules._program.work import LEAST_CYCLES

DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MODELS, RUNS = DATA["models"], DATA["runs"]
MOST_SECONDS = 480
"""For a compilation."""
LAYERS_COMPILED = 2
"""Trips of the loop over layers: the step has more."""
FLAGS = {"whole": "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"}
"""Options of the compiler by their names in the table: products of gathered arrays are whole."""
PARTS = ("layers", "ends")
Run = Mapping[str, Any]
NEAR = 0.15
FITTED_ON = "v6e"
"""Kind of TPUs on whose runs `LEAST_CYCLES` is fitted, for the others."""


class Row(NamedTuple):
    """Seconds of a run: published, and from all communication hidden to none."""

    kind: str
    seconds: float
    low: float
    high: float

    @property
    def middle(self) -> float:
        """Of the range, as a part of what is published."""
        return (self.low + self.high) / 2 / self.seconds


def main(folder: Path) -> None:
    """Compile what is not in the folder, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    for run, part in product(RUNS, PARTS):
        keep(folder, compiled_for(run, part), part)
    print("\n".join(table(folder)))


def title(run: Run) -> str:
    """Name a run."""
    mesh = ",".join(f"{axis}={size}" for axis, size in run["mesh"].items())
    slices = f"{run['slices']} x " if "slices" in run else ""
    return f"{run['model']}, {slices}{run['on']}, {mesh}, {run['rows']} x {run['length']}"


def compiled_for(run: Run, part: str) -> Run:
    """Return the first run of the same layers on such devices; for the ends, of such devices."""

    def key(other: Run) -> Any:
        kind = other["on"].split(":")[0]
        if part == "ends":
            return kind
        return kind, *(other[name] for name in ("model", "length", "saved")), "tp" in other["mesh"]

    return next(other for other in RUNS if key(other) == key(run))


def file_of(folder: Path, run: Run, part: str) -> Path:
    """Return the file of a result."""
    name = "".join(c if c.isalnum() else "-" for c in f"{title(run)} {part}")
    return folder / f"{name}.json"


def keep(folder: Path, run: Run, part: str) -> None:
    """Compile a part in a process of its own, with a limit, unless its result is there."""
    file = file_of(folder, run, part)
    if file.exists():
        return
    flags = " ".join(FLAGS[flag] for flag in run["flags"])
    command = [sys.executable, "-m", "benchmarks.published_runs", part, str(RUNS.index(run))]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags}
    try:
        done = subprocess.run(
            command, env=environment, timeout=MOST_SECONDS, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        result = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        result = {"failure": f"not compiled in {MOST_SECONDS} s"}
    except subprocess.CalledProcessError as error:
        result = {"failure": (error.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    write_text(file, json.dumps(result, indent=1))
    print(f"{title(run)}, {part}: {result.get('failure', 'compiled')}", file=sys.stderr)


def compiled(run: Run, part: str) -> dict[str, Any]:
    """Compile a part of a step, of fewer sequences if those of the run do not fit."""
    rows = 1 if part == "ends" else run["rows"]
    while True:
        try:
            return _proved(run, part, rows)
        except sr.OutOfMemory as refusal:
            if rows == 1:
                return {"failure": str(refusal).splitlines()[0]}
            rows = max(1, rows // 2)


def decoder(run: Run) -> Decoder:
    """Return the decoder of a run, on its mesh."""
    sizes = MODELS[run["model"]] | {"is_turned": MODELS[run["model"]].get("gated", True)}
    attend = partial(splash, run["on"].split(":")[0])
    named = {key: run[key] for key in ("length", "saved")}
    return Decoder(**sizes, **named, axes=run["mesh"], attend=attend)


def _loss_of_ends(step: Decoder, params: Any, x: Any, tokens: Any) -> jax.Array:
    """Embed the tokens, and take the cross entropy of x in the place of what the layers made."""
    with jax.named_scope("embedding"):
        one_hot = jax.nn.one_hot(tokens, step.vocab, dtype="bfloat16")
        embedded = step.cut(one_hot, None, step.tp) @ params["embed"].astype("bfloat16")
        x = x + step.cut(embedded, None, step.tp)
    return entropy(step.logits(params, x), tokens)


def _proved(run: Run, part: str, rows: int) -> Any:
    step, topology = decoder(run), sr.Topology(run["on"], run.get("slices", 1))
    mesh = topology.mesh(run["mesh"])
    loss: Any = partial(_loss_of_ends, step)
    if part == "layers":  # the sum stands for what follows
        loss = lambda params, x: step.through(params, x)[0].astype("float32").sum()  # noqa: E731

    def train(state: Any, x: Any, *rest: Any) -> Any:
        gradients, going_on = jax.grad(loss, argnums=(0, 1))(state["params"], x, *rest)
        return adam(state, gradients), going_on

    plan = step.planned(step.ends if part == "ends" else step.stacks(LAYERS_COMPILED), mesh)
    by_batch = NamedSharding(mesh, P(step.batch, None, step.tp))
    shape = rows * prod(step.axes.values()), step.length, step.width
    x = jax.ShapeDtypeStruct(shape, "bfloat16", sharding=by_batch)
    jitted = jax.jit(train, donate_argnums=0, out_shardings=(plan.shardings(), by_batch))
    args = [step.tokens(mesh, rows)] if part == "ends" else []
    proof: Any = sr.prove(jitted, plan, x, *args, on=topology, time=True)
    assert proof.time is not None
    return {
        "rows": rows,
        **{name: getattr(proof.time, name) for name in ("computing", "kernels", "uncounted")},
        "sent": [[axes, kind, count] for (axes, kind), count in proof.program.sent.items()],
    }


def seconds_of(run: Run, other: Run, part: str, result: Mapping[str, Any]) -> tuple[float, float]:
    """Compute the seconds of a part of a run: computing, sending.

    What is computed, and sent along "tp" and "ep", is by sequences; what is sent along "fsdp" is
    not, but by the share of an array that the others have.
    """
    model, whole = (decoder(each) for each in (run, other))
    times = model.layers / (LAYERS_COMPILED * len(model.body))
    if part == "ends":
        sizes = [d.vocab * d.width * d.length / d.axes.get("tp", 1) for d in (model, whole)]
        times = sizes[0] / sizes[1]
    of_rows = run["rows"] / result["rows"]
    topology = sr.Topology(run["on"], run.get("slices", 1))
    mesh = topology.mesh(run["mesh"])
    sending = 0.0
    for axes, _, count in result["sent"] if part == "layers" else ():
        by_weights = axes == ["fsdp"]
        parts = [1 - 1 / each["mesh"]["fsdp"] for each in (run, other)]
        factor = parts[0] / parts[1] if by_weights else of_rows
        sending += factor * count / topology._links(mesh, axes).rate
    return times * of_rows * result["computing"], times * sending


def published(run: Run) -> float:
    """Return the seconds of a run, from its operations in a second if those are published."""
    if "seconds" in run:
        return float(run["seconds"])
    step = decoder(run)  # without experts: of each token, parameters that multiply it
    kernels = 2 * step.width * HEAD * (step.heads + step.kv)
    kernels += (3 if step.gated else 2) * step.width * step.hidden
    attention = 12 * step.layers * step.heads * HEAD * step.length
    flops = 6 * (step.layers * kernels + step.width * step.vocab) + attention
    return float(flops * run["rows"] * step.length / (run["tflops"] * 1e12))


def table(folder: Path) -> Iterator[str]:
    """Yield the lines of a table in Markdown, and what it says."""
    yield "| run | published | computing | sending | range | middle / published | in it |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    rows: list[Row] = []
    for run in RUNS:
        seconds = published(run)
        computing = sending = 0.0
        failures = []
        for part in PARTS:
            other = compiled_for(run, part)
            file = file_of(folder, other, part)
            result = json.loads(file.read_text("utf-8")) if file.exists() else {"failure": "none"}
            if "failure" in result:
                failures.append(f"{part}: {result['failure']}")
                continue
            more = seconds_of(run, other, part, result)
            computing, sending = computing + more[0], sending + more[1]
        if failures:
            yield f"| {title(run)} | {seconds:.2f} s | {'; '.join(failures)} | | | | |"
            continue
        low = max(LEAST_CYCLES * computing, sending)
        row = Row(run["on"].split(":")[0], seconds, low, computing + sending)
        rows.append(row)
        yield (
            f"| {title(run)} | {seconds:.2f} s | {computing:.2f} s | {sending:.2f} s | "
            f"{row.low:.2f} to {row.high:.2f} s | {row.middle:.2f} | "
            f"{'yes' if row.low <= seconds <= row.high else 'no'} |"
        )
    yield ""
    if rows:
        others = [row for row in rows if row.kind != FITTED_ON]
        yield _summary(rows)
        yield f"Those of other kinds than {FITTED_ON}: {_summary(others)}"


def _summary(rows: Sequence[Row]) -> str:
    inside = sum(row.low <= row.seconds <= row.high for row in rows)
    near = sum(abs(row.middle - 1) <= NEAR for row in rows)
    both = [row.seconds for row in rows], [row.seconds * row.middle for row in rows]
    ranks = np.asarray([np.argsort(np.argsort(values)) for values in both])
    correlation = np.asarray(np.corrcoef(ranks))[0, 1]
    return (
        f"{len(rows)} runs: the range holds {inside} of the published times, its middle is within "
        f"{NEAR:.0%} of {near}; Spearman's rank correlation {correlation:.3f}"
    )


if __name__ == "__main__":
    first, *index = sys.argv[1:]
    if index:
        print(json.dumps(compiled(RUNS[int(*index)], first)))
    else:
        main(Path(first))
