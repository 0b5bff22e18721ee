"""The time that `patch` saves in code that calls eformer and flax by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from eformer.escale import (
    get_corrected_named_sharding,
    make_shard_and_gather_fns,
    match_partition_rules,
)
from flax import linen
from jax.sharding import Mesh, PartitionSpec

import shardrules as sr
from benchmarks.harness import Row, interleaved_seconds, without_collector
from benchmarks.planning import RULES
from shardrules._base.text import seconds_shown
from tests.support import corpus


def rows() -> Iterator[Row]:
    """Yield a row for each step from a model's rules to its functions, as EasyDeL's base module."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 4, 2), ("dp", "fsdp", "tp"))
    tree = corpus.manifest("easydel-deepseek-v3").nested(corpus.abstract)
    rules = corpus.rules(RULES)
    of_maxtext = next(name for name in corpus.manifest_names() if name.startswith("maxtext-"))
    names = {path: PartitionSpec(*axes) for path, axes in corpus.logical_axes(of_maxtext).items()}
    logical = corpus.logical_rules("maxtext__base")
    flax: Any = linen  # which does not list them as its own

    def specs() -> Any:
        return match_partition_rules(rules, tree)

    def shardings() -> Any:
        with mesh:
            return jax.tree.map(
                lambda spec, leaf: get_corrected_named_sharding(leaf.shape, spec), specs(), tree
            )

    def functions() -> Any:
        corrected = jax.tree.map(lambda sharding: sharding.spec, shardings())
        return make_shard_and_gather_fns(corrected, mesh)

    steps = {
        "specs of an EasyDeL-style model": specs,
        "its shardings": shardings,
        "its shard and gather functions": functions,
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
        note = f"patched {seconds_shown(a)}, the library {seconds_shown(b)}, {count:,} leaves"
        yield Row(f"{name}, patched / the library", a / b, "x", None, note)
