"""What this process has of flax, recognised without importing it.

A few look-ups in `sys.modules`. Must not know what the compat modules do with it.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["box_types", "loaded", "says_its_sharding", "variable_sharding", "variable_types"]


def loaded(module: str, name: str) -> Any:
    """An attribute of a module that something else has imported; None where nothing has."""
    return getattr(sys.modules.get(module), name, None)


def variable_types() -> tuple[type, ...]:
    """The Variable of nnx, and what flax before 0.12 called VariableState; () without nnx."""
    nnx = sys.modules.get("flax.nnx.variablelib")
    if nnx is None:
        return ()
    return tuple(getattr(nnx, name) for name in ("Variable", "VariableState") if hasattr(nnx, name))


def box_types() -> tuple[type, ...]:
    """The classes of boxes, ours and flax's, that something in this process has imported."""
    modules = ("shardrules.compat.flax_core_meta", "flax.core.meta")
    return tuple(sys.modules[name].AxisMetadata for name in modules if name in sys.modules)


def variable_sharding(variable: Any) -> Any:
    """The sharding of a Variable, with logical names as a rule; None if it has none."""
    metadata = variable.get_metadata()
    # flax before 0.12 says "sharding".
    return metadata.get("out_sharding") or metadata.get("sharding")


def says_its_sharding(variable: Any) -> bool:
    """Whether a Variable has a sharding."""
    return bool(variable_sharding(variable))
