"""Kinds of leaves on a mesh: what all leaves of one rule, shape and dtype get, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from shardrules._base.dtypes import SAFETENSORS
from shardrules._base.rule_specs import Fsdp, MemoryKind, in_memory_shown
from shardrules._base.specs import Entries, entries_of, entry_axes, is_unconstrained, spec_shown
from shardrules._base.text import record
from shardrules._place.spec_on_mesh import LostAxes, SpecOnMesh
from shardrules._plan.leaves import AMBIGUOUS, NO_RULE_NEEDED, UNMATCHED, LeafType, Leaves
from shardrules._rules.matcher import Coverage
from shardrules._rules.rules import matcher_of

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from shardrules._place.spec_on_mesh import LossKind
    from shardrules._rules.resolver import LostRule

Spec: TypeAlias = "PartitionSpec | Entries"

DEFAULT_LARGE: Final = 16 * 2**20
"""Minimum bytes per device for a replicated leaf to be reported."""


Status = Literal["placed", "unmatched", "ambiguous", "misfit"]


@record
class Loss(NamedTuple):
    """Axes of the rule's spec that leaves do not get; in `Kind.losses`.

    Example:
        >>> import jax, shardrules as sr
        >>> plan = sr.plan({"w": jax.ShapeDtypeStruct((6,), "float32")}, [("w", "tp")], {"tp": 4})
        >>> (loss,) = plan.explain("w").kind.losses
        >>> loss.kind, loss.axes, loss.bytes
        ('indivisible', ('tp',), 18)
    """

    kind: LossKind
    """Why: "absent" from the mesh, or so as is declared that it may be ("optional"); "indivisible";
    beyond the leaf's "rank"; or a "duplicate"."""
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
    is_shared: bool = False
    """Whether the other axes cut the dimension into single units, such as KV heads: then devices
    along these share them."""
    few_heads: str = ""
    """The mesh on which devices would share units so few as KV heads; "" if it is no such loss."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Fit:
    """What leaves of one rule, shape and dtype get on a mesh, and how it came about."""

    status: Status = "placed"
    """"placed"; or why there is no spec: no rule matches ("unmatched"), several do where only one
    may ("ambiguous"), or the rule's spec does not fit the shape or the mesh ("misfit")."""
    message: str | None = None
    """The reason why they are not placed; None if they are."""
    fix: str | None = None
    """A remedy, if one is known."""
    wanted: Spec | None = None
    """The spec that the rule says or makes of the shape, before it was made to fit; None without a
    rule."""
    spec: Spec | None = None
    """The corrected spec; None if they are not placed."""
    losses: tuple[Loss, ...] = ()
    """The axes that `spec` lacks of `wanted`."""
    origin: str | None = None
    """Where the wanted spec comes from, if it is not the rule's own."""
    dim_rules: tuple[int | None, ...] = ()
    """Per dimension with a name, the index of the logical rule that decides it, if one does."""
    lost_rules: tuple[LostRule, ...] = field(default=(), repr=False)
    """The logical rules for the names that do not decide them, and why."""
    memory_kind: MemoryKind | None = None
    """The memory that the rule names; None if it says nothing."""
    _counted: Spec | None = field(default=None, repr=False)
    """The spec that bytes are counted by, where `spec` is None: without the axes that the mesh
    lacks, if these alone are wrong."""


_FIT_FIELDS: Final = (*Fit.__dataclass_fields__,)
REPLICATED: Final = Fit(spec=Entries())
WITHOUT_RULE: Final = {
    NO_RULE_NEEDED: REPLICATED,
    UNMATCHED: Fit(status="unmatched", message="no rule matches", fix="add a rule that matches"),
    AMBIGUOUS: Fit(
        status="ambiguous",
        message="several rules match, where only one may",
        fix="make the patterns exclude each other; `explain` a path to see which they are",
    ),
}
"""What leaves get that no rule decides, by what stands in the place of a rule's index."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Kind(Fit):
    """Leaves with one rule, shape and dtype, hence with one spec and one number of bytes."""

    rule: int | None
    """Index of the rule that decides them; None if none matches or none is needed."""
    shape: tuple[int, ...] | None
    """None for leaves that are not arrays."""
    dtype: Any
    """The leaves' own dtype; None for leaves that are not arrays."""
    names: tuple[Any, ...] | None
    """The logical axis names of the dimensions; None for leaves without."""
    bytes: int
    """Bytes of one whole leaf."""
    device_bytes: int
    """Bytes of one leaf for the device that holds most of it, in the device's memory or the
    host's."""

    @property
    def deciders(self) -> tuple[int, ...]:
        """The indices of the rules that decide the leaves, ascending."""
        rules = (self.rule, *self.dim_rules)
        return tuple(sorted({rule for rule in rules if rule is not None}))

    @property
    def decided_by(self) -> int | tuple[Any, ...] | None:
        """The index of the rule that decides, or the leaves' names; None without both."""
        return self.rule if self.names is None else self.names


