"""The time that `patch` saves in code that calls eformer and flax by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import linen
from jax.sharding import Mesh, PartitionSpec

import shardrules as sr
from benchmarks.harness import Row, interleaved_seconds, without_collector
from benchmarks.planning import RULES
from tests.support import corpus
from tests.support.easydel_style import Model


def rows() -> Iterator[Row]:
    """Yield one row for each step from the model's rules to its functions."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 4, 2), ("dp", "fsdp", "tp"))
    tree = corpus.manifest("easydel-deepseek-v3").nested(corpus.abstract)
    model = Model(corpus.rules(RULES), tree, mesh)
    of_maxtext = next(name for name in corpus.manifest_names() if name.startswith("maxtext-"))
    names = {path: PartitionSpec(*axes) for path, axes in corpus.logical_axes(of_maxtext).items()}
    logical = corpus.logical_rules("maxtext__base")
    flax: Any = linen  # which does not list them as its own
    steps = {
        "specs of an EasyDeL-style model": model.partition_specs,
        "its shardings": model.shardings,
        "its shard and gather functions": model.shard_and_gather_fns,
        "flax's logical_to_mesh": lambda: flax.logical_to_mesh(names, logical),
        "flax's logical_to_mesh_sharding": lambda: flax.logical_to_mesh_sharding(
            names, mesh, [("embed", "fsdp"), ("mlp", "tp")]
        ),
    }
    with without_collector(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # eformer's
        theirs = interleaved_seconds([*steps.values()], runs=5)
        with sr.patch("eformer", "flax"):
            ours = interleaved_seconds([*steps.values()], runs=5)
    leaves = [len(jax.tree.leaves(tree))] * 3 + [len(names)] * 2
    for name, count, a, b in zip(steps, leaves, ours, theirs, strict=True):
        note = f"patched {a * 1e3:.2f} ms, the library {b * 1e3:.1f} ms, {count:,} leaves"
        yield Row(f"{name}, patched / the library", a / b, "x", None, note)
