"""Arrays made on devices of others that are there, by one program for each form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._checkpoint.conversion import with_loss
from shardrules._checkpoint.layouts import Form, Shape
from shardrules._checkpoint.targets import Target


def spread_over(mesh: Any, shape: Shape) -> NamedSharding:
    """Cut an array along as much of the mesh as divides it."""
    left = list(shape)
    cuts: list[list[str]] = [[] for _ in shape]
    for axis, size in sorted(mesh.shape.items(), key=lambda item: -item[1]):
        fitting = [dim for dim, length in enumerate(left) if length % size == 0]
        if size > 1 and fitting:
            dim = max(fitting, key=left.__getitem__)
            left[dim] //= size
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
