"""Logical axis names of arrays: in specs and tuples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardrules._base.specs import (
    entries_of,
    is_partition_spec,
    is_unconstrained,
    partition_spec,
    with_entries,
)
from shardrules._base.text import shown

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec


def last_wins(rules: Iterable[tuple[str, Any]]) -> dict[Any, Any]:
    """Return rules as a dict from logical name to mesh axes.

    Raises:
        ValueError: A rule is a string, or its length is not two.
        TypeError: A rule is not a tuple or list, or its name is not hashable.

    Example:
        >>> last_wins([("embed", "tp"), ("embed", None)])
        {'embed': None}
    """
    pairs = rules if isinstance(rules, (tuple, list)) else tuple(rules)
    if _PAIRS.issuperset(map(type, pairs)):
        try:
            return dict(pairs)
        except (TypeError, ValueError):
            pass  # the error below names the rule
    check_rules(pairs, ".items()" if isinstance(rules, dict) else "")
    return dict(pairs)


def check_rules(rules: Iterable[Any], instead: str = "") -> None:
    """Check that each rule is a pair with a hashable name."""
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
    """Return the entries of a tuple, list or PartitionSpec of logical axis names.

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
    """Return the entries of logical axis names: names, None, UNCONSTRAINED, tuples of names."""
    entries = logical_names(names)
    for entry in entries:
        if not is_name(entry) and not (isinstance(entry, tuple) and all(map(is_name, entry))):
            raise TypeError(
                f"an entry of the logical axis names {shown(names)} is {shown(entry)}; an entry is "
                "a name, None, or a tuple of names"
            )
    return entries


def is_name(entry: Any) -> bool:
    """Return whether it is an entry of logical axis names."""
    return entry is None or isinstance(entry, str) or is_unconstrained(entry)


def spec_of_names(names: Any, entries: Iterable[Any]) -> PartitionSpec:
    """Return the PartitionSpec of these entries, with the unreduced and reduced axes of `names`."""
    return with_entries(names, entries) if is_partition_spec(names) else partition_spec(*entries)
