"""How a training step is run, as far as it decides what is sent: a record of assumptions.

Costs nothing but the record. Must not know about leaves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

__all__ = ["INPUT_GRADIENTS", "REDUCE", "InputGradients", "Reduce", "Schedule", "batch_axes_of"]

Reduce = Literal["reduce-scatter", "all-reduce"]
InputGradients = Literal["once", "each"]
REDUCE: Final = ("reduce-scatter", "all-reduce")
INPUT_GRADIENTS: Final = ("once", "each")

# Axes by which training code cuts the batch or the sequence: MaxText's, EasyDeL's and EasyLM's,
# Levanter's, T5X's and big_vision's. Those of experts are among them: what the experts do not cut,
# they batch. The parts of an axis that `Correction(indivisible="factor")` makes end in _0, _1.
_BATCH: Final = re.compile(
    r"(data|dp|batch|fsdp|fsdp_transpose|replica|replicas|zero|expert|experts|ep"
    r"|sequence|seq|sp|context|cp|dcn\w*)(_\d+)?"
)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The arguments of `Plan.traffic`; each is an assumption."""

    tokens: int
    batch_axes: tuple[str, ...]
    gathers: int = 2
    accumulate: int = 1
    reduce: Reduce = "reduce-scatter"
    zero1: str | None = None
    gradients: Any = None
    activations: Any = "bfloat16"
    sequence_parallel: bool = False
    input_gradients: InputGradients = "once"
    experts_per_token: int | None = None
    capacity_factor: float = 1.0

    @property
    def assumptions(self) -> dict[str, Any]:
        """Each argument by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def batch_axes_of(axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh that cut the tokens of a step, by the names that the field gives them.

    Example:
        >>> batch_axes_of({"dcn_data": 2, "fsdp": 8, "tp": 4})
        ('dcn_data', 'fsdp')
    """
    return tuple(axis for axis in axis_sizes if _BATCH.fullmatch(axis))
