"""What this process has of flax, recognised without importing it.

A few look-ups in `sys.modules`. Must not know what the compat modules do with it.
"""

from __future__ import annotations

import sys
from typing import Any


def loaded(module: str, name: str) -> Any:
    """An attribute of a module that something else has imported; None where nothing has."""
    return getattr(sys.modules.get(module), name, None)


def variable_types() -> tuple[type, ...]:
    """The Variable of nnx, and what flax before 0.12 called VariableState; () without nnx."""
    names = ("Variable", "VariableState")
    found = {loaded("flax.nnx.variablelib", name) for name in names}
    return tuple(found - {None})


def says_its_sharding(variable: Any) -> bool:
    """Whether a Variable has a sharding."""
    metadata = variable.get_metadata()
    # flax before 0.12 says "sharding".
    return bool(metadata.get("out_sharding") or metadata.get("sharding"))
