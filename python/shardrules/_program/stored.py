"""`StoredProgram`: stands for a `jax.stages.Compiled` that a file has."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from jax.stages import Lowered

from shardrules._program.hlo import check_hlo


class StoredProgram:
    """What is read of a `jax.stages.Compiled`, where a file has it.

    Args:
        lowered: The function's `jax.stages.Lowered`: its structure, shapes and donation.
        inputs: The sharding of each leaf of the arguments; None of those that jit has dropped.
        outputs: The same of the results.
        text: The optimized module.
        memory: The `SIZES` of `buffers.py` as attributes.
    """

    def __init__(
        self, lowered: Any, inputs: list[Any], outputs: list[Any], text: str, memory: Any
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
