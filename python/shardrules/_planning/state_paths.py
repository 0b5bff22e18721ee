"""Which leaves are an optimizer's state, averages of the parameters or activations, by their paths.

Costs a few substring searches per path. Must not know what follows from it.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["rows_of_activations", "rows_of_optimizer", "rows_of_state"]

# flax's, EasyLM's, EasyDeL's and Levanter's train states, nnx.Optimizer and orbax checkpoints of
# them; Paxml and haiku; T5X. At the top alone, where no layer is called so: big_vision and others.
_OPTIMIZER: Final = ("_?opt_states?|optimizer_states?|param_states", "opt|optim|optimizer")
# Averages of the parameters: diffusers, scenic, haiku; at the top alone those of optax.ema.
_AVERAGES: Final = ("_?ema_params|params_ema|ema_state|ema_model|model_ema", "_?ema")

# At the top alone: flax's collection of what modules sow, and ours.
_ACTIVATIONS: Final = ("(?!)", "activations|intermediates")


def _components(anywhere: str, at_top: str) -> re.Pattern[str]:
    """Finds the names as whole components of paths, or of JAX's `keystr`."""
    begin, end = r"[/.\[\]']", r"(?:[/.\[\]']|$)"
    return re.compile(rf"(?:(?:^|{begin})(?:{anywhere})|^{begin}*(?:{at_top})){end}")


_OF_OPTIMIZER: Final = _components(*_OPTIMIZER)
_OF_STATE: Final = _components(*map("|".join, zip(_OPTIMIZER, _AVERAGES, strict=True)))

_OF_ACTIVATIONS: Final = _components(*_ACTIVATIONS)


def rows_of_optimizer(paths: list[str]) -> list[int]:
    """The rows of an optimizer's state, by the names of `DeviceBytes`."""
    return _rows(paths, _OF_OPTIMIZER)


def rows_of_state(paths: list[str]) -> list[int]:
    """The rows of an optimizer's state and of averages of the parameters."""
    return _rows(paths, _OF_STATE)


def rows_of_activations(paths: list[str]) -> list[int]:
    """The rows of activations, by the names of `DeviceBytes`."""
    return [
        row
        for row, path in enumerate(paths)
        if ("activ" in path or "interm" in path) and _OF_ACTIVATIONS.search(path)
    ]


def _rows(paths: list[str], names: re.Pattern[str]) -> list[int]:
    # Most paths have none of these words, and looking for them is ten times as fast.
    return [
        row
        for row, path in enumerate(paths)
        if ("opt" in path or "ema" in path or "param_states" in path) and names.search(path)
    ]
