"""Traffic and time of a step by its jaxpr, without assumptions about what it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.dtypes import is_inexact
from shardrules._estimate.kernels import KERNEL_EFFICIENCY
from shardrules._estimate.schedule import merged
from shardrules._estimate.step_time import Machine, StepTime, sent_seconds
from shardrules._estimate.traffic import Traffic
from shardrules._program.step.peak import is_apart

if TYPE_CHECKING:
    from shardrules._base.hardware import Hardware
    from shardrules._estimate.schedule import Of, Row
    from shardrules._program.step.dimension_roles import Roles
    from shardrules._program.step.equations import Equations, TracedOperation
    from shardrules._program.step.spread import Spread, SpreadCollective

_MOST_PARTS: Final = 32
_MOST_AT_BEST: Final = 1
"""A flag of the compiler has all operands gathered first."""


@dataclass
class Price:
    """What a step costs on a mesh."""

    name: str
    """The step's."""
    equations: Equations
    roles: Roles
    spread: Spread
    unmodelled: tuple[str, ...]

    def traffic(self) -> Traffic:
        """Count what the step sends; what it is traced from is the only assumption."""
        rows: Iterator[Row] = (
            (sent.kind, sent.axes, self.purpose(sent), sent.trips, sent.payload * sent.trips)
            for sent in self.spread.sent
        )
        sent = merged(rows, self.spread.sizes, self.spread.named)
        return Traffic(sent, {"step": self.name}, self.unmodelled)

    def purpose(self, sent: SpreadCollective) -> Of:
        """Say of what a collective is."""
        if sent.value in self.roles.weights:
            return "params"
        is_sum = "reduce" in sent.kind
        if is_sum and sent.value is not None and self.roles.is_like_weights(sent.value):
            return "gradients"
        has_experts = "experts" in self.roles.of.values()
        return "experts" if sent.kind == "all-to-all" and has_experts else "activations"

    def time(self, machine: Machine) -> StepTime:
        """Estimate the time of the step: of each operation, of its products or of its memory."""
        sizes, hardware = self.spread.mesh, machine.hardware
        compute, memory = self._busy(hardware, machine.efficiency)
        sent, alone = sent_seconds(machine, sizes, self.traffic())
        meanwhile = sum(sent.values()) - alone
        busy = compute + memory
        exposed = (1 - machine.hides) * min(busy, meanwhile)
        longest = max(busy, meanwhile) + exposed + alone
        best = max(sum(self._busy(hardware, 1.0, _MOST_AT_BEST)), meanwhile) + alone
        peak = prod(sizes.values()) * hardware.flops_per_second["bfloat16"]
        return StepTime(
            total=longest,
            best=best,
            compute=compute,
            memory=memory,
            sent=sent,
            alone=alone,
            utilization=self.equations.flops / (peak * longest) if longest else 0.0,
            uncounted=self.unmodelled,
            assumptions=machine.assumptions() | self._assumptions(hardware),
        )

    def _assumptions(self, hardware: Hardware) -> dict[str, Any]:
        """Return the name of the step, and what else of it the time assumes."""
        products = [row for row, _ in self.equations.operations(on_device=True) if row.flops]
        assumed: dict[str, Any] = {"step": self.name}
        if any(row.rule is None for row in products):
            assumed["kernel_efficiency"] = KERNEL_EFFICIENCY
        if any(self._parts(row, hardware, _MOST_PARTS) > 1 for row in products):
            assumed["parts"] = _MOST_PARTS
        return assumed

    def _parts(self, operation: TracedOperation, hardware: Hardware, most: int) -> int:
        parts = self.spread.summed_parts(operation) if hardware.link == "ICI" else 1
        return parts if parts <= most and operation.flops else 1

    def _busy(
        self, hardware: Hardware, efficiency: float, most_parts: int = _MOST_PARTS
    ) -> tuple[float, float]:
        """Return the seconds of products, and those of reading and writing."""
        compute = memory = 0.0
        for operation, trips in self.equations.operations(on_device=True):
            seconds = self.seconds(operation, hardware, efficiency, most_parts)
            if seconds[0] >= seconds[1]:
                compute += seconds[0] * trips
            else:
                memory += seconds[1] * trips
        return compute, memory

    def seconds(
        self,
        operation: TracedOperation,
        hardware: Hardware,
        efficiency: float,
        most_parts: int = _MOST_PARTS,
    ) -> tuple[float, float]:
        """Return the seconds of an operation's products, and those of reading and writing.

        XLA for TPUs does not wait for an operand that is gathered in so many parts at most: it
        multiplies with each part, and adds that to the result in memory.
        """
        if not is_apart(operation):
            return 0.0, 0.0
        reads = [number for number in operation.inputs if number is not None]
        dtype = self.equations.values[reads[0]].dtype if reads else None
        share = KERNEL_EFFICIENCY if operation.rule is None else efficiency
        speed = _peak(hardware.flops_per_second, dtype) * share
        size, rate = self.spread.bytes, hardware.memory_bytes_per_second
        parts = self._parts(operation, hardware, most_parts)
        added = 2 * (parts - 1) * sum(map(size, operation.outputs))
        moved = sum(map(size, {*reads, *operation.outputs}))
        return operation.flops / self.spread.share(operation) / speed + added / rate, moved / rate


def _peak(rates: Mapping[str, float], dtype: Any) -> float:
    """Return the peak for operands of a dtype; of those without a figure that of bfloat16."""
    name = getattr(dtype, "name", "")
    if name in rates:
        return rates[name]
    least = min(rates.values())
    return rates.get("bfloat16", least) if dtype is None or is_inexact(dtype) else least
