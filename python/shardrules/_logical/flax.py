"""The parts of flax that this process has loaded, found without importing flax.

A few look-ups in `sys.modules`. Must not know what the compat modules do with them.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = [
    "box_types",
    "is_flax_struct",
    "loaded",
    "own_rules",
    "says_its_sharding",
    "variable_sharding",
    "variable_types",
]


def loaded(module: str, name: str) -> Any:
    """An attribute of a module that is already imported; None if it is not."""
    return getattr(sys.modules.get(module), name, None)


def variable_types() -> tuple[type, ...]:
    """The classes Variable and (before flax 0.12) VariableState of nnx; () without nnx."""
    nnx = sys.modules.get("flax.nnx.variablelib")
    if nnx is None:
        return ()
    return tuple(getattr(nnx, name) for name in ("Variable", "VariableState") if hasattr(nnx, name))


def box_types() -> tuple[type, ...]:
    """The base classes of boxes, ours and flax's, that are already imported."""
    modules = ("shardrules.compat.flax_core_meta", "flax.core.meta")
    return tuple(sys.modules[name].AxisMetadata for name in modules if name in sys.modules)


def is_flax_struct(node: object) -> bool:
    """Whether a node is a record of flax.struct, such as a TrainState."""
    # The public mark of `flax.struct.dataclass` is its `replace`, which others have as well.
    return bool(getattr(type(node), "_flax_dataclass", False))


def variable_sharding(variable: Any) -> Any:
    """The sharding of a Variable, usually a tuple of logical names; None if it has none."""
    metadata = variable.get_metadata()
    # flax before 0.12 says "sharding", and before that "sharding_names".
    spellings = ("out_sharding", "sharding_names", "sharding")
    return next(filter(None, map(metadata.get, spellings)), None)


def own_rules(variable: Any) -> Any:
    """The logical rules of a Variable's own; None without."""
    return variable.get_metadata().get("sharding_rules") or None


def says_its_sharding(variable: Any) -> bool:
    """Whether a Variable has a sharding."""
    return bool(variable_sharding(variable))
