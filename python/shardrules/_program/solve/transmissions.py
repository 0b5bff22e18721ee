"""`Transmission`: collectives of a step that are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import Literal, NamedTuple

from shardrules._base.text import record

CollectiveKind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"
]
Of = Literal["params", "gradients", "activations", "experts"]
Row = tuple[CollectiveKind, Iterable[str], Of, int, int]
"""(collective, axes, of, count, payload), as in `Transmission`."""


@record
class Transmission(NamedTuple):
    """Collectives of a step that are alike."""

    collective: CollectiveKind
    axes: tuple[str, ...]
    """The mesh axes over which it runs, in the mesh's order."""
    of: Of
    count: int  # type: ignore[assignment]
    """How many of them there are in a step, before the compiler combines any."""
    payload: int
    """Bytes of all of them on a device: the whole result of an all-gather, the operand of all
    others."""
    sent: int
    """Bytes that each device sends in a step by the ring algorithm: of n devices, (n - 1) / n of
    the payload, twice that for an all-reduce, and all of it for a collective-permute."""


def merged(rows: Iterable[Row], axis_sizes: Mapping[str, int]) -> tuple[Transmission, ...]:
    """Merge (collective, axes, purpose, count, payload) rows that are alike.

    Rows over a single device, or without bytes, are left out. Those of parameters come first, those
    that send most first of their own.
    """
    payloads: Counter[tuple[CollectiveKind, tuple[str, ...], Of]] = Counter()
    counts = payloads.copy()
    for collective, axes, purpose, count, payload in rows:
        names = frozenset(axes)
        group = tuple(axis for axis, size in axis_sizes.items() if axis in names and size > 1)
        if group and payload:
            payloads[collective, group, purpose] += payload
            counts[collective, group, purpose] += count
    total = []
    for (collective, group, purpose), payload in payloads.items():
        sent = _ring(collective, payload, prod(axis_sizes[axis] for axis in group))
        count = counts[collective, group, purpose]
        total.append(Transmission(collective, group, purpose, count, payload, sent))
    order = ("params", "gradients", "activations", "experts")
    return tuple(sorted(total, key=lambda row: (order.index(row.of), -row.sent, row.axes)))


def _ring(collective: CollectiveKind, payload: int, devices: int) -> int:
    if collective == "collective-permute":
        return payload
    rounds = 2 if collective == "all-reduce" else 1
    return -(-payload * rounds * (devices - 1) // devices)
