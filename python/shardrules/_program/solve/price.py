"""Seconds of a step: of what operations compute, read, write and send, and of the links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from math import log2, prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._program.work import KERNEL_EFFICIENCY

if TYPE_CHECKING:
    from shardrules._base.hardware import Hardware
    from shardrules._program.solve.spread import CollectiveKind, Spread, SpreadCollective
    from shardrules._program.step.equations import TracedOperation
    from shardrules._program.topologies.topology import Links, Topology

PRODUCTS: Final = frozenset(["dot_general", "ragged_dot_general", "conv_general_dilated"])
# What XLA makes an operation of its own; all else it computes where it is read.
_MADE: Final = PRODUCTS | frozenset((
    "gather", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter_max",
    "scatter_min", "sort", "top_k", "concatenate", "fft", "cholesky", "triangular_solve",
    "eigh", "qr", "lu", "svd", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
    "reduce_window_sum", "reduce_window_max", "dynamic_update_slice", "rng_bit_generator",
    "random_bits", "psum", "psum2", "all_gather", "psum_invariant", "all_to_all",
    "ppermute", "reduce_scatter", "psum_scatter", "all_gather_invariant", "reduce_sum",
    "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin",
))  # fmt: skip
# Of what could be sent while devices compute, the part that is: the middle of all and nothing.
_HIDDEN: Final = 0.5

Bounds = tuple[float, ...]


class Seconds(NamedTuple):
    """Parts of the time of a step."""

    compute: float = 0.0
    """Of products."""
    memory: float = 0.0
    """Of reading and writing."""
    meanwhile: float = 0.0
    """Of what is sent while devices compute."""
    alone: float = 0.0
    """Of what is sent while they wait."""

    @property
    def bounds(self) -> Bounds:
        """Sums of which the larger is the total, and which add up term by term."""
        compute, memory, meanwhile, alone = self
        busy, waited = compute + memory, 1 - _HIDDEN
        return busy + waited * meanwhile + alone, meanwhile + waited * busy + alone

    @property
    def total(self) -> float:
        return max(self.bounds)

    def plus(self, term: Seconds) -> Seconds:
        a, b, c, d = term
        return Seconds(self[0] + a, self[1] + b, self[2] + c, self[3] + d)

    def less(self, term: Seconds) -> Seconds:
        a, b, c, d = term
        return Seconds(self[0] - a, self[1] - b, self[2] - c, self[3] - d)


class Price:
    """Seconds of operations under a layout."""

    def __init__(self, spread: Spread, machine: Machine) -> None:
        self._spread, self._machine = spread, machine
        self._rates: dict[tuple[Any, ...], float] = {}

    def of_step(self) -> Seconds:
        """Return the seconds of all that the step computes and sends."""
        running = self._spread.arrays.equations.operations(on_device=True)
        return self.computing(running).plus(self.sending(self._spread.sent))

    def computing(self, operations: Iterable[tuple[TracedOperation, int]]) -> Seconds:
        """Return the seconds of operations, each of its products or of reading and writing."""
        compute = memory = 0.0
        for operation, trips in operations:
            products, moved = self._operation(operation)
            if products >= moved:
                compute += products * trips
            else:
                memory += moved * trips
        return Seconds(compute, memory)

    def sending(self, rows: Iterable[SpreadCollective]) -> Seconds:
        """Return the seconds of collectives: products wait for activations alone."""
        meanwhile = alone = 0.0
        arrays = self._spread.arrays
        for row in rows:
            seconds = row.payload * row.trips * self._rate(row)
            is_gradient = "reduce" in row.kind and arrays.is_weight(row.value)
            if is_gradient or row.value in arrays.roles.weights:
                meanwhile += seconds
            else:
                alone += seconds
        return Seconds(0.0, 0.0, meanwhile, alone)

    def _rate(self, row: SpreadCollective) -> float:
        """Return the seconds of a collective for each byte of its payload."""
        key = row.kind, row.axes
        if key not in self._rates:
            sent = self._machine.sent(*key, 1)
            self._rates[key] = self._machine.seconds(*key, sent)
        return self._rates[key]

    def _operation(self, operation: TracedOperation) -> tuple[float, float]:
        """Return the seconds of an operation's products, and those of reading and writing."""
        if not is_apart(operation):
            return 0.0, 0.0
        spread, hardware = self._spread, self._machine.hardware
        reads = [number for number in operation.inputs if number is not None]
        dtype = spread.arrays.equations.values[reads[0]].dtype if reads else None
        rates = hardware.flops_per_second  # those without a figure have that of bfloat16
        peak = rates.get(getattr(dtype, "name", "bfloat16"), rates.get("bfloat16"))
        share = KERNEL_EFFICIENCY if operation.rule is None else hardware.efficiency
        speed = (peak or min(rates.values())) * share
        moved = sum(map(spread.bytes, {*reads, *operation.outputs}))
        flops = operation.flops / spread.share(operation)
        return flops / speed, moved / hardware.memory_bytes_per_second


