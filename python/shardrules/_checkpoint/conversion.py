"""Values in another dtype, of which none that is finite may get lost; and their rearrangement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._base.dtypes import is_inexact
from shardrules._checkpoint.layouts import Form, Shape
from shardrules._checkpoint.targets import Target

if TYPE_CHECKING:
    import numpy.typing as npt


class LossError(ArithmeticError):
    """Values that another dtype does not have."""


@cache  # for each array of a model
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of this name in numpy or ml_dtypes."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def dtype_on_devices(dtype: str) -> np.dtype[Any]:
    """Return the dtype that an array of this one gets on devices: 64 bits become 32."""
    return np.dtype(jax.dtypes.canonicalize_dtype(numpy_dtype(dtype)))


def converted(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the values in this dtype.

    Raises:
        LossError: A finite number would become infinite, or an integer another one.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(dtype)
    limit = largest(dtype)
    if not is_inexact(dtype):
        if values.size and limit is not None and (result != values).any():
            raise LossError(_lost(values, dtype))
        return result
    if not values.size or limit is None or (largest(values.dtype) or np.inf) <= limit:
        return result
    # Some finite values are rounded to the largest, and infinite ones stay what they are.
    if bool((np.isfinite(values) & ~np.isfinite(result)).any()):
        raise LossError(_lost(values[np.isfinite(values)], dtype))
    return result


def _lost(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> str:
    if values.dtype.kind == "c":
        values = np.abs(values)
    first, last, limit = values.min(), values.max(), largest(dtype)
    if is_inexact(values.dtype):
        first, last = f"{float(first):.4g}", f"{float(last):.4g}"
    end = f"{limit:.4g}" if is_inexact(dtype) else limit
    return f"its values are from {first} to {last}, and the largest of {dtype.name} is {end}"


@cache
def largest(dtype: np.dtype[Any]) -> float | int | None:
    """Return the largest value of numbers; None for flags and codes of less than a byte."""
    import ml_dtypes

    if dtype.kind in "iu":
        return int(np.iinfo(dtype).max)
    if dtype.kind == "c":
        dtype = np.dtype(f"f{dtype.itemsize // 2}")
    finfo: Any = ml_dtypes.finfo
    return float(finfo(dtype).max) if is_inexact(dtype) else None


def _narrows(before: Any, after: Any) -> bool:
    """Say whether an array of one dtype may lose values in the other."""
    if jnp.issubdtype(before, jax.dtypes.extended):
        return False
    old, new = np.dtype(before), np.dtype(after)
    if old.kind in "iu" and new.kind in "iu":
        return not np.can_cast(old, new)
    return (largest(new) or np.inf) < (largest(old) or 0)


def with_loss(array: Any, dtype: Any) -> tuple[Any, Any]:
    """Return (an array of devices in this dtype, whether a value got lost; None if none can)."""
    if array.dtype == dtype:
        return array, None
    result = array.astype(dtype)
    if not _narrows(array.dtype, dtype):
        return result, None
    if jnp.issubdtype(dtype, jnp.integer):
        return result, jnp.any(result.astype(array.dtype) != array)
    return result, jnp.any(jnp.isfinite(array) & ~jnp.isfinite(result))


@lru_cache(maxsize=256)
def _conversion(dtype: Any) -> Any:
    return jax.jit(lambda array: with_loss(array, dtype))


def cast(array: Any, dtype: Any) -> tuple[Any, Any]:
    """Return (the array in this dtype, whether a value got lost, on devices or None)."""
    if array.dtype == dtype:
        return array, None
    if isinstance(array, jax.Array):
        return _conversion(np.dtype(dtype))(array)  # type: ignore[no-any-return]
    return converted(np.asarray(array), np.dtype(dtype)), None


def check_kept(losses: Mapping[str, Any]) -> None:
    """Raise an error for the first path whose array has lost a value; None is none."""
    for path, loss in losses.items():
        if loss is not None and bool(np.asarray(loss.addressable_data(0))):
            raise ValueError(
                f"{path}: a finite value would become infinite, or an integer another one; give "
                "the array a dtype that has them, alone with Rename(..., dtype=...)"
            )


def spread_over(mesh: Any, shape: Shape) -> NamedSharding:
    """Cut an array along as much of the mesh as divides it."""
    remaining = list(shape)
    cuts: list[list[str]] = [[] for _ in shape]
    for axis, size in sorted(mesh.shape.items(), key=lambda item: -item[1]):
        fitting = [dim for dim, length in enumerate(remaining) if length % size == 0]
        if size > 1 and fitting:
            dim = max(fitting, key=remaining.__getitem__)
            remaining[dim] //= size
            cuts[dim].append(axis)
    return NamedSharding(mesh, PartitionSpec(*(tuple(cut) or None for cut in cuts)))


def made_of(
    target: Target, arrays: Mapping[str, Any], dtype: Any, sharding: NamedSharding | None
) -> tuple[Any, Any]:
    """Make the target, on the devices of its arrays.

    Returns:
        (the array, whether a value got lost in the dtype, on devices; None if none can)
    """
    sources = [arrays[part.source] for part in target.parts]
    starts = [np.array(part.starts, np.int32) for part in target.parts]
    in_place = sharding is not None and all(
        getattr(getattr(array, "sharding", None), "device_set", None) == sharding.device_set
        for array in sources
    )
    forms = tuple((part.form, part.at) for part in target.parts)
    at = sharding if in_place else None
    return _program(forms, target.shape, dtype, at)(sources, starts)  # type: ignore[no-any-return]


@lru_cache(maxsize=512)
def _program(
    forms: tuple[tuple[Form, Shape], ...],
    shape: Shape,
    dtype: Any,
    sharding: NamedSharding | None,
) -> Callable[..., Any]:
    def make(sources: list[Any], starts: list[Any]) -> tuple[Any, Any]:
        result, losses = None, []
        for (form, at), source, start in zip(forms, sources, starts, strict=True):
            values = jnp.asarray(source)
            if form.region != form.shape:
                values = jax.lax.dynamic_slice(values, list(start), form.region)
            values, loss = with_loss(_cropped(form.arranged(jnp, values), shape, at), dtype)
            losses += [] if loss is None else [loss]
            if values.shape == shape:
                result = values
                break
            result = _blank(shape, values) if result is None else result
            result = jax.lax.dynamic_update_slice(result, values, at)
        assert result is not None
        return result, jnp.stack(losses).any() if losses else None

    if sharding is None:
        return jax.jit(make)
    return jax.jit(make, out_shardings=(sharding, NamedSharding(sharding.mesh, PartitionSpec())))


def _cropped(values: Any, shape: Shape, at: Shape) -> Any:
    """Leave out what is beyond the end of the target."""
    return values[tuple(slice(size - begin) for size, begin in zip(shape, at, strict=True))]


def made_on_host(target: Target, arrays: Mapping[str, Any]) -> Any:
    """Make the target of numpy arrays."""
    result = np.zeros(target.shape, arrays[target.parts[0].source].dtype)
    for name, form, starts, at in target.parts:
        region = tuple(map(slice, starts, map(sum, zip(starts, form.region, strict=True))))
        values = form.arranged(np, np.asarray(arrays[name])[region])
        result[tuple(map(slice, at, map(sum, zip(at, values.shape, strict=True))))] = values
    return result


def _blank(shape: Shape, values: Any) -> Any:
    """Make an array of this shape to put values into. Of random keys there are no zeros."""
    if not jnp.issubdtype(values.dtype, jax.dtypes.extended):
        return jnp.zeros(shape, values.dtype)
    return jnp.broadcast_to(values.reshape(-1)[0], shape)
