"""Buffers that were filled, put onto devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shardrules._base.dtypes import is_inexact
from shardrules._checkpoint.boxes import Box, box_of
from shardrules._checkpoint.job import Job

_TOGETHER: Final = 32
"""So many arrays go to the devices as one: to compile more takes longer than it saves."""


def stacked_arrays(
    jobs: Sequence[Job], filled: Sequence[Mapping[Box, npt.NDArray[Any]]]
) -> list[Any]:
    """Put arrays of one form, whose buffers lie side by side, and take them apart on the devices.

    JAX takes longer to put a small array than to make one by a program.
    """
    sharding, dtype, count = jobs[0].sharding, jobs[0].dtype, len(jobs) // _TOGETHER * _TOGETHER
    (first,) = filled[0].values()
    if is_inexact(dtype) and dtype.kind != "c":
        # Programs may change the bits of a NaN.
        first = first.view(f"u{dtype.itemsize}")
    stack = np.lib.stride_tricks.as_strided(
        first, (len(jobs), *first.shape), (first.nbytes, *first.strides), writeable=False
    )
    spec = PartitionSpec(None, *sharding.spec)
    of_stack = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    program, arrays = _concatenation(sharding, dtype), []
    for i in range(0, count, _TOGETHER):
        arrays += program(jax.device_put(stack[i : i + _TOGETHER], of_stack))
    return [*arrays, *whole_arrays(jobs[count:], filled[count:])]


@lru_cache(maxsize=512)
def _concatenation(sharding: NamedSharding, dtype: np.dtype[Any]) -> Callable[[Any], list[Any]]:
    def take_apart(stack: Any) -> list[Any]:
        same = stack.dtype == dtype
        return [*stack] if same else [jax.lax.bitcast_convert_type(each, dtype) for each in stack]

    return jax.jit(take_apart, out_shardings=[sharding] * _TOGETHER)


def whole_arrays(
    jobs: Sequence[Job], filled: Sequence[Mapping[Box, npt.NDArray[Any]]]
) -> list[Any]:
    """Put whole arrays onto devices: one that is large, or several that are small."""
    arrays: list[Any] = [None] * len(jobs)
    at_once = [i for i, job in enumerate(jobs) if job.is_put_whole]
    for i, (job, buffers) in enumerate(zip(jobs, filled, strict=True)):
        if not job.is_put_whole:
            arrays[i] = _array_of_buffers(job, buffers)
    values = [next(iter(filled[i].values())) for i in at_once]
    put = jax.device_put(values, [jobs[i].sharding for i in at_once])
    for i, array in zip(at_once, put, strict=True):
        arrays[i] = array
    return arrays


def _array_of_buffers(job: Job, buffers: Mapping[Box, npt.NDArray[Any]]) -> Any:
    shape = job.target.shape
    if not job.sharding.addressable_devices:
        return _of_shards(job, [])
    return jax.make_array_from_callback(
        shape, job.sharding, lambda index: buffers[box_of(index or (), shape)]
    )


def parts_on_devices(job: Job, buffers: Mapping[Box, npt.NDArray[Any]]) -> dict[Any, Any]:
    """Make {device: its part} for these boxes."""
    memory_kind = job.sharding.memory_kind
    return {
        device: jax.device_put(buffer, SingleDeviceSharding(device, memory_kind=memory_kind))
        for box, buffer in buffers.items()
        for device in job.local_boxes[box]
    }


def assembled(job: Job, parts: Mapping[Any, Any]) -> Any:
    order = job.sharding.addressable_devices_indices_map(job.target.shape)
    shards = [parts[device] for device in order]
    return _of_shards(job, shards)


def _of_shards(job: Job, shards: list[Any]) -> Any:
    return jax.make_array_from_single_device_arrays(
        job.target.shape, job.sharding, shards, dtype=job.dtype
    )
