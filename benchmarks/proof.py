"""Cases of proofs: what is there against what was planned, compared with an identity `tree_map`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks.harness import Row, compared, interleaved_seconds, without_collector
from benchmarks.trees import ATTENTION_RULES, attention_layers, families

LEAVES = 10_000


def rows() -> Iterator[Row]:
    """Yield all rows, each measured when its turn comes."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tp"))
    layers = attention_layers(LEAVES)
    trees = {"dicts": layers, "nnx.State": families(layers)["nnx.State of Params"]}
    with without_collector():
        for name, tree in trees.items():
            yield _audit(name, tree, mesh)
        yield _verify(layers, mesh)


def _audit(name: str, tree: Any, mesh: Mesh) -> Row:
    plan = sr.plan(tree, ATTENTION_RULES, mesh)
    zeros = tree_util.tree_map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), plan.abstract())
    arrays = sr.shard(zeros, plan)
    _check_audit(arrays, plan)
    identity = partial(tree_util.tree_map, lambda leaf: leaf, arrays)
    what = f"audit, {len(plan):,} arrays on 8 devices, {name} / identity"
    return compared(what, partial(sr.audit, arrays, plan), identity, runs=15, bar=2.0)


def _verify(tree: Any, mesh: Mesh) -> Row:
    """Beside XLA's own time to print the executable, which verify has to read."""
    plan, other = (
        sr.plan(tree, rules, mesh)
        for rules in (ATTENTION_RULES, [("layers/7/attn/wq/kernel", P()), *ATTENTION_RULES])
    )
    # The cheapest step that XLA does not take apart: a state that goes in and comes out.
    step = jax.jit(jax.lax.optimization_barrier, out_shardings=plan.shardings(), donate_argnums=0)
    compiled = step.lower(plan.abstract()).compile()
    findings = sorted((row.kind, row.leaves) for row in sr.verify(compiled, (other,), other))
    if sr.verify(compiled, (plan,), plan) or findings != [("input", 1), ("output", 1)]:
        raise AssertionError(
            f"verify does not find the one array that is not as planned: {findings}"
        )
    calls = [
        partial(sr.verify, compiled, (plan,), plan),
        compiled.as_text,
        partial(tree_util.tree_map, lambda leaf: leaf, plan.abstract()),
    ]
    ours, text, reference = interleaved_seconds(calls, runs=7)
    note = (
        f"{ours * 1e3:.0f} ms, of which XLA prints for {text * 1e3:.0f} ms; identity "
        f"{reference * 1e3:.0f} ms"
    )
    what = f"verify, a step with {len(plan):,} arguments, without XLA's text / identity"
    return Row(what, (ours - text) / reference, "x", 2.0, note)


def _check_audit(arrays: Any, plan: sr.Plan) -> None:
    """Check that audit finds nothing, and then the one array that is not as planned."""
    leaves, structure = tree_util.tree_flatten(arrays)
    is_cut = [any(leaf.sharding.spec) for leaf in leaves]
    wrong = is_cut.index(True)
    mesh: Any = plan.mesh
    leaves[wrong] = jax.device_put(leaves[wrong], NamedSharding(mesh, P()))
    findings = sr.audit(structure.unflatten(leaves), plan)
    if sr.audit(arrays, plan) or [row.leaves for row in findings] != [1]:
        raise AssertionError(
            f"audit does not find the one array that is not as planned: {findings}"
        )
