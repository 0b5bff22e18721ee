"""Large arrays with scales: the codes are read as they are, and multiplied on the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._checkpoint.boxes import Arrangement, Form, sized
from shardrules._checkpoint.job import Job
from shardrules._checkpoint.ranges import numpy_dtype
from shardrules._checkpoint.targets import SourcePart, Target
from shardrules._plan.files.leaves import ArraySpec


class _Spread(NamedTuple):
    """How the scales of equal parts are spread over the array that the parts make."""

    form: Form
    blocks: tuple[int, ...]
    grid: tuple[int, ...]
    """How many parts there are along each dimension."""


def codes_and_scales(job: Job, arrays: Mapping[str, ArraySpec]) -> dict[str, Job]:
    """Return what is read for an array with scales; nothing if they are applied on the host.

    A program for a small array takes longer to compile, and there is none for parts that differ.
    """
    target, parts = job.target, _in_order(job.target.parts)
    if job.is_small or not _is_regular(target, arrays):
        return {}
    shape = arrays[parts[0].scale or ""].shape
    names = [f"dim{i}" for i in range(len(shape))]
    groups = tuple((name,) for name in names)
    stacked = sized(Arrangement(groups, ((), *groups)), tuple(zip(names, shape, strict=True)))
    scales = Target(
        (len(parts), *shape),
        "float32",
        tuple(
            part._replace(
                source=part.scale or "",
                sized=stacked,
                source_at=(0,) * len(shape),
                target_at=(i, *(0 for _ in shape)),
                scale=None,
                blocks=(),
            )
            for i, part in enumerate(parts)
        ),
    )
    dtype = arrays[parts[0].source].dtype
    codes = target._replace(dtype=dtype, parts=tuple(part._replace(scale=None) for part in parts))
    replicated = NamedSharding(job.sharding.mesh, PartitionSpec())
    return {
        job.path: Job(job.path, codes, numpy_dtype(dtype), job.sharding),
        f"{job.path}: scales": Job(job.path, scales, np.dtype(np.float32), replicated),
    }


def scaled_codes(job: Job, live: Mapping[str, Any]) -> Any:
    """Multiply the codes by the scales, on the devices of the result."""
    program = _spread_program(_spread_of(job.target), job.target.shape, job.dtype, job.sharding)
    return program(live[job.path], live[f"{job.path}: scales"])


def _in_order(parts: tuple[SourcePart, ...]) -> list[SourcePart]:
    return sorted(parts, key=lambda part: part.target_at)


def spread(xp: Any, scales: Any, blocks: Sequence[int], spans: Sequence[tuple[int, int]]) -> Any:
    """Repeat the scales of blocks to one for each element of a box of the array; or one for all.

    Args:
        xp: numpy or jax.numpy.
        scales: Those of the blocks that have a part in the box. Dimensions of one may be left out.
        blocks: The elements for which a scale counts, per dimension.
        spans: The box.
    """
    grid = [
        -(-end // block) - begin // block for (begin, end), block in zip(spans, blocks, strict=True)
    ]
    scales = scales.reshape(grid)
    for dim, ((begin, end), block) in enumerate(zip(spans, blocks, strict=True)):
        if grid[dim] > 1:
            elements = (slice(None),) * dim + (slice(begin % block, begin % block + end - begin),)
            scales = xp.repeat(scales, block, axis=dim)[elements]
    return scales


def _spread_of(target: Target) -> _Spread:
    first = target.parts[0]
    sizes = zip(target.shape, first.sized.target_shape, strict=True)
    return _Spread(first.sized.form, first.blocks, tuple(size // part for size, part in sizes))


def _is_regular(target: Target, arrays: Mapping[str, ArraySpec]) -> bool:
    """Say whether all parts are whole arrays of one form that tile the target."""
    first = target.parts[0]
    form, part_shape = first.sized.form, first.sized.target_shape
    kinds = {
        (
            part.sized is first.sized,
            part.blocks,
            arrays[part.source].dtype,
            arrays[part.source].shape,
            None if part.scale is None else arrays[part.scale].shape,
            any(part.source_at),
        )
        for part in target.parts
    }
    is_whole = form.stored == first.sized.source_shape == arrays[first.source].shape
    if first.scale is None or len(kinds) > 1 or any(first.source_at) or not is_whole:
        return False
    if form.once != form.repeated or target.is_padded or 0 in part_shape:
        return False
    places = [
        *product(
            *(range(0, size, part) for size, part in zip(target.shape, part_shape, strict=True))
        )
    ]
    return places == [part.target_at for part in _in_order(target.parts)]


@lru_cache(maxsize=512)
def _spread_program(
    recipe: _Spread, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> Callable[[Any, Any], Any]:
    form, blocks, grid = recipe
    rank = len(shape)

    def multiply(codes: Any, scales: Any) -> Any:
        count, spans = scales.shape[0], [(0, size) for size in form.stored]
        factors = jax.vmap(lambda each: spread(jnp, each, blocks, spans))(scales)
        factors = jnp.broadcast_to(factors, (count, *form.stored)).reshape(count, *form.axes)
        factors = factors.transpose(0, *(axis + 1 for axis in form.order))
        factors = factors.reshape(*grid, *form.shape)
        factors = factors.transpose([i for dim in range(rank) for i in (dim, rank + dim)])
        return (codes.astype(jnp.float32) * factors.reshape(shape)).astype(dtype)

    return jax.jit(multiply, out_shardings=sharding)
