"""What each mesh axis does for leaves: gather them, keep them cut, or cut their experts.

Costs a look at each dimension of each kind. Must not know what is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._format import and_more, brief, counted
from shardrules._planning.roles import with_roles
from shardrules._sharding.device_bytes import held_of
from shardrules._specs import Entries, entries_of, entry_axes

if TYPE_CHECKING:
    from shardrules._planning.asking.collectives.schedule import Schedule
    from shardrules._planning.columns import Columns
    from shardrules._planning.kinds import Kind
    from shardrules._planning.roles import DimRole, Part

__all__ = ["CutPart", "cut_of", "cut_parts"]

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
        held = held_of(kind.shape or (), bits, kind._counted or Entries(), self.sizes)
        return held.most * self.part.leaves

    def devices(self, axes: Iterable[str]) -> int:
        """How many devices there are along these axes."""
        return prod(self.sizes[axis] for axis in axes)

    def along(self, *roles: DimRole) -> tuple[str, ...]:
        """The kept axes that cut dimensions of these roles."""
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
    """What the axes of the mesh do for each folded path of parameters.

    Raises:
        ValueError: The schedule lacks what the model needs, or its roles do not fit.
    """
    parts: Iterable[Part] = columns.leaves.parts
    if schedule.roles:
        parts = with_roles(columns.leaves.parts, schedule.roles)
    batch = frozenset(schedule.batch_axes)
    cuts = [cut_of(part, columns.kinds[part.kind], columns.axis_sizes, batch) for part in parts]
    _check_experts(list(parts), schedule)
    return cuts


def _check_experts(parts: list[Part], schedule: Schedule) -> None:
    """Checks that it is said how many experts tokens meet if, and only if, there are some.

    Raises:
        ValueError: It is not.
    """
    most = max(parts, key=lambda part: part.experts, default=None)
    if most is not None and most.experts > 1 and schedule.experts_per_token is None:
        raise ValueError(
            f"experts_per_token is not given, and {brief(most.pattern)} has "
            f"{counted(most.experts, 'expert')}; give the number that each token meets, such as "
            "experts_per_token=2"
        )
    if schedule.experts_per_token is not None and (most is None or most.experts < 2):
        kernels = sorted(filter(_is_kernel, parts), key=lambda part: -len(part.shape))
        seen = [f"{brief(part.pattern)} {part.shape}" for part in kernels[:_MOST_SEEN]]
        seen += and_more(len(kernels), _MOST_SEEN, "pattern")
        raise ValueError(
            f"experts_per_token is {schedule.experts_per_token}, and no array is known to be of "
            f"experts: looked at {', '.join(seen) or 'no kernel'}; leave it out, or say which "
            "dimension is that of experts, such as roles={'w1$': ('experts', 'in', 'out')}"
        )


def _is_kernel(part: Part) -> bool:
    return part.is_product and "lookup" not in part.dims


def cut_of(part: Part, kind: Kind, sizes: dict[str, int], batch: frozenset[str]) -> CutPart:
    """What the axes of a mesh of these sizes do for a part of this kind."""
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
