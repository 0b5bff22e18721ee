"""`Correction`, the policies for specs that do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardrules._base.arguments import check_choice, check_choices, check_type
from shardrules._base.specs import RankPolicy
from shardrules._base.text import without_defaults

MisfitPolicy = Literal["drop", "drop_axis", "prefix", "keep", "error"]
IndivisiblePolicy = Literal["drop", "drop_axis", "prefix", "keep", "error"]


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
            "keep" them (uneven shards), or "error".
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


def check_correction(correction: object) -> None:
    check_type(
        "correction",
        correction,
        Correction | None,
        "a Correction, such as Correction(indivisible='error'), or None",
    )
