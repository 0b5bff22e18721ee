"""`python -m shardrules.demo`: DeepSeek-V3 (671B parameters) meets EasyDeL's real rules.

Shows what each rule got, what fell into the catch-all, and the time beside eformer's
`match_partition_rules`, where eformer is installed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from shardrules import Rules, match_partition_rules, named_shardings
from shardrules._files.manifest import Manifest, read_manifest

DATA = Path(__file__).parent / "demo_data"
MODEL = DATA / "deepseek-v3.json.gz"
RULES = DATA / "easydel-deepseek-v2.json"
_RUNS = 5


def main() -> int:
    """Runs the demo and returns the exit code."""
    try:
        from rich.console import Console
    except ImportError:
        print("the demo needs rich: pip install 'shardrules[demo]'", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    manifest = read_manifest(MODEL)
    rules = read_rules(RULES)
    total = sum(p.bytes for p in manifest.parameters)
    console.print(
        f"[bold]DeepSeek-V3[/bold] ({manifest.model}): {len(manifest.parameters):,} arrays, "
        f"{total / 1e9:,.0f} GB; "
        f"{len(rules)} rules of EasyDeL 0.0.80 (DeepseekV2Config)\n"
    )
    _print_rule_table(console, manifest, rules)
    _print_times(console, manifest, rules)
    return 0


def read_rules(path: Path) -> list[tuple[str, Any]]:
    """The (pattern, PartitionSpec) rules in a JSON file."""
    from jax.sharding import PartitionSpec

    def entry(axes: Any) -> Any:
        return tuple(axes) if isinstance(axes, list) else axes

    content = json.loads(path.read_text())
    return [(pattern, PartitionSpec(*map(entry, spec))) for pattern, spec in content["rules"]]


def _print_rule_table(console: Any, manifest: Manifest, rules: list[tuple[str, Any]]) -> None:
    from rich.table import Table

    # Any object may stand in for a spec; with the rule's index there, the tree says which rule won.
    numbered = Rules((pattern, index) for index, (pattern, _) in enumerate(rules))
    winners = numbered.match(manifest.flat(lambda _: 0), strict=False)
    leaves: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for parameter in manifest.parameters:
        leaves[winners[parameter.name]] += 1
        sizes[winners[parameter.name]] += parameter.bytes

    table = Table("rule", "pattern", "spec", box=None)
    table.add_column("leaves", justify="right")
    table.add_column("bytes", justify="right")
    for index, (pattern, spec) in enumerate(rules):
        style = None if leaves[index] else "yellow"
        columns = (str(index), pattern, str(spec), f"{leaves[index]:,}", _gigabytes(sizes[index]))
        table.add_row(*columns, style=style)
    console.print(table)

    last = len(rules) - 1
    console.print(
        f"\nThe catch-all (rule {last}, {rules[last][0]!r}) took {leaves[last]:,} leaves, "
        f"{_gigabytes(sizes[last])}, which every device will hold whole:"
    )
    caught = [p for p in manifest.parameters if winners[p.name] == last]
    for parameter in sorted(caught, key=lambda p: -p.bytes)[:3]:
        console.print(
            f"    {parameter.name} {list(parameter.shape)}, {_gigabytes(parameter.bytes)}"
        )
    dead = [index for index in range(len(rules)) if not leaves[index]]
    if dead:
        console.print(f"Rules that match nothing: {', '.join(map(str, dead))}")


def _print_times(console: Any, manifest: Manifest, rules: list[tuple[str, Any]]) -> None:
    import jax

    tree = manifest.nested(lambda p: jax.ShapeDtypeStruct(p.shape, "bfloat16"))
    ours = _milliseconds(lambda: match_partition_rules(rules, tree), _RUNS)
    identity = _milliseconds(lambda: jax.tree_util.tree_map(lambda x: x, tree), _RUNS)
    console.print(
        f"\nThe whole tree of specs, rules compiled anew: [bold]{ours:.1f} ms[/bold] "
        f"(an identity tree_map: {identity:.1f} ms; median of {_RUNS})"
    )
    mesh = {"fsdp": 64, "sp": 1, "tp": 8}
    shardings = _milliseconds(lambda: named_shardings(tree, rules, mesh), _RUNS)
    console.print(f"The same as NamedShardings on {mesh}, corrected: {shardings:.1f} ms")
    try:
        import eformer
        from eformer.escale import match_partition_rules as eformers
    except ImportError:
        console.print("eformer is not installed here, so its time is not shown beside it")
        return
    if eformers(rules, tree) != match_partition_rules(rules, tree):
        raise AssertionError("eformer's specs differ from ours: please report this")
    theirs = _milliseconds(lambda: eformers(rules, tree), 1)
    console.print(
        f"eformer {eformer.__version__}, same specs: {theirs:.0f} ms, "
        f"[bold]{theirs / ours:.0f} times[/bold] as long"
    )


def _milliseconds(call: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = perf_counter()
        result = call()
        times.append(perf_counter() - start)
        del result  # not part of the time
    return median(times) * 1e3


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"


if __name__ == "__main__":
    sys.exit(main())
