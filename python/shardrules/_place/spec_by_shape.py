"""Specs made from shapes, bound to the axis sizes of a mesh as plain ones are."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Final

from shardrules._base.dtypes import given_bits
from shardrules._base.rule_specs import Fsdp
from shardrules._base.specs import Dim, Entries, entries_of
from shardrules._place.spec_on_mesh import SpecOnMesh

# A message lists some dozen.
_MOST_ERRORS: Final = 4096


class SpecByShape:
    """Spec that is made from shapes, bound as `SpecOnMesh` is.

    Args:
        fsdp: What is made of a shape.
        fixed: Its fixed part, bound to the mesh.
        closed: Dimensions that must not be cut.
    """

    __slots__ = ("_bound", "_closed", "_errors", "_fixed", "_fsdp")

    def __init__(self, fsdp: Fsdp, fixed: SpecOnMesh, closed: frozenset[int] = frozenset()) -> None:
        self._fsdp = fsdp
        self._fixed = fixed
        self._closed = closed
        self._bound: dict[Entries, SpecOnMesh] = {}
        self._errors: dict[tuple[Any, ...], dict[Any, list[str]]] = {}

    @property
    def spec(self) -> Any:
        """Return the fixed part of the spec: that of leaves that are not arrays."""
        return self._fixed.spec

    corrector: Final = None

    def for_array(self, shape: tuple[int, ...], bits: int | None) -> tuple[SpecOnMesh, str | None]:
        """Return (the spec for arrays of this shape, how it came about).

        Raises:
            ValueError: The bytes of an element matter, and are not known.
        """
        entries, origin = self._fsdp.spec(
            shape,
            bits,
            self._fixed.axis_sizes,
            within=Entries(entries_of(self._fixed.spec)),
            units=self._fixed.units,
            closed=self._closed,
        )
        if entries not in self._bound:
            self._bound[entries] = self._fixed.with_spec(entries)
        return self._bound[entries], origin

    def with_dims(self, dims: tuple[Dim, ...]) -> SpecByShape:
        """Return the spec for arrays that have some of the dimensions; see `SpecOnMesh.with_dims`.

        It is made from their own shape, and cuts none of the dimensions that are theirs alone.
        """
        closed = frozenset(place for place, dim in enumerate(dims) if not isinstance(dim, int))
        return SpecByShape(self._fsdp, self._fixed.with_dims(dims), closed)

    def decided(self, shape: tuple[Any, ...], dtype: Any) -> Any:
        """Return the corrected spec for arrays of this shape and dtype; None if it is forbidden."""
        on_mesh = self.for_leaf(shape, dtype)
        bound = None if on_mesh is None else on_mesh.decided(shape, dtype)
        if bound is None and on_mesh is not None:
            self._failed(shape, dtype, list(on_mesh.errors(shape)))
        return bound

    def for_leaf(self, shape: tuple[Any, ...], dtype: Any) -> SpecOnMesh | None:
        """Return the spec for arrays of this shape and dtype; None if `errors` has reasons."""
        try:
            bits = None if dtype is None else given_bits("dtype", dtype)
            return self.for_array(_checked_entries(shape), bits)[0]
        except ValueError as error:
            self._failed(shape, dtype, [str(error)])
            return None

    def _failed(self, shape: tuple[Any, ...], dtype: Any, errors: list[str]) -> None:
        if len(self._errors) >= _MOST_ERRORS:
            self._errors.clear()
        self._errors.setdefault(shape, {})[dtype] = errors

    def errors(self, shape: tuple[Any, ...]) -> Iterator[str]:
        """Yield why arrays of this shape have no spec; to be called after `decided`."""
        of_dtypes = self._errors.get(shape, {})
        for dtype, errors in of_dtypes.items():
            prefix = "" if len(of_dtypes) == 1 else f"{'without' if dtype is None else 'of'} dtype"
            yield from (
                f"{f'{prefix} {dtype or str()}'.strip()}: {e}" if prefix else e for e in errors
            )


def _checked_entries(shape: tuple[Any, ...]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        raise ValueError(
            "a dimension is not an integer, and a spec that is made from shapes compares them: "
            "write the spec out"
        ) from None
    if any(size < 0 for size in sizes):
        raise ValueError("a dimension is negative")
    return sizes
