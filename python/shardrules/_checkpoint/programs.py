"""Arrays made on devices of others that are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._checkpoint.boxes import Form
from shardrules._checkpoint.ranges import numpy_dtype
from shardrules._checkpoint.targets import Target


def is_plain(target: Target, shape_of: Callable[[str], tuple[int, ...]]) -> bool:
    """Say whether the target is one of the arrays as it is, but for its name and dtype."""
    if len(target.parts) != 1:
        return False
    (part,) = target.parts
    form, shape = part.sized.form, shape_of(part.source)
    return target.shape == form.shape == form.axes == form.stored == shape and form.order == tuple(
        range(len(shape))
    )


def dtype_on_devices(dtype: str) -> np.dtype[Any]:
    """Return the dtype that an array of this one gets on devices: 64 bits become 32."""
    return np.dtype(jax.dtypes.canonicalize_dtype(numpy_dtype(dtype)))


def spread_over(mesh: Any, shape: tuple[int, ...]) -> NamedSharding:
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


class _PartForm(NamedTuple):
    form: Form
    sizes: tuple[int, ...]
    """The shape of the part in its array."""
    target_at: tuple[int, ...]


def made_of(
    target: Target, arrays: Mapping[str, Any], dtype: Any, sharding: NamedSharding | None
) -> Any:
    """Make the target, on the devices of its arrays."""
    sources = [arrays[part.source] for part in target.parts]
    starts = [np.array(part.source_at, np.int32) for part in target.parts]
    in_place = sharding is not None and all(
        getattr(getattr(array, "sharding", None), "device_set", None) == sharding.device_set
        for array in sources
    )
    forms = tuple(
        _PartForm(part.sized.form, part.sized.source_shape, part.target_at) for part in target.parts
    )
    program = _program(forms, target.shape, dtype, sharding if in_place else None)
    return program(sources, starts)


@lru_cache(maxsize=512)
def _program(
    forms: tuple[_PartForm, ...],
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding | None,
) -> Callable[[list[Any], list[Any]], Any]:
    """Arrange the parts, and put them together."""

    def make(sources: list[Any], starts: list[Any]) -> Any:
        result = None
        for part_form, source, start in zip(forms, sources, starts, strict=True):
            values = jnp.asarray(source)
            if part_form.sizes != values.shape:
                values = jax.lax.dynamic_slice(values, list(start), part_form.sizes)
            values = part_form.form.arranged(jnp, values)
            values = values if values.dtype == dtype else values.astype(dtype)
            if values.shape == shape:
                return values
            room = [end - at for end, at in zip(shape, part_form.target_at, strict=True)]
            values = values[tuple(map(slice, room))]
            result = _blank(shape, values) if result is None else result
            result = jax.lax.dynamic_update_slice(result, values, part_form.target_at)
        return result

    return jax.jit(make, out_shardings=sharding) if sharding is not None else jax.jit(make)


def _blank(shape: tuple[int, ...], values: Any) -> Any:
    """Make an array of this shape to put values into. Of random keys there are no zeros."""
    if not jnp.issubdtype(values.dtype, jax.dtypes.extended):
        return jnp.zeros(shape, values.dtype)
    return jnp.broadcast_to(values.reshape(-1)[0], shape)
