"""How long a training step takes on hardware, as one reckons it on paper: a roofline.

Costs what traffic costs, and a few numbers. Must not know how leaves are placed, nor how anything
is drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

from shardrules._arguments import check_choice, check_real, check_type, integer, texts
from shardrules._display import answer
from shardrules._dtypes import bits_of, given_dtype
from shardrules._format import seconds_shown, shown
from shardrules._hardware import Hardware, as_hardware
from shardrules._planning.asking.collectives.cuts import cut_parts
from shardrules._planning.asking.collectives.schedule import Schedule, schedule_of
from shardrules._planning.asking.collectives.sent import Of
from shardrules._planning.asking.collectives.uses import uses_of
from shardrules._planning.asking.flops import flops
from shardrules._planning.asking.network import Network
from shardrules._planning.asking.traffic import of_muon, traffic, why_uncounted
from shardrules._printable import printable

if TYPE_CHECKING:
    from shardrules._planning.asking.budget import DeviceBytes
    from shardrules._planning.asking.collectives.cuts import CutPart
    from shardrules._planning.columns import Columns
    from shardrules._planning.roles import DimRole

__all__ = ["Run", "StepTime", "assumed_lines", "run_of", "step_time", "time_shown"]

# Each of the products of a kernel (forward, and the gradients of its input and of itself) reads two
# of these three and writes the third: the kernel, its input, its output.
_PRODUCTS: Final = 3
# What the optimizer has in memory is read and written once.
_UPDATED: Final = 2


class Run(NamedTuple):
    """The arguments of `Plan.step_time`, checked; each is an assumption."""

    tokens: int
    hardware: Hardware
    axes_over_dcn: tuple[str, ...]
    overlap: tuple[str, ...]
    efficiency: float
    schedule: dict[str, Any]
    """Arguments of `Plan.traffic`."""


def run_of(
    *,
    tokens: int,
    hardware: Hardware | str,
    axes_over_dcn: Iterable[str],
    overlap: Iterable[str],
    efficiency: float,
    schedule: Mapping[str, Any] | None,
    gradients: Any,
) -> Run:
    """The run of what a user gives; `gradients` is as in `Plan.bytes_per_device`.

    Raises:
        ValueError, TypeError: An argument is wrong; the message names it.
    """
    check_real("efficiency", efficiency)
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency is {shown(efficiency)}; it must be above 0 and at most 1")
    meanwhile = texts("overlap", overlap)
    for one in meanwhile:
        check_choice("overlap: one of them", one, get_args(Of))
    check_type("schedule", schedule, Mapping | None, "a dict of arguments of Plan.traffic")
    of_traffic = dict(schedule or {})
    known = [field.name for field in fields(Schedule) if field.name != "tokens"]
    for name in of_traffic:
        check_choice("schedule: an argument", name, tuple(known))
    if gradients not in (None, False, True):
        of_traffic.setdefault("gradients", gradients)
    return Run(
        tokens=integer("tokens", tokens, 1),
        hardware=as_hardware("hardware", hardware),
        axes_over_dcn=texts("axes_over_dcn", axes_over_dcn),
        overlap=meanwhile,
        efficiency=float(efficiency),
        schedule=of_traffic,
    )


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
    """The arguments of `Plan.step_time`, those by default included."""

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
            f"{seconds_shown(self.total)} a step at best: at most "
            f"{self.utilization:.0%} of the peak",
            *(f"  {name:<{width}}  {seconds_shown(seconds):>8}" for name, seconds in terms.items()),
            *assumed_lines(self.assumptions, self.uncounted),
        ]
        return "\n".join(map(printable, lines))


def time_shown(time: StepTime) -> str:
    """A step's time and the longest term of it: 9.90 s (fsdp)."""
    return f"{seconds_shown(time.total)} ({time.dominant})"


def assumed_lines(assumptions: Mapping[str, Any], uncounted: Iterable[str]) -> list[str]:
    """The assumptions in a line, and what is not counted in another; none of what there is not."""
    shown = ", ".join(
        f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in assumptions.items()
        if value not in ((), None)
    )
    missing: dict[str, list[str]] = defaultdict(list)
    for path in uncounted:
        missing[why_uncounted(path)].append(path)
    return [
        *([f"assumed: {shown}"] if shown else []),
        *(f"not counted, since {why}: {', '.join(paths)}" for why, paths in missing.items()),
    ]


def step_time(
    columns: Columns, run: Run, held: DeviceBytes, state: Columns | None = None
) -> StepTime:
    """See `Plan.step_time`.

    Args:
        columns: Of the parameters.
        run: The arguments.
        held: The bytes of parameters, gradients and optimizer.
        state: Of the optimizer's state, if it has a plan.
    """
    hardware = run.hardware
    given = {"batch_axes": None, "roles": None, **run.schedule}
    schedule = schedule_of(columns.axis_sizes, tokens=run.tokens, **given)
    dtype = str(given_dtype("activations", schedule.activations))
    work, peak = flops(columns, schedule), _peak(hardware, dtype)
    compute = work.per_device / (peak * run.efficiency)
    moved = _memory_bytes(columns, schedule, held, bits_of(dtype))
    memory = moved / hardware.memory_bytes_per_second
    network = Network(hardware, columns.axis_sizes, run.axes_over_dcn)
    sent: dict[tuple[str, ...], float] = defaultdict(float)
    alone = 0.0
    collectives = traffic(columns, schedule)
    for row in collectives:
        seconds = network.seconds(row)
        sent[row.axes] += seconds
        alone += 0.0 if row.of in run.overlap else seconds
    total = max(compute, memory, sum(sent.values()) - alone) + alone
    return StepTime(
        total=total,
        compute=compute,
        memory=memory,
        sent=dict(sent),
        alone=alone,
        utilization=work.total / (columns.devices * peak * total) if total else 0.0,
        uncounted=collectives.uncounted
        if state is None
        else (*collectives.uncounted, *of_muon(state, range(len(state.paths)))),
        assumptions={
            "hardware": hardware.name,
            "axes_over_dcn": run.axes_over_dcn,
            "overlap": run.overlap,
            "efficiency": run.efficiency,
            **schedule.assumptions,
        },
    )


def _peak(hardware: Hardware, dtype: str) -> float:
    found = hardware.flops_per_second.get(dtype)
    if found is None:
        raise ValueError(
            f"{hardware.name} has no figure for products in {dtype}; it has some for "
            f"{', '.join(hardware.flops_per_second)}: give one of these as the dtype of activations"
        )
    return found


def _memory_bytes(columns: Columns, schedule: Schedule, held: DeviceBytes, bits: int) -> float:
    """Bytes that a device reads and writes: of all products, and of the optimizer's update."""
    moved = 0.0
    for use in uses_of(cut_parts(columns, schedule), schedule):
        cut, part = use.cut, use.cut.part
        kernels = cut.bytes(bits) * cut.devices(cut.gathered) * schedule.accumulate
        # Of a table that tokens look up, they read their rows alone.
        kernels = 0 if "lookup" in part.dims else kernels
        moved += kernels + float(use.tokens) * use.arrays * _width(cut) * bits / 8
    updated = int(held.params.max()) + int(held.gradients.max()) + int(held.optimizer.max())
    return _PRODUCTS * moved + _UPDATED * updated


def _width(cut: CutPart) -> float:
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
