"""Bytes on each device and in the host's memory: of parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.arguments import MOST, as_tuple, check_bytes, check_type, memory_bytes
from shardrules._base.dtypes import given_bits
from shardrules._base.rule_specs import MemoryKind, check_memory_kind, is_on_host
from shardrules._base.specs import Entries
from shardrules._base.text import answer, bytes_shown, printable_lines
from shardrules._place.decider import Decider
from shardrules._plan.device_bytes import DeviceClasses, Held, held_of
from shardrules._plan.kinds import axes_used

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.plan import Plan

_ON_DEVICE: Final = ("params", "gradients", "optimizer", "activations")


@answer
class DeviceBytes(NamedTuple):
    """Bytes for each device: one dimension for each mesh axis, in the mesh's order.

    Arrays of int64, or of Python's ints where that is too small; they cannot be written to. The
    path of a leaf decides where it is counted, unless its memory is the host's.
    """

    params: npt.NDArray[np.int64]
    """All leaves but those of `optimizer` and `activations`."""
    gradients: npt.NDArray[np.int64]
    """Gradients of the parameters, if they are counted; integers and booleans have none."""
    optimizer: npt.NDArray[np.int64]
    """Leaves beside the parameters that have no gradients: those under a component opt_state,
    opt_states, optimizer_state, optimizer_states, param_states, or ema_params, params_ema,
    ema_state, ema_model, model_ema; under opt, optim, optimizer or ema at the top of the tree; and
    what `bytes_per_device` is given as the optimizer's: of moments, one for each gradient."""
    activations: npt.NDArray[np.int64]
    """Leaves under activations or intermediates at the top of the tree, all at once; and what
    `bytes_per_device` is given as activations."""
    host: npt.NDArray[np.int64]
    """Leaves of all four in the host's memory, for each of its devices."""
    guessed: dict[str, tuple[str, ...]] = {}  # noqa: RUF012
    """What names alone tell: the folded paths by "optimizer" or "activations"."""

    @property
    def total(self) -> npt.NDArray[np.int64]:
        """Bytes in the device's memory: of all but `host`."""
        parts = self._on_device().values()
        exact = np.int64 if sum(int(sums.max()) for sums in parts) <= MOST else object
        total: npt.NDArray[Any] = sum(sums.astype(exact, copy=False) for sums in parts)  # type: ignore[assignment]
        return total

    @property
    def max(self) -> int:
        """Bytes in the memory of the device that holds most."""
        return int(self.total.max())

    @property
    def max_host(self) -> int:
        """Bytes in the host's memory for the device that has most there."""
        return int(self.host.max())

    def __str__(self) -> str:
        parts = (
            f"{name} {bytes_shown(int(counts.max()))}"
            for name, counts in self._on_device().items()
            if counts.any()
        )
        total, least = self.max, int(self.total.min())
        uneven = "" if least == total else f" (the emptiest {bytes_shown(least)})"
        host = f"; {bytes_shown(self.max_host)} in the host's memory" if self.max_host else ""
        held = f"{bytes_shown(total)} on the fullest device{uneven}: "
        lines = [f"{held}{', '.join(parts) or 'nothing'}{host}"]
        return printable_lines([*lines, *guesses_shown(self.guessed)])

    def _fullest(self) -> dict[str, int]:
        """Return the bytes of each part on the device that has most of it."""
        return {name: int(getattr(self, name).max()) for name in (*_ON_DEVICE, "host")}

    def _on_device(self) -> dict[str, npt.NDArray[np.int64]]:
        return {name: getattr(self, name) for name in _ON_DEVICE}


class Room(NamedTuple):
    """The memory that there is for each device, in bytes; None for what is not known."""

    hbm: int | None
    """The device's own."""
    host: int | None
    """The part of its host's."""

    def fits(self, device_bytes: DeviceBytes) -> bool | None:
        """Return whether all devices have room for that; None if nothing is known."""
        needed = [(device_bytes.max, self.hbm), (device_bytes.max_host, self.host)]
        verdicts = [count <= limit for count, limit in needed if limit is not None]
        return all(verdicts) if verdicts else None

    def __str__(self) -> str:
        limits = {"": self.hbm, " of the host's memory": self.host}
        return " and ".join(
            f"{bytes_shown(limit)}{suffix}" for suffix, limit in limits.items() if limit is not None
        )


def room_of(hbm: float | str | None, host_memory: float | str | None = None) -> Room:
    """Return the memory that there is for each device."""
    return Room(_count("hbm", hbm), _count("host_memory", host_memory))


def _count(name: str, size: float | str | None) -> int | None:
    """Return bytes of memory; less than a device has is told as what does not fit."""
    if size is None or isinstance(size, str):
        return None if size is None else memory_bytes(name, size)
    check_bytes(name, size)
    return int(size)


DTYPES: Final = "dtypes, one for each moment: Adam's two are ('float32', 'float32')"


