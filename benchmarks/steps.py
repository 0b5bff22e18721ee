"""Steps that the compiler is asked about: seconds of processors, with those of the children.

Rows of TPUs need libtpu beside JAX for CPU.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any
from unittest import mock

import jax

import shardrules as sr
from benchmarks.harness import Row
from benchmarks.solving import AXES, STEPS, on_slice, traced
from examples import prove_405b

SLICE = "v5p:8x8x8"
SIZES = {"fsdp": 64, "tp": 8}
SMALL: dict[str, Any] = {
    "LAYERS": 2, "WIDTH": 32, "HIDDEN": 64, "HEADS": 8, "KV": 2, "SIZE": 8, "VOCAB": 64, "ROWS": 8,
    "LENGTH": 16,
}  # fmt: skip


def rows() -> Iterator[Row]:
    """Yield a row for each question."""
    bound: Any = jax.sharding.AbstractMesh(
        (64, 8), tuple(SIZES), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    yield _proved("XLA for CPU, 512 host devices", bound, 3.0)
    yield Row("rehearse of the same, small, on 8 host devices", *_seconds(_rehearse))
    if not find_spec("libtpu"):
        return
    topology = sr.Topology(SLICE)
    yield _proved("libtpu, 512 v5p", topology.mesh(SIZES), 4.0)
    swept = partial(sr.sweep, prove_405b.step_on, on=SLICE, axes=AXES)
    count = len(swept())
    seconds, unit = _seconds(swept)
    yield Row(f"sweep of it over the {count} meshes of {SLICE}, a row", seconds / count, unit, 2.0)
    model, meshes = on_slice(STEPS["DeepSeek-V3-like"][0], topology), topology.meshes(AXES)
    solved = partial(sr.solve, traced(model, meshes[len(meshes) // 2]), topology)
    name = f"solve of a DeepSeek-V3-like step on {SLICE}, its ten best compiled"
    yield Row(name, *_seconds(solved, runs=1), 40.0)


def _proved(what: str, mesh: Any, bar: float) -> Row:
    """From the call of `prove` to findings with memory."""

    def prove() -> Any:
        step, args, outputs = prove_405b.step_on(mesh)
        return sr.prove(step, *args, on=mesh, outputs=outputs).findings

    name = f"prove of a step of Llama 3.1 405B, {what}"
    return Row(name, *_seconds(prove), bar)


def _rehearse() -> Any:
    with mock.patch.multiple(prove_405b, **SMALL):
        return sr.rehearse(prove_405b.step_on, {"fsdp": 4, "tp": 2})


def _seconds(call: Callable[[], Any], runs: int = 3) -> tuple[float, str]:
    """Return the median of runs, in seconds of processors."""
    seconds = []
    for _ in range(runs):
        jax.clear_caches()
        begin = _processors()
        call()
        seconds.append(_processors() - begin)
    return median(seconds), "s of processors"


def _processors() -> float:
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = map(resource.getrusage, whose)
    return sum(one.ru_utime + one.ru_stime for one in used)
