"""One walk over a tree: of each leaf its path and its kind, of each kind its rule, shape and dtype.

A model of 10^5 leaves has some hundred kinds, so everything that follows costs per kind. Must not
know about meshes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._files.dtypes import bits_of
from shardrules._planning.fold import Folded, fold
from shardrules._words import brief, shown

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._matching.rules import Rules

__all__ = ["AMBIGUOUS", "NO_RULE_NEEDED", "UNMATCHED", "Alike", "Survey", "checked", "survey"]

# In the place of a rule's index.
NO_RULE_NEEDED: Final = -1
UNMATCHED: Final = -2
AMBIGUOUS: Final = -3

_MOST_BITS: Final = 2**63 - 1


class Alike(NamedTuple):
    """What leaves of one kind have in common."""

    rule: int
    """Index of the rule that decides them, or one of the negative numbers of this module."""
    shape: tuple[int, ...] | None
    """None for a leaf that is no array."""
    dtype: Any
    bits: int
    """Of one element; 0 for a leaf that is no array."""


@dataclass(frozen=True, eq=False)
class Survey:
    """What a walk has found, on whatever mesh; rows are leaves in the order of the walk."""

    rules: Rules
    tree: Any
    """The tree with the number of its row for each leaf."""
    paths: list[str]
    kind_of: npt.NDArray[np.int32]
    """Per leaf, an index of `kinds`."""
    kinds: list[Alike]

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of each path."""
        return {path: row for row, path in enumerate(self.paths)}

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """Per kind, its leaves."""
        return np.bincount(self.kind_of, minlength=len(self.kinds)).astype(np.int64)

    @cached_property
    def folded(self) -> list[Folded]:
        """The leaves with siblings folded, a kind each."""
        return fold(self.paths, self.kind_of)


def survey(tree: Any, rules: Rules, min_size: int = 0) -> Survey:
    """Walks the tree once.

    Args:
        tree: Any pytree; of its leaves `.shape` and `.dtype` are read.
        rules: What decides the leaves, as in `Rules.match`.
        min_size: As in `match_partition_rules`.

    Raises:
        TypeError: A dimension is no integer; the message names the path.
        ValueError: A dimension is negative, an array is too large to count, or a dtype is unknown;
            the message names the path.
    """
    of_rows, paths, kinds, column = rules.survey(
        tree,
        min_size=min_size,
        replicated=NO_RULE_NEEDED,
        unmatched=UNMATCHED,
        ambiguous=AMBIGUOUS,
    )
    kind_of = np.frombuffer(column, np.int32)
    known = []
    for number, kind in enumerate(kinds):
        try:
            known.append(checked(*kind))
        except (TypeError, ValueError) as error:
            path = paths[int(np.argmax(kind_of == number))]
            raise type(error)(f"{path}: {error}") from None
    return Survey(rules, of_rows, paths, kind_of, known)


def checked(rule: int, shape: tuple[Any, ...] | None, dtype: Any) -> Alike:
    """A kind whose shape and dtype make sense.

    Raises:
        TypeError, ValueError: They do not; no path is named.
    """
    if shape is None:
        return Alike(rule, None, None, 0)
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
    return Alike(rule, tuple(map(int, shape)), dtype, bits)
