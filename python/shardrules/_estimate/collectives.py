"""Collectives of a training step: of parameters, gradients, activations and experts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._base.dtypes import given_bits
from shardrules._base.specs import Entries, entries_of, entry_axes
from shardrules._base.text import and_more, brief, counted
from shardrules._plan.device_bytes import held_of
from shardrules._plan.roles import DimRole, Part, with_roles

if TYPE_CHECKING:
    from shardrules._estimate.schedule import CollectiveKind, Of, Row, Schedule
    from shardrules._plan.table import Columns, Kind

_MOST_SEEN: Final = 3


class CutPart(NamedTuple):
    """The leaves of a folded path, and the mesh axes of several devices that cut them."""

    part: Part
    kind: Kind
    dims: tuple[tuple[str, ...], ...]
    """Per dimension, the axes that cut it."""
    gathered: tuple[str, ...]
    """Batch axes: each device gathers what they cut before it can use it, as FSDP does."""
    experts: tuple[str, ...]
    """Axes that cut the dimension of experts."""
    kept: tuple[str, ...]
    """All others: devices use what they hold, as in tensor parallelism."""
    sizes: dict[str, int]

    @property
    def turned(self) -> tuple[str, ...]:
        """The kept axes that cut the output of a square kernel whose input they cut as well.

        XLA gathers both kernel and input: so it does with output projections of attention.
        """
        part = self.part
        is_square = part.size("in") == part.size("out") == part.width
        return self.along("out") if is_square and part.flow == "writes" else ()

    def bytes(self, bits: int | None = None) -> int:
        """Bytes of its leaves on a device, with so many bits for an element if they are given."""
        kind = self.kind
        if bits is None:
            return kind.device_bytes * self.part.leaves
        array = held_of(kind.shape or (), bits, kind._counted or Entries(), self.sizes)
        return array.most * self.part.leaves

    def devices(self, axes: Iterable[str]) -> int:
        """Return how many devices there are along these axes."""
        return prod(self.sizes[axis] for axis in axes)

    def along(self, *roles: DimRole) -> tuple[str, ...]:
        """Return the kept axes that cut dimensions of these roles."""
        if not self.kept:
            return ()
        return tuple(
            axis
            for axes, role in zip(self.dims, self.part.dims, strict=True)
            if axes and role in roles
            for axis in axes
            if axis in self.kept
        )


def cut_parts(columns: Columns, schedule: Schedule) -> list[CutPart]:
    """Return what the axes of the mesh do for each folded path of parameters."""
    parts: Iterable[Part] = columns._leaves.parts
    if schedule.roles:
        parts = with_roles(columns._leaves.parts, schedule.roles)
    batch = frozenset(schedule.batch_axes)
    cuts = [cut_of(part, columns.kinds[part.kind], columns.axis_sizes, batch) for part in parts]
    _check_experts(list(parts), schedule)
    return cuts


def guessed(cuts: Iterable[CutPart], schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """Return what names and shapes say: {roles of dimensions, or "logits": folded paths}.

    Only of what tokens meet, and without the roles that the schedule gives.
    """
    paths: dict[str, list[str]] = defaultdict(list)
    for part in (cut.part for cut in cuts if cut.part.is_product):
        if not any(re.search(pattern, part.pattern) for pattern in schedule.roles or ()):
            paths[", ".join(part.dims)].append(part.pattern)
        if part.makes_logits:
            paths["logits"].append(part.pattern)
    return {role: tuple(of) for role, of in sorted(paths.items(), key=lambda row: -len(row[1]))}


def _check_experts(parts: list[Part], schedule: Schedule) -> None:
    """Check that it is said how many experts tokens meet if, and only if, there are some."""
    most = max(parts, key=lambda part: part.experts, default=None)
    if most is not None and most.experts > 1 and schedule.experts_per_token is None:
        raise ValueError(
            f"experts_per_token is not given, and {brief(most.pattern)} has "
            f"{counted(most.experts, 'expert')}; give the number that each token meets, such as "
            "experts_per_token=2"
        )
    if schedule.experts_per_token is not None and (most is None or most.experts < 2):
        kernels = [part for part in parts if part.is_product and "lookup" not in part.dims]
        kernels.sort(key=lambda part: -len(part.shape))
        seen = [f"{brief(part.pattern)} {part.shape}" for part in kernels[:_MOST_SEEN]]
        seen += and_more(len(kernels), _MOST_SEEN, "pattern")
        raise ValueError(
            f"experts_per_token is {schedule.experts_per_token}, and no array is known to be of "
            f"experts: looked at {', '.join(seen) or 'no kernel'}; leave it out, or say which "
            "dimension is that of experts, such as roles={'w1$': ('experts', 'in', 'out')}"
        )


def cut_of(part: Part, kind: Kind, sizes: dict[str, int], batch: frozenset[str]) -> CutPart:
    """Return what the axes of a mesh of these sizes do for a part of this kind."""
    entries = entries_of(kind._counted) if kind._counted is not None else ()
    dims = [
        tuple(axis for axis in entry_axes(entry) if sizes.get(axis, 1) > 1) for entry in entries
    ]
    dims += [()] * (len(part.dims) - len(dims))
    experts = [
        a for axes, role in zip(dims, part.dims, strict=True) if role == "experts" for a in axes
    ]
    others = [axis for axes in dims for axis in axes if axis not in experts]
    return CutPart(
        part=part,
        kind=kind,
        dims=tuple(dims),
        gathered=tuple(axis for axis in others if axis in batch),
        experts=tuple(experts),
        kept=tuple(axis for axis in others if axis not in batch),
        sizes=sizes,
    )


def param_rows(cuts: Iterable[CutPart], schedule: Schedule) -> Iterator[Row]:
    """Yield the gathers of parameters.

    They are of those that batch axes cut, of those that are cut along the wrong side, and of those
    that ZeRO-1 renews.
    """
    for cut in cuts:
        local = cut.bytes()
        times = _gathers(cut, schedule) * schedule.accumulate
        gathered = local * cut.devices(cut.gathered)
        yield "all-gather", cut.gathered, "params", _array_count(cut) * times, gathered * times
        turned = gathered * cut.devices(cut.turned) * schedule.accumulate
        yield "all-gather", cut.turned, "params", _array_count(cut) * schedule.accumulate, turned
        if schedule.zero1 is not None and _has_gradient(cut) and _zero1_cuts(cut, schedule.zero1):
            yield "all-gather", (schedule.zero1,), "params", cut.part.leaves, local


def gradient_rows(
    cuts: Iterable[CutPart], schedule: Schedule, tensor_axes: frozenset[str]
) -> Iterator[Row]:
    """Yield the reductions of gradients over all devices that have seen other tokens.

    Args:
        cuts: Of the parameters.
        schedule: How the step is run.
        tensor_axes: The axes of tensor parallelism, which cut tokens under sequence parallelism.
    """
    bits = None if schedule.gradients is None else given_bits("gradients", schedule.gradients)
    for cut in filter(_has_gradient, cuts):
        used = {*cut.gathered, *cut.experts, *cut.kept}
        full = cut.bytes(bits) * cut.devices(cut.gathered)
        rows = [*_reductions(cut, schedule, {*schedule.batch_axes} - used, full)]
        rows.append(("all-to-all", cut.turned, full))
        if schedule.sequence_parallel:
            rows.append(("all-reduce", tensor_axes - used, full))
        times = schedule.accumulate
        for collective, axes, payload in rows:
            yield collective, axes, "gradients", _array_count(cut) * times, payload * times


def _reductions(
    cut: CutPart, schedule: Schedule, others: set[str], full: int
) -> Iterator[tuple[CollectiveKind, Iterable[str], int]]:
    """Yield (collective, axes, payload) of gradients; `others` are axes beside `cut.gathered`."""
    yield schedule.reduce, cut.gathered, full
    full //= cut.devices(cut.gathered)
    zero1 = schedule.zero1
    if zero1 in others and _zero1_cuts(cut, zero1):
        yield schedule.reduce, (zero1,), full
        others, full = others - {zero1}, full // cut.devices((zero1,))
    yield "all-reduce", others, full


def _array_count(cut: CutPart) -> int:
    """Return how many arrays a step uses: those of scanned layers one by one."""
    return cut.part.leaves * cut.part.size("stack")


def _gathers(cut: CutPart, schedule: Schedule) -> int:
    # The gradient of a look-up needs no rows, and nothing is between the two passes of the logits.
    is_once = "lookup" in cut.part.dims or cut.part.makes_logits
    return 1 if is_once and not cut.part.is_tied else schedule.gathers


def _has_gradient(cut: CutPart) -> bool:
    return re.match("b?float|complex", str(cut.kind.dtype)) is not None


def _zero1_cuts(cut: CutPart, axis: str) -> bool:
    """Return whether `Plan.for_optimizer(zero1=axis)` cuts the moments by this axis as well."""
    parts = [cut.devices(axes) for axes in cut.dims]
    shape = zip(cut.part.shape, parts, strict=True)
    cuts_already = any(axis in axes for axes in cut.dims)
    return not cuts_already and any(n and n % (cut.sizes[axis] * each) == 0 for n, each in shape)


class Use(NamedTuple):
    """Kernels, or tables, that tokens meet in a step."""

    cut: CutPart
    tokens: Fraction | int
    """Tokens that each of the arrays meets on a device; those of scanned layers are arrays, too."""
    share: Fraction | int
    """The same of all devices' tokens, as a share of the step's."""
    arrays: int
    """How many arrays there are."""
    inputs: int
    """How many inputs these have."""


def kernel_uses(cuts: Iterable[CutPart], schedule: Schedule) -> Iterator[Use]:
    """Yield all uses; none for leaves that meet tokens without a product, such as norms."""
    for cut in cuts:
        if cut.part.is_product:
            yield _use(cut, schedule)
        if cut.part.is_tied:
            # The logits are the tokens' products with the table, the other way round.
            turned: dict[DimRole, DimRole] = {"lookup": "out", "out": "in"}
            dims = tuple(turned.get(role, role) for role in cut.part.dims)
            part = replace(cut.part, dims=dims, input_key=f"{cut.part.input_key} logits")
            yield _use(cut._replace(part=part), schedule)


def _use(cut: CutPart, schedule: Schedule) -> Use:
    part = cut.part
    share: Fraction | int = 1
    local: Fraction | int = schedule.tokens_per_device(cut.sizes)
    if part.experts > 1:
        share = Fraction(schedule.capacity_factor) * (schedule.experts_per_token or 1)
        # Where each leaf is an expert, a token goes to some of them.
        share /= 1 if "experts" in part.dims else part.experts
        siblings = [axis for axis in cut.experts if axis not in schedule.batch_axes]
        local = local * share / cut.devices(siblings)
    layers = part.size("stack")
    return Use(
        cut=cut, tokens=local, share=share, arrays=part.leaves * layers, inputs=part.inputs * layers
    )


class _Sum(NamedTuple):
    """Collectives of so many elements for each token."""

    collective: CollectiveKind
    axes: tuple[str, ...]
    times: int
    width: int


def activation_rows(uses: Sequence[Use], schedule: Schedule) -> Iterator[Row]:
    """Yield the collectives of products with kernels that tensor axes cut."""
    shared: set[tuple[str, int, tuple[str, ...]]] = set()
    heads = {
        _input(use): out_axes
        for use in uses
        if use.cut.part.is_attention and (out_axes := use.cut.along("out"))
    }
    for use in uses:
        if use.cut.kept:
            sums = (*_forward(use, schedule), *_of_inputs(use, schedule, shared))
        else:
            # Each device has keys and values of all heads, and gradients of those that it reads.
            outputs = use.cut.part.size("out")
            sums = (_Sum("all-reduce", heads.get(_input(use), ()), use.arrays, outputs),)
        for each in sums:
            yield _collective_row(each, use.tokens, "activations", schedule)


def _input(use: Use) -> tuple[str, int]:
    """Return a key that kernels with the same input share."""
    return use.cut.part.input_key, use.cut.part.size("in")


def _forward(use: Use, schedule: Schedule) -> Iterator[_Sum]:
    """Yield the collectives of outputs and of their gradients."""
    part, out_axes = use.cut.part, use.cut.along("out")
    contracted = use.cut.along("in", "lookup")
    width = -(-part.size("out") // use.cut.devices(out_axes))
    # Of a square kernel only its name tells.
    is_written = part.size("out") == part.width and part.flow != "reads"
    if use.cut.turned:
        yield _Sum("all-gather", out_axes, use.arrays * schedule.gathers, part.width)
        return
    if contracted and schedule.sequence_parallel and is_written:
        yield _Sum(schedule.reduce, contracted, use.arrays, width)
        yield _Sum("all-gather", contracted, use.arrays, width)
    elif contracted:
        yield _Sum("all-reduce", contracted, use.arrays, width)
    if out_axes and is_written and part.size("in") != part.width:
        # The residual stream is whole, and the kernel makes a part of it.
        yield _Sum("all-gather", out_axes, use.arrays, part.width)


def _of_inputs(
    use: Use, schedule: Schedule, shared: set[tuple[str, int, tuple[str, ...]]]
) -> Iterator[_Sum]:
    """Yield the collectives of inputs' gradients; `shared` has the inputs that were reduced."""
    part, out_axes, contracted = use.cut.part, use.cut.along("out"), use.cut.along("in")
    if "in" not in part.dims or use.cut.turned:
        return
    width = -(-part.size("in") // use.cut.devices(contracted))
    is_read = _reads_residual(use)
    key = (*_input(use), out_axes)
    once = 0 if key in shared else use.inputs
    times = use.arrays if schedule.input_gradients == "each" else once
    shared.add(key)
    if out_axes and schedule.sequence_parallel and is_read:
        yield _Sum("all-gather", out_axes, once, width)
        yield _Sum(schedule.reduce, out_axes, times, width)
    elif out_axes:
        yield _Sum("all-reduce", out_axes, times, width)
    if contracted and is_read and part.size("out") != part.width:
        # The residual stream's gradient is whole, and the kernel's input was a part of it.
        yield _Sum("all-gather", contracted, once, part.width)


def expert_rows(uses: Iterable[Use], schedule: Schedule) -> Iterator[Row]:
    """Yield the collectives that bring tokens to the devices of their experts and back.

    Where the experts' axis cuts the batch as well, tokens are sent to their experts. Where it does
    not, each of its devices has them already, and the experts' outputs are summed.
    """
    seen = set()
    for use in uses:
        part, cut = use.cut.part, use.cut
        if not cut.experts or not _reads_residual(use) or part.input_key in seen:
            continue
        seen.add(part.input_key)
        batch = frozenset(schedule.batch_axes)
        over_tokens = tuple(axis for axis in cut.experts if axis in batch)
        sent = _Sum("all-to-all", over_tokens, 4 * use.inputs, part.width)
        yield _collective_row(sent, use.tokens, "experts", schedule)
        siblings = tuple(axis for axis in cut.experts if axis not in batch)
        summed = _Sum("all-reduce", siblings, 2 * use.inputs, part.width)
        yield _collective_row(summed, schedule.tokens_per_device(cut.sizes), "experts", schedule)


def uncounted(uses: Sequence[Use]) -> Iterator[str]:
    """Yield the folded paths of kernels whose activations are sent in a way that is not known."""
    paths = {use.cut.part.input_key for use in uses if use.cut.experts and _reads_residual(use)}
    for use in uses:
        part, cut = use.cut.part, use.cut
        if cut.along("unknown", "stack") or (cut.experts and part.input_key not in paths):
            yield part.pattern


def _reads_residual(use: Use) -> bool:
    """Tell if it is a kernel that reads the residual stream; of a square one its name tells."""
    part = use.cut.part
    is_square = part.size("out") == part.width
    is_wide = "in" in part.dims and part.size("in") == part.width
    return is_wide and not (is_square and part.flow == "writes")


def _collective_row(summed: _Sum, tokens: Fraction | int, purpose: Of, schedule: Schedule) -> Row:
    bits = given_bits("activations", schedule.activations)
    payload = -(-tokens * summed.width * summed.times * bits // 8)
    return summed.collective, summed.axes, purpose, summed.times * schedule.accumulate, payload
