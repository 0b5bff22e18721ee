"""Time of a step under a layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.dtypes import is_inexact
from shardrules._program.kernels import KERNEL_EFFICIENCY
from shardrules._program.solve.machine import Machine, sent_seconds
from shardrules._program.solve.transmissions import merged

if TYPE_CHECKING:
    from shardrules._base.hardware import Hardware
    from shardrules._program.solve.spread import LaidSpread, SpreadCollective
    from shardrules._program.solve.transmissions import Of, Row, Transmission
    from shardrules._program.step.equations import TracedOperation
    from shardrules._program.step.step import Step

PRODUCTS: Final = frozenset(
    ["dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"]
)
# What XLA makes an operation of its own; all else it computes where it is read.
_MADE: Final = frozenset((
    "dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "gather",
    "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter_max",
    "scatter_min", "sort", "top_k", "concatenate", "fft", "cholesky", "triangular_solve",
    "eigh", "qr", "lu", "svd", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
    "reduce_window_sum", "reduce_window_max", "dynamic_update_slice", "rng_bit_generator",
    "random_bits", "psum", "psum2", "all_gather", "psum_invariant", "all_to_all",
    "ppermute", "reduce_scatter", "psum_scatter", "all_gather_invariant",
))  # fmt: skip
_REDUCED: Final = frozenset((
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
    "argmax", "argmin",
))  # fmt: skip


class PredictedTime(NamedTuple):
    """Seconds of a step on a device, and of what."""

    total: float
    compute: float
    memory: float
    sent: dict[tuple[str, ...], float]
    """Of collectives, by the mesh axes over which they run."""


class Price:
    """What a step costs under a layout."""

    def __init__(self, step: Step, spread: LaidSpread) -> None:
        self._step, self._spread = step, spread
        self._values = step._equations.values

    def purpose(self, sent: SpreadCollective) -> Of:
        """Say of what a collective is."""
        roles = self._step._roles
        if sent.value in roles.weights:
            return "params"
        is_sum = "reduce" in sent.kind
        if is_sum and sent.value is not None and roles.is_like_weights(sent.value):
            return "gradients"
        has_experts = "experts" in roles.of.values()
        return "experts" if sent.kind == "all-to-all" and has_experts else "activations"

    def collectives(self) -> tuple[Transmission, ...]:
        """Return what each device sends in the step."""
        rows: Iterable[Row] = (
            (sent.kind, sent.axes, self.purpose(sent), sent.trips, sent.payload * sent.trips)
            for sent in self._spread.sent
        )
        return merged(rows, self._spread.sizes)

    def time(self, machine: Machine) -> PredictedTime:
        """Return the time of the step: of each operation, of its products or of its memory."""
        compute, memory = self._busy(machine.hardware)
        sent, alone = sent_seconds(machine, self._spread.sizes, self.collectives())
        total = machine.total(compute + memory, sum(sent.values()) - alone, alone)
        return PredictedTime(total, compute, memory, sent)

    def _running(self) -> Iterable[tuple[TracedOperation, int]]:
        return self._step._equations.operations(on_device=True)

    def _busy(self, hardware: Hardware) -> tuple[float, float]:
        """Return the seconds of products, and those of reading and writing."""
        compute = memory = 0.0
        for operation, trips in self._running():
            seconds = self.seconds(operation, hardware)
            if seconds[0] >= seconds[1]:
                compute += seconds[0] * trips
            else:
                memory += seconds[1] * trips
        return compute, memory

    def seconds(self, operation: TracedOperation, hardware: Hardware) -> tuple[float, float]:
        """Return the seconds of an operation's products, and those of reading and writing."""
        if not is_apart(operation):
            return 0.0, 0.0
        reads = [number for number in operation.inputs if number is not None]
        dtype = self._values[reads[0]].dtype if reads else None
        share = KERNEL_EFFICIENCY if operation.rule is None else hardware.efficiency
        speed = _peak(hardware.flops_per_second, dtype) * share
        moved = sum(map(self._spread.bytes, {*reads, *operation.outputs}))
        flops = operation.flops / self._spread.share(operation)
        return flops / speed, moved / hardware.memory_bytes_per_second


def is_apart(operation: TracedOperation) -> bool:
    """Say whether XLA computes an operation by itself, and not where its result is read."""
    return operation.name in _MADE or operation.name in _REDUCED or operation.rule is None


def _peak(rates: Mapping[str, float], dtype: Any) -> float:
    """Return the peak for operands of a dtype; of those without a figure that of bfloat16."""
    name = getattr(dtype, "name", "")
    if name in rates:
        return rates[name]
    least = min(rates.values())
    return rates.get("bfloat16", least) if dtype is None or is_inexact(dtype) else least
