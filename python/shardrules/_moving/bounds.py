"""The bound on bytes in flight that `load`, `reshard` and forecasts share."""

from __future__ import annotations

from typing import Final

__all__ = ["DEFAULT_IN_FLIGHT"]

DEFAULT_IN_FLIGHT: Final = 2 << 30
"""Bytes that are on their way at once, unless more or less is asked for."""
