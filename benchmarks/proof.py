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
    placed = _placed(plan)
    _check_audit(placed, plan)
    identity = partial(tree_util.tree_map, lambda leaf: leaf, placed)
    what = f"audit, {len(plan):,} arrays on 8 devices, {name} / identity"
    return compared(what, partial(sr.audit, placed, plan), identity, runs=15, bar=2.0)


def _verify(tree: Any, mesh: Mesh) -> Row:
    """Beside XLA's own time to print the executable, which verify has to read."""
    plan, other = (
        sr.plan(tree, rules, mesh)
        for rules in (ATTENTION_RULES, [("layers/7/attn/wq/kernel", P()), *ATTENTION_RULES])
    )
    # The cheapest step that XLA does not take apart: a state that goes in and comes out.
    step = jax.jit(jax.lax.optimization_barrier, out_shardings=plan.shardings(), donate_argnums=0)
    compiled = step.lower(plan.abstract()).compile()
    found = sorted((one.kind, one.leaves) for one in sr.verify(compiled, (other,), other))
    if sr.verify(compiled, (plan,), plan) or found != [("input", 1), ("output", 1)]:
        raise AssertionError(f"verify does not find the one array that is not as planned: {found}")
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


def _placed(plan: sr.Plan) -> Any:
    """Arrays that are sharded as planned."""
    zeros = tree_util.tree_map(lambda one: np.zeros(one.shape, one.dtype), plan.abstract())
    return sr.shard(zeros, plan.shardings())


def _check_audit(placed: Any, plan: sr.Plan) -> None:
    """Return that audit finds nothing, and the one array that is not as planned."""
    leaves, structure = tree_util.tree_flatten(placed)
    is_cut = [any(leaf.sharding.spec) for leaf in leaves]
    wrong = is_cut.index(True)
    mesh: Any = plan.mesh
    leaves[wrong] = jax.device_put(leaves[wrong], NamedSharding(mesh, P()))
    found = sr.audit(structure.unflatten(leaves), plan)
    if sr.audit(placed, plan) or [one.leaves for one in found] != [1]:
        raise AssertionError(f"audit does not find the one array that is not as planned: {found}")
