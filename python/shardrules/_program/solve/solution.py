"""`solve`: the sharding of a step that takes least time, and `Solution`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.arguments import as_tuple, check_real, check_type, memory_bytes
from shardrules._base.text import answer, counted, mesh_shown, printable_lines
from shardrules._place.mesh import as_mesh
from shardrules._plan.plan import Plan
from shardrules._plan.planning import plan
from shardrules._plan.tables import Column, Table
from shardrules._program.solve.activations import spec_of_cuts
from shardrules._program.solve.choices import ClassChoice, choices, reasons
from shardrules._program.solve.machine import machine_of
from shardrules._program.solve.meshes import Best, Task, best_of
from shardrules._program.solve.proof import Provable
from shardrules._program.solve.space import STORED
from shardrules._program.step.step import Step
from shardrules._program.topologies.topology import Topology, hardware_on, topology_of

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from shardrules._base.hardware import Hardware
    from shardrules._program.buffers import Memory
    from shardrules._program.solve.machine import Machine, StepTime
    from shardrules._program.solve.spread import LaidSpread

_AXES: Final = ("fsdp", "tp")
HIDES: Final = 0.5
"""Of what could be sent while devices compute; the middle of all and nothing."""
_MESHES_SHOWN: Final = 4
_COLUMNS: Final = (Column("choice"), Column("next best"))


@answer
@dataclass(frozen=True)
class Solution(Provable):
    """The sharding of a step that takes least time of those that fit; `solve` makes it."""

    step: Step
    mesh: Any
    """The mesh, as `plan` takes it: that of `solve`, or the best of the topology."""
    plan: Plan
    """Of the parameters: the first plan among the step's arguments, or else the first argument."""
    specs: dict[str, PartitionSpec]
    """By path, such as "inputs/0/embed", the spec of each argument."""
    stored: tuple[str, ...]
    """Mesh axes that cut weights, gradients and the optimizer's state beyond `choices`."""
    choices: tuple[ClassChoice, ...]
    time: StepTime
    memory: Memory
    bound: float
    """Seconds: no choice in the space takes less."""
    reasons: tuple[str, ...]
    left_out: tuple[dict[str, int], ...]
    """Meshes that have all devices and were not tried: they split a dimension of the topology."""
    spread: LaidSpread
    """Cuts of all arrays of the step, and what is sent."""
    on: Any
    """The Topology or mesh that `solve` was given; None for the step's own."""
    machine: Machine
    """The hardware, and how well the step uses it."""
    again: partial[Solution] = field(repr=False)
    """`solve` with the same arguments, but for those that it is given."""

    def __deepcopy__(self, memo: object) -> Solution:
        return self

    def __str__(self) -> str:
        lines = [self.summary, *(f"  {_choice_shown(row)}" for row in self.choices)]
        return printable_lines([*lines, *self._left_out_lines()])

    def _left_out_lines(self) -> Iterator[str]:
        """Yield the meshes that were not tried."""
        if self.left_out:
            shown = "; ".join(map(mesh_shown, self.left_out[:_MESHES_SHOWN]))
            more = len(self.left_out) - _MESHES_SHOWN
            rest = f" and {counted(more, 'more mesh')}" if more > 0 else ""
            yield f"not tried, as they split a dimension of the slice: {shown}{rest}"

    def _parts(self) -> list[Table | str]:
        """Return what notebooks show: beside each choice what the next best costs."""
        rows = [
            (_choice_shown(row), *(str(other) for other in row.alternatives[:1] or ("",)))
            for row in self.choices
        ]
        lines = printable_lines(["constraints, by line", *map(str, self.activations)])
        return [self.summary, Table(_COLUMNS, rows), *self._left_out_lines(), lines]


def _choice_shown(row: ClassChoice) -> str:
    axes = ",".join(row.axes)
    if row.role == "stored":
        if not axes:
            return "parameters are stored as they are used"
        return f"parameters are stored over {axes} and gathered where used"
    return f"{row.role or 'no role'} {row.size:,}: {axes or 'whole'}"


