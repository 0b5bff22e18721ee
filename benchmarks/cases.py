"""Cases on whole trees: those of docs/evidence.md's table, and one where others are faster."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from eformer.escale import get_corrected_named_sharding
from eformer.escale import match_partition_rules as eformer_match
from flax.linen import spmd as flax_spmd
from jax import tree_util
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks import trees
from benchmarks.harness import Case
from shardrules.compat import flax_linen_spmd
from tests.support import corpus

Rules = list[tuple[str, P]]
FAMILY_BARS = {"nnx.State of Params": 0.45, "frozen dataclasses": 0.45}


def cases() -> Iterator[Case]:
    """Yield the cases, each built when its turn comes."""
    deepseek = corpus.manifest(corpus.DEEPSEEK)
    rules = corpus.rules("easydel__deepseek_v2-DeepseekV2Config-v0.0.80")
    tree = deepseek.nested(corpus.abstract)
    yield _matching(
        f"match, DeepSeek-V3 nested ({len(deepseek.parameters):,} leaves, {len(rules)} rules)",
        rules,
        tree,
        {"identity": 0.5, "eformer": 60 if sys.version_info < (3, 12) else 45},
    )
    yield _named_shardings(rules, tree)
    published = corpus.manifest("deepseek-v3")
    yield _matching(
        f"match, flat checkpoint names ({len(published.parameters):,} leaves)",
        [(pattern.replace("/", r"\."), spec) for pattern, spec in rules],
        published.flat(corpus.abstract),
        {"identity": 0.5},
    )
    for family, of_family in trees.families(tree).items():
        bars = {"identity": FAMILY_BARS.get(family, 0.7)}
        # The plain loop is there for its result; nobody waits for eformer seven times.
        yield _matching(f"match, {family}", rules, of_family, bars, has_eformer=False)
    yield _logical()
    layers, names = range(120), ("wq", "wk", "wv", "wo", "w1", "w2")
    yield _matching(
        "match, 720 leaves x 720 literal rules (bar: 10 ms)",
        [(f"layers/{i}/{name}", P("tp")) for i in layers for name in names],
        {
            "layers": {
                str(i): {n: jax.ShapeDtypeStruct((8, 8), "int8") for n in names} for i in layers
            }
        },
        {},
    )
    tiny = {"norm": {"kernel": np.zeros(2)}, **dict.fromkeys(("bias", "a", "b"), np.zeros(2))}
    cold = _matching("match, 4 leaves x 12 rules: compiling is all", rules, tiny, {})
    yield cold
    yield replace(
        cold,
        name="match, 4 leaves x 12 rules that an earlier call had",
        ours=partial(sr.match_partition_rules, rules, tiny),
        bars={"re loop": 1},
    )


def cold_match(rules: Rules, tree: Any) -> Any:
    """Match with rules that are compiled anew, as they are the first time."""
    return sr.Rules(rules).match(tree)


def _matching(
    name: str, rules: Rules, tree: Any, bars: dict[str, float], *, has_eformer: bool = True
) -> Case:
    compiled = [(re.compile(pattern), spec) for pattern, spec in rules]
    peers: dict[str, Callable[[], Any]] = {"re loop": partial(re_loop, compiled, tree)}
    if has_eformer:
        peers["eformer"] = after_purge(partial(eformer_match, rules, tree))
    return Case(name, partial(cold_match, rules, tree), _identity(tree), peers, bars)


def _named_shardings(rules: Rules, tree: Any) -> Case:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 1, 2), ("fsdp", "sp", "tp"))

    def shardings(match: Callable[..., Any]) -> Any:
        specs = match(rules, tree)
        with mesh:
            return tree_util.tree_map(
                lambda leaf, spec: get_corrected_named_sharding(leaf.shape, spec), tree, specs
            )

    def compiled_anew(rules: Rules, tree: Any) -> Any:
        return re_loop([(re.compile(pattern), spec) for pattern, spec in rules], tree)

    return Case(
        name="tree to NamedShardings with correction, DeepSeek-V3 nested",
        ours=lambda: sr.named_shardings(tree, sr.Rules(rules), mesh),
        identity=_identity(tree),
        peers={
            "eformer": after_purge(partial(shardings, eformer_match)),
            "re loop": partial(shardings, compiled_anew),
        },
        bars={"identity": 0.6, "eformer": 60},
    )


def _logical() -> Case:
    """MaxText's unscanned DeepSeek-V3, repeated to so many arrays, and its 80 rules."""
    names = list(corpus.logical_axes("maxtext-deepseek3-671b-unscanned").values())
    tree = {f"w{i}": P(*names[i % len(names)]) for i in range(5_000)}
    rules = corpus.logical_rules("maxtext-0.2.5__base")
    axes = sorted({axis for _, value in rules for axis in tree_util.tree_leaves(value)})
    mesh = AbstractMesh((1,) * len(axes), tuple(axes))
    # Both take an abstract mesh as well.
    ours: Any = flax_linen_spmd.logical_to_mesh_sharding
    theirs: Any = flax_spmd.logical_to_mesh_sharding
    return Case(
        name="logical_to_mesh_sharding, 5,000 specs, 80 rules",
        ours=partial(ours, tree, mesh, rules),
        identity=_identity(tree),
        peers={"flax": partial(theirs, tree, mesh, rules)},
        bars={"flax": 30},
    )


def _identity(tree: Any) -> Callable[[], Any]:
    return lambda: tree_util.tree_map(lambda x: x, tree)


def after_purge(call: Callable[[], Any]) -> Callable[[], Any]:
    """Make a call cold for eformer too: `re` remembers 512 compiled patterns."""

    def purged() -> Any:
        re.purge()
        return call()

    return purged


def re_loop(compiled: list[tuple[re.Pattern[str], P]], tree: Any) -> Any:
    """Match as a careful user would write it: compiled patterns, one search each."""

    def spec_of(path: Any, leaf: Any) -> P:
        if not leaf.shape:
            return P()
        name = tree_util.keystr(path, simple=True, separator="/")
        for pattern, spec in compiled:
            if pattern.search(name):
                return cut(spec, leaf)
        raise ValueError(name)

    return tree_util.tree_map_with_path(spec_of, tree)


def cut(spec: P, leaf: Any) -> P:
    """Return the spec, no longer than the leaf's rank."""
    return P(*tuple(spec)[: leaf.ndim]) if len(spec) > leaf.ndim else spec
