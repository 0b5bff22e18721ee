"""`Correction`, the policies for specs that do not fit, and `RuleSpec`, what else a rule says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from shardrules._arguments import check_choice, check_choices, check_type, integer, listed, texts
from shardrules._specs import RankPolicy, spec_shown
from shardrules._text import without_defaults

MemoryKind = Literal["device", "pinned_host", "unpinned_host"]
MEMORY_KINDS: Final[tuple[MemoryKind, ...]] = get_args(MemoryKind)


def check_memory_kind(name: str, kind: object) -> None:
    """Check that it is a kind of memory, or None."""
    check_choice(name, kind, (None, *MEMORY_KINDS))


def is_on_host(kind: MemoryKind | None) -> bool:
    """Return whether such memory is the host's, and not the device's."""
    return kind not in (None, "device")


def in_memory(text: str, kind: MemoryKind | None) -> str:
    """Return the text of a spec with its memory kind, if any: P('tp') in pinned_host."""
    return text if kind is None else f"{text} in {kind}"


MisfitPolicy = Literal["drop", "drop_axis", "prefix", "keep", "error"]
IndivisiblePolicy = Literal["drop", "drop_axis", "prefix", "factor", "keep", "error"]


@dataclass(frozen=True, slots=True)
class Correction:
    """The policies for a spec that does not fit the array or the mesh.

    A mesh axis that shards two dimensions is an error under every policy, as it is in JAX.

    Args:
        absent: For an entry that names an axis the mesh does not have: "error", but for axes that
            are declared optional, which are dropped alone; "drop" all axes of the entry,
            "drop_axis" only that axis, keep the "prefix" before it, or "keep" it (JAX will refuse
            it, and `Plan.check` says so).
        indivisible: For an entry whose axes do not divide the dimension: "drop" all, "drop_axis"
            the axes that do not fit beside those before them, keep the longest "prefix" that fits,
            cut by the largest "factor" of the axes that divides, on a mesh that has it as an axis
            (see `Plan.mesh`), "keep" them (uneven shards), or "error".
        rank: For a spec that is longer than the array's rank: "truncate" it, "replicate" the array,
            "keep" it, or "error".
        unconstrained: Whether PartitionSpec.UNCONSTRAINED stays: "keep", or "drop" (it becomes
            None).
        pad: Fill the spec with None up to the rank; and give PartitionSpec() where no axis is left.

    Raises:
        ValueError: A choice that does not exist.

    Example:
        >>> Correction(indivisible="prefix").absent
        'error'
    """

    absent: MisfitPolicy = "error"
    indivisible: IndivisiblePolicy = "drop"
    rank: RankPolicy = "truncate"
    unconstrained: Literal["keep", "drop"] = "keep"
    pad: bool = True

    __repr__ = without_defaults

    def __post_init__(self) -> None:
        check_choices(self)
        check_choice("pad", self.pad, (True, False))


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
        units = listed("units", self.units, "integers or None")
        checked = (u if u is None else integer(f"units[{i}]", u, 1) for i, u in enumerate(units))
        object.__setattr__(self, "units", tuple(checked))
        object.__setattr__(self, "optional_axes", texts("optional_axes", self.optional_axes))
        check_correction(self.correction)
        check_memory_kind("memory_kind", self.memory_kind)


def check_correction(correction: object) -> None:
    check_type(
        "correction",
        correction,
        Correction | None,
        "a Correction, such as Correction(indivisible='error'), or None",
    )


def rule_spec(spec: Any) -> RuleSpec:
    """Return the spec of a rule, as a RuleSpec."""
    return spec if isinstance(spec, RuleSpec) else RuleSpec(spec)


def memory_kind_of(spec: Any) -> MemoryKind | None:
    """Return the memory kind that a rule names."""
    return spec.memory_kind if isinstance(spec, RuleSpec) else None


def plain_spec(spec: Any) -> Any:
    """Return the spec of a rule, without a correction of its own."""
    return spec.spec if isinstance(spec, RuleSpec) else spec


def rule_spec_shown(spec: Any) -> str:
    """Return the spec of a rule as people write it, with its memory kind."""
    whole_spec = rule_spec(spec)
    return in_memory(spec_shown(whole_spec.spec), whole_spec.memory_kind)
