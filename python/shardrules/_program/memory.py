"""The memory that a program needs on a device: totals, the largest arrays, activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from shardrules._base.text import Place, answer, bytes_shown, record
from shardrules._plan.answers import Column, Table
from shardrules._program.computation import Computation, Instruction
from shardrules._program.executable import Executable
from shardrules._program.facts import MOVES, UPDATES
from shardrules._program.hlo import Hlo, hlo_errors
from shardrules._program.lasting import WRITTEN, Alive, lasting

_LARGEST: Final = 100
_FEW_STACKS: Final = 3
_MOST_STEPS: Final = 10
_IN_TEXT: Final = 10
_NEGLIGIBLE: Final = 1000
# XLA's numbers of bytes, with their signs: aliased bytes are counted as argument and as output.
_NUMBERS: Final = {
    "arguments": ("argument", 1),
    "outputs": ("output", 1),
    "aliased": ("alias", -1),
    "temporaries": ("temp", 1),
    "code": ("generated_code", 1),
}
SIZES: Final = (
    *(f"{name}_size_in_bytes" for name, _ in _NUMBERS.values()),
    "total_allocation_bytes",
)
"""What is read of `Compiled.memory_analysis()`."""
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
    """What else it allocates; before JAX 0.12, `temp_size_in_bytes`, which is too high for TPUs."""
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


def totals_from(sizes: Sequence[int]) -> Totals:
    """Read `SIZES`.

    The TPU's compiler counts some temporaries twice: it accepts programs of which arguments and
    temporaries are more than the memory, and refuses those that allocate more.
    """
    *numbers, allocated = sizes
    totals = Totals(*numbers)
    if not allocated:
        return totals
    rest = allocated - totals.arguments - totals.outputs + totals.aliased
    return totals._replace(temporaries=max(rest, 0))


@answer
class Memory(NamedTuple):
    """Memory that a program needs on a device, in bytes: XLA's numbers, and the largest arrays."""

    totals: Totals
    alive: int
    """Sum of the arrays that are alive at the peak, at most the peak itself; of an executable that
    you compiled, of arguments, results and what is kept for the backward pass."""
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

    def _parts(self) -> list[Table | str]:
        head = f"{bytes_shown(self.peak)} on each device: {self.totals}"
        if not self.buffers:
            return [f"{head}; this backend does not show which arrays these are"]
        largest = "the largest arrays that are alive"
        if self.alive < self.peak:
            share = self.alive / self.peak
            largest += f", {bytes_shown(self.alive)} in all, {share:.0%} of that"
        if self.saved:
            largest += f"; {bytes_shown(self.saved)} are kept for the backward pass"
        return [head, largest, table_of(self.buffers)]


def table_of(buffers: Sequence[Buffer]) -> Table:
    """Return a table of the largest of these arrays, which are sorted by bytes.

    Scratch a thousand times smaller than the largest says nothing.
    """
    least = buffers[0].bytes / _NEGLIGIBLE if buffers else 0
    rows = (buffer for buffer in buffers[:_IN_TEXT] if buffer.bytes >= least)
    return Table(_COLUMNS, map(_buffer_cells, rows))


def _buffer_cells(buffer: Buffer) -> tuple[str, ...]:
    place = "" if buffer.place is None else str(buffer.place)
    return bytes_shown(buffer.bytes), buffer.shape, buffer.what, place


def totals_of(executable: Executable) -> Totals | None:
    """Read XLA's numbers of bytes; None where the backend does not tell."""
    stats: Any = executable.call.compiled.memory_analysis()
    if stats is None:
        return None
    return totals_from([getattr(stats, name, 0) for name in SIZES])  # 0 for what JAX lacks


def memory_of(executable: Executable, totals: Totals) -> Memory:
    """Read the arrays that a program needs, beside XLA's numbers."""
    hlo = executable.hlo
    if hlo is None:
        return Memory(totals, 0, 0, False, (), ())

    def path_of(parameter: int) -> str | None:
        leaf = executable.leaf_of.get(parameter)
        return None if leaf is None else executable.inputs.paths[leaf]

    with hlo_errors():
        live = getattr(executable.call.compiled, "live", None)
        rows = live.alive(hlo) if live and live.ranges else lasting(executable)
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
