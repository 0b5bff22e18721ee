"""Live arrays in another dtype, of which no finite value may get lost, or in another layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules._base.io import FileError
from shardrules._checkpoint.layouts import Form, Shape, join, whole_box
from shardrules._checkpoint.targets import Target
from shardrules._place.mesh import axes_of_type


@cache  # for each array of a model
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of this name in numpy or ml_dtypes."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def _with_loss(values: Any, dtype: Any) -> tuple[Any, Any]:
    """Return numpy's or JAX's values in this dtype; and, as `cast`, whether one got lost."""
    if dtype is None or values.dtype == dtype:
        return values, None
    xp: Any = jnp if isinstance(values, jax.Array) else np
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(dtype)
    if np.can_cast(values.dtype, dtype):
        return result, None
    if np.dtype(dtype).kind in "iu":
        is_other = (result.astype(values.dtype) != values) | ((result < 0) != (values < 0))
        return result, is_other.any()
    # Some finite values are rounded to the largest, and infinite ones stay what they are.
    return result, (xp.isfinite(values) & ~xp.isfinite(result)).any()


@lru_cache(maxsize=256)
def _conversion(dtype: Any) -> Any:
    return jax.jit(lambda array: _with_loss(array, dtype))


def cast(array: Any, dtype: Any) -> tuple[Any, Any]:
    """Return (the array in this dtype, whether a finite value got lost; None if none can).

    None is the dtype that it has.
    """
    if dtype is None or getattr(array, "dtype", None) == dtype:
        return array, None
    if isinstance(array, jax.Array):
        return _conversion(np.dtype(dtype))(array)  # type: ignore[no-any-return]
    return _with_loss(np.asarray(array), dtype)


def check_kept(path: str, loss: Any) -> None:
    """Raise an error if an array has lost a value."""
    if loss is not None and np.asarray(getattr(loss, "addressable_data", lambda _: loss)(0)):
        raise FileError(
            f"{path}: a finite value would become infinite, or an integer another one; give the "
            "array a dtype that has them, alone with Rename(..., dtype=...), or set "
            "jax_enable_x64 for 64 bits"
        )


def make_target(
    target: Target, live: Mapping[str, Any], dtype: Any = None, sharding: Any = None
) -> tuple[Any, Any]:
    """Return (a target made of live arrays, where they are; what was lost, as `cast`)."""
    sources = [live[part.source] for part in target.parts]
    if target.is_plain:
        return cast(sources[0], dtype)
    if not all(isinstance(source, jax.Array) for source in sources):
        return cast(_on_host(target, live), dtype)
    if sharding is None or any(x.sharding.device_set != sharding.device_set for x in sources):
        mesh = getattr(sources[0].sharding, "mesh", None)
        sharding = None if mesh is None else _spread_over(mesh, target.shape)
    forms = tuple((part.form, part.at) for part in target.parts)
    starts = [np.array(part.starts, np.int32) for part in target.parts]
    sources = [_automatic(x) for x in sources]
    sharding = _on_automatic_axes(sharding)
    # The context's mesh may be Explicit, too.
    with nullcontext() if sharding is None else jax.set_mesh(sharding.mesh):
        return _program(forms, target.shape, dtype, sharding)(sources, starts)  # type: ignore[no-any-return]


def _automatic(array: Any) -> Any:
    sharding = _on_automatic_axes(array.sharding)
    return array if sharding is array.sharding else jax.device_put(array, sharding)


@lru_cache(maxsize=4096)
def _on_automatic_axes(sharding: Any) -> Any:
    """Return the same cuts without Explicit axes, whose programs have to say all shardings."""
    if not isinstance(sharding, NamedSharding) or not axes_of_type(sharding.mesh, "Explicit"):
        return sharding
    mesh: Any = sharding.mesh
    return NamedSharding(
        Mesh(mesh.devices, mesh.axis_names), sharding.spec, memory_kind=sharding.memory_kind
    )


def _spread_over(mesh: Any, shape: Shape) -> NamedSharding:
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
            values = form.arranged(jnp, values)
            # Without what is beyond the end of the target.
            values = values[tuple(slice(n - begin) for n, begin in zip(shape, at, strict=True))]
            values, loss = _with_loss(values, dtype)
            losses += [] if loss is None else [loss]
            if values.shape == shape:
                result = values
                break
            # Of random keys jnp.zeros makes none.
            result = jax.lax.full(shape, 0, values.dtype) if result is None else result
            result = jax.lax.dynamic_update_slice(result, values, at)
        assert result is not None
        return result, jnp.stack(losses).any() if losses else None

    if sharding is None:
        return jax.jit(make)
    return jax.jit(make, out_shardings=(sharding, NamedSharding(sharding.mesh, PartitionSpec())))


def _on_host(target: Target, arrays: Mapping[str, Any]) -> Any:
    """Return the target of numpy arrays."""
    parts = []
    for name, form, starts, at in target.parts:
        region = tuple(map(slice, starts, map(sum, zip(starts, form.region, strict=True))))
        values = form.arranged(np, np.asarray(arrays[name])[region])
        # Without what is beyond the end of the target.
        values = values[tuple(slice(n - begin) for n, begin in zip(target.shape, at, strict=True))]
        box = tuple((begin, begin + n) for begin, n in zip(at, values.shape, strict=True))
        parts.append((box, values))
    return join(whole_box(target.shape), arrays[target.parts[0].source].dtype, parts)
