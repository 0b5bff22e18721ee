"""Which paths are of an optimizer's state, averages of the parameters or activations.

No name has a digit, so templates tell it as well as paths, and siblings are one template. Costs a
few substring searches for each. Must not know what follows from it.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["of_activations", "of_optimizer", "of_state"]

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


def of_optimizer(paths: list[str]) -> list[int]:
    """The indices of those of an optimizer's state, by the names of `DeviceBytes`."""
    return _found(paths, _OF_OPTIMIZER, ("opt", "param_states"))


def of_state(paths: list[str]) -> list[int]:
    """The indices of those of an optimizer's state and of averages of the parameters."""
    return _found(paths, _OF_STATE, ("opt", "param_states", "ema"))


def of_activations(paths: list[str]) -> list[int]:
    """The indices of those of activations, by the names of `DeviceBytes`."""
    return _found(paths, _OF_ACTIVATIONS, ("activ", "interm"))


def _found(paths: list[str], names: re.Pattern[str], words: tuple[str, ...]) -> list[int]:
    # Most trees have none of these words, and most paths of the others neither; looking for a word
    # is ten times as fast as the pattern.
    text = "\n".join(paths)
    there = [word for word in words if word in text]
    if not there:
        return []
    return [
        index
        for index, path in enumerate(paths)
        if any(word in path for word in there) and names.search(path)
    ]
