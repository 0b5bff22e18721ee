"""Which mesh axes split the tokens of a batch, and which are for experts: guesses by their names.

Every function that guesses takes an argument with the true axes, and says what it guessed. Must not
know about leaves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["data_axes_among", "expert_axes_among"]

# Of t5x, big_vision, EasyLM, EasyDeL, MaxText, axlearn, levanter and openpi. Axes of the sequence
# split tokens as well; so do those of experts, as in MaxText, in all that is no expert.
_OF_EXPERTS: Final = frozenset(("ep", "expert", "experts"))
_NAMES: Final = _OF_EXPERTS.union((
    "data", "dp", "batch", "replica", "replica_dcn", "dcn", "dcn_data", "diloco",
    "fsdp", "fsdp_transpose", "zero", "sp", "cp", "seq", "sequence", "context",
))  # fmt: skip
# What `Correction(indivisible="factor")` adds to an axis's name.
_PART: Final = re.compile(r"(_[0-9]+)+$")


def data_axes_among(axes: Iterable[str]) -> tuple[str, ...]:
    """Those of the axes that split tokens, by their names; the others are tensor axes.

    Example:
        >>> data_axes_among({"dp": 2, "fsdp_0": 4, "fsdp_1": 2, "tp": 8})
        ('dp', 'fsdp_0', 'fsdp_1')
    """
    return tuple(axis for axis in axes if _base(axis) in _NAMES)


def expert_axes_among(axes: Iterable[str]) -> tuple[str, ...]:
    """Those of the axes that are for experts, by their names.

    Example:
        >>> expert_axes_among(["fsdp", "ep"])
        ('ep',)
    """
    return tuple(axis for axis in axes if _base(axis) in _OF_EXPERTS)


def _base(axis: str) -> str:
    return _PART.sub("", axis).lower()
