"""A plan for a command: reads within the bound on memory, and tells what has no automaton.

Costs what reading and planning cost. Must not know what is asked of the plan.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from shardrules._cli.inputs import Planned, load_plan
from shardrules._cli.process import note
from shardrules._cli.show import working
from shardrules._cli.values import following
from shardrules._io import memory_within
from shardrules._text import and_more, byte_count, printable

__all__ = ["load", "tell_fallbacks"]

_MOST_FALLBACKS: Final = 5


def load(
    source: str,
    *args: Any,
    max_memory: str,
    stacked: list[str] | None,
    companions: str | None,
    **options: Any,
) -> Planned:
    """As `load_plan`, with a spinner; patterns that `re` evaluates get a note on stderr."""
    options["companions"] = following(stacked, companions)
    with working(f"reading {source}"), memory_within(byte_count(max_memory)):
        planned = load_plan(source, *args, **options)
    tell_fallbacks(planned.fallbacks)
    return planned


def tell_fallbacks(fallbacks: Collection[str]) -> None:
    """Notes for the patterns that cost more than the automaton, without a bound on time."""
    lines = [f"note: `re`, not the automaton, evaluates {one}" for one in fallbacks]
    for line in lines[:_MOST_FALLBACKS] + and_more(len(lines), _MOST_FALLBACKS, "pattern"):
        note(printable(line))
