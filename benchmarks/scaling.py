"""Cases that are not one ratio to a peer: growth, compilation, imports, bounds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]
from statistics import median
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks.harness import Row, compared, interleaved_seconds, row_of, without_collector
from benchmarks.trees import ATTENTION_RULES, LEAF, attention_layers
from tests.support import corpus

NAMES = ("wq", "wk", "wv", "wo", "w1", "w2", "w3", "n1", "n2", "b")
CATCH_ALL = (".*", P())
ADVERSARIAL = {
    "(a|b)*a(a|b){20}c": "ab" * 20,
    "(x+x+)+y": "x" * 24,
    ".*.*.*.*=.*": "a" * 200,
    "(a?){50}a{50}": "a" * 22,
    r"[\s\S]{1000}": "a" * 999,
}


def rows() -> Iterator[Row]:
    """Yield all rows, each measured when its turn comes, without the garbage collector."""
    for measure in (_rules_growth, _compiling, _importing, _leaves_growth, _bounds):
        with without_collector():
            yield from measure()


def _seconds(call: Callable[[], Any], runs: int) -> float:
    return interleaved_seconds([call], runs)[0]


def _rules_growth() -> Iterator[Row]:
    """10,000 leaves; 10,000 rules against 10, per leaf, after compiling."""
    tree = {"layers": {str(i): {n: {"kernel": LEAF} for n in NAMES} for i in range(1000)}}
    kinds: dict[str, tuple[Callable[[int, str], str], float]] = {
        "literal rules, one for each leaf": (lambda i, n: f"layers/{i}/{n}/kernel", 1.3),
        "regex rules, one for each leaf": (lambda i, n: rf"layers/{i}/.*{n}/(kernel|bias)", 4),
    }
    for name, (pattern, bar) in kinds.items():
        many = [(pattern(i, n), P("tp")) for i in range(1000) for n in NAMES]
        yield from _growth(name, many[:10], many, tree, bar)
    few = [(rf"layers/\d+/{n}/kernel", P("tp")) for n in NAMES]
    others = [(rf"other/{i}/.*kernel", P()) for i in range(9_990)]
    yield from _growth("10 rules that match, the others do not", few, few + others, tree, 1.3)


def _growth(name: str, few: list[Any], many: list[Any], tree: Any, bar: float) -> Iterator[Row]:
    rounds: dict[str, list[list[float]]] = {"first call": [], "later calls": []}
    for _ in range(7):
        both = [sr.Rules([*pairs, CATCH_ALL]) for pairs in (many, few)]
        for runs, call in ((1, "first call"), (5, "later calls")):
            rounds[call].append([_seconds(partial(rules.match, tree), runs) for rules in both])
    for call, seconds in rounds.items():
        yield row_of(f"10,000 rules / 10: {name}, {call}", seconds, bar)


def _compiling() -> Iterator[Row]:
    literal = [(f"layers/{i}/{n}/kernel", P()) for i in range(1000) for n in NAMES]
    real = {p for name in corpus.regex_rule_sets() for p, _ in corpus.rules(name)}
    per_layer = [(rf"layers/{i}/.*(wq|wk)/kernel", P()) for i in range(2000)]
    for name, rules, bar in (
        ("literal rules", literal, 5),
        ("regex rules, real ones", [(p, P()) for p in sorted(real)], 60),
        ("regex rules, one for each layer", per_layer, 60),
    ):
        each = _seconds(lambda rules=rules: sr.Rules(rules), 5) / len(rules) * 1e6
        yield Row(f"compile: {name}", each, "us a rule", bar)
    regexes = sorted(p for p in real if re.search(r"[\\.^$*+?{}\[\]|()]", p))
    rules = [(p, P()) for p in regexes]
    name = f"compile: {len(regexes)} real ones that are not literal / Python's parser alone"
    yield compared(
        name, lambda: sr.Rules(rules), lambda: [*map(_parser.parse, regexes)], runs=15, bar=1.5
    )


def _importing() -> Iterator[Row]:
    """Yield the package alone, and with a function, each in a process that has imported numpy."""
    cases = {
        "import shardrules": "",
        "the same for match_partition_rules": ".match_partition_rules",
    }
    for name, attribute in cases.items():
        code = (
            "import time, numpy; s = time.perf_counter(); import shardrules; "
            f"shardrules{attribute}; print(time.perf_counter() - s)"
        )
        command = [sys.executable, "-c", code]
        times = [
            float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(7)
        ]
        yield Row(f"{name}, over import numpy", median(times) * 1e3, "ms", 30)


def _leaves_growth() -> Iterator[Row]:
    each: dict[int, tuple[float, float]] = {}
    for leaves in (1_000, 10_000, 100_000, 1_000_000, 10_000_000):
        tree = attention_layers(leaves)
        compiled = sr.Rules(ATTENTION_RULES)
        identity = partial(jax.tree_util.tree_map, lambda leaf: leaf, tree)
        runs = max(5, min(20, 3_000_000 // leaves))
        seconds = interleaved_seconds([partial(compiled.match, tree), identity], runs)
        each[leaves] = (seconds[0] / leaves * 1e9, seconds[1] / leaves * 1e9)
        note = f"identity: {each[leaves][1]:.0f}"
        yield Row(f"{leaves:,} leaves", each[leaves][0], "ns a leaf", note=note)
    ours, theirs = (each[10_000_000][i] / each[100_000][i] for i in (0, 1))
    name = "10,000,000 leaves / 100,000, per leaf: our growth / identity's"
    yield Row(name, ours / theirs, "x", 1.0, f"ours {ours:.2f}x, identity {theirs:.2f}x")
    yield from _extra_memory(compiled, tree)


def _extra_memory(compiled: sr.Rules, tree: Any) -> Iterator[Row]:
    """Yield what the walk needs at its height beyond the tree that it returns."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return
    clear.write_text("5")  # forget the peak
    result = compiled.match(tree)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, now = (int(status[key].split()[0]) / 1024 for key in ("VmHWM", "VmRSS"))
    del result
    yield Row("10,000,000 leaves: memory beyond the output tree", peak - now, "MiB", 64)


def _bounds() -> Iterator[Row]:
    """Yield one search each, beside one of `re`."""
    for pattern, text in ADVERSARIAL.items():
        rules, compiled = sr.Rules([(pattern, P())]), re.compile(pattern)
        ours = _seconds(lambda rules=rules, text=text: rules.first_match(text), 3)
        theirs = _seconds(lambda compiled=compiled, text=text: compiled.search(text), 1)
        name, note = f"{pattern} on {len(text)} characters", f"re: {theirs * 1e6:,.0f} us"
        yield Row(name, ours * 1e6, "us", note=note)
