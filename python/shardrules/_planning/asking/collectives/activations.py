"""What is sent for activations: of kernels that tensor axes cut, and to experts and back.

A product over a dimension that is cut is a sum over its devices: of the output in the forward pass,
of the input's gradient in the backward pass. The residual stream is whole on each device, or cut by
tokens under sequence parallelism. Costs a few numbers per folded path. Must not know how roles are
found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardrules._dtypes import given_bits

if TYPE_CHECKING:
    from fractions import Fraction

    from shardrules._planning.asking.collectives.schedule import Schedule
    from shardrules._planning.asking.collectives.sent import CollectiveKind, Of, Row
    from shardrules._planning.asking.collectives.uses import Use

__all__ = ["of_activations", "of_experts", "uncounted"]


class _Sum(NamedTuple):
    """Collectives of so many elements for each token."""

    collective: CollectiveKind
    axes: tuple[str, ...]
    times: int
    width: int


def of_activations(uses: Sequence[Use], schedule: Schedule) -> Iterator[Row]:
    """The collectives of products with kernels that tensor axes cut."""
    shared: set[tuple[str, int, tuple[str, ...]]] = set()
    heads = {
        _input(use): made
        for use in uses
        if use.cut.part.is_attention and (made := use.cut.along("out"))
    }
    for use in uses:
        if use.cut.kept:
            found = (*_forward(use, schedule), *_of_inputs(use, schedule, shared))
        else:
            # Each device has keys and values of all heads, and gradients of those that it reads.
            outputs = use.cut.part.size("out")
            found = (_Sum("all-reduce", heads.get(_input(use), ()), use.arrays, outputs),)
        for one in found:
            yield _row(one, use.tokens, "activations", schedule)


def _input(use: Use) -> tuple[str, int]:
    """What kernels with the same input have in common."""
    return use.cut.part.input_key, use.cut.part.size("in")


def _forward(use: Use, schedule: Schedule) -> Iterator[_Sum]:
    """Of outputs, and what becomes of their gradients."""
    part, made = use.cut.part, use.cut.along("out")
    contracted = use.cut.along("in", "lookup")
    width = -(-part.size("out") // use.cut.devices(made))
    # Of a square kernel only its name tells.
    is_written = part.size("out") == part.width and part.flow != "reads"
    if use.cut.turned:
        yield _Sum("all-gather", made, use.arrays * schedule.gathers, part.width)
        return
    if contracted and schedule.sequence_parallel and is_written:
        yield _Sum(schedule.reduce, contracted, use.arrays, width)
        yield _Sum("all-gather", contracted, use.arrays, width)
    elif contracted:
        yield _Sum("all-reduce", contracted, use.arrays, width)
    if made and is_written and part.size("in") != part.width:
        # The residual stream is whole, and the kernel makes a part of it.
        yield _Sum("all-gather", made, use.arrays, part.width)


def _of_inputs(
    use: Use, schedule: Schedule, shared: set[tuple[str, int, tuple[str, ...]]]
) -> Iterator[_Sum]:
    """Of inputs' gradients, and what becomes of the inputs; `shared` has what was reduced."""
    part, made, contracted = use.cut.part, use.cut.along("out"), use.cut.along("in")
    if "in" not in part.dims or use.cut.turned:
        return
    width = -(-part.size("in") // use.cut.devices(contracted))
    is_read = _reads(use)
    key = (*_input(use), made)
    once = 0 if key in shared else use.inputs
    times = use.arrays if schedule.input_gradients == "each" else once
    shared.add(key)
    if made and schedule.sequence_parallel and is_read:
        yield _Sum("all-gather", made, once, width)
        yield _Sum(schedule.reduce, made, times, width)
    elif made:
        yield _Sum("all-reduce", made, times, width)
    if contracted and is_read and part.size("out") != part.width:
        # The residual stream's gradient is whole, and the kernel's input was a part of it.
        yield _Sum("all-gather", contracted, once, part.width)


def of_experts(uses: Iterable[Use], schedule: Schedule) -> Iterator[Row]:
    """Tokens on their way to the devices of their experts and back, forward and backward.

    Where the experts' axis cuts the batch as well, tokens are sent to their experts. Where it does
    not, each of its devices has them already, and the experts' outputs are summed.
    """
    seen = set()
    for use in uses:
        part, cut = use.cut.part, use.cut
        if not cut.experts or not _reads(use) or part.input_key in seen:
            continue
        seen.add(part.input_key)
        batch = frozenset(schedule.batch_axes)
        over_tokens = tuple(axis for axis in cut.experts if axis in batch)
        sent = _Sum("all-to-all", over_tokens, 4 * use.inputs, part.width)
        yield _row(sent, use.tokens, "experts", schedule)
        beside = tuple(axis for axis in cut.experts if axis not in batch)
        summed = _Sum("all-reduce", beside, 2 * use.inputs, part.width)
        yield _row(summed, schedule.tokens_per_device(cut.sizes), "experts", schedule)


def uncounted(uses: Sequence[Use]) -> Iterator[str]:
    """The folded paths of kernels whose activations are sent in a way that is not known."""
    told = {use.cut.part.input_key for use in uses if use.cut.experts and _reads(use)}
    for use in uses:
        part, cut = use.cut.part, use.cut
        if cut.along("unknown", "stack") or (cut.experts and part.input_key not in told):
            yield part.pattern


def _reads(use: Use) -> bool:
    """Whether it is a kernel that reads the residual stream; of a square one its name tells."""
    part = use.cut.part
    is_square = part.size("out") == part.width
    is_wide = "in" in part.dims and part.size("in") == part.width
    return is_wide and not (is_square and part.flow == "writes")


def _row(one: _Sum, tokens: Fraction | int, of: Of, schedule: Schedule) -> Row:
    bits = given_bits("activations", schedule.activations)
    payload = -(-tokens * one.width * one.times * bits // 8)
    return one.collective, one.axes, of, one.times * schedule.accumulate, payload
