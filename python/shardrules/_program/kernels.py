"""Operations of Pallas kernels: by their own estimates, and of those that do not say how many."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any, Final

from shardrules._base.dtypes import is_inexact

KERNEL_EFFICIENCY: Final = 0.5
"""Share of the peak that Pallas kernels are assumed to reach."""
# JAX's splash attention estimates no cost. Products by its kernels, of the size of the queries and
# of that of the values; with three results, the backward kernel has those of the other one too.
_SPLASH: Final = {"_fwd": (1, 1), "_dkv": (2, 2), "_dq": (2, 1)}
_SPLASH_NAME: Final = re.compile(r"splash_m[hq]a(_fwd|_dkv|_dq)")
_UNMASKED: Final = 0.5


def primitive_name(eqn: Any) -> str:
    """Name what is not modelled: a kernel by its own name."""
    name = eqn.primitive.name
    kernel = eqn.params.get("name") or getattr(eqn.params.get("name_and_src_info"), "name", None)
    return f"{name} {kernel}" if isinstance(kernel, str) and kernel else str(name)


def kernel_flops(eqn: Any) -> int:
    """Count the operations of a Pallas kernel by its estimate, or those of splash attention."""
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return int(estimate.flops)
    arrays = [var.aval.shape for var in eqn.invars if is_inexact(var.aval.dtype)]
    return splash_flops(primitive_name(eqn), arrays, len(eqn.outvars))


def splash_flops(name: str, arrays: Sequence[tuple[int, ...]], results: int) -> int:
    """Count the operations of a kernel of splash attention, as if half of its mask were empty.

    The first arguments of floats are queries, keys and values; 0 of another kernel.
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
