"""`StepTime`: roofline estimate of a training step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from math import log2, prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

from shardrules._base.arguments import check_choice, check_type, integer, strings
from shardrules._base.dtypes import bits_of, given_dtype
from shardrules._base.hardware import Hardware, as_hardware, check_share
from shardrules._base.text import answer, brief, mesh_shown, printable, seconds_shown
from shardrules._estimate.collectives import CutPart, cut_parts, kernel_uses
from shardrules._estimate.schedule import Of, Schedule, Transmission, schedule_of
from shardrules._estimate.traffic import of_muon, traffic, why_uncounted
from shardrules._plan.table import OVERLAP
from shardrules._plan.tables import guesses_shown

if TYPE_CHECKING:
    from shardrules._plan.memory import DeviceBytes
    from shardrules._plan.roles import DimRole
    from shardrules._plan.table import Columns
    from shardrules._program.topologies.topology import Links, Topology

# A multiplication and an addition for each element and token: forward, and for both gradients.
_FOR_EACH: Final = 6


class Flops(NamedTuple):
    """Of a step, without the scores of attention, which depend on the length of sequences."""

    total: int
    """Of all tokens, each product once."""
    per_device: int
    """Of a device. Work that a mesh axis neither cuts nor batches is done on each of its devices,
    so these may add up to more than the total."""


def flops(columns: Columns, schedule: Schedule) -> Flops:
    """Return the operations of a training step: 6 for each token and each element that it meets."""
    total = per_device = 0
    for use in kernel_uses(cut_parts(columns, schedule), schedule):
        part = use.cut.part
        if "lookup" in part.dims:
            continue
        elements = prod(n for n, role in zip(part.shape, part.dims, strict=True) if role in _MET)
        elements *= use.arrays * _FOR_EACH
        total += int(schedule.tokens * use.share * elements)
        per_device += int(use.tokens * elements / use.cut.devices(use.cut.kept))
    return Flops(total, per_device)


_MET: Final = ("in", "out", "unknown")


class Network:
    """The networks under the axes of a mesh.

    Devices stand side by side along the last axis, as `jax.make_mesh` has them, so that the last
    axes are those inside a slice or node, as far as its devices go. Axes over the DCN are outside.
    """

    def __init__(self, machine: Machine, sizes: Mapping[str, int]) -> None:
        hardware, axes_over_dcn = machine.hardware, machine.axes_over_dcn
        if absent := [axis for axis in axes_over_dcn if axis not in sizes]:
            raise ValueError(
                f"axes_over_dcn: the mesh {mesh_shown(sizes)} has no axis {brief(absent[0])}"
            )
        self._machine, self._hardware, self._sizes = machine, hardware, sizes
        self._inside: dict[str, int] = {}
        remaining = hardware.link_devices
        for axis in reversed(list(sizes)):
            most = 1 if axis in axes_over_dcn else min(remaining, sizes[axis])
            self._inside[axis] = next(n for n in range(most, 0, -1) if sizes[axis] % n == 0)
            remaining //= self._inside[axis]
        self._dimensions = _dimensions(self._inside, hardware.torus_dimensions)

    def seconds(self, row: Transmission) -> float:
        """Return how long these collectives take, one after the other."""
        if self._machine.links is not None:
            return self._machine.sent(row) / self._machine.links(row.axes).rate
        devices = prod(self._sizes[axis] for axis in row.axes)
        inside = prod(self._inside[axis] for axis in row.axes)
        outside = devices // inside
        # First between slices, each device with its part; then inside of them.
        share = (outside - 1) / (devices - 1)
        if row.collective == "all-to-all":
            share *= inside
        return max(
            row.sent * share / self._hardware.dcn_bytes_per_second,
            row.sent * (1 - share) / self._link_rate(row.axes) if inside > 1 else 0.0,
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


# Each of the products of a kernel (forward, and the gradients of its input and of itself) reads two
# of these three and writes the third: the kernel, its input, its output.
_PRODUCTS: Final = 3
# What the optimizer has in memory is read and written once.
_UPDATED: Final = 2


class Machine(NamedTuple):
    """Hardware, and how well a step uses it: arguments of `Plan.step_time`, checked."""

    hardware: Hardware
    axes_over_dcn: tuple[str, ...]
    overlap: tuple[str, ...]
    efficiency: float
    links: Callable[[Sequence[str]], Links] | None = None
    """Those over mesh axes; None if no topology says."""
    hides: float = 1.0
    """Of what could be sent while devices compute, the part that is."""

    def sent(self, row: Transmission) -> int:
        """Return the bytes that a device sends, by what the compiler makes of the collectives."""
        summed = () if self.links is None else self.links(row.axes).summed
        return row.sent * (2 if row.collective in summed else 1)

    def assumptions(self) -> dict[str, Any]:
        """Return the arguments by their names."""
        arguments = self._asdict() | {"hardware": self.hardware.name}
        del arguments["links"]
        if self.hides == 1.0:
            del arguments["hides"]
        return arguments

    def on_slice(self, topology: Topology, sizes: Mapping[str, int]) -> Machine:
        """Return the machine with the links that a mesh of these sizes has on a slice."""
        return self._replace(links=cache(partial(topology._links, topology.mesh(sizes))))


def machine_of(
    hardware: Hardware | str,
    axes_over_dcn: Iterable[str] = (),
    overlap: Iterable[str] = OVERLAP,
    efficiency: float | None = None,
    *,
    is_traced: bool = True,
) -> Machine:
    """Return the machine of what a user gives; a traced step has the efficiency of the hardware."""
    device = as_hardware("hardware", hardware)
    if efficiency is None:
        efficiency = device.efficiency if is_traced else 1.0
    check_share("efficiency", efficiency)
    meanwhile = strings("overlap", overlap)
    for purpose in meanwhile:
        check_choice("overlap: one of them", purpose, get_args(Of))
    return Machine(device, strings("axes_over_dcn", axes_over_dcn), meanwhile, float(efficiency))


class Run(NamedTuple):
    """A step of so many tokens, and what else is assumed of it."""

    tokens: int
    machine: Machine
    schedule: dict[str, Any]
    """Arguments of `Plan.traffic`."""


def run_of(
    tokens: int, machine: Machine, *, schedule: Mapping[str, Any] | None, gradients: Any
) -> Run:
    """Return the run of what a user gives; `gradients` is as in `Plan.bytes_per_device`."""
    check_type("schedule", schedule, Mapping | None, "a dict of arguments of Plan.traffic")
    of_traffic = dict(schedule or {})
    names = [field.name for field in fields(Schedule) if field.name != "tokens"]
    for name in of_traffic:
        check_choice("schedule: an argument", name, tuple(names))
    if gradients not in (None, False, True):
        of_traffic.setdefault("gradients", gradients)
    return Run(integer("tokens", tokens, 1), machine, of_traffic)


@answer
class StepTime(NamedTuple):
    """Seconds of a training step on a device, and of what; from `Plan.step_time`.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((8192, 32768), "bfloat16")}}
        >>> plan = sr.plan(tree, [("kernel", "fsdp")], {"fsdp": 16})
        >>> time = plan.step_time(tokens=2**14, hardware="H100")
        >>> time.dominant, time.total == time.sent["fsdp",], f"{time.utilization:.0%}"
        ('fsdp', True, '53%')
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
    """Folded paths of kernels and states whose traffic is missing, as in `Traffic.uncounted`."""
    assumptions: dict[str, Any]
    """The arguments of `Plan.step_time`, those by default included; "guessed" as in `Traffic`."""

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
        lines = [
            f"{_range_shown(self)}: at most {self.utilization:.0%} of the peak",
            *(f"  {name:<{width}}  {seconds_shown(seconds):>8}" for name, seconds in terms.items()),
            *assumed_lines(self.assumptions, self.uncounted),
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


def time_shown(time: StepTime) -> str:
    """Return a step's time and the longest term of it: 9.90 s (fsdp)."""
    return f"{seconds_shown(time.total)} ({time.dominant})"


def assumed_lines(assumptions: Mapping[str, Any], uncounted: Iterable[str]) -> list[str]:
    """Return the assumptions in a line, and what is not counted in another.

    None of what there is not.
    """
    texts = ", ".join(
        f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in assumptions.items()
        if value not in ((), None) and name != "guessed"
    )
    missing: dict[str, list[str]] = defaultdict(list)
    for path in uncounted:
        missing[why_uncounted(path)].append(path)
    return [
        *([f"assumed: {texts}"] if texts else []),
        *guesses_shown(assumptions.get("guessed", {})),
        *(f"not counted, since {why}: {', '.join(paths)}" for why, paths in missing.items()),
    ]


def step_time(
    columns: Columns, run: Run, device_bytes: DeviceBytes, state: Columns | None = None
) -> StepTime:
    """See `Plan.step_time`."""
    machine, hardware = run.machine, run.machine.hardware
    assumed = {"batch_axes": None, "roles": None, **run.schedule}
    schedule = schedule_of(columns.axis_sizes, tokens=run.tokens, **assumed)
    dtype = str(given_dtype("activations", schedule.activations))
    work, peak = flops(columns, schedule), _peak_rate(hardware, dtype)
    compute = work.per_device / (peak * machine.efficiency)
    moved = _memory_bytes(columns, schedule, device_bytes, bits_of(dtype))
    memory = moved / hardware.memory_bytes_per_second
    collectives = traffic(columns, schedule)
    sent, alone = sent_seconds(machine, columns.axis_sizes, collectives)
    total = max(compute, memory, sum(sent.values()) - alone) + alone
    return StepTime(
        total=total,
        best=max(compute * machine.efficiency, memory, sum(sent.values()) - alone) + alone,
        compute=compute,
        memory=memory,
        sent=sent,
        alone=alone,
        utilization=work.total / (columns.devices * peak * total) if total else 0.0,
        uncounted=collectives.uncounted
        if state is None
        else (*collectives.uncounted, *of_muon(state, range(len(state.paths)))),
        assumptions=machine.assumptions() | collectives.assumptions,
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
        alone += 0.0 if row.of in machine.overlap else seconds
    return dict(sent), alone


def _peak_rate(hardware: Hardware, dtype: str) -> float:
    peak = hardware.flops_per_second.get(dtype)
    if peak is None:
        raise ValueError(
            f"{hardware.name} has no figure for products in {dtype}; it has some for "
            f"{', '.join(hardware.flops_per_second)}: give one of these as the dtype of activations"
        )
    return peak


def _memory_bytes(
    columns: Columns, schedule: Schedule, device_bytes: DeviceBytes, bits: int
) -> float:
    """Bytes that a device reads and writes: of all products, and of the optimizer's update."""
    moved = 0.0
    for use in kernel_uses(cut_parts(columns, schedule), schedule):
        cut, part = use.cut, use.cut.part
        kernels = cut.bytes(bits) * cut.devices(cut.gathered) * schedule.accumulate
        # Of a table that tokens look up, they read their rows alone.
        kernels = 0 if "lookup" in part.dims else kernels
        moved += kernels + float(use.tokens) * use.arrays * _stream_width(cut) * bits / 8
    updated = (
        int(device_bytes.params.max())
        + int(device_bytes.gradients.max())
        + int(device_bytes.optimizer.max())
    )
    return _PRODUCTS * moved + _UPDATED * updated


def _stream_width(cut: CutPart) -> float:
    """Elements of a kernel's input and output for each token, on a device."""
    part = cut.part
    sides: list[DimRole] = [role for role in set(part.dims) if role in ("in", "out")]
    # Of two dimensions of which it is not known which is which, one is the input, one the output.
    unknown = (
        size / cut.devices(axis for axis in axes if axis in cut.kept)
        for size, role, axes in zip(part.shape, part.dims, cut.dims, strict=True)
        if role == "unknown"
    )
    return sum(part.size(side) / cut.devices(cut.along(side)) for side in sides) + sum(unknown)
