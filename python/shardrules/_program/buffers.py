"""The memory that a step needs on a device: totals, and the arrays that are alive at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from shardrules._base.text import Place, answer, bytes_shown, record
from shardrules._plan.tables import Column, Table

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
    """Sum of the arrays that are alive at the peak, by the order of the instructions; the peak
    itself where XLA keeps more of them in the same memory."""
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
        largest = "the largest arrays at the peak"
        if self.alive < self.peak:
            share = self.alive / self.peak
            largest += f", where {bytes_shown(self.alive)} are alive, {share:.0%} of that"
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
