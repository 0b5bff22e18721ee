"""`make demo`: DeepSeek-V3 (671B parameters) meets EasyDeL's real rules for it.

It shows the plan, the finding, the fix, the bytes on each device, the report, the rules that
`suggest` writes instead, and the time, compared with eformer if that is installed. `make demo` goes
on with `prove_405b.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import jax
from jax.sharding import PartitionSpec as P

import shardrules as sr

DATA: Final = Path(__file__).parent / "demo_data"
MODEL: Final = DATA / "deepseek-v3.json.gz"
# EasyDeL 0.2.0 (2025-12-30, commit 05063fee3539), DeepseekV3Config.get_partition_rules() in
# easydel/modules/deepseek_v3/deepseek_configuration.py.
RULES: Final = DATA / "easydel-deepseek-v3.json"
MESH: Final = {"fsdp": 64, "sp": 1, "tp": 8}
# The rules are for experts stacked into one array. These are for single experts.
EXPERTS: Final = [
    (r"mlp/experts/\d+/(gate_proj|up_proj)/kernel", P(("fsdp", "sp"), "tp")),
    (r"mlp/experts/\d+/down_proj/kernel", P("tp", ("fsdp", "sp"))),
]
# Counted beside the parameters, for training with Adam.
_COUNTED: Final[dict[str, Any]] = {"gradients": "bfloat16", "optimizer": ("float32", "float32")}
_HARDWARE: Final = sr.Hardware.named("v5p")
_RUNS: Final = 5
_ROUNDS: Final = 3


def main() -> None:
    """Run the demo."""
    rules = sr.read_rules(RULES).rules
    model = sr.read_model(MODEL)
    start = perf_counter()
    before = sr.plan(model, rules, MESH)
    took = perf_counter() - start
    fixed = sr.Rules([*EXPERTS, *rules])
    after = sr.plan(model, fixed, MESH)

    _title(f"1. The plan: EasyDeL 0.2.0's {len(rules)} rules, in {took * 1e3:.0f} ms")
    print(repr(before))
    _title("2. The finding: shardrules check")
    findings = before.check()
    print(findings[0])
    print(f"... {findings.summary}")
    _title("3. The fix: two rules for experts that are not stacked")
    for pattern, spec in EXPERTS:
        print(f"+ ({pattern!r}, {spec})")
    print(before.diff(after))
    print(f"check: {after.check().summary}")
    _title("4. The bytes on each device")
    sweep = after.sweep(axes=("fsdp", "tp"), hbm=_HARDWARE.memory_bytes, **_COUNTED)
    print(f"training with Adam: {after.bytes_per_device(**_COUNTED)}")
    print(f"the best meshes of {after.devices} {_HARDWARE.name}:")
    print(sweep[:5])
    start = perf_counter()
    suggestion = sr.suggest(model, devices=after.devices)
    took = perf_counter() - start
    _title("5. The report")
    # A new directory: in a shared one, anyone may have planted a link with this name.
    page = Path(tempfile.mkdtemp(prefix="shardrules-")) / "demo.html"
    after.to_html(
        page, sections=[sweep, suggestion], title="DeepSeek-V3", hbm=_HARDWARE.memory_bytes,
        **_COUNTED,
    )  # fmt: skip
    print(f"{page}: open it in a browser; it works offline")
    _title(f"6. No rules at all: shardrules suggest --devices {after.devices}, in {took:.1f} s")
    print(suggestion)
    print(f"check: {suggestion.plan.check(**suggestion.declared).summary}")
    print(f"training with Adam: {suggestion.plan.bytes_per_device(**_COUNTED)}")
    _title("7. The time")
    _print_times(model, list(fixed))


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def _print_times(tree: Any, rules: list[tuple[str, Any]]) -> None:
    ours = _milliseconds(lambda: sr.match_partition_rules(rules, tree), _RUNS)
    identity = _milliseconds(lambda: jax.tree.map(lambda x: x, tree), _RUNS)
    print(
        f"specs of the whole tree, with compilation of the rules: {ours:.1f} ms "
        f"(an identity tree.map: {identity:.1f} ms; median of {_RUNS})"
    )
    shardings = _milliseconds(lambda: sr.named_shardings(tree, rules, MESH), _RUNS)
    print(f"corrected NamedShardings of the whole tree: {shardings:.1f} ms")
    try:
        import eformer
        from eformer.escale import match_partition_rules as eformers
    except ImportError:
        print("eformer is not installed here, so its time is not shown")
        return
    rules = [(pattern, P(*spec)) for pattern, spec in rules]
    if eformers(rules, tree) != sr.match_partition_rules(rules, tree):
        raise AssertionError("eformer's specs differ from ours: please report this")
    both = [lambda: eformers(rules, tree), lambda: sr.match_partition_rules(rules, tree)]
    rounds = [[_milliseconds(call, 1) for call in both] for _ in range(_ROUNDS)]
    ratios = sorted(theirs / ours for theirs, ours in rounds)
    print(
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
    main()
