"""Collectives that a program executes: kind, mesh axes, bytes, executions and source line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple

from shardrules._base.text import Place, record
from shardrules._program.computation import Shape
from shardrules._program.hlo import CollectiveOp, CollectiveOpcode, Hlo

Moved = Literal["argument", "gradient", "state", "activation", "unexplained"]
# Names of collectives in user programs, as JAX has them in op_name.
_CALLED: Final = frozenset({
    "all_gather", "all_gather_invariant", "all_to_all", "pbroadcast", "pmax", "pmin", "ppermute",
    "psum", "psum2", "psum_invariant", "psum_scatter", "ragged_all_to_all", "reduce_scatter",
})  # fmt: skip


class Exchange(NamedTuple):
    """Array that a collective moves, without what it is."""

    op: CollectiveOp
    number: int
    """Index of the array among the results."""
    axes: tuple[str, ...]
    shape: Shape
    """Shape of what is moved, as one device has it before or behind: the larger one."""
    payload: int
    """Bytes of that array, or of all pieces that an all-to-all exchanges."""
    sent_once: int
    """Bytes that one device sends in an execution, by the algorithms that send least."""
    times: int | None
    """Executions in a step."""


@record
class Collective(NamedTuple):
    """Array that a program moves between devices: a row of `Program.collectives`."""

    kind: CollectiveOpcode
    axes: tuple[str, ...]
    """Mesh axes along which devices exchange data; empty if the mesh is not known."""
    shape: str
    """Dtype and dimensions of the whole array, such as "f32[16,512]"."""
    payload: int
    """Bytes of the whole array that is moved in one execution: of all-gather its result, of
    reduce-scatter its operand."""
    times: int | None
    """Executions in a step; None within a loop whose trip count is not known."""
    sent_once: int
    """Bytes that one device sends in an execution."""
    what: Moved
    """Kind of array that is moved."""
    moves: str
    """Path of the argument or output that is moved, or JAX's name of the operation."""
    reason: str
    """Explains why the program moves it; of what is unexplained, the likely cause."""
    is_expected: bool
    """False for a collective that no planned array and no product needs."""
    op_name: str
    place: Place | None
    """File and line of the user's program."""
    name: str
    """Name of the instruction in the HLO."""

    @property
    def is_called(self) -> bool:
        """True if the program calls it, such as jax.lax.psum; False if XLA has put it in.

        Of one that XLA has merged of both kinds it is False, too.
        """
        return is_called(self.op_name)

    @property
    def sent(self) -> int | None:
        """Bytes that one device sends in a step; None without the number of executions."""
        return None if self.times is None else self.sent_once * self.times

    @property
    def bytes(self) -> int | None:
        """Bytes that are moved in a step: payload times executions."""
        return None if self.times is None else self.payload * self.times

    @property
    def sent_at_least(self) -> int:
        """Bytes that one device sends in a step; an unknown trip count counts as 1."""
        return self.sent_once if self.sent is None else self.sent

    def __str__(self) -> str:
        times = "" if self.times in (None, 1) else f", {self.times:,} times"
        place = "" if self.place is None else f" at {self.place}"
        return f"{self.kind} of {self.shape}{times}{place} ({self.op_name or self.name})"


def is_called(op_name: str) -> bool:
    """Return whether JAX's name of an operation is of a collective in the user's program."""
    # "jit(step)/shard_map/(psum:layer/psum)" is one that XLA has merged of two.
    names = op_name.rstrip(")").split(":") if op_name.endswith(")") else [op_name]
    return all(name.rpartition("/")[2].lstrip("(") in _CALLED for name in names)


def exchanges(hlo: Hlo, axis_sizes: Mapping[str, int]) -> Iterator[Exchange]:
    """Yield the arrays that collectives move, in the order of the text."""
    for op in hlo.collectives:
        yield from _exchanges_of(op, op.groups.axes(axis_sizes) if axis_sizes else ())


def _exchanges_of(op: CollectiveOp, axes: tuple[str, ...]) -> Iterator[Exchange]:
    """Yield the arrays of a collective, several of which XLA may have combined."""
    shapes = op.operands if op.kind == "reduce-scatter" else op.results
    sizes = [shape.bytes for shape in shapes]
    if op.kind == "all-to-all":
        sizes = [sum(sizes)]  # its results are pieces of one array
    for number, size in enumerate(sizes):
        sent = _sent_bytes(op, size)
        yield Exchange(op, number, axes, shapes[number], size, sent, op.times)


def _sent_bytes(op: CollectiveOp, size: int) -> int:
    if op.kind == "collective-permute":
        return size * any(source != target for source, target in op.groups)
    devices = len(op.groups[0])
    rounds = 2 if op.kind == "all-reduce" else 1
    return round(rounds * size * (devices - 1) / devices)
