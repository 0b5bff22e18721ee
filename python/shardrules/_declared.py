"""What users declare about a rule list: that something which looks like a slip is meant so.

A record; rule files, the command line and `Plan.check` all fill it. Must not know what is checked.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Declared"]


class Declared(NamedTuple):
    """What is meant to be as it is."""

    replicated: tuple[str | re.Pattern[str], ...] = ()
    """Patterns, searched in the paths, of leaves that are replicated on purpose."""
    optional_axes: tuple[str, ...] = ()
    """Mesh axes that rules name and a mesh may lack."""
    data_axes: tuple[str, ...] = ()
    """Mesh axes that cut batches and sequences, and no leaf."""

    def also(self, other: Declared) -> Declared:
        """What both declare."""
        return Declared(
            self.replicated + other.replicated,
            self.optional_axes + other.optional_axes,
            self.data_axes + other.data_axes,
        )
