"""Bytes on each device: of parameters, gradients and optimizer state.

Costs a few numbers per kind of leaf; `budget` alone makes one for each device. Must not know about
rules.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._arguments import MOST
from shardrules._files.dtypes import bits_of
from shardrules._sharding.device_bytes import DeviceClasses, Held, held_of
from shardrules._specs import Entries
from shardrules._words import bytes_shown, shown

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._planning.plan import Plan

__all__ = ["DeviceBytes", "budget", "by_class", "rows_of_optimizer"]

# flax's, EasyLM's, EasyDeL's and Levanter's train states, nnx.Optimizer and orbax checkpoints of
# them; Paxml and haiku; T5X. At the top alone, where no layer is called so: big_vision and others.
_OPTIMIZER: Final = ("_?opt_states?|optimizer_states?|param_states", "opt|optim|optimizer")
# Averages of the parameters: diffusers, scenic, haiku; at the top alone those of optax.ema.
_AVERAGES: Final = ("_?ema_params|params_ema|ema_state|ema_model|model_ema", "_?ema")


def _components(anywhere: str, at_top: str) -> re.Pattern[str]:
    """Finds the names as whole components of paths, or of JAX's `keystr`."""
    begin, end = r"[/.\[\]']", r"(?:[/.\[\]']|$)"
    return re.compile(rf"(?:(?:^|{begin})(?:{anywhere})|^{begin}*(?:{at_top})){end}")


_OF_OPTIMIZER: Final = _components(*_OPTIMIZER)
_OF_STATE: Final = _components(*map("|".join, zip(_OPTIMIZER, _AVERAGES, strict=True)))


class DeviceBytes(NamedTuple):
    """Bytes on each device: one dimension for each mesh axis, in the mesh's order.

    They are int64; or Python's ints, as objects, where that is too small; and cannot be written to.
    What a leaf is counted as, its path decides.
    """

    params: npt.NDArray[np.int64]
    """All leaves but those of `optimizer`."""
    gradients: npt.NDArray[np.int64]
    """Of the parameters, if asked for."""
    optimizer: npt.NDArray[np.int64]
    """What is kept beside the parameters and gets no gradient: leaves under a component opt_state,
    opt_states, optimizer_state, optimizer_states, param_states, or ema_params, params_ema,
    ema_state, ema_model, model_ema; under opt, optim, optimizer or ema at the top of the tree; and
    what `bytes_per_device` is given as the optimizer's."""

    @property
    def total(self) -> npt.NDArray[np.int64]:
        """All of it."""
        most = sum(int(held.max()) for held in self)
        exact = np.int64 if most <= MOST else object
        total: npt.NDArray[Any] = sum(held.astype(exact, copy=False) for held in self)  # type: ignore[assignment]
        return total

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


def budget(plan: Plan, gradients: Any, optimizer: Plan | tuple[Any, ...] | None) -> DeviceBytes:
    """See `Plan.bytes_per_device`."""
    classes, held = _counted(plan, gradients, optimizer)
    return DeviceBytes(*map(classes.each, held))


def by_class(
    plan: Plan, gradients: Any = None, optimizer: Plan | tuple[Any, ...] | None = None
) -> DeviceBytes:
    """The same with a number for each class of devices that hold alike, not for each device."""
    return _counted(plan, gradients, optimizer)[1]


# So many arrays of each kind.
_Arrays = list[tuple[int, Held]]


def _counted(
    plan: Plan, gradients: Any, optimizer: Plan | tuple[Any, ...] | None
) -> tuple[DeviceClasses, DeviceBytes]:
    of_state = _optimizer_counts(plan)
    of_params = (plan.counts - of_state).tolist()
    kinds = [kind.held for kind in plan.kinds]
    params = list(zip(of_params, kinds, strict=True))
    state = list(zip(of_state.tolist(), kinds, strict=True))
    of_gradients: _Arrays = []
    if gradients is True:
        of_gradients = params
    elif gradients is not None and gradients is not False:
        of_gradients = _like_params(plan, of_params, _bits("gradients", gradients))
    if optimizer is None:
        pass
    elif not isinstance(optimizer, tuple):
        # Of another order of the axes, the arrays would have other dimensions.
        if list(optimizer.axis_sizes.items()) != list(plan.axis_sizes.items()):
            raise ValueError(
                f"the optimizer's plan is for the mesh {optimizer.axis_sizes}, this one for "
                f"{plan.axis_sizes}"
            )
        counts = optimizer.counts.tolist()
        state += [(n, kind.held) for n, kind in zip(counts, optimizer.kinds, strict=True)]
    else:
        for position, dtype in enumerate(optimizer):
            bits = _bits(f"optimizer[{position}]", dtype)
            state += _like_params(plan, of_params, bits)
    parts = (params, of_gradients, state)
    classes = DeviceClasses((held for part in parts for _, held in part), plan.axis_sizes)
    return classes, DeviceBytes(*map(classes.total, parts))


def _bits(name: str, dtype: Any) -> int:
    """Of one element; classes such as np.float32 and jnp.bfloat16 stand for dtypes as well."""
    try:
        is_class = isinstance(dtype, type) or isinstance(getattr(dtype, "dtype", None), np.dtype)
        return bits_of(np.dtype(dtype) if is_class else dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {shown(dtype)}, which is no dtype: {error}") from None


def _like_params(plan: Plan, counts: list[int], bits: int) -> _Arrays:
    """Arrays like the parameters, of another dtype."""
    return [
        (count, held_of(kind.shape, bits, kind.spec or Entries(), plan.axis_sizes))
        for count, kind in zip(counts, plan.kinds, strict=True)
        if kind.shape is not None
    ]


def rows_of_optimizer(paths: list[str]) -> list[int]:
    """The rows of the leaves that an optimizer's state has, by the names of `DeviceBytes`."""
    return _rows(paths, _OF_OPTIMIZER)


def _optimizer_counts(plan: Plan) -> npt.NDArray[np.intp]:
    """Per kind, its leaves that are no parameters."""
    return np.bincount(plan.kind_of[_rows(plan.paths, _OF_STATE)], minlength=len(plan.kinds))


def _rows(paths: list[str], names: re.Pattern[str]) -> list[int]:
    # Most paths have none of these words, and looking for them is ten times as fast.
    return [
        row
        for row, path in enumerate(paths)
        if ("opt" in path or "ema" in path or "param_states" in path) and names.search(path)
    ]
