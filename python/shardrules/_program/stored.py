"""`StoredProgram`: stands for the `jax.stages.Compiled` that a child did not come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from jax.stages import Lowered

from shardrules._program.hlo import Hlo, check_hlo
from shardrules._program.liveness import WRITTEN, Alive

_ALLOCATED: Final = "AllocateBuffer"
"""Of a TPU's program, memory that is not written yet: what writes it tells more."""


class LiveArray(NamedTuple):
    """Array in the device's memory at the peak, as XLA assigns it."""

    name: str
    """Instruction that makes it."""
    element: int
    bytes: int
    parameter: int | None
    """Number of the module's parameter whose memory it has."""
    is_output: bool
    names: tuple[str, ...]
    """Instructions that go on with its memory, such as the update in a loop of what it begins."""
    last_use: str
    """Instruction that is the last to read the memory before it is free."""


def alive_of(hlo: Hlo, arrays: Iterable[LiveArray]) -> list[Alive]:
    """Return what XLA says of the arrays at the peak in the module's terms, the largest first."""
    rows = []
    for array in arrays:
        maker, user = hlo.computation_of(array.name), hlo.computation_of(array.last_use)
        if maker is None:
            continue
        line = hlo[maker][array.name]
        if not line.results:
            continue  # such as an empty tuple
        is_parameter = maker == hlo.entry and line.parameter is not None
        name = array.name
        if not line.op_name or _ALLOCATED in line.attributes:
            makers = [(c, other) for other in array.names if (c := hlo.computation_of(other))]
            written = (pair for pair in makers if _is_written(hlo, *pair))
            named = (pair for pair in makers if hlo[pair[0]][pair[1]].op_name)
            maker, name = next(chain(written, named), (maker, name))
        rows.append(
            Alive(
                shape=line.results[array.element if array.element < len(line.results) else 0],
                bytes=array.bytes,
                computation=maker,
                name=name,
                parameter=array.parameter if is_parameter else None,
                is_output=array.is_output,
                last_use=None if user is None else (user, array.last_use),
            )
        )
    return sorted(rows, key=lambda row: -row.bytes)


def _is_written(hlo: Hlo, computation: str, name: str) -> bool:
    """True of what writes into an array that goes on, such as the stack of what a loop keeps."""
    line = hlo[computation][name]
    is_fusion = line.opcode == "fusion"
    return line.opcode == "dynamic-update-slice" or (
        is_fusion and hlo.contains(line.callees[0], WRITTEN)
    )


class StoredProgram:
    """What is read of a `jax.stages.Compiled`, where XLA has written it before code.

    Args:
        lowered: The function's `jax.stages.Lowered`: its structure, shapes and donation.
        inputs: The sharding of each leaf of the arguments; None of those that jit has dropped.
        outputs: The same of the results.
        text: The optimized module.
        memory: The `SIZES` of `buffers.py` as attributes.
        alive: The `LiveArray`s at the peak; None if XLA has not written them.
        is_assigned: True if its bytes are those that the compiler itself assigns.
    """

    def __init__(
        self,
        lowered: Any,
        inputs: list[Any],
        outputs: list[Any],
        text: str,
        *,
        memory: Any,
        alive: Any = None,
        is_assigned: bool = False,
    ) -> None:
        check_hlo(text)
        self.in_tree = lowered.in_tree
        self.out_tree = lowered.out_tree
        self.args_info = lowered.args_info
        self.out_info = lowered.out_info
        self.input_shardings = self.in_tree.unflatten(inputs)
        self.output_shardings = self.out_tree.unflatten(outputs)
        self._text = text
        self._memory = memory
        self.alive = alive
        self.is_assigned = is_assigned

    def as_text(self) -> str:
        """Return the optimized module."""
        return self._text

    def memory_analysis(self) -> Any:
        """Return the bytes that a device needs."""
        return self._memory


def inner_of(lowered: Any) -> Any:
    """Return JAX's own Lowered, also behind one of flax or equinox; None of anything else."""
    inner = getattr(lowered, "lowered", lowered)
    return inner if isinstance(inner, Lowered) else None


def boxed(lowered: Any, stored: StoredProgram) -> Any:
    """Return a program in the box that the library of the step has around what is compiled."""
    if lowered is inner_of(lowered):
        return stored
    return replace(lowered, lowered=SimpleNamespace(compile=lambda *_, **__: stored)).compile()