def kind_with_bytes(leaf: LeafType, fit: Fit, axis_sizes: Mapping[str, int]) -> Kind:
    """Return the kind of leaves that get this, with their bytes and those of its losses."""
    counted = fit._counted if fit.spec is None else fit.spec
    # What is not placed is counted as if it were replicated, unless an axis alone is to be dropped.
    fullest = device_bytes(leaf.shape or (), leaf.bits, counted or Entries(), axis_sizes)
    values: dict[str, Any] = {name: getattr(fit, name) for name in _FIT_FIELDS}
    values["_counted"] = counted

    def bytes_lost(loss: Loss) -> int:
        axes = {*_axes_lost(loss, fit), *loss.meant} - axes_named(counted)
        return fullest - fullest // prod(axis_sizes.get(axis, 1) for axis in axes)

    if fit.losses:
        values["losses"] = tuple(loss._replace(bytes=bytes_lost(loss)) for loss in fit.losses)
    return Kind(
        **values,
        rule=leaf.rule if leaf.rule >= 0 else None,
        shape=leaf.shape,
        dtype=leaf.dtype,
        names=leaf.names,
        # Elements of fewer than 8 bits are packed.
        bytes=0 if leaf.shape is None else -(-prod(leaf.shape) * leaf.bits // 8),
        device_bytes=fullest,
    )


def _axes_lost(loss: Loss, fit: Fit) -> tuple[str, ...]:
    """Return the axes that a loss took: an absent one may take those beside it with it."""
    indivisible = [taken.dim for taken in fit.losses if taken.kind == "indivisible"]
    if loss.kind != "absent" or loss.dim in indivisible:
        return loss.axes
    return entry_axes(entries_of(fit.wanted or Entries())[loss.dim])


def device_bytes(shape: Sequence[int], bits: int, spec: Spec, axis_sizes: Mapping[str, int]) -> int:
    """Return the bytes of an array on the device that holds most of it, with so many bits each.

    Where its axes do not divide a dimension, the shards are rounded up, as in XLA: the first
    devices have full ones, and the last ones less or nothing.
    """
    for entry, size in zip(entries_of(spec), shape, strict=False):
        parts = prod([axis_sizes.get(axis, 1) for axis in entry_axes(entry)])
        bits *= -(-size // parts)
    return -(-bits * prod(shape[len(spec) :]) // 8)


def decided_shown(kind: Kind) -> str:
    """Return what decides, for a table: a rule, or the names with their rules; - for neither."""
    if kind.names is None:
        return "-" if kind.rule is None else str(kind.rule)
    rules = kind.dim_rules or (None,) * len(kind.names)
    texts = (
        "-" if name is None else str(name) if rule is None else f"{name}: {rule}"
        for name, rule in zip(kind.names, rules, strict=True)
    )
    return ", ".join(texts)


def dtype_shown(kind: Kind) -> str:
    """Return the dtype's name as numpy has it; - for leaves that are not arrays."""
    name = str(kind.dtype)
    return "-" if kind.dtype is None else SAFETENSORS.get(name, name)


def problem_shown(kind: Kind) -> str | None:
    """Return the text in the place of a spec in tables and locks; None for placed leaves."""
    if kind.status == "placed":
        return None
    return kind.message if kind.status == "misfit" else kind.status


def kind_json(kind: Kind) -> dict[str, Any]:
    """Return what is said of leaves of a kind in JSON."""
    return {
        "shape": kind.shape,
        "dtype": dtype_shown(kind),
        "spec": spec_shown(kind.spec),
        "memory_kind": kind.memory_kind,
        "problem": problem_shown(kind),
        "device_bytes": kind.device_bytes,
    }


def placement_shown(kind: Kind) -> str:
    """Format the spec and the memory kind as people write them; - for leaves not placed."""
    return in_memory_shown(spec_shown(kind.spec), kind.memory_kind)


@lru_cache(maxsize=4096)
def axes_named(spec: Spec | Fsdp | None) -> frozenset[str]:
    if isinstance(spec, Fsdp):
        return spec.named
    entries = entries_of(spec if spec is not None else Entries())
    return frozenset([axis for entry in entries for axis in entry_axes(entry)])


def axes_used(spec: Spec | None, axis_sizes: Mapping[str, int]) -> frozenset[str]:
    """Return the axes of more than one device that cut an array with this spec."""
    return frozenset([axis for axis in axes_named(spec) if axis_sizes.get(axis, 1) > 1])


def shared_along(kind: Kind) -> frozenset[str]:
    """Return the axes along which devices share the units of these leaves, such as few heads."""
    axes = [axis for loss in kind.losses if loss.is_shared for axis in loss.axes]
    return frozenset(axes) - axes_named(kind.spec)


def could_cut(axis: str, kind: Kind, axis_sizes: Mapping[str, int]) -> bool:
    """Tell whether the axis cuts no dimension of these leaves, and could cut one further."""
    if kind.spec is None or kind.shape is None or len(kind.shape) < 2:
        return False
    if axis in axes_named(kind.spec):
        return False
    entries = [*entries_of(kind.spec), *[None] * len(kind.shape)]
    return any(
        size > 0
        and not is_unconstrained(entry)
        and size % prod(axis_sizes.get(name, 1) for name in (*entry_axes(entry), axis)) == 0
        for size, entry in zip(kind.shape, entries, strict=False)
    )


def is_replicated(kind: Kind, axis_sizes: Mapping[str, int]) -> bool:
    """Tell whether each of several devices holds these leaves whole."""
    several = kind.spec is not None and kind.bytes > 0 and prod(axis_sizes.values()) > 1
    return several and not axes_used(kind.spec, axis_sizes)


def fit_of(
    rule_spec: SpecOnMesh, shape: tuple[int, ...], others: Iterable[Loss] = (), **says: Any
) -> Fit:
    """Fit a spec to an array; the bytes of its losses are not counted yet.

    Losses to `others` come first; `says` is what the rule says beside the spec.
    """
    spec, lost = rule_spec.fit(shape)
    losses = [loss_of(rule_spec, axes, shape) for axes in lost]
    says = {"wanted": rule_spec.spec, "losses": (*others, *losses), **says}
    errors = [loss for loss in losses if loss.is_error]
    if not errors:
        return Fit(spec=spec, **says)
    message, fix = (
        "; ".join(dict.fromkeys(words))
        for words in ([loss.message for loss in errors], [loss.fix for loss in errors])
    )
    if any(loss.kind != "absent" for loss in errors):
        spec = None
    return Fit(status="misfit", message=message, fix=fix, _counted=spec, **says)


def loss_of(rule_spec: SpecOnMesh, lost: LostAxes, shape: tuple[int, ...]) -> Loss:
    """Return the loss of these axes by an array of this shape; its bytes are 0 still."""
    words, is_error = rule_spec.message_and_fix(lost, shape), rule_spec.is_error(lost)
    axes = rule_spec.suggested_axes(lost), rule_spec.dropped_with(lost)
    heads = rule_spec.is_shared(lost, shape), rule_spec.few_heads(lost, shape)
    return Loss(*lost, *axes, 0, *words, is_error, *heads)


def coverage_of(leaves: Leaves, kinds: Sequence[Kind]) -> Coverage:
    """Count the leaves that each rule matches and wins, among those that need a rule."""
    rules = leaves.path_rules
    if rules is None:
        return _coverage_of_names(leaves.rules, kinds, leaves.counts.tolist())
    needed = [kind.rule is not None or kind.status != "placed" for kind in kinds]
    sources = leaves.sources
    if not all(needed):
        rows = np.flatnonzero(np.array(needed, bool)[leaves.kind_of])
        sources = list(map(sources.__getitem__, rows.tolist()))
    if sources is not leaves.paths:  # several leaves may follow one
        sources = list(dict.fromkeys(sources))
    return matcher_of(rules).coverage_of_paths(sources)


def _coverage_of_names(
    rules: Iterable[tuple[Any, Any]], kinds: Iterable[Kind], counts: Iterable[int]
) -> Coverage:
    """Count, per rule, the leaves with its name, and those of which it decides a dimension."""
    of_rules = [name for name, _ in rules]
    matched, won, unmatched = [0] * len(of_rules), [0] * len(of_rules), 0
    for kind, count in zip(kinds, counts, strict=True):
        names = {*(kind.names or ())}
        matching = [rule for rule, name in enumerate(of_rules) if name in names]
        unmatched += 0 if matching else count
        for rule in matching:
            matched[rule] += count
        for winner in {*kind.dim_rules} - {None}:
            won[winner] += count  # type: ignore[index]
    return Coverage(tuple(matched), tuple(won), unmatched, {})
