"""Arrays to make of stored ones: their boxes on this process's devices, and the bytes of these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding

from shardrules._base.dtypes import bits_of
from shardrules._base.text import bytes_shown
from shardrules._checkpoint.boxes import Box, Piece, box_of, box_shape
from shardrules._checkpoint.reading import STAGING, bound_of
from shardrules._checkpoint.targets import Target
from shardrules._plan.files.leaves import ArraySpec


class Job(NamedTuple):
    """Array to make."""

    path: str
    target: Target
    dtype: np.dtype[Any]
    """The dtype on the devices."""
    sharding: NamedSharding

    @property
    def local_boxes(self) -> Mapping[Box, Sequence[Any]]:
        """Return the distinct boxes of this process's devices, each with its devices."""
        return _local_boxes(self.sharding, self.target.shape)

    def source_rows(self, box: Box) -> tuple[str, Box]:
        """Return the array and the rows of it that are read first for this box."""
        for part in self.target.parts:
            for piece in part.pieces(box):
                return part.source, piece.source[:1]
        return "", ()

    def place(self, arrays: Mapping[str, ArraySpec]) -> tuple[str, int]:
        """Return where its first bytes stand: the file, and the offset there."""
        first = arrays[self.target.parts[0].source]
        return "" if first.file is None else str(first.file.path), first.begin

    @property
    def is_small(self) -> bool:
        """Say whether it is read together with others."""
        return prod(self.target.shape) * self.dtype.itemsize <= STAGING

    @property
    def is_put_whole(self) -> bool:
        """Say whether JAX cuts it into its devices' parts, which is faster for a small array."""
        return self.is_small and self.sharding.is_fully_addressable

    @property
    def form(self) -> Any:
        """Return what arrays have in common that one program can take apart."""
        return self.target.shape, self.dtype, self.sharding

    @property
    def boxes(self) -> Sequence[Box]:
        if self.is_put_whole:
            return [tuple((0, size) for size in self.target.shape)]
        return list(self.local_boxes)

    @property
    def box_sizes(self) -> Mapping[Box, int]:
        """The bytes in flight for each local box: the buffer, and what is staged for it."""
        sizes = _buffer_sizes(self.sharding, self.target.shape, self.dtype.itemsize)
        parts = [part for part in self.target.parts if not part.sized.is_simple]
        if not parts:
            return sizes
        return {
            box: size
            + sum(
                prod(box_shape(piece.source)) * 8
                for part in parts
                for piece in part.pieces(box)
                if not fills_view(piece)
            )
            for box, size in sizes.items()
        }


@lru_cache(maxsize=4096)
def _buffer_sizes(
    sharding: NamedSharding, shape: tuple[int, ...], item_bytes: int
) -> dict[Box, int]:
    return {box: prod(box_shape(box)) * item_bytes for box in _local_boxes(sharding, shape)}


@lru_cache(maxsize=4096)
def _local_boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """Return the distinct boxes of this process's devices, each with its devices."""
    devices_of: dict[Box, list[Any]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices_of[box_of(index or (), shape)].append(device)
    return dict(sorted(devices_of.items()))


def fills_view(piece: Piece) -> bool:
    """Say whether rows are copied straight to the result: no dimension is several long axes."""
    long = sum(length > 1 for length in piece.lengths)
    return piece.picked is None and long == sum(b - a > 1 for a, b in piece.source)


def bytes_in_flight(jobs: Sequence[Job], bound: int | None) -> int:
    """Return the bound, or the default."""
    sizes = [max(job.box_sizes.values(), default=0) for job in jobs]
    if not sizes:
        return bound_of(bound, 0, "")
    least = max(sizes)
    path, target, *_ = jobs[sizes.index(least)]
    return bound_of(
        bound,
        least,
        f"{path} with the shape {list(target.shape)} needs {bytes_shown(least)} for its part on "
        "one device",
    )


def bytes_to_read(job: Job, arrays: Mapping[str, ArraySpec]) -> int:
    """Count the bytes in files that this process needs of the array's parts."""
    elements = sum(prod(box_shape(box)) for box in job.local_boxes)
    return elements * bits_of(arrays[job.target.parts[0].source].dtype) // 8
