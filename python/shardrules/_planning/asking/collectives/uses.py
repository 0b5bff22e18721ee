"""The products of tokens with kernels in a step: who reads how many tokens, and what is cut.

Costs a record per folded path. Must not know what is sent, nor how long anything takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardrules._planning.asking.collectives.cuts import CutPart
    from shardrules._planning.asking.collectives.schedule import Schedule
    from shardrules._planning.roles import DimRole

__all__ = ["Use", "uses_of"]


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


def uses_of(cuts: Iterable[CutPart], schedule: Schedule) -> Iterator[Use]:
    """All uses; none for leaves that meet tokens without a product, such as norms."""
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
        # Of leaves that are an expert each, a token meets some.
        share /= 1 if "experts" in part.dims else part.experts
        beside = [axis for axis in cut.experts if axis not in schedule.batch_axes]
        local = local * share / cut.devices(beside)
    layers = part.size("stack")
    return Use(
        cut=cut,
        tokens=local,
        share=share,
        arrays=part.leaves * layers,
        inputs=part.inputs * layers,
    )
