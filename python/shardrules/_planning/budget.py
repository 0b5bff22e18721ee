"""Bytes on each device: of parameters, gradients and optimizer state.

Costs a few additions of arrays the size of the mesh per kind of leaf. Must not know about rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._files.dtypes import bits_of
from shardrules._sharding.device_bytes import device_bytes
from shardrules._specs import Entries
from shardrules._words import bytes_shown

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._planning.plan import Plan

__all__ = ["DeviceBytes", "budget", "rows_of_optimizer"]

# As flax's and EasyDeL's train states, nnx.Optimizer and orbax checkpoints of them name it.
_OPTIMIZER_STATE: Final = re.compile(r"(^|[/.\[\]'])opt_state([/.\[\]']|$)")


class DeviceBytes(NamedTuple):
    """Bytes on each device: int64, one dimension for each mesh axis, in the mesh's order."""

    params: npt.NDArray[np.int64]
    gradients: npt.NDArray[np.int64]
    optimizer: npt.NDArray[np.int64]

    @property
    def total(self) -> npt.NDArray[np.int64]:
        """All of it."""
        return self.params + self.gradients + self.optimizer

    @property
    def max(self) -> int:
        """On the device that holds most."""
        return int(self.total.max())

    def __str__(self) -> str:
        parts = (
            f"{name} {bytes_shown(int(held.max()))}"
            for name, held in zip(self._fields, self, strict=True)
            if held.any()
        )
        total, least = self.max, int(self.total.min())
        uneven = "" if least == total else f" (the emptiest {bytes_shown(least)})"
        return (
            f"{bytes_shown(total)} on the fullest device{uneven}: {', '.join(parts) or 'nothing'}"
        )


def budget(plan: Plan, gradients: Any, optimizer: Plan | Iterable[Any] | None) -> DeviceBytes:
    """See `Plan.bytes_per_device`."""
    held = DeviceBytes(*(np.zeros(tuple(plan.axis_sizes.values()), np.int64) for _ in range(3)))
    of_state = _optimizer_counts(plan)
    for kind, count, in_state in zip(plan.kinds, plan.counts, of_state, strict=True):
        held.params[...] += int(count - in_state) * kind.device_bytes
        held.optimizer[...] += int(in_state) * kind.device_bytes
    if gradients is True:
        held.gradients[...] = held.params
    elif gradients is not None and gradients is not False:
        held.gradients[...] = _like_params(plan, of_state, bits_of(gradients))
    if optimizer is None:
        return held
    if not isinstance(optimizer, Iterable):
        # Of another order of the axes, the arrays would have other dimensions.
        if list(optimizer.axis_sizes.items()) != list(plan.axis_sizes.items()):
            raise ValueError(
                f"the optimizer's plan is for the mesh {optimizer.axis_sizes}, this one for "
                f"{plan.axis_sizes}"
            )
        held.optimizer[...] += optimizer.bytes_per_device().total
        return held
    for dtype in optimizer:
        held.optimizer[...] += _like_params(plan, of_state, bits_of(dtype))
    return held


def _like_params(plan: Plan, of_state: npt.NDArray[np.intp], bits: int) -> npt.NDArray[np.int64]:
    """Bytes on each device of arrays like the parameters, of another dtype."""
    held = np.zeros(tuple(plan.axis_sizes.values()), np.int64)
    for kind, count in zip(plan.kinds, plan.counts - of_state, strict=True):
        if kind.shape is not None:
            spec = kind.spec if kind.spec is not None else Entries()
            held += int(count) * device_bytes(kind.shape, bits, spec, plan.axis_sizes)
    return held


def rows_of_optimizer(paths: list[str]) -> list[int]:
    """The rows of the leaves under `opt_state`."""
    # `in` first: most trees have none, and it is ten times as fast.
    return [
        row
        for row, path in enumerate(paths)
        if "opt_state" in path and _OPTIMIZER_STATE.search(path)
    ]


def _optimizer_counts(plan: Plan) -> npt.NDArray[np.intp]:
    """Per kind, its leaves under `opt_state`."""
    return np.bincount(plan.kind_of[rows_of_optimizer(plan.paths)], minlength=len(plan.kinds))
