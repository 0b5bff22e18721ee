"""Renames applied to live arrays: a program of reshapes, transposes and stacks per shape.

A program is compiled once for all targets of the same form; where its parts begin in their arrays
is an argument. Must not know about files, names or bounds on memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardrules._moving.arrangement import Form
from shardrules._moving.targets import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import NamedSharding

__all__ = ["arranged", "is_plain"]


class _PartForm(NamedTuple):
    form: Form
    sizes: tuple[int, ...]
    """The shape of the part in its array."""
    target_at: tuple[int, ...]
    blocks: tuple[int, ...]


def is_plain(target: Target, arrays: Mapping[str, Any]) -> bool:
    """Whether the target is one of the arrays as it is, but for its name and dtype."""
    (first, *others) = target.parts
    form = first.sized.form
    return (
        not others
        and first.scale is None
        and target.shape == form.axes == np.shape(arrays[first.source])
        and form.order == tuple(range(len(form.order)))
    )


def arranged(target: Target, arrays: Mapping[str, Any], dtype: Any, sharding: NamedSharding) -> Any:
    """The target, on the devices of its arrays.

    Args:
        target: The target.
        arrays: The live arrays by name.
        dtype: The dtype of the result.
        sharding: Where the result will be; it is made there if the arrays are on these devices.
    """
    forms = tuple(
        _PartForm(
            part.sized.form,
            part.sized.source_shape,
            part.target_at,
            part.blocks if part.scale is not None else (),
        )
        for part in target.parts
    )
    sources = [arrays[part.source] for part in target.parts]
    scales = [None if part.scale is None else arrays[part.scale] for part in target.parts]
    starts = [np.array(part.source_at, np.int32) for part in target.parts]
    in_place = all(
        getattr(getattr(one, "sharding", None), "device_set", None) == sharding.device_set
        for one in sources
    )
    program = _program(forms, target.shape, dtype, sharding if in_place else None)
    return program(sources, scales, starts)


@lru_cache(maxsize=512)
def _program(
    forms: tuple[_PartForm, ...],
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding | None,
) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    def make(sources: list[Any], scales: list[Any], starts: list[Any]) -> Any:
        made = None
        for one, source, scale, start in zip(forms, sources, scales, starts, strict=True):
            values = _scaled(jnp, jnp.asarray(source), scale, one.blocks)
            if one.sizes != values.shape:
                values = jax.lax.dynamic_slice(values, list(start), one.sizes)
            axes, order, part = one.form
            values = values.reshape(axes).transpose(order).reshape(part)
            values = values if values.dtype == dtype else values.astype(dtype)
            if part == shape:
                return values
            made = _blank(shape, values) if made is None else made
            made = jax.lax.dynamic_update_slice(made, values, one.target_at)
        return made

    return jax.jit(make, out_shardings=sharding) if sharding is not None else jax.jit(make)


def _blank(shape: tuple[int, ...], values: Any) -> Any:
    """An array of this shape to put values into. Of random keys there are no zeros."""
    import jax
    import jax.numpy as jnp

    if not jnp.issubdtype(values.dtype, jax.dtypes.extended):
        return jnp.zeros(shape, values.dtype)
    return jnp.broadcast_to(values.reshape(-1)[0], shape)


def _scaled(jnp: Any, values: Any, scale: Any, blocks: tuple[int, ...]) -> Any:
    if not blocks:
        return values
    for dim, (block, size) in enumerate(zip(blocks, values.shape, strict=True)):
        scale = jnp.repeat(scale, block, axis=dim, total_repeat_length=None).take(
            jnp.arange(size), axis=dim
        )
    return values.astype(jnp.float32) * scale
