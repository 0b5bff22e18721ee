"""Kinds of leaves placed on a mesh: the spec that each gets, what it loses, and its bytes.

Costs one correction per kind. Must not know about paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from shardrules._planning.survey import AMBIGUOUS, NO_RULE_NEEDED, UNMATCHED, Alike
from shardrules._sharding.device_bytes import Held, device_bytes, held_of
from shardrules._sharding.spec_on_mesh import Loss, SpecOnMesh
from shardrules._specs import Entries, entries_of, entry_axes, entry_of, is_unconstrained
from shardrules._words import nearest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from jax.sharding import PartitionSpec

    Spec = PartitionSpec | Entries

__all__ = [
    "Kind",
    "Placer",
    "axes_named",
    "axes_used",
    "could_cut",
    "is_replicated",
    "kind_on_mesh",
    "plain_entries",
    "refusals",
    "spec_shown",
    "whole_bytes",
]


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Leaves that are alike: one rule, shape and dtype, hence one spec and one number of bytes."""

    rule: int | None
    """Index of the rule that decides them; None if none matches or none is needed."""
    shape: tuple[int, ...] | None
    """None for leaves that are no arrays."""
    dtype: Any
    """As the leaves have it; None for leaves that are no arrays."""
    bits: int
    """Of one element."""
    wanted: Spec | None
    """The rule's spec, before it was made to fit; None without a rule."""
    spec: Spec | None
    """What the leaves get; None if they cannot be given any."""
    losses: tuple[Loss, ...]
    """What `spec` lacks of `wanted`."""
    costs: tuple[int, ...]
    """Of each loss, the bytes on the fullest device that there would not be without it."""
    problem: str | None
    """Why there is no spec: "unmatched", "ambiguous", or what does not fit."""
    notes: tuple[tuple[str, str], ...]
    """Of each loss, what it is and the way out."""
    origin: str | None
    """Where the wanted spec comes from, if it is not the rule's own."""
    held: Held
    """Of one leaf, what the devices hold."""
    axis_sizes: Mapping[str, int]
    """Devices along each mesh axis."""

    @property
    def dtype_shown(self) -> str:
        """The dtype's name; - for leaves that are no arrays."""
        return "-" if self.dtype is None else str(self.dtype)

    @property
    def ways_out(self) -> tuple[str, ...]:
        """Of what does not fit."""
        told = (way_out for what, way_out in self.notes if what in (self.problem or ""))
        return tuple(dict.fromkeys(told))

    @property
    def bytes(self) -> int:
        """Of one whole leaf."""
        return whole_bytes(self.shape, self.bits)

    @property
    def largest_bytes(self) -> int:
        """Of one leaf on the device that holds most of it."""
        return self.held.most

    @property
    def device_bytes(self) -> npt.NDArray[np.int64]:
        """Of one leaf on each device: one dimension for each mesh axis."""
        spec = Entries() if self.spec is None else self.spec
        return device_bytes(self.shape or (), self.bits, spec, self.axis_sizes)


