"""Compares a result of a sharded step with that of the whole one, and with what rounding does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardrules._base.text import record
from shardrules._plan.findings import Finding

_ROUNDINGS: Final = 8
"""How many times as much as one rounding of the arguments a sharded program may change a result."""
_STATE: Final = 4
"""A result that is nearer to an argument than this part of its largest value is its next state."""


@record
class RehearsedLeaf(NamedTuple):
    """A result of the step that is not the same, to the bit, whole and sharded."""

    path: str
    difference: float
    """The largest, by the largest value; of a state that is updated, by its largest change. Of
    integers, the part that differs."""
    allowed: float
    """As much as rounding may do, measured so."""
    place: tuple[int, ...]
    """Where it is; of integers and NaNs the first place."""


def compared(
    path: str, arrays: Sequence[Any], arguments: Sequence[Sequence[Any]], rtol: float | None
) -> tuple[RehearsedLeaf | None, Finding | None]:
    """Compare a result of the sharded program with the whole one's.

    Args:
        path: Its path.
        arrays: The result: whole, whole of each of the moved arguments, sharded.
        arguments: The arguments of each.
        rtol: The difference that is accepted; None for what rounding may do.
    """
    if arrays[0].shape != arrays[-1].shape:
        text = f"{path} has the shape {arrays[-1].shape} sharded, and {arrays[0].shape} whole"
        fix = "look for a dimension that is made of a device's own rows"
        return None, Finding("error", "unequal", text, fix, (path,), 1)
    if not jnp.issubdtype(arrays[0].dtype, jnp.inexact):
        return _compared_choices(path, arrays[0], arrays[-1])
    if np.isnan(arrays[0]).any() or np.isnan(arrays[-1]).any():
        return _compared_nans(path, arrays[0], arrays[-1])
    return _compared_floats(path, arrays, arguments, rtol)


_Compared = tuple[RehearsedLeaf | None, Finding | None]


def _compared_choices(path: str, whole: Any, sharded: Any) -> _Compared:
    unlike = whole != sharded
    if not unlike.any():
        return None, None
    place, part = _first(unlike), float(unlike.mean())
    text = f"{_values(path, place, whole, sharded)}; {part:.0%} of the values differ"
    fix = "rounding may decide such a choice; if it does not, look where it is made"
    finding = Finding("info", "unequal", text, fix, (path,), 1)
    return RehearsedLeaf(path, part, 0.0, place), finding


def _compared_nans(path: str, whole: Any, sharded: Any) -> _Compared:
    if np.isnan(whole).any():
        text = f"{path} has NaNs in the whole program, too: it is not compared"
        fix = "give args=, with values that the step is made for"
        return None, Finding("warning", "nan", text, fix, (path,), 1)
    place = _first(np.isnan(sharded))
    text = _values(path, place, whole, sharded)
    fix = "look for what a device divides by, such as a count of its own rows"
    finding = Finding("error", "nan", text, fix, (path,), 1)
    return RehearsedLeaf(path, np.inf, 0.0, place), finding


def _compared_floats(
    path: str, arrays: Sequence[Any], arguments: Sequence[Sequence[Any]], rtol: float | None
) -> _Compared:
    wide = [x.astype("complex128" if np.iscomplexobj(x) else "float64") for x in arrays]
    before = _state_before(wide[0], arguments[0])
    if before is not None:
        wide = [
            _change(x, given[before].astype(x.dtype))
            for x, given in zip(wide, arguments, strict=True)
        ]
    size = _largest_finite(wide[0])
    changes = [np.abs(_change(x, wide[0])) for x in wide[1:]]
    *by_rounding, by_shards = (float(change.max(initial=0.0)) for change in changes)
    if not by_shards:
        return None, None
    whole, sharded = arrays[0], arrays[-1]
    # No measure is finer than the result's own last digit.
    least = rounding_of(whole.dtype) * _largest_finite(whole)
    allowed = max(_ROUNDINGS * max(by_rounding), least * (_ROUNDINGS if before is None else 1))
    allowed = allowed if rtol is None else rtol * size
    place = np.unravel_index(int(changes[-1].argmax()), whole.shape)
    row = RehearsedLeaf(
        path,
        difference=by_shards / size if size else np.inf,
        allowed=allowed / size if size else 0.0,
        place=tuple(map(int, place)),
    )
    if by_shards <= allowed:
        return row, None
    of = "" if before is None else " of its change"
    text = (
        f"{_values(path, row.place, whole, sharded)}: a difference of {row.difference:.1g}{of}, "
        f"where rounding may do {row.allowed:.1g}"
    )
    fix = "look for a sum or a mean over a mesh axis that is missing, or taken twice"
    return row, Finding("error", "unequal", text, fix, (path,), 1)


def _values(path: str, place: tuple[int, ...], whole: Any, sharded: Any) -> str:
    return f"{path}{[*place]} is {sharded[place]} sharded, and {whole[place]} whole"


def rounding_of(dtype: Any) -> float:
    """Return how much one rounding changes a number, as a part of it."""
    info: Any = jnp.finfo
    return float(info(dtype).eps)


def _state_before(whole: Any, arguments: Sequence[Any]) -> int | None:
    """Return the argument that a result is the next state of; None if it is of none."""
    changes = {
        number: float(np.abs(_change(whole, value.astype(whole.dtype))).max(initial=0.0))
        for number, value in enumerate(arguments)
        if value.shape == whole.shape
        and jnp.issubdtype(value.dtype, jnp.inexact)
        and np.iscomplexobj(value) == np.iscomplexobj(whole)
    }
    number = min(changes, key=changes.__getitem__, default=None)
    is_state = number is not None and changes[number] < _largest_finite(whole) / _STATE
    return number if is_state else None


def _change(one: Any, other: Any) -> Any:
    """Subtract; infinities that are the same, such as those of a mask, have not changed."""
    with np.errstate(invalid="ignore"):
        return np.where(one == other, 0, one - other)


def _largest_finite(values: Any) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _first(is_one: Any) -> tuple[int, ...]:
    """Return the first place where an array is True."""
    return tuple(map(int, np.argwhere(is_one)[0]))
