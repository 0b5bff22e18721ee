"""Floating-point operations of the products with kernels in a training step.

Costs a few numbers per folded path. Must not know about hardware.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._planning.asking.collectives.cuts import cut_parts
from shardrules._planning.asking.collectives.uses import uses_of

if TYPE_CHECKING:
    from shardrules._planning.asking.collectives.schedule import Schedule
    from shardrules._planning.columns import Columns

__all__ = ["Flops", "flops"]

# A multiplication and an addition for each element and token: forward, and for both gradients.
_FOR_EACH: Final = 6


class Flops(NamedTuple):
    """Of a step, without the scores of attention, which depend on the length of sequences."""

    total: int
    """Of all tokens, each product once."""
    per_device: int
    """Of a device. Work that a mesh axis neither cuts nor batches is done on each of its devices,
    so these may add up to more than the total."""


def flops(columns: Columns, schedule: Schedule) -> Flops:
    """The operations of a training step: 6 for each token and each element that it meets."""
    total = per_device = 0
    for use in uses_of(cut_parts(columns, schedule), schedule):
        part = use.cut.part
        if "lookup" in part.dims:
            continue
        elements = prod(n for n, role in zip(part.shape, part.dims, strict=True) if role in _MET)
        elements *= use.arrays * _FOR_EACH
        total += int(schedule.tokens * use.share * elements)
        per_device += int(use.tokens * elements / use.cut.devices(use.cut.kept))
    return Flops(total, per_device)


_MET: Final = ("in", "out", "unknown")
