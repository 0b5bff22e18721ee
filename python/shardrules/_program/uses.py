"""Walks from a value of an HLO module to its uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple, get_args

from shardrules._program.facts import JOINS, PRODUCTS, DimParts, passed_dims
from shardrules._program.hlo import CollectiveOpcode
from shardrules._program.values import Values

_MOST_STEPS: Final = 20_000
"""Values that a walk visits at most; what lies behind is not known."""
_PADDED: Final = 8
"""Fraction of an array that padding may add to it, or a slice take away."""
_REDUCTIONS: Final = frozenset({"reduce", "reduce-window", "sort"})


UseKind = Literal["product", "collective", "output", "rows", "lookup", "other"]
_KINDS: Final[dict[str, UseKind]] = {
    **dict.fromkeys(get_args(CollectiveOpcode), "collective"),
    **dict.fromkeys(PRODUCTS, "product"),
    "scatter": "rows",
    "gather": "lookup",
}


class ValueUse(NamedTuple):
    """Operation at which a walk ends."""

    kind: UseKind
    """"rows" is an update of a table, "lookup" reads one."""
    value: int
    """The operand."""
    user: int
    """The result; of an output the operand itself."""
    parts: DimParts
    """Where the dimensions that the walk began with are in the operand."""


def uses(
    values: Values, node: int, parts: DimParts, is_end: Callable[[int], bool]
) -> Iterator[ValueUse]:
    """Yield the operations in which a value, or what is made of it by element, ends.

    Args:
        values: The graph.
        node: The value.
        parts: Dimensions of it to follow.
        is_end: Says whether a value is none of those that are looked for.
    """
    size = values.shape(node).elements
    outputs = frozenset(values.outputs)
    pending, seen = [(node, parts)], {node}
    while pending and len(seen) < _MOST_STEPS:
        value, parts = pending.pop()
        if value in outputs:
            yield ValueUse("output", value, value, parts)
        for user in values.used_by[value]:
            use = _use(values, value, user, size, parts)
            if use is not None:
                yield use
                if values.opcodes[user] not in _REDUCTIONS or not _is_alike(values, user, size):
                    continue
            if user not in seen:
                seen.add(user)
                if not is_end(user):
                    place = values.made_of[user].index(value)
                    pending.append(
                        (user, passed_dims(values, user, place, parts) if parts else parts)
                    )


def _use(values: Values, value: int, user: int, size: int, parts: DimParts) -> ValueUse | None:
    """Return a use at which a walk ends; None where it goes on."""
    opcode = values.opcodes[user]
    if opcode in JOINS:
        return None
    kind = _KINDS.get(opcode)
    if kind is None and opcode not in _REDUCTIONS and _is_alike(values, user, size):
        return None
    return ValueUse(kind or "other", value, user, parts)


def _is_alike(values: Values, node: int, size: int) -> bool:
    return abs(values.shape(node).elements - size) <= size // _PADDED
