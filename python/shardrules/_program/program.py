"""Reads a compiled program whole: what it sends, why, and the memory it needs: `inspect`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from shardrules._base.arguments import check_file, check_type
from shardrules._base.io import write_text
from shardrules._base.mistakes import in_order
from shardrules._base.text import answer, bytes_shown, mesh_shown, printable
from shardrules._place.mesh import AnyMesh, has_devices
from shardrules._plan.answers import Column, Section, Table
from shardrules._plan.findings import Findings
from shardrules._plan.lock import content_of
from shardrules._plan.report import Page
from shardrules._program.causes import REASONS
from shardrules._program.context import Context
from shardrules._program.executable import Executable, State, states
from shardrules._program.facts import PRODUCTS
from shardrules._program.hlo import Collective, Exchange, Hlo, hlo_errors
from shardrules._program.inputs import PlannedSharding, planned_targets
from shardrules._program.libraries import call_of
from shardrules._program.lock import Costs, compared, costs_of, program_lock_text, read_program_lock
from shardrules._program.memory import Memory, Totals, memory_of, totals_of
from shardrules._program.reasons import Row, rows
from shardrules._program.topologies.topology import Topology
from shardrules._program.topologies.tpu import Slices
from shardrules._program.work import (
    Product,
    ProgramTime,
    flops_of_kernels,
    products,
    program_time,
)

_ANSWERS: Final = (
    "_costs", "axis_sizes", "batch_axes", "collectives", "memory", "products", "totals",
)  # fmt: skip
_ROWS_SHOWN: Final = 20
_COLUMNS: Final = (
    Column("sent", is_right=True),
    Column("times", is_right=True),
    Column("collective"),
    Column("over"),
    Column("array"),
    Column("moves"),
    Column("why"),
    Column("line"),
)


@answer
class Program:
    """Report about a compiled function: collectives, what they move, and memory.

    `inspect` makes it. Nothing is read before it is asked for.
    """

    def __init__(
        self, executable: Executable, carried: Sequence[State], batches: Sequence[int]
    ) -> None:
        self._executable = executable
        self._carried = carried
        self._batches = batches

    def __getstate__(self) -> dict[str, Any]:
        # An executable cannot be copied.
        return {name: getattr(self, name) for name in _ANSWERS}

    @property
    def mesh(self) -> AnyMesh | None:
        """Mesh of the arguments and results; None if none of them has one."""
        return self._executable.mesh

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Devices along each mesh axis; empty if no argument or result has a mesh."""
        mesh = self._executable.mesh
        return {} if mesh is None else dict(mesh.shape)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Arrays that the program moves between devices, those with most bytes first."""
        with hlo_errors():
            collectives = [self._collective(*pair) for pair in self._exchanged]
        return tuple(sorted(collectives, key=lambda row: -(row.sent or row.sent_once)))

    @cached_property
    def _exchanged(self) -> Sequence[tuple[Exchange, Row | None]]:
        """What is moved, and why, in the order of the text; None where no mesh is known."""
        with hlo_errors():
            exchanges = list(self._executable.hlo.exchanges(self.axis_sizes))
            if self._context is None:
                return [(exchange, None) for exchange in exchanges]
            return list(zip(exchanges, rows(self._context, exchanges), strict=True))

    @cached_property
    def _context(self) -> Context | None:
        if self._executable.mesh is None:
            return None
        return Context(self._executable, self._carried, self._batches)

    @cached_property
    def batch_axes(self) -> frozenset[str]:
        """Mesh axes that shard the batch, as the program has it."""
        _ = self.collectives  # those that sum gradients
        return frozenset() if self._context is None else self._context.batch_axes

    @cached_property
    def totals(self) -> Totals | None:
        """XLA's numbers of bytes; None if the backend does not tell."""
        return totals_of(self._executable.call.compiled)

    @cached_property
    def memory(self) -> Memory | None:
        """Memory that a device needs, and the largest arrays; None if the backend does not tell."""
        return None if self.totals is None else memory_of(self._executable, self.totals)

    @cached_property
    def products(self) -> Sequence[Product]:
        """Matrix products and convolutions that a device computes."""
        context, hlo = self._context, self._executable.hlo
        if context is None or not any(hlo.has(f" {opcode}(") for opcode in PRODUCTS):
            return ()
        with hlo_errors():
            variation = context.executable.variation
            return list(products(context.values, variation, context.leaves_of_product))

    def _collective(self, exchange: Exchange, row: Row | None) -> Collective:
        instruction = exchange.instruction
        reason = REASONS["unknown" if row is None else row.reason]
        return Collective(
            kind=exchange.kind,
            axes=exchange.axes,
            shape=str(exchange.shape),
            payload=exchange.payload,
            times=exchange.times,
            sent_once=exchange.sent_once,
            what="unexplained" if row is None else row.array_kind,
            moves=instruction.op_name or instruction.name if row is None else row.moves,
            reason=reason.text,
            is_expected=reason.is_expected,
            op_name=instruction.op_name or "",
            place=self._executable.hlo.place(instruction),
            name=instruction.name,
        )

    @cached_property
    def sent(self) -> Mapping[tuple[tuple[str, ...], str], int]:
        """Bytes that one device sends in a step by (mesh axes, kind of collective).

        What runs in a loop of unknown trip count is counted once; `is_per_iteration` says so.
        """
        sums: defaultdict[tuple[tuple[str, ...], str], int] = defaultdict(int)
        for row in self.collectives:
            sums[row.axes, row.kind] += row.sent_at_least
        return dict(sums)

    @property
    def is_per_iteration(self) -> bool:
        """True if a collective runs in a loop whose trip count is not known."""
        return any(row.times is None for row in self.collectives)

    @cached_property
    def _costs(self) -> Costs:
        return costs_of(self._executable, self.collectives)

    def lock(self, path: str | Path | None = None) -> str:
        """Write what the program costs as a text for version control: JSON, a line for each sum.

        It has the bytes that a device sends by mesh axes and kind, the peak, and versions.

        Args:
            path: A file to write it to as well.

        Example:
            >>> import jax, shardrules as sr
            >>> step = jax.jit(lambda x: x * 2)
            >>> compiled = step.lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile()
            >>> program = sr.inspect(compiled, (None,))
            >>> program.diff(program.lock())
            nothing found: 0 sums of bytes and the peak compared with the lock
        """
        check_file("path", path)
        text = program_lock_text(self._costs)
        if path is not None:
            write_text(path, text)
        return text

    def diff(self, other: Program | str | Path, *, tolerance: float = 0.02) -> Findings:
        """Find what the program sends or needs beyond an earlier one: a line for a test.

        Growth is an error, for `raise_for`; shrinkage an info, as the lock should be made again.

        Args:
            other: The earlier program, its lock's text, or the path of its lock.
            tolerance: Growth, as a share, that is accepted for each sum and the peak.

        Raises:
            FileError: It is not a lock; a ValueError.
        """
        check_type(
            "other", other, Program | str | os.PathLike,
            "a Program, a lock's text, or the path of its file",
        )  # fmt: skip
        if isinstance(other, Program):
            before, name = other._costs, "the program"
        else:
            data, name = content_of(other, "Program.lock")
            before = read_program_lock(data, name)
        return compared(self._costs, before, self.collectives, tolerance, name)

    def to_json(self) -> dict[str, Any]:
        """Return the report as `json.dumps` takes it."""
        rows = [
            row._asdict() | {"sent": row.sent, "place": row.place and str(row.place)}
            for row in self.collectives
        ]
        memory = self.memory and self.memory.to_json()
        return {"mesh": self.axis_sizes, "collectives": rows, "memory": memory}

    def _section(self, page: Page) -> Section:
        if self.axis_sizes != page.plan.axis_sizes:
            raise ValueError(
                f"program: it is for {mesh_shown(self.axis_sizes)}, the plan for "
                f"{mesh_shown(page.plan.axis_sizes)}: inspect a step that is compiled for this mesh"
            )
        return Section("Compiled program", (self,))

    def _parts(self) -> list[Table | str]:
        parts: list[Table | str] = [printable(self._summary())]
        if self.collectives:
            parts.append(Table(_COLUMNS, map(_collective_cells, self.collectives[:_ROWS_SHOWN])))
        rest = len(self.collectives) - _ROWS_SHOWN
        if rest > 0:
            parts.append(f"and {rest} more")
        return parts if self.memory is None else [*parts, *self.memory._parts()]

    def _summary(self) -> str:
        total = sum(self.sent.values())
        unexpected = [row for row in self.collectives if not row.is_expected]
        lost = sum(row.sent or row.sent_once for row in unexpected)
        most = "at least " if self.is_per_iteration else ""
        mesh = mesh_shown(self.axis_sizes)
        text = f"each device sends {most}{bytes_shown(total)} in a step on {mesh}"
        if unexpected:
            text += f"; {bytes_shown(lost)} of it does not follow from the plan"
        return text


