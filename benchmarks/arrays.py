"""Cases on arrays: placement compared with eformer, constraints compared with JAX's own call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eformer.escale import make_shard_and_gather_fns
from jax import tree_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks.harness import Row, compared, interleaved_seconds, row_of, without_collector
from benchmarks.trees import families

LEAVES = 200
MANY = 10_000
CALLS = 200  # constraints in one traced function


def rows() -> Iterator[Row]:
    """Yield each row's ratio, from medians of interleaved runs."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tp"))
    with without_collector(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # eformer's
        yield from _placement(mesh)
        yield from _many(mesh)
        yield from _constraints(mesh)


def _placement(mesh: Mesh) -> Iterator[Row]:
    # Of different shapes, as eformer compiles for each; jax.Arrays, as it leaves numpy ones alone.
    tree = {f"w{i}": jnp.ones((64, 8 * (i + 1)), "float32") for i in range(LEAVES)}
    numpy_tree = {name: np.asarray(array) for name, array in tree.items()}
    rules = sr.Rules([("w", P("fsdp", "tp"))])
    specs = rules.match(tree)
    shard_fns, gather_fns = make_shard_and_gather_fns(specs, mesh)

    def by_leaf(functions: Any, arrays: Any) -> Any:
        return jax.block_until_ready(tree_util.tree_map(lambda f, x: f(x), functions, arrays))

    def placed() -> Any:
        # Anew each time: an array that was fetched remembers it.
        return sr.shard(numpy_tree, rules, mesh)

    expected = by_leaf(shard_fns, tree)
    for name, array in placed().items():
        if not array.sharding.is_equivalent_to(expected[name].sharding, array.ndim):
            raise AssertionError(f"shard: eformer and shardrules disagree on {name}")
    for name, array in sr.gather(placed()).items():
        np.testing.assert_array_equal(array, np.asarray(tree[name]))

    def cold(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            jax.clear_caches()
            return call()

        return run

    pairs = {
        "shard": (
            lambda: jax.block_until_ready(sr.shard(tree, rules, mesh)),
            lambda: by_leaf(shard_fns, tree),
        ),
        "gather": (lambda: sr.gather(placed()), lambda: by_leaf(gather_fns, placed())),
    }
    for name, (ours, theirs) in pairs.items():
        what = f"{name} {LEAVES} leaves"
        yield compared(f"{what}, first call / eformer's", cold(ours), cold(theirs), runs=1)
        yield compared(f"{what}, again / eformer's", ours, theirs, runs=5)


def _many(mesh: Mesh) -> Iterator[Row]:
    """Many leaves, compared with JAX's own call on the flat list, whose shardings are ready."""
    names = ("wq", "wk", "wv", "wo", "scale")
    zeros = np.zeros((8, 8), "float32")
    tree = {str(i): {name: zeros.copy() for name in names} for i in range(MANY // len(names))}
    rules = sr.Rules([("w[qk]", P("fsdp", "tp")), ("w[vo]", P("tp", "fsdp")), (".*", P())])
    plan = sr.plan(tree, rules, mesh)
    state = families(tree)["nnx.State of Params"]
    ways = {
        "numpy arrays, by rules": (tree, rules),
        "numpy arrays, by a Plan": (tree, plan),
        "numpy arrays, by specs": (tree, plan.specs()),
        "numpy arrays, by shardings": (tree, plan.shardings()),
        "numpy arrays in nnx.State, by rules": (state, rules),
    }
    leaves, shardings = map(tree_util.tree_leaves, (tree, plan.shardings()))
    yield from _placed_in_turns(mesh, ways, leaves, shardings)
    placed = sr.shard(tree, rules, mesh)
    ways = {"arrays in place, by rules": (placed, rules)}
    yield from _placed_in_turns(mesh, ways, tree_util.tree_leaves(placed), shardings)


def _placed_in_turns(
    mesh: Mesh, ways: dict[str, tuple[Any, Any]], leaves: list[Any], shardings: list[Any]
) -> Iterator[Row]:
    """Tree with what decides them, by name, all of these leaves."""
    ours = [partial(sr.shard, tree, decider, mesh) for tree, decider in ways.values()]
    theirs = partial(jax.device_put, leaves, shardings)
    for what, call in zip(ways, ours, strict=True):
        if [array.sharding for array in tree_util.tree_leaves(call())] != shardings:
            raise AssertionError(f"shard: JAX and shardrules disagree on {what}")
    calls = [partial(_done, call) for call in (*ours, theirs)]
    rounds = [interleaved_seconds(calls, runs=1) for _ in range(9)]
    for i, what in enumerate(ways):
        name = f"shard {MANY:,} {what} / jax.device_put of the flat list"
        yield row_of(name, [(seconds[i], seconds[-1]) for seconds in rounds], 1.05)


def _done(call: Callable[[], Any]) -> Any:
    return jax.block_until_ready(call())


def _constraints(mesh: Mesh) -> Iterator[Row]:
    spec = P("fsdp", None, "tp")
    x = jax.device_put(np.zeros((8, 64, 64), "float32"), NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        yield _inside_jit("one array, by a spec", x, spec, spec)
        layer = dict.fromkeys(("wq", "wk", "wv", "wo", "scale"), x)
        tree = {"0": layer, "1": dict(layer)}
        for what, decider, shardings in _deciders(tree, mesh):
            yield _inside_jit(
                f"{len(layer) * 2} arrays in a tree, by {what}", tree, decider, shardings
            )
        ours = partial(sr.with_sharding_constraint, x, spec)
        theirs = partial(jax.lax.with_sharding_constraint, x, spec)
        yield compared("constraint outside of jit, a call / JAX's own", ours, theirs, runs=301)


def _deciders(tree: Any, mesh: Mesh) -> Iterator[tuple[str, Any, Any]]:
    """Yield what our function takes, under its name, and the shardings for JAX's own."""
    pairs = [("w[qk]", P("fsdp", None, "tp")), ("w[vo]", P("tp", None, "fsdp")), ("scale", P())]
    plan = sr.plan(tree, pairs, mesh)
    shardings = plan.shardings()
    yield "Rules", sr.Rules(pairs), shardings
    yield "a Plan", plan, shardings
    yield "specs", plan.specs(), shardings
    yield "shardings", shardings, shardings


def _inside_jit(what: str, tree: Any, decider: Any, to: Any) -> Row:
    """Return a constraint beside JAX's own call, which gets what is decided."""
    calls = CALLS // len(tree_util.tree_leaves(tree))

    def ours(tree: Any) -> Any:
        return sr.with_sharding_constraint(tree, decider)

    def bare(tree: Any) -> Any:
        return jax.lax.with_sharding_constraint(tree, to)

    def traced(constrain: Callable[[Any], Any]) -> Callable[[], Any]:
        def body(tree: Any) -> Any:
            for _ in range(calls):
                tree = constrain(tree)
            return tree

        return lambda: jax.make_jaxpr(partial(body))(tree)  # a new function: traced each time

    leaves, expected = (tree_util.tree_leaves(jax.jit(call)(tree)) for call in (ours, bare))
    for array, theirs in zip(leaves, expected, strict=True):
        if not array.sharding.is_equivalent_to(theirs.sharding, array.ndim):
            raise AssertionError(f"constraint, {what}: JAX and shardrules disagree")
    makers = [traced(lambda tree: tree), traced(ours), traced(bare)]
    rounds = [interleaved_seconds(makers, runs=1) for _ in range(25)]
    pairs = [[(time - nothing) / calls for time in times] for nothing, *times in rounds]
    return row_of(f"constraint inside jit, {what}, a call / JAX's own", pairs, 1.1)
