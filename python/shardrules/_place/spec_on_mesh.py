"""Specs bound to the axis sizes of a mesh: the axes that arrays keep and lose, and why.

Specs that are made from shapes are bound as plain ones are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from shardrules._base.dtypes import as_bits
from shardrules._base.rule_specs import Correction, Fsdp, IndivisiblePolicy, absent_policy
from shardrules._base.specs import (
    Dim,
    Entries,
    axes_in_tags,
    axes_present,
    entries_of,
    entry_axes,
    entry_of,
    few_heads_advice,
    is_unconstrained,
    partition_spec,
    spec_shown,
    with_dims,
    with_entries,
)
from shardrules._base.text import counted, nearest
from shardrules._core import Corrector

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

LossKind = Literal["absent", "optional", "indivisible", "rank", "duplicate", "unreduced"]


NO_OTHERS: Final[Mapping[str, frozenset[str]]] = {}


class LostAxes(NamedTuple):
    """Axes of a spec that an array loses, or cannot have on this mesh."""

    kind: LossKind
    dim: int
    axes: tuple[str, ...]


class SpecOnMesh:
    """Spec bound to the axis sizes of a mesh and to a correction.

    Args:
        spec: A PartitionSpec, or the Entries of one. Corrected specs have the same type.
        axis_sizes: Devices along each mesh axis.
        correction: The policies.
        units: As in `RuleSpec`.
        shape_is_derived: Whether the shapes of its arrays depend on other arrays, as for scales.
        optional_axes: Axes that the mesh may lack, which are no error then.
        named_with: {axis that the mesh may lack: axes that other rules name beside it}; these are
            never what "did you mean" offers for it.
    """

    __slots__ = (
        "_absent",
        "_all_kept",
        "_axes",
        "_correction",
        "_entries",
        "_first",
        "_named_with",
        "_optional_axes",
        "_shape_is_derived",
        "_tags_lost",
        "_whole",
        "axis_sizes",
        "corrector",
        "spec",
        "units",
    )

    def __init__(
        self,
        spec: PartitionSpec | Entries,
        axis_sizes: Mapping[str, int],
        correction: Correction,
        units: tuple[int | None, ...] = (),
        *,
        shape_is_derived: bool = False,
        optional_axes: frozenset[str] = frozenset(),
        named_with: Mapping[str, frozenset[str]] = NO_OTHERS,
    ) -> None:
        self._shape_is_derived = shape_is_derived
        self._named_with = named_with
        self._absent = absent_policy(correction)
        self._optional_axes = optional_axes
        self.axis_sizes: Final = axis_sizes
        self._correction = correction
        self.spec: Any = spec
        self._entries = entries_of(spec)
        self._axes = tuple(map(entry_axes, self._entries))
        tags = () if type(spec) is Entries else axes_in_tags(spec).values()
        absent = [tuple([axis for axis in axes if axis not in axis_sizes]) for axes in tags]
        self._tags_lost = [LostAxes("unreduced", 0, axes) for axes in absent if axes]
        # By dimension, the bit of its first axis in `Corrector.kept`.
        self._first = tuple(accumulate(map(len, self._axes), initial=0))
        named = [axis for axes in self._axes for axis in axes]
        # What `Corrector.kept` returns where nothing is lost; None if something always is.
        self._all_kept: int | None = None
        if len(axis_sizes.keys() & named) == len(named) and not self._tags_lost:
            self._all_kept = (1 << len(named)) - 1
        self._whole: dict[int, Any] = {}
        rest = [None] * (len(spec) - len(units))
        self.units: Final = tuple([unit or 1 for unit in (*units, *rest)])
        self.corrector = Corrector(
            [
                ([axis_sizes.get(axis, 0) for axis in axes], unit)
                for axes, unit in zip(self._axes, self.units, strict=False)
            ],
            self._if_absent,
            _as_core(correction.indivisible),
        )

    def for_array(self, shape: tuple[int, ...], bits: int | None) -> tuple[SpecOnMesh, str | None]:
        """Return (the spec for arrays of this shape, its origin if it is not the rule): itself."""
        return self, None

    def with_spec(self, spec: Entries) -> SpecOnMesh:
        """Return another spec, bound to the same sizes, correction and units."""
        return self._bound(with_entries(self.spec, spec), self.units, self._shape_is_derived)

    def _bound(self, spec: Any, units: tuple[int, ...], shape_is_derived: bool) -> SpecOnMesh:
        return SpecOnMesh(
            spec,
            self.axis_sizes,
            self._correction,
            units,
            shape_is_derived=shape_is_derived,
            optional_axes=self._optional_axes,
            named_with=self._named_with,
        )

    def fit(self, shape: tuple[int, ...]) -> tuple[Any, list[LostAxes]]:
        """Return (the corrected spec for arrays of this shape, the axes that these lose).

        The spec is that without the lost axes, even where the correction forbids the loss.
        """
        rank, kept = len(shape), self.corrector.kept(shape)
        if kept != self._all_kept or rank < len(self._axes):
            return self.without_lost(rank, kept), list(self.lost(rank, kept))
        if rank not in self._whole:
            self._whole[rank] = self.without_lost(rank, kept)
        return self._whole[rank], []

    def corrected_for(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the corrected spec for arrays of this shape and any dtype; None if forbidden."""
        return self.corrected(len(shape), self.corrector.kept(shape))

    def corrected(self, rank: int, kept: int) -> Any:
        """Return the spec for arrays of this rank with the `kept` axes; None if forbidden."""
        if any(map(self.is_error, self.lost(rank, kept))):
            return None
        return self.without_lost(rank, kept)

    def without_lost(self, rank: int, kept: int) -> Any:
        """Return the corrected spec, even where the loss is an error."""
        if rank < len(self.spec) and self._correction.rank == "replicate":
            return Entries() if isinstance(self.spec, Entries) else partition_spec()
        entries = [
            self._entry(entry, axes)
            for entry, axes in zip(self._entries, self._kept_axes(rank, kept), strict=False)
        ]
        if self._correction.pad:
            entries += [None] * (rank - len(entries))
            if {*entries} <= {None}:
                entries = []
        is_whole = tuple(entries) == self._entries
        return self.spec if is_whole else with_entries(self.spec, entries)

    def with_dims(self, dims: tuple[Dim, ...]) -> SpecOnMesh:
        """Return the spec for arrays that have some of the dimensions, as scales have.

        Args:
            dims: As in `shardrules._base.specs.with_dims`.
        """
        units = tuple(
            self.units[dim] if isinstance(dim, int) and dim < len(self.units) else 1 for dim in dims
        )
        return self._bound(with_dims(self.spec, dims), units, shape_is_derived=True)

    def lost(self, rank: int, kept: int) -> Iterator[LostAxes]:
        """Yield the losses of an array of this rank that keeps the `kept` axes, by dimension."""
        if rank < len(self.spec):
            lost = tuple(axis for axes in self._axes[rank:] for axis in axes)
            yield LostAxes("rank", rank, lost)
            if self._correction.rank == "replicate":
                return
        yield from self._tags_lost
        seen: set[str] = set()
        for dim, axes in enumerate(self._kept_axes(rank, kept)):
            named = self._axes[dim]
            absent = tuple(axis for axis in named if axis not in self.axis_sizes)
            optional = tuple(filter(self._may_lack, absent))
            if unknown := tuple(axis for axis in absent if axis not in optional):
                yield LostAxes("absent", dim, unknown)
            if optional:
                yield LostAxes("optional", dim, optional)
            if len(axes) < len(named) and not (absent and self._lost_to_absent(named, axes)):
                present = tuple(axis for axis in named if axis not in absent)
                yield LostAxes("indivisible", dim, present)
            twice = tuple(a for i, a in enumerate(axes) if a in seen or a in axes[:i])
            if twice:
                yield LostAxes("duplicate", dim, twice)
            seen.update(axes)

    def is_error(self, lost: LostAxes) -> bool:
        """Return whether the correction forbids the loss."""
        if lost.kind == "absent":
            return self._absent == "error"
        return (
            lost.kind in ("duplicate", "unreduced")
            or getattr(self._correction, lost.kind, None) == "error"
        )

    def is_shared(self, lost: LostAxes, shape: tuple[int, ...]) -> bool:
        """Return whether arrays are cut into single units all the same, as few heads are."""
        if lost.kind != "indivisible" or type(shape[lost.dim]) is not int:
            return False
        parts = self._parts(self._correction.indivisible, lost.dim, shape)
        return parts > 1 and shape[lost.dim] == parts * self.units[lost.dim]

    def errors(self, shape: tuple[int, ...]) -> Iterator[str]:
        """Yield message and fix, in a line, of each loss of an array that is an error."""
        for lost in self.lost(len(shape), self.corrector.kept(shape)):
            if self.is_error(lost):
                yield ": ".join(self.message_and_fix(lost, shape))

    def _kept_axes(self, rank: int, kept: int) -> Iterator[tuple[str, ...]]:
        for dim, axes in enumerate(self._axes):
            if dim < rank:
                bits = kept >> self._first[dim]
                yield tuple([axis for place, axis in enumerate(axes) if bits >> place & 1])
            elif self._correction.rank == "keep":
                yield axes  # the core decides only about existing dimensions

    def _lost_to_absent(self, named: tuple[str, ...], kept: tuple[str, ...]) -> bool:
        """Return whether the absent axes explain the whole loss."""
        return list(kept) == axes_present(list(named), self.axis_sizes, self._if_absent)

    @property
    def _if_absent(self) -> str:
        # The caller sees the loss of what is not optional, and reports it.
        return "drop_axis" if self._absent == "error" else self._absent

    def _entry(self, entry: Any, axes: tuple[str, ...]) -> Any:
        if axes:
            return entry if axes == entry_axes(entry) else entry_of(axes)
        is_kept = is_unconstrained(entry) and self._correction.unconstrained == "keep"
        return entry if is_kept else None

    def suggested_axes(self, lost: LostAxes) -> tuple[str, ...]:
        """Return the mesh axes that absent axes probably mean, and that the spec does not name."""
        if lost.kind != "absent":
            return ()
        return tuple(near for axis in lost.axes if (near := self._near(axis)))

    def _near(self, axis: str) -> str | None:
        named = self._named_with.get(axis, frozenset()).union(*self._axes)
        return nearest(axis, [name for name in self.axis_sizes if name not in named])

    def _may_lack(self, axis: str) -> bool:
        """Return whether it is declared that the mesh may lack the axis, which is dropped alone."""
        if self._absent == "drop_axis":
            return self._near(axis) is None
        return self._absent == "error" and axis in self._optional_axes

    def dropped_with(self, lost: LostAxes) -> tuple[str, ...]:
        """Return the mesh axes that are dropped only because of absent axes in the same entry."""
        if lost.kind != "absent" or self._absent != "drop":
            return ()
        return tuple(axis for axis in self._axes[lost.dim] if axis in self.axis_sizes)

    def message_and_fix(self, lost: LostAxes, shape: tuple[int, ...]) -> tuple[str, str]:
        """Return (message, fix) of a loss of an array of this shape."""
        message, fix = getattr(self, f"_words_of_{lost.kind}")(lost, shape)
        return message, fix

    def _words_of_rank(self, lost: LostAxes, shape: tuple[int, ...]) -> tuple[str, str]:
        message = (
            f"the spec has {counted(len(self.spec), 'entry')}, the array "
            f"{counted(len(shape), 'dimension')}"
        )
        hint = ", or truncate it with Correction(rank='truncate')" if self.is_error(lost) else ""
        return message, f"shorten the spec{hint}"

    def _words_of_absent(self, lost: LostAxes, _: tuple[int, ...]) -> tuple[str, str]:
        meant = ", ".join(map(repr, self.suggested_axes(lost)))
        hint = f" (did you mean {meant}?)" if meant else ""
        message = f"the mesh has no {_lost_axes_shown(lost.axes)}{hint}"
        it = "it" if len(lost.axes) == 1 else "them"
        fix = (
            f"rename {it}, add {it} to the mesh, or declare that a mesh may lack {it}: "
            f"optional_axes={list(lost.axes)}"
        )
        others = self.dropped_with(lost)
        if not others:
            return message, fix
        verb = "is" if len(others) == 1 else "are"
        return (
            f"{message}, so {', '.join(map(repr, others))} beside {it} {verb} dropped too",
            fix,
        )

    def _words_of_optional(self, lost: LostAxes, _: tuple[int, ...]) -> tuple[str, str]:
        it = "it" if len(lost.axes) == 1 else "them"
        message = f"the mesh has no {_lost_axes_shown(lost.axes)}, which alone the spec is without"
        return message, f"leave it so, add {it} to the mesh, or take {it} out of the rule"

    def _words_of_unreduced(self, lost: LostAxes, _: tuple[int, ...]) -> tuple[str, str]:
        return (
            f"the mesh has no {_lost_axes_shown(lost.axes)}, which the spec "
            f"{spec_shown(self.spec)} names as reduced or unreduced",
            "rename it, or add it to the mesh",
        )

    def _words_of_duplicate(self, lost: LostAxes, _: tuple[int, ...]) -> tuple[str, str]:
        return (
            f"dim {lost.dim}: {', '.join(map(repr, lost.axes))} is used twice",
            "an axis can cut only one dimension, once",
        )

    def _words_of_indivisible(self, lost: LostAxes, shape: tuple[int, ...]) -> tuple[str, str]:
        if self.is_shared(lost, shape):
            units = shape[lost.dim] // self.units[lost.dim]
            message = (
                f"dim {lost.dim} of size {shape[lost.dim]} has {units} parts for "
                f"{self._sizes_shown(lost)} devices, which share them"
            )
            return message, "leave it so"
        message = self._misfit_shown(lost, shape)
        if shape[lost.dim] == 1:
            return message, self._elsewhere(lost, shape)
        # The size of a scale is not free.
        fix = "use fewer axes" + ("" if self._shape_is_derived else " or pad the array")
        parts = {policy: self._parts(policy, lost.dim, shape) for policy in _TRIED}
        best = max(parts, key=parts.__getitem__)
        if parts[best] > self._parts(self._correction.indivisible, lost.dim, shape):
            fix += f", or let Correction(indivisible={best!r}) cut it into {parts[best]} parts"
        elif heads := self.few_heads(lost, shape):
            fix += f", or {heads}"
        elif self.is_error(lost):
            fix += ", or leave it whole with Correction(indivisible='drop')"
        return message, fix

    def _elsewhere(self, lost: LostAxes, shape: tuple[int, ...]) -> str:
        """Return what to do with axes on a dimension of one, which nobody pads."""
        parts = prod(self.axis_sizes[axis] for axis in lost.axes)
        units = (*self.units, *[1] * len(shape))
        cut = [dim for dim, axes in enumerate(self._axes) if axes]
        free = [
            dim
            for dim, size in enumerate(shape)
            if dim not in cut and type(size) is int and size and size % (parts * units[dim]) == 0
        ]
        if not free:
            return "leave the dimension whole"
        dim = max(free, key=shape.__getitem__)
        return f"leave it whole, or cut dim {dim} of size {shape[dim]} instead"

    def few_heads(self, lost: LostAxes, shape: tuple[int, ...]) -> str:
        """Return the advice for fewer heads than an axis has devices; "" if it is none."""
        if (
            lost.kind != "indivisible" or self._shape_is_derived or type(shape[lost.dim]) is not int
        ):  # a rank, or symbolic
            return ""
        heads, beyond = divmod(shape[lost.dim], self.units[lost.dim])
        if len(lost.axes) != 1 or len(self._axes[lost.dim]) > 1 or beyond:
            return ""
        (axis,) = lost.axes
        return few_heads_advice(heads, axis, self.axis_sizes[axis])

    def _parts(self, policy: IndivisiblePolicy, dim: int, shape: tuple[int, ...]) -> int:
        """Return into how many parts a dimension of this array would be cut under a policy."""
        sizes = [self.axis_sizes.get(axis, 0) for axis in self._axes[dim]]
        bound = Corrector([(sizes, self.units[dim])], self._if_absent, _as_core(policy))
        kept = bound.kept((shape[dim],))
        return prod(size for place, size in enumerate(sizes) if kept >> place & 1)

    def _misfit_shown(self, lost: LostAxes, shape: tuple[int, ...]) -> str:
        parts, unit = self._sizes_shown(lost), self.units[lost.dim]
        multiples = f" in multiples of {unit}" if unit > 1 else ""
        return f"dim {lost.dim} of size {shape[lost.dim]} is not divisible by {parts}{multiples}"

    def _sizes_shown(self, lost: LostAxes) -> str:
        present = [axis for axis in self._axes[lost.dim] if axis in self.axis_sizes]
        return " * ".join(f"{axis}={self.axis_sizes[axis]}" for axis in present)


