"""Bytes on the fullest device and in the host's memory: parameters, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.arguments import as_tuple
from shardrules._base.dtypes import as_bits
from shardrules._base.rule_specs import MemoryKind, is_on_host
from shardrules._base.specs import Entries
from shardrules._base.text import answer, bytes_shown
from shardrules._place.decider import Decider
from shardrules._plan.kinds import axes_used, device_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._place.mesh import MeshLike
    from shardrules._plan.plan import Plan


@answer
class DeviceBytes(NamedTuple):
    """Bytes on the device that holds most, which holds most of each leaf: the first of the mesh.

    The path of a leaf decides where it is counted, unless its memory is the host's.
    """

    params: int
    """All leaves but those of `optimizer`."""
    gradients: int
    """Gradients of the parameters, if they are counted; integers and booleans have none."""
    optimizer: int
    """Leaves beside the parameters that have no gradients: those under a component opt_state,
    opt_states, optimizer_state, optimizer_states, param_states, or ema_params, params_ema,
    ema_state, ema_model, model_ema; under opt, optim, optimizer or ema at the top of the tree; and
    what `bytes_per_device` is given as the optimizer's: of moments, one for each gradient."""
    host: int
    """Leaves of all three in the host's memory."""

    @property
    def max(self) -> int:
        """Bytes in the device's memory: of all but `host`."""
        return self.params + self.gradients + self.optimizer

    def __str__(self) -> str:
        on_device = {name: size for name, size in self._asdict().items() if name != "host"}
        parts = (f"{name} {bytes_shown(size)}" for name, size in on_device.items() if size)
        host = f"; {bytes_shown(self.host)} in the host's memory" if self.host else ""
        total = f"{bytes_shown(self.max)} on the fullest device: "
        return f"{total}{', '.join(parts) or 'nothing'}{host}"

    def _fits(self, hbm: int | None) -> bool | None:
        """Tell whether a device has room for that; None if its memory is not known."""
        return None if hbm is None else self.max <= hbm


_MOMENTS: Final = (
    "dtypes, one for each moment: Adam's two are ('float32', 'float32'); "
    "or plan.for_optimizer(state)"
)


@dataclass(frozen=True, slots=True)
class Training:
    """Arrays that training adds to the parameters: arguments of `Plan.bytes_per_device`."""

    gradients: Any = None
    optimizer: Plan | Iterable[Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, Decider | None):
            object.__setattr__(self, "optimizer", as_tuple("optimizer", self.optimizer, _MOMENTS))

    def on(self, mesh: MeshLike) -> Training:
        """Return the same on another mesh."""
        optimizer: Any = self.optimizer
        if optimizer is None or isinstance(optimizer, tuple):
            return self
        return replace(self, optimizer=optimizer.on_mesh(mesh))

    def bytes_with(self, params: Plan, *, only_whole: bool = False) -> DeviceBytes:
        """Count bytes of the parameters and of what training adds; or of uncut arrays alone."""
        parts: dict[str, int] = dict.fromkeys(("params", "gradients", "optimizer", "host"), 0)

        def add(
            part: str,
            plan: Plan,
            counts: npt.NDArray[Any],
            bits: int | None = None,
            memory: MemoryKind | None = None,
        ) -> None:
            for kind, count in zip(plan.kinds, counts.tolist(), strict=True):
                if only_whole and axes_used(kind._counted, plan.axis_sizes):
                    continue
                size = kind.device_bytes
                if bits is not None and kind.shape is not None:
                    counted = kind._counted or Entries()
                    size = device_bytes(kind.shape, bits, counted, plan.axis_sizes)
                parts["host" if is_on_host(memory or kind.memory_kind) else part] += count * size

        of_state, of_gradients = params._leaves.counts_by_role
        add("params", params, params.counts - of_state)
        add("optimizer", params, of_state)
        if self.gradients is not None and self.gradients is not False:
            bits = None if self.gradients is True else as_bits("gradients", self.gradients)
            # They are made on the device, wherever the parameters come from.
            add("gradients", params, of_gradients, bits, "device")
        optimizer: Any = self.optimizer
        if optimizer:
            _check_is_first(params)
        if isinstance(optimizer, tuple):
            for position, dtype in enumerate(optimizer):
                add("optimizer", params, of_gradients, as_bits(f"optimizer[{position}]", dtype))
        elif optimizer is not None:
            _check_same_mesh(optimizer, params)
            add("optimizer", optimizer, optimizer.counts)
        return DeviceBytes(**parts)


def _check_is_first(params: Plan) -> None:
    """Check that no optimizer's state is in the tree, which would count twice."""
    if rows := params._leaves.optimizer_rows:
        raise ValueError(
            f"optimizer: the tree has the state of one already, {params.paths[rows[0]]} by its "
            "name: leave it out here, or plan the parameters alone"
        )


def _check_same_mesh(optimizer: Plan, params: Plan) -> None:
    if [*params.axis_sizes.items()] != [*optimizer.axis_sizes.items()]:
        raise ValueError(
            f"the optimizer's plan is for the mesh {optimizer.axis_sizes}, this one for "
            f"{params.axis_sizes}"
        )
