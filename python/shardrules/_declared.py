"""What users declare about a rule list: that something which looks like a slip is meant so.

A record; rule files, the command line and `Plan.check` all fill it. Must not know what is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from shardrules._matching.patterns import parse
from shardrules._matching.rules import Rules

__all__ = ["Declared", "compiled_replicated"]


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


def compiled_replicated(patterns: Iterable[str | re.Pattern[str]]) -> Rules:
    """The patterns as rules, which meet paths as people write them, whatever the dialect.

    So they cost what rules cost, and what is not regular is in `Rules.fallbacks`.

    Raises:
        re.error, OverflowError, RecursionError, ValueError: A pattern is invalid; the message has
            its index.
    """
    listed = list(patterns)
    for index, pattern in enumerate(listed):
        parse(f"replicated[{index}]", pattern, pattern)
    return Rules([(pattern, None) for pattern in listed])