def _lost_axes_shown(axes: tuple[str, ...]) -> str:
    return f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(repr, axes))}"


# The policies that the words about a loss try, the least first.
_TRIED: Final[tuple[IndivisiblePolicy, ...]] = ("prefix", "drop_axis")


def _as_core(policy: IndivisiblePolicy) -> str:
    # The caller sees the loss and reports it.
    return "drop" if policy == "error" else policy


# A message lists some dozen.
_MOST_ERRORS: Final = 4096


class SpecByShape:
    """Spec that is made from shapes, bound as `SpecOnMesh` is.

    Args:
        fsdp: What is made of a shape.
        fixed: Its fixed part, bound to the mesh.
        closed: Dimensions that must not be cut.
    """

    __slots__ = ("_bound", "_closed", "_errors", "_fixed", "_fsdp")

    def __init__(self, fsdp: Fsdp, fixed: SpecOnMesh, closed: frozenset[int] = frozenset()) -> None:
        self._fsdp = fsdp
        self._fixed = fixed
        self._closed = closed
        self._bound: dict[Entries, SpecOnMesh] = {}
        self._errors: dict[tuple[Any, ...], dict[Any, list[str]]] = {}

    @property
    def spec(self) -> Any:
        """Return the fixed part of the spec: that of leaves that are not arrays."""
        return self._fixed.spec

    corrector: Final = None

    def for_array(self, shape: tuple[int, ...], bits: int | None) -> tuple[SpecOnMesh, str | None]:
        """Return (the spec for arrays of this shape, how it came about).

        Raises:
            ValueError: The bytes of an element matter, and are not known.
        """
        entries, origin = self._fsdp.spec(
            shape,
            bits,
            self._fixed.axis_sizes,
            within=Entries(entries_of(self._fixed.spec)),
            units=self._fixed.units,
            closed=self._closed,
        )
        if entries not in self._bound:
            self._bound[entries] = self._fixed.with_spec(entries)
        return self._bound[entries], origin

    def with_dims(self, dims: tuple[Dim, ...]) -> SpecByShape:
        """Return the spec for arrays that have some of the dimensions; see `SpecOnMesh.with_dims`.

        It is made from their own shape, and cuts none of the dimensions that are theirs alone.
        """
        closed = frozenset(place for place, dim in enumerate(dims) if not isinstance(dim, int))
        return SpecByShape(self._fsdp, self._fixed.with_dims(dims), closed)

    def corrected_for(self, shape: tuple[Any, ...], dtype: Any) -> Any:
        """Return the corrected spec for arrays of this shape and dtype; None if it is forbidden."""
        on_mesh = self.for_leaf(shape, dtype)
        bound = None if on_mesh is None else on_mesh.corrected_for(shape, dtype)
        if bound is None and on_mesh is not None:
            self._failed(shape, dtype, list(on_mesh.errors(shape)))
        return bound

    def for_leaf(self, shape: tuple[Any, ...], dtype: Any) -> SpecOnMesh | None:
        """Return the spec for arrays of this shape and dtype; None if `errors` has reasons."""
        try:
            bits = None if dtype is None else as_bits("dtype", dtype)
            return self.for_array(_checked_entries(shape), bits)[0]
        except ValueError as error:
            self._failed(shape, dtype, [str(error)])
            return None

    def _failed(self, shape: tuple[Any, ...], dtype: Any, errors: list[str]) -> None:
        if len(self._errors) >= _MOST_ERRORS:
            self._errors.clear()
        self._errors.setdefault(shape, {})[dtype] = errors

    def errors(self, shape: tuple[Any, ...]) -> Iterator[str]:
        """Yield why arrays of this shape have no spec; to be called after `decided`."""
        of_dtypes = self._errors.get(shape, {})
        for dtype, errors in of_dtypes.items():
            prefix = "" if len(of_dtypes) == 1 else f"{'without' if dtype is None else 'of'} dtype"
            yield from (
                f"{f'{prefix} {dtype or str()}'.strip()}: {e}" if prefix else e for e in errors
            )


def _checked_entries(shape: tuple[Any, ...]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        raise ValueError(
            "a dimension is not an integer, and a spec that is made from shapes compares them: "
            "write the spec out"
        ) from None
    if any(size < 0 for size in sizes):
        raise ValueError("a dimension is negative")
    return sizes
