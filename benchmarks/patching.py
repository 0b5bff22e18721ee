"""The time that `patch` saves in a model's code that calls eformer by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

import shardrules as sr
from benchmarks.harness import collector, interleaved_seconds
from benchmarks.planning import RULES
from benchmarks.scaling import Row
from tests.support import corpus
from tests.support.easydel_style import Model


def rows() -> Iterator[Row]:
    """Yield one row for each step from the model's rules to its functions."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 4, 2), ("dp", "fsdp", "tp"))
    tree = corpus.manifest("easydel-deepseek-v3").nested(corpus.abstract)
    model = Model(corpus.rules(RULES), tree, mesh)
    leaves = len(jax.tree.leaves(tree))
    steps = {
        "specs": model.partition_specs,
        "shardings": model.shardings,
        "shard and gather functions": model.shard_and_gather_fns,
    }
    with collector(enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # eformer's
        theirs = interleaved_seconds([*steps.values()], runs=5)
        with sr.patch("eformer"):
            ours = interleaved_seconds([*steps.values()], runs=5)
    for name, a, b in zip(steps, ours, theirs, strict=True):
        note = f"patched {a * 1e3:.1f} ms, eformer {b * 1e3:.0f} ms, {leaves:,} leaves"
        yield Row(f"{name} of an EasyDeL-style model, patched / eformer", a / b, "x", None, note)
