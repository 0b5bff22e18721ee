"""Indices that count along a dimension: `x[jnp.arange(n)[:, None], i]` leaves rows in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_SAME: Final = frozenset(["convert_element_type", "copy"])


class Counted:
    """Arrays of a step whose elements are their own places along a dimension, as an iota's are."""

    def __init__(self) -> None:
        self._along: dict[int | None, int] = {}
        """By array, the dimension along which it counts from 0."""
        self._sums: dict[int | None, int | None] = {}
        """By array that is another one plus a number, the other one."""
        self._columns: dict[int | None, dict[int, int]] = {}

    def columns(self, indices: int | None) -> dict[int, int]:
        """Return {column of an array of indices: the dimension along which it counts}."""
        if indices in self._along:
            return {0: self._along[indices]}
        return self._columns.get(indices, {})

    def see(self, eqn: Any, read: Sequence[int | None], output: int) -> None:
        """Note whether the result of an equation counts."""
        name, along = eqn.primitive.name, [self._along.get(number) for number in read]
        dim = along[0] if along else None
        if name == "iota":
            self._along[output] = eqn.params["dimension"]
        elif name == "concatenate":
            self._columns[output] = _columns_of(eqn, along)
        elif name == "add" and along.count(None) == 1:
            self._sums[output] = next(n for n in read if n in self._along)
        elif name == "select_n" and len(read) == 3:
            # Below 0 an index has the size added to it: none of these is.
            if along[1] is not None and self._sums.get(read[2]) == read[1]:
                self._along[output] = along[1]
        elif dim is not None and name == "broadcast_in_dim":
            self._along[output] = eqn.params["broadcast_dimensions"][dim]
        elif dim is not None and (name in _SAME or (name == "reshape" and _is_kept(eqn, dim))):
            self._along[output] = dim


def _columns_of(eqn: Any, along: Sequence[int | None]) -> dict[int, int]:
    """Return the columns that count of arrays that are put side by side in the last dimension."""
    columns: dict[int, int] = {}
    if eqn.params["dimension"] == len(eqn.outvars[0].aval.shape) - 1:
        place = 0
        for dim, atom in zip(along, eqn.invars, strict=True):
            if dim is not None and atom.aval.shape[-1] == 1:
                columns[place] = dim
            place += atom.aval.shape[-1]
    return columns


def _is_kept(eqn: Any, dim: int) -> bool:
    """Say whether a reshape leaves the dimensions up to one as they are."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return bool(before[: dim + 1] == after[: dim + 1])
