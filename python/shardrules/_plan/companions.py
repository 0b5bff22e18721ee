"""Companions: records of leaves that follow the rules of other paths, such as stacked layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import NamedTuple

from shardrules._base.arguments import as_tuple, check_type, integer
from shardrules._base.specs import Dim
from shardrules._base.text import brief, shown, without_defaults
from shardrules._rules.patterns import check_template

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

    Raises:
        ValueError: dims are not of this form.
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

    __repr__ = without_defaults

    def __post_init__(self) -> None:
        check_type("pattern", self.pattern, str | re.Pattern, "a pattern")
        check_type("base", self.base, str, "a string")
        check_template(self.pattern, self.base)
        if not callable(self.dims):
            if type(self.dims) is not tuple:
                object.__setattr__(self, "dims", as_tuple("dims", self.dims, "dimensions"))
            check_dims(self.dims)


def check_dims(dims: Dims) -> None:
    """Check that each is a dimension, None, a mesh axis or a tuple of them, or a final ellipsis."""
    for position, dim in enumerate(dims):
        if dim is not None and not _is_dim(dim) and not (dim is ... and position == len(dims) - 1):
            raise ValueError(
                f"dims has {shown(dim)}; it has dimensions from 0 on, None and mesh axes, and "
                "at its end there may be an ellipsis"
            )


def _is_dim(dim: object) -> bool:
    if isinstance(dim, tuple):
        return all(isinstance(axis, str) for axis in dim)
    if isinstance(dim, int):
        return not isinstance(dim, bool) and dim >= 0
    return dim is None or isinstance(dim, str)


def stacked(
    at: str, layer: str | None = None, *, axis: int = 0, mesh_axis: str | None = None
) -> Companion:
    r"""Apply rules for single layers to a tree of stacked ones, as `jax.lax.scan` needs them.

    Args:
        at: The path of the stack, without what is above it: `decoder/layers`. "" is the root: each
            array is stacked, as in an ensemble that `jax.vmap` has made.
        layer: The path of the layer whose rules count; a `*` in it is layer 0. Default: `{at}/*`.
        axis: The dimension of the stack in its arrays; 1 in MaxText. Default: 0.
        mesh_axis: The mesh axis that cuts the stack, such as one of pipeline stages. Default: none.

    Returns:
        For `plan(..., companions=...)`.

    Raises:
        ValueError: axis is negative, or above 63; or there is a layer for the root.

    Example:
        >>> import jax
        >>> import shardrules as sr
        >>> rules = [(r"layers/\d+/wq", ("fsdp", "tp"))]
        >>> tree = {"layers": {"wq": jax.ShapeDtypeStruct((32, 512, 512), "bfloat16")}}
        >>> mesh = {"fsdp": 8, "tp": 4}
        >>> plan = sr.plan(tree, rules, mesh, companions=[sr.stacked("layers")])
        >>> tuple(plan.specs()["layers"]["wq"])
        (None, 'fsdp', 'tp')
    """
    check_type("at", at, str, "a path")
    check_type("layer", layer, str | None, "a path, or None")
    check_type("mesh_axis", mesh_axis, str | None, "a mesh axis or None")
    # No array has more dimensions: numpy's have 64.
    dims = (*range(integer("axis", axis, 0, 63)), mesh_axis, ...)
    if not at:
        if layer is not None:
            raise ValueError(
                f"layer is {brief(layer)}, and at is the root: leave layer, if the rules are for "
                r"the tree's own paths, or give a Companion('^(.*)$', r'LAYER/\1', (None, ...))"
            )
        return Companion("^(.*)$", r"\g<1>", dims)
    of_layer = (layer or f"{at}/*").replace("*", "0").replace("\\", r"\\")
    return Companion(rf"(^|[./]){re.escape(at)}([./]|$)", rf"\g<1>{of_layer}\g<2>", dims)


class DimStep(NamedTuple):
    """Dimensions of a leaf in terms of its base's."""

    dims: Dims
    """The dims of the `Companion`, or the result of its function."""
    rank: int | None
    """The leaf's rank; None for a base that is not in the tree and has dimensions of its own."""


class Link(NamedTuple):
    """Companion that finds a leaf, or the base of one."""

    companion: Companion
    base: str
    """The path to which it leads."""
    step: DimStep
