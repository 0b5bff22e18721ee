"""Reads the memory that a program needs on a device: totals, the largest arrays, activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._program.dataflow import Value, source_of
from shardrules._program.flow import is_written_in_part
from shardrules._program.hlo import hlo_errors
from shardrules._program.liveness import alive_at_peak
from shardrules._text import Column, Table, answer, bytes_shown, printable, record

if TYPE_CHECKING:
    from shardrules._program.computation import Computation, Instruction
    from shardrules._program.executable import Executable
    from shardrules._program.hlo import Hlo, Place
    from shardrules._program.liveness import Alive

_LARGEST: Final = 100
_IN_TEXT: Final = 10
# XLA's numbers of bytes, with their signs: aliased bytes are counted as argument and as output.
_NUMBERS: Final = {
    "arguments": ("argument", 1),
    "outputs": ("output", 1),
    "aliased": ("alias", -1),
    "temporaries": ("temp", 1),
    "code": ("generated_code", 1),
}
SIZES: Final = tuple(f"{name}_size_in_bytes" for name, _ in _NUMBERS.values())
"""What is read of `Compiled.memory_analysis()`."""
_FEW_STACKS: Final = 3
_MOST_STEPS: Final = 10
_COLUMNS: Final = (
    Column("bytes", is_right=True),
    Column("array"),
    Column("what", is_elided=True),
    Column("line", is_elided=True),
)


@record
class Buffer(NamedTuple):
    """Array in the memory of a device when a program needs most."""

    bytes: int
    shape: str
    """Dtype and dimensions on a device, such as "f32[16,128]"."""
    what: str
    """Path of an argument, "output", or JAX's name of the operation that makes it."""
    is_argument: bool
    is_saved: bool
    """True for what the forward pass keeps for the backward pass."""
    place: Place | None
    """File and line of that operation."""


@record
class Totals(NamedTuple):
    """XLA's numbers of bytes that a program needs on a device."""

    arguments: int
    outputs: int
    aliased: int
    """Bytes of outputs in the memory of donated arguments."""
    temporaries: int
    code: int
    """Bytes of the compiled code; 0 where it is not in the device's memory."""

    @property
    def peak(self) -> int:
        """Bytes that the program needs at most."""
        return sum(sign * getattr(self, name) for name, (_, sign) in _NUMBERS.items())

    def __str__(self) -> str:
        terms = [
            f"{'-' if sign < 0 else '+'} {name} {bytes_shown(size)}"
            for name, (_, sign) in _NUMBERS.items()
            if (size := getattr(self, name))
        ]
        return " ".join(terms).removeprefix("+ ")


@answer
class Memory(NamedTuple):
    """Memory that a program needs on a device, in bytes: XLA's numbers, and the largest arrays."""

    totals: Totals
    alive: int
    """Sum of the arrays that are alive at the peak, by the order of the instructions."""
    saved: int
    """Part of it that the forward pass keeps for the backward pass."""
    is_recomputed: bool
    """True if the backward pass computes something again, as `jax.checkpoint` has it."""
    buffers: tuple[Buffer, ...]
    """The largest of these arrays, 100 at most; () if the backend does not show the schedule."""
    saved_buffers: tuple[Buffer, ...]
    """The largest that are kept for the backward pass."""

    @property
    def peak(self) -> int:
        """Bytes that the program needs at most, with what XLA loses between arrays."""
        return self.totals.peak

    def to_json(self) -> dict[str, Any]:
        """Return all numbers, and the arrays, as `json.dumps` takes them."""
        numbers = {"peak": self.peak, "totals": self.totals._asdict()}
        arrays = {
            name: [row._asdict() | {"place": row.place and str(row.place)} for row in rows]
            for name, rows in (("buffers", self.buffers), ("saved_buffers", self.saved_buffers))
        }
        return self._asdict() | numbers | arrays

    def __str__(self) -> str:
        head = f"{bytes_shown(self.peak)} on each device: {self.totals}"
        if not self.buffers:
            return f"{head}; this backend does not show which arrays these are"
        share = self.alive / self.peak if self.peak else 1.0
        largest = (
            f"the largest arrays at the peak, where {bytes_shown(self.alive)} are alive, "
            f"{share:.0%} of that"
        )
        if self.saved:
            largest += f"; {bytes_shown(self.saved)} are kept for the backward pass"
        return "\n".join(map(printable, [head, largest, *table_of(self.buffers)]))