@dataclass(frozen=True, slots=True)
class Training:
    """Arrays that training adds to the parameters: arguments of `Plan.bytes_per_device`."""

    gradients: Any = None
    optimizer: Plan | Iterable[Any] | None = None
    optimizer_memory_kind: MemoryKind | None = None
    activations: Plan | None = None

    def __post_init__(self) -> None:
        check_memory_kind("optimizer_memory_kind", self.optimizer_memory_kind)
        check_type("activations", self.activations, Decider | None, "a Plan")
        if not isinstance(self.optimizer, Decider | None):
            expected = f"{DTYPES}; or plan.for_optimizer(state)"
            object.__setattr__(self, "optimizer", as_tuple("optimizer", self.optimizer, expected))

    def bytes_with(self, params: Plan) -> DeviceBytes:
        """Count the bytes of the parameters and of what training adds to them."""
        classes, counted_bytes = _counted(params, self, only_whole=False)
        totals = (classes.each(totals) for totals in counted_bytes[:-1])
        return DeviceBytes._make((*totals, counted_bytes.guessed))


_NOTHING: Final = Training()


def by_class(plan: Plan, training: Training = _NOTHING, *, only_whole: bool = False) -> DeviceBytes:
    """Return `DeviceBytes` with a number for each class of devices that hold equal bytes.

    Args:
        plan: The parameters.
        training: What training adds to them.
        only_whole: Count the arrays alone that no mesh axis cuts.
    """
    return _counted(plan, training, only_whole=only_whole)[1]


def _counted(
    plan: Plan, training: Training, *, only_whole: bool
) -> tuple[DeviceClasses, DeviceBytes]:
    gradients, memory = training.gradients, training.optimizer_memory_kind
    optimizer: Any = training.optimizer
    if optimizer is None and memory is not None:
        raise ValueError(
            f"optimizer_memory_kind is {memory!r}, but no optimizer is given; give it, or name the "
            "memory of leaves in their rules"
        )
    leaves, held = plan._leaves, _held(plan)
    _, of_state, of_activations, of_gradients = leaves.counts_by_role
    # The part of the bytes, whose they are, how many of each kind, what is held of one; the memory.
    sources: list[tuple[str, Plan, npt.NDArray[Any], list[Held], MemoryKind | None]] = [
        ("params", plan, plan.counts - of_state - of_activations, held, None),
        ("optimizer", plan, of_state, held, None),
        ("activations", plan, of_activations, held, None),
    ]
    if gradients is not None and gradients is not False:
        arrays = held
        if gradients is not True:
            arrays = _like_params(plan, given_bits("gradients", gradients))
        # They are made on the device, wherever the parameters come from.
        sources.append(("gradients", plan, of_gradients, arrays, "device"))
    if isinstance(optimizer, tuple):
        for position, dtype in enumerate(optimizer):
            arrays = _like_params(plan, given_bits(f"optimizer[{position}]", dtype))
            sources.append(("optimizer", plan, of_gradients, arrays, memory))
    elif optimizer is not None:
        _check_same_mesh("the optimizer's", optimizer, plan)
        sources.append(("optimizer", optimizer, optimizer.counts, _held(optimizer), memory))
    if (other := training.activations) is not None:
        _check_same_mesh("the activations'", other, plan)
        sources.append(("activations", other, other.counts, _held(other), None))
    parts: dict[str, list[tuple[int, Held]]] = {name: [] for name in (*_ON_DEVICE, "host")}
    for part, source, counts, arrays, its_memory in sources:
        for kind, count, array in zip(source.kinds, counts.tolist(), arrays, strict=True):
            if not (only_whole and axes_used(kind._counted, plan.axis_sizes)):
                on_host = is_on_host(its_memory or kind.memory_kind)
                parts["host" if on_host else part].append((count, array))
    all_arrays = (array for part in parts.values() for _, array in part)
    classes = DeviceClasses(all_arrays, plan.axis_sizes)
    nothing = classes.total(())
    totals = (classes.total(part) if part else nothing for part in parts.values())
    guessed = leaves.guessed
    if optimizer is not None and len(leaves.rows_by_role.optimizer):
        guessed = {**guessed, "a second optimizer, beside the given one,": guessed["optimizer"]}
    return classes, DeviceBytes._make((*totals, guessed))


def _held(plan: Plan) -> list[Held]:
    """Return, per kind, what the devices hold of one leaf."""
    return [kind._held for kind in plan.kinds]


def _check_same_mesh(whose: str, other: Plan, plan: Plan) -> None:
    # With the axes in another order, the arrays would have other dimensions.
    if not plan._is_on(other.axis_sizes):
        raise ValueError(
            f"{whose} plan is for the mesh {other.axis_sizes}, this one for {plan.axis_sizes}"
        )


def _like_params(plan: Plan, bits: int) -> list[Held]:
    """Return per kind, an array like its leaves, of another dtype; nothing for what is no array."""
    return [
        held_of(kind.shape or (), bits if kind.shape is not None else 0,
                kind._counted or Entries(), plan.axis_sizes)
        for kind in plan.kinds
    ]  # fmt: skip


def guesses_shown(guesses: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line of what names tell, with how many paths and the first; or none."""
    texts = []
    for role, paths in guesses.items():
        more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
        texts.append(f"{role} of {paths[0]}{more}")
    return [f"assumed by names: {'; '.join(texts)}"] if texts else []
