"""Arrays made on devices of others: arranged, scaled, and passed to the functions of renames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._checkpoint.boxes import Form
from shardrules._checkpoint.job import Job
from shardrules._checkpoint.ranges import numpy_dtype
from shardrules._checkpoint.scales import codes_and_scales, scaled_codes, spread
from shardrules._checkpoint.targets import Target, whole
from shardrules._plan.files.leaves import ArraySpec


def is_plain(target: Target, shape_of: Callable[[str], tuple[int, ...]]) -> bool:
    """Say whether the target is one of the arrays as it is, but for its name and dtype."""
    if len(target.parts) != 1:
        return False
    (part,) = target.parts
    form, shape = part.sized.form, shape_of(part.source)
    return (
        part.scale is None
        and target.shape == form.shape == form.axes == form.stored == shape
        and form.order == tuple(range(len(shape)))
    )


def ingredients(job: Job, arrays: Mapping[str, ArraySpec], *, arranges: bool) -> dict[str, Job]:
    """Return the arrays to read for one that is made on devices; none if it is read itself.

    Args:
        job: What to make.
        arrays: The stored arrays.
        arranges: Whether arrays can be arranged and scaled as they are read.
    """
    target = job.target
    if target.apply is None and arranges:
        return codes_and_scales(job, arrays)
    if target.apply is None and is_plain(target, lambda name: arrays[name].shape):
        return {}
    if arranges:
        read = {_input_name(job, argument): each for argument, each in target.inputs.items()}
    else:
        read = {name: whole(name, arrays[name]) for name in target.sources}
    return {
        name: Job(name, each, dtype_on_devices(each.dtype), _spread(each.shape, job))
        for name, each in read.items()
    }


def _input_name(job: Job, argument: str) -> str:
    return f"{job.path}: {argument}" if argument else job.path


def made(
    job: Job, live: Mapping[str, Any], arrays: Mapping[str, ArraySpec], *, arranges: bool
) -> Any:
    """Make an array of its ingredients."""
    if not arranges:
        return made_of(job.target, live, job.dtype, job.sharding)
    if job.target.apply is None:
        return scaled_codes(job, live)
    names = tuple(job.target.inputs)
    values = [live[_input_name(job, argument)] for argument in names]
    plain = tuple(_Recipe((), value.shape, None) for value in values)
    program = _target_program(plain, names, job.target.apply, job.dtype, job.sharding)
    return program([[value] for value in values], *[[[]] * len(values)] * 2)


def dtype_on_devices(dtype: str) -> np.dtype[Any]:
    """Return the dtype that an array of this one gets on devices: 64 bits become 32."""
    return np.dtype(jax.dtypes.canonicalize_dtype(numpy_dtype(dtype)))


def _spread(shape: tuple[int, ...], job: Job) -> NamedSharding:
    """Cut an ingredient like the result if they have one shape, else along as much as divides."""
    mesh = job.sharding.mesh
    same = shape == job.target.shape
    return NamedSharding(mesh, job.sharding.spec) if same else spread_over(mesh, shape)


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
    blocks: tuple[int, ...]


class _Recipe(NamedTuple):
    """What a program makes of arrays; without forms, the only one as it is."""

    forms: tuple[_PartForm, ...]
    shape: tuple[int, ...]
    dtype: Any


def made_of(
    target: Target, arrays: Mapping[str, Any], dtype: Any, sharding: NamedSharding | None
) -> Any:
    """Make the target, on the devices of its arrays."""
    inputs = target.inputs if target.apply is not None else {"": target}
    sources = [[arrays[part.source] for part in each.parts] for each in inputs.values()]
    scales = [
        [None if part.scale is None else arrays[part.scale] for part in each.parts]
        for each in inputs.values()
    ]
    starts = [
        [np.array(part.source_at, np.int32) for part in each.parts] for each in inputs.values()
    ]
    in_place = sharding is not None and all(
        getattr(getattr(array, "sharding", None), "device_set", None) == sharding.device_set
        for of_input in sources
        for array in of_input
    )
    recipes = tuple(
        _recipe(each, dtype_on_devices(each.dtype) if target.apply is not None else dtype)
        for each in inputs.values()
    )
    at = sharding if in_place else None
    return _target_program(recipes, tuple(inputs), target.apply, dtype, at)(sources, scales, starts)


def _recipe(target: Target, dtype: Any) -> _Recipe:
    forms = tuple(
        _PartForm(
            part.sized.form,
            part.sized.source_shape,
            part.target_at,
            part.blocks if part.scale is not None else (),
        )
        for part in target.parts
    )
    return _Recipe(forms, target.shape, dtype)


@lru_cache(maxsize=512)
def _target_program(
    recipes: tuple[_Recipe, ...],
    names: tuple[str, ...],
    apply: Callable[..., Any] | None,
    dtype: Any,
    sharding: NamedSharding | None,
) -> Callable[..., Any]:
    def make(sources: list[Any], scales: list[Any], starts: list[Any]) -> Any:
        values = list(map(_assembled, recipes, sources, scales, starts))
        result = values[0]
        if apply is not None:
            result = apply(values[0], **dict(zip(names[1:], values[1:], strict=True)))
        return result if result.dtype == dtype else result.astype(dtype)

    return jax.jit(make, out_shardings=sharding) if sharding is not None else jax.jit(make)


def _assembled(recipe: _Recipe, sources: list[Any], scales: list[Any], starts: list[Any]) -> Any:
    """Arrange and scale the parts, and put them together."""
    forms, shape, dtype = recipe
    if not forms:
        return sources[0]
    result = None
    for part_form, source, scale, start in zip(forms, sources, scales, starts, strict=True):
        values = _scaled_on_device(jnp.asarray(source), scale, part_form.blocks)
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


def _blank(shape: tuple[int, ...], values: Any) -> Any:
    """Make an array of this shape to put values into. Of random keys there are no zeros."""
    if not jnp.issubdtype(values.dtype, jax.dtypes.extended):
        return jnp.zeros(shape, values.dtype)
    return jnp.broadcast_to(values.reshape(-1)[0], shape)


def _scaled_on_device(values: Any, scale: Any, blocks: tuple[int, ...]) -> Any:
    if not blocks:
        return values
    factors = spread(jnp, scale, blocks, [(0, size) for size in values.shape])
    return values.astype(jnp.float32) * factors
