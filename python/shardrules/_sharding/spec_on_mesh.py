"""Making a spec fit an array and a mesh, by the policies of a `Correction`.

A spec is bound to a mesh's axis sizes once. The C++ `Corrector` then decides which of its axes an
array of a given shape keeps. The corrected spec is made once per distinct decision, and the losses
follow from the same decision. Must not know about paths, trees or contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardrules._core import Corrector
from shardrules._correction import Correction
from shardrules._format import nearest
from shardrules._specs import (
    Dim,
    Entries,
    axes_present,
    entries_of,
    entry_axes,
    entry_of,
    is_unconstrained,
    partition_spec,
    with_dims,
    with_entries,
)

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

__all__ = ["LossKind", "LostAxes", "SpecOnMesh"]

LossKind = Literal["absent", "indivisible", "rank", "duplicate"]


class LostAxes(NamedTuple):
    """Axes of a spec that an array loses, or (for "rank" and "duplicate") cannot have."""

    kind: LossKind
    dim: int
    axes: tuple[str, ...]


class SpecOnMesh:
    """A spec bound to the axis sizes of a mesh and to a correction.

    Args:
        spec: A PartitionSpec, or the Entries of one. Corrected specs have the same type.
        axis_sizes: Devices along each mesh axis.
        correction: The policies.
        units: As in `RuleSpec`.
        follows: Whether the shapes of its arrays depend on other arrays, as for scales.

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
        if any(map(self.is_error, self.lost(rank, kept))):
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
        """The spec for arrays that have some of the dimensions, as scales have.

        Args:
            dims: As in `shardrules._specs.with_dims`.
            blocks: For each dimension, the number of elements that one element stands for.
                Default: 1.
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

    def lost(self, rank: int, kept: int) -> Iterator[LostAxes]:
        """The losses of an array of this rank that keeps the `kept` axes, by dimension."""
        if rank < len(self.spec):
            lost = tuple(axis for axes in self._axes[rank:] for axis in axes)
            yield LostAxes("rank", rank, lost)
            if self._correction.rank == "replicate":
                return
        seen: set[str] = set()
        for dim, axes in enumerate(self._kept_axes(rank, kept)):
            wanted = self._axes[dim]
            absent = tuple(axis for axis in wanted if axis not in self._axis_sizes)
            if absent:
                yield LostAxes("absent", dim, absent)
            if len(axes) < len(wanted) and not (absent and self._lost_to_absent(wanted, axes)):
                yield LostAxes("indivisible", dim, tuple(a for a in wanted if a not in absent))
            twice = tuple(a for i, a in enumerate(axes) if a in seen or a in axes[:i])
            if twice:
                yield LostAxes("duplicate", dim, twice)
            seen.update(axes)

    def is_error(self, lost: LostAxes) -> bool:
        """Whether the correction forbids the loss."""
        return lost.kind == "duplicate" or getattr(self._correction, lost.kind) == "error"

    def errors(self, shape: tuple[int, ...]) -> Iterator[str]:
        """Message and fix, in a line, of each loss of an array of this shape that is an error."""
        for lost in self.lost(len(shape), self.corrector.kept(shape)):
            if self.is_error(lost):
                yield ": ".join(self.words(lost, shape))

    def _kept_axes(self, rank: int, kept: int) -> Iterator[tuple[str, ...]]:
        bit = 1
        for dim, axes in enumerate(self._axes):
            mine = []
            for axis in axes:
                # The core decides only about existing dimensions.
                if kept & bit or dim >= rank:
                    mine.append(axis)
                bit <<= 1
            if dim < rank or self._correction.rank == "keep":
                yield tuple(mine)

    def _lost_to_absent(self, wanted: tuple[str, ...], kept: tuple[str, ...]) -> bool:
        """Whether the absent axes explain the whole loss."""
        policy = _dropping(self._correction.absent)
        return list(kept) == axes_present(list(wanted), self._axis_sizes, policy)

    def _entry(self, entry: Any, axes: tuple[str, ...]) -> Any:
        if is_unconstrained(entry):
            return entry if self._correction.unconstrained == "keep" else None
        return entry if axes and axes == entry_axes(entry) else entry_of(axes)

    def meant(self, lost: LostAxes) -> tuple[str, ...]:
        """Mesh axes that were probably meant by absent axes, and that the spec does not name."""
        if lost.kind != "absent":
            return ()
        named = {axis for axes in self._axes for axis in axes}
        free = [axis for axis in self._axis_sizes if axis not in named]
        return tuple(near for axis in lost.axes if (near := nearest(axis, free)))

    def beside(self, lost: LostAxes) -> tuple[str, ...]:
        """Axes of the mesh that are dropped only because absent axes are in the same entry."""
        if lost.kind != "absent" or self._correction.absent != "drop":
            return ()
        return tuple(axis for axis in self._axes[lost.dim] if axis in self._axis_sizes)

    def words(self, lost: LostAxes, shape: tuple[int, ...]) -> tuple[str, str]:
        """(message, fix) of a loss of an array of this shape."""
        words = {
            "rank": self._words_of_rank,
            "absent": self._words_of_absent,
            "duplicate": self._words_of_duplicate,
            "indivisible": self._words_of_indivisible,
        }
        return words[lost.kind](lost, shape)

    def _words_of_rank(self, lost: LostAxes, shape: tuple[int, ...]) -> tuple[str, str]:
        message = f"the spec has {len(self.spec)} entries, the array {len(shape)} dimensions"
        other = ", or truncate it with Correction(rank='truncate')" if self.is_error(lost) else ""
        return message, f"shorten the spec{other}"

    def _words_of_absent(self, lost: LostAxes, _: tuple[int, ...]) -> tuple[str, str]:
        noun = "axis" if len(lost.axes) == 1 else "axes"
        meant = ", ".join(map(repr, self.meant(lost)))
        hint = f" (did you mean {meant}?)" if meant else ""
        message = f"the mesh has no {noun} {', '.join(map(repr, lost.axes))}{hint}"
        if self.is_error(lost):
            return (
                f"dim {lost.dim}: {message}",
                "rename it in the rule, add it to the mesh, or drop it with "
                "Correction(absent='drop_axis')",
            )
        it = "it" if len(lost.axes) == 1 else "them"
        fix = (
            f"rename {it} in the rule, add {it} to the mesh, or declare {it} in optional_axes if a "
            f"mesh may lack {it}"
        )
        beside = self.beside(lost)
        if not beside:
            return message, fix
        verb = "is" if len(beside) == 1 else "are"
        return (
            f"{message}, so {', '.join(map(repr, beside))} beside {it} {verb} dropped too",
            f"{fix}, and let Correction(absent='drop_axis') keep what is beside {it}",
        )

    def _words_of_duplicate(self, lost: LostAxes, _: tuple[int, ...]) -> tuple[str, str]:
        return (
            f"dim {lost.dim}: {', '.join(map(repr, lost.axes))} is used twice",
            "an axis can cut only one dimension, once",
        )

    def _words_of_indivisible(self, lost: LostAxes, shape: tuple[int, ...]) -> tuple[str, str]:
        parts = " * ".join(f"{axis}={self._axis_sizes[axis]}" for axis in lost.axes)
        unit = self._units[lost.dim]
        multiples = f" in multiples of {unit}" if unit > 1 else ""
        message = f"dim {lost.dim} of size {shape[lost.dim]} is not divisible by {parts}{multiples}"
        # The size of a scale is not free.
        fix = "use fewer axes" + ("" if self._follows else " or pad the array")
        could_keep_some = len(lost.axes) > 1 and self._correction.indivisible == "drop"
        if could_keep_some or self.is_error(lost):
            fix += ", or let Correction(indivisible='prefix') keep those that divide"
        return message, fix


def _dropping(misfit: str) -> str:
    # "error" drops in the core; the caller sees the loss and reports it.
    return "drop" if misfit == "error" else misfit
