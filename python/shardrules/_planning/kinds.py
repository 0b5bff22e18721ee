"""A kind of leaves on a mesh: the spec that they get, what it loses, and its bytes.

Costs nothing but the record: a model of 10^5 leaves has some hundred kinds. Must not know about
paths, nor how a spec was decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardrules._display import record
from shardrules._memory_kinds import in_memory
from shardrules._shape_specs import Fsdp
from shardrules._specs import Entries, entries_of, entry_axes, is_unconstrained, spec_shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jax.sharding import PartitionSpec

    from shardrules._logical.resolver import LostRule
    from shardrules._memory_kinds import MemoryKind
    from shardrules._sharding.device_bytes import Held
    from shardrules._sharding.spec_on_mesh import LossKind

    Spec = PartitionSpec | Entries

__all__ = [
    "Kind",
    "Loss",
    "Status",
    "axes_named",
    "axes_used",
    "could_cut",
    "decided_shown",
    "dtype_shown",
    "is_replicated",
    "placement_shown",
    "problem_shown",
    "refused",
]

Status = Literal["placed", "unmatched", "ambiguous", "misfit"]


@record
class Loss(NamedTuple):
    """Axes of the wanted spec that leaves do not get; in `Kind.losses`.

    Example:
        >>> import jax, shardrules as sr
        >>> plan = sr.plan({"w": jax.ShapeDtypeStruct((6,), "float32")}, [("w", "tp")], {"tp": 4})
        >>> (loss,) = plan.kind("w").losses
        >>> loss.kind, loss.axes, loss.bytes
        ('indivisible', ('tp',), 18)
    """

    kind: LossKind
    """Why: "absent" from the mesh, or so as is declared that it may be ("optional"); "indivisible";
    beside the factors that do divide ("factored");
    factors that the mesh does not have as axes ("unfactored"); beyond the leaf's "rank"; or a
    "duplicate"."""
    dim: int
    """The dimension that they were to cut."""
    axes: tuple[str, ...]
    meant: tuple[str, ...]
    """Axes of the mesh that absent ones were probably meant to be."""
    beside: tuple[str, ...]
    """Axes of the mesh that are lost only because they stand beside absent ones."""
    bytes: int
    """Bytes on the fullest device that there would not be without this loss."""
    message: str
    fix: str
    is_error: bool = False
    """Whether the correction forbids it, so that the leaves are not placed."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Leaves that are alike: one rule, shape and dtype, hence one spec and one number of bytes."""

    rule: int | None
    """Index of the rule that decides them; None if none matches or none is needed."""
    shape: tuple[int, ...] | None
    """None for leaves that are not arrays."""
    dtype: Any
    """The leaves' own dtype; None for leaves that are not arrays."""
    status: Status
    """"placed"; or why there is no spec: no rule matches ("unmatched"), several do where only one
    may ("ambiguous"), or the rule's spec does not fit the shape or the mesh ("misfit")."""
    message: str | None
    """The reason why they are not placed; None if they are."""
    fix: str | None
    """A remedy, if one is known."""
    wanted: Spec | None
    """The spec that the rule says or makes of the shape, before it was made to fit; None without a
    rule."""
    spec: Spec | None
    """The corrected spec; None if they are not placed."""
    losses: tuple[Loss, ...]
    """The axes that `spec` lacks of `wanted`."""
    origin: str | None
    """Where the wanted spec comes from, if it is not the rule's own."""
    names: tuple[Any, ...] | None
    """The logical axis names of the dimensions; None for leaves without."""
    dim_rules: tuple[int | None, ...]
    """Per dimension with a name, the index of the logical rule that decides it, if one does."""
    lost_rules: tuple[LostRule, ...] = field(repr=False)
    """The logical rules for the names that do not decide them, and why."""
    memory_kind: MemoryKind | None
    """The memory that the rule names; None if it says nothing."""
    bytes: int
    """Bytes of one whole leaf."""
    device_bytes: int
    """Bytes of one leaf for the device that holds most of it, in the device's memory or the
    host's."""
    _held: Held = field(repr=False)
    """The parts of one leaf that the devices hold."""
    _counted: Spec | None = field(repr=False)
    """The spec that bytes are counted by: that of leaves that are placed, and for others the one
    without the axes that the mesh lacks, if these alone are wrong."""

    @property
    def deciders(self) -> tuple[int, ...]:
        """The indices of the rules that decide the leaves, ascending."""
        rules = (self.rule, *self.dim_rules)
        return tuple(sorted({rule for rule in rules if rule is not None}))

    @property
    def decided_by(self) -> int | tuple[Any, ...] | None:
        """The index of the rule that decides the leaves, or their names; None without both."""
        return self.rule if self.names is None else self.names


def decided_shown(kind: Kind) -> str:
    """What decides, for a table: a rule, or the names with the rule of each; - for neither."""
    if kind.names is None:
        return "-" if kind.rule is None else str(kind.rule)
    rules = kind.dim_rules or (None,) * len(kind.names)
    shown = (
        "-" if name is None else str(name) if rule is None else f"{name}: {rule}"
        for name, rule in zip(kind.names, rules, strict=True)
    )
    return ", ".join(shown)


def dtype_shown(kind: Kind) -> str:
    """The dtype's name; - for leaves that are not arrays."""
    return "-" if kind.dtype is None else str(kind.dtype)


def problem_shown(kind: Kind) -> str | None:
    """The text of tables and locks in the place of a spec; None for leaves that are placed."""
    if kind.status == "placed":
        return None
    return kind.message if kind.status == "misfit" else kind.status


def placement_shown(kind: Kind) -> str:
    """The spec and the memory kind as people write them; - for leaves that are not placed."""
    return in_memory(spec_shown(kind.spec), kind.memory_kind)


def refused(losses: Sequence[Loss]) -> tuple[str, str]:
    """(message, fix) of leaves with these losses, which the correction forbids."""
    messages = dict.fromkeys(loss.message for loss in losses)
    return "; ".join(messages), "; ".join(dict.fromkeys(loss.fix for loss in losses))


def axes_named(spec: Spec | Fsdp | None) -> frozenset[str]:
    """The axes in a spec."""
    if isinstance(spec, Fsdp):
        return spec.named
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


def is_replicated(kind: Kind, axis_sizes: Mapping[str, int]) -> bool:
    """Whether each of several devices is to hold its leaves whole."""
    several = kind.spec is not None and kind.bytes > 0 and prod(axis_sizes.values()) > 1
    return several and not axes_used(kind.spec, axis_sizes)
