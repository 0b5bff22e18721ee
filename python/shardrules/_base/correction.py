"""`Correction`, the policies for specs that do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardrules._base.arguments import check_choice, check_choices, check_type
from shardrules._base.specs import RankPolicy
from shardrules._base.text import without_defaults

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
        check_choices(self)
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
