"""`Machine`: hardware, and how well a step uses it; `StepTime`: roofline estimate of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from math import log2, prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.hardware import Hardware, as_hardware
from shardrules._base.text import answer, printable, seconds_shown
from shardrules._program.solve.transmissions import Transmission

if TYPE_CHECKING:
    from shardrules._program.topologies.topology import Links, Topology

OVERLAPPED: Final = ("params", "gradients")
"""What is sent while devices compute: compilers prefetch it, but products wait for activations."""


class Network:
    """The networks under the axes of a mesh.

    Devices stand side by side along the last axis, as `jax.make_mesh` has them, so that the last
    axes are those inside a slice or node, as far as its devices go.
    """

    def __init__(self, machine: Machine, sizes: Mapping[str, int]) -> None:
        hardware = machine.hardware
        self._machine, self._hardware, self._sizes = machine, hardware, sizes
        self._inside: dict[str, int] = {}
        remaining = hardware.link_devices
        for axis in reversed(list(sizes)):
            most = min(remaining, sizes[axis])
            self._inside[axis] = next(n for n in range(most, 0, -1) if sizes[axis] % n == 0)
            remaining //= self._inside[axis]
        self._dimensions = _dimensions(self._inside, hardware.torus_dimensions)

    def seconds(self, row: Transmission) -> float:
        """Return how long these collectives take, one after the other."""
        return self.sending(row.collective, row.axes, self._machine.sent(row))

    def sending(self, kind: str, axes: Sequence[str], size: int) -> float:
        """Return how long it takes to send so many bytes."""
        if self._machine.links is not None:
            return size / self._machine.links(axes).rate
        devices = prod(self._sizes[axis] for axis in axes)
        inside = prod(self._inside[axis] for axis in axes)
        outside = devices // inside
        # First between slices, each device with its part; then inside of them.
        share = (outside - 1) / (devices - 1)
        if kind == "all-to-all":
            share *= inside
        return max(
            size * share / self._hardware.dcn_bytes_per_second,
            size * (1 - share) / self._link_rate(axes) if inside > 1 else 0.0,
        )

    def _link_rate(self, axes: Iterable[str]) -> float:
        hardware = self._hardware
        dimensions = sum(self._dimensions[axis] for axis in axes)
        share = min(1.0, dimensions / hardware.torus_dimensions)
        return hardware.link_bytes_per_second * share


def _dimensions(inside: Mapping[str, int], torus: int) -> dict[str, int]:
    """Return {mesh axis: dimensions of the torus that it lies along}: one, the largest the rest."""
    sizes = {axis: int(size > 1) for axis, size in inside.items()}
    remaining = torus - sum(sizes.values())
    for axis in sorted(inside, key=lambda axis: -inside[axis]):
        next_size = max(0, min(remaining, int(log2(inside[axis])) - 1))
        sizes[axis] += next_size
        remaining -= next_size
    return sizes


class Machine(NamedTuple):
    """Hardware, and how well a step uses it."""

    hardware: Hardware
    links: Callable[[Sequence[str]], Links] | None = None
    """Those over mesh axes; None if no topology says."""
    hides: float = 1.0
    """Of what could be sent while devices compute, the part that is."""

    def sent(self, row: Transmission) -> int:
        """Return the bytes that a device sends, by what the compiler makes of the collectives."""
        summed = () if self.links is None else self.links(row.axes).summed
        return row.sent * (2 if row.collective in summed else 1)

    def total(self, busy: float, meanwhile: float, alone: float) -> float:
        """Return the seconds of a step: of computing, and of sending meanwhile and alone."""
        exposed = (1 - self.hides) * min(busy, meanwhile)
        return max(busy, meanwhile) + exposed + alone

    def assumptions(self) -> dict[str, Any]:
        """Return what is assumed of it, by names."""
        return {
            "hardware": self.hardware.name,
            "overlap": OVERLAPPED,
            "efficiency": self.hardware.efficiency,
            **({} if self.hides == 1.0 else {"hides": self.hides}),
        }

    def on_slice(self, topology: Topology, sizes: Mapping[str, int]) -> Machine:
        """Return the machine with the links that a mesh of these sizes has on a slice."""
        return self._replace(links=cache(partial(topology._links, topology.mesh(sizes))))


def machine_of(hardware: Hardware | str) -> Machine:
    """Return the machine of what a user gives: a `Hardware`, or the name of one such as "v5p"."""
    return Machine(as_hardware("hardware", hardware))


@answer
class StepTime(NamedTuple):
    """Seconds of a step on a device, and of what.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"w": jax.ShapeDtypeStruct((8192, 8192), "bfloat16")}
        >>> plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
        >>> x = jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
        >>> step = sr.trace(lambda params, x: x @ params["w"], plan, x)
        >>> sr.solve(step, {"tp": 2}, hardware="v5p").time.dominant
        'compute'
    """

    total: float
    """The longest of compute, memory and what is sent meanwhile; then what is sent alone."""
    best: float
    """The same if products reach the peak of the hardware: no step takes less."""
    compute: float
    memory: float
    sent: dict[tuple[str, ...], float]
    """Of collectives, by the mesh axes over which they run."""
    alone: float
    """Of `sent`, what does not overlap with compute."""
    utilization: float
    """Of the peak FLOP/s of all devices, the part that the step's work takes: at most the MFU."""
    uncounted: tuple[str, ...]
    """As in `Traffic`."""
    assumptions: dict[str, Any]
    """The hardware, and what else is assumed of it and of the step."""

    @property
    def dominant(self) -> str:
        """The longest term: "compute", "memory", or the mesh axes of what is sent: "fsdp,tp"."""
        terms = {",".join(axes): seconds for axes, seconds in self.sent.items()}
        terms |= {"memory": self.memory, "compute": self.compute}
        return max(terms, key=terms.__getitem__)

    def __str__(self) -> str:
        terms = {"compute": self.compute, "memory": self.memory}
        terms |= {f"sent over {','.join(axes)}": seconds for axes, seconds in self.sent.items()}
        width = max(map(len, terms))
        assumed = ", ".join(
            f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
            for name, value in self.assumptions.items()
            if value not in ((), None)
        )
        lines = [
            f"{_range_shown(self)}: at most {self.utilization:.0%} of the peak",
            *(f"  {name:<{width}}  {seconds_shown(seconds):>8}" for name, seconds in terms.items()),
            f"assumed: {assumed}",
            *(f"not counted: {text}" for text in self.uncounted),
        ]
        return "\n".join(map(printable, lines))


def _range_shown(time: StepTime) -> str:
    if time.best >= time.total:
        return f"{seconds_shown(time.total)} a step at best"
    efficiency = time.assumptions["efficiency"]
    return (
        f"{seconds_shown(time.best)} a step at best, {seconds_shown(time.total)} with products at "
        f"{efficiency:.0%} of the peak"
    )


def sent_seconds(
    machine: Machine, sizes: Mapping[str, int], collectives: Iterable[Transmission]
) -> tuple[dict[tuple[str, ...], float], float]:
    """Return the seconds of collectives by their axes, and of those that nothing else overlaps."""
    network = Network(machine, sizes)
    sent: dict[tuple[str, ...], float] = defaultdict(float)
    alone = 0.0
    for row in collectives:
        seconds = network.seconds(row)
        sent[row.axes] += seconds
        alone += 0.0 if row.of in OVERLAPPED else seconds
    return dict(sent), alone