def whole_bytes(shape: tuple[int, ...] | None, bits: int) -> int:
    """Bytes of an array; elements of fewer than 8 bits are packed."""
    return 0 if shape is None else -(-prod(shape) * bits // 8)


class Placer:
    """Places kinds on a mesh: the specs of a rule list, bound to the axis sizes.

    Args:
        specs: The distinct specs of the rules on the mesh.
        spec_of: Per rule the index of its own.
        axis_sizes: Of the mesh.
        unmatched_is_error: As the rules' dialect has it.
    """

    def __init__(
        self,
        specs: list[SpecOnMesh],
        spec_of: list[int],
        axis_sizes: Mapping[str, int],
        *,
        unmatched_is_error: bool,
    ) -> None:
        self._specs = specs
        self._spec_of = spec_of
        self._axis_sizes = axis_sizes
        self._unmatched_is_error = unmatched_is_error

    def place(self, alike: Alike) -> Kind:
        """What these leaves get."""
        if alike.rule >= 0:
            return self.placed(alike, self.spec(alike.rule))
        problems = {UNMATCHED: "unmatched" if self._unmatched_is_error else None,
                    AMBIGUOUS: "ambiguous", NO_RULE_NEEDED: None}  # fmt: skip
        problem = problems[alike.rule]
        spec = Entries() if problem is None else None
        return kind_on_mesh(alike, None, spec, self._axis_sizes, problem=problem)

    def spec(self, rule: int) -> SpecOnMesh:
        """Of a rule, on the mesh."""
        return self._specs[self._spec_of[rule]]

    def placed(self, alike: Alike, wanted: SpecOnMesh, origin: str | None = None) -> Kind:
        """The same by a spec that is not the rule's own, such as one that is derived from it."""
        if alike.shape is None:
            return kind_on_mesh(alike, wanted.spec, Entries(), self._axis_sizes, origin=origin)
        kept = wanted.corrector.kept(alike.shape)
        spec = wanted.corrected(len(alike.shape), kept)
        problems = [what for what, _ in wanted.problems(alike.shape)] if spec is None else []
        losses = tuple(wanted.losses(len(alike.shape), kept))
        notes = tuple(wanted.told(loss, alike.shape) for loss in losses)
        return kind_on_mesh(
            alike, wanted.spec, spec, self._axis_sizes,
            problem="; ".join(problems) or None, losses=losses, notes=notes, origin=origin,
        )  # fmt: skip


def kind_on_mesh(
    alike: Alike,
    wanted: Spec | None,
    spec: Spec | None,
    axis_sizes: Mapping[str, int],
    *,
    problem: str | None = None,
    losses: tuple[Loss, ...] = (),
    notes: tuple[tuple[str, str], ...] = (),
    origin: str | None = None,
) -> Kind:
    """The kind of these leaves, whose spec is known: its bytes and what its losses cost."""
    # What cannot be sharded is counted as if it were replicated.
    held = held_of(alike.shape or (), alike.bits, spec or Entries(), axis_sizes)
    fullest = held.most
    kept = axes_named(spec)

    def parts_lost(loss: Loss) -> int:
        lost = _axes_lost(loss, losses, wanted)
        if loss.kind == "absent":
            lost = _meant(lost, wanted or Entries(), axis_sizes)
        return prod(axis_sizes.get(axis, 1) for axis in lost if axis not in kept)

    return Kind(
        rule=alike.rule if alike.rule >= 0 else None,
        shape=alike.shape,
        dtype=alike.dtype,
        bits=alike.bits,
        wanted=wanted,
        spec=spec,
        losses=losses,
        costs=tuple(fullest - fullest // parts_lost(loss) for loss in losses),
        problem=problem,
        notes=notes,
        origin=origin,
        held=held,
        axis_sizes=axis_sizes,
    )


def _axes_lost(loss: Loss, losses: tuple[Loss, ...], wanted: Spec | None) -> tuple[str, ...]:
    """The axes that a loss took: an absent one may take those beside it with it."""
    told_twice = any(one.kind == "indivisible" and one.dim == loss.dim for one in losses)
    if loss.kind != "absent" or told_twice:
        return loss.axes
    return entry_axes(entries_of(wanted or Entries())[loss.dim])


def _meant(axes: tuple[str, ...], wanted: Spec, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes, those misspelt as they were probably meant; others that are absent cut nothing."""
    free = axis_sizes.keys() - axes_named(wanted)
    return tuple(a if a in axis_sizes else nearest(a, free) or a for a in axes)


def axes_named(spec: Spec | None) -> frozenset[str]:
    """The axes in a spec."""
    entries = entries_of(spec if spec is not None else Entries())
    return frozenset(axis for entry in entries for axis in entry_axes(entry))


def axes_used(spec: Spec | None, axis_sizes: Mapping[str, int]) -> frozenset[str]:
    """The axes of more than one device that cut an array with this spec."""
    return frozenset(axis for axis in axes_named(spec) if axis_sizes.get(axis, 1) > 1)


def could_cut(axis: str, kind: Kind, axis_sizes: Mapping[str, int]) -> bool:
    """Whether the axis could cut a dimension of these leaves further, and does not cut any."""
    if kind.spec is None or kind.shape is None or len(kind.shape) < 2:
        return False
    entries = [*entries_of(kind.spec), *[None] * (len(kind.shape) - len(kind.spec))]
    named = [entry_axes(entry) for entry in entries]
    return not any(axis in axes for axes in named) and any(
        size > 0
        and size % prod(axis_sizes.get(one, 1) for one in (*axes, axis)) == 0
        and not is_unconstrained(entry)
        for size, axes, entry in zip(kind.shape, named, entries, strict=True)
    )


def refusals(
    kind: Kind, axis_sizes: Mapping[str, int], explicit: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Why JAX makes no sharding of a kind's spec: (what is wrong, the way out).

    Args:
        kind: The kind.
        axis_sizes: Of the mesh.
        explicit: Its axes of type Explicit.
    """
    spec = kind.spec if kind.spec is not None else Entries()
    for axis in sorted(axes_named(spec) - axis_sizes.keys()):
        yield (
            f"the mesh has no axis {axis!r}",
            "rename it in the rule, add it to the mesh, or drop it with "
            "Correction(absent='drop_axis')",
        )
    for name in ("unreduced", "reduced"):
        for axis in sorted(frozenset(getattr(spec, name, None) or ()) - explicit):
            lacks = "is no axis of the mesh" if axis not in axis_sizes else "is not Explicit"
            yield (
                f"{axis!r} is {name} and {lacks}",
                f"give the mesh that axis with AxisType.Explicit, or leave {name} out",
            )
    if kind.shape is not None and len(spec) > len(kind.shape):
        yield (
            f"the spec has {len(spec)} entries, the array {len(kind.shape)} dimensions",
            "shorten the spec, or truncate it with Correction(rank='truncate')",
        )


def is_replicated(kind: Kind, axis_sizes: Mapping[str, int]) -> bool:
    """Whether each of several devices is to hold its leaves whole."""
    several = kind.spec is not None and kind.bytes > 0 and prod(axis_sizes.values()) > 1
    return several and not axes_used(kind.spec, axis_sizes)


def plain_entries(spec: Spec) -> list[Any]:
    """The entries, equal for equal specs: ("tp",) is "tp", as newer versions of JAX have it."""
    return [e if is_unconstrained(e) else entry_of(entry_axes(e)) for e in entries_of(spec)]


def spec_shown(spec: Spec | None) -> str:
    """A spec as people write it, PartitionSpec or not: P('fsdp', None)."""
    if spec is None:
        return "-"
    shown = ("UNCONSTRAINED" if is_unconstrained(e) else repr(e) for e in plain_entries(spec))
    extra = [f"{name}={sorted(getattr(spec, name))}" for name in ("unreduced", "reduced")
             if getattr(spec, name, None)]  # fmt: skip
    return f"P({', '.join([*shown, *extra])})"
