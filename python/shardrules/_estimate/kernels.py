"""Operations of Pallas kernels that do not say how many they have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Final

KERNEL_EFFICIENCY: Final = 0.5
"""Share of the peak that Pallas kernels are assumed to reach."""
# JAX's splash attention estimates no cost. Products by its kernels, of the size of the queries and
# of that of the values; with three results, the backward kernel has those of the other one too.
_SPLASH: Final = {"_fwd": (1, 1), "_dkv": (2, 2), "_dq": (2, 1)}
_SPLASH_NAME: Final = re.compile(r"splash_m[hq]a(_fwd|_dkv|_dq)")
_UNMASKED: Final = 0.5


def splash_flops(name: str, arrays: Sequence[tuple[int, ...]], results: int) -> int:
    """Count the operations of a kernel of splash attention, as if half of its mask were empty.

    Args:
        name: Of the kernel, or with words around it.
        arrays: The shapes of its arguments of floats: queries, keys, values, and others.
        results: How many it has.

    Returns:
        Operations of one run; 0 for another kernel.
    """
    match = _SPLASH_NAME.search(name)
    if match is None:
        return 0
    query, key, value = arrays[:3]
    of_query, of_value = _SPLASH[match[1]]
    if match[1] == "_dkv" and results == 3:
        of_query += 1
    width = of_query * query[-1] + of_value * value[-1]
    return int(2 * prod(query[:-1]) * key[-2] * width * _UNMASKED)