def batches(targets: Sequence[PlannedSharding | None], carried: Sequence[State]) -> list[int]:
    """List the leaves of the inputs that are neither states nor planned by a plan."""
    rest = [leaf for leaf, x in enumerate(targets) if x is None or not x.is_of_plan]
    of_states = {leaf for state in carried for leaf in state.inputs} if rest else ()
    return [leaf for leaf in rest if leaf not in of_states]


def time_of(topology: Topology, program: Program, text: str) -> ProgramTime | None:
    """Bound the seconds of a step: by the cycles in the text of its code, or by FLOPs without any.

    None without TPUs, whose links and clock are known.
    """
    mesh, layout = program.mesh, topology._layout
    if mesh is None or not has_devices(mesh) or not isinstance(layout, Slices):
        return None
    rows = [row for row in program.collectives if row.axes]
    sending = sum(row.sent_at_least / topology._links(mesh, row.axes).rate for row in rows)
    peak = topology.hardware.flops_per_second["bfloat16"]
    with hlo_errors():
        by_cycles = text and program_time(Hlo(text), sending, layout.kind.clock, peak)
    flops = sum(product.flops for product in program.products)
    flops += flops_of_kernels(program._executable.hlo)
    return by_cycles or ProgramTime(flops / peak, sending, is_roofline=True)


