"""What a rule may say beside a plain spec: `RuleSpec`, and `fsdp`, a spec made from shapes.

`Correction` says what happens where a spec does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, Literal, NamedTuple, get_args

from shardrules._base.arguments import (
    as_tuple,
    check_choice,
    check_fields,
    check_type,
    integer,
    strings,
)
from shardrules._base.specs import (
    Entries,
    RankPolicy,
    as_entries,
    axes_in_tags,
    entries_of,
    entry_axes,
    entry_of,
    is_partition_spec,
    spec_shown,
    split_axes,
    with_axes_split,
)
from shardrules._base.text import bytes_shown, without_defaults

AbsentPolicy = Literal["drop", "drop_axis", "keep", "error"]
IndivisiblePolicy = Literal["drop", "drop_axis", "prefix", "keep", "error"]


@dataclass(frozen=True, slots=True)
class Correction:
    """The policies for a spec that does not fit the array or the mesh.

    A mesh axis that shards two dimensions is an error under every policy, as it is in JAX; and so
    is one that the mesh lacks, unless it is one of the `optional_axes` of the rules.

    Args:
        indivisible: For an entry whose axes do not divide the dimension: "drop" all, "drop_axis"
            the axes that do not fit beside those before them, keep the longest "prefix" that fits,
            "keep" them (uneven shards), or "error".
        rank: For a spec that is longer than the array's rank: "truncate" it, "replicate" the array,
            "keep" it, or "error".
        unconstrained: Whether PartitionSpec.UNCONSTRAINED stays: "keep", or "drop" (it becomes
            None).
        pad: Fill the spec with None up to the rank; and give PartitionSpec() where no axis is left.

    Raises:
        ValueError: A choice that does not exist.

    Example:
        >>> Correction(indivisible="prefix").rank
        'truncate'
    """

    indivisible: IndivisiblePolicy = "drop"
    rank: RankPolicy = "truncate"
    unconstrained: Literal["keep", "drop"] = "keep"
    pad: bool = True

    __repr__ = without_defaults

    def __post_init__(self) -> None:
        check_fields(self)
        if type(self.pad) is not bool:
            check_choice("pad", self.pad, (True, False))


@dataclass(frozen=True, slots=True, repr=False)
class LibraryCorrection(Correction):
    """Policies of a library that has another one for axes that the mesh lacks.

    It drops all axes of the entry ("drop") or that axis alone ("drop_axis"), or keeps it.
    """

    absent: AbsentPolicy = "error"


def absent_policy(correction: Correction) -> AbsentPolicy:
    """Return the policy for axes that the mesh lacks."""
    return correction.absent if isinstance(correction, LibraryCorrection) else "error"


def check_correction(correction: object) -> None:
    what = "a Correction, such as Correction(indivisible='error'), or None"
    check_type("correction", correction, Correction | None, what)


MemoryKind = Literal["device", "pinned_host", "unpinned_host"]
MEMORY_KINDS: Final[tuple[MemoryKind, ...]] = get_args(MemoryKind)


def check_memory_kind(name: str, kind: object) -> None:
    """Check that it is a kind of memory, or None."""
    check_choice(name, kind, (None, *MEMORY_KINDS))


def is_on_host(kind: MemoryKind | None) -> bool:
    """Return whether such memory is the host's, and not the device's."""
    return kind not in (None, "device")


def in_memory_shown(text: str, kind: MemoryKind | None) -> str:
    """Return the text of a spec with its memory kind, if any: P('tp') in pinned_host."""
    return text if kind is None else f"{text} in {kind}"


_NOTHING: Final = ()


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """A rule's spec together with what else the rule says.

    Args:
        spec: As in `Rules`.
        correction: For this rule. Default: the dialect's.
        units: For each dimension a number, such as head_dim, or None. A device's part of the
            dimension must be a multiple of it. Below 2**63.
        memory_kind: The memory that the rule's arrays are in: "device", "pinned_host" or
            "unpinned_host". A PartitionSpec has no memory kind, so `match_partition_rules` gives
            the spec alone. Default: the rule says nothing; a new array is in the devices' default
            memory, and `shard` leaves an array of a device in its memory.
        optional_axes: Mesh axes that this rule names and a mesh may lack. Where the correction
            makes absent axes an error, these are dropped alone instead; and `Plan.check` does not
            report them.

    Raises:
        TypeError: correction is not a Correction, units are not integers, or optional_axes are not
            strings.
        ValueError: A unit is below 1, or above 2**63 - 1; or there is no such memory kind.

    Example:
        >>> from shardrules import Correction, RuleSpec
        >>> exact = Correction(indivisible="error")
        >>> rule = ("wk/kernel", RuleSpec(("fsdp", "tp"), exact, units=(None, 128)))
        >>> offloaded = ("opt_state", RuleSpec(("fsdp", "tp"), memory_kind="pinned_host"))
    """

    spec: Any
    correction: Correction | None = None
    units: tuple[int | None, ...] = _NOTHING
    memory_kind: MemoryKind | None = field(default=None, kw_only=True)
    optional_axes: tuple[str, ...] = field(default=_NOTHING, kw_only=True)

    __repr__ = without_defaults

    def __post_init__(self) -> None:
        is_spec_alone = self.correction is None and self.memory_kind is None
        if is_spec_alone and self.units is _NOTHING and self.optional_axes is _NOTHING:
            return
        units = as_tuple("units", self.units, "integers or None")
        checked = (u if u is None else integer(f"units[{i}]", u, 1) for i, u in enumerate(units))
        object.__setattr__(self, "units", tuple(checked))
        object.__setattr__(self, "optional_axes", strings("optional_axes", self.optional_axes))
        check_correction(self.correction)
        check_memory_kind("memory_kind", self.memory_kind)


def rule_spec(spec: Any) -> RuleSpec:
    """Return the spec of a rule, as a RuleSpec."""
    return spec if isinstance(spec, RuleSpec) else RuleSpec(spec)


def memory_kind_of(spec: Any) -> MemoryKind | None:
    """Return the memory kind that a rule names."""
    return spec.memory_kind if isinstance(spec, RuleSpec) else None


def plain_spec(spec: Any) -> Any:
    """Return the spec of a rule, without a correction of its own."""
    return spec.spec if isinstance(spec, RuleSpec) else spec


def has_axes(spec: Any) -> bool:
    """True if a plain spec names mesh axes, and is no object of a user's own."""
    return isinstance(spec, Entries | Fsdp) or is_partition_spec(spec)


