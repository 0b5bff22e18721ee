"""Reads the memory that a program needs on a device: totals, the largest arrays, activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from shardrules._program.buffers import SIZES, Buffer, Memory, Totals, totals_from
from shardrules._program.computation import Computation, Instruction
from shardrules._program.executable import Executable
from shardrules._program.facts import MOVES, UPDATES
from shardrules._program.hlo import Hlo, hlo_errors
from shardrules._program.liveness import WRITTEN, Alive, alive_at_peak

_LARGEST: Final = 100
_IN_TEXT: Final = 10
_FEW_STACKS: Final = 3
_MOST_STEPS: Final = 10


def totals_of(executable: Executable) -> Totals | None:
    """Read XLA's numbers of bytes; None where the backend does not tell."""
    stats: Any = executable.call.compiled.memory_analysis()
    if stats is None:
        return None
    return totals_from([getattr(stats, name, 0) for name in SIZES])  # 0 for what JAX lacks


def memory_of(executable: Executable, totals: Totals) -> Memory:
    """Read the arrays that a program needs, beside XLA's numbers."""
    hlo = executable.hlo
    if hlo is None or not hlo.is_scheduled:
        return Memory(totals, 0, 0, False, (), ())

    def path_of(parameter: int) -> str | None:
        leaf = executable.leaf_of.get(parameter)
        return None if leaf is None else executable.inputs.paths[leaf]

    with hlo_errors():
        live = getattr(executable.call.compiled, "live", None)
        rows = live.alive(hlo) if live and live.ranges else alive_at_peak(hlo)
        saved = [row for row in rows if _is_saved(hlo, row)]
        alive, kept = (sum(row.bytes for row in some) for some in (rows, saved))
        return Memory(
            totals=totals,
            alive=min(alive, totals.peak),
            saved=min(kept, totals.peak),
            is_recomputed="/rematted_computation" in hlo.text and not _is_all_kept(hlo, saved),
            buffers=tuple(buffers_of(hlo, rows[:_LARGEST], path_of)),
            saved_buffers=tuple(buffers_of(hlo, saved[:_IN_TEXT], path_of)),
        )


def _is_all_kept(hlo: Hlo, saved: Sequence[Alive]) -> bool:
    """Say whether loops keep more than a few arrays of each trip."""
    lines = (hlo[row.computation][row.name] for row in saved)
    stacks = [
        line
        for line in lines
        if line.opcode in UPDATES or any(hlo.contains(body, WRITTEN) for body in line.callees)
    ]
    return len(stacks) > _FEW_STACKS


def _is_saved(hlo: Hlo, row: Alive) -> bool:
    """Say whether the forward pass makes an array that the backward pass reads."""
    if row.parameter is not None or row.is_output or row.last_use is None:
        return False
    maker, user = (
        _named_instruction(hlo, hlo[computation], name).op_name or ""
        for computation, name in ((row.computation, row.name), row.last_use)
    )
    return "jvp(" in maker and "transpose(" not in maker and "transpose(" in user


def buffers_of(
    hlo: Hlo, rows: Iterable[Alive], path_of: Callable[[int], str | None]
) -> Iterator[Buffer]:
    """Yield what is known of arrays that are alive; `path_of` names the module's parameters."""
    for row in rows:
        instruction = _named_instruction(hlo, hlo[row.computation], row.name)
        what = "output" if row.is_output else instruction.op_name or instruction.name
        if row.parameter is not None:
            what = path_of(row.parameter) or instruction.op_name or f"parameter {row.parameter}"
        yield Buffer(
            bytes=row.bytes,
            shape=str(row.shape),
            what=what,
            is_argument=row.parameter is not None,
            is_saved=_is_saved(hlo, row),
            place=hlo.place(instruction),
        )


def _moved(computation: Computation, line: Instruction) -> Instruction:
    """Return the instruction whose result is only moved to another's."""
    while line.opcode in MOVES:
        line = computation[line.operands[0]]
    return line


def _named_instruction(hlo: Hlo, computation: Computation, name: str) -> Instruction:
    """Return the instruction that makes an array, or the next before it that JAX has named.

    Of an update it is what is written: the update itself is a line of JAX's own.
    """
    line = instruction = computation[name]
    for _ in range(_MOST_STEPS):
        inner = hlo[line.callees[0]] if line.opcode == "fusion" else computation
        root = inner.root if line.opcode == "fusion" else line
        if line.opcode == "fusion" and root.opcode == "tuple":  # of several, what it writes
            parts = (inner[part] for part in root.operands)
            root = next((x for x in parts if x.opcode == "dynamic-update-slice"), root)
        if root.opcode == "dynamic-update-slice":
            root = _moved(inner, inner[root.operands[1]])
        if root.parameter is not None and inner is not computation:
            line = computation[line.operands[root.parameter]]
        elif named := next((one for one in (root, line) if one.op_name), None):
            return named  # a root may be a cast without a name: the fusion has one
        elif not line.operands:
            return instruction
        else:
            line = computation[line.operands[0]]
    return instruction
