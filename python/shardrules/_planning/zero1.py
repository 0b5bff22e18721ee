"""`Zero1`: how an optimizer's state is cut by one more mesh axis than its parameters.

A record that checks itself. Must not know how a state finds its parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardrules._arguments import check_choices, check_type, texts
from shardrules._display import without_defaults

__all__ = ["Zero1"]


@dataclass(frozen=True, slots=True)
class Zero1:
    """ZeRO-1 as a library has it, for `Plan.for_optimizer`: which dimension gets the mesh axis.

    Only dimensions are looked at whose part on a device the axis divides.

    Args:
        axis: The mesh axis, such as that of the data.
        dim: The dimension of which each device holds most, or the first. Of equals the first.
        place: The axis's place among others that cut the dimension: behind them ("inner"), so that
            each device holds a part of the parameter's shard, or before them ("outer").
        not_with: Mesh axes beside which it does not stand.

    Raises:
        ValueError: `dim` or `place` is something else.
        TypeError: A name is not a string.

    Example:
        >>> import jax, shardrules as sr
        >>> params = {"w": jax.ShapeDtypeStruct((8, 16), "float32")}
        >>> plan = sr.plan(params, [("w", "fsdp")], {"data": 2, "fsdp": 2})
        >>> first = sr.Zero1("data", dim="first", place="outer")  # as MaxText does it
        >>> plan.for_optimizer({"mu": params}, zero1=first).specs()["mu"]["w"][0]
        ('data', 'fsdp')
    """

    axis: str
    dim: Literal["largest", "first"] = "largest"
    place: Literal["inner", "outer"] = "inner"
    not_with: tuple[str, ...] = ()

    __repr__ = without_defaults

    def __post_init__(self) -> None:
        check_type("axis", self.axis, str, "a mesh axis")
        check_choices(self)
        object.__setattr__(self, "not_with", texts("not_with", self.not_with))
