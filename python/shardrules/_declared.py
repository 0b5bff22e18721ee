"""Declarations about a rule list: properties that look like mistakes and are intended.

A dict, which rule files, the command line and `Plan.check` fill. Must not know what is checked.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Final, TypedDict

from shardrules._matching.patterns import parse
from shardrules._matching.rules import Rules

__all__ = ["NOTHING", "Declared", "all_declared", "compiled_replicated"]


class Declared(TypedDict):
    """Properties of a rule list that are intended: arguments of `Plan.check`, by their names."""

    replicated: tuple[str | re.Pattern[str], ...]
    """Patterns of leaves that are replicated on purpose, searched in the paths."""
    optional_axes: tuple[str, ...]
    """Mesh axes that a mesh may lack."""
    data_axes: tuple[str, ...]
    """Mesh axes that shard only batches and sequences."""


NOTHING: Final = Declared(replicated=(), optional_axes=(), data_axes=())


def all_declared(one: Declared, other: Declared) -> Declared:
    """The declarations of both."""
    return Declared(
        replicated=one["replicated"] + other["replicated"],
        optional_axes=one["optional_axes"] + other["optional_axes"],
        data_axes=one["data_axes"] + other["data_axes"],
    )


def compiled_replicated(patterns: Iterable[str | re.Pattern[str]]) -> Rules:
    """The patterns as rules, which are searched in paths as they are printed, in every dialect.

    They cost as much as rules, the first time. Patterns that are not regular are in
    `Rules.fallbacks`.

    Raises:
        re.error, OverflowError, RecursionError, ValueError: A pattern is invalid. The message has
            its index.
    """
    return _compiled(tuple(patterns))


@functools.lru_cache(maxsize=16)
def _compiled(patterns: tuple[str | re.Pattern[str], ...]) -> Rules:
    for index, pattern in enumerate(patterns):
        parse(f"replicated[{index}]", pattern, pattern)
    return Rules([(pattern, None) for pattern in patterns])
