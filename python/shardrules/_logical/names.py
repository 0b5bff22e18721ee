"""Logical axis names and rules, checked and in the form that the rest of the package uses.

Pure functions. Must not know how rules are resolved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardrules._format import shown
from shardrules._specs import (
    entries_of,
    is_partition_spec,
    is_unconstrained,
    partition_spec,
    with_entries,
)

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

__all__ = [
    "check_rules",
    "checked_names",
    "is_name",
    "last_wins",
    "logical_names",
    "spec_of_names",
]


def last_wins(rules: Iterable[tuple[str, Any]]) -> dict[Any, Any]:
    """Rules as a dict from logical name to mesh axes.

    Raises:
        ValueError: A rule is a string, or its length is not two.
        TypeError: A rule is not a tuple or list, or its name is not hashable.

    Example:
        >>> last_wins([("embed", "tp"), ("embed", None)])
        {'embed': None}
    """
    listed = rules if isinstance(rules, (tuple, list)) else tuple(rules)
    if _PAIRS.issuperset(map(type, listed)):
        try:
            return dict(listed)
        except (TypeError, ValueError):
            pass  # the error below names the rule
    check_rules(listed, ".items()" if isinstance(rules, dict) else "")
    return dict(listed)


def check_rules(rules: Iterable[Any], instead: str = "") -> None:
    """Checks that each rule is a pair with a hashable name.

    Raises:
        ValueError, TypeError: As `last_wins`.
    """
    hint = f"; of a dict, give {instead}" if instead else ""
    for index, rule in enumerate(rules):
        if isinstance(rule, str) or (isinstance(rule, (tuple, list)) and len(rule) != 2):
            raise ValueError(f"logical axis rule {index} is {shown(rule)}; {_A_RULE}{hint}")
        if not isinstance(rule, (tuple, list)):
            raise TypeError(f"logical axis rule {index} is {shown(rule)}; {_A_RULE}")
        try:
            hash(rule[0])
        except TypeError as error:
            raise TypeError(
                f"logical axis rule {index} is for the name {shown(rule[0])}: {error}; {_A_RULE}"
            ) from None


_PAIRS = frozenset((tuple, list))
_A_RULE = "a rule is a pair (logical name, mesh axes), such as ('embed', 'fsdp')"


def logical_names(names: Any) -> tuple[Any, ...]:
    """The entries of a tuple, list or PartitionSpec of logical axis names.

    Raises:
        TypeError: It is something else, such as a string, whose letters would count as names.
    """
    if type(names) is tuple:  # most are
        return names
    if is_partition_spec(names):
        return entries_of(names)
    if not isinstance(names, (tuple, list)):
        raise TypeError(
            f"the logical axis names are {shown(names)}; give a tuple with a name or None for each "
            "dimension, such as ('embed', None)"
        )
    return tuple(names)


def checked_names(names: Any) -> tuple[Any, ...]:
    """The entries of logical axis names, each a name, None, UNCONSTRAINED or a tuple of names.

    Raises:
        TypeError: One is something else.
    """
    entries = logical_names(names)
    for entry in entries:
        if not is_name(entry) and not (isinstance(entry, tuple) and all(map(is_name, entry))):
            raise TypeError(
                f"an entry of the logical axis names {shown(names)} is {shown(entry)}; an entry is "
                "a name, None, or a tuple of names"
            )
    return entries


def is_name(entry: Any) -> bool:
    """Whether it is an entry of logical axis names."""
    return entry is None or isinstance(entry, str) or is_unconstrained(entry)


def spec_of_names(names: Any, entries: Iterable[Any]) -> PartitionSpec:
    """The PartitionSpec of these entries, with the unreduced and reduced axes of `names`."""
    return with_entries(names, entries) if is_partition_spec(names) else partition_spec(*entries)
