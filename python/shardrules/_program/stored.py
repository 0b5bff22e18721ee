"""`StoredProgram`: stands for the `jax.stages.Compiled` that a child did not come to."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from jax.stages import Lowered

from shardrules._program.hlo import check_hlo
from shardrules._program.live_ranges import LiveRanges


class StoredProgram:
    """What is read of a `jax.stages.Compiled`, where XLA has written it before code.

    Args:
        lowered: The function's `jax.stages.Lowered`: its structure, shapes and donation.
        inputs: The sharding of each leaf of the arguments; None of those that jit has dropped.
        outputs: The same of the results.
        text: The optimized module.
        peak: Bytes of the device's memory that the compiler assigns.
        live: What XLA writes of that memory.
    """

    def __init__(
        self,
        lowered: Any,
        inputs: list[Any],
        outputs: list[Any],
        text: str,
        *,
        peak: int,
        live: LiveRanges,
    ) -> None:
        check_hlo(text)
        self.in_tree = lowered.in_tree
        self.out_tree = lowered.out_tree
        self.args_info = lowered.args_info
        self.out_info = lowered.out_info
        self.input_shardings = self.in_tree.unflatten(inputs)
        self.output_shardings = self.out_tree.unflatten(outputs)
        self._text = text
        self._peak = peak
        self.live = live

    def as_text(self) -> str:
        """Return the optimized module."""
        return self._text

    def memory_analysis(self) -> Any:
        """Return the bytes that a device needs, as far as they are read of JAX's own."""
        sizes = {f"{name}_size_in_bytes": size for name, size in self.live.sizes().items()}
        return SimpleNamespace(**sizes, total_allocation_bytes=self._peak)


def inner_of(lowered: Any) -> Any:
    """Return JAX's own Lowered, also behind one of flax or equinox; None of anything else."""
    inner = getattr(lowered, "lowered", lowered)
    return inner if isinstance(inner, Lowered) else None


def boxed(lowered: Any, stored: StoredProgram) -> Any:
    """Return a program in the box that the library of the step has around what is compiled."""
    if lowered is inner_of(lowered):
        return stored
    return replace(lowered, lowered=SimpleNamespace(compile=lambda *_, **__: stored)).compile()