def is_apart(operation: TracedOperation) -> bool:
    """Say whether XLA computes an operation by itself, and not where its result is read."""
    return operation.name in _MADE or operation.rule is None


class Machine:
    """Hardware, and the networks under the axes of a mesh.

    Without a topology devices stand side by side along the last axis, as `jax.make_mesh` has them,
    so that the last axes are those inside a slice or node, as far as its devices go.
    """

    def __init__(
        self, hardware: Hardware, sizes: Mapping[str, int], topology: Topology | None = None
    ) -> None:
        self.hardware, self.sizes = hardware, dict(sizes)
        self._links: Callable[[Sequence[str]], Links] | None = None
        if topology is not None:
            self._links = cache(partial(topology._links, topology.mesh(sizes)))
        self._inside: dict[str, int] = {}
        remaining = hardware.link_devices
        for axis in reversed(list(sizes)):
            most = min(remaining, sizes[axis])
            self._inside[axis] = next(n for n in range(most, 0, -1) if sizes[axis] % n == 0)
            remaining //= self._inside[axis]
        self._dimensions = _dimensions(self._inside, hardware.torus_dimensions)

    def sent(self, kind: CollectiveKind, axes: Sequence[str], payload: int) -> float:
        """Return the bytes that a device sends by rings, as the compiler writes a collective."""
        rounds = 2 if kind == "all-reduce" else 1
        if self._links is not None and kind in self._links(axes).summed:
            rounds *= 2
        devices = prod(self.sizes[axis] for axis in axes)
        return payload * rounds * (devices - 1) / devices

    def seconds(self, kind: str, axes: Sequence[str], size: float) -> float:
        """Return how long it takes to send so many bytes."""
        if self._links is not None:
            return size / self._links(axes).rate
        devices = prod(self.sizes[axis] for axis in axes)
        inside = prod(self._inside[axis] for axis in axes)
        outside = devices // inside
        # First between slices, each device with its part; then inside of them.
        share = (outside - 1) / (devices - 1)
        if kind == "all-to-all":
            share *= inside
        return max(
            size * share / self.hardware.dcn_bytes_per_second,
            size * (1 - share) / self._link_rate(axes) if inside > 1 else 0.0,
        )

    def _link_rate(self, axes: Iterable[str]) -> float:
        dimensions = sum(self._dimensions[axis] for axis in axes)
        share = min(1.0, dimensions / self.hardware.torus_dimensions)
        return self.hardware.link_bytes_per_second * share


def _dimensions(inside: Mapping[str, int], torus: int) -> dict[str, int]:
    """Return {mesh axis: dimensions of the torus that it lies along}: one, the largest the rest."""
    sizes = {axis: int(size > 1) for axis, size in inside.items()}
    remaining = torus - sum(sizes.values())
    for axis in sorted(inside, key=lambda axis: -inside[axis]):
        next_size = max(0, min(remaining, int(log2(inside[axis])) - 1))
        sizes[axis] += next_size
        remaining -= next_size
    return sizes
