"""`Companion`: leaves that follow the rule of another path, such as scales, LoRA factors, stacks.

A record that checks itself. Must not know which libraries name leaves in which ways, nor how a
companion is applied.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import NamedTuple

from shardrules._arguments import check_type, integer, listed
from shardrules._display import without_defaults
from shardrules._format import shown
from shardrules._specs import Dim

__all__ = [
    "Companion",
    "Dims",
    "Link",
    "Shape",
    "Step",
    "base_path",
    "check_dims",
    "fits_rank",
    "named_dims",
]

Shape = tuple[int, ...]
Dims = tuple[Dim | EllipsisType, ...]


@dataclass(frozen=True, slots=True)
class Companion:
    r"""Leaves that follow the rule of another path: their base's, which need not be in the tree.

    Such a leaf gets the rule that its base's path meets; of the rule's spec it takes an entry for
    each of its dimensions, together with the unit (`RuleSpec`), and that is corrected for its own
    shape. A dimension of size 1 takes none. If no rule matches the base's path, the leaf's own
    counts.

    Args:
        pattern: A regex that `re.search` finds in the leaf's path.
        base: What `re.sub` puts in the place of what was found. The result is the base's path.
        dims: Per dimension of the leaf: the base's dimension that it is; None for a dimension that
            the base does not have and that is not cut; or the mesh axis, or axes, that cut it. The
            record is for leaves of this rank only. A final `...` stands for all further dimensions,
            those of the base in order. Or a function that returns the dims of a leaf of any rank
            from its shape and its base's, which is None where the base is not in the tree.
        blocks: Per dimension of the leaf, how many of the base's elements one of its own stands
            for. Default: 1 for each. Only units need it.

    Raises:
        ValueError: dims or blocks are not of this form.
        re.error: The pattern or the replacement is invalid.

    Example:
        >>> import jax
        >>> import shardrules as sr
        >>> scale = sr.Companion("kernel_scale$", "kernel", dims=(1,))
        >>> tree = {"wq": {"kernel_scale": jax.ShapeDtypeStruct((512,), "float32")}}
        >>> rules, mesh = [("wq/kernel$", ("fsdp", "tp"))], {"fsdp": 8, "tp": 4}
        >>> sr.plan(tree, rules, mesh, companions=[scale]).specs()["wq"]["kernel_scale"][0]
        'tp'
    """

    pattern: str | re.Pattern[str]
    base: str
    dims: Dims | Callable[[Shape, Shape | None], tuple[Dim, ...]] = (...,)
    blocks: tuple[int, ...] = ()

    __repr__ = without_defaults

    def __post_init__(self) -> None:
        check_type("pattern", self.pattern, str | re.Pattern, "a pattern")
        check_type("base", self.base, str, "a string")
        re.sub(self.pattern, self.base, "")
        if not callable(self.dims):
            if type(self.dims) is not tuple:
                object.__setattr__(self, "dims", listed("dims", self.dims, "dimensions"))
            check_dims(self.dims)
        if type(self.blocks) is not tuple or self.blocks:
            blocks = listed("blocks", self.blocks, "integers")
            checked = (integer(f"blocks[{i}]", block, 1) for i, block in enumerate(blocks))
            object.__setattr__(self, "blocks", tuple(checked))


class Step(NamedTuple):
    """The dimensions of a leaf in terms of its base's."""

    dims: Dims
    """The dims of the `Companion`, or the result of its function."""
    blocks: tuple[int, ...]
    rank: int | None
    """The leaf's rank; None for a base that is not in the tree and has dimensions of its own."""


class Link(NamedTuple):
    """A companion that finds a leaf, or the base of one."""

    companion: Companion
    base: str
    """The path to which it leads."""
    step: Step


def base_path(companion: Companion, path: str) -> str:
    """The path of the base of the leaf of this path."""
    return re.sub(companion.pattern, companion.base, path, count=1)


def fits_rank(companion: Companion, rank: int) -> bool:
    """Whether leaves of this rank can follow their base like that."""
    if callable(companion.dims):
        return True
    named, is_open = named_dims(companion.dims)
    # There must be a place for each dimension that the base does not have.
    return all(isinstance(dim, int) for dim in named[rank:]) if is_open else len(named) == rank


def check_dims(dims: Dims) -> None:
    """Checks that each is a dimension, None, a mesh axis or a tuple of them, or a final ellipsis.

    Raises:
        ValueError: One is not.
    """
    for position, dim in enumerate(dims):
        if dim is not None and not _is_dim(dim) and not (dim is ... and position == len(dims) - 1):
            raise ValueError(
                f"dims has {shown(dim)}; it has dimensions from 0 on, None and mesh axes, and "
                "at its end there may be an ellipsis"
            )


def named_dims(dims: Dims) -> tuple[tuple[Dim, ...], bool]:
    """The dims before the ellipsis, and whether there is one."""
    named = tuple(dim for dim in dims if dim is not ...)
    return named, len(named) < len(dims)


def _is_dim(dim: object) -> bool:
    if isinstance(dim, tuple):
        return all(isinstance(axis, str) for axis in dim)
    if isinstance(dim, int):
        return not isinstance(dim, bool) and dim >= 0
    return dim is None or isinstance(dim, str)
