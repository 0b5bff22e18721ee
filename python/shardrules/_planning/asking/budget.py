"""Bytes on each device: of parameters, gradients and optimizer state.

Costs a few numbers per kind of leaf; `budget` alone makes one for each device. Must not know about
rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardrules._arguments import MOST
from shardrules._dtypes import bits_of
from shardrules._format import bytes_shown, shown
from shardrules._sharding.device_bytes import DeviceClasses, Held, held_of
from shardrules._specs import Entries

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._planning.columns import Columns

__all__ = ["DeviceBytes", "budget", "by_class"]


class DeviceBytes(NamedTuple):
    """Bytes on each device: one dimension for each mesh axis, in the mesh's order.

    Arrays of int64, or of Python's ints where that is too small; they cannot be written to. The
    path of a leaf decides where it is counted.
    """

    params: npt.NDArray[np.int64]
    """All leaves but those of `optimizer`."""
    gradients: npt.NDArray[np.int64]
    """Gradients of the parameters, if they are counted."""
    optimizer: npt.NDArray[np.int64]
    """Leaves beside the parameters that have no gradients: those under a component opt_state,
    opt_states, optimizer_state, optimizer_states, param_states, or ema_params, params_ema,
    ema_state, ema_model, model_ema; under opt, optim, optimizer or ema at the top of the tree; and
    what `bytes_per_device` is given as the optimizer's."""

    @property
    def total(self) -> npt.NDArray[np.int64]:
        """Bytes of all three together."""
        most = sum(int(held.max()) for held in self)
        exact = np.int64 if most <= MOST else object
        total: npt.NDArray[Any] = sum(held.astype(exact, copy=False) for held in self)  # type: ignore[assignment]
        return total

    @property
    def max(self) -> int:
        """Bytes on the device that holds most."""
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


def budget(
    columns: Columns, gradients: Any, optimizer: Columns | tuple[Any, ...] | None
) -> DeviceBytes:
    """See `Plan.bytes_per_device`."""
    classes, held = _counted(columns, gradients, optimizer)
    return DeviceBytes(*map(classes.each, held))


def by_class(
    columns: Columns, gradients: Any = None, optimizer: Columns | tuple[Any, ...] | None = None
) -> DeviceBytes:
    """The bytes of `DeviceBytes`, one number for each class of devices that hold equal bytes."""
    return _counted(columns, gradients, optimizer)[1]


# So many arrays of each kind.
_Arrays = list[tuple[int, Held]]


def _counted(
    columns: Columns, gradients: Any, optimizer: Columns | tuple[Any, ...] | None
) -> tuple[DeviceClasses, DeviceBytes]:
    of_state = columns.leaves.state_counts
    of_params = (columns.counts - of_state).tolist()
    held = columns.held
    params = list(zip(of_params, held, strict=True))
    state = list(zip(of_state.tolist(), held, strict=True))
    of_gradients: _Arrays = []
    if gradients is True:
        of_gradients = params
    elif gradients is not None and gradients is not False:
        of_gradients = _like_params(columns, of_params, _bits("gradients", gradients))
    if optimizer is None:
        pass
    elif not isinstance(optimizer, tuple):
        # With the axes in another order, the arrays would have other dimensions.
        if not columns.is_on(optimizer.axis_sizes):
            raise ValueError(
                f"the optimizer's plan is for the mesh {optimizer.axis_sizes}, this one for "
                f"{columns.axis_sizes}"
            )
        state += zip(optimizer.counts.tolist(), optimizer.held, strict=True)
    else:
        for position, dtype in enumerate(optimizer):
            bits = _bits(f"optimizer[{position}]", dtype)
            state += _like_params(columns, of_params, bits)
    parts = (params, of_gradients, state)
    classes = DeviceClasses((held for part in parts for _, held in part), columns.axis_sizes)
    return classes, DeviceBytes(*map(classes.total, parts))


def _bits(name: str, dtype: Any) -> int:
    """Bits of one element; classes such as np.float32 and jnp.bfloat16 stand for dtypes as well."""
    try:
        is_class = isinstance(dtype, type) or isinstance(getattr(dtype, "dtype", None), np.dtype)
        return bits_of(np.dtype(dtype) if is_class else dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {shown(dtype)}, which is no dtype: {error}") from None


def _like_params(columns: Columns, counts: list[int], bits: int) -> _Arrays:
    """Arrays like the parameters, of another dtype."""
    return [
        (count, held_of(kind.shape, bits, kind.spec or Entries(), columns.axis_sizes))
        for count, kind in zip(counts, columns.kinds, strict=True)
        if kind.shape is not None
    ]
