"""Collectives that a program executes: kind, mesh axes, bytes, executions and source line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from shardrules._program.hlo import CollectiveOp, CollectiveOpcode, Hlo, Place, Shape

Moved = Literal["argument", "gradient", "state", "activation", "unexplained"]


class Transfer(NamedTuple):
    """Array that a collective moves, without what it is."""

    op: CollectiveOp
    number: int
    """Index of the array among the results."""
    axes: tuple[str, ...]
    shape: Shape
    """Shape of what is moved, as one device has it before or behind: the larger one."""
    payload: int
    """Bytes of that array, or of all pieces that an all-to-all exchanges."""

    @property
    def kind(self) -> CollectiveOpcode:
        """Opcode without -start."""
        return self.op.kind

    @property
    def sent_once(self) -> int:
        """Bytes that one device sends in an execution, by the algorithms that send least."""
        groups = self.op.groups
        if self.kind == "collective-permute":
            pairs = sum(source != target for source, target in groups)
            return round(self.payload * pairs / max(1, self.op.partitions))
        devices = len(groups[0])
        rounds = 2 if self.kind == "all-reduce" else 1
        return round(rounds * self.payload * (devices - 1) / devices)


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
    def sent(self) -> int | None:
        """Bytes that one device sends in a step; None without the number of executions."""
        return None if self.times is None else self.sent_once * self.times

    @property
    def bytes(self) -> int | None:
        """Bytes that are moved in a step: payload times executions."""
        return None if self.times is None else self.payload * self.times


def transfers(hlo: Hlo, axis_sizes: Mapping[str, int]) -> Iterator[Transfer]:
    """Yield the arrays that collectives move, in the order of the text.

    Args:
        hlo: The module.
        axis_sizes: Devices along each mesh axis; empty if the mesh is not known.
    """
    for op in hlo.collectives:
        axes = op.groups.axes(axis_sizes) if axis_sizes else ()
        arrays = op.operands if op.kind == "reduce-scatter" else op.results
        if op.kind == "all-to-all":
            # Its results are pieces of one array.
            yield Transfer(op, 0, axes, arrays[0], sum(shape.bytes for shape in arrays))
            continue
        for number, shape in enumerate(arrays):
            yield Transfer(op, number, axes, shape, shape.bytes)