def table_of(buffers: Sequence[Buffer]) -> list[str]:
    """Return the lines of a table of the largest of these arrays."""
    return Table(_COLUMNS, list(map(_cells, buffers[:_IN_TEXT]))).lines()


def totals_of(executable: Executable) -> Totals | None:
    """Read XLA's numbers of bytes; None where the backend does not tell."""
    stats: Any = executable.call.compiled.memory_analysis()
    if stats is None:
        return None
    return Totals(*(getattr(stats, name) for name in SIZES))


def memory_of(executable: Executable) -> Memory | None:
    """Read the memory that a program needs; None where the backend does not tell."""
    totals, hlo = totals_of(executable), executable.hlo
    if totals is None:
        return None
    if hlo is None or not hlo.is_scheduled:
        return Memory(totals, 0, 0, False, (), ())

    def path_of(parameter: int) -> str | None:
        leaf = executable.leaf_of.get(parameter)
        return None if leaf is None else executable.inputs.paths[leaf]

    with hlo_errors():
        rows = alive_at_peak(hlo)
        saved = [row for row in rows if _is_saved(hlo, row)]
        return Memory(
            totals=totals,
            alive=sum(row.shape.bytes for row in rows),
            saved=sum(row.shape.bytes for row in saved),
            is_recomputed="/rematted_computation" in hlo.text and not _is_all_kept(hlo, saved),
            buffers=tuple(buffers_of(hlo, rows[:_LARGEST], path_of)),
            saved_buffers=tuple(buffers_of(hlo, saved[:_IN_TEXT], path_of)),
        )


def _is_all_kept(hlo: Hlo, saved: Sequence[Alive]) -> bool:
    """Say whether loops keep more than a few arrays of each trip."""
    stacks = (row for row in saved if is_written_in_part(hlo, hlo[row.computation][row.name]))
    return len(list(stacks)) > _FEW_STACKS


def _is_saved(hlo: Hlo, row: Alive) -> bool:
    """Say whether the forward pass makes an array that the backward pass reads."""
    if row.parameter is not None or row.is_output or row.last_use is None:
        return False
    maker, user = (
        _named(hlo, hlo[computation], name).op_name or ""
        for computation, name in ((row.computation, row.name), row.last_use)
    )
    return "jvp(" in maker and "transpose(" not in maker and "transpose(" in user


def buffers_of(
    hlo: Hlo, rows: Iterable[Alive], path_of: Callable[[int], str | None]
) -> Iterator[Buffer]:
    """Yield what is known of arrays that are alive; `path_of` names the module's parameters."""
    for row in rows:
        instruction = _named(hlo, hlo[row.computation], row.name)
        what = "output" if row.is_output else instruction.op_name or instruction.name
        if row.parameter is not None:
            what = path_of(row.parameter) or instruction.op_name or f"parameter {row.parameter}"
        yield Buffer(
            bytes=row.shape.bytes,
            shape=str(row.shape),
            what=what,
            is_argument=row.parameter is not None,
            is_saved=_is_saved(hlo, row),
            place=hlo.place(instruction),
        )


def _named(hlo: Hlo, computation: Computation, name: str) -> Instruction:
    """Return the instruction that makes an array, or the next before it that JAX has named.

    Of an update it is what is written: the update itself is a line of JAX's own.
    """
    line = instruction = computation[name]
    for _ in range(_MOST_STEPS):
        inner = hlo[line.callees[0]] if line.opcode == "fusion" else computation
        root = inner.root if line.opcode == "fusion" else line
        if root.opcode == "dynamic-update-slice":
            root = inner[source_of(hlo, Value(inner.name, root.operands[1])).name]
        if root.parameter is not None and inner is not computation:
            line = computation[line.operands[root.parameter]]
        elif root.op_name or not line.operands:
            return root if root.op_name else instruction
        else:
            line = computation[line.operands[0]]
    return instruction


def _cells(buffer: Buffer) -> tuple[str, ...]:
    place = "" if buffer.place is None else str(buffer.place)
    return bytes_shown(buffer.bytes), buffer.shape, buffer.what, place
