"""One walk over a tree: of each leaf its path and its kind, of each kind its rule, shape and dtype.

Must not know about meshes.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

import numpy as np

from shardrules._dtypes import bits_of
from shardrules._format import brief, shown
from shardrules._matching.rules import Rules, matcher_of
from shardrules._planning.leaves import LeafType, Leaves
from shardrules._planning.path_rules import AMBIGUOUS, NO_RULE_NEEDED, UNMATCHED

__all__ = ["checked_type", "survey"]

_MOST_BITS: Final = 2**63 - 1


def survey(tree: Any, rules: Rules, min_size: int = 0) -> Leaves:
    """Walks the tree once.

    Args:
        tree: Any pytree; of its leaves `.shape` and `.dtype` are read.
        rules: What decides the leaves, as in `Rules.match`.
        min_size: As in `match_partition_rules`.

    Raises:
        TypeError: A dimension is not an integer; the message names the path.
        ValueError: A dimension is negative, an array is too large to count, or a dtype is unknown;
            the message names the path.
    """
    of_rows, paths, kinds, column = matcher_of(rules).survey(
        tree,
        min_size=min_size,
        replicated=NO_RULE_NEEDED,
        unmatched=UNMATCHED,
        ambiguous=AMBIGUOUS,
    )
    kind_of = np.frombuffer(column, np.int32)
    types = []
    for number, kind in enumerate(kinds):
        try:
            types.append(checked_type(*kind))
        except (TypeError, ValueError) as error:
            path = paths[int(np.argmax(kind_of == number))]
            raise type(error)(f"{path}: {error}") from None
    return Leaves(rules, of_rows, paths, paths, kind_of, types)


def checked_type(rule: int, shape: tuple[Any, ...] | None, dtype: Any) -> LeafType:
    """The type of leaves whose shape and dtype make sense.

    Raises:
        TypeError, ValueError: They do not; no path is named.
    """
    if shape is None:
        return LeafType(rule, None, None, 0)
    for size in shape:
        if getattr(size, "dimension_as_value", None) is not None:  # as JAX itself knows them
            raise TypeError(
                f"the dimension {size} of the shape {shape} is symbolic, so its bytes cannot be "
                "counted; plan with a number in its place. named_shardings takes it as it is"
            )
        if not isinstance(size, int | np.integer) or isinstance(size, bool):
            raise TypeError(
                f"a dimension of the shape {brief(shape)} is {shown(size)}, not an integer"
            )
        if size < 0:
            raise ValueError(f"a dimension of the shape {brief(shape)} is negative")
    bits = bits_of(dtype)
    # A dimension of 0 would hide others that are too large to calculate with.
    if prod(max(int(size), 1) for size in shape) * bits > _MOST_BITS:
        raise ValueError(f"an array of shape {brief(shape)} has more bytes than can be counted")
    return LeafType(rule, tuple(map(int, shape)), dtype, bits)
