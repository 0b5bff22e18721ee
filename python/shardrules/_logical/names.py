"""What logical axis names and rules are: checked, and in the form that the rest works with.

Pure functions. Must not know how rules are resolved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardrules._specs import entries_of, is_partition_spec
from shardrules._words import shown

if TYPE_CHECKING:
    LogicalRules = Iterable[tuple[str, Any]]

__all__ = ["check_rules", "last_wins", "logical_names"]


def last_wins(rules: LogicalRules) -> dict[Any, Any]:
    """Rules as a dict from logical name to mesh axes.

    Raises:
        ValueError: A rule is not of length two, or is a string, even one of length two.
        TypeError: A rule is no tuple or list, or its name cannot be hashed.

    Example:
        >>> last_wins([("embed", "tp"), ("embed", None)])
        {'embed': None}
    """
    listed = rules if isinstance(rules, (tuple, list)) else tuple(rules)
    if _PAIRS.issuperset(map(type, listed)):
        try:
            return dict(listed)
        except (TypeError, ValueError):
            pass  # which rule it is is found below
    check_rules(listed, ".items()" if isinstance(rules, dict) else "")
    return dict(listed)


def check_rules(rules: Iterable[Any], instead: str = "") -> None:
    """That each rule is a pair with a name that can be looked up.

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
        TypeError: Something else, such as a string, whose letters would be taken for names.
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
