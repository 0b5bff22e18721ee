"""The logical axis rules in force in a thread. If flax is loaded, they are stored in flax.

A thread-local value. Must not know what the rules mean.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardrules._arguments import check_type
from shardrules._format import shown
from shardrules._jax import flax_axis_rules
from shardrules._logical.names import last_wins
from shardrules._logical.rules import LogicalRules, check_not_for_paths

__all__ = [
    "LogicalRulesLike",
    "get_logical_axis_rules",
    "logical_axis_rules",
    "set_logical_axis_rules",
]

LogicalRulesLike = Sequence[tuple[str, Any]] | LogicalRules


def set_logical_axis_rules(rules: LogicalRulesLike) -> None:
    """Set the logical axis rules of this thread.

    Semantics of flax.core.spmd.set_logical_axis_rules, 0.12. If flax is loaded, flax's functions
    and ours use the same rules.

    Args:
        rules: (logical name, mesh axes) pairs.

    Raises:
        ValueError, TypeError: A rule is not a pair, or the rules can be read only once.

    Example:
        >>> set_logical_axis_rules([("embed", "fsdp")])
        >>> get_logical_axis_rules()
        [('embed', 'fsdp')]
        >>> set_logical_axis_rules(())
    """
    _check(rules)
    _rules_in_force().rules = rules


def get_logical_axis_rules() -> LogicalRulesLike:
    """The logical axis rules of this thread.

    Semantics of flax.core.spmd.get_logical_axis_rules, 0.12.

    Example:
        >>> get_logical_axis_rules()
        ()
    """
    return _rules_in_force().rules  # type: ignore[no-any-return]


@contextmanager
def logical_axis_rules(rules: LogicalRulesLike) -> Generator[None, None, None]:
    """A context with these logical axis rules in force, instead of the outer ones.

    Semantics of flax.core.spmd.logical_axis_rules, 0.12.

    Args:
        rules: As in `set_logical_axis_rules`.

    Raises:
        ValueError, TypeError: As `set_logical_axis_rules`.

    Example:
        >>> with logical_axis_rules([("embed", "fsdp")]):
        ...     get_logical_axis_rules()
        [('embed', 'fsdp')]
    """
    _check(rules)
    outer = get_logical_axis_rules()
    try:
        _rules_in_force().rules = rules
        yield
    finally:
        _rules_in_force().rules = outer


def _check(rules: Any) -> None:
    if isinstance(rules, Iterator):
        raise TypeError(
            f"the logical axis rules are {shown(rules)}, which can be read only once; give a tuple"
        )
    check_type("rules", rules, Iterable | None, "a tuple of (logical name, mesh axes) pairs")
    check_not_for_paths(rules)
    last_wins(rules or ())


class _AxisRules(threading.local):
    rules: LogicalRulesLike = ()


_own = _AxisRules()


def _rules_in_force() -> Any:
    """The object with this thread's rules: flax's own object, if flax is loaded."""
    theirs = flax_axis_rules()
    if theirs is None:
        return _own
    if _own.rules:  # set before flax was loaded
        theirs.rules, _own.rules = theirs.rules or _own.rules, ()
    return theirs
