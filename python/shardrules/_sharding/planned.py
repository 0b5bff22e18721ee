"""The placements of a plan, for functions of this room that take companions.

Planning is a later room, which this one must not know; so it hands in how it finds them when it is
imported. Costs a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from shardrules._arguments import listed

__all__ = ["checked_companions", "find_placements_by", "planned_placements"]

_WHAT: Final = "Companion records, such as shardrules.LORA"
_finders: Final[list[Callable[..., Any]]] = []


def find_placements_by(finder: Callable[..., Any]) -> None:
    """Hands in the function that finds Placements; it has the parameters of `shardrules.plan`."""
    _finders[:] = [finder]


def checked_companions(companions: Any) -> tuple[Any, ...]:
    """The companions; what they are is for the plan to check.

    Raises:
        TypeError: They are not a sequence.
    """
    return listed("companions", companions, _WHAT)


def planned_placements(tree: Any, companions: tuple[Any, ...], *arguments: Any, **more: Any) -> Any:
    """The tree of Placements of the plan with these companions.

    Raises:
        TypeError, ValueError: As `shardrules.plan` and `Plan.shardings`.
    """
    if not _finders:  # as in a process that has read or unpickled its companions
        if not type(companions[0]).__module__.startswith("shardrules."):
            raise TypeError(f"companions[0] is {type(companions[0]).__name__}; give {_WHAT}")
        import_module("shardrules._planning.plan")
    return _finders[0](tree, *arguments, companions=companions, **more)
