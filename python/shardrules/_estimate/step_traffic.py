"""Traffic and time of a step by its jaxpr, without assumptions about what it does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from shardrules._dtypes import is_inexact
from shardrules._estimate.schedule import merged
from shardrules._estimate.step_time import Network, StepTime
from shardrules._estimate.traffic import Traffic

if TYPE_CHECKING:
    from shardrules._estimate.schedule import Of, Row
    from shardrules._hardware import Hardware
    from shardrules._plan.plan import Plan
    from shardrules._program.equations import Operation
    from shardrules._program.spread import Sent, Spread
    from shardrules._program.step import Step


def step_traffic(step: Step, plan: Plan | None) -> Traffic:
    """Count what a step sends; what it is traced from is the only assumption."""
    spread = step.spread(plan)
    return _traffic(step, spread)


def _traffic(step: Step, spread: Spread) -> Traffic:
    rows = _rows(step, spread)
    return Traffic(merged(rows, spread.sizes), {"step": step.name}, step.unmodelled)


def _rows(step: Step, spread: Spread) -> Iterator[Row]:
    for sent in spread.sent:
        yield sent.kind, sent.axes, _purpose(step, sent), sent.trips, sent.payload * sent.trips


def _purpose(step: Step, sent: Sent) -> Of:
    """Say of what a collective is."""
    if sent.value in step.weight_arrays:
        return "params"
    if sent.value is not None and step.is_like_weights(sent.value) and "reduce" in sent.kind:
        return "gradients"
    return "experts" if sent.kind == "all-to-all" and step.has_experts else "activations"


def step_seconds(
    step: Step,
    plan: Plan | None,
    *,
    hardware: Hardware,
    axes_over_dcn: Iterable[str],
    overlap: Iterable[str],
    efficiency: float,
) -> StepTime:
    """Estimate the time of a step: of each operation, of its products or of its memory.

    Args:
        step: The step.
        plan: As `Step.spread` takes it.
        hardware: The devices.
        axes_over_dcn: As `Plan.step_time` takes it.
        overlap: The same.
        efficiency: The same.
    """
    spread = step.spread(plan)
    compute = memory = 0.0
    total = 0
    for operation, trips in step.operations():
        work, moved, peak = _of_operation(step, spread, operation, hardware)
        total += operation.rule.flops * trips if operation.rule else 0
        seconds = work / (peak * efficiency), moved / hardware.memory_bytes_per_second
        if seconds[0] >= seconds[1]:
            compute += seconds[0] * trips
        else:
            memory += seconds[1] * trips
    network = Network(hardware, spread.sizes, tuple(a for a in axes_over_dcn if a in spread.sizes))
    sent: dict[tuple[str, ...], float] = defaultdict(float)
    alone = 0.0
    traffic = _traffic(step, spread)
    for row in traffic:
        seconds_sent = network.seconds(row)
        sent[row.axes] += seconds_sent
        alone += 0.0 if row.of in overlap else seconds_sent
    busy = compute + memory
    longest = max(busy, sum(sent.values()) - alone) + alone
    devices = prod(spread.sizes.values())
    peak = hardware.flops_per_second["bfloat16"]
    return StepTime(
        total=longest,
        compute=compute,
        memory=memory,
        sent=dict(sent),
        alone=alone,
        utilization=total / (devices * peak * longest) if longest else 0.0,
        uncounted=step.unmodelled,
        assumptions={
            "hardware": hardware.name,
            "axes_over_dcn": tuple(axes_over_dcn),
            "overlap": tuple(overlap),
            "efficiency": efficiency,
            "step": step.name,
        },
    )


def _of_operation(
    step: Step, spread: Spread, operation: Operation, hardware: Hardware
) -> tuple[float, float, float]:
    """Return the products of an operation on a device, the bytes that it moves, and the peak."""
    rule = operation.rule
    if rule is None or not step.is_apart(operation):
        return 0.0, 0.0, 1.0
    flops = rule.flops / spread.shares.get(id(operation), 1)
    numbers = {number for number in (*operation.inputs, *operation.outputs) if number is not None}
    moved = sum(map(spread.bytes, numbers))
    return flops, moved, _peak(hardware.flops_per_second, step.dtype_of(operation))


def _peak(rates: Mapping[str, float], dtype: Any) -> float:
    """Return the peak for operands of a dtype; of those without a figure that of bfloat16."""
    name = getattr(dtype, "name", "")
    if name in rates:
        return rates[name]
    least = min(rates.values())
    return rates.get("bfloat16", least) if dtype is None or is_inexact(dtype) else least