def axes_of_rule(spec: Any) -> frozenset[str]:
    """All mesh axes that a rule names."""
    plain, optional = plain_spec(spec), rule_spec(spec).optional_axes
    if isinstance(plain, Fsdp):
        return plain.named.union(optional)
    if not has_axes(plain):
        return frozenset(optional)
    tags = axes_in_tags(plain).values()
    return frozenset(optional).union(*map(entry_axes, entries_of(plain)), *tags)


def rule_with_axes(spec: Any, parts: Mapping[str, tuple[str, ...]]) -> Any:
    """Return a rule's spec, each axis by the axes that it is made of."""
    if isinstance(spec, RuleSpec):
        optional = split_axes(spec.optional_axes, parts)
        return replace(spec, spec=rule_with_axes(spec.spec, parts), optional_axes=optional)
    if isinstance(spec, Fsdp):
        within = with_axes_split(spec.within, parts)
        return replace(spec, axes=split_axes(spec.axes, parts), within=within)
    return with_axes_split(spec, parts) if has_axes(spec) else spec


def rule_spec_shown(spec: Any) -> str:
    """Return the spec of a rule as people write it, with its memory kind."""
    return in_memory_shown(spec_shown(plain_spec(spec)), memory_kind_of(spec))


_MIN_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True, repr=False)
class Fsdp:
    """Spec that is made from each array's shape; `fsdp` checks and builds it."""

    axes: tuple[str, ...]
    min_bytes: int
    min_rank: int
    within: Entries

    def __repr__(self) -> str:
        fields = [repr(entry_of(self.axes)), f"min_bytes={self.min_bytes}"]
        fields += [f"min_rank={self.min_rank}"] if self.min_rank else []
        fields += [f"within={spec_shown(self.within)}"] if self.within else []
        return f"fsdp({', '.join(fields)})"

    @property
    def named(self) -> frozenset[str]:
        """All mesh axes that it names."""
        return frozenset(self.axes).union(*map(entry_axes, self.within))

    def spec(
        self,
        shape: tuple[int, ...],
        bits: int | None,
        axis_sizes: Mapping[str, int],
        *,
        within: Entries,
        units: Sequence[int] = (),
        closed: frozenset[int] = frozenset(),
    ) -> ShapedSpec:
        """Return the spec of an array of this shape.

        Args:
            shape: The whole array's.
            bits: Bits of one element; None if nothing says it.
            axis_sizes: Devices along each mesh axis. An axis that is not there has one device.
            within: The fixed part, for this array.
            units: As in `RuleSpec`.
            closed: Dimensions that must not be cut.
        """
        if bits is None and self.min_bytes:
            raise ValueError(
                f"it has no dtype, so that its bytes cannot be compared with min_bytes="
                f"{self.min_bytes}: give arrays or jax.ShapeDtypeStructs, or min_bytes=0"
            )
        size = -(-prod(shape) * (bits or 0) // 8)
        free = [
            dim
            for dim in range(len(shape))
            if dim not in closed and (dim >= len(within) or within[dim] is None)
        ]
        if len(shape) < self.min_rank:
            return self._left_alone(within, f"its rank {len(shape)} is below min_rank")
        if size < self.min_bytes:
            return self._left_alone(within, f"its {bytes_shown(size)} are less than min_bytes")
        if not free or any(axis in entry_axes(entry) for entry in within for axis in self.axes):
            return self._left_alone(within, "no dimension is free")
        sizes = {axis: axis_sizes.get(axis, 1) for axis in self.axes}
        dim, is_divided = largest_dim(free, shape, prod(sizes.values()), units)
        entries = [*within, *[None] * (dim + 1 - len(within))]
        entries[dim] = entry_of(self.axes)
        cut = " * ".join(f"{axis}={size}" for axis, size in sizes.items())
        why = f" that {cut} divides" if is_divided else f"; {cut} divides none"
        return ShapedSpec(Entries(entries), f"{self!r}: dim {dim} is the largest{why}")

    def _left_alone(self, within: Entries, why: str) -> ShapedSpec:
        return ShapedSpec(within, f"{self!r} leaves it alone: {why}")


def largest_dim(
    dims: list[int], shape: tuple[int, ...], parts: int, units: Sequence[int] = ()
) -> tuple[int, bool]:
    """Find (the largest dimension that can be cut into parts, True), or (the largest, False)."""
    # Of equal sizes the last comes first, as in a stable argsort that is reversed.
    by_size = sorted(dims, key=lambda dim: (shape[dim], dim), reverse=True)
    for dim in by_size:
        unit = units[dim] if dim < len(units) and parts > 1 else 1
        if shape[dim] % (parts * unit) == 0:
            return dim, True
    return by_size[0], False


class ShapedSpec(NamedTuple):
    """The spec of an array, made from its shape."""

    spec: Entries
    origin: str
    """How it came about, in words."""


def fsdp(
    axis: str | Sequence[str], *, min_bytes: int = _MIN_BYTES, min_rank: int = 0, within: Any = ()
) -> Fsdp:
    """Return a rule's spec that is made from each array's shape: its largest dimension is cut.

    The mesh axis cuts the largest dimension that it divides and that `within` leaves free; of equal
    ones, the last. If it divides none, it is put on the largest one, where the `Correction` says
    what becomes of it: by default it is dropped, and `Plan.check` says so. Equal to `fsdp` of
    big_vision and `fsdp_sharding` of openpi, except that an absent axis is the correction's, too.

    Args:
        axis: The mesh axis; or several, which cut one dimension together.
        min_bytes: Arrays of fewer bytes get `within` alone. Default: 4 MiB. 0 needs no dtype.
        min_rank: Arrays of fewer dimensions get `within` alone. Default: 0. openpi has 2.
        within: A spec as in `Rules`, the fixed part: its entries stay, and None is free. Default:
            none.

    Returns:
        A value to give as a rule's spec, or inside a `RuleSpec`. It needs a mesh, so
        `match_partition_rules` refuses it; and whole shapes, so that rules with it are refused in a
        shard_map over one of its axes.

    Raises:
        TypeError: An argument is of another type.
        ValueError: No axis, an axis twice, or a number that is negative.

    Example:
        >>> import jax
        >>> import shardrules as sr
        >>> rules = [("wo", sr.fsdp("fsdp", within=("tp",))), (".*", sr.fsdp("fsdp"))]
        >>> tree = {name: jax.ShapeDtypeStruct((2048, 5120), "bfloat16") for name in ("wi", "wo")}
        >>> plan = sr.plan(tree, rules, {"fsdp": 8, "tp": 4})
        >>> [tuple(spec) for spec in plan.specs().values()]
        [(None, 'fsdp'), ('tp', 'fsdp')]
    """
    axes = (axis,) if isinstance(axis, str) else strings("axis", axis)
    fixed = as_entries("within", within)
    named = [*axes, *(name for entry in entries_of(fixed) for name in entry_axes(entry))]
    if not axes or len(set(named)) < len(named):
        raise ValueError(
            f"axis is {axis!r}, within {spec_shown(fixed)}; it must name at least one mesh axis, "
            "and each only once"
        )
    return Fsdp(axes, integer("min_bytes", min_bytes), integer("min_rank", min_rank), fixed)