def _collective_cells(row: Collective) -> Sequence[str]:
    return (
        bytes_shown(row.sent_at_least),
        "per iteration" if row.times is None else f"{row.times:,}",
        row.kind,
        ", ".join(row.axes) or "?",
        row.shape,
        row.moves,
        row.reason,
        "" if row.place is None else str(row.place),
    )


@in_order("compiled", "plan")
def inspect(compiled: Any, inputs: Any, outputs: Any = None) -> Program:
    """Read what a compiled function sends between devices, what that moves, and why.

    Nothing is run. This is what `verify` and `prove` are made of, which have the findings as well.

    Args:
        compiled: `jax.jit(f).lower(...).compile()`, or the same of `flax.nnx.jit` or
            `equinox.filter_jit`.
        inputs: A tuple with an entry for each positional argument, as `verify` takes it.
        outputs: The same for what the function returns. Default: nothing is planned for it.

    Returns:
        A `Program`: its collectives, their bytes by mesh axis and kind, and its memory.

    Raises:
        TypeError: It is not a compiled function, or something else is planned.
        ValueError: A plan does not fit its argument or the mesh, or the text is no HLO.

    Example:
        >>> import jax, shardrules as sr
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> plan = sr.plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, [("w", "fsdp")], mesh)
        >>> step = jax.jit(lambda params, x: x @ params["w"])
        >>> x = jax.ShapeDtypeStruct((4, 8), "float32")
        >>> program = sr.inspect(step.lower(plan.abstract(), x).compile(), (plan, None))
        >>> program.sent
        {}
        >>> program.memory.buffers[0].what
        'inputs/0/w'
    """
    executable = Executable(call_of(compiled, inputs))
    targets, _ = planned_targets(executable, inputs, outputs)
    carried = states(executable, inputs, outputs)
    return Program(executable, carried, batches(targets, carried))
