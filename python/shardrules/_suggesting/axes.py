"""What mesh axes are for, by the names that the field gives them.

Must not know about leaves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

__all__ = ["AxisUse", "uses_of"]

AxisUse = Literal["fsdp", "tensor", "experts", "data"]
"""Cuts weights that are gathered whole before use; cuts what is computed with; cuts stacks of
experts; or cuts batches and sequences alone."""

# Of t5x, big_vision, EasyLM, EasyDeL, MaxText, axlearn, levanter and openpi.
_USES: Final[dict[str, AxisUse]] = {
    **dict.fromkeys(("tp", "tensor", "model", "mp", "mdl", "tensor_transpose"), "tensor"),
    **dict.fromkeys(("ep", "expert", "experts"), "experts"),
    **dict.fromkeys(("fsdp", "fsdp_transpose", "zero"), "fsdp"),
    **dict.fromkeys((
        "data", "dp", "batch", "replica", "replica_dcn", "dcn", "dcn_data", "diloco",
        "sp", "cp", "seq", "sequence", "context", "stage", "pp", "pipe", "pipeline",
    ), "data"),
}  # fmt: skip
_PART: Final = re.compile(r"(_?[0-9]+)+$")


def uses_of(axes: Iterable[str]) -> dict[str, AxisUse]:
    """What each axis is for. One of another name cuts weights, as fsdp does.

    If all axes are for batches by their names, the first of them cuts weights, as big_vision's and
    openpi's `data` do.
    """
    uses: dict[str, AxisUse] = {
        axis: _USES.get(_PART.sub("", axis).lower(), "fsdp") for axis in axes
    }
    if uses and {*uses.values()} == {"data"}:
        uses[next(iter(uses))] = "fsdp"
    return uses
