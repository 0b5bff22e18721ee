"""Compiles a step for devices that need not be there, and compares it with the plan: `prove`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from jax import tree_util
from jax.sharding import Mesh
from jax.stages import Compiled

from shardrules._base.text import answer, mesh_shown
from shardrules._plan.findings import Findings, Level
from shardrules._plan.plan import Plan
from shardrules._plan.table import DEFAULT_LARGE
from shardrules._plan.tables import Table
from shardrules._program.buffers import Memory
from shardrules._program.cache import cached_result
from shardrules._program.collectives import Collective
from shardrules._program.compile import (
    OF_FAST,
    Effort,
    Refusal,
    check_step,
    check_timeout,
    is_unplaced,
    lowered_on,
    mesh_of,
    options_for,
    result_of,
    target_mesh,
)
from shardrules._program.dump import XlaDump
from shardrules._program.program import Program, time_on
from shardrules._program.step_seconds import ProgramTime
from shardrules._program.topologies.topology import Topology, memory_limit, topology_shown
from shardrules._program.verify.verify import findings_and_program


@answer
class Proof(NamedTuple):
    """What a step does on the devices that it is compiled for: `prove` makes it."""

    target: str
    """The devices, and their mesh."""
    findings: Findings
    """Where the program differs from the plan, and what that costs."""
    program: Program
    """All that it sends, and its memory."""
    compiled: Compiled | None
    """What JAX has compiled; None in a copy, and of the cache: `compile` always compiles."""
    seconds: float
    """Time to compile it, now or when the cache got it."""
    time: ProgramTime | None
    """Estimate of a step's time; None without a Topology, and for GPUs, whose compiler tells no
    cycles."""
    is_cached: bool = False
    """True if it was compiled before, and the cache has it."""
    is_cut: bool = False
    """True if the time limit came before the end of code generation: there is no time then, and
    `program` is that before it, with the memory of its arrays alone."""
    effort: Effort = "full"
    """As it is compiled: by "fast" its memory is only near that of the program that will run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self._replace(compiled=None))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Arrays that the program moves between devices, those with most bytes first."""
        return self.program.collectives

    @property
    def memory(self) -> Memory | None:
        """Memory that a device needs, and the largest arrays."""
        return self.program.memory

    def to_json(self) -> dict[str, Any]:
        """Return the devices, the findings and the program as `json.dumps` takes them."""
        return {
            "target": self.target,
            "seconds": self.seconds,
            "is_cached": self.is_cached,
            "is_cut": self.is_cut,
            "effort": self.effort,
            "findings": [finding._asdict() for finding in self.findings],
            "program": self.program.to_json(),
            "time": self.time and self.time.to_json(),
        }

    def raise_for(self, level: Level = "error") -> None:
        """Raise `FindingsError` if a finding has at least this level."""
        self.findings.raise_for(level)

    def _parts(self) -> list[Table | str]:
        time = [] if self.time is None else [str(self.time)]
        parts = [*self.findings._parts(), *self.program._parts(), *notes_of(self), *time]
        return [head_of(self), *parts]


def notes_of(proof: Proof) -> list[str]:
    """Say whether the program is not quite the one that will run."""
    return [OF_FAST] if proof.effort == "fast" else []


def head_of(proof: Proof) -> str:
    """Say for what a step is compiled, and how long that took."""
    if proof.is_cut:
        return f"for {proof.target}; no times: code generation did not end in {proof.seconds:g} s"
    head = f"compiled for {proof.target} in {proof.seconds:.1f} s"
    return f"{head}, earlier: it is in the cache" if proof.is_cached else head


def prove(
    step: Any,
    *args: Any,
    on: Topology | Mesh | None = None,
    inputs: Sequence[Any] | None = None,
    outputs: Any = None,
    hbm: float | str | None = None,
    large: int = DEFAULT_LARGE,
    budget: Mapping[str, int | str] | None = None,
    effort: Effort = "full",
    timeout: float | None = None,
) -> Proof:
    """Compile a step for its devices, which need not be there, and compare it with the plan.

    This looks at a step; `Plan.check` looks at rules, `verify` at an executable, `audit` at live
    arrays. It is `compile`, then `verify` and `inspect`. What is compiled for a Topology is kept in
    `~/.cache/shardrules`, or in the folder that the environment variable SHARDRULES_CACHE names,
    "off" for none: the same step is not compiled twice.

    Args:
        step: As `compile` takes it.
        *args: The same; a Plan stands for its tree, and is planned for that argument.
        on: The devices, as `compile` takes them; a plan for a mesh without devices, such as
            {"fsdp": 64, "tp": 8}, is one for a mesh of them with these axes.
        inputs: As `verify` takes it. Default: the plans among the arguments.
        outputs: The same.
        hbm: As `verify` takes it. Default: for GPUs, whose compiler refuses nothing, the memory of
            described hardware, or what JAX may allocate; else it is not asked: what does not fit,
            the TPU's compiler refuses by its own count, which `memory_analysis` exceeds at times.
        large: As `verify` takes it.
        budget: As `verify` takes it.
        effort: As `compile` takes it.
        timeout: The same. For a TPU, generating code takes most of the time: what is known before
            it, all but the time, is a `Proof`, too, whose `is_cut` is true.

    Returns:
        A `Proof`: the findings, the program, and what was compiled.

    Raises:
        OutOfMemory: The compiler refuses the step, as it does not fit.
        ImportError: The compiler is not installed, as for `Topology`.
        TimeoutError: The limit came before the memory was known.
        ValueError: As `compile` and `verify`.

    Example:
        >>> import jax, shardrules as sr
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> plan = sr.plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, [("w", "fsdp")], mesh)
        >>> step = jax.jit(lambda params: {"w": params["w"] * 2}, donate_argnums=0)
        >>> proof = sr.prove(step, plan, on=mesh, outputs=plan)
        >>> proof.raise_for("warning")
    """
    check_step(step, args, effort)
    mesh = None if on is None else target_mesh(on, args)
    check_timeout(timeout)
    with options_for(mesh, effort):
        lowered = lowered_on(mesh, step, args)
        result = cached_result(lowered, mesh, partial(result_of, timeout=timeout))
    content = result.content
    if isinstance(content, Refusal):
        raise content.error(effort)
    dump = content if isinstance(content, XlaDump) else None
    compiled = cast("Any", content) if dump is None else dump.program(lowered, mesh)
    if inputs is None:
        inputs = tuple(arg if isinstance(arg, Plan) else None for arg in args)
    if mesh is not None:
        inputs, outputs = _planned_on(mesh, (inputs, outputs))
    if hbm is None and (described := mesh or mesh_of(args)) is not None:
        hbm = memory_limit(described)
    unplaced = [list(map(is_unplaced, tree_util.tree_leaves(arg))) for arg in args]
    findings, program = findings_and_program(
        compiled, inputs, outputs, hbm=hbm, large=large, budget=budget, unplaced=unplaced
    )
    target = _target_shown(on, mesh or program.mesh)
    estimate = None
    if isinstance(on, Topology) and effort == "full" and dump is None:
        estimate = time_on(on, program)
    executable = None if result.is_cached or dump else compiled
    seconds = result.seconds if dump is None else dump.seconds
    is_cut = dump is not None
    return Proof(
        target, findings, program, executable, seconds, estimate, result.is_cached, is_cut, effort
    )


def _planned_on(mesh: Mesh, planned: Any) -> Any:
    """Return what is planned, with plans for the mesh in the place of those for its axes."""
    plans: dict[int, Plan] = {}  # the plan of a state is one object on both sides

    def on_mesh(plan: Any) -> Any:
        if not isinstance(plan, Plan):
            return plan
        if id(plan) not in plans:
            plans[id(plan)] = plan.on_mesh(mesh)
        return plans[id(plan)]

    return tree_util.tree_map(on_mesh, planned, is_leaf=lambda node: isinstance(node, Plan))


def _target_shown(on: Any, mesh: Any) -> str:
    """Name the devices of a mesh, and how its axes lie."""
    if mesh is None:
        return "one device"
    sizes = mesh_shown(mesh.shape)
    if not isinstance(on, Topology):
        return f"{mesh.devices.flat[0].device_kind}, {sizes}"
    links = ", ".join(f"{axis}: {link}" for axis, link in on.links(mesh).items())
    return f"{topology_shown(on)}, {sizes} ({links})"
