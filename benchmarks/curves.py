"""Time as a function of leaves, rules and logical names, for shardrules and other libraries.

Each point is a median of interleaved runs, after a check that the results are equal. A series ends
when one call takes too long. Every call compiles its rules, except in the plain `re` loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import Any, Final, NamedTuple

import optree
import re2  # pyright: ignore[reportMissingImports] # of the group bench alone
from eformer.escale import match_partition_rules as eformer_match
from flax.linen import spmd as flax_spmd
from jax import tree_util
from jax.sharding import PartitionSpec as P

from benchmarks.cases import after_purge, cold_match, cut, logical_names, re_loop
from benchmarks.harness import Call, collector, interleaved_seconds, same
from benchmarks.trees import ATTENTION, ATTENTION_RULES, attention_layers
from shardrules.compat import flax_linen_spmd

_TOO_LONG: Final = 10.0
# With more patterns than `re` remembers, eformer compiles each of them again for each leaf.
_REMEMBERED_BY_RE: Final = 512


class Curve(NamedTuple):
    """Seconds by size, per way."""

    title: str
    x: str
    series: dict[str, list[tuple[int, float]]]


def curves() -> Iterator[Curve]:
    """Yield all curves, each measured when its turn comes, without the garbage collector."""
    for make in (_by_leaves, _by_rules, _by_names):
        with collector(enabled=False):
            yield make()


def _by_leaves() -> Curve:
    sizes = (10**3, 10**4, 10**5, 10**6, 10**7)
    points = ((n, partial(attention_layers, n), ATTENTION_RULES) for n in sizes)
    return _curve("Leaves: 3 rules", "leaves", points)


def _by_rules() -> Curve:
    """10,000 leaves, of which the rules before the last match some."""
    points = (
        (n, partial(attention_layers, 10_000), [*_layer_rules(n - 1), (".*", P())])
        for n in (1, 10, 100, 1_000, 10_000)
    )
    return _curve("Rules: 10,000 leaves, a regex for each layer and name", "rules", points)


def _by_names() -> Curve:
    series: dict[str, list[tuple[int, float]]] = {}
    # Both take an abstract mesh as well.
    ours: Any = flax_linen_spmd.logical_to_mesh_sharding
    theirs: Any = flax_spmd.logical_to_mesh_sharding
    for count in (10, 100, 1_000, 10_000):
        tree, mesh, rules = logical_names(count)
        calls = {
            "shardrules": partial(ours, tree, mesh, rules),
            "flax": partial(theirs, tree, mesh, rules),
            "jax identity": partial(tree_util.tree_map, lambda x: x, tree),
        }
        _measure(calls, count, series)
    return Curve("Logical names: 80 rules of MaxText", "arrays", series)


def _layer_rules(count: int) -> list[tuple[str, P]]:
    return [
        (rf"layers/{i // 4}/.*{ATTENTION[i % 4]}/kernel", P("fsdp", "tp")) for i in range(count)
    ]


def _curve(
    title: str, x: str, points: Iterator[tuple[int, Callable[[], Any], list[tuple[str, P]]]]
) -> Curve:
    series: dict[str, list[tuple[int, float]]] = {}
    for size, make, rules in points:
        tree = make()
        compiled = [(re.compile(pattern), spec) for pattern, spec in rules]
        calls: dict[str, Call] = {
            "shardrules": partial(cold_match, rules, tree),
            "eformer": after_purge(partial(eformer_match, rules, tree)),
            "re, compiled before": partial(re_loop, compiled, tree),
            "google-re2's Set": partial(_re2_set, rules, tree),
            "jax identity": partial(tree_util.tree_map, lambda leaf: leaf, tree),
            "optree identity": partial(optree.tree_map, lambda leaf: leaf, tree),
        }
        if len(rules) > _REMEMBERED_BY_RE:
            del calls["eformer"]
        _measure(calls, size, series)
    return Curve(title, x, series)


def _measure(
    calls: Mapping[str, Call], size: int, series: dict[str, list[tuple[int, float]]]
) -> None:
    """Add a point to each series that has not become too slow at the size before."""
    expected = calls["shardrules"]()
    left = {
        name: call
        for name, call in calls.items()
        if not (points := series.setdefault(name, [])) or points[-1][1] < _TOO_LONG / 10
    }
    first = {}
    for name, call in left.items():
        start = perf_counter()
        result = call()
        first[name] = perf_counter() - start
        if "identity" not in name and not same(result, expected):
            raise AssertionError(f"{name} and shardrules disagree at {size:,}")
        del result
    runs = max(1, min(9, int(20 / sum(first.values()))))
    for name, seconds in zip(left, interleaved_seconds(list(left.values()), runs), strict=True):
        series[name].append((size, seconds))


def _re2_set(rules: list[tuple[str, P]], tree: Any) -> Any:
    """Return all patterns in one automaton of re2, where the least index wins."""
    options = re2.Options()
    options.max_mem = 1 << 30  # its own bound is too low for 10,000 patterns
    patterns = re2.Set.SearchSet(options)
    for pattern, _ in rules:
        patterns.Add(pattern)
    patterns.Compile()

    def spec_of(path: Any, leaf: Any) -> P:
        indices: Any = patterns.Match(tree_util.keystr(path, simple=True, separator="/"))
        return cut(rules[min(indices)][1], leaf)

    return tree_util.tree_map_with_path(spec_of, tree)
