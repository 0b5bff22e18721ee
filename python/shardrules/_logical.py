"""Logical axis names to mesh axes, the way of flax.core: a table in which the last rule wins.

Pure functions of names and rules, one look-up per name. Must not know about meshes, arrays or
contexts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardrules._specs import entries_of, is_partition_spec, partition_spec, shown, with_entries

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    LogicalRules = Iterable[tuple[str, Any]]


def resolve_core(names: Any, rules: LogicalRules) -> PartitionSpec:
    """The PartitionSpec that logical axis names have under rules.

    Each entry of `names` is looked up as a whole, a tuple of names too; of the rules for it the
    last wins, and an entry that has none stays as it is. Semantics of flax.core.spmd.apply_rules,
    0.12.

    Args:
        names: A tuple or list of entries, or a PartitionSpec, whose unreduced and reduced axes are
            kept as they are.
        rules: (logical name, what it becomes) pairs: a mesh axis, a tuple or list of them, or None.

    Raises:
        TypeError: `names` is no tuple, list or PartitionSpec, or an entry cannot be hashed.
        ValueError, TypeError: As `last_wins`.

    Example:
        >>> rules = [("embed", "tp"), ("batch", "dp"), ("embed", "fsdp")]
        >>> tuple(resolve_core(("batch", "embed", "heads", None), rules))
        ('dp', 'fsdp', 'heads', None)
    """
    mesh_axes = last_wins(rules)
    wanted = logical_names(names)
    try:
        entries = [_entry(mesh_axes.get(entry, entry)) for entry in wanted]
    except TypeError as error:
        raise TypeError(
            f"an entry of the logical axis names {shown(names)} cannot be looked up: {error}; an "
            "entry is a name, None, or a tuple of names"
        ) from None
    return with_entries(names, entries) if is_partition_spec(names) else partition_spec(*entries)


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


def _entry(entry: Any) -> Any:
    # Rules read from JSON or YAML have lists.
    return tuple(entry) if isinstance(entry, list) else entry
