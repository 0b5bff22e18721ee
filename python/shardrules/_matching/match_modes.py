"""Match modes, as data: how a pattern meets a path ("search", "fullmatch", "window", ...).

A mode says what a user may write and which regexes of `re` that comes down to; the automaton and
`re` take it from there. Costs a few string operations per pattern. Must not know about specs or
trees.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from shardrules._format import shown

__all__ = [
    "COMPONENT_SEPARATOR",
    "MATCH_MODES",
    "MatchMode",
    "ModeName",
    "Pattern",
    "checked_pattern",
]

Pattern = str | re.Pattern[str] | tuple[str, ...]
"""The types that a rule's pattern may have."""

ModeName = Literal["search", "fullmatch", "exact", "exact_parent", "glob", "glob_parent", "window"]

_NEVER: Final = "(?!)"
# Between the components of the paths that windows meet: `.` and the anchors stop there by nature.
COMPONENT_SEPARATOR: Final = "\n"


class MatchMode(NamedTuple):
    """A way of matching a pattern with a path."""

    written_as: Literal["regex", "text", "window"]
    """The form in which users write the pattern."""
    regexes: Callable[[Any], tuple[str | re.Pattern[str], ...]]
    """From that to regexes: one; or, for a window, one per component."""
    method: Literal["search", "fullmatch", "window"]
    """The function of `re` for the path; or "window": `re.match` of consecutive components."""


def _as_written(pattern: str | re.Pattern[str]) -> tuple[str | re.Pattern[str], ...]:
    return (pattern,)


def _literally(pattern: str | re.Pattern[str]) -> tuple[str]:
    # No path is equal to a compiled pattern.
    return (re.escape(pattern) if isinstance(pattern, str) else _NEVER,)


def _numbers_for_stars(plan_key: str) -> tuple[str]:
    """The names that transformers generalises to this key.

    It replaces each `.12` before a dot or the end by `.*`, from left to right, and the dot behind
    is used up: of two adjacent numbers the second stays, and a first component always does. A star
    that the name itself has stays, too.
    """
    components = plan_key.split(".")
    parts = []
    for before, component in zip([None, *components], components, strict=False):
        is_star, is_number = component == "*", component.isdecimal()
        if is_number and before not in (None, "*"):
            return (_NEVER,)
        if is_number and before == "*":
            parts.append(rf"(?<=\d\.){component}")
        elif not is_star:
            parts.append(re.escape(component))
        elif before is None:
            parts.append(r"\*")
        else:
            parts.append(r"(?:(?<=\*\.)\d+|\*)" if before == "*" else r"(?:\d+|\*)")
    return (r"\.".join(parts),)


def _or_parent(regexes: Callable[[str], tuple[str]]) -> Callable[[str], tuple[str]]:
    """The regexes for a parameter of the module that the key names."""
    return lambda key: (rf"(?:{regexes(key)[0]})\.[^.]*",)


def _whole_components(window: tuple[str, ...]) -> tuple[str, ...]:
    # As text, so that of "a|b" the first alternative is a prefix, as in the libraries.
    return tuple(f"{pattern}$" for pattern in window)


MATCH_MODES: Final[dict[ModeName, MatchMode]] = {
    "search": MatchMode("regex", _as_written, "search"),
    "fullmatch": MatchMode("regex", _as_written, "fullmatch"),
    "exact": MatchMode("regex", _literally, "fullmatch"),
    "exact_parent": MatchMode("text", _or_parent(_literally), "fullmatch"),
    "glob": MatchMode("text", _numbers_for_stars, "fullmatch"),
    "glob_parent": MatchMode("text", _or_parent(_numbers_for_stars), "fullmatch"),
    "window": MatchMode("window", _whole_components, "window"),
}


def checked_pattern(index: int, pattern: Any, mode: MatchMode) -> Any:
    """The pattern of rule `index` in a hashable form.

    Raises:
        TypeError: The match mode does not take such a pattern.
    """
    if mode.written_as == "window":
        sequence = isinstance(pattern, list | tuple) and len(pattern) > 0
        if sequence and all(isinstance(component, str) for component in pattern):
            return tuple(pattern)
        hint = f"; write ({pattern!r},)" if isinstance(pattern, str) else ""
        raise TypeError(
            f"rule {index}: the pattern must be a tuple of strings, one for each component of a "
            f"window, not {shown(pattern)}{hint}"
        )
    if mode.written_as == "text":
        if isinstance(pattern, str):
            return pattern
        raise TypeError(f"rule {index}: the pattern must be a string, not {shown(pattern)}")
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not isinstance(text, str):
        raise TypeError(
            f"rule {index}: the pattern must be a string or a compiled re.Pattern of one, not "
            f"{shown(pattern)}"
        )
    return pattern
