"""Making a spec fit an array and a mesh, by the policies of a `Correction`.

A spec is bound to a mesh's axis sizes once; the C++ `Corrector` then says which of its axes an
array of a given shape can have, and from that the corrected spec is made, once per distinct answer.
What was lost, and why, is derived from the same answer. Must not know about paths, trees or
contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from shardrules._core import Corrector
from shardrules._correction import Correction
from shardrules._specs import (
    Dim,
    Entries,
    entries_of,
    entry_axes,
    entry_of,
    is_unconstrained,
    partition_spec,
    with_dims,
    with_entries,
)
from shardrules._words import nearest

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

__all__ = ["Loss", "SpecOnMesh"]


class Loss(NamedTuple):
    """Axes of a spec that an array does not get, or (for "rank" and "duplicate") cannot have."""

    kind: str
    """"absent", "indivisible", "rank" or "duplicate"."""
    dim: int
    axes: tuple[str, ...]


class SpecOnMesh:
    """A spec bound to the axis sizes of a mesh and to a correction.

    Args:
        spec: A PartitionSpec, or the Entries of one; what comes out is of the same kind.
        axis_sizes: Devices along each mesh axis.
        correction: The policies.
        units: As in `RuleSpec`.
        follows: Whether its arrays have their shapes from others, as scales have.

    Raises:
        ValueError: The spec has more than 64 axes.
    """

    __slots__ = ("_axes", "_axis_sizes", "_correction", "_follows", "_units", "corrector", "spec")

    def __init__(
        self,
        spec: PartitionSpec | Entries,
        axis_sizes: Mapping[str, int],
        correction: Correction,
        units: tuple[int | None, ...] = (),
        *,
        follows: bool = False,
    ) -> None:
        self._follows = follows
        self.spec: Any = spec
        self._axis_sizes = axis_sizes
        self._correction = correction
        self._axes = tuple(map(entry_axes, entries_of(spec)))
        self._units = tuple(
            (units[dim] if dim < len(units) else None) or 1 for dim in range(len(spec))
        )
        self.corrector = Corrector(
            [
                ([axis_sizes.get(axis, 0) for axis in axes], unit)
                for axes, unit in zip(self._axes, self._units, strict=True)
            ],
            absent=_dropping(correction.absent),
            indivisible=_dropping(correction.indivisible),
        )

    def corrected(self, rank: int, kept: int) -> Any:
        """The spec for arrays of this rank that can have the `kept` axes; None if forbidden."""
        if any(self._is_error(loss) for loss in self.losses(rank, kept)):
            return None
        if rank < len(self.spec) and self._correction.rank == "replicate":
            return Entries() if isinstance(self.spec, Entries) else partition_spec()
        entries = [
            self._entry(entry, axes)
            for entry, axes in zip(entries_of(self.spec), self._kept_axes(rank, kept), strict=False)
        ]
        if self._correction.pad:
            entries += [None] * (rank - len(entries))
            if all(entry is None for entry in entries):
                entries = []
        return with_entries(self.spec, entries)

    def with_dims(self, dims: tuple[Dim, ...], blocks: tuple[int, ...] = ()) -> SpecOnMesh:
        """The same for arrays whose dimensions are some of those that the spec is for.

        Args:
            dims: As in `shardrules._specs.with_dims`.
            blocks: Per dimension, how many elements one element stands for; 1 unless told.
        """

        def unit(position: int, dim: Dim) -> int:
            known = self._units[dim] if isinstance(dim, int) and dim < len(self._units) else 1
            block = blocks[position] if position < len(blocks) else 1
            return lcm(known, block) // block

        return SpecOnMesh(
            with_dims(self.spec, dims),
            self._axis_sizes,
            self._correction,
            tuple(unit(position, dim) for position, dim in enumerate(dims)),
            follows=True,
        )

    def losses(self, rank: int, kept: int) -> Iterator[Loss]:
        """What an array of this rank that can have the `kept` axes does not get, dim by dim."""
        if rank < len(self.spec):
            lost = tuple(axis for axes in self._axes[rank:] for axis in axes)
            yield Loss("rank", rank, lost)
            if self._correction.rank == "replicate":
                return
        seen: set[str] = set()
        for dim, axes in enumerate(self._kept_axes(rank, kept)):
            wanted = self._axes[dim]
            absent = tuple(axis for axis in wanted if axis not in self._axis_sizes)
            if absent:
                yield Loss("absent", dim, absent)
            if len(axes) < len(wanted) and not (absent and self._lost_to_absent(wanted, axes)):
                yield Loss("indivisible", dim, tuple(a for a in wanted if a not in absent))
            twice = tuple(a for i, a in enumerate(axes) if a in seen or a in axes[:i])
            if twice:
                yield Loss("duplicate", dim, twice)
            seen.update(axes)

    def errors(self, shape: tuple[int, ...]) -> Iterator[str]:
        """Of each loss that an array of this shape may not have: what is wrong and the way out."""
        yield from map(": ".join, self.problems(shape))

    def problems(self, shape: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        """The same in two: (what is wrong, the way out)."""
        for loss in self.losses(len(shape), self.corrector.kept(shape)):
            if self._is_error(loss):
                yield self.described(loss, shape)

    def _is_error(self, loss: Loss) -> bool:
        return loss.kind == "duplicate" or getattr(self._correction, loss.kind) == "error"

    def _kept_axes(self, rank: int, kept: int) -> Iterator[tuple[str, ...]]:
        bit = 1
        for dim, axes in enumerate(self._axes):
            mine = []
            for axis in axes:
                # The core looks at the dimensions that there are.
                if kept & bit or dim >= rank:
                    mine.append(axis)
                bit <<= 1
            if dim < rank or self._correction.rank == "keep":
                yield tuple(mine)

    def _lost_to_absent(self, wanted: tuple[str, ...], kept: tuple[str, ...]) -> bool:
        """Whether the absent axes alone explain what was lost."""
        present = tuple(axis for axis in wanted if axis in self._axis_sizes)
        first_absent = next(i for i, axis in enumerate(wanted) if axis not in self._axis_sizes)
        left = {"drop_axis": present, "prefix": wanted[:first_absent], "keep": wanted}
        return kept == left.get(self._correction.absent, ())

    def _entry(self, entry: Any, axes: tuple[str, ...]) -> Any:
        if is_unconstrained(entry):
            return entry if self._correction.unconstrained == "keep" else None
        if self._correction.size_one == "remove":
            axes = tuple(axis for axis in axes if self._axis_sizes.get(axis) != 1)
        return entry if axes and axes == entry_axes(entry) else entry_of(axes)

    def told(self, loss: Loss, shape: tuple[int, ...]) -> tuple[str, str]:
        """As `described`; of a loss that was accepted, also what else it took."""
        what, way_out = self.described(loss, shape)
        if self._is_error(loss):
            return what, way_out
        if loss.kind == "rank":
            return what, "shorten the spec"
        if loss.kind == "absent":
            return self._told_of_absent(loss)
        if len(loss.axes) == 1 or self._correction.indivisible != "drop":
            return what, self._fewer()
        return what, way_out

    def _fewer(self) -> str:
        # The size of a scale is not free.
        return "use fewer axes" + ("" if self._follows else " or pad the array")

    def _told_of_absent(self, loss: Loss) -> tuple[str, str]:
        what = f"the mesh has no {self._absent_shown(loss)}"
        it = "it" if len(loss.axes) == 1 else "them"
        way_out = (
            f"rename {it} in the rule, add {it} to the mesh, or declare {it} in optional_axes if a "
            f"mesh may lack {it}"
        )
        beside = [repr(a) for a in self._axes[loss.dim] if a in self._axis_sizes]
        if self._correction.absent != "drop" or not beside:
            return what, way_out
        verb = "is" if len(beside) == 1 else "are"
        return (
            f"{what}, so {', '.join(beside)} beside {it} {verb} dropped too",
            f"{way_out}, and let Correction(absent='drop_axis') keep what is beside {it}",
        )

    def _absent_shown(self, loss: Loss) -> str:
        """Axes that the mesh lacks, with those that were probably meant."""
        named = {axis for axes in self._axes for axis in axes}
        free = [axis for axis in self._axis_sizes if axis not in named]
        meant = [near for axis in loss.axes if (near := nearest(axis, free))]
        noun = "axis" if len(loss.axes) == 1 else "axes"
        hint = f" (did you mean {', '.join(map(repr, meant))}?)" if meant else ""
        return f"{noun} {', '.join(map(repr, loss.axes))}{hint}"

    def described(self, loss: Loss, shape: tuple[int, ...]) -> tuple[str, str]:
        """What a loss of an array of this shape is, and the way out."""
        axes = ", ".join(map(repr, loss.axes))
        if loss.kind == "rank":
            return (
                f"the spec has {len(self.spec)} entries, the array {len(shape)} dimensions",
                "shorten the spec, or truncate it with Correction(rank='truncate')",
            )
        if loss.kind == "absent":
            return (
                f"dim {loss.dim}: the mesh has no {self._absent_shown(loss)}",
                "rename it in the rule, add it to the mesh, or drop it with "
                "Correction(absent='drop_axis')",
            )
        if loss.kind == "duplicate":
            return (
                f"dim {loss.dim}: {axes} is used twice",
                "an axis can cut only one dimension, once",
            )
        parts = " * ".join(f"{axis}={self._axis_sizes[axis]}" for axis in loss.axes)
        unit = self._units[loss.dim]
        multiples = f" in multiples of {unit}" if unit > 1 else ""
        return (
            f"dim {loss.dim} of size {shape[loss.dim]} is not divisible by {parts}{multiples}",
            f"{self._fewer()}, or let Correction(indivisible='prefix') keep those that divide",
        )


def _dropping(misfit: str) -> str:
    # What "error" drops is reported by whoever sees that it was dropped.
    return "drop" if misfit == "error" else misfit
