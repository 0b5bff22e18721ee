"""What is sent for parameters and gradients: exact under the schedule.

Costs a few numbers per folded path. Must not know about tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from shardrules._dtypes import given_bits

if TYPE_CHECKING:
    from shardrules._planning.asking.collectives.cuts import CutPart
    from shardrules._planning.asking.collectives.schedule import Schedule
    from shardrules._planning.asking.collectives.sent import CollectiveKind, Row

__all__ = ["of_gradients", "of_params"]


def of_params(cuts: Iterable[CutPart], schedule: Schedule) -> Iterator[Row]:
    """Yields the gathers of parameters.

    They are of those that batch axes cut, of those that are cut along the wrong side, and of those
    that ZeRO-1 renews.
    """
    for cut in cuts:
        held = cut.bytes()
        times = _gathers(cut, schedule) * schedule.accumulate
        whole = held * cut.devices(cut.gathered)
        yield "all-gather", cut.gathered, "params", _arrays(cut) * times, whole * times
        turned = whole * cut.devices(cut.turned) * schedule.accumulate
        yield "all-gather", cut.turned, "params", _arrays(cut) * schedule.accumulate, turned
        if schedule.zero1 is not None and _has_gradient(cut) and _zero1_cuts(cut, schedule.zero1):
            yield "all-gather", (schedule.zero1,), "params", cut.part.leaves, held


def of_gradients(
    cuts: Iterable[CutPart], schedule: Schedule, tensor_axes: frozenset[str]
) -> Iterator[Row]:
    """The reductions of gradients over all devices that have seen other tokens.

    Args:
        cuts: Of the parameters.
        schedule: How the step is run.
        tensor_axes: The axes of tensor parallelism, which cut tokens under sequence parallelism.
    """
    bits = None if schedule.gradients is None else given_bits("gradients", schedule.gradients)
    for cut in filter(_has_gradient, cuts):
        used = {*cut.gathered, *cut.experts, *cut.kept}
        whole = cut.bytes(bits) * cut.devices(cut.gathered)
        rows = [*_reductions(cut, schedule, {*schedule.batch_axes} - used, whole)]
        rows.append(("all-to-all", cut.turned, whole))
        if schedule.sequence_parallel:
            rows.append(("all-reduce", tensor_axes - used, whole))
        times = schedule.accumulate
        for collective, axes, payload in rows:
            yield collective, axes, "gradients", _arrays(cut) * times, payload * times


def _reductions(
    cut: CutPart, schedule: Schedule, others: set[str], whole: int
) -> Iterator[tuple[CollectiveKind, Iterable[str], int]]:
    """(collective, axes, payload) of gradients of so many bytes, `others` beside `cut.gathered`."""
    yield schedule.reduce, cut.gathered, whole
    whole //= cut.devices(cut.gathered)
    zero1 = schedule.zero1
    if zero1 in others and _zero1_cuts(cut, zero1):
        yield schedule.reduce, (zero1,), whole
        others, whole = others - {zero1}, whole // cut.devices((zero1,))
    yield "all-reduce", others, whole


def _arrays(cut: CutPart) -> int:
    """How many arrays a step uses: those of scanned layers one by one."""
    return cut.part.leaves * cut.part.size("stack")


def _gathers(cut: CutPart, schedule: Schedule) -> int:
    # The gradient of a look-up needs no rows, and nothing is between the two passes of the logits.
    is_once = "lookup" in cut.part.dims or cut.part.makes_logits
    return 1 if is_once and not cut.part.is_tied else schedule.gathers


def _has_gradient(cut: CutPart) -> bool:
    return re.match("b?float|complex", str(cut.kind.dtype)) is not None


def _zero1_cuts(cut: CutPart, axis: str) -> bool:
    """Whether `Plan.for_optimizer(zero1=axis)` cuts the moments by this axis as well."""
    parts = [cut.devices(axes) for axes in cut.dims]
    shape = zip(cut.part.shape, parts, strict=True)
    cuts_already = any(axis in axes for axes in cut.dims)
    return not cuts_already and any(n and n % (cut.sizes[axis] * each) == 0 for n, each in shape)
