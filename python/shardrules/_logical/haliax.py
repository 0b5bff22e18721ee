"""haliax's NamedArray, an array with the names of its axes, found without importing haliax.

A look-up in `sys.modules`. Must not know how names are resolved.
"""

from __future__ import annotations

from typing import Any

from shardrules._logical.flax import loaded

__all__ = ["axis_names", "named_array_types"]


def named_array_types() -> tuple[type, ...]:
    """The class NamedArray; () without haliax."""
    found = loaded("haliax.core", "NamedArray")
    return () if found is None else (found,)


def axis_names(named: Any) -> tuple[str, ...]:
    """The names of a NamedArray's axes."""
    return tuple(axis.name for axis in named.axes)
