"""Asks the compiler what it makes of a step for its devices, and compares it with the plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cache
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeVar

from jax import tree_util
from jax.stages import Compiled

from shardrules._base.arguments import byte_size, check_type, memory_bytes
from shardrules._base.text import answer, bytes_shown, mesh_shown
from shardrules._place.mesh import AnyMesh, has_devices
from shardrules._plan.answers import Table
from shardrules._plan.findings import Findings, Level
from shardrules._plan.kinds import DEFAULT_LARGE
from shardrules._plan.plan import Plan
from shardrules._program.compiler import CompilerChild, compile_or_read, has_child, is_of_cpus
from shardrules._program.hlo import Collective
from shardrules._program.lowering import (
    On,
    check_step,
    is_unplaced,
    lowered_on,
    mesh_of,
    target_mesh,
)
from shardrules._program.memory import Memory
from shardrules._program.program import Program, time_of
from shardrules._program.topologies.topology import (
    Topology,
    memory_limit,
    topology_of,
    topology_shown,
)
from shardrules._program.verify.verify import findings_and_program, limits_of
from shardrules._program.work import ProgramTime

BY_CPU: Final = " by XLA for CPU: a TPU's partitioner may choose otherwise"
_NO_TIME: Final = "no time: clocks and links are known of the TPUs of a Topology alone"


@answer
class Proof(NamedTuple):
    """What a step does on the devices that the compiler is asked for: `prove` makes it."""

    target: str
    """The devices, and their mesh."""
    findings: Findings
    """Where the program differs from the plan, and what that costs."""
    program: Program
    """All that it sends, and its memory."""
    room: int | None
    """Bytes of memory that a device has for it; None if nothing says."""
    seconds: float
    """Time that the compiler took, or the cache that had its code."""
    time: ProgramTime | None
    """Of a step: with `time=True` by the compiler's cycles; else a roofline. None without described
    TPUs, whose links and clock are known."""
    notes: tuple[str, ...] = ()
    """Where the program is perhaps not quite the one that will run."""
    compiled: Compiled | None = None
    """With `time=True` what JAX has compiled; None in a copy, and if the cache had its code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self._replace(compiled=None))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Arrays that the program moves between devices, those with most bytes first."""
        return self.program.collectives

    @property
    def memory(self) -> Memory | None:
        """Memory that a device needs, as the compiler assigns it, and the largest arrays."""
        return self.program.memory

    @property
    def fits(self) -> bool | None:
        """True if a device has the memory; None if it is not known what either is."""
        memory = self.memory
        if memory is None or self.room is None:
            return None
        return memory.peak <= self.room

    def to_json(self) -> dict[str, Any]:
        """Return the devices, the findings and the program as `json.dumps` takes them."""
        return {
            "target": self.target,
            "fits": self.fits,
            "room": self.room,
            "seconds": self.seconds,
            "notes": list(self.notes),
            "findings": [finding._asdict() for finding in self.findings],
            "program": self.program.to_json(),
            "time": self.time and self.time.to_json(),
        }

    def raise_for(self, level: Level = "error") -> None:
        """Raise `FindingsError` if a finding has at least this level."""
        self.findings.raise_for(level)

    def _parts(self) -> list[Table | str]:
        parts = [*self.findings._parts(), *self.program._parts()]
        return [head_of(self), *self.notes, *parts, time_shown(self)]


def time_shown(proof: Proof) -> str:
    """Say how long a step takes, or why nobody knows."""
    return _NO_TIME if proof.time is None else str(proof.time)


def head_of(proof: Proof) -> str:
    """Say whether a step fits, for what devices that is said, and how long the answer took."""
    text, memory = "it is not known whether it fits", proof.memory
    if memory is not None:
        need = bytes_shown(memory.peak)
        text = f"it needs {need} on each device"
        if proof.room is not None:
            fits = "it fits" if proof.fits else "it does not fit"
            text = f"{fits}: {need} of {bytes_shown(proof.room)}"
    return f"{text}, {proof.target}, in {proof.seconds:.1f} s"


def prove(
    step: Any,
    *args: Any,
    on: On | None = None,
    inputs: Sequence[Any] | None = None,
    outputs: Any = None,
    hbm: float | str | None = None,
    large: float | str = DEFAULT_LARGE,
    budget: Mapping[str, int | str] | None = None,
    time: bool = False,
) -> Proof:
    """Ask the compiler what it makes of a step for its devices, which need not be there.

    The compiler runs in a child process, which ends before code is generated: what is sent, and the
    memory, are known then, and are those of the finished program. Nothing is run. The findings are
    those of `verify`.

    | you have | it looks |
    |---|---|
    | rules, and a tree of shapes | `plan.check()` |
    | a step, as a function | `sr.prove(step, plan, batch, on=...)` |
    | an executable that you compiled | `sr.verify(compiled, (plan, None), plan)` |
    | live arrays | `sr.audit(params, plan)` |
    | a small step, and this machine | `sr.rehearse(step_on, {"fsdp": 4, "tp": 2})` |

    Args:
        step: A function, or what `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit` makes of one;
            give the jitted one for donation and `out_shardings`.
        *args: Its arguments: arrays, ShapeDtypeStructs with shardings, or a Plan in the place of
            the tree that it plans, which is planned for that argument. What has no sharding is on
            all devices.
        on: The devices. A Topology or its name: the mesh is `Topology.mesh` of the axes of the
            arguments' mesh. A mesh. Or a dict of sizes, such as {"fsdp": 64, "tp": 8}: XLA for CPU
            is asked, with as many host devices; a TPU's partitioner may choose otherwise. Default:
            the arguments' own devices.
        inputs: As `verify` takes it. Default: the plans among the arguments.
        outputs: The same.
        hbm: As `verify` takes it. Default: of a Topology that of its hardware,
            of GPUs that are there what JAX may allocate; else it is not asked.
        large: As `verify` takes it.
        budget: As `verify` takes it.
        time: True compiles the step to its end, as it will run, which takes minutes for a large
            one, and adds the compiler's cycles and `compiled`. For a Topology the result is kept in
            `~/.cache/shardrules`, or in the folder that the environment variable SHARDRULES_CACHE
            names, "off" for none.

    Returns:
        A `Proof`: whether it fits, the findings, the program, and its time.

    Raises:
        OutOfMemory: The compiler for TPUs refuses the step, as it does not fit.
        ImportError: The compiler is not installed, as for `Topology`.
        RuntimeError: The compiler refuses the step for another reason, or crashes.
        TimeoutError: The compiler hangs.
        TypeError: The step is no function.
        ValueError: Nothing says what mesh the arguments are on; the step names another mesh; it
            cannot be lowered; or a plan stands for the constants of a step of
            `equinox.filter_jit`.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
        >>> plan = sr.plan(tree, [("w", "fsdp")], {"fsdp": 4})
        >>> step = jax.jit(lambda params: {"w": params["w"] * 2}, donate_argnums=0)
        >>> proof = sr.prove(step, plan, on={"fsdp": 4}, outputs=plan)
        >>> proof.raise_for("warning")
        >>> proof.memory.totals.arguments
        64
    """
    check_type("time", time, bool, "True or False")
    return AskedProof(
        step, args, on=on, inputs=inputs, outputs=outputs, hbm=hbm, large=large, budget=budget,
        needs_code=time,
    ).proof()  # fmt: skip


class AskedProof:
    """A step that is lowered, and which a compiler is at work on; `proof` waits for it.

    Several may be asked at once, as `sweep` does. Nothing is left of the compiler behind `proof`,
    or `close`.
    """

    def __init__(
        self,
        step: Any,
        args: tuple[Any, ...],
        *,
        on: On | None,
        inputs: Sequence[Any] | None = None,
        outputs: Any = None,
        hbm: float | str | None = None,
        large: float | str = DEFAULT_LARGE,
        budget: Mapping[str, int | str] | None = None,
        needs_code: bool = False,
    ) -> None:
        check_step(step, args)
        self._needs_code = needs_code
        self._room = None if hbm is None else memory_bytes("hbm", hbm)
        if inputs is None:
            inputs = tuple(arg if isinstance(arg, Plan) else None for arg in args)
        mesh = None if on is None else target_mesh(on, args)
        self._mesh: Any = mesh_of(args) if mesh is None else mesh
        if needs_code and self._mesh is not None and not has_devices(self._mesh):
            raise ValueError(
                "time=True compiles for devices: give on= a Topology, or a mesh of devices"
            )
        limits_of({} if budget is None else budget, self._mesh)
        self._planned = (inputs, outputs) if mesh is None else _planned_on(mesh, (inputs, outputs))
        self._large, self._budget = byte_size("large", large), budget
        self._unplaced = [list(map(is_unplaced, tree_util.tree_leaves(arg))) for arg in args]
        self._lowered, self._notes = lowered_on(mesh, step, args)
        self._begin = perf_counter()
        self._compiler: CompilerChild | None = None
        if has_child(self._mesh):
            self._compiler = CompilerChild(self._lowered, self._mesh)

    def close(self) -> None:
        """End the compiler."""
        if self._compiler is not None:
            self._compiler.close()

    def proof(self) -> Proof:
        """Wait for the compiler, and compare what it makes with what is planned, as `prove`."""
        mesh, topology = self._mesh, topology_of(self._mesh)
        answer = None if self._compiler is None else self._compiler.answer()
        text, compiled, begin = "", None, self._begin
        has_code = self._needs_code or answer is None
        if has_code:
            begin = perf_counter()
            text, compiled = compile_or_read(self._lowered, mesh)
        seconds = perf_counter() - begin
        room = self._room
        if room is None and mesh is not None and has_devices(mesh):
            room = memory_limit(mesh)
        content, warnings = (compiled, "") if answer is None else answer
        findings, program = findings_and_program(
            content, *self._planned, hbm=room, large=self._large, budget=self._budget,
            unplaced=self._unplaced, log=warnings,
        )  # fmt: skip
        return Proof(
            target=_target_shown(mesh or program.mesh, topology),
            findings=findings,
            program=program,
            room=room,
            seconds=seconds,
            time=None if topology is None else time_of(topology, program, text),
            notes=self._notes,
            compiled=compiled,
        )


_Case = TypeVar("_Case")
_Row = TypeVar("_Row")
_AT_ONCE: Final = 2
"""Compilers at once, each of several threads for a while: the next step is lowered meanwhile."""


def asked_in_order(
    cases: Iterable[_Case], ask: Callable[[_Case], tuple[_Row, AskedProof | None]]
) -> Generator[tuple[_Row, AskedProof | None], None, None]:
    """Yield what is asked about each case, while the compiler of the next is at work."""
    queue: deque[tuple[_Row, AskedProof | None]] = deque()
    try:
        for case in cases:
            queue.append(ask(case))
            if len(queue) == _AT_ONCE:
                yield queue[0]
                queue.popleft()
        while queue:
            yield queue[0]
            queue.popleft()
    finally:
        for _, proof in queue:
            if proof is not None:
                proof.close()


def _planned_on(mesh: AnyMesh, planned: Any) -> Any:
    """Return what is planned, with plans for the mesh in the place of those for its axes."""
    on_mesh = cache(lambda plan: plan.on_mesh(mesh))  # the plan of a state is one on both sides
    return tree_util.tree_map(
        lambda leaf: on_mesh(leaf) if isinstance(leaf, Plan) else leaf, planned
    )


def _target_shown(mesh: AnyMesh | None, topology: Topology | None) -> str:
    """Name the devices of a mesh, how its axes lie, and whose compiler was asked."""
    if mesh is None:
        return f"on one device{BY_CPU * is_of_cpus(mesh)}"
    sizes = mesh_shown(mesh.shape)
    if topology is not None:
        links = ", ".join(f"{axis}: {link}" for axis, link in topology.links(mesh).items())  # type: ignore[arg-type]
        return f"on {topology_shown(topology)}, {sizes} ({links})"
    if not is_of_cpus(mesh):
        devices: Any = mesh.devices
        return f"on {devices.flat[0].device_kind}, {sizes}"
    return f"on {sizes}{BY_CPU}"