def solve(
    step: Step,
    on: Any = None,
    *,
    hardware: Hardware | str | None = None,
    hbm: int | None = None,
    keep: Iterable[Any] = (),
    forbid: Iterable[Any] = (),
    time_limit: float | None = None,
) -> Solution:
    """Find the sharding of a step that takes least time of those that fit.

    Args:
        step: What `trace` read.
        on: The mesh, or a `Topology`, of which the best mesh is chosen; `Topology.mesh` makes one
            that has its links. Default: the step's mesh.
        hardware: The devices: a `Hardware` or its name. Default: that of the topology.
        hbm: Bytes of memory of a device. Default: that of the hardware.
        keep: What is not chosen: patterns, searched in paths such as "inputs/0/layers/q", of
            arguments that keep the spec with which the step was traced; or pairs of a pattern and
            a spec.
        forbid: What must not be: pairs of a role, such as "experts", and a mesh axis. Classes
            without a role have "".
        time_limit: Seconds after which the search ends with the best that it has, and its gap; so
            does an interrupt. Default: it ends when nothing can be better.

    Returns:
        A `Solution`.

    Raises:
        TypeError: There is no hardware, or the step is none.
        ValueError: Nothing fits; a pattern of `keep` is in no path; or there is no such role or
            axis.
        TimeoutError: The search was ended before it had found anything that fits.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"up": jax.ShapeDtypeStruct((512, 2048), "bfloat16")}
        >>> x = jax.ShapeDtypeStruct((8, 512), "bfloat16")
        >>> step = sr.trace(lambda params, x: x @ params["up"], tree, x)
        >>> solution = sr.solve(step, {"tp": 4}, hardware="v5p")
        >>> [*solution.specs["inputs/0/up"]], solution.gap
        ([None, 'tp'], 0.0)
    """
    check_type("step", step, Step, "a Step, as shardrules.trace gives one")
    if not step._paths:
        raise ValueError(f"{step.name}: it was traced without arrays among its arguments")
    keep = as_tuple("keep", keep, "patterns, or pairs of a pattern and a spec")
    forbid = as_tuple("forbid", forbid, "pairs of a role and a mesh axis")
    if time_limit is not None:
        check_real("time_limit", time_limit)
        if not time_limit >= 0:
            raise ValueError(f"time_limit is {time_limit}; it must be a number of seconds from 0")
    if on is not None and not isinstance(on, Topology):
        as_mesh(on, "on")
    if on is None and step.mesh is None:
        raise TypeError("on: the step was traced without a mesh; give one, or a Topology")
    topology = on if isinstance(on, Topology) else topology_of(step.mesh if on is None else on)
    hardware = hardware_on(topology, hardware)
    if isinstance(on, Topology):
        axes = _AXES if step.mesh is None else tuple(step.mesh.shape)
        meshes: list[Any] = list(on.meshes(axes))
        left_out = tuple(on._other_meshes(axes))
    else:
        left_out = ()
        meshes = [step.mesh if on is None else on]
    if hardware is None:
        raise TypeError("hardware: give the devices, such as 'v5p', or on=Topology('v5p:8x8x8')")
    machine = machine_of(hardware)._replace(hides=HIDES)
    room = machine.hardware.memory_bytes if hbm is None else memory_bytes("hbm", hbm)
    until = inf if time_limit is None else monotonic() + time_limit
    task = Task(step, machine, room, keep, forbid, until)
    options: dict[str, Any] = {
        "hardware": hardware,
        "hbm": hbm,
        "keep": keep,
        "forbid": forbid,
        "time_limit": time_limit,
    }
    again = partial(solve, step, on, **options)
    place = on if topology is None else topology
    return _solution(best_of(task, meshes, place), place, left_out, again)


def _solution(
    best: Best, on: Any, left_out: tuple[dict[str, int], ...], again: partial[Solution]
) -> Solution:
    space, cost = best.search.space, best.cost
    step, mesh = space.step, best.case.mesh
    specs = {
        path: spec_of_cuts(cost.spread.target(number))
        for path, number in zip(step._paths, step._equations.body.inputs, strict=True)
    }
    rows = tuple(choices(best))
    return Solution(
        step=step,
        mesh=mesh,
        plan=_planned(step, specs, mesh),
        specs=specs,
        stored=best.assignment.get(STORED, ()),
        choices=rows,
        time=cost.time,
        memory=cost.memory,
        bound=best.bound,
        reasons=tuple(reasons(best, rows)),
        left_out=left_out,
        spread=cost.spread,
        on=on,
        machine=space.machine,
        again=again,
    )


def _planned(step: Step, specs: Mapping[str, PartitionSpec], mesh: Any) -> Plan:
    """Return the plan of the parameters under specs by path."""
    from jax import tree_util

    place = step._place
    tree = step._args[place]
    tree = tree.abstract() if isinstance(tree, Plan) else tree
    structure: Any = tree_util.tree_structure(tree)
    rows = [specs[step._paths[row]] for row in step._ranges[place]]
    return plan(tree, structure.unflatten(rows), mesh)
