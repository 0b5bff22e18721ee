"""Uses of mesh axes by their names: the table by which `suggest`, `check` and `sweep` guess."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

AxisUse = Literal["fsdp", "tensor", "experts", "data", "layers"]
"""Cuts weights that are gathered whole before use; cuts what is computed with; cuts stacks of
experts; cuts batches and sequences alone; or cuts stacks of layers, as the stages of a pipeline."""

# Of t5x, big_vision, EasyLM, EasyDeL, MaxText, axlearn, levanter and openpi.
_USES: Final[dict[str, AxisUse]] = {
    **dict.fromkeys(("tp", "tensor", "model", "mp", "mdl", "autoregressive"), "tensor"),
    **dict.fromkeys(("ep", "expert", "experts"), "experts"),
    **dict.fromkeys(("fsdp", "zero"), "fsdp"),
    **dict.fromkeys(("data", "dp", "ddp", "batch", "dcn", "diloco"), "data"),
    **dict.fromkeys(("replica", "replicas", "sp", "cp", "seq", "sequence", "context"), "data"),
    **dict.fromkeys(("stage", "stages", "pp", "pipe", "pipeline"), "layers"),
}
# Numbers of names.
_NUMBER: Final = re.compile(r"[0-9]+$")


def use_of(axis: str) -> AxisUse | None:
    """Return the use that the first word of its name with one tells; None if none does.

    Example:
        >>> [use_of(axis) for axis in ("fsdp_0", "dcn_data", "tensor_sequence", "PP2", "x")]
        ['fsdp', 'data', 'tensor', 'layers', None]
    """
    words = (_NUMBER.sub("", word) for word in axis.lower().split("_"))
    return next((_USES[word] for word in words if word in _USES), None)


def uses_of(axes: Iterable[str]) -> dict[str, AxisUse]:
    """Return the use of each axis of a mesh. One of another name cuts weights, as fsdp does.

    If none cuts weights by its name, the first of those for batches does, as big_vision's and
    openpi's `data` do.
    """
    uses: dict[str, AxisUse] = {axis: use_of(axis) or "fsdp" for axis in axes}
    if uses and {*uses.values()} == {"data"}:
        uses[next(iter(uses))] = "fsdp"
    return uses


def is_gathered(axis: str) -> bool:
    """Tell if devices surely gather the weights that the axis cuts before they use them."""
    return use_of(axis) in ("fsdp", "data")


def data_axes_among(axes: Iterable[str]) -> tuple[str, ...]:
    """List the axes that split the tokens of a batch; tensor axes and stages do not.

    Those of experts do, as in MaxText, in all that is no expert.

    Example:
        >>> data_axes_among({"dp": 2, "pp": 2, "fsdp_0": 4, "fsdp_1": 2, "tp": 8})
        ('dp', 'fsdp_0', 'fsdp_1')
    """
    uses = uses_of(axes)
    return tuple(axis for axis, use in uses.items() if use not in ("tensor", "layers"))


def expert_axes_among(axes: Iterable[str]) -> tuple[str, ...]:
    """List the axes that are for experts.

    Example:
        >>> expert_axes_among(["fsdp", "ep"])
        ('ep',)
    """
    return tuple(axis for axis in axes if use_of(axis) == "experts")
