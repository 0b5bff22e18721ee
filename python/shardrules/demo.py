"""`shardrules demo`: DeepSeek-V3 (671B parameters) meets EasyDeL's real rules for it.

It shows the plan, the finding, the fix, the bytes on each device, the report, the rules that
`suggest` writes instead, and the time, compared with eformer if that is installed. `make demo` goes
on with `examples/prove_405b.py`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

from shardrules import Hardware, match_partition_rules, named_shardings, plan
from shardrules._base.text import bytes_shown
from shardrules._plan.files.models import nested, read_arrays
from shardrules._plan.files.rules import read_rule_source
from shardrules._plan.plan import Plan
from shardrules._plan.suggest.suggest import suggest
from shardrules._plan.suggest.suggestion import Suggestion
from shardrules._rules.rules import Rules

__all__ = ["main"]

DATA: Final = Path(__file__).parent / "demo_data"
MODEL: Final = DATA / "deepseek-v3.json.gz"
# EasyDeL 0.2.0 (2025-12-30, commit 05063fee3539), DeepseekV3Config.get_partition_rules() in
# easydel/modules/deepseek_v3/deepseek_configuration.py.
RULES: Final = DATA / "easydel-deepseek-v3.json"
MESH: Final = {"fsdp": 64, "sp": 1, "tp": 8}
# The rules are for experts stacked into one array. These are for single experts.
EXPERTS: Final = [
    (r"mlp/experts/\d+/(gate_proj|up_proj)/kernel", (("fsdp", "sp"), "tp")),
    (r"mlp/experts/\d+/down_proj/kernel", ("tp", ("fsdp", "sp"))),
]
# Counted beside the parameters, for training with Adam.
_COUNTED: Final[dict[str, Any]] = {"gradients": "bfloat16", "optimizer": ("float32", "float32")}
_HARDWARE: Final = Hardware.named("v5p")
_HBM: Final = _HARDWARE.memory_bytes
_RUNS: Final = 5
_ROUNDS: Final = 3


def main() -> int:
    """Run the demo and returns the exit code."""
    try:
        from rich.console import Console
    except ImportError:
        print("the demo needs rich: pip install 'shardrules[cli]'", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    rules = read_rule_source(str(RULES)).rules
    start = perf_counter()
    before = plan(read_arrays(str(MODEL)).leaves, rules, MESH)
    took = perf_counter() - start
    fixed = Rules([*EXPERTS, *rules])
    after = plan(read_arrays(str(MODEL)).leaves, fixed, MESH)

    _title(console, f"1. The plan: EasyDeL 0.2.0's {len(rules)} rules, in {took * 1e3:.0f} ms")
    console.print(repr(before), soft_wrap=True)
    _title(console, "2. The finding: shardrules check")
    findings = before.check()
    console.print(str(findings[0]), style="red", soft_wrap=True)
    console.print(f"... {findings.summary}")
    _title(console, "3. The fix: two rules for experts that are not stacked")
    for pattern, spec in EXPERTS:
        console.print(f"+ ({pattern!r}, P{spec})")
    console.print(str(before.diff(after)), soft_wrap=True)
    console.print(f"check: {after.check().summary}")
    _title(console, "4. The bytes on each device")
    _print_bytes(console, after)
    start = perf_counter()
    suggestion = _suggestion(after.devices)
    took = perf_counter() - start
    _title(console, "5. The report")
    console.print(_report(after, suggestion), soft_wrap=True)
    _title(console, f"6. No rules at all: shardrules suggest --devices {after.devices}")
    _print_suggestion(console, suggestion, took)
    _title(console, "7. The time")
    _print_times(console, list(fixed))
    return 0


def _title(console: Any, text: str) -> None:
    console.print(f"\n{text}", style="bold")


def _print_bytes(console: Any, fixed: Plan) -> None:
    device_bytes = fixed.bytes_per_device(**_COUNTED)
    console.print(f"training with Adam: {device_bytes}")
    console.print(
        f"the best meshes of {fixed.devices} {_HARDWARE.name} with {bytes_shown(_HBM)} each:"
    )
    best = fixed.sweep(fixed={"sp": 1}, hbm=_HBM, **_COUNTED)
    console.print(str(type(best)(best[:5])), soft_wrap=True)


def _suggestion(devices: int) -> Suggestion:
    return suggest(read_arrays(str(MODEL)).leaves, devices=devices, hbm=_HBM)


def _print_suggestion(console: Any, suggestion: Suggestion, took: float) -> None:
    console.print(str(suggestion), soft_wrap=True)
    summary = suggestion.plan.check(**suggestion.declared).summary
    console.print(f"check: {summary}, in {took:.1f} s with the sweep")
    device_bytes = suggestion.plan.bytes_per_device(**_COUNTED)
    console.print(f"training with Adam: {device_bytes}; a device has {bytes_shown(_HBM)}")


def _report(fixed: Plan, suggestion: Suggestion) -> str:
    # A new directory: in a shared one, anyone may have planted a link with this name.
    path = Path(tempfile.mkdtemp(prefix="shardrules-")) / "demo.html"
    rows = fixed.sweep(fixed={"sp": 1}, hbm=_HBM, **_COUNTED)
    fixed.to_html(
        path, sweep=rows, title="DeepSeek-V3", hbm=_HBM, suggestion=suggestion, **_COUNTED
    )
    return f"{path}: open it in a browser; it works offline"


def _print_times(console: Any, rules: list[tuple[Any, Any]]) -> None:
    import jax

    tree = jax.tree_util.tree_map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nested(read_arrays(str(MODEL)))
    )
    ours = _milliseconds(lambda: match_partition_rules(rules, tree), _RUNS)
    identity = _milliseconds(lambda: jax.tree_util.tree_map(lambda x: x, tree), _RUNS)
    console.print(
        f"specs of the whole tree, with compilation of the rules: {ours:.1f} ms "
        f"(an identity tree_map: {identity:.1f} ms; median of {_RUNS})"
    )
    shardings = _milliseconds(lambda: named_shardings(tree, rules, MESH), _RUNS)
    console.print(f"corrected NamedShardings of the whole tree: {shardings:.1f} ms")
    try:
        import eformer
        from eformer.escale import match_partition_rules as eformers
    except ImportError:
        console.print("eformer is not installed here, so its time is not shown")
        return
    compiled_rules = [(pattern, jax.sharding.PartitionSpec(*spec)) for pattern, spec in rules]
    if eformers(compiled_rules, tree) != match_partition_rules(compiled_rules, tree):
        raise AssertionError("eformer's specs differ from ours: please report this")
    both = [lambda: eformers(compiled_rules, tree), lambda: match_partition_rules(rules, tree)]
    rounds = [[_milliseconds(call, 1) for call in both] for _ in range(_ROUNDS)]
    ratios = sorted(theirs / ours for theirs, ours in rounds)
    console.print(
        f"eformer {eformer.__version__}, the same specs: {median(row[0] for row in rounds):.0f} "
        f"ms; slower in {sum(ratio > 1 for ratio in ratios)} of {_ROUNDS} rounds side by side, "
        f"{ratios[0]:.0f} to {ratios[-1]:.0f} times as long"
    )


def _milliseconds(call: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = perf_counter()
        result = call()
        times.append(perf_counter() - start)
        del result  # freeing it is not timed
    return median(times) * 1e3


if __name__ == "__main__":
    sys.exit(main())
