"""A spec that is made from shapes, bound to a mesh: one `SpecOnMesh` for each spec that it makes.

Costs a few comparisons per shape and dtype. Must not know about paths, trees or contexts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Final

from shardrules._dtypes import given_bits
from shardrules._shape_specs import Fsdp
from shardrules._sharding.spec_on_mesh import SpecOnMesh
from shardrules._specs import Dim, Entries, entries_of

__all__ = ["SpecByShape"]

# A message lists some dozen.
_MOST_ERRORS: Final = 4096


class SpecByShape:
    """A spec that is made from shapes, bound as `SpecOnMesh` is.

    Args:
        wanted: What is made of a shape.
        fixed: Its fixed part, bound to the mesh.
        closed: Dimensions that must not be cut.
    """

    __slots__ = ("_bound", "_closed", "_errors", "_fixed", "_wanted")

    def __init__(
        self, wanted: Fsdp, fixed: SpecOnMesh, closed: frozenset[int] = frozenset()
    ) -> None:
        self._wanted = wanted
        self._fixed = fixed
        self._closed = closed
        self._bound: dict[Entries, SpecOnMesh] = {}
        self._errors: dict[tuple[Any, ...], list[str]] = {}

    @property
    def spec(self) -> Any:
        """The fixed part of the spec: that of leaves that are not arrays."""
        return self._fixed.spec

    corrector: Final = None

    def for_array(self, shape: tuple[int, ...], bits: int | None) -> tuple[SpecOnMesh, str | None]:
        """(the spec for arrays of this shape, how it came about).

        Raises:
            ValueError: The bytes of an element matter, and are not known.
        """
        made, origin = self._wanted.spec(
            shape,
            bits,
            {axis: self._fixed.size_of(axis) or 1 for axis in self._wanted.axes},
            within=Entries(entries_of(self._fixed.written)),
            units=self._fixed.units,
            closed=self._closed,
        )
        if made not in self._bound:
            self._bound[made] = self._fixed.with_spec(made)
        return self._bound[made], origin

    def with_dims(self, dims: tuple[Dim, ...], blocks: tuple[int, ...] = ()) -> SpecByShape:
        """The spec for arrays that have some of the dimensions, as in `SpecOnMesh.with_dims`.

        It is made from their own shape, and cuts none of the dimensions that are theirs alone.
        """
        closed = frozenset(place for place, dim in enumerate(dims) if not isinstance(dim, int))
        return SpecByShape(self._wanted, self._fixed.with_dims(dims, blocks), closed)

    @property
    def by_factors(self) -> bool:
        """As in `SpecOnMesh`."""
        return self._fixed.by_factors

    def decided(self, shape: tuple[Any, ...], dtype: Any) -> Any:
        """The corrected spec for arrays of this shape and dtype; None if it is forbidden."""
        on_mesh = self.for_leaf(shape, dtype)
        found = None if on_mesh is None else on_mesh.decided(shape, dtype)
        if found is None and on_mesh is not None:
            self._failed(shape, list(on_mesh.errors(shape)))
        return found

    def for_leaf(self, shape: tuple[Any, ...], dtype: Any) -> SpecOnMesh | None:
        """The spec for arrays of this shape and dtype; None if these cannot be; see `errors`."""
        try:
            bits = None if dtype is None else given_bits("dtype", dtype)
            return self.for_array(_checked(shape), bits)[0]
        except ValueError as error:
            self._failed(shape, [str(error)])
            return None

    def _failed(self, shape: tuple[Any, ...], errors: list[str]) -> None:
        if len(self._errors) >= _MOST_ERRORS:
            self._errors.clear()
        self._errors[shape] = errors

    def errors(self, shape: tuple[Any, ...]) -> Iterator[str]:
        """Why an array of this shape has no spec, as `SpecOnMesh.errors`, after `decided`."""
        return iter(self._errors.get(shape, ()))


def _checked(shape: tuple[Any, ...]) -> tuple[int, ...]:
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
